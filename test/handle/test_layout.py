"""The plan of a flat parameter: pure integers, checked over thousands of random shapes and by small examples."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
from expecttest import assert_expected_inline

from flatshard._handle.layout import PARAM_ALIGNMENT, SHARD_ALIGNMENT, FlatLayout, ShardSlice, dense_stride, plan_layout

CASES = 2000
ITEMSIZES = (1, 2, 4, 8, 16)  # bool to complex128


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch has them."""
    return tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))


def plan(shapes: list[tuple[int, ...]], itemsize: int, world_size: int) -> FlatLayout:
    return plan_layout([(f"p{i}", s, row_major(s)) for i, s in enumerate(shapes)], itemsize, world_size)


def random_shape(rng: random.Random) -> tuple[int, ...]:
    """0 to 3 dimensions; now and then an empty one, and sizes from below an alignment unit to many times a shard."""
    sizes = rng.choice([(1, 2, 3), (0, 1, 2), (1, 5, 8, 31), (16, 64, 257)])
    return tuple(rng.choice(sizes) for _ in range(rng.randint(0, 3)))


def random_plans() -> Iterator[tuple[int, list[tuple[int, ...]], int, FlatLayout]]:
    """(seed, shapes, itemsize, layout)."""
    for seed in range(CASES):
        rng = random.Random(seed)
        shapes = [random_shape(rng) for _ in range(rng.randint(0, 9))]
        itemsize, world_size = rng.choice(ITEMSIZES), rng.randint(1, 97)
        yield seed, shapes, itemsize, plan(shapes, itemsize, world_size)


