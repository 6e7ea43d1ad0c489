"""A unit's parameter that is registered in one more place after ``fully_shard``: it would not be tied.

Nobody gathers for that place: the module there would compute with this rank's part. Where something of the unit's was
registered before, the unit sees what took its place. Of a new name only torch's hook for registrations tells. It notes the
place, which is looked at when the next pass starts: a later ``fully_shard`` may have taken it over by then, and lists of
parameters outside of the model are nobody's concern.
"""

from __future__ import annotations

import functools
import weakref

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from flatshard._composable.context import Context
from flatshard._composable.extensions import Extension
from flatshard._composable.state import Unit, all_units, owner_of
from flatshard._handle.tensors.sharded_parameter import shard_info
from flatshard._names import plain_name


class LateTies(Extension):
    """Refuses them in the next forward."""

    def __init__(self) -> None:
        register_module_parameter_registration_hook(_note)


def _note(module: nn.Module, name: str, param: nn.Parameter) -> None:
    info = shard_info(param)
    if info is None:
        return
    held = module._parameters.get(name)
    if held is None or shard_info(held) is not info:  # else a unit shows its own parameters
        Context.checks.append(functools.partial(_check, weakref.ref(module), name))


def _check(to_module: weakref.ref[nn.Module], name: str, unit: Unit) -> bool:
    """A pass of ``unit`` starts. Returns whether to look again when the next one does."""
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
            f"{new!r} was registered after fully_shard, and is {info.fqn!r}, which is sharded: the two would not be tied, as "
            f"no unit gathers for {new!r}. Tie parameters before fully_shard, or take {new!r} away again"
        )
    owner = None if param is None else owner_of(param)
    elsewhere = owner is not None and owner.module not in inside  # it is another model's turn
    return elsewhere or any(module in set(u.module.modules()) for u in units)
