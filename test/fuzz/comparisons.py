"""Comparisons of tensors, and of a shard with its slice of a full tensor."""

from typing import Any

import torch
from parity import FLOOR
from torch import Tensor

import flatshard


def flat(own: Tensor, info: Any) -> Tensor:
    """Return the shard's elements in memory order."""
    own = own.detach().as_subclass(torch.Tensor)
    return own.reshape(-1) if info is None or own.dim() < 2 or own.is_contiguous() else info.in_memory_order(own)


def part_of(own: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's slice of a full tensor."""
    info = flatshard.tensors.shard_info(own)
    if info is None:
        return whole.detach().reshape(-1)
    if whole.stride() == info.stride and whole.is_contiguous():
        return whole.detach().view(-1)[info.start : info.stop]
    dense = torch.empty_strided(whole.shape, info.stride, dtype=whole.dtype).copy_(whole.detach())
    return dense.as_strided((dense.numel(),), (1,))[info.start : info.stop]


Pair = tuple[Tensor, Tensor, float, str, float]
"""A tensor, its expected value, and the other arguments of :func:`close`."""


def all_close(pairs: list[Pair]) -> None:
    """Call :func:`close` for each pair, unless one comparison shows that all are much closer, as nearly always."""
    if not pairs:
        return
    alike = all(got.dtype == expected.dtype and got.numel() == expected.numel() for got, expected, *_ in pairs)
    if alike:
        found, wanted = (torch.cat([pair[i].detach().reshape(-1).double() for pair in pairs]) for i in range(2))
        if not found.numel() or (found - wanted).abs().max().item() <= FLOOR * min(pair[2] for pair in pairs):
            return
    for pair in pairs:
        close(*pair)


def largest(t: Tensor | None) -> float:
    return t.detach().abs().max().item() if t is not None and t.numel() else 0.0


def close(got: Tensor, expected: Tensor, rtol: float, what: str, scale: float = 0.0) -> None:
    """Raise if the relative error is above ``rtol``. It is relative to the largest expected value, or to ``scale`` if
    larger."""
    got, expected = got.detach().cpu(), expected.detach()
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    got, expected = got.reshape(-1), expected.reshape(-1)
    assert got.shape == expected.shape, f"{what}: {got.numel()} elements, expected {expected.numel()}"
    if not got.numel() or torch.equal(got, expected):
        return
    scale = max(largest(expected.double()), scale, FLOOR)
    error = (got.double() - expected.double()).abs().max().item() / scale
    assert error <= rtol, f"{what}: {got[:4].tolist()}, expected {expected[:4].tolist()} ({error:.2g} relative)"
