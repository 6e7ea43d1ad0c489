"""Positions of changed elements, in about a byte for each.

[Note: Gaps]
Ascending offsets are written as distances: the number of elements between one and the previous. The largest word skips as
many elements and stands for none. Words have 8 bits, or 16 if that takes fewer bytes because few elements change.
"""

from __future__ import annotations

import torch

_KINDS = {torch.uint8: 2**8 - 1, torch.int16: 2**16 - 1}
"""The dtype of a word, and the largest word. Words of 16 bits are unsigned; torch can do little with ``uint16``."""


def encode_gaps(at: torch.Tensor) -> torch.Tensor:
    """Return the words for ascending offsets. [Note: Gaps]"""
    between = torch.diff(at, prepend=at.new_full((1,), -1)) - 1
    sizes = {kind: kind.itemsize * (len(at) + int(_skips(between, most).sum())) for kind, most in _KINDS.items()}
    kind = min(sizes, key=sizes.__getitem__)
    if sizes[kind] == len(at) * kind.itemsize:  # nothing is skipped
        return between.to(kind)
    most = _KINDS[kind]
    skips = between // most
    words = torch.full((sizes[kind] // kind.itemsize,), most, dtype=torch.int64, device=at.device)
    words[torch.cumsum(skips + 1, 0) - 1] = between - skips * most
    return words.to(kind)


def _skips(between: torch.Tensor, most: int) -> torch.Tensor:
    """Return the number of skipping words before each element, for elements that have any."""
    return between[(between >= most).nonzero().view(-1)] // most


def decode_gaps(gaps: torch.Tensor) -> torch.Tensor:
    """Return the offsets."""
    most = _KINDS[gaps.dtype]
    words = gaps.to(torch.int64)
    if gaps.dtype is torch.int16:
        words = torch.where(words < 0, words + most + 1, words)
    skip = words == most
    if not skip.any():
        return torch.cumsum(words + 1, 0) - 1
    return (torch.cumsum(words + ~skip, 0) - 1)[(~skip).nonzero().view(-1)]


def measure_gaps(gaps: torch.Tensor) -> tuple[int, int]:
    """Return the number of offsets, and where offsets and skips end. Faster than ``decode_gaps``."""
    most, is_signed = _KINDS[gaps.dtype], gaps.dtype is torch.int16
    offsets = len(gaps) - int((gaps == (-1 if is_signed else most)).sum())
    return offsets, offsets + int(gaps.sum(dtype=torch.int64)) + is_signed * (most + 1) * int((gaps < 0).sum())


def differ(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return which elements of two 1-D tensors differ in their bits, also NaNs and signed zeros."""
    differs = bits(now) != bits(before)  # in words; a complex element has two
    return differs.view(now.numel(), differs.numel() // max(now.numel(), 1)).any(1)


def bits(values: torch.Tensor) -> torch.Tensor:
    """Return 1-D values as integers of their size, or of 8 bytes."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
    return values.view(kinds[values.itemsize])
