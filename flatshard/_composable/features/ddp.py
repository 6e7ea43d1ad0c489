"""Makes DistributedDataParallel (DDP) ignore the parameters of sharded units.

[Note: DistributedDataParallel around units]
DDP would broadcast rank 0's shards to all other ranks, and overwrite theirs. If the parts have equal sizes, there would be no
error. Tools wrap a model in DDP without being asked: accelerate's ``prepare``, transformers' ``Trainer``, Lightning's "ddp"
and "auto"; and the module they wrap may contain the one that was given to ``fully_shard``. So flatshard acts when DDP
registers its module. At that point DDP has a set of parameter names to ignore, and has not communicated yet. The names of
sharded parameters are added to this set. DDP replicates the plain layers beside the units as usual.
Tools that broadcast without DDP (Lightning's "ddp" does, to validate) call C++ functions, which no tensor class can refuse.
They ask the module for the names to ignore, as DDP does: so each module given to ``fully_shard`` has this list.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from flatshard._base.errors import name_list
from flatshard._base.names import DDP_IGNORES
from flatshard._comm.runtime import Runtime
from flatshard._composable.extensions import Extension
from flatshard._composable.features.not_sharded import leave_to_others
from flatshard._composable.find import all_units
from flatshard._composable.state import Unit
from flatshard._composable.unit_config import UnitConfig


class IgnoredByDDP(Extension):
    """Registers the hook that makes DDP ignore sharded parameters."""

    def __init__(self) -> None:
        self._watching: list[Any] = []

    def prepare(self, module: nn.Module, configs: Collection[UnitConfig], runtime: Runtime) -> None:
        if not self._watching:
            self._watching.append(register_module_module_registration_hook(_registered))

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        named = [*module.__dict__.get(DDP_IGNORES, ()), *sorted(_every_name(_divide(module)[0]))]
        module.__dict__[DDP_IGNORES] = list(dict.fromkeys(named))


def _every_name(fqns: Collection[str]) -> set[str]:
    """Yield each name in the ways in which DDP writes it: a parameter of the root with and without a leading dot."""
    return {*fqns, *(f".{fqn}" for fqn in fqns if "." not in fqn)}


def _registered(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    if not isinstance(wrapper, DistributedDataParallel) or name != "module" or module is None:
        return
    sharded, left = _divide(module)
    if not sharded:
        return
    if not left:
        raise RuntimeError(
            f"DistributedDataParallel: all trainable parameters of this {type(module).__name__} are sharded, such as "
            f"{name_list(sharded, 3)}, and flatshard averages their gradients itself. Do not use DistributedDataParallel. If "
            "a tool adds it, choose its single-device strategy, or do not pass the model to it"
        )
    wrapper.parameters_to_ignore |= _every_name(sharded)
    leave_to_others(module)


def _divide(module: nn.Module) -> tuple[list[str], list[str]]:
    """Return the FQNs of sharded parameters in ``module``, under all of their names, and of other trainable parameters."""
    registrations = {(holder, name) for unit in all_units() for holder, name, _, _ in unit.handle.registrations.entries}
    sharded, left = [], []
    for prefix, at in module.named_modules(remove_duplicate=False):
        for name, param in at._parameters.items():
            fqn = f"{prefix}.{name}" if prefix else name
            if (at, name) in registrations:
                sharded.append(fqn)
            elif param is not None and param.requires_grad:
                left.append(fqn)
    return sharded, left
