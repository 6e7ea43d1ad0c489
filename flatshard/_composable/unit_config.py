"""The options of one unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard._base.config import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, Until
from flatshard._comm.collectives import CollectivesFactory
from flatshard._composable.claims import KEPT, Claim
from flatshard.layouts import LayoutChoice

MeshChoice = Callable[[str, nn.Parameter], DeviceMesh | None] | None
"""A function that chooses the mesh of a parameter, or None for the mesh of the call."""


@dataclass(frozen=True, slots=True)
class UnitConfig:
    """The options of one unit."""

    strategy: ShardingStrategy
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    collectives: CollectivesFactory | None = None  # None: the backend's own
    # None: as the strategy says, but the outermost unit keeps its parameters. An int means True, and a feature reads it.
    reshard_after_forward: bool | int | None = None
    prefetch_limit_bytes: int | None = None  # for unsharded parameters that were gathered ahead and are not in use yet
    layout: LayoutChoice = None
    static_buffers: bool = False  # [Note: Static buffers]
    shard_mesh_fn: MeshChoice = None
    recompute: bool = False  # a feature reads it

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The claims that a unit has as long as it exists."""
        return (KEPT,) if self.strategy.placements.until is Until.CHANGE else ()

    @property
    def subgroup_size(self) -> int | None:
        """The number of ranks to reshard to after forward, or None if it is all of them, or none."""
        value = self.reshard_after_forward
        return None if isinstance(value, bool) else value

    @property
    def keeps_shards(self) -> bool:
        """Whether a unit is gathered again from other shards than those of all ranks, which a feature keeps."""
        return self.mixed_precision.keep_cast_shard or self.strategy.joins_axes or self.subgroup_size is not None

    @property
    def casts(self) -> bool:
        """Whether the inputs, outputs or buffers of a unit are cast, which a feature does."""
        policy = self.mixed_precision
        return (policy.param_dtype or policy.output_dtype or policy.buffer_dtype) is not None

    def stays_for_backward(self, outermost: bool) -> bool:
        """Return whether the parameters of a unit, perhaps the outermost, stay unsharded from a forward to its backward."""
        if self.reshard_after_forward is None:
            return outermost or self.strategy.placements.until >= Until.BACKWARD
        return not self.reshard_after_forward
