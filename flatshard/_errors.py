"""Errors of users apart from errors of ours.

A user's mistake is a ``ValueError``, ``TypeError`` or ``RuntimeError`` whose message says *who* (the FQN), *what*
(actual against expected) and the *cure* (the call that fixes it). A bug of ours is an :class:`InternalError`.
"""

from __future__ import annotations

from collections.abc import Iterable


class InternalError(AssertionError):
    """A state that flatshard believed impossible. Nothing was changed by the call that raised it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. This is a bug in flatshard, not in your code: please report it with this message.")


def name_list(names: Iterable[str], limit: int = 8) -> str:
    """``'a', 'b', ... (3 more)``: names in an error message, never a wall of text."""
    names = list(names)
    shown = ", ".join(repr(name) if name else "the root module" for name in names[:limit])
    return shown if len(names) <= limit else f"{shown}, ... ({len(names) - limit} more)"
