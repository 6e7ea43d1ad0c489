"""Operations whose results on the meta device differ from a real device's, or that meta refuses.

[Note: Convolution on meta]
The result of a 2-D convolution is channels-last if the input or the weight is, but on meta it is contiguous. This changes the
memory of later operations: ``contiguous()`` may copy, and autograd copies a gradient whose strides are not the weight's. The
backward of a convolution has the right strides on meta. Results of 1-D and 3-D convolutions stay contiguous here. On a device
a 1-D result is contiguous unless the weight is channels-last, and a 3-D result depends on the kernel.

The result of group norm is channels-last on a CPU if its input is, and contiguous on other devices. On meta it has strides
like its input's. Torch 2.13 makes the input contiguous on meta before this file sees it, so a plan for a CPU counts one more
copy.

Grouped matrix products in fp32 work on real devices, and are refused on meta.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_cpu: bool) -> Any:
    """Return the result of ``func`` on meta, with strides as on a real device. [Note: Convolution on meta]"""
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
    """Return the result of ``_grouped_mm``. Each input has a matrix for each group, or all of them end to end."""
    groups = () if one.dim() != other.dim() else (len(one) if ends is None else len(ends),)
    return one.new_empty(*groups, one.size(-2), other.size(-1))


def _is_channels_last(tensor: Tensor) -> bool:
    """Return whether strides grow from channels to batch, by the test of torch."""
    if tensor.dim() != 4 or tensor.stride(1) == 0 or 0 in tensor.shape:
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        if tensor.stride(dim) < least or (dim == 0 and least == tensor.stride(1)):
            return False
        least = tensor.stride(dim) * tensor.size(dim)
    return True
