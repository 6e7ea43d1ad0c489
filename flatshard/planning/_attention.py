"""Attention on the meta device as a real device computes it.

[Note: Attention on meta]
``scaled_dot_product_attention`` chooses a kernel by its inputs. On meta there is no kernel, and torch computes the formula,
which saves the products of all queries and keys. A real kernel does not save them. So the operator of the formula is replaced
on meta while a step is recorded: it chooses as the real device would, and calls the operator of that kernel, which works on
meta.

For a CPU, torch itself chooses, by tensors of the same shapes that take next to no memory. For other devices the rule is the
one that torch documents: flash attention for 16 bits without a mask, the memory-efficient kernel otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

_FLASH = 1
"""torch's number of flash attention, the only kernel on a CPU beside the formula."""


@contextlib.contextmanager
def attention_as_on(device: str) -> Iterator[None]:
    """Compute attention on meta as ``device``, a type of device, does. [Note: Attention on meta]"""
    replaced = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    by_kernel = _on_cpu if device == "cpu" else _on_device
    replaced.impl("_scaled_dot_product_attention_math", functools.partial(_attention, by_kernel), "AutogradMeta")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        replaced._destroy()  # type: ignore[no-untyped-call]


def _attention(
    by_kernel: Callable[..., Tensor | None],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """Replace ``_scaled_dot_product_attention_math``, whose callers use only the first result."""
    if query.dim() == 4:
        result = by_kernel(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if result is not None:
            return result, query.new_empty(0)
    formula = torch.ops.aten._scaled_dot_product_attention_math.default
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return formula.decompose(query, key, value, attn_mask, dropout_p, is_causal, dropout_mask, **options)  # type: ignore[no-any-return]


def _on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor | None:
    """Return the result of the kernel, or None if there is no kernel for these arguments."""
    q, k, v = (_small(t) for t in (query, key, value))
    like_mask = None if mask is None else _small(mask)
    kind = torch._fused_sdp_choice(q, k, v, like_mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa)
    if kind != _FLASH:
        return None
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, dropout, is_causal, attn_mask=mask, scale=scale)[0]  # type: ignore[no-any-return]


def _on_device(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor | None:
    """Return the result of the kernel, or None if there is no kernel for these arguments."""
    size = query.size(-1)
    if not size == key.size(-1) == value.size(-1):
        return None
    if enable_gqa:
        groups = query.size(1) // key.size(1)
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scale = 1 / math.sqrt(size) if scale is None else scale  # of the size before it is padded
    whole = [F.pad(t, (0, -size % 8)) if size % 8 else t for t in (query, key, value)]
    if mask is None and query.dtype in (torch.float16, torch.bfloat16) and size <= 256:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(*whole, dropout, is_causal, scale=scale)[0][..., :size]  # type: ignore[no-any-return]
    if mask is not None:
        mask = mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    saves = any(t.requires_grad for t in (query, key, value))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(*whole, mask, saves, dropout, is_causal, scale=scale)[0][..., :size]  # type: ignore[no-any-return]


def _small(tensor: Tensor) -> Tensor:
    """Return a CPU tensor of the same shape and dtype whose rows all share memory."""
    size, last = tensor.size(-1), max(1, tensor.stride(-1))
    row = torch.zeros(1 + max(0, size - 1) * last, dtype=tensor.dtype, device="cpu")
    return row.as_strided(tensor.shape, [0] * (tensor.dim() - 1) + [last]).requires_grad_(tensor.requires_grad)
