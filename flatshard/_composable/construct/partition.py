"""Which parameters each unit owns, and whether they can be sharded. All units are planned before any is flattened.

[Note: Shared parameters]
A parameter that is registered in several units belongs to their lowest common ancestor among the units: the last unit that is
on every path from the root to the parameter. So a unit that two others share keeps its own parameters. The other units in
which the parameter is registered *use* the owner: it is unsharded for their forward and backward, too, so that each of them
works standalone. A parameter that an earlier call sharded keeps its owner, and is used in the same way. A parameter that
``SplitRoot`` takes out of the root's unit belongs to the first of the units in which it is registered.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedParameter

from flatshard._base.errors import name_list, warn_user
from flatshard._base.names import HIDDEN, UNIT_KEY
from flatshard._composable.module_tree import called_modules
from flatshard._composable.state import Unit, owner_of, unit_of
from flatshard._composable.unit_config import UnitConfig
from flatshard._handle.adapters.tensor_parallel import is_dtensor, local_tensor
from flatshard._handle.adapters.tensor_subclass import TensorSubclass, plain_tensors
from flatshard._handle.layout import Groups, PlannedParam
from flatshard._handle.tensors.sharded_parameter import ShardedParameter

# Classes of torch that manage the parameters below them. By name, because importing FSDP takes time. "DDP" is the class of
# modules that `torch.distributed._composable.replicate` was called on.
_FOREIGN_WRAPPERS = ("FullyShardedDataParallel", "ReplicateModule", "FSDPModule", "DistributedDataParallel", "DDP")


@dataclass
class PlannedUnit:
    """A unit to create."""

    module: nn.Module  # or a `ModuleGroup`
    fqn: str
    config: UnitConfig
    modules: list[nn.Module] = field(default_factory=list)  # its module, and submodules that belong to no unit below
    owned: list[PlannedParam] = field(default_factory=list)
    uses: list[nn.Module] = field(default_factory=list)  # modules of planned units whose parameters are registered here
    foreign: list[tuple[nn.Module, str, ShardedParameter]] = field(default_factory=list)  # sharded by an earlier call
    # Its modules, and modules of units below in which its shared parameters are registered.
    holders: list[nn.Module] = field(default_factory=list)
    # The groups that its parameters are sharded over. None, the groups of the call, is always the first.
    groups: list[Groups | None] = field(default_factory=lambda: [None])


class ModulePath(NamedTuple):
    """A module at one of the paths that lead to it."""

    fqn: str  # without what ``checkpoint_wrapper`` adds
    module: nn.Module
    path: tuple[nn.Module, ...]  # the modules from the root down to it


def list_paths(root: nn.Module, ignored: set[nn.Module]) -> list[ModulePath]:
    """Return each path from ``root`` to a module, depth first, without ignored modules.

    Modules that are already units, and everything below them, are left out.

    Raises:
        ValueError: a module is managed by another wrapper, such as FSDP or DDP.
    """
    paths: list[ModulePath] = []
    checked: set[type[nn.Module]] = set()
    stack = [ModulePath("", root, (root,))]
    while stack:
        fqn, module, path = last = stack.pop()
        paths.append(last)
        if type(module) not in checked:
            _check_unmanaged(type(module), fqn)
            checked.add(type(module))
        for name, child in reversed(module._modules.items()):
            if child is not None and child not in ignored and child not in path and UNIT_KEY not in child.__dict__:
                inner = fqn if name == HIDDEN else f"{fqn}.{name}" if fqn else name
                stack.append(ModulePath(inner, child, (*path, child)))
    return paths


def _check_unmanaged(kind: type[nn.Module], fqn: str) -> None:
    """Raise if another wrapper manages the parameters below a module of this class."""
    bases = {each.__name__ for each in kind.__mro__ if each.__module__.startswith("torch.")}
    if found := [wrapper for wrapper in _FOREIGN_WRAPPERS if wrapper in bases]:
        raise ValueError(
            f"{fqn or 'the module'!r} is managed by {found[0]} already: unwrap it, or pass it in ignored_states"
        )


def resolve_ignored(root: nn.Module, ignored_states: Iterable[Any] | None) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Return the modules (with all submodules) and the parameters in ``ignored_states``.

    Raises:
        TypeError, ValueError: something in it is not in ``root``, is sharded already, or is neither.
    """
    modules: set[nn.Module] = set()
    params: set[nn.Parameter] = set()
    if ignored_states is None:
        return modules, params
    in_root, in_root_params = set(root.modules()), set(root.parameters())
    for state in ignored_states:
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
    for module in modules:  # a unit inside would be neither sharded by this call nor ignored
        if unit_of(module) is not None:
            name = next(n for n, m in root.named_modules() if m is module)
            raise ValueError(
                f"{name!r} is sharded already, but is in an ignored module: do not shard it, or do not ignore the module"
            )
    return modules, params


