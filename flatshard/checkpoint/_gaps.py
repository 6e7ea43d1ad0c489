"""Which elements of many have changed, in about a byte for each.

[Note: Gaps]
Offsets in ascending order are written as distances: how many elements lie between one and the one before. The largest word
says no element, and that as many are skipped. Words are bytes; where few elements change, of 16 bits, if that is less.
"""

from __future__ import annotations

import torch

_KINDS = {torch.uint8: 2**8 - 1, torch.int16: 2**16 - 1}
"""The dtype of a word, and the largest. Words of 16 bits are unsigned: torch can do little with ``uint16``."""


def encode_gaps(at: torch.Tensor) -> torch.Tensor:
    """[Note: Gaps]: of ascending offsets."""
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
    """How many words skip before an element, of those elements that have any."""
    return between[(between >= most).nonzero().view(-1)] // most


def decode_gaps(gaps: torch.Tensor) -> torch.Tensor:
    """The offsets."""
    most = _KINDS[gaps.dtype]
    words = gaps.to(torch.int64)
    if gaps.dtype is torch.int16:
        words = torch.where(words < 0, words + most + 1, words)
    skip = words == most
    if not skip.any():
        return torch.cumsum(words + 1, 0) - 1
    return (torch.cumsum(words + ~skip, 0) - 1)[(~skip).nonzero().view(-1)]


def measure_gaps(gaps: torch.Tensor) -> tuple[int, int]:
    """Count the offsets, and find where they and what is skipped end. Quicker than ``decode_gaps``."""
    most, is_signed = _KINDS[gaps.dtype], gaps.dtype is torch.int16
    offsets = len(gaps) - int((gaps == (-1 if is_signed else most)).sum())
    return offsets, offsets + int(gaps.sum(dtype=torch.int64)) + is_signed * (most + 1) * int((gaps < 0).sum())


def differ(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Where the bits of two 1-D tensors differ: also of NaNs and signed zeros."""
    differs = bits(now) != bits(before)  # in words, of which a complex element has two
    return differs.view(now.numel(), differs.numel() // max(now.numel(), 1)).any(1)


def bits(values: torch.Tensor) -> torch.Tensor:
    """1-D values as integers, of their size or of 8 bytes."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
    return values.view(kinds[values.itemsize])
