"""Inner shards: what a unit keeps from forward to backward with an int for ``reshard_after_forward``.

After forward the unit is resharded to a smaller group. Each of its ``k`` ranks keeps one of ``k`` equal parts of the
unsharded buffer, in the compute dtype. Backward's all-gather runs among these ranks only, which are usually those of one
node. On an accelerator this is a different communicator than that of the whole group's gathers, but the same stream, so the
order is the same on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from flatshard._comm.collectives import CollectivesFactory, Pending
from flatshard._composable.extensions import Extension
from flatshard._composable.features.kept_shards import KeptCasts, KeptShards
from flatshard._composable.features.subgroups import subgroup
from flatshard._composable.state import Unit
from flatshard._composable.unit_config import UnitConfig
from flatshard._handle.flat_param import FlatParam
from flatshard._runtime import Runtime

# For each runtime of all ranks that a unit is sharded over: those of its subgroups, by size.
_subgroups: weakref.WeakKeyDictionary[Runtime, dict[int, Runtime]] = weakref.WeakKeyDictionary()


class InnerShards(Extension):
    """Has units keep shards, as ``reshard_after_forward`` (a number of ranks) and ``keep_cast_shard`` say."""

    def prepare(self, module: nn.Module, configs: Collection[UnitConfig], runtime: Runtime) -> None:
        for size in sizes(configs):
            split(runtime, size)

    def attach(self, unit: Unit, modules: list[nn.Module]) -> None:
        set_source(unit)


def sizes(configs: Iterable[UnitConfig]) -> list[int]:
    """The numbers of ranks that units reshard to, if neither 1 nor all. Ascending."""
    values = [config.reshard_after_forward for config in configs]
    return sorted({value for value in values if value is not None and not isinstance(value, bool)})


def split(runtime: Runtime, size: int) -> None:
    """Create the groups of ``size`` consecutive ranks. All ranks of the world must call it together: see ``subgroup``."""
    add_subgroup(runtime, Runtime.of(subgroup(runtime.group, size, runtime.device), runtime.device))


def add_subgroup(runtime: Runtime, inner: Runtime) -> None:
    """Use ``inner``, of consecutive ranks of ``runtime`` that include this rank, for units that reshard to as many."""
    known = _subgroups.setdefault(runtime, {})
    if inner.world_size not in known:
        known[inner.world_size] = inner.beside(runtime)


def check_one_mesh(size: bool | int | None, flats: Iterable[FlatParam]) -> None:
    """Raise if ``flats`` are sharded over different ranks, and ``size`` is a number of ranks to reshard to."""
    if size is not None and not isinstance(size, bool) and len({flat.placement for flat in flats}) > 1:
        raise ValueError(
            f"reshard_after_forward={size} is for one group of ranks, and shard_mesh_fn has sharded some of its parameters "
            "over others: pass True or False"
        )


def set_source(unit: Unit) -> None:
    """Have ``unit`` do as its config says, from its next forward on. Call ``split`` first."""
    unit.handle.source = KeptCasts() if unit.config.mixed_precision.keep_cast_shard else None
    for size in sizes([unit.config]):
        inner = _subgroups[unit.context.runtime][size]
        unit.handle.source = FromInnerShards(_exact(inner, unit.config.collectives))


def _exact(inner: Runtime, factory: CollectivesFactory | None) -> Runtime:
    """``inner`` with collectives that deliver values bit for bit: they are gathered for the second time.

    Exception: collectives with ``everywhere`` (``benchmarks/no_communication.py`` leaves out all communication).
    """
    made = inner.using(factory)
    return made if getattr(made.collectives, "everywhere", False) else made.exact


class FromInnerShards(KeptShards):
    """The inner shards of one unit."""

    def __init__(self, runtime: Runtime) -> None:
        """``runtime``: of the smaller group."""
        super().__init__()
        self.runtime = runtime

    def __deepcopy__(self, memo: dict[int, Any]) -> FromInnerShards:
        return FromInnerShards(self.runtime)

    def part(self, flat: FlatParam) -> torch.Tensor:
        """This rank's part of the unsharded buffer, in the dtype that is sent."""
        return flat.unsharded.wire.view(self.runtime.world_size, -1)[self.runtime.rank]

    def verb(self, flat: FlatParam) -> str:
        return f"all-gather over {self.runtime.world_size}"

    def gather(self, flat: FlatParam, kept: torch.Tensor | None) -> Pending:
        assert kept is not None
        flat.unsharded.allocate(None)
        own = self.part(flat).copy_(kept)
        return self.runtime.all_gather(flat.unsharded.wire, own, flat.placement.label, again=True)
