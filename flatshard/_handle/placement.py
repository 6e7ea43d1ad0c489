"""Over which ranks one unit's parameters are sharded, and over which they are replicated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flatshard._handle.planned import Groups
from flatshard._handle.tensors.experts import ExpertRuntime
from flatshard._runtime import Runtime

Runtimes = Mapping[Groups | None, tuple[Runtime, Runtime | None]]
"""The runtimes of the groups that parameters are sharded over, and of their replicas; those of the call under None."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Each rank of ``shards`` holds another part of the parameters, and each rank of ``replicas`` the same part.

    ``FULL_SHARD`` has no replicas, ``NO_SHARD`` no shards, a hybrid strategy has both. A group of one rank counts as none.
    """

    runtime: Runtime  # issues the collectives: that of the shards or, where nothing is sharded, of the replicas
    shards: Runtime | None  # None: this rank holds whole parameters
    replicas: Runtime | None  # None: no other rank holds the same part
    norms: Runtime | None  # the ranks over which norms of plain gradients are taken; None: this rank has the whole

    @classmethod
    def of(cls, shards: Runtime | None, replicas: Runtime | None, unit: Runtime | None = None) -> Placement:
        """The placement over these process groups, of any size: at least one. ``unit``: over which the rest of the unit is
        sharded, if these are other ranks.
        """
        runtime = shards or replicas
        assert runtime is not None
        shards, replicas = (None if each is None or each.world_size == 1 else each for each in (shards, replicas))
        return cls(runtime, shards, replicas, (unit and ExpertRuntime.within(runtime, unit)) or shards)

    @property
    def rank(self) -> int:
        """The number of this rank's shard."""
        return 0 if self.shards is None else self.shards.rank

    @property
    def ranks(self) -> int:
        """How many ranks have the unit."""
        return (1 if self.shards is None else self.shards.world_size) * (
            1 if self.replicas is None else self.replicas.world_size
        )

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank's shard counts where one copy of each is wanted."""
        return self.replicas is None or self.replicas.rank == 0

    @property
    def is_rank0(self) -> bool:
        """Whether this rank is the first of all ranks that have the unit."""
        return self.rank == 0 and self.is_first_replica
