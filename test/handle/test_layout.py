"""The plan of a flat parameter in pure integers, for thousands of random shapes and in small examples.

Layouts that cut between blocks only are compared with the exact optimum.
"""

import itertools
import math
import random
from collections import Counter

import pytest
import torch

from flatshard._composable.construct.layout_plan import (
    LITTLE_PADDING,
    PARAM_ALIGNMENT,
    SHARD_ALIGNMENT,
    Cut,
    balanced,
    plan_layout,
)
from flatshard._handle.layout import FlatLayout, ShardSlice, dense_stride, row_major
from flatshard.layouts.packing import Piece, pack, round_up

CASES = 3000
ITEMSIZES = (1, 2, 4, 8, 16)  # bool to complex128
KINDS = ("elements", "rows", "rows", "pairs", "blocks", "whole")


def plan(shapes: list[tuple[int, ...]], itemsize: int, world_size: int, cuts: list[Cut] | None = None) -> FlatLayout:
    params = [(f"p{i}", shape, row_major(shape)) for i, shape in enumerate(shapes)]
    return plan_layout(params, itemsize, world_size, cuts)


def random_shape(rng: random.Random) -> tuple[int, ...]:
    """Draw a shape of 0 to 3 dimensions: some are empty, and sizes range from below an alignment unit to many times a
    shard."""
    sizes = rng.choice([(1, 2, 3), (0, 1, 2), (1, 5, 8, 31), (16, 64, 257)])
    return tuple(rng.choice(sizes) for _ in range(rng.randint(0, 3)))


def random_cut(rng: random.Random, shape: tuple[int, ...]) -> Cut:
    numel, row, kind = math.prod(shape), math.prod(shape[1:]), rng.choice(KINDS)
    block = {"elements": 1, "rows": row, "pairs": 2 * row, "blocks": rng.randint(2, 70), "whole": numel}[kind]
    by_rows = bool(shape) and kind in ("rows", "pairs", "whole")
    return Cut(max(1, min(block, numel)) if shape or kind == "blocks" else 1, by_rows)


