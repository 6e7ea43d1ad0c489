"""Plans which parameters each unit owns. All units are planned before any is flattened.

[Note: Shared parameters]
A parameter that is registered in several units belongs to one of them, their lowest common ancestor among the units: the last
unit that is on every path from the root to the parameter. (So a unit that is shared by two others keeps its own parameters.)
The other units in which it is registered *use* that owner: the owner is unsharded for their forward and backward, too, so
that each of them works standalone. A parameter that an earlier call sharded keeps its owner and is used in the same way.
A parameter that ``SplitRoot`` takes out of the root's unit belongs to the first of the units in which it is registered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from flatshard._composable.module_tree import called_modules
from flatshard._composable.state import unit_of
from flatshard._composable.unit_config import UnitConfig
from flatshard._handle.planned import Groups, PlannedParam
from flatshard._handle.tensors.sharded_parameter import ShardedParameter
from flatshard._names import plain_name


@dataclass
class PlannedUnit:
    """A unit to create."""

    module: nn.Module  # or a `ModuleGroup`
    fqn: str
    config: UnitConfig
    modules: list[nn.Module] = field(default_factory=list)  # its module and all submodules that belong to no unit below
    owned: list[PlannedParam] = field(default_factory=list)
    uses: list[nn.Module] = field(default_factory=list)  # modules of planned units whose parameters are registered here
    foreign: list[tuple[nn.Module, str, ShardedParameter]] = field(default_factory=list)  # sharded by an earlier call

    @property
    def groups(self) -> list[Groups | None]:
        """What its parameters are sharded over, beginning with the groups of the call: see ``PlannedParam``."""
        return list(dict.fromkeys([None, *(owned.groups for owned in self.owned)]))

    @property
    def holders(self) -> list[nn.Module]:
        """Its modules, and modules of units below in which its shared parameters are registered."""
        return list(dict.fromkeys([*self.modules, *(m for o in self.owned for m, _ in o.registrations)]))


def walk(root: nn.Module, ignored: set[nn.Module]) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Yield (plain FQN, module, modules from ``root`` down to it) for each path, without ignored modules.

    Modules that are already units, and everything below them, are left out.
    """
    stack: list[tuple[str, nn.Module, tuple[nn.Module, ...]]] = [("", root, (root,))]
    while stack:
        fqn, module, path = stack.pop()
        yield fqn, module, path
        for name, child in reversed(list(module._modules.items())):
            if child is not None and child not in ignored and child not in path and unit_of(child) is None:
                stack.append((plain_name(f"{fqn}.{name}" if fqn else name), child, (*path, child)))


def plan_units(
    root: nn.Module,
    chosen: Mapping[nn.Module, UnitConfig],
    ignored: set[nn.Module],
    ignored_params: set[nn.Parameter],
    ends: Collection[nn.Module] = (),
) -> list[PlannedUnit]:
    """Plan the ``chosen`` submodules (or groups of them), and ``root``, as units with these options, in module order.

    ``ends``: those that ``SplitRoot`` chose.

    Units without registered parameters are dropped, except ``root``, where a pass begins. Their modules (which may have
    buffers) go to the enclosing unit.
    """
    of_module = {m: unit for unit in chosen if unit is not root for m in called_modules(unit)} | {root: root}
    units: dict[nn.Module, PlannedUnit] = {}
    around: dict[nn.Module, tuple[nn.Module, ...]] = {}  # for each unit, the chain of units down to it, outermost first
    owned: dict[nn.Parameter, PlannedParam] = {}
    # For each parameter, the chains of units down to its registrations, outermost first.
    chains: dict[nn.Parameter, list[tuple[nn.Module, ...]]] = {}
    seen: set[tuple[nn.Module, str]] = set()
    for fqn, module, path in walk(root, ignored):
        chain = tuple(of_module[m] for m in path if m in of_module)
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
        owner = _lowest_common(chains[param])
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
    return list(kept.values())


def _lowest_common(chains: list[tuple[nn.Module, ...]]) -> nn.Module:
    """The last module that is in all chains. [Note: Shared parameters]"""
    return next(m for m in reversed(chains[0]) if all(m in chain for chain in chains))
