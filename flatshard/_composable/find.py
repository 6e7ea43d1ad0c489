"""Finds the units of a module, of its parameters, or of the argument of a public function. Errors name the units nearby.

And, by a ``FeatureLink``, a unit's feature, for hooks inside the unit.

[Note: Which units a module stands for]
Verbs on parameters and their gradients (``summon_full_params``, ``full_state_dict``, ``unshard``, ``no_sync``, ...) are for
all parameters registered in the module, so they go to the units that own these: ``units_of``. A unit may be around the
module, and is then gathered or held with all its parameters. Verbs on units (``configure``, ``register_forward_method``,
hooks) change forwards, so they go to the units in the module: ``units_in``, ``unit_for``. They raise for a module without
any, and the error names the unit around it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch import nn

from flatshard._base.errors import name_list
from flatshard._base.names import HIDDEN
from flatshard._composable.module_tree import called_modules
from flatshard._composable.state import Context, Unit, made_units, owner_of, unit_of
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.tensors.sharded_parameter import show_shards

F = TypeVar("F")  # a `ForwardFeature`


def all_units() -> list[Unit]:
    """Return all units of this process, without units whose modules a deep copy did not finish."""
    return [unit for unit in made_units.values() if _is_finished(unit)]


def _is_finished(unit: Unit) -> bool:
    """Return whether its modules know it: a deep copy gives a module its attributes last, after its unit is made."""
    return all([unit_of(each) is unit for each in (unit.module, *called_modules(unit.module))])


def flat_of(param: nn.Parameter) -> FlatParam | None:
    """Return the flat parameter that contains a sharded parameter, or None."""
    unit = owner_of(param)
    return None if unit is None else next((f for f in unit.handle.flats if f.index_of(param) is not None), None)


def units_below(module: nn.Module) -> list[Unit]:
    """Return the units of ``module`` and of its submodules, in module order."""
    return list(dict.fromkeys([unit for m in module.modules() if (unit := unit_of(m)) is not None]))


def units_of_parameters(module: nn.Module, recurse: bool = True) -> list[Unit]:
    """Return the units that own the parameters registered in ``module``, in module order, the same on all ranks.

    Their modules may be in it, around it, or beside it (for a tied parameter). Units in it count even if they own none.
    Without ``recurse``, parameters in units below ``module`` do not count.
    """
    found: dict[Unit, None] = {}
    for each in module.modules() if recurse else _in_no_unit_below(module):
        if (unit := unit_of(each)) is not None:
            found.update(dict.fromkeys(unit.needs))
        for param in each._parameters.values():
            if param is not None and (owner := owner_of(param)) is not None:
                found.setdefault(owner)
    return list(found)


def _in_no_unit_below(module: nn.Module) -> Iterator[nn.Module]:
    """Yield ``module`` and the modules in it, without units below it."""
    yield module
    for child in module.children():
        if unit_of(child) is None:
            yield from _in_no_unit_below(child)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return ``module``, or the unit's module that ``checkpoint_wrapper`` has wrapped in it."""
    while unit_of(module) is None and HIDDEN in module._modules:
        module = module.get_submodule(HIDDEN)
    return module


def unit_for(module: nn.Module, verb: str) -> Unit:
    """Return the unit of ``module``, or of the module that ``checkpoint_wrapper`` has wrapped in it."""
    _check_module(module, verb)
    if (unit := unit_of(unwrapped(module))) is not None:
        return unit
    kind = type(module).__name__
    if below := units_below(module):
        raise ValueError(
            f"{verb}: this {kind} is not a unit, but contains units: {name_list(u.fqn for u in below)}. Call fully_shard on "
            "it as well, or pass one of these"
        )
    if owners := units_of_parameters(module):
        raise ValueError(
            f"{verb}: this {kind} is part of unit {name_list(u.fqn for u in owners)}, and not a unit itself: pass that unit, "
            "or make the module a unit by the policy"
        )
    raise ValueError(f"{verb}: nothing in this {kind} is sharded; call fully_shard first")


def units_in(module: nn.Module, recurse: bool, verb: str) -> list[Unit]:
    """Return the units of ``module`` and, with ``recurse``, of its submodules; at least one. See the note above."""
    _check_module(module, verb)
    return (units_below(module) if recurse else []) or [unit_for(module, verb)]


def units_of(module: nn.Module, verb: str, recurse: bool = True) -> list[Unit]:
    """Return the units that own parameters registered in ``module``, and with ``recurse`` in units below; at least one.

    See the note above.
    """
    _check_module(module, verb)
    return units_of_parameters(unwrapped(module), recurse) or [unit_for(module, verb)]


def _check_module(module: object, verb: str) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{verb} takes an nn.Module, got a {type(module).__name__}")
    show_shards()  # a verb is no initialiser


def contexts_of(units: Iterable[Unit]) -> list[Context]:
    """Return the contexts of ``units``, in an order that is the same on all ranks."""
    return list(dict.fromkeys(u.context for u in sorted(units, key=lambda unit: unit.runtime.number)))


class FeatureLink(Generic[F]):
    """A reference to a unit's feature, for hooks on modules inside the unit, which are copied with their modules.

    A copy of the link refers to no feature until the unit has been copied, which must begin with the unit's module. If an
    inner module is copied alone, its link never refers to one.
    """

    def __init__(self, feature: F | None) -> None:
        self._ref = None if feature is None else weakref.ref(feature)

    @property
    def feature(self) -> F | None:
        """The feature, or None in a copy of a module without its unit."""
        return None if self._ref is None else self._ref()

    def __deepcopy__(self, memo: dict[int, Any]) -> FeatureLink[F]:
        return FeatureLink(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return FeatureLink, (self.feature,)  # pickling the feature's unit raises an error that says what to do

    def give_to_copy(self, feature: F, memo: dict[int, Any]) -> FeatureLink[F]:
        """Make the copy of this link in ``memo`` refer to ``feature``, and return it."""
        result = copy.deepcopy(self, memo)
        result._ref = weakref.ref(feature)
        return result