def plan_units(
    root: nn.Module,
    paths: Sequence[ModulePath],
    chosen: Mapping[nn.Module, UnitConfig],
    ignored_params: set[nn.Parameter],
    ends: Collection[nn.Module] = (),
) -> list[PlannedUnit]:
    """Plan ``root`` and the ``chosen`` submodules (or groups of them) as units with these options, in module order.

    Units without registered parameters are dropped, except ``root``, where a pass begins. Their modules (which may have
    buffers) go to the enclosing unit.

    Args:
        root: the module to shard.
        paths: the modules of ``root``, as ``list_paths`` returns them.
        chosen: the options of each unit, ``root`` included.
        ignored_params: parameters that are not sharded.
        ends: the units that ``SplitRoot`` chose.

    Raises:
        ValueError: a parameter is sharded already, in a unit around ``root``.
    """
    of_module = {m: unit for unit in chosen if unit is not root for m in called_modules(unit)} | {root: root}
    units: dict[nn.Module, PlannedUnit] = {}
    around: dict[nn.Module, tuple[nn.Module, ...]] = {}  # for each unit, the chain of units down to it, outermost first
    owned: dict[nn.Parameter, PlannedParam] = {}
    # For each parameter, the chains of units down to its registrations, outermost first.
    chains: dict[nn.Parameter, list[tuple[nn.Module, ...]]] = {}
    seen: set[tuple[nn.Module, str]] = set()
    for fqn, module, path in paths:
        chain = tuple([of_module[m] for m in path if m in of_module])
        nearest = chain[-1]
        if (unit := units.get(nearest)) is None:
            unit = units[nearest] = PlannedUnit(nearest, fqn, chosen[nearest])
            around[nearest] = chain
        if module not in unit.modules:
            if unit.modules and of_module.get(module) is nearest:  # another module of a group
                unit.fqn += f", {fqn}"
            unit.modules.append(module)
        for name, param in module._parameters.items():
            if param is None or param in ignored_params:
                continue
            first = (module, name) not in seen
            seen.add((module, name))
            if isinstance(param, ShardedParameter):
                if first:
                    unit.foreign.append((module, name, param))
                continue
            record = owned.setdefault(param, PlannedParam(f"{fqn}.{name}" if fqn else name, param))
            chains.setdefault(param, []).append(chain)
            if first:
                record.registrations.append((module, name))
    for param, record in owned.items():
        # The last module that is in all chains. [Note: Shared parameters]
        first_chain, *others = chains[param]
        owner = first_chain[-1]
        if others:
            owner = next(m for m in reversed(first_chain) if all([m in chain for chain in others]))
        if owner is root and ends and all([chain[-1] in ends for chain in chains[param]]):
            owner = first_chain[-1]
        units[owner].owned.append(record)
        for chain in chains[param]:
            user = units[chain[-1]]
            if chain[-1] is not owner and owner not in user.uses:
                user.uses.append(owner)
    kept = {m: u for m, u in units.items() if u.owned or u.uses or u.foreign or m is root}
    for module, unit in units.items():
        if module not in kept:
            nearest = next(m for m in reversed(around[module]) if m in kept)
            kept[nearest].modules.extend(m for m in unit.modules if m not in kept[nearest].modules)
    for unit in kept.values():
        unit.holders = list(dict.fromkeys([*unit.modules, *[m for o in unit.owned for m, _ in o.registrations]]))
        _check_order(root, unit)
    return list(kept.values())


def _check_order(root: nn.Module, unit: PlannedUnit) -> None:
    """Raise if a parameter of ``unit`` was sharded already, by a unit around ``root``."""
    for _, name, param in unit.foreign:
        owner = owner_of(param)
        if owner is not None and any(m is root for m in owner.module.modules()):
            raise ValueError(
                f"{name!r} in this {type(root).__name__} is sharded already, as {param._flatshard_info.fqn!r} of the "
                f"unit around it, a {type(owner.module).__name__}: shard inner modules before outer ones, or call "
                "fully_shard once, on the outermost module, with a policy that chooses them"
            )


# -- checks ------------------------------------------------------------------------------------------------------------


