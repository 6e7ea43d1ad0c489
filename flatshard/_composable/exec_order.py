"""Records the order in which units run forward, to know which one to gather next.

The order is a hint, not a rule: if it changes, one all-gather comes too early or too late, and the next pass has the new
order. Backward's order needs no such record: see ``ForwardRecord.previous``.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn


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

    def are_awaited(self, modules: Collection[nn.Module]) -> bool:
        """Return whether some of ``modules`` have run in this pass and others have not. It starts anew when all have run."""
        awaited = set(modules)
        for module in self.current:
            awaited.discard(module)
            awaited = awaited or set(modules)
        return len(awaited) < len(modules)
