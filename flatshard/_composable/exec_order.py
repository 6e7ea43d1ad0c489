"""The order in which units run forward, and from it the next one to gather.

A hint, never a rule: where the order changes, one all-gather comes too early or too late, and the next pass knows the
new order. Backward's order needs no record: see ``Step.previous``.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ForwardOrder(Generic[T]):
    """The units of the passes that start at one outermost unit, as the last of them used the units."""

    __slots__ = ("_current", "_previous")

    def __init__(self) -> None:
        self._previous: list[T] = []
        self._current: list[T] = []

    def start(self) -> None:
        """A new pass begins."""
        self._previous, self._current = self._current, self._previous
        self._current.clear()

    def advance(self, unit: T) -> T | None:
        """``unit`` runs now: the one that followed it in the last pass, if any."""
        previous, at = self._previous, len(self._current)
        self._current.append(unit)
        if at >= len(previous) or previous[at] is not unit:
            if unit not in previous:
                return None
            at = previous.index(unit)
        return previous[at + 1] if at + 1 < len(previous) else None

    def since(self, unit: T) -> list[T]:
        """What has run after ``unit`` did last, in this pass."""
        current = self._current
        at = len(current)
        while at and current[at - 1] is not unit:
            at -= 1
        return current[at:] if at else []
