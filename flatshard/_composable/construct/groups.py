"""The ranks and the device of one call of ``fully_shard``: process groups given, chosen, or made of others.

[Note: One context for groups that are connected]
A unit may reduce over two groups: over its shards, and over its replicas. Another may share only one of them (experts that
are sharded over fewer ranks, and replicated over the same). Collectives of a group match by order, so both need one order of
reductions. All groups that units connect are one context. ``fully_shard`` joins contexts when it connects their groups.
Groups stay connected when those units are gone. rank_group.py, [Note: Ranks collect garbage at different times]
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flatshard._base import torch_versions
from flatshard._base.config import ShardingStrategy
from flatshard._base.environment import local_world_size
from flatshard._comm.backends import builtin_collectives
from flatshard._comm.mesh_runtime import MeshRuntime
from flatshard._comm.process_groups import alive, timeout_of
from flatshard._comm.runtime import Runtime
from flatshard._composable.construct.partition import PlannedUnit
from flatshard._composable.hooks import settle_context
from flatshard._composable.reduction_queue import take_over
from flatshard._composable.state import Context
from flatshard._handle.layout import Groups
from flatshard._handle.unit_ranks import Runtimes

_node_meshes: dict[int, tuple[weakref.ref[dist.ProcessGroup], DeviceMesh]] = {}
"""Meshes with one row per node, by the id of the default group."""

_by_group: weakref.WeakValueDictionary[int, Context] = weakref.WeakValueDictionary()  # by the number of a process group
_connected: dict[int, tuple[int, ...]] = {}  # by a group's number: the numbers of all that it is connected with


def resolve_groups(process_group: Any, device_mesh: DeviceMesh | None, strategy: ShardingStrategy) -> Groups:
    """Return the process group to shard over and, for hybrid strategies, the group of this rank's replicas.

    Raises:
        RuntimeError: no process group is initialised.
        TypeError, ValueError: an argument cannot be used, or does not fit the strategy.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs a process group: call torch.distributed.init_process_group(...) first (under torchrun, "
            "init_process_group() alone is enough)"
        )
    if process_group is not None and device_mesh is not None:
        raise ValueError("fully_shard: pass process_group or device_mesh, not both")
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        raise TypeError(
            f"device_mesh must be a DeviceMesh, got a {type(device_mesh).__name__}: make one by "
            "torch.distributed.device_mesh.init_device_mesh(device_type, (world_size,)), or omit it to shard over all ranks"
        )
    if device_mesh is not None and device_mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the given device_mesh: skip the call there")
    if strategy.is_hybrid:
        return _hybrid_groups(process_group, device_mesh, strategy)
    # From here on there are no replicas.
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise ValueError(
                f"device_mesh has {device_mesh.ndim} dimensions {device_mesh.mesh_dim_names}: pass the one to shard over, "
                "such as mesh['dp']; device_mesh._flatten(), to shard over all of its ranks; or "
                "strategy=ShardingStrategy.HYBRID_SHARD, which replicates over the first of two"
            )
        return device_mesh.get_group(), None
    if process_group is None:
        return dist.distributed_c10d._get_default_group(), None
    if isinstance(process_group, tuple):
        raise ValueError(
            f"process_group is a tuple, which is for hybrid strategies, but strategy is {strategy}: pass the group to shard "
            "over, or strategy=ShardingStrategy.HYBRID_SHARD"
        )
    return _checked_group(process_group), None


def choose_meshes(units: Iterable[PlannedUnit], groups: Groups) -> None:
    """Set the groups of parameters for which ``shard_mesh_fn`` chooses another mesh than that of the call, ``groups``.

    Raises:
        TypeError, ValueError: a mesh cannot be used.
    """
    for unit in units:
        config = unit.config
        if config.shard_mesh_fn is None:
            continue
        for owned in unit.owned:
            mesh = config.shard_mesh_fn(owned.fqn, owned.param)
            if mesh is None:
                continue
            try:
                chosen = resolve_groups(None, mesh, config.strategy)
            except (TypeError, ValueError) as e:
                raise type(e)(f"shard_mesh_fn for parameter {owned.fqn!r}: {e}") from None
            if chosen != groups:
                check_mesh_choice(unit, owned.fqn)
                _check_replicas(owned.fqn, chosen, groups)
                owned.groups = chosen
                if chosen not in unit.groups:
                    unit.groups.append(chosen)


