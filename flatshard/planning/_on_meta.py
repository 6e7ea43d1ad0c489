"""Operations whose results on the meta device are not those of a real device, or that have none there.

[Note: Convolution on meta]
What a convolution of images returns is channels-last if its input or its weight is, but on meta it is contiguous. The size is
the same, but what follows is not: ``contiguous()`` copies or does not, and autograd copies the gradient of a weight whose
strides are not those of the weight. Backward has this rule on meta, too. Over one dimension they are contiguous, unless the
weight is channels-last. Over three it depends on the kernel that is chosen. Neither is recorded: they stay contiguous.

Group norm keeps channels-last on a CPU, and is contiguous on other devices; on meta it has strides like its input's. Torch
2.13 makes its input contiguous on meta before anything here can tell: such a plan for a CPU counts one more copy of it.
Products of groups of matrices are computed in fp32, too, but on meta they are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_cpu: bool) -> Any:
    """What ``func`` returns on meta, with strides as on a real device. [Note: Convolution on meta]"""
    if func is aten._grouped_mm.default and args[0].dtype is torch.float32:
        return _grouped(*args[:3])
    result = func(*args, **kwargs)
    if func is aten.convolution.default and any(map(_is_channels_last, args[:2])):
        return torch.empty_like(result, memory_format=torch.channels_last)
    if func in (aten.native_group_norm.default, aten.native_group_norm_backward.default) and result[0] is not None:
        image = args[func is aten.native_group_norm_backward.default]
        form = torch.channels_last if on_cpu and _is_channels_last(image) else torch.contiguous_format
        return torch.empty_like(result[0], memory_format=form), *result[1:]
    return result


def _grouped(one: Tensor, other: Tensor, ends: Tensor | None = None) -> Tensor:
    """What ``_grouped_mm`` returns. Either has a matrix for each group, or all of them end to end."""
    groups = () if one.dim() != other.dim() else (len(one) if ends is None else len(ends),)
    return one.new_empty(*groups, one.size(-2), other.size(-1))


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
