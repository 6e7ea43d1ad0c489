"""Convolutions on the meta device return the memory format that a real device returns.

[Note: Convolution on meta]
What a convolution of images returns is channels-last if its input or its weight is, but on meta it is contiguous. The size is
the same, but what follows is not: ``contiguous()`` copies or does not, and autograd copies the gradient of a weight whose
strides are not those of the weight. Backward has this rule on meta, too. Over one dimension they are contiguous, unless the
weight is channels-last. Over three it depends on the kernel that is chosen. Neither is recorded: they stay contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` returns on meta, with strides as on a real device. [Note: Convolution on meta]"""
    result = func(*args, **kwargs)
    if func is torch.ops.aten.convolution.default and any(map(_is_channels_last, args[:2])):
        return torch.empty_like(result, memory_format=torch.channels_last)
    return result


def _is_channels_last(tensor: Tensor) -> bool:
    """As torch asks: the strides of images grow from the channels to the batch."""
    if tensor.dim() != 4 or tensor.stride(1) == 0 or 0 in tensor.shape:
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        if tensor.stride(dim) < least or (dim == 0 and least == tensor.stride(1)):
            return False
        least = tensor.stride(dim) * tensor.size(dim)
    return True