def _check_replicas(fqn: str, chosen: Groups, groups: Groups) -> None:
    """Raise if ``chosen`` replicates ``fqn`` over ranks that the rest of its unit, on ``groups``, is sharded over."""
    if chosen[1] is not None:
        twice = set(dist.get_process_group_ranks(groups[0])) & set(dist.get_process_group_ranks(chosen[1]))
        if len(twice) > 1:
            raise ValueError(
                f"shard_mesh_fn replicates parameter {fqn!r} over ranks {sorted(twice)}, over which the rest of the unit is "
                "sharded: choose a mesh whose first dimension has only one of these ranks"
            )


def check_mesh_choice(unit: PlannedUnit, fqn: str) -> None:
    """Raise if parameter ``fqn`` cannot be sharded over other ranks than the rest of its unit."""
    config, size = unit.config, unit.config.reshard_after_forward
    if config.strategy.joins_axes:
        raise ValueError(f"shard_mesh_fn: not with {config.strategy}, which shards over both axes of one mesh: omit it")
    if config.strategy.is_replicated:
        raise ValueError(
            f"shard_mesh_fn shards parameter {fqn!r} over another mesh, but strategy is {config.strategy}, which shards "
            "nothing: use FULL_SHARD, or SHARD_GRAD_OP"
        )
    if size is not None and not isinstance(size, bool):
        raise ValueError(
            f"shard_mesh_fn shards parameter {fqn!r} over other ranks than the rest of unit {unit.fqn or '<root>'!r}, whose "
            f"reshard_after_forward={size} is for one group of ranks: pass True or False, or shard the module that has "
            "these parameters first, as a unit of its own: fully_shard(experts, device_mesh=mesh)"
        )


def runtimes_over(
    chosen: Iterable[Groups | None], groups: Groups, strategy: ShardingStrategy, device: torch.device
) -> tuple[Runtime, Runtimes, Context]:
    """Return the runtime of all ranks that units are sharded over, the runtimes of the ``chosen`` groups, and their context.

    Args:
        chosen: groups of parameters; None stands for ``groups``.
        groups: the groups of the call.
        strategy: the strategy of the call.
        device: the device of the collectives.

    Raises:
        RuntimeError: units on these groups are in a step.
    """
    if strategy.joins_axes and groups[1] is not None:
        inner, outer = Runtime.of(groups[0], device), Runtime.of(groups[1], device)
        every = Runtime.of(join_groups(inner.group, outer.group, device), device)
        runtimes: Runtimes = {None: (MeshRuntime(every, inner, outer), None)}
        return every, runtimes, context_over(every, *runtimes.values())
    every = Runtime.of(groups[0], device)
    found: dict[Groups | None, tuple[Runtime, Runtime | None]] = {}
    for own in dict.fromkeys(chosen):
        shards, replicas = groups if own is None else own
        found[own] = Runtime.of(shards, device), None if replicas is None else Runtime.of(replicas, device)
    return every, found, context_over(every, *found.values())


def as_device(device_id: int | torch.device | str | None) -> torch.device | None:
    """Return the argument ``device_id`` as a device, with an index.

    Raises:
        ValueError: it names no device, or an accelerator that this process does not have.
    """
    if device_id is None:
        return None
    kind = default_device().type
    try:
        device = torch.device(kind, device_id) if isinstance(device_id, int) else torch.device(device_id)
    except (RuntimeError, TypeError) as e:
        raise ValueError(f"device_id={device_id!r} is no device: pass a torch.device, its name or its index") from e
    if device.type == "cpu":
        return torch.device("cpu")  # without an index: the device of tensors is "cpu", which does not equal "cpu:0"
    if device.index is None and not torch.accelerator.is_available():
        raise ValueError(f"device_id={device_id!r}, but this process has no accelerator: omit it, or pass 'cpu'")
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return device


