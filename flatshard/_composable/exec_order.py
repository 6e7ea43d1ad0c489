"""Records the order in which units run forward, to know which one to gather next.

The order is a hint, not a rule: if it changes, one all-gather comes too early or too late, and the next pass has the new
order. Backward's order needs no such record: see ``Step.previous``.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Generic, TypeVar

from torch import nn

T = TypeVar("T")


class ForwardOrder:
    """The modules of units that ran in the current and in the last pass of one outermost unit, in order."""

    __slots__ = ("_previous", "current")

    def __init__(self) -> None:
        self._previous: list[nn.Module] = []
        self.current: list[nn.Module] = []

    def start(self) -> None:
        """Begin a new pass."""
        self._previous, self.current = self.current, self._previous
        self.current.clear()

    def advance(self, module: nn.Module) -> nn.Module | None:
        """Record that ``module`` runs now. Returns the module that followed it in the last pass, or None."""
        previous, at = self._previous, len(self.current)
        self.current.append(module)
        if at >= len(previous) or previous[at] is not module:
            if module not in previous:
                return None
            at = previous.index(module)
        return previous[at + 1] if at + 1 < len(previous) else None

    def since(self, module: nn.Module) -> list[nn.Module]:
        """The modules that ran in this pass since ``module`` last started. At the end of its forward: those inside it."""
        current = self.current
        at = len(current)
        while at and current[at - 1] is not module:
            at -= 1
        return current[at:] if at else []

    def are_awaited(self, modules: Collection[nn.Module]) -> bool:
        """Whether some of ``modules`` have run in this pass, and others have yet to run. It starts anew when all have run."""
        awaited = set(modules)
        for module in self.current:
            awaited.discard(module)
            awaited = awaited or set(modules)
        return len(awaited) < len(modules)


class ChosenUnits(Generic[T]):
    """Units to gather ahead while another one computes, chosen by the user instead of the recorded order.

    The references are weak: units of another model may be among them. A deep copy refers to the copies of those units that
    are copied with it. These copies may not exist yet, and to copy them here would recurse as deep as the chain of units is
    long. So they are looked up at the first use.
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
        """Record in ``memo`` that ``copied`` is the deep copy of ``unit``."""
        memo.setdefault(id(ChosenUnits), {})[weakref.ref(unit)] = copied

    def __deepcopy__(self, memo: dict[int, Any]) -> ChosenUnits[T]:
        result = ChosenUnits(list(self))
        result._copies = memo.setdefault(id(ChosenUnits), {})
        return result
