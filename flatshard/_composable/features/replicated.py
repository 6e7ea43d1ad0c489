"""DistributedDataParallel around sharded units: it must leave them alone.

[Note: DistributedDataParallel around units]
It would broadcast rank 0's shards over those of all other ranks, and where ranks have parts of equal size nobody would
notice. Tools wrap a model unasked: accelerate's ``prepare``, transformers' ``Trainer``, Lightning's "ddp" and "auto"; and not
always the very module that ``fully_shard`` has seen. So the wrapper is met where it registers its module: by then it has made
the set of names that it leaves alone, and it has sent nothing. The sharded ones join that set. Plain layers beside the units
are replicated as ever.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from flatshard._composable.extensions import Extension
from flatshard._composable.features.left_alone import leave_to_others
from flatshard._composable.state import UnitConfig, all_units
from flatshard._errors import name_list
from flatshard._runtime import Runtime


class Replicated(Extension):
    """Has DistributedDataParallel ignore what is sharded."""

    def __init__(self) -> None:
        self._watching: list[Any] = []

    def prepare(self, module: nn.Module, configs: Collection[UnitConfig], runtime: Runtime) -> None:
        if not self._watching:
            self._watching.append(register_module_module_registration_hook(_registered))


def _registered(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    if not isinstance(wrapper, DistributedDataParallel) or name != "module" or module is None:
        return
    sharded, left = _divide(module)
    if not sharded:
        return
    if not left:
        raise RuntimeError(
            f"DistributedDataParallel: all trainable parameters of this {type(module).__name__} are sharded, such as "
            f"{name_list(sharded, 3)}, and flatshard averages their gradients itself. Leave DistributedDataParallel out; in "
            "a tool that puts it there unasked, choose its single-device strategy, or do not hand it the model"
        )
    # Names of the root's own parameters: both ways in which DistributedDataParallel writes them.
    wrapper.parameters_to_ignore |= {*sharded, *(f".{fqn}" for fqn in sharded if "." not in fqn)}
    leave_to_others(module)


def _divide(module: nn.Module) -> tuple[list[str], list[str]]:
    """The FQNs in ``module`` of what is sharded, under each of its names; and of what else is to be trained."""
    slots = {(holder, name) for unit in all_units() for holder, name, _, _ in unit.handle.slots.entries}
    sharded, left = [], []
    for prefix, at in module.named_modules(remove_duplicate=False):
        for name, param in at._parameters.items():
            fqn = f"{prefix}.{name}" if prefix else name
            if (at, name) in slots:
                sharded.append(fqn)
            elif param is not None and param.requires_grad:
                left.append(fqn)
    return sharded, left