def default_device() -> torch.device:
    """Return the device for modules on meta: the current accelerator, or the CPU if there is none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    backends = str(dist.get_backend_config())
    if accelerator is None or ("cpu:" in backends and f"{accelerator.type}:" not in backends):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


_Made = dict[tuple[str, tuple[int, ...]], weakref.ref[dist.ProcessGroup]]

# Groups made here, by backend and ranks, for the id of the default group, which keeps them alive.
_made: dict[int, tuple[weakref.ref[dist.ProcessGroup], _Made]] = {}


def _made_before() -> tuple[dist.ProcessGroup, _Made]:
    """Return the default group, and the groups that were made here since it exists."""
    world = dist.group.WORLD
    assert world is not None
    found = _made.get(id(world))
    made = found[1] if found is not None and found[0]() is world else {}
    _made[id(world)] = weakref.ref(world), made
    return world, made


def subgroup(group: dist.ProcessGroup, size: int, device: torch.device) -> dist.ProcessGroup:
    """Return a process group of the ``size`` consecutive ranks of ``group`` that contain this rank.

    Every rank of the world must call it at the same time, each with its own ``group``, because creating a group is
    collective over the world. The result is cached.
    """
    ranks, known = dist.get_process_group_ranks(group), dist.get_world_size()
    rows = [[size, *ranks]]
    if len(ranks) < known:
        mine = torch.full((1 + known,), -1, dtype=torch.int64, device=device)
        mine[: 1 + len(ranks)] = torch.tensor(rows[0], device=device)
        every = [torch.empty_like(mine) for _ in range(known)]
        dist.all_gather(every, mine)
        rows = [[r for r in row if r >= 0] for row in torch.stack(every).tolist()]
    (world, made), backend = _made_before(), str(dist.get_backend_config(group))
    for step, *others in sorted(map(tuple, rows)):
        for start in range(0, len(others), step):
            part = tuple(others[start : start + step])
            if (backend, part) not in made:
                new = dist.new_group(part, timeout=timeout_of(group, device), backend=backend)
                made[backend, part] = weakref.ref(new if isinstance(new, dist.ProcessGroup) else world)  # am I in it?
    at = ranks.index(dist.get_rank()) // size * size
    return alive(made[backend, tuple(ranks[at : at + size])])


def join_groups(inner: dist.ProcessGroup, outer: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return the process group of all ranks of a mesh, inner rank by inner rank. Only these ranks need to call it.

    ``inner`` and ``outer`` are the groups of this rank. The result is cached, and has the timeout of ``inner``.

    Before torch 2.15, if the mesh has only some ranks of the world, its ranks must be in equally many groups. torch names
    the new group by this number, and ranks with different names would wait for each other forever.
    """
    if 1 in (dist.get_world_size(inner), dist.get_world_size(outer)):
        return inner if dist.get_world_size(outer) == 1 else outer
    size, rank = dist.get_world_size(outer), dist.get_rank(outer)
    rows = torch.tensor(dist.get_process_group_ranks(inner), device=device).repeat(size, 1)
    if builtin_collectives(outer, device).imitates:  # it sends nothing
        first = torch.tensor(dist.get_process_group_ranks(outer), device=device)
        rows += (first - first[rank]).unsqueeze(1)
    else:
        dist.all_gather_into_tensor(rows.view(-1), rows[rank].clone(), group=outer)
    ranks, backend = rows.t().flatten().tolist(), str(dist.get_backend_config(inner))
    timeout = timeout_of(inner, device)
    (_, made), key = _made_before(), (f"{backend}, {timeout}", tuple(ranks))
    if ranks != sorted(ranks) and not torch_versions.UNSORTED:
        raise NotImplementedError(
            "HYBRID_FULL_SHARD needs torch 2.12 or later, as this one sorts the ranks of a new group. Use HYBRID_SHARD"
        )
    if key not in made:
        is_part = len(ranks) < dist.get_world_size()  # the other ranks of the world don't call this
        new = dist.new_group(ranks, timeout, backend, use_local_synchronization=is_part, **torch_versions.UNSORTED)
        assert isinstance(new, dist.ProcessGroup)
        made[key] = weakref.ref(new)
    return alive(made[key])


