"""The order in which units run forward, and from it the next one to gather.

A hint, never a rule: where the order changes, one all-gather comes too early or too late, and the next pass knows the
new order. Backward's order needs no record: see ``Step.previous``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

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


class ChosenUnits(Generic[T]):
    """Units to gather ahead of another, chosen by the user in place of the recorded order.

    Held weakly: another model may be among them. A deep copy names the copies of those that were copied with it. They may
    not be made yet, and to make them from here would recurse as deep as the chain of units is long; so it looks at first use.
    """

    __slots__ = ("_copies", "_refs")

    def __init__(self, units: Sequence[T]) -> None:
        self._refs = [weakref.ref(unit) for unit in units]
        self._copies: dict[weakref.ref[T], T] | None = None

    def __iter__(self) -> Iterator[T]:
        if self._copies is not None:
            copies, self._copies = self._copies, None
            self._refs = [weakref.ref(copies[ref]) if ref in copies else ref for ref in self._refs]
        return (unit for ref in self._refs if (unit := ref()) is not None)

    @staticmethod
    def note_copy(unit: T, copied: T, memo: dict[int, Any]) -> None:
        """``copied`` is the copy of ``unit`` in the deep copy under way."""
        memo.setdefault(id(ChosenUnits), {})[weakref.ref(unit)] = copied

    def __deepcopy__(self, memo: dict[int, Any]) -> ChosenUnits[T]:
        result = ChosenUnits(list(self))
        result._copies = memo.setdefault(id(ChosenUnits), {})
        return result
