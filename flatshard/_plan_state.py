"""What a walk through a step knows of each unit, and of each forward that backward comes back to."""

from __future__ import annotations

from dataclasses import dataclass

from flatshard._plan_cost import UnitCost


class State:
    """Of one unit, while the step is walked: what ``Unit`` and ``Lifetime`` know."""

    def __init__(self, unit: UnitCost) -> None:
        self.sharded = True
        self.holds = 0
        self.gathers: list[int] = []  # collectives to wait for
        self.inner = False  # holds an inner shard
        self.cast = False
        self.open_task = False
        self.finished = False
        self.expected = 0
        self.pending = 0
        self.finish_at = 1
        self.active_steps = 0
        self.has_left = False
        self.last_step = -1
        self.held = False  # gradients of an earlier backward
        self.reductions: list[int] = []
        self.filled = [False] * len(unit.flats)
        self.waiting = [0] * len(unit.flats)  # bytes of gradients that wait for all to come
        self.batching = [False] * len(unit.flats)
        self.has_grad = [False] * len(unit.flats)
        self.local_grads: set[tuple[int, int]] = set()


@dataclass(slots=True)
class StepRecord:
    """As ``state.Step``."""

    unit: int
    previous: int
    outer: list[int]
