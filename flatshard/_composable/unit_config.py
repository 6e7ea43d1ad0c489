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

    def stays_for_backward(self, outermost: bool) -> bool:
        """Return whether the parameters of a unit, perhaps the outermost, stay unsharded from a forward to its backward."""
        if self.reshard_after_forward is None:
            return outermost or self.strategy.placements.until >= Until.BACKWARD
        return not self.reshard_after_forward
