"""The groups of ranks in a plan: of the call, of parameters on other ranks (``shard_mesh_fn``), and of DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard._base.config import ShardingStrategy
from flatshard._composable.construct.groups import check_mesh_choice
from flatshard._composable.construct.partition import PlannedUnit
from flatshard._handle.adapters.tensor_parallel import is_dtensor
from flatshard.planning._records import Ranks

RanksChoice = Callable[[str, nn.Parameter], DeviceMesh | int | tuple[int, int] | None] | None
"""A function that chooses the ranks of a parameter: a mesh or its shape, or None for the ranks of the plan."""


class PlannedGroup(NamedTuple):
    """A stand-in for a process group."""

    name: str  # see ``PlannedCollective.group``
    ranks: int

    def size(self) -> int:
        return self.ranks


def choose_ranks(units: Iterable[PlannedUnit], ranks: Ranks) -> None:
    """Set the groups of parameters for which ``shard_mesh_fn`` chooses other ``ranks`` than those of the plan.

    Raises:
        TypeError, ValueError: ``shard_mesh_fn`` returned what cannot be used.
    """
    for unit in units:
        if (choose := unit.config.shard_mesh_fn) is None:
            continue
        for owned in unit.owned:
            if (chosen := choose(owned.fqn, owned.param)) is None:
                continue
            groups: Any = _groups_of(chosen, owned.fqn, unit.config.strategy, ranks)
            if groups[0].ranks != ranks.shards or (groups[1] is not None and groups[1].ranks != ranks.replicas):
                check_mesh_choice(unit, owned.fqn)
                owned.groups = groups
                if groups not in unit.groups:
                    unit.groups.append(groups)


def _groups_of(
    chosen: Any, fqn: str, strategy: ShardingStrategy, ranks: Ranks
) -> tuple[PlannedGroup, PlannedGroup | None]:
    """Return the groups that ``shard_mesh_fn`` has ``chosen`` for parameter ``fqn``: to shard over, and of replicas."""
    names: tuple[str, ...] | None = None
    if isinstance(chosen, DeviceMesh):
        sizes, names = tuple(chosen.shape), chosen.mesh_dim_names
    else:
        sizes = chosen if isinstance(chosen, tuple) else (chosen,)
    if not all(type(size) is int and size >= 1 for size in sizes) or len(sizes) != 1 + strategy.is_hybrid:
        wanted = "(replicas, ranks to shard over), or a 2-D mesh" if strategy.is_hybrid else "a number, or a 1-D mesh"
        raise TypeError(
            f"plan_step: shard_mesh_fn must return the ranks that share a parameter, with {strategy} as {wanted}, or None; "
            f"for {fqn!r} it returned {chosen!r}"
        )
    its_ranks = Ranks(*((1,) * (2 - len(sizes)) + sizes))
    if ranks.total % its_ranks.total:
        raise ValueError(
            f"plan_step: shard_mesh_fn puts parameter {fqn!r} on {its_ranks}, which do not divide the {ranks.total:,} ranks "
            "of the plan: choose among these ranks, as the dimension of a mesh of them does"
        )
    named = names or (f"{its_ranks.replicas} replicas", f"{its_ranks.shards} ranks")[2 - len(sizes) :]
    groups = [PlannedGroup(name, size) for name, size in zip(named, sizes, strict=True)]
    return groups[-1], groups[0] if strategy.is_hybrid else None


_KINDS = {
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_to_all_single": "all-to-all",
}
"""The collectives of DTensors, by the names of torch's operations."""


class DTensorGroups:
    """The groups of the dimensions of DTensors' meshes, by the names that operations have for them."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        dtensors: list[Any] = [param for param in params if is_dtensor(param)]
        self._groups: dict[str, PlannedGroup] = {}
        for mesh in dict.fromkeys(each.device_mesh for each in dtensors):
            for number, size in enumerate(mesh.shape):
                names = mesh.mesh_dim_names or ("DTensors",) * mesh.ndim
                self._groups[mesh.get_group(number).group_name] = PlannedGroup(names[number], size)

    @property
    def names(self) -> set[str]:
        """The names of the dimensions."""
        return {each.name for each in self._groups.values()}

    def collective(self, func: Any, args: tuple[Any, ...], result: Any) -> tuple[str, int, PlannedGroup] | None:
        """Return the kind, bytes and group of a DTensor's collective, or None for any other operation."""
        kind = _KINDS.get(func._schema.name.rpartition("::")[2]) if func.namespace == "_c10d_functional" else None
        if kind is None or (found := self._groups.get(args[-1])) is None:
            return None
        return kind, (result if kind == "all-gather" else args[0]).nbytes, found
