"""Checks the arguments of ``fully_shard``, before anything is changed. Each message names the FQN and the cure."""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parameter import UninitializedParameter

from flatshard._composable.construct.partition import PlannedUnit, walk
from flatshard._composable.construct.policy import has_forward, is_never_called
from flatshard._composable.find import units_below
from flatshard._composable.module_tree import ModuleGroup
from flatshard._composable.state import Unit, owner_of, unit_of
from flatshard._config import ShardingStrategy, local_world_size
from flatshard._errors import name_list
from flatshard._handle.adapters.tensor_parallel import is_dtensor, local_tensor
from flatshard._handle.adapters.tensor_subclass import TensorSubclass, plain_tensors
from flatshard._handle.planned import Groups, PlannedParam

# Classes of torch that manage the parameters below them. By name, because importing FSDP takes time. "DDP" is the class of
# modules that `torch.distributed._composable.replicate` was called on.
_FOREIGN_WRAPPERS = ("FullyShardedDataParallel", "ReplicateModule", "FSDPModule", "DistributedDataParallel", "DDP")
_SCRIPTED_CURE = "a scripted module can be inside a unit, but not a unit itself. Shard the module that calls it"


def check_module(module: Any, what: str = "module") -> None:
    """Raise if ``module`` cannot be a unit. ``what``: the name of the argument."""
    if not isinstance(module, nn.Module):
        cure = "pass the model itself, not its parameters or its state"
        raise TypeError(f"fully_shard takes an nn.Module as {what}, got a {type(module).__name__}; {cure}")
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "fully_shard was called inside torch.inference_mode(), where tensors are made that cannot be trained: call it "
            "outside. The model's forward may run inside"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"fully_shard cannot hook a {type(module).__name__}: {_SCRIPTED_CURE}")
    if unit_of(module) is not None:
        raise ValueError(
            f"this {type(module).__name__} is sharded already: fully_shard was called on it, or a policy chose it. Call "
            "fully_shard once per module, and on inner modules first"
        )
    if is_never_called(module):
        raise ValueError(
            "this is the out_proj of an nn.MultiheadAttention, which reads its weight but never calls it, so its hooks would "
            "never run. Shard the MultiheadAttention instead"
        )
    if not has_forward(module):
        raise ValueError(
            f"{type(module).__name__} has no forward, so its hooks would never run. Shard its items, "
            "`for m in container: fully_shard(m)`, or the module that calls them"
        )


def check_group(modules: Sequence[Any], what: str = "fully_shard of a list") -> None:
    """Raise if ``modules`` cannot be one unit. ``what``: who asks for it."""
    if not modules:
        raise ValueError(f"{what}: it is empty. List the modules that are to be one unit: [model.norm, model.head]")
    for module in modules:
        check_module(module, "an item of the list")
    for module, other in itertools.permutations(modules, 2):
        if other in set(module.modules()):
            found = f"a {type(other).__name__} is in it twice"
            if other is not module:
                found = f"a {type(other).__name__} in it is inside a {type(module).__name__} in it"
            raise ValueError(f"{what}: {found}. List modules that are beside each other, each once")


def choose_groups(unit: PlannedUnit, groups: Groups) -> None:
    """Set the groups of the parameters of ``unit`` for which the user chose another mesh than that of the call, ``groups``.

    Raises:
        TypeError, ValueError: a mesh cannot be used.
    """
    config, size = unit.config, unit.config.reshard_after_forward
    if config.shard_mesh_fn is None:
        return
    if config.strategy.joins_axes:
        raise ValueError(f"shard_mesh_fn: not with {config.strategy}, which shards over both axes of one mesh: omit it")
    for owned in unit.owned:
        mesh = config.shard_mesh_fn(owned.fqn, owned.param)
        if mesh is None:
            continue
        try:
            chosen = resolve_groups(None, mesh, config.strategy)
        except (TypeError, ValueError) as e:
            raise type(e)(f"shard_mesh_fn for parameter {owned.fqn!r}: {e}") from None
        if chosen == groups:
            continue
        if config.strategy.is_whole:
            raise ValueError(
                f"shard_mesh_fn shards parameter {owned.fqn!r} over another mesh, but strategy is {config.strategy}, which "
                "shards nothing: use FULL_SHARD, or SHARD_GRAD_OP"
            )
        if chosen[1] is not None:
            twice = set(dist.get_process_group_ranks(groups[0])) & set(dist.get_process_group_ranks(chosen[1]))
            if len(twice) > 1:
                raise ValueError(
                    f"shard_mesh_fn replicates parameter {owned.fqn!r} over ranks {sorted(twice)}, over which the rest of "
                    "the unit is sharded: let the first dimension of its mesh have none of these ranks but one"
                )
        if size is not None and not isinstance(size, bool):
            raise ValueError(
                f"shard_mesh_fn shards parameter {owned.fqn!r} over other ranks than the rest of unit "
                f"{unit.fqn or '<root>'!r}, whose reshard_after_forward={size} is for one group of ranks: pass True or "
                "False, or shard the module that has these parameters first, as a unit of its own: "
                "fully_shard(experts, device_mesh=mesh)"
            )
        owned.groups = chosen


