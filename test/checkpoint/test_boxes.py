"""Parts of tensors as boxes, in integers: each element once, in memory order, and no more boxes than promised."""

import itertools
import math

import pytest
import torch

from flatshard.checkpoint._boxes import Part, memory_dims, range_boxes
from flatshard.checkpoint._sharded_value import take, view_of

SHAPES = [(), (1,), (5,), (3, 4), (1, 6), (6, 1), (2, 3, 4), (2, 1, 3, 2), (2, 2, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_hold_each_element_of_a_range_once(shape):
    whole = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
        boxes = list(range_boxes(shape, start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        found = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].flatten() for box in boxes]
        assert torch.cat([torch.empty(0, dtype=torch.long), *found]).tolist() == list(range(start, stop))


@pytest.mark.parametrize("dims", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 3, 2), (3, 1, 1)])
def test_a_part_in_any_memory_order(shape, dims):
    whole = torch.arange(math.prod(shape)).view([shape[d] for d in dims]).permute([dims.index(d) for d in range(3)])
    assert tuple(whole.shape) == shape
    in_memory = whole.as_strided((whole.numel(),), (1,))
    assert [whole.size(d) for d in memory_dims(shape, whole.stride()) if whole.size(d) > 1] == [
        shape[d] for d in dims if shape[d] > 1
    ]
    for start, stop in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
        part = Part.of_whole(shape, tuple(whole.stride()), start, stop)
        local = in_memory[start:stop].clone()
        assert torch.equal(take(part, whole), local)
        assert torch.equal(take(part, whole.contiguous()), local)
        seen = torch.full(shape, -1)
        for box in part.boxes:
            region = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            seen[region] = view_of(local, box)
        assert torch.equal(seen, torch.where((whole >= start) & (whole < stop), whole, -1))


def test_a_part_of_a_block():
    whole = torch.arange(24).view(4, 6)
    block = whole[:, 2:5].contiguous()
    part = Part((4, 6), (4, 3), (0, 2), (3, 1), 2, 10)
    local = block.flatten()[2:10]
    assert torch.equal(take(part, whole), local)
    assert torch.equal(take(part, block), local)
    for box in part.boxes:
        region = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        assert torch.equal(whole[region], view_of(local, box))


def test_empty_parts_and_empty_tensors():
    assert Part.of_whole((3, 4), (4, 1), 0, 0).boxes == ()
    for shape, stride, stop in (((0, 4), (4, 1), 0), ((), (), 1)):
        (box,) = Part.of_whole(shape, stride, 0, stop).boxes
        assert (box.offsets, box.sizes) == ((0,) * len(shape), shape)
