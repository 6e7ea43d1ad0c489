"""Refuses parameters that are tied after ``fully_shard``: a sharded parameter that is registered in one more module.

No unit gathers the parameter for the new module, which would compute with this rank's part. If the module had a parameter of
the unit under that name before, the unit notices the assignment itself. For a new name, only torch's global hook for
parameter registrations tells. The hook remembers the module and the name, and the next pass checks them. It does not raise at
once, because a later ``fully_shard`` may take the module over, and because modules outside of the model may hold the
parameter.
"""

from __future__ import annotations

import functools
import weakref

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from flatshard._composable.extensions import Extension
from flatshard._composable.find import all_units
from flatshard._composable.state import Context, Unit, owner_of
from flatshard._handle.tensors.sharded_parameter import shard_info
from flatshard._names import plain_name


class LateTies(Extension):
    """Raises in the next forward after a parameter was tied."""

    def __init__(self) -> None:
        register_module_parameter_registration_hook(_note)


def _note(module: nn.Module, name: str, param: nn.Parameter) -> None:
    info = shard_info(param)
    if info is None:
        return
    held = module._parameters.get(name)
    if held is None or shard_info(held) is not info:  # else a unit registers its own parameters
        Context.checks.append(functools.partial(_check, weakref.ref(module), name))


def _check(to_module: weakref.ref[nn.Module], name: str, unit: Unit) -> bool:
    """Called when a pass of ``unit`` starts. Returns whether to check again in the next pass."""
    module = to_module()
    param = None if module is None else module._parameters.get(name)
    info = None if param is None else shard_info(param)
    units = all_units()
    if info is None or any(m is module and n == name for u in units for m, n, _, _ in u.handle.slots.entries):
        return False
    inside = {m: fqn for fqn, m in unit.module.named_modules()}
    if module in inside:
        new = plain_name(".".join(part for part in (unit.fqn, inside[module], name) if part))
        raise RuntimeError(
            f"{new!r} was registered after fully_shard, and is the sharded parameter {info.fqn!r}: the two would not be "
            f"tied, because no unit gathers for {new!r}. Tie parameters before fully_shard, or delete {new!r} again"
        )
    owner = None if param is None else owner_of(param)
    elsewhere = owner is not None and owner.module not in inside  # another model's pass will check it
    return elsewhere or any(module in set(u.module.modules()) for u in units)