def resolve_groups(process_group: Any, device_mesh: DeviceMesh | None, strategy: ShardingStrategy) -> Groups:
    """The process group to shard over, and for hybrid strategies the group of this rank's replicas."""
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
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise ValueError(
                f"device_mesh has {device_mesh.ndim} dimensions {device_mesh.mesh_dim_names}: pass the one to shard over, "
                "such as mesh['dp']; or strategy=ShardingStrategy.HYBRID_SHARD, which replicates over the first of two"
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


def _hybrid_groups(
    process_group: Any, device_mesh: DeviceMesh | None, strategy: ShardingStrategy
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(group to shard over, group of replicas). Both must be given: with one of them it would be another strategy."""
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


_node_meshes: dict[int, tuple[weakref.ref[dist.ProcessGroup], DeviceMesh]] = {}


def _node_mesh() -> DeviceMesh:
    """A 2-D mesh with one row per node. It is made once for each default group, because making groups communicates."""
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


def resolve_ignored(root: nn.Module, ignored_states: Iterable[Any] | None) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """The modules (with all submodules) and the parameters in ``ignored_states``."""
    modules: set[nn.Module] = set()
    params: set[nn.Parameter] = set()
    in_root, in_root_params = set(root.modules()), set(root.parameters())
    for state in () if ignored_states is None else ignored_states:
        if isinstance(state, nn.Module):
            if state not in in_root:
                raise ValueError(
                    f"ignored_states: a {type(state).__name__} is not a submodule of {type(root).__name__}"
                )
            if state is root:
                raise ValueError("ignored_states contains the module that is to be sharded")
            modules.update(state.modules())
            params.update(state.parameters())
        elif isinstance(state, nn.Parameter):
            if state not in in_root_params:
                raise ValueError(
                    f"ignored_states: a parameter of shape {tuple(state.shape)} is not in {type(root).__name__}"
                )
            params.add(state)
        else:
            raise TypeError(f"ignored_states contains a {type(state).__name__}; it takes modules and parameters")
    for module in modules:
        if unit_of(module) is not None:
            name = next(n for n, m in root.named_modules() if m is module)
            raise ValueError(
                f"{name!r} is sharded already, but is in an ignored module: do not shard it, or do not ignore the module"
            )
    return modules, params


def check_chosen(root: nn.Module, chosen: Iterable[nn.Module], ignored: set[nn.Module]) -> None:
    """Raise if a module that a policy chose cannot be a unit."""
    names = {m: n for n, m in root.named_modules()}
    sharded = {m for unit in units_below(root) for m in unit.module.modules()}
    grouped: dict[nn.Module, ModuleGroup] = {}
    for module in chosen:
        if isinstance(module, ModuleGroup):
            check_group(tuple(module), "a tuple of modules in the policy")
            for each in module:
                what = f"a tuple of modules in the policy has a {type(each).__name__}"
                if each is root or each not in names:
                    raise ValueError(f"{what}, which is not a submodule of the {type(root).__name__} to shard")
                if each in ignored or each in sharded:
                    why = "is sharded already" if each in sharded else "is in ignored_states, too"
                    raise ValueError(f"{what}, {names[each]!r}, which {why}")
                if grouped.setdefault(each, module) is not module:
                    raise ValueError(f"{what}, {names[each]!r}, which is in another tuple, too: one unit has it")
            continue
        what = f"the policy chose {names[module]!r}, a {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"{what}, which fully_shard cannot hook: {_SCRIPTED_CURE}")
        if not has_forward(module):
            raise ValueError(f"{what}, which has no forward: choose its items instead")


def check_tree(root: nn.Module, ignored: set[nn.Module]) -> None:
    """Raise if a module in the tree is managed by another wrapper, such as FSDP or DDP."""
    for fqn, module, _ in walk(root, ignored):
        bases = {c.__name__ for c in type(module).__mro__ if c.__module__.startswith("torch.")}
        found = [w for w in _FOREIGN_WRAPPERS if w in bases]
        if found:
            raise ValueError(
                f"{fqn or 'the module'!r} is managed by {found[0]} already: unwrap it, or pass it in ignored_states"
            )


def check_order(root: nn.Module, units: list[PlannedUnit]) -> None:
    """Raise if a parameter in ``root`` was sharded already as a part of a unit around ``root``."""
    for unit in units:
        for _, name, param in unit.foreign:
            owner = owner_of(param)
            if owner is not None and any(m is root for m in owner.module.modules()):
                raise ValueError(
                    f"{name!r} in this {type(root).__name__} is sharded already, as {param._flatshard_info.fqn!r} of the "
                    f"unit around it, a {type(owner.module).__name__}: shard inner modules before outer ones, or call "
                    "fully_shard once, on the outermost module, with a policy that chooses them"
                )


def warn_of_old_parameters(units: Iterable[PlannedUnit]) -> None:
    """Warn if something still holds tensor subclasses that were replaced."""
    if held := [o.fqn for unit in units for o in unit.owned if o.was is not None and o.was() is not None]:
        warnings.warn(
            "fully_shard registered new parameters in the place of tensor subclasses (such as DTensors), but something "
            f"still holds the old {name_list(held)}. If it is an optimizer, it will not train them: build it after "
            "fully_shard",
            stacklevel=3,
        )


def warn_of_experts(units: Iterable[Unit], group: dist.ProcessGroup) -> None:
    """Warn of plain parameters of ``units`` that are sharded over some of the ranks of ``group`` only, not replicated."""
    ranks = set(dist.get_process_group_ranks(group))
    experts = [
        info.fqn
        for unit in units
        for flat in unit.handle.flats
        if flat.ranks.replicas is None and set(dist.get_process_group_ranks(flat.ranks.runtime.group)) < ranks
        for info, wrapping in zip(flat.layout.params, flat.wrappings, strict=True)
        if wrapping is None
    ]
    if experts:
        warnings.warn(
            f"{name_list(experts)} were sharded by an earlier call, over some of the ranks of this one. Norms and "
            "checkpoints take what the other ranks have under these names for copies. If they are other parameters, such as "
            "other experts, shard them in this call: fully_shard(..., shard_mesh_fn=lambda fqn, param: mesh['dp'] if "
            "'experts' in fqn else None), or make them DTensors first",
            stacklevel=3,
        )


def check_parameters(units: list[PlannedUnit], device: torch.device | None, groups: Groups | None) -> torch.device:
    """Raise if a parameter cannot be sharded over ``groups``, or over those of its own.

    Returns the device of the parameters after ``fully_shard``.
    """
    by_device: dict[torch.device, list[str]] = {}
    ranges: list[tuple[torch.device, int, int, str]] = []
    for unit in units:
        for owned in unit.owned:
            check_parameter(owned.fqn, owned.param)
            _check_gradient(owned)
            if is_dtensor(owned.param):
                _check_mesh(owned.fqn, owned.param, [each for each in owned.groups or groups or () if each is not None])
            by_device.setdefault(owned.param.device, []).append(owned.fqn)
            for plain in plain_tensors(owned.param):
                if plain.is_meta or not plain.numel():
                    continue
                start = plain.data_ptr()
                span = sum((n - 1) * s for n, s in zip(plain.shape, plain.stride(), strict=True)) + 1
                ranges.append((plain.device, start, start + span * plain.itemsize, owned.fqn))
    _check_overlap(ranges)
    if device is not None:
        return device
    real = {d: names for d, names in by_device.items() if d.type != "meta"}
    if len(real) > 1:
        where = "; ".join(f"{name_list(names, 3)} on {d}" for d, names in real.items())
        raise ValueError(f"parameters are on different devices: {where}. Move the module first, or pass device_id=...")
    if real:
        return next(iter(real))
    return default_device()


def default_device() -> torch.device:
    """The device for modules on meta: the current accelerator, or the CPU if there is none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    backends = str(dist.get_backend_config())
    if accelerator is None or ("cpu:" in backends and f"{accelerator.type}:" not in backends):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def check_parameter(fqn: str, param: nn.Parameter) -> None:
    """Raise if ``param`` cannot be sharded."""
    if isinstance(param, UninitializedParameter):
        raise ValueError(f"parameter {fqn!r} is lazy and has no shape yet: run one forward before fully_shard")
    # A package beside torch, which annotates plain tensors. FSDP2 of torch 2.15 makes DTensors of these.
    if (spmd := sys.modules.get("spmd_types")) is not None and (types := spmd.get_local_type(param)):
        raise NotImplementedError(
            f"parameter {fqn!r} is annotated by spmd_types with {types}, which flatshard does not read: its gradient would "
            "not be reduced over other axes than those to shard over. Use DTensors in its place (parallelize_module), or "
            "pass it in ignored_states"
        )
    if (subclass := TensorSubclass.of(param)) is not None:
        if any(t.is_meta for t in plain_tensors(param)):
            raise ValueError(
                f"parameter {fqn!r} is a {type(param).__name__} on the meta device, which fully_shard cannot initialise: "
                "build it with its values (quantise after loading)"
            )
        if (why := subclass.check(param)) is not None:
            raise ValueError(
                f"parameter {fqn!r} is a {type(param).__name__}, which {why}. Or pass it in ignored_states"
            )
    elif is_dtensor(param) and type(local_tensor(param)) is not torch.Tensor:
        kind = type(local_tensor(param)).__name__
        raise NotImplementedError(
            f"parameter {fqn!r} is a DTensor with a {kind} inside: tensor subclasses can be sharded only without tensor "
            "parallelism. Pass it in ignored_states"
        )
    elif not is_dtensor(param) and not _is_plain(param):
        raise ValueError(
            f"parameter {fqn!r} is a {type(param).__name__}, a tensor subclass that does not say which tensors are inside: "
            "give it __tensor_flatten__ and __tensor_unflatten__, or pass it in ignored_states"
        )
    if param.layout is not torch.strided:
        raise ValueError(f"parameter {fqn!r} has layout {param.layout}: only dense parameters can be sharded")
    if not param.is_leaf:
        raise ValueError(f"parameter {fqn!r} is not a leaf of autograd's graph")


def _check_gradient(owned: PlannedParam) -> None:
    """Raise if the gradient of a parameter will be sparse, as that of an embedding can be."""
    for module, _ in owned.registrations:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and owned.param.requires_grad:
            raise ValueError(
                f"parameter {owned.fqn!r} is that of an {type(module).__name__} with sparse=True, whose gradient cannot be "
                "reduced into a flat gradient: set module.sparse = False, or pass the parameter in ignored_states"
            )


def _check_mesh(fqn: str, param: Any, groups: Sequence[dist.ProcessGroup]) -> None:
    """Raise if a DTensor's mesh has ranks in common with the ``groups`` to shard over, or if its placements do not fit."""
    odd = [p for p in param.placements if not (p.is_replicate() or (p.is_shard() and type(p).__name__ == "Shard"))]
    if odd:
        raise ValueError(
            f"parameter {fqn!r} is a DTensor placed as {odd[0]}: only Shard(dim) and Replicate() can be sharded further. "
            "Redistribute it before fully_shard (param.redistribute(placements=[...]))"
        )
    mine, inside = dist.get_rank(), {int(rank) for rank in param.device_mesh.mesh.flatten()}
    for group in groups:
        if shared := sorted((inside & set(dist.get_process_group_ranks(group))) - {mine}):
            raise ValueError(
                f"parameter {fqn!r} is a DTensor over ranks {sorted(inside)}, and would be sharded over ranks "
                f"{dist.get_process_group_ranks(group)}: rank {mine} has rank {shared[0]} in both. Shard over the other "
                "dimension of the mesh: fully_shard(..., device_mesh=mesh['dp']), where mesh = init_device_mesh(..., "
                "mesh_dim_names=('dp', 'tp')). If other parameters are to be sharded over all these ranks (experts in a "
                "model): fully_shard(model, shard_mesh_fn=lambda fqn, param: mesh['dp'] if 'experts' in fqn else None), or "
                "first call fully_shard(experts, device_mesh=mesh['dp']), and then fully_shard(model)"
            )


def _is_plain(param: nn.Parameter) -> bool:
    kind: Any = type(param)
    has_function = kind.__torch_function__ is not torch._C._disabled_torch_function_impl
    return not has_function and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _check_overlap(ranges: list[tuple[torch.device, int, int, str]]) -> None:
    """Raise if two different parameters are in the same memory: after sharding they would silently be independent."""
    ranges.sort(key=lambda r: (str(r[0]), r[1]))
    for (device, _, stop, fqn), (other_device, start, _, other) in itertools.pairwise(ranges):
        if device == other_device and start < stop and fqn != other:  # those inside one subclass are copied
            raise ValueError(
                f"parameters {fqn!r} and {other!r} are different Parameter objects in the same memory. Register one "
                "object under both names to tie them, or clone one"
            )
