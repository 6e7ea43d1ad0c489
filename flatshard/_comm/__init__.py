"""Collectives: the interface, the backends, wrappers around them, and the monitor that detects ranks out of step."""
