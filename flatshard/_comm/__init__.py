"""Collectives: the interface, the backends, what wraps them, and what notices when ranks differ."""
