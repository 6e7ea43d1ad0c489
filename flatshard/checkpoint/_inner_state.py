"""The tensors inside of an optimizer's quantised state, as checkpoints have them.

[Note: Quantised state]
A quantised value is a tensor subclass with plain tensors inside: codes, a scale for each block of elements, a table. An entry
of an inner tensor is for a fixed number of elements of the parameter, in memory order, or the tensor is the same for all
parameters; trials with two lengths show which. So a checkpoint has 1-D tensors, of which a rank has a shard if its elements
begin with a block. Ranks that cut between blocks, too, may load them.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch.optim import Optimizer

from flatshard._base.optimizers import LENGTH, Group, first_tensors, shorter, steps_whole
from flatshard._handle.adapters.tensor_subclass import is_wrapper
from flatshard.checkpoint._boxes import memory_dims
from flatshard.checkpoint._optimizer_names import BY_EACH_RANK, SteppedParam
from flatshard.checkpoint._sharded_value import blocks_value

Sizes = dict[str, int | None]
"""By the name of an inner tensor: how many elements an entry is for, or None if the tensor is the same for all parameters."""


class Quantised:
    """The quantised values of an optimizer's state. [Note: Quantised state]"""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_known = type(optimizer).__module__.startswith("torch.optim")  # nothing is quantised
        self._made: dict[Any, dict[str, torch.Tensor]] = {}
        self._sizes: dict[tuple[str, type], Sizes | None] = {}

    def as_saved(self, param: SteppedParam, group: Group, memory: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the inner tensors of a parameter's state as a checkpoint has them, by the keys of ``memory``.

        Where this rank has no elements of the parameter, a trial shows which values are quantised on other ranks.

        Raises:
            NotImplementedError: it is not known which elements entries are for, or an entry is for elements of several ranks.
        """
        if self._is_known:
            return {}
        values, is_full = memory, param.is_full or steps_whole(self._optimizer)
        if memory and not is_full and not param.param.numel():
            with contextlib.suppress(RuntimeError):  # a class that cannot be tried: nothing is known of its values
                values = self._made_for(group, shorter(math.prod(param.shape)), param.param.dtype)
        found = {}
        for key, value in values.items():
            if is_wrapper(value) and key in memory:
                problem = f"the optimizer's state {key!r} of {param.fqn!r} is a {type(value).__name__}"
                sizes = self._sizes_of(group, key, value)
                found[key] = _shards(param, inner_tensors(value), sizes, problem, is_full)
        return found

    def _made_for(self, group: Group, numel: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        at = id(group), numel, dtype
        if at not in self._made:
            self._made[at] = first_tensors(self._optimizer, group, numel, dtype)
        return self._made[at]

    def _sizes_of(self, group: Group, key: str, value: torch.Tensor) -> Sizes | None:
        """Return how many elements entries are for, or None if two lengths do not show it."""
        at = key, type(value)
        if at not in self._sizes:
            lengths = shorter(value.numel()), shorter(value.numel()) + LENGTH
            made = (self._made_for(group, length, value.dtype).get(key, value) for length in lengths)
            self._sizes[at] = _compare_sizes(*made)
        return self._sizes[at]


def inner_tensors(value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors inside of ``value`` by name: 1-D, sharing memory."""
    names, _ = value.__tensor_flatten__()
    return {name: getattr(value, name).view(-1) for name in names}


def _compare_sizes(short: torch.Tensor, long: torch.Tensor) -> Sizes | None:
    if not is_wrapper(short) or type(short) is not type(long):
        return None
    sizes: Sizes = {}
    for (name, one), other in zip(inner_tensors(short).items(), inner_tensors(long).values(), strict=True):
        per, rest = divmod(short.numel(), len(one))
        if is_wrapper(one) or (len(one) != len(other) and (rest or per * len(other) != long.numel())):
            return None
        sizes[name] = None if len(one) == len(other) else per
    return sizes


def _shards(
    param: SteppedParam, tensors: dict[str, torch.Tensor], sizes: Sizes | None, problem: str, is_full: bool
) -> dict[str, Any]:
    """Return ``tensors`` as a checkpoint has them. ``is_full``: they are for all elements of the parameter."""
    info = param.info
    shape, stride = (param.shape, param.param.stride()) if info is None else (info.shape, info.stride)
    dims = [dim for dim in memory_dims(shape, stride) if shape[dim] > 1]
    if sizes is None or dims != sorted(dims) or param.place is not None or getattr(info, "parallel", None) is not None:
        raise NotImplementedError(
            f"{problem}. It is not known which elements its inner tensors are for. {BY_EACH_RANK}"
        )
    if info is None or is_full:
        return tensors
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        per, numel = sizes[name], info.stop - info.start
        if per is not None and numel and (info.start % per or numel != per * len(tensor)):
            raise NotImplementedError(
                f"{problem}, with one number for {per} elements, and this rank has {info.start}:{info.stop} of them: shard "
                f"with layout=flatshard.layouts.Blocks({per})"
            )
        found[name] = tensor if per is None else blocks_value(tensor[: numel // per], param.param, info, per)
    return found
