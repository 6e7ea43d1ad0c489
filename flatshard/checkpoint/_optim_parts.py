"""One parameter's optimizer state as this rank keeps it: its own parts, whatever was loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from flatshard._handle.tensors.sharded_parameter import ShardedParameter
from flatshard.checkpoint._optim_names import steps_whole
from flatshard.checkpoint._sharded_value import ShardedValue, check_source, local_source


def take_loaded(optimizer: Optimizer) -> None:
    """Put this rank's parts in the place of what was loaded before there were hooks.

    Raises:
        ValueError: it is no part of this rank's. Nothing is changed.
    """
    if not steps_whole(optimizer):
        found = {p: parts_of_state(p, state) for p, state in optimizer.state.items() if isinstance(p, ShardedParameter)}
        for param, parts in found.items():
            optimizer.state[param].update(parts)


def parts_of_state(param: ShardedParameter, state: dict[str, Any]) -> dict[str, Any]:
    """This rank's parts in the place of sharded values and whole tensors.

    Raises:
        ValueError: some are of another rank or layout.
    """
    return {key: _part(param, key, value) for key, value in state.items()}


def _part(param: ShardedParameter, key: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not (value.dim() or isinstance(value, ShardedValue)):
        return value
    info = param._flatshard_info
    whole = info.shape if info.parallel is None else info.parallel.shape
    if not isinstance(value, ShardedValue) and (value.shape == param.shape or tuple(value.shape) != tuple(whole)):
        return value  # a part
    if problem := check_source(info, value.dtype, value):
        raise ValueError(f"the optimizer's state {key!r} of {info.fqn!r}: {problem}")
    return local_source(info, value).clone()
