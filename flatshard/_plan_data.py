"""What a plan says, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from flatshard._inspect import FlatDescription
from flatshard._plan_actions import Collective
from flatshard._plan_ledger import Memory, Peak
from flatshard._plan_time import Timeline


@dataclass(frozen=True)
class UnitPlan:
    """One unit. Bytes are those of one rank."""

    fqn: str
    module: str  # class name
    strategy: str
    flats: tuple[FlatDescription, ...]  # as in ``describe``
    reshard_after_forward: bool | int | None
    shard_nbytes: int
    gradient_nbytes: int  # of `.grad`
    optimizer_nbytes: int
    unsharded_nbytes: int
    reduction_nbytes: int  # the input and the output of its reduction
    collectives: int  # in a step
    sent_nbytes: int  # in a step: see ``Collective.sent_nbytes``
    gather_seconds: float  # of one all-gather, modelled

    @property
    def numel(self) -> int:
        return sum(f.numel for f in self.flats)

    @property
    def padding(self) -> int:
        """Elements over all ranks."""
        return sum(f.padded_numel - f.numel for f in self.flats)


@dataclass(frozen=True)
class StrategyPlan:
    """A strategy beside the others."""

    strategy: str
    world_size: tuple[int, int]  # (replicas, ranks to shard over)
    between_steps_nbytes: int
    peak_nbytes: int
    collectives: int
    sent_nbytes: int
    step_seconds: float
    hidden_share: float | None


@dataclass(frozen=True)
class Numbers:
    """What a plan holds."""

    module: str  # class name
    strategy: str
    world_size: tuple[int, int]  # (replicas, ranks to shard over)
    device: str
    units: tuple[UnitPlan, ...]  # in module order
    between_steps: Memory
    """What is held between steps, gradients dropped."""
    host: Memory
    """The same off the device, with ``cpu_offload``."""
    peak: Peak
    """The most that flatshard and the optimizer hold during a step: without activations, buffers and ignored parameters."""
    total_peak: Peak
    """The most of everything known."""
    host_peak: Peak
    collectives: tuple[Collective, ...]
    """Of a step, in the order in which they are issued."""
    timeline: Timeline
    memory: tuple[tuple[float, Memory], ...]
    """(seconds, what is held from then on)."""
    strategies: tuple[StrategyPlan, ...]
    """This plan's strategy and others, side by side."""
    rank_numels: tuple[int, int]
    """Elements of parameters on the emptiest and on the fullest rank, without padding."""
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def numel(self) -> int:
        return sum(u.numel for u in self.units)

    @property
    def sent_nbytes(self) -> int:
        """Bytes that a rank sends in a step by ring algorithms."""
        return sum(c.sent_nbytes for c in self.collectives)

    @property
    def step_seconds(self) -> float:
        """Modelled, without the optimizer's step."""
        return self.timeline.step_seconds

    @property
    def hidden_share(self) -> float | None:
        """The part of communication that runs while something computes. None: no communication, or computing unknown."""
        return self.timeline.hidden_share