def check_parameters(
    units: Iterable[PlannedUnit], device: torch.device | None, groups: Groups | None
) -> torch.device | None:
    """Check that parameters can be sharded over ``groups``, or over groups of their own.

    Returns ``device``, or if it is None the device that they are on, or None if that is meta.

    Raises:
        TypeError, ValueError, NotImplementedError: a parameter cannot be sharded; the message says why.
    """
    by_device: dict[torch.device, list[str]] = {}
    ranges: list[tuple[str, int, int, str]] = []
    for owned in [each for unit in units for each in unit.owned]:
        fqn, param = owned.fqn, owned.param
        inside: Iterable[torch.Tensor] = (param,)
        if type(param) is not nn.Parameter:
            _check_class(fqn, param)
            inside = plain_tensors(param)
            if is_dtensor(param):
                _check_mesh(fqn, param, [each for each in owned.groups or groups or () if each is not None])
        # A package beside torch, which annotates plain tensors. FSDP2 of torch 2.15 makes DTensors of these.
        if (spmd := sys.modules.get("spmd_types")) is not None and (types := spmd.get_local_type(param)):
            raise NotImplementedError(
                f"parameter {fqn!r} is annotated by spmd_types with {types}, which flatshard does not read: its gradient "
                "would not be reduced over other axes than those to shard over. Use DTensors in its place "
                "(parallelize_module), or pass it in ignored_states"
            )
        if param.layout is not torch.strided:
            raise ValueError(f"parameter {fqn!r} has layout {param.layout}: only dense parameters can be sharded")
        if not param.is_leaf:
            raise ValueError(f"parameter {fqn!r} is not a leaf of autograd's graph")
        for module, _ in owned.registrations:
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and owned.param.requires_grad:
                raise ValueError(
                    f"parameter {fqn!r} is that of an {type(module).__name__} with sparse=True, whose gradient cannot be "
                    "reduced into a flat gradient: set module.sparse = False, or pass the parameter in ignored_states"
                )
        by_device.setdefault(param.device, []).append(fqn)
        for plain in inside:
            if not plain.is_meta and plain.numel():
                start = plain.data_ptr()
                span = plain.numel()
                if not plain.is_contiguous():
                    span = sum([(n - 1) * s for n, s in zip(plain.shape, plain.stride(), strict=True)]) + 1
                ranges.append((str(plain.device), start, start + span * plain.itemsize, fqn))
    _check_overlap(ranges)
    if device is not None:
        return device
    real = {d: names for d, names in by_device.items() if d.type != "meta"}
    if len(real) > 1:
        where = "; ".join(f"{name_list(names, 3)} on {d}" for d, names in real.items())
        raise ValueError(f"parameters are on different devices: {where}. Move the module first, or pass device_id=...")
    return next(iter(real), None)


def _check_class(fqn: str, param: nn.Parameter) -> None:
    """Raise if ``param``, which is not a plain ``nn.Parameter``, is of a class that cannot be sharded."""
    if isinstance(param, UninitializedParameter):
        raise ValueError(f"parameter {fqn!r} is lazy and has no shape yet: run one forward before fully_shard")
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
    elif is_dtensor(param):
        if type(local := local_tensor(param)) is not torch.Tensor:
            raise NotImplementedError(
                f"parameter {fqn!r} is a DTensor with a {type(local).__name__} inside: tensor subclasses can be sharded only "
                "without tensor parallelism. Pass it in ignored_states"
            )
    else:
        kind: Any = type(param)
        has_function = kind.__torch_function__ is not torch._C._disabled_torch_function_impl
        if has_function or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise ValueError(
                f"parameter {fqn!r} is a {type(param).__name__}, a tensor subclass that does not say which tensors are "
                "inside: give it __tensor_flatten__ and __tensor_unflatten__, or pass it in ignored_states"
            )


def _check_mesh(fqn: str, param: Any, groups: Sequence[dist.ProcessGroup]) -> None:
    """Raise if a DTensor's mesh has ranks in common with the ``groups`` to shard over, or if its placements do not fit."""
    odd = [p for p in param.placements if not (p.is_replicate() or (p.is_shard() and type(p).__name__ == "Shard"))]
    if odd:
        raise ValueError(
            f"parameter {fqn!r} is a DTensor placed as {odd[0]}: only Shard(dim) and Replicate() can be sharded further. "
            "Redistribute it before fully_shard (param.redistribute(placements=[...])), or leave it out of the plan that "
            "divides it"
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


def _check_overlap(ranges: list[tuple[str, int, int, str]]) -> None:
    """Raise if two different parameters are in the same memory: sharding would silently make them independent."""
    ranges.sort(key=operator.itemgetter(0, 1))  # by device and start
    for (device, _, stop, fqn), (other_device, start, _, other) in itertools.pairwise(ranges):
        if device == other_device and start < stop and fqn != other:  # tensors inside one subclass are copied
            raise ValueError(
                f"parameters {fqn!r} and {other!r} are different Parameter objects in the same memory. Register one "
                "object under both names to tie them, or clone one"
            )


def warn_of_old_parameters(units: Iterable[PlannedUnit]) -> None:
    """Warn if the program still holds tensor subclasses that were replaced."""
    if held := [o.fqn for unit in units for o in unit.owned if o.was is not None and o.was() is not None]:
        warn_user(
            "fully_shard registered new parameters in the place of tensor subclasses (such as DTensors), but something "
            f"still holds the old {name_list(held)}. If it is an optimizer, it will not train them: build it after "
            "fully_shard"
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
        warn_user(
            f"{name_list(experts)} were sharded by an earlier call, over some of the ranks of this one. Norms and "
            "checkpoints take what the other ranks have under these names for copies. If they are other parameters, such as "
            "other experts, shard them in this call: fully_shard(..., shard_mesh_fn=lambda fqn, param: mesh['dp'] if "
            "'experts' in fqn else None), or make them DTensors first"
        )
