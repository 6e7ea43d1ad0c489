"""What a walk through a step knows: of each unit, of each forward that backward comes back to; and what it writes down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flatshard._plan_actions import Action, Collective, Verb
from flatshard._plan_cost import FlatCost, UnitCost
from flatshard._plan_ledger import Ledger, Memory


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


class Books:
    """What happened so far in a step: memory, actions and collectives."""

    def __init__(self, units: Sequence[UnitCost], start: Memory, host: Memory) -> None:
        self.units = units
        self.states = [State(u) for u in units]
        self.device, self.host = Ledger(start), Ledger(host)
        self.actions: list[Action] = []
        self.collectives: list[Collective] = []
        self.phase = "forward"

    def _turn_to(self, unit: int) -> None:
        for ledger in (self.device, self.host):
            ledger.phase, ledger.unit = self.phase, self.units[unit].name

    def _gradient_ledger(self, flat: FlatCost) -> Ledger:
        return self.host if flat.offloaded else self.device

    def _forget_cast(self, number: int) -> None:
        if self.states[number].cast:
            self.states[number].cast = False
            for flat in self.units[number].flats:
                self.device.add("unsharded", -flat.cast_nbytes)

    def _issue(self, action: Action) -> None:
        self.actions.append(action)
        self.device.now = self.host.now = len(self.actions)

    def _collect(self, kind: str, unit: int, nbytes: int, ranks: int, group: str, pending: list[int]) -> None:
        collective = Collective(kind, self.units[unit].fqn, self.phase, nbytes, ranks, group)
        after = pending[-1] if kind == "all-reduce" and pending else -1
        self._issue(Action(Verb.COLLECTIVE, unit, self.phase, collective=collective, after=after))
        pending.append(len(self.collectives))
        self.collectives.append(collective)