def test_random_plans():
    """Parameters lie in order, aligned, in little padding; with gaps they tile the buffer, and slices tile them."""
    assert (PARAM_ALIGNMENT, SHARD_ALIGNMENT) == (16, 128)
    for seed, shapes, itemsize, layout in random_plans():
        assert [info.shape for info in layout.params] == shapes, seed
        assert [info.numel for info in layout.params] == [math.prod(s) for s in shapes], seed
        assert layout.numel == sum(math.prod(s) for s in shapes), seed
        assert all(a.stop <= b.start for a, b in itertools.pairwise(layout.params)), seed
        assert all(info.start * itemsize % PARAM_ALIGNMENT == 0 for info in layout.params), seed
        nbytes = layout.shard_numel * itemsize
        assert nbytes % (SHARD_ALIGNMENT if nbytes > 8 * SHARD_ALIGNMENT else PARAM_ALIGNMENT) == 0, seed
        assert layout.padded_numel == layout.shard_numel * layout.world_size, seed
        # What [Note: Alignment] promises: 16 bytes a parameter, and an eighth of the shard or 16 a rank.
        padding = (layout.padded_numel - layout.numel) * itemsize
        of_rank = max(PARAM_ALIGNMENT, layout.shard_numel * itemsize // 8)
        assert 0 <= padding <= PARAM_ALIGNMENT * len(shapes) + of_rank * layout.world_size, seed
        ranges = sorted([(i.start, i.stop) for i in layout.params if i.numel] + list(layout.gaps()))
        assert all(start < stop for start, stop in ranges), seed
        ends = [0] + [stop for _, stop in ranges]
        assert [start for start, _ in ranges] + [layout.padded_numel] == ends, seed
        by_rank = [layout.shard_slices(rank) for rank in range(layout.world_size)]
        assert all(len(slices) == len(shapes) for slices in by_rank), seed
        for index, info in enumerate(layout.params):
            end = 0
            for rank, slices in enumerate(by_rank):
                part = slices[index]
                if not part.numel:
                    assert part == ShardSlice(0, 0, 0), seed  # an absent part is an empty range, not a flag
                    continue
                assert 0 <= part.start < part.stop <= layout.shard_numel, seed
                assert part.offset == end, seed
                # The same element, seen from the shard and from the parameter.
                assert rank * layout.shard_numel + part.start == info.start + part.offset, seed
                end += part.numel
            assert end == info.numel, seed
        for slices in by_rank:  # so a gradient shard can be cut into the parameters' parts with one split
            held = [part for part in slices if part.numel]
            assert all(a.stop <= b.start for a, b in itertools.pairwise(held)), seed


def test_every_world_size():
    """Fewer elements than ranks, as many, one more: some ranks hold nothing, none holds too much."""
    for world_size in range(1, 98):
        sizes = {n * world_size + d for n in (4, 32, 256, 320) for d in (-1, 0, 1)}
        for numel in {1, 31, 32, 33} | sizes:
            layout = plan([(numel,)], 4, world_size)
            held = [layout.shard_slices(rank)[0].numel for rank in range(world_size)]
            assert sum(held) == numel
            assert held == sorted(held, reverse=True)  # full shards, then the rest, then nothing
            align = 32 if 4 * numel >= 1024 * world_size else 4
            assert layout.shard_numel == align * -(-numel // (align * world_size))


def test_little_plans():
    layout = plan([], 4, 8)
    assert (layout.numel, layout.padded_numel, layout.shard_numel, layout.gaps()) == (0, 0, 0, ())
    assert layout.shard_slices(3) == ()
    layout = plan([(0,), (3, 0), (0, 2)], 4, 4)
    assert layout.padded_numel == 0
    assert layout.shard_slices(0) == (ShardSlice(0, 0, 0),) * 3
    layout = plan([(3,), (0, 7), (), (2,)], 4, 1)
    assert [(i.start, i.stop) for i in layout.params] == [(0, 3), (4, 4), (4, 5), (8, 10)]
    assert layout.gaps() == ((3, 4), (5, 8), (10, 12))
    layout = plan([(), ()], 8, 2)
    assert [(i.shape, i.stride, i.numel, i.start) for i in layout.params] == [((), (), 1, 0), ((), (), 1, 2)]
    assert [[s.numel for s in layout.shard_slices(rank)] for rank in range(2)] == [[1, 0], [0, 1]]
    layout = plan([(3,), (2,)], 256, 2)  # an item larger than the alignment: no torch dtype today
    assert ([i.start for i in layout.params], layout.shard_numel) == ([0, 3], 3)


def test_a_small_plan_as_text():
    """Three parameters over three ranks, float32: what the picture in layout.py shows, in numbers."""
    layout = plan([(5, 7), (5,), (7, 5)], 4, 3)
    lines = [f"{i.fqn} {i.shape} {i.stride} {i.start}:{i.stop}" for i in layout.params]
    for rank in range(3):
        parts = [f"[{s.start}:{s.stop}] from {s.offset}" for s in layout.shard_slices(rank)]
        lines.append(f"rank {rank}: " + ", ".join(parts))
    lines.append(f"gaps {layout.gaps()}, shard {layout.shard_numel}")
    assert_expected_inline(
        "\n".join(lines),
        """\
p0 (5, 7) (7, 1) 0:35
p1 (5,) (1,) 36:41
p2 (7, 5) (5, 1) 44:79
rank 0: [0:28] from 0, [0:0] from 0, [0:0] from 0
rank 1: [0:7] from 28, [8:13] from 0, [16:28] from 0
rank 2: [0:0] from 0, [0:0] from 0, [0:23] from 12
gaps ((35, 36), (41, 44), (79, 84)), shard 28""",
    )


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((), ()),
        ((5,), (1,)),
        ((2, 3), (3, 1)),  # row-major
        ((2, 3), (1, 2)),  # transposed
        ((2, 3, 4), (1, 8, 2)),  # permuted
        ((2, 3, 4, 5), (60, 1, 15, 3)),  # channels-last
        ((1, 3), (3, 1)),
        ((1, 3), (99, 1)),  # the stride of a dimension of size 1 means nothing, and is kept
        ((3, 1), (1, 0)),
        ((1, 1), (0, 0)),
    ],
)
def test_a_dense_stride_is_kept(shape, stride):
    assert dense_stride(shape, stride) == stride


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((3,), (0,), (1,)),  # expanded
        ((2, 3), (0, 1), (3, 1)),  # expanded rows
        ((3,), (2,), (1,)),  # every other element
        ((2, 3), (4, 1), (3, 1)),  # a slice of columns
        ((2, 3), (6, 2), (3, 1)),
        ((2, 2), (1, 1), (2, 1)),  # overlapping, as of unfold
        ((0,), (1,), (1,)),
        ((2, 0, 3), (1, 7, 9), (3, 3, 1)),  # empty: torch's own rule, sizes of 0 count as 1
    ],
)
def test_any_other_stride_becomes_row_major(shape, stride, expected):
    assert dense_stride(shape, stride) == expected
    assert row_major(shape) == expected


def test_random_permutations_are_dense_and_their_slices_are_not():
    for seed in range(CASES):
        rng = random.Random(seed)
        sizes = [rng.randint(2, 5) for _ in range(rng.randint(1, 4))]
        order = rng.sample(range(len(sizes)), len(sizes))
        stride, step = [0] * len(sizes), 1
        for dim in order:
            stride[dim], step = step, step * sizes[dim]
        assert dense_stride(sizes, stride) == tuple(stride), seed
        inner = order[rng.randrange(len(order))]
        if inner != order[-1]:  # cutting the outermost dimension in memory leaves no hole
            cut = [n - (dim == inner) for dim, n in enumerate(sizes)]
            if cut[inner] > 1:
                assert dense_stride(cut, stride) == row_major(tuple(cut)), seed
