"""Optimizers of sharded parameters, as torch's own helpers see them.

[Note: Optimizer state in the standard helpers]
``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` takes ``optimizer.state_dict()`` for whole tensors unless
they are DTensors, and would save one rank's part of each for all of it. So an optimizer that steps sharded parameters gets
hooks of its own, at its first step (which these helpers take, where there was none): what the helper reads are sharded
values, and what is loaded may be sharded values or whole tensors. To anybody else ``optimizer.state_dict()`` is what it
always is: this rank's parts, for this rank to load. One that has loaded such a state and not stepped since has no hooks yet.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatshard._handle.sharded_parameter import ShardedParameter, ShardInfo
from flatshard._handle.sharded_value import ShardedValue, check_source, local_source, sharded_value

_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_watching: list[Any] = []


def watch_optimizers() -> None:
    """From now on, notice optimizers of sharded parameters as they step. Idempotent."""
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _seen:
        _seen.add(optimizer)
        if any(isinstance(p, ShardedParameter) for group in optimizer.param_groups for p in group["params"]):
            optimizer.register_state_dict_post_hook(_as_values)
            optimizer.register_load_state_dict_pre_hook(_as_parts)


def refuse_to_gather(kind: str, function: str) -> None:
    """Raise if torch's helper for state of this ``kind`` wants whole tensors, which it gathers of DTensors only."""
    frame = _helper(f"_get_{kind}_state_dict")
    if frame is not None and getattr(frame.f_locals.get("info"), "full_state_dict", False):
        raise RuntimeError(
            f"StateDictOptions(full_state_dict=True) gathers nothing that flatshard shards: call {function} on all ranks"
        )


def _helper(name: str) -> FrameType | None:
    """The frame of that function of ``torch.distributed.checkpoint.state_dict``, if it has called us."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (
            frame.f_code.co_name == name
            and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
        ):
            return frame
        frame = frame.f_back
    return None


def _as_values(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """For the helper: sharded values in the place of this rank's parts."""
    if _helper("_get_optim_state_dict") is None:
        return None
    refuse_to_gather("optim", "flatshard.optim_state_dict(module, optimizer, full=True, rank0_only=...)")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(hasattr(p, "fqns") for p in params):
        raise RuntimeError(
            "get_optimizer_state_dict knows no flat parameters (flatshard.flat_parameters): call "
            "flatshard.optim_state_dict(module, optimizer)"
        )
    state = {
        number: {key: _value(params[number], key, value) for key, value in values.items()}
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _value(param: torch.Tensor, key: str, value: Any) -> Any:
    if not isinstance(param, ShardedParameter) or not isinstance(value, torch.Tensor):
        return value
    info = param._flatshard_info
    if not value.dim() or (info.shard_world_size == 1 and info.parallel is None):
        return value
    if value.shape != param.shape:
        raise NotImplementedError(
            f"the optimizer's state {key!r} of {info.fqn!r} has shape {tuple(value.shape)}, the parameter has "
            f"{tuple(param.shape)} here: how it is sharded is known to the optimizer alone. Save optimizer.state_dict() "
            "by each rank"
        )
    return sharded_value(value, info)


def _as_parts(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """This rank's parts in the place of sharded values and whole tensors."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    if len(params) != len(keys):
        return None  # the optimizer says so
    state = dict(state_dict["state"])
    for key, param in zip(keys, params, strict=True):
        if isinstance(param, ShardedParameter) and key in state:
            info = param._flatshard_info
            state[key] = {name: _part(info, param, name, value) for name, value in state[key].items()}
    return {**state_dict, "state": state}


def _part(info: ShardInfo, param: torch.Tensor, name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not (value.dim() or isinstance(value, ShardedValue)):
        return value
    whole = info.shape if info.parallel is None else info.parallel.shape
    if not isinstance(value, ShardedValue) and tuple(value.shape) != tuple(whole):
        return value  # a part
    if problem := check_source(info, value.dtype, value):
        raise ValueError(f"the optimizer's state {name!r} of {info.fqn!r}: {problem}")
    return local_source(info, value).clone()
