"""The move of units in training to other ranks: modules, parameters, hooks and options stay the same.

[Note: Units that move]
Modules, hooks, features, and the parameters of each flat parameter do not depend on the ranks. Layouts, shards and the
context do. A move plans the layouts as ``fully_shard`` does, and replaces layouts, ranks and shards; the caller fills the new
shards. A move does not communicate, so the old group may be gone. All ranks of the new group move the same units in the same
order, as labels of collectives are counted.

A rank that joins has sharded its module over itself alone, on meta. Its units move like all others.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from flatshard._base.errors import name_list
from flatshard._comm.runtime import Runtime
from flatshard._composable.claims import KEPT
from flatshard._composable.construct.groups import resolve_groups, runtimes_over
from flatshard._composable.construct.layout_plan import plan_again
from flatshard._composable.find import contexts_of
from flatshard._composable.fully_shard import ranks_of
from flatshard._composable.hooks import is_running, settle_context
from flatshard._composable.state import Context, Unit
from flatshard._handle.layout import PlannedFlat
from flatshard._handle.lifetime import GradState
from flatshard._handle.registrations import SHARDED_PARAMS
from flatshard._handle.unsharded import Pools


@dataclass(frozen=True)
class Destination:
    """The ranks to which units move: ``size`` shards of each, of which this rank gets number ``rank``."""

    context: Context
    pools: Pools
    runtime: Runtime  # of all ranks
    runtimes: tuple[Runtime, Runtime | None]
    rank: int
    size: int


def destination_over(units: Sequence[Unit], process_group: Any, device_mesh: DeviceMesh | None) -> Destination:
    """Return the destination of ``units`` over other ranks, which are given as to ``fully_shard``. All of them call it.

    Raises:
        TypeError, ValueError: the units' strategy does not accept these arguments.
    """
    config, device = units[0].config, units[0].runtime.device
    groups = resolve_groups(process_group, device_mesh, config.strategy)
    runtime, runtimes, context = runtimes_over([None], groups, config.strategy, device)
    shards, _ = runtimes[None]
    return Destination(context, Pools(), runtime, runtimes[None], shards.rank, shards.world_size)


def place_of(units: Sequence[Unit]) -> tuple[int, int]:
    """Return this rank's shard and the number of shards of units that share their ranks."""
    for unit in units:
        if not unit.config.strategy.is_replicated:
            return unit.handle.ranks.rank, _shards(unit)
    return 0, 1


def _shards(unit: Unit) -> int:
    shards = unit.handle.ranks.shards
    return 1 if shards is None else shards.world_size


def cuts(units: Iterable[Unit], size: int) -> list[list[PlannedFlat]]:
    """Plan the flat parameters of each unit for ``size`` shards. The result is the same on all ranks.

    Raises:
        ValueError: a strict layout would exceed its limit on padding.
    """
    loads: dict[int, Counter[int]] = {}
    found = []
    for unit in units:
        number = 1 if unit.config.strategy.is_replicated else size
        handle, choice = unit.handle, unit.config.layout
        found.append([plan_again(flat, handle.fqn, choice, number, loads) for flat in handle.flats])
    return found


def check_movable(units: Sequence[Unit], verb: str) -> None:
    """Raise if some units are in use, or cannot move.

    Raises:
        RuntimeError: some are in use.
        NotImplementedError: some are sharded in a way that does not move.
        ValueError: they have several process groups.
    """
    for context in contexts_of(units):
        settle_context(context)
        if is_running(context):
            raise RuntimeError(f"{verb}: a forward or backward of the module is running: call it between two steps")
    for unit in units:
        unit.handle.check_parameters()
    # Parameters that are shown unsharded would stay those of the old ranks.
    claimed = [
        u.fqn
        for u in units
        if any(c is not KEPT for c in u.claims) or u.handle.registrations.shows is not SHARDED_PARAMS
    ]
    if claimed:
        raise RuntimeError(
            f"{verb}: units {name_list(claimed)} are kept unsharded, or their whole parameters are shown: leave the "
            "context first (keep_unsharded, summon_full_params), or call flatshard.reshard(module)"
        )
    check_reduced(units, verb)
    if len({unit.runtime for unit in units}) > 1 or any(len(unit.handle.all_ranks) > 1 for unit in units):
        others = [u for u in units if u.runtime != units[0].runtime]
        experts = [f for u in units for f in u.handle.flats if u in others or f.ranks is not u.handle.ranks]
        names = [param.fqn for flat in experts for param in flat.layout.params]
        raise ValueError(
            f"{verb}: the units of the module are on several process groups, and move one group at a time; other ranks than "
            f"{units[0].fqn or '<root>'!r} have {name_list(names)}. Go through flatshard.save_checkpoint and load_checkpoint"
        )
    if inner := [u.fqn for u in units if type(u.config.reshard_after_forward) is int]:
        raise NotImplementedError(
            f"{verb}: units {name_list(inner)} have reshard_after_forward=<number of ranks>, whose groups are made by "
            "fully_shard alone: use True or False"
        )
    for unit in units:
        for flat in unit.handle.flats:
            if wrapped := [i.fqn for i, w in zip(flat.layout.params, flat.wrappings, strict=True) if w is not None]:
                raise NotImplementedError(
                    f"{verb}: {name_list(wrapped)} are DTensors or other tensor subclasses, whose parts do not move: go "
                    "through flatshard.save_checkpoint and load_checkpoint"
                )
            if flat.shard_param is not None:
                raise NotImplementedError(
                    f"{verb}: unit {unit.fqn or '<root>'!r} is stepped by flat_parameters, which do not move: build the "
                    "optimizer on model.parameters()"
                )


def check_reduced(units: Iterable[Unit], verb: str) -> None:
    """Raise RuntimeError if some units hold gradients of this rank alone."""
    if held := [unit.fqn for unit in units if unit.handle.gradients.state is not GradState.NONE]:
        raise RuntimeError(
            f"{verb}: units {name_list(held)} hold gradients that are not reduced: call flatshard.reduce_gradients(module) "
            "first. What has become .grad moves"
        )


def move(unit: Unit, destination: Destination, planned: Sequence[PlannedFlat], shards: Sequence[torch.Tensor]) -> None:
    """Shard ``unit`` as planned, with one of ``shards`` for each flat parameter. Gradients are dropped."""
    for flat in unit.handle.flats:
        for param in flat.params:
            param.grad = None
    old = unit.handle.ranks
    ranks = ranks_of(unit.handle.fqn, unit.config, planned, destination.pools, destination.runtimes)
    ranks = replace(ranks, averaging=replace(old.averaging, size=ranks.averaging.size))
    unit.handle.move(ranks, [flat.layout for flat in planned], shards)
    unit.move(destination.context, destination.runtime)


def allocate(unit: Unit) -> None:
    """Give memory to the parameters of a unit on meta. Their values will be overwritten."""
    for flat in unit.handle.on_meta:
        assert flat.filling is not None
        flat.filling.allocate(flat.kind.home)
    for flat in unit.handle.flats:
        flat.fill_by(None)
    unit.handle.check_parameters()


def leave(units: Iterable[Unit], verb: str) -> None:
    """Let forwards of ``units`` raise: they have moved to other ranks."""
    gone = weakref.WeakSet(units)  # dropped with their module

    def refuse(outermost: Unit) -> bool:
        if outermost in gone:
            raise RuntimeError(
                f"unit {outermost.fqn or '<root>'!r} has moved to other ranks, of which this one is none ({verb}): its "
                "parameters here are those of before. Drop the module and its optimizer"
            )
        return len(gone) > 0

    Context.checks.append(refuse)