def _hybrid_groups(
    process_group: Any, device_mesh: DeviceMesh | None, strategy: ShardingStrategy
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return (group to shard over, group of replicas). Both must be given, or neither."""
    wanted = f"strategy={strategy} shards over one group and replicates over another"
    if process_group is not None:
        if not isinstance(process_group, tuple) or len(process_group) != 2:
            raise ValueError(
                f"{wanted}: pass process_group=(group to shard over, group of replicas), or a 2-D device_mesh, or neither to "
                "shard within each node"
            )
        shard, replicas = map(_checked_group, process_group)
    else:
        if device_mesh is None:
            device_mesh = _node_mesh()
        if device_mesh.ndim != 2:
            raise ValueError(
                f"{wanted}: device_mesh needs 2 dimensions, (replicate, shard), and has {device_mesh.ndim}: "
                f"{device_mesh.mesh_dim_names}"
            )
        replicas, shard = device_mesh.get_group(0), device_mesh.get_group(1)
    common = set(dist.get_process_group_ranks(shard)) & set(dist.get_process_group_ranks(replicas))
    if common != {dist.get_rank()}:
        raise ValueError(
            f"{wanted}: the two groups must have only this rank in common, but share ranks {sorted(common)}"
        )
    return shard, replicas


def _node_mesh() -> DeviceMesh:
    """Return a 2-D mesh with one row per node. It is made once for each default group, as making groups communicates."""
    world = dist.distributed_c10d._get_default_group()
    found = _node_meshes.get(id(world))
    if found is not None and found[0]() is world:
        return found[1]
    local = local_world_size()
    if local is None or dist.get_world_size() % local:
        raise ValueError(
            f"a hybrid strategy without device_mesh shards within a node, but LOCAL_WORLD_SIZE={local} does not divide the "
            f"{dist.get_world_size()} ranks: launch with torchrun, or pass a 2-D device_mesh"
        )
    mesh = init_device_mesh(default_device().type, (dist.get_world_size() // local, local))
    _node_meshes[id(world)] = weakref.ref(world), mesh
    return mesh


def _checked_group(group: Any) -> dist.ProcessGroup:
    if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the given process group: skip the call there")
    checked: dist.ProcessGroup = group
    return checked


def context_over(runtime: Runtime, *others: tuple[Runtime, Runtime | None]) -> Context:
    """Return the context of units over these runtimes. Join contexts if need be; raise ``RuntimeError`` within a step."""
    axes = [runtime, *(axis for pair in others for each in pair if each is not None for axis in each.axes)]
    numbers = tuple(dict.fromkeys(n for axis in axes for n in _connected.get(axis.number, (axis.number,))))
    if len(numbers) > 1:
        _connected.update(dict.fromkeys(numbers, numbers))
    known = dict.fromkeys(context for n in numbers if (context := _by_group.get(n)) is not None)
    progresses = [axis.progress for axis in axes if axis.progress is not None]
    if not known:
        context = Context(runtime, progresses)
    else:
        context, *rest = known
        for each in known if rest else ():
            settle_context(each)
        for other in rest:
            take_over(context.reductions, other.reductions, context.take_over(other))
            _by_group.update({number: context for number, each in _by_group.items() if each is other})
        context.report_to(progresses)
    _by_group.update(dict.fromkeys(numbers, context))
    return context
