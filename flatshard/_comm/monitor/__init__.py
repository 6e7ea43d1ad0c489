"""Detects ranks that issue different collectives: compares before a collective, and watches the ranks that wait."""
