"""The records of a plan: collectives of a step, and memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from flatshard.debug._describe import counted


class Ranks(NamedTuple):
    """The number of replicas of each shard, and the number of ranks that parameters are sharded over.

    Example::

        plan = flatshard.plan_step(model, policy={Block}, world_size=8)
        print(plan.world_size.replicas, plan.world_size.shards, plan.world_size.total)
    """

    replicas: int  # ranks with the same shard
    shards: int  # ranks that parameters are sharded over

    @property
    def total(self) -> int:
        return self.replicas * self.shards

    def __str__(self) -> str:
        return counted(self.shards, "rank") if self.replicas == 1 else f"{self.replicas:,} x {self.shards:,} ranks"


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """A collective of a step.

    Example::

        plan = flatshard.plan_step(model, policy={Block}, world_size=8)
        gathered = sum(c.nbytes for c in plan.collectives if c.kind == "all-gather")
    """

    kind: str  # "all-gather", "reduce-scatter" or "all-reduce"; of a DTensor also "all-to-all"
    unit: str  # FQN
    phase: str  # "forward" or "backward"
    nbytes: int  # of an all-gather's output, a reduce-scatter's input, an all-reduce's tensor
    ranks: int  # of its group
    group: str
    """Name: "shards", "inner" (the smaller group that a unit reshards to, or an axis), "outer" or "replicas".

    For parameters that ``shard_mesh_fn`` puts on other ranks, and for DTensors, the name of a mesh's dimension, or "8 ranks".
    """

    @property
    def sent_nbytes(self) -> int:
        """Bytes that a rank sends by a ring algorithm, rounded up."""
        rounds = 2 if self.kind == "all-reduce" else 1
        return -(-rounds * self.nbytes * (self.ranks - 1) // self.ranks)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank, by category.

    Example::

        plan = flatshard.plan_step(model, policy={Block}, world_size=8)
        memory = plan.total_peak.memory
        print(memory.shards, memory.gradients, memory.unsharded, memory.total)
    """

    shards: int = 0  # this rank's part of the parameters, with padding
    gradients: int = 0  # `.grad`: this rank's part, with padding, from the reduction to `zero_grad`
    optimizer: int = 0  # the optimizer's state
    unsharded: int = 0  # gathered parameters until they are freed, casts of shards, and static buffers
    reductions: int = 0  # inputs and outputs of gradient reductions
    arriving: int = 0  # gradients that autograd has computed, until they are copied into a reduction's input
    activations: int = 0  # inputs, saved tensors and temporary results of modules, or the argument `activations`
    others: int = 0  # buffers, ignored parameters and example inputs

    @property
    def total(self) -> int:
        return self.held + self.activations + self.others

    @property
    def held(self) -> int:
        """Bytes that flatshard and the optimizer allocate: all but ``activations`` and ``others``."""
        return self.shards + self.gradients + self.optimizer + self.unsharded + self.reductions + self.arriving


MemoryPair = tuple[Memory, Memory]
"""The memory on the device, and on the host."""

CATEGORIES = tuple(f.name for f in fields(Memory))


class Sample(NamedTuple):
    """The memory at one time of a step.

    Example::

        plan = flatshard.plan_step(model, policy={Block}, world_size=8)
        for sample in plan.samples:
            print(sample.phase, sample.unit, sample.device.total)
    """

    phase: str  # "forward", "backward" or "optimizer"
    unit: str  # that runs then
    device: Memory  # on the device
    host: Memory  # in host memory, with ``cpu_offload``


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak of memory, and its categories.

    Example::

        plan = flatshard.plan_step(model, policy={Block}, world_size=8)
        print(plan.peak.nbytes, plan.peak.phase, plan.peak.unit)
    """

    nbytes: int  # at the peak
    memory: Memory  # by category
    phase: str  # "forward", "backward" or "optimizer"
    unit: str  # the FQN of the unit that runs then; "" is the root
