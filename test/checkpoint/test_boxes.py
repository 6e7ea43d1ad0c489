"""Shards as boxes, in integers: each element once, in memory order, and no more boxes than promised."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from flatshard.checkpoint._boxes import Part, memory_dims
from flatshard.checkpoint._sharded_value import slice_part, view_of

SHAPES = [(), (1,), (5,), (0, 4), (3, 4), (1, 6), (6, 1), (2, 3, 4), (1, 3, 2), (3, 1, 1), (2, 1, 3, 2), (2, 2, 2, 2)]


def check(part: Part, whole: Tensor, local: Tensor) -> None:
    """Assert that the boxes cover ``part``, whose elements are ``local``, in order."""
    assert torch.equal(slice_part(part, whole), local)
    found = torch.full(whole.shape, -1)
    for box in part.boxes:
        found[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] = view_of(local, box)
    assert torch.equal(found, torch.where(torch.isin(whole, local), whole, -1))
    assert sum(math.prod(box.sizes) for box in part.boxes) == local.numel()  # each once


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_part_in_any_memory_order(shape):
    for dims in itertools.permutations(range(len(shape))):
        in_memory = torch.arange(math.prod(shape)).view([shape[d] for d in dims])
        whole = in_memory.permute([dims.index(d) for d in range(len(shape))])
        assert [d for d in memory_dims(shape, whole.stride()) if shape[d] > 1] == [d for d in dims if shape[d] > 1]
        for start, stop in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
            part = Part.of_whole(shape, tuple(whole.stride()), start, stop)
            assert bool(part.boxes) == (start < stop or not whole.numel())
            assert len(part.boxes) <= max(1, 2 * len(shape) - 1)
            check(part, whole, torch.arange(start, stop))
            check(part, whole.contiguous(), torch.arange(start, stop))


def test_a_part_of_a_block():
    whole = torch.arange(24).view(4, 6)
    block = whole[:, 2:5].contiguous()
    part, local = Part((4, 6), (4, 3), (0, 2), (3, 1), 2, 10), block.flatten()[2:10]
    check(part, whole, local)
    assert torch.equal(slice_part(part, block), local)