@pytest.mark.parametrize("cuts_anywhere", [True, False])
def test_random_plans(cuts_anywhere: bool):
    """Parameters are aligned in the buffer, which they and the gaps tile. Slices tile parameters without cutting a block.

    A layout that may cut anywhere keeps the parameters' order, with little padding.
    """
    assert (PARAM_ALIGNMENT, SHARD_ALIGNMENT) == (16, 128)
    for seed in range(CASES):
        rng = random.Random(seed)
        shapes = [random_shape(rng) for _ in range(rng.randint(0, 9))]
        itemsize, world_size = rng.choice(ITEMSIZES), rng.choice([1, 2, 3, 4, 5, 7, 8, 16, 61, 97])
        cuts = None if cuts_anywhere else [random_cut(rng, shape) for shape in shapes]
        layout = plan(shapes, itemsize, world_size, cuts)
        assert [info.shape for info in layout.params] == shapes, seed
        assert [info.numel for info in layout.params] == [math.prod(s) for s in shapes], seed
        assert layout.numel == sum(math.prod(s) for s in shapes), seed
        assert layout.padded_numel == layout.shard_numel * layout.world_size, seed
        ranges = sorted([(i.start, i.stop) for i in layout.params if i.numel] + list(layout.gaps()))
        assert all(start < stop for start, stop in ranges), seed
        ends = [0] + [stop for _, stop in ranges]
        assert [start for start, _ in ranges] + [layout.padded_numel] == ends, seed
        by_rank = [layout.shard_slices(rank) for rank in range(world_size)]
        assert all(len(slices) == len(shapes) for slices in by_rank), seed
        for index, info in enumerate(layout.params):
            end = 0
            for rank, slices in enumerate(by_rank):
                part = slices[index]
                if not part.numel:
                    assert part == ShardSlice(0, 0, 0), seed  # an absent slice is an empty range, not a flag
                    continue
                assert 0 <= part.start < part.stop <= layout.shard_numel, seed
                assert part.offset == end, seed
                # The shard and the parameter agree on the element.
                assert rank * layout.shard_numel + part.start == info.start + part.offset, seed
                assert part.offset % info.block == 0, seed
                assert world_size == 1 or not info.by_rows or part.numel % max(1, math.prod(info.shape[1:])) == 0, seed
                end += part.numel
            assert end == info.numel, seed
            assert list(layout.holders(index)) == [r for r, s in enumerate(by_rank) if s[index].numel], seed
        if cuts_anywhere:
            assert all(a.stop <= b.start for a, b in itertools.pairwise(layout.params)), seed
            assert all(info.start * itemsize % PARAM_ALIGNMENT == 0 for info in layout.params), seed
            nbytes = layout.shard_numel * itemsize
            assert nbytes % (SHARD_ALIGNMENT if nbytes > 8 * SHARD_ALIGNMENT else PARAM_ALIGNMENT) == 0, seed
            # [Note: Alignment] promises 16 bytes for each parameter, and an eighth of the shard or 16 bytes for each rank.
            padding, of_rank = (layout.padded_numel - layout.numel) * itemsize, max(PARAM_ALIGNMENT, nbytes // 8)
            assert 0 <= padding <= PARAM_ALIGNMENT * len(shapes) + of_rank * world_size, seed
            for slices in by_rank:  # so one split cuts a gradient shard into the parameters' slices
                assert all(a.stop <= b.start for a, b in itertools.pairwise([p for p in slices if p.numel])), seed


@pytest.mark.parametrize("itemsize", ITEMSIZES)
def test_a_small_unit_stays_small_over_many_ranks(itemsize: int):
    """Shards end at multiples of 16 bytes only if that takes an eighth of the unit, or 4 KiB. No rank has less than an
    element."""
    counts = 48, 255, 257, 4096, 5000, 65536, 10**6, 2**20
    for world_size, numel in itertools.product(counts, (1, 12, 5000, 49152, 49153, 10**7)):
        layout = plan([(numel,)], itemsize, world_size)
        padding, free = layout.padded_numel - numel, max(numel // 8, LITTLE_PADDING // itemsize)
        assert 0 <= padding <= max(free, world_size - 1), (world_size, numel)
        if PARAM_ALIGNMENT * world_size <= LITTLE_PADDING:
            assert layout.shard_numel * itemsize % PARAM_ALIGNMENT == 0, (world_size, numel)
    sizes = {n: plan([(256, 192)], 2, n).padded_numel for n in (4096, 65536, 2**20)}
    assert sizes == {4096: 49152, 65536: 65536, 2**20: 2**20}


def test_a_dense_stride_is_kept_and_any_other_becomes_row_major():
    """Transposed, permuted and channels-last strides are kept, also with a dimension of size 1. Others have holes, overlap,
    or are empty."""
    for shape, stride in (
        *(((2, 3), (1, 2)), ((2, 3, 4), (1, 8, 2)), ((2, 3, 4, 5), (60, 1, 15, 3))),
        *(((1, 3), (99, 1)), ((1, 1), (0, 0))),
    ):
        assert dense_stride(shape, stride) == stride
    for shape, stride in (((2, 3), (0, 1)), ((3,), (2,)), ((2, 3), (4, 1)), ((2, 2), (1, 1)), ((2, 0, 3), (1, 7, 9))):
        assert dense_stride(shape, stride) == row_major(shape) == torch.empty(shape).stride()


def test_shards_are_near_the_smallest_possible():
    """No shard can be smaller than the largest block, nor than the total divided by the ranks."""
    ratios = []
    for seed in range(800):
        rng = random.Random(seed)
        align, shard_align = rng.choice([(1, 1), (2, 4), (4, 8)])
        pieces = []
        for _ in range(rng.randint(1, 4)):
            block, count = rng.choice([1, 2, 3, 4, 5, 6, 8]), rng.randint(1, 12)
            pieces.append(Piece(block * count, rng.choice([1, block, block, block * count])))
        world_size = rng.randint(2, 6)
        _, size = pack(pieces, world_size, align, shard_align)
        equal = -(-sum(p.numel for p in pieces) // world_size)
        ratios.append(size / round_up(max(equal, *(min(p.block, p.numel) for p in pieces)), shard_align))
    assert 1 == min(ratios) < max(ratios) <= 3
    assert sum(ratios) / len(ratios) < 1.08


def test_shards_of_a_cut_parameter_keep_their_ranks():
    layout = plan_layout([("w", (9, 8), (8, 1)), ("v", (2, 8), (8, 1))], 4, 3, [Cut(8, True), Cut(16, True)])
    loads = Counter({0: 5, 2: 9})
    moved = balanced(layout, [0, 7], loads)
    assert [list(moved.holders(i)) for i in range(2)] == [[0, 1, 2], [2]]
    assert +loads == {0: 5, 2: 16}
