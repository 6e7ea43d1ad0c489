"""Counts the gradients of one unit that have yet to come in a backward."""

from __future__ import annotations


class Arrivals:
    """All the state that autograd hooks read for most gradients. The hooks run for each parameter in each step."""

    __slots__ = ("finish_at", "pending", "task")

    def __init__(self) -> None:
        # The graph task (a run of the autograd engine) whose gradients stay where autograd puts them until all have come.
        self.task = -1
        self.pending = 0  # gradients still to come
        self.finish_at = 1  # if this many are pending, the next gradient ends the reduction of the previous unit

    def expect(self, count: int, waits_early: bool) -> None:
        """Expect ``count`` more gradients. ``waits_early``: see ``Backward``, [Note: Reductions in flight]."""
        self.pending += count
        self.finish_at = finish_at(self.pending, waits_early)


def finish_at(pending: int, waits_early: bool) -> int:
    """The value of ``Arrivals.finish_at`` if ``pending`` gradients are still to come."""
    return pending - max(0, pending // 6 - 1) if waits_early else 1
