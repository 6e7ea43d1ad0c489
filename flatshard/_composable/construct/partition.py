"""Which parameters each unit owns. All units are planned before any is flattened.

[Note: Shared parameters]
A parameter that is registered in several units belongs to their lowest common ancestor among the units: the last unit that is
on every path from the root to the parameter. So a unit that two others share keeps its own parameters. The other units in
which the parameter is registered *use* the owner: it is unsharded for their forward and backward, too, so that each of them
works standalone. A parameter that an earlier call sharded keeps its owner, and is used in the same way. A parameter that
``SplitRoot`` takes out of the root's unit belongs to the first of the units in which it is registered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from flatshard._base.names import HIDDEN, UNIT_KEY
from flatshard._composable.module_tree import called_modules
from flatshard._composable.state import owner_of, unit_of
from flatshard._composable.unit_config import UnitConfig
from flatshard._handle.planned import Groups, PlannedParam
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
        unit = units.setdefault(nearest, PlannedUnit(nearest, fqn, chosen[nearest]))
        around.setdefault(nearest, chain)
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
        owner = next(m for m in reversed(first_chain) if all(m in chain for chain in others))
        if owner is root and all(chain[-1] in ends for chain in chains[param]):
            owner = chains[param][0][-1]
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
