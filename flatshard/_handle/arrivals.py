"""What of a unit's gradients is still to come in a backward."""

from __future__ import annotations


class Arrivals:
    """All that autograd's hooks look at, for most gradients: they run for each parameter in each step."""

    __slots__ = ("finish_at", "pending", "task")

    def __init__(self) -> None:
        # The graph task (run of backward) whose gradients stay where autograd puts them, until all have come.
        self.task = -1
        self.pending = 0  # gradients still to come
        self.finish_at = 1  # with this many to come, the next one ends the reduction of the unit before

    def expect(self, count: int, waits_early: bool) -> None:
        """``count`` more will come. ``waits_early``: see ``Backward``, [Note: Reductions in flight]."""
        self.pending += count
        self.finish_at = finish_at(self.pending, waits_early)


def finish_at(pending: int, waits_early: bool) -> int:
    """See ``Arrivals``, when ``pending`` gradients are to come."""
    return pending - max(0, pending // 6 - 1) if waits_early else 1
