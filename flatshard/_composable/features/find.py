"""Finds the units of the module that a user passes to a public function. If there are none, the error says where they are."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from flatshard._composable.state import Unit, owner_of, unit_of, units_below
from flatshard._errors import name_list
from flatshard._handle.tensors.sharded_parameter import shard_info
from flatshard._names import HIDDEN


def unwrapped(module: nn.Module) -> nn.Module:
    """``module``, or the unit's module that ``checkpoint_wrapper`` has wrapped in it."""
    while unit_of(module) is None and HIDDEN in module._modules:
        module = module.get_submodule(HIDDEN)
    return module


def unit_for(module: nn.Module, verb: str) -> Unit:
    """The unit of ``module``, or of the module that ``checkpoint_wrapper`` has wrapped in it."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{verb} takes an nn.Module, got a {type(module).__name__}")
    if (unit := unit_of(unwrapped(module))) is not None:
        return unit
    kind = type(module).__name__
    owners = dict.fromkeys(owner for p in module.parameters() if (owner := owner_of(p)) is not None)
    if below := units_below(module):
        raise ValueError(
            f"{verb}: this {kind} is not a unit, but contains units: {name_list(u.fqn for u in below)}. Call fully_shard on "
            "it as well, or pass one of these"
        )
    if owners:
        raise ValueError(
            f"{verb}: this {kind} is part of unit {name_list(u.fqn for u in owners)}, and not a unit itself: pass that unit, "
            "or make the module a unit by the policy"
        )
    raise ValueError(f"{verb}: nothing in this {kind} is sharded; call fully_shard first")


def settle(units: Iterable[Unit]) -> None:
    """Drop what an exception has left of an earlier forward or backward, so that a verb finds the same on all ranks."""
    for context in {unit.context for unit in units}:
        context.settle()


def units_for(module: nn.Module, recurse: bool, verb: str) -> list[Unit]:
    """The units of ``module`` and, with ``recurse``, of its submodules; at least one."""
    return (units_below(module) if recurse and isinstance(module, nn.Module) else []) or [unit_for(module, verb)]


def units_registered_in(module: nn.Module, recurse: bool, verb: str) -> list[Unit]:
    """The units whose parameters are registered in ``module``, including the owners of tied ones."""
    units: dict[Unit, None] = {}
    for unit in units_below(module, recurse):
        units.update(dict.fromkeys(unit.needs))
    if not units:
        if any(shard_info(p) is not None for p in module.parameters()):
            raise ValueError(
                f"{verb}: this {type(module).__name__} is part of a unit, and not a unit itself: call it on the unit, or "
                "make the module a unit by the policy"
            )
        raise ValueError(f"{verb}: nothing in this {type(module).__name__} is sharded; call fully_shard first")
    return list(units)
