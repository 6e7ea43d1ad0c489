"""``state_dict()`` and ``load_state_dict()`` of optimizers that step sharded parameters, by torch's own hooks on each.

[Note: What an optimizer hands out]
``torch.distributed.checkpoint.save({"optim": optimizer})``, ``get_optimizer_state_dict`` and ``torch.save`` take what
``optimizer.state_dict()`` has for whole tensors, unless they can see otherwise, and would save one rank's part of each for
all of it. So it has sharded values, as the model's. What is loaded may be sharded values of this rank, whole tensors, or
parts.

torch has no seam for optimizers that are made, only one for all steps. So an optimizer gets its hooks before its first step
on sharded parameters, or by ``load_optim_state_dict``; before that it has no state, but what plain ``load_state_dict`` put
there. That is looked at before the first step: then each rank takes its part, or refuses what isn't its own.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from flatshard._handle.tensors.sharded_parameter import ShardedParameter
from flatshard.checkpoint._optim_names import Names, steps_whole
from flatshard.checkpoint._optim_parts import parts_of_state
from flatshard.checkpoint._optim_state_dict import whole_optim_state
from flatshard.checkpoint._sharded_value import ShardedValue, sharded_value
from flatshard.checkpoint._standard_helpers import request
from flatshard.checkpoint._state_dict import idle_flats

_hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def hook_optimizer(optimizer: Optimizer) -> None:
    """[Note: What an optimizer hands out]"""
    if optimizer in _hooked:
        return
    _hooked.add(optimizer)
    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        return  # a wrapper without torch's __init__, as timm's Lookahead: the optimizer inside hands out the state
    if steps_whole(optimizer):
        optimizer.register_state_dict_post_hook(_refuse_helper)
    else:
        optimizer.register_state_dict_post_hook(_as_values)
        optimizer.register_load_state_dict_pre_hook(_as_parts)


def _as_values(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Sharded values in the place of this rank's parts; for a helper that asks for them, whole ones."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    asked = request("optim")
    if asked is not None and any(hasattr(p, "fqns") for p in params):
        raise RuntimeError(
            "get_optimizer_state_dict knows no flat parameters (flatshard.flat_parameters): call "
            "flatshard.checkpoint.optim_state_dict(module, optimizer)"
        )
    if asked is not None and asked.whole:
        call = "get_optimizer_state_dict(full_state_dict=True)"
        parameter_names = Names(asked.module, call, idle_flats(asked.module, call))
        whole, groups = whole_optim_state(parameter_names, [optimizer], asked.receives, asked.device)
        names = [name for group in groups for name in group["params"]]
        return {**state_dict, "state": {i: whole[name] for i, name in enumerate(names) if name in whole}}
    state = {
        number: {key: _value(params[number], key, value, asked is not None) for key, value in values.items()}
        if isinstance(number, int) and isinstance(values, dict)
        else values
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _refuse_helper(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    if request("optim") is not None:
        raise NotImplementedError(
            f"torch's helper wants every parameter's state on every rank, and {type(optimizer).__name__} keeps each on one: "
            "call flatshard.checkpoint.optim_state_dict(module, optimizer)"
        )


def _value(param: torch.Tensor, key: str, value: Any, by_name: bool) -> Any:
    """``by_name``: for a helper, which would take it for the whole."""
    if not isinstance(param, ShardedParameter) or not isinstance(value, torch.Tensor) or not value.dim():
        return value
    if isinstance(value, ShardedValue) or value.shape == param.shape:
        return value if isinstance(value, ShardedValue) else sharded_value(value, param)
    info = param._flatshard_info
    if by_name and (info.shard_world_size > 1 or info.parallel is not None):
        raise NotImplementedError(
            f"the optimizer's state {key!r} of {info.fqn!r} has shape {tuple(value.shape)}, the parameter has "
            f"{tuple(param.shape)} here: how it is sharded is known to the optimizer alone. Save optimizer.state_dict() "
            "by each rank"
        )
    return value


def _as_parts(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """This rank's parts in the place of sharded values and whole tensors."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    if len(params) != len(keys):
        return None  # the optimizer says so
    state = dict(state_dict["state"])
    for key, param in zip(keys, params, strict=True):
        if isinstance(param, ShardedParameter) and key in state:
            state[key] = parts_of_state(param, state[key])
    return {**state_dict, "state": state}
