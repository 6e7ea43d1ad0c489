"""The ranks of a unit: over which its parameters are sharded, and over which they are replicated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from flatshard._base.config import Placement
from flatshard._comm.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from flatshard._comm.composite_groups import ExpertRanks
from flatshard._comm.progress import Label, Progress, digest, make_label
from flatshard._comm.rank_group import RankGroup
from flatshard._comm.runtime import Runtime
from flatshard._handle.layout import Groups, PlannedFlat
from flatshard._handle.tensors.aggregate import checked_all_reduce
from flatshard._handle.unsharded import Pool

VERBS = {
    (Placement.SHARDED, Placement.REPLICATED): ALL_GATHER,
    (Placement.REPLICATED, Placement.REPLICATED): "cast",
    (Placement.SUMMAND, Placement.SHARDED): REDUCE_SCATTER,
    (Placement.SUMMAND, Placement.REPLICATED): ALL_REDUCE,
}
"""The collective that changes one placement over an axis into another.

[Note: From one placement to another]
These are names for events, errors and profilers. A gather goes from the placement of the shards to
replicated. A reduction goes from summands to the placement of the shards, over the inner axis and then over the outer one.
Each row is issued in one place only: gathers in ``FlatParam.gather``, reductions in ``Reduction``.
"""

Runtimes = Mapping[Groups | None, tuple[Runtime, Runtime | None]]
"""The runtimes of the groups that parameters are sharded over, and of their replicas. The call's own are under None."""


@dataclass(slots=True)
class Averaging:
    """The user's settings for averaging the gradients of a unit (``configure``)."""

    size: int  # the number of ranks that have the unit
    divide_factor: float | None = None  # the sum over the ranks is divided by this, or by `size` if None
    reduces_replicas: bool = True  # otherwise reduction.py, [Note: Accumulating within the shard group]


@dataclass(frozen=True, slots=True, eq=False)
class UnitRanks:
    """The ranks that have parameters of a unit: each of ``shards`` has another shard, each of ``replicas`` the same one.

    A unit has one object, and one more for each other mesh that parameters of it are on (``shard_mesh_fn``). ``FULL_SHARD``
    has no replicas, ``NO_SHARD`` no shards, a hybrid strategy has both; ``HYBRID_FULL_SHARD`` shards over all ranks. A group
    of one rank counts as none.
    """

    runtime: Runtime  # issues the collectives: `shards` or, if nothing is sharded, `replicas`
    shards: Runtime | None  # None if this rank holds full parameters
    replicas: Runtime | None  # None if no other rank holds the same shard
    norms: (
        RankGroup | None
    )  # the ranks over which norms of plain gradients are taken; None if this rank has all of them
    pool: Pool | None  # allocates memory that collectives read and write. unsharded.py, [Note: Static buffers]
    size: int  # the number of ranks that have the parameters
    label: Label  # the unit, for collectives and errors
    averaging: Averaging  # the unit's
    # Names of collectives: [Note: From one placement to another]. For hybrid sharding, of the first reduction.
    gather_verb: str
    reduce_verb: str

    @classmethod
    def of(
        cls,
        fqn: str,
        flats: Sequence[PlannedFlat],
        shards: Runtime | None,
        replicas: Runtime | None,
        pool: Pool | None,
        unit: UnitRanks | None = None,
    ) -> UnitRanks:
        """Make the object for the ranks of these process groups, of which one may be None.

        Args:
            fqn: the unit's.
            flats: the flat parameters that these ranks have.
            shards: the ranks to shard over, of any number.
            replicas: the ranks with the same shard, of any number.
            pool: see ``UnitRanks``.
            unit: the ranks of the rest of the unit, if these are others.
        """
        runtime = shards or replicas
        assert runtime is not None
        norms = None if unit is None else ExpertRanks.within(runtime, unit.runtime)
        shards, replicas = (None if each is None or each.world_size == 1 else each for each in (shards, replicas))
        size = math.prod([each.world_size for each in (shards, replicas) if each is not None])
        averaging = Averaging(size) if unit is None else unit.averaging
        label = make_label(_progress(runtime, replicas), fqn, digest(_identity(flats)))
        placement = Placement.REPLICATED if shards is None else Placement.SHARDED  # over the inner axis
        verbs = VERBS[placement, Placement.REPLICATED], VERBS[Placement.SUMMAND, placement]
        return cls(runtime, shards, replicas, norms or shards, pool, size, label, averaging, *verbs)

    def copied(self, averaging: Averaging) -> UnitRanks:
        """Return the ranks for a copy of the unit, which has ``averaging``."""
        label = make_label(_progress(self.runtime, self.replicas), self.label.unit, self.label.identity)
        return replace(self, label=label, averaging=averaging)

    @property
    def factor(self) -> float:
        """The number that turns an average over these ranks into the average of the unit."""
        return self.size / self.divisor

    @property
    def divisor(self) -> float:
        """The number by which the sum of the ranks' gradients is divided."""
        return self.averaging.divide_factor or self.averaging.size

    def average_now(self, numbers: torch.Tensor, question: str) -> torch.Tensor:
        """Average 1-D float64 ``numbers`` over the ranks as gradients are. ``question``: see ``checked_all_reduce``."""
        for runtime in (self.shards, self.replicas):
            if runtime is not None:
                numbers = checked_all_reduce(numbers, "sum", runtime, question)
        return numbers / self.divisor

    @property
    def holds_all(self) -> bool:
        """Whether the shard is all of the flat parameter: ``NO_SHARD``, or a single rank to shard over."""
        return self.shards is None

    @property
    def rank(self) -> int:
        """The number of this rank's shard."""
        return 0 if self.shards is None else self.shards.rank

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank is the first of those that have its shard."""
        return self.replicas is None or self.replicas.rank == 0

    @property
    def is_rank0(self) -> bool:
        """Whether this rank is the first of all ranks that have the unit."""
        return self.rank == 0 and self.is_first_replica


def _identity(flats: Sequence[PlannedFlat]) -> list[object]:
    shapes = [(p.fqn, tuple(p.param.shape)) for flat in flats for p in flat.params]
    starts = [(f.layout.shard_numel, [i.start for i in f.layout.params]) for f in flats]
    return [*shapes, starts]


def _progress(runtime: Runtime, replicas: Runtime | None) -> Progress | None:
    return runtime.progress or (None if replicas is None else replicas.progress)
