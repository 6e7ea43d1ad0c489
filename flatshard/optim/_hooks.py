"""What is looked at before an optimizer of sharded parameters steps.

[Note: Optimizers that look at shapes]
Muon on some rows of a matrix, or Adafactor on a slice, runs without any error, and trains something else. So optimizers of
known classes are looked at before their first step, and again when they have more parameters or more is sharded, on all
ranks alike. Others can ask for it: ``check_whole_parameters``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatshard._composable.extensions import Extension
from flatshard._composable.features.left_alone import added_later
from flatshard._composable.features.looked_at import LookedAt
from flatshard._composable.state import all_units
from flatshard._errors import name_list
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, shard_info
from flatshard.checkpoint._optim_hooks import hook_optimizer
from flatshard.checkpoint._optim_parts import take_loaded

_looked_at = LookedAt()
_watching: list[Any] = []


class Optimizers(Extension):
    """Notices optimizers of sharded parameters as they step."""

    def prepare(self, module: nn.Module) -> None:
        _looked_at.clear()  # the parameters of one that has stepped may be sharded now
        if not _watching:
            _watching.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _looked_at:
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if plain := {id(p) for p in params if not isinstance(p, ShardedParameter)}:
        _warn_about_added(optimizer, plain)
    if any(isinstance(p, ShardedParameter) for p in params):
        _check_shapes(optimizer, params)
        hook_optimizer(optimizer)
        take_loaded(optimizer)
    _looked_at.add(optimizer)


def _warn_about_added(optimizer: Optimizer, plain: set[int]) -> None:
    """[Note: Added after sharding]. ``plain``: the ids of its parameters that are not sharded."""
    found: dict[int, str] = {}
    for unit in sorted(all_units(), key=lambda unit: len(unit.fqn)):  # so that names are those of the outermost
        if max(unit.context.runtime.world_size, getattr(unit.handle.replicas, "world_size", 1)) > 1:
            for _, fqn, param in added_later(unit.module):
                if id(param) in plain:
                    found.setdefault(id(param), f"{unit.fqn}.{fqn}" if unit.fqn else fqn)
    if found:
        warnings.warn(
            f"{type(optimizer).__name__} steps {name_list(found.values(), 3)}, registered in a sharded module after "
            "fully_shard: nobody averages their gradients, so every rank trains its own. Add modules and parameters before "
            "fully_shard, or pass them to it as ignored_states and average their gradients yourself",
            stacklevel=4,
        )


# By class name, as most come from packages of their own: whether each can step parameters of which it has no element.
_SHAPE_AWARE = {
    **dict.fromkeys(("muon", "shampoo", "distributedshampoo", "soap", "lamb", "nvlamb", "fusedlamb", "lars"), True),
    **dict.fromkeys(("adafactor", "came", "sm3", "kron", "galoreadamw", "apolloadamw"), False),
}


def steps_empty_parts(optimizer: Optimizer) -> bool | None:
    """Of one that looks at shapes, whether it can step parameters of which it has no element; None: it looks at none."""
    if getattr(optimizer, "works_on_shards", False):
        return None
    return _SHAPE_AWARE.get(type(optimizer).__name__.lower())


def _check_shapes(optimizer: Optimizer, params: Iterable[torch.Tensor]) -> None:
    """[Note: Optimizers that look at shapes]"""
    name, steps_empty = type(optimizer).__name__, steps_empty_parts(optimizer)
    if steps_empty is None:
        return
    check_whole_parameters(params, name)
    scattered = [i for p in params if (i := shard_info(p)) is not None and i.shard_world_size > 1]
    if not steps_empty and scattered:
        raise RuntimeError(
            f"{name} cannot step parameters of which a rank has no element, such as {scattered[0].fqn!r} on some ranks: "
            f"use flatshard.optim.WholeParameterOptimizer(params, {name}, ...)"
        )


def check_whole_parameters(params: Iterable[torch.Tensor], optimizer: str = "this optimizer") -> None:
    """Raise unless each of ``params`` lies on one rank as a whole: for an optimizer that looks at more than single elements.

    The same on all ranks, without communication. flatshard calls it before the first step of optimizers named Muon, Shampoo,
    SOAP, LAMB, LARS, Adafactor and the like, unless they have an attribute ``works_on_shards = True``.

    Args:
        params: sharded and plain parameters.
        optimizer: its name, for the message.

    Raises:
        RuntimeError: some are cut between ranks, or are 1-D here although whole, or are sharded by tensor parallelism.
    """
    infos = [i for p in params if (i := shard_info(p)) is not None]
    parallel = [i.fqn for i in infos if i.parallel is not None and any(p.is_shard() for p in i.parallel.placements)]
    if parallel:
        raise RuntimeError(
            f"{optimizer} looks at whole parameters, and no rank has all of {name_list(parallel, 3)}, which are sharded by "
            "tensor parallelism: step them by an optimizer of single elements, such as AdamW"
        )
    cut = [i.fqn for i in infos if i.shard_world_size > 1 and (i.owner is None or not (i.by_rows or len(i.shape) < 2))]
    if cut:
        raise RuntimeError(
            f"{optimizer} looks at whole parameters, but ranks have parts of {name_list(cut, 3)}: stepping each part alone "
            f"would train something else. Use flatshard.optim.WholeParameterOptimizer(params, {optimizer}, ...), which works "
            "in any layout, or shard with layout=flatshard.layouts.Whole()"
        )
