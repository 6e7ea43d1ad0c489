"""What a plan records: what takes time in a step, and what is in memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from flatshard.debug._describe import counted


class Ranks(NamedTuple):
    """The number of replicas of each shard, and the number of ranks that parameters are sharded over."""

    replicas: int
    shards: int

    @property
    def total(self) -> int:
        return self.replicas * self.shards

    def __str__(self) -> str:
        return counted(self.shards, "rank") if self.replicas == 1 else f"{self.replicas:,} x {self.shards:,} ranks"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that takes time: computing, waiting, or a collective."""

    kind: str  # "compute", "wait", or the kind of collective
    unit: str  # FQN
    phase: str  # "forward" or "backward"
    start: float  # seconds since the beginning of the step
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Collective(Span):
    """One collective of a step: an "all-gather", a "reduce-scatter" or an "all-reduce"."""

    nbytes: int  # of an all-gather's output, a reduce-scatter's input, an all-reduce's tensor
    ranks: int
    group: str  # "shards", "inner" (the smaller group that a unit reshards to) or "replicas"

    @property
    def sent_nbytes(self) -> int:
        """Bytes that a rank sends by a ring algorithm, rounded up."""
        rounds = 2 if self.kind == "all-reduce" else 1
        return -(-rounds * self.nbytes * (self.ranks - 1) // self.ranks)


@dataclass(frozen=True)
class Timeline:
    """What runs at which time of a step."""

    spans: tuple[Span, ...]
    step_seconds: float

    @property
    def compute_seconds(self) -> float:
        return sum(s.seconds for s in self.spans if s.kind == "compute")

    @property
    def communication_seconds(self) -> float:
        """The sum of the times of all collectives."""
        return sum(s.seconds for s in self.spans if isinstance(s, Collective))

    @property
    def exposed_seconds(self) -> float:
        """The time in which nothing is computed, because computing waits for communication."""
        return sum(s.seconds for s in self.spans if s.kind == "wait")

    @property
    def hidden_share(self) -> float | None:
        """The fraction of communication that runs during computing. None: no communication, or computing is not known."""
        if not self.communication_seconds or not self.compute_seconds:
            return None
        return max(0.0, 1 - self.exposed_seconds / self.communication_seconds)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank, by category."""

    shards: int = 0  # this rank's part of the parameters, with padding
    gradients: int = 0  # `.grad`: this rank's part, with padding, from the reduction to `zero_grad`
    optimizer: int = 0  # the optimizer's state
    unsharded: int = 0  # gathered parameters until they are freed, casts of shards, and static buffers
    reductions: int = 0  # inputs and outputs of gradient reductions
    arriving: int = 0  # gradients that autograd has computed, until they are copied into a reduction's input
    activations: int = 0  # inputs, saved tensors and temporary results of modules, or the argument `activations`
    others: int = 0  # buffers and ignored parameters

    @property
    def total(self) -> int:
        return self.held + self.activations + self.others

    @property
    def held(self) -> int:
        """Bytes that flatshard and the optimizer allocate: all but ``activations`` and ``others``."""
        return self.shards + self.gradients + self.optimizer + self.unsharded + self.reductions + self.arriving


CATEGORIES = tuple(f.name for f in fields(Memory))


class Sample(NamedTuple):
    """What is in memory at one time of a step."""

    seconds: float
    phase: str  # "forward", "backward" or "optimizer"
    unit: str  # that runs then
    device: Memory
    host: Memory


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that are in memory at the same time, and their categories."""

    nbytes: int
    memory: Memory
    phase: str
    unit: str
