"""What the host issues in a step, in order: what a walk through a step yields."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from flatshard._plan_ledger import Ledger


class Verb(Enum):
    """What the host issues, in order."""

    COMPUTE = "compute"
    COLLECTIVE = "collective"
    WAIT = "wait"
    FREE = "free"
    START = "start"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a step."""

    kind: str  # "all-gather", "reduce-scatter" or "all-reduce"
    unit: str  # FQN
    phase: str  # "forward" or "backward"
    nbytes: int  # of the whole: an all-gather's output, a reduce-scatter's input, an all-reduce's tensor
    ranks: int
    group: str  # "shards", "inner" (the ranks that a unit reshards to) or "replicas"

    @property
    def sent_nbytes(self) -> int:
        """Bytes that a rank sends by a ring algorithm, rounded up."""
        rounds = 2 if self.kind == "all-reduce" else 1
        return -(-rounds * self.nbytes * (self.ranks - 1) // self.ranks)


@dataclass(frozen=True, slots=True)
class Action:
    """Something that the host issues. ``after``: the collective, by number, that this waits for."""

    verb: Verb
    unit: int
    phase: str
    flops: int = 0
    collective: Collective | None = None
    after: int = -1


@dataclass(frozen=True)
class WalkedStep:
    """What came of it."""

    actions: tuple[Action, ...]
    collectives: tuple[Collective, ...]  # in the order in which they are issued on an accelerator
    device: Ledger
    host: Ledger  # of offloaded shards, gradients and state
