"""The layout of one flat parameter: which elements of which parameters are where. Integers only, no tensors.

Parameters lie end to end in one *unsharded buffer*, which is cut into ``world_size`` equal *shards*::

    unsharded buffer   [ w0 w0 w0 | b0 . | w1 w1 w1 w1 w1 | . . ]      '.' = padding
    shards             [   rank 0    |   rank 1    |   rank 2   ]

Parameters with blocks that must not be cut (``block``) may have padding between them, and another order in memory: see
``layouts/packing.py``.

Only this file computes offsets. All ranges are half-open; an absent part is an empty range, not a flag.

[Note: Alignment]
Every parameter starts at a multiple of 16 bytes, for vectorised kernels. Every shard is a multiple of 128 bytes, or of 16
if it is smaller than a kilobyte: NCCL has been seen to lose up to 12x of an all-gather's bandwidth when the bytes per
rank are not a multiple of 16. The cost is at most ``16 * params`` bytes per flat parameter, and an eighth of a shard, or 16
bytes, per rank. So a small unit stays small over thousands of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flatshard.layouts.packing import Piece, pack, round_up

PARAM_ALIGNMENT = 16  # bytes
SHARD_ALIGNMENT = 128  # bytes; a shard smaller than eight times as much uses PARAM_ALIGNMENT


class ShardSlice(NamedTuple):
    """The part of one parameter that one rank holds. Empty if the rank holds none of it."""

    start: int  # first element in the local shard
    stop: int
    offset: int  # index of the part's first element in the parameter, in memory order

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """One parameter's place in the unsharded buffer."""

    fqn: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # dense: the elements fill [start, start + numel) without holes
    numel: int
    start: int  # first element in the unsharded buffer
    block: int = 1  # a cut between ranks must be at a multiple of this many elements, in memory order
    by_rows: bool = False  # blocks consist of rows, and each rank's part keeps the parameter's dimensions

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def shape_of(self, part: ShardSlice) -> tuple[int, ...]:
        """The shape of a rank's part: ``(rows, *rest)`` if cut by rows, else 1-D."""
        return part_shape(self.shape, part.numel, self.by_rows)


class Cut(NamedTuple):
    """Where one parameter may be cut."""

    block: int = 1  # as in ``ParamInfo``
    by_rows: bool = False


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The layout of one flat parameter: ``world_size`` shards of ``shard_numel`` elements each."""

    params: tuple[ParamInfo, ...]
    world_size: int
    shard_numel: int

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.world_size

    @property
    def numel(self) -> int:
        """Elements of the parameters, without padding."""
        return sum(info.numel for info in self.params)

    def shard_slices(self, rank: int) -> tuple[ShardSlice, ...]:
        """For each parameter, its part in the shard of ``rank``."""
        first, last = rank * self.shard_numel, (rank + 1) * self.shard_numel
        slices = []
        for info in self.params:
            start, stop = max(info.start, first), min(info.stop, last)
            if start >= stop:
                slices.append(ShardSlice(0, 0, 0))
            else:
                slices.append(ShardSlice(start - first, stop - first, start - info.start))
        return tuple(slices)

    def holders(self, index: int) -> range:
        """The ranks that hold elements of parameter ``index``. Empty for a parameter without elements."""
        info = self.params[index]
        return range(info.start // self.shard_numel, -(-info.stop // self.shard_numel)) if info.numel else range(0)

    def renamed(self, fqns: Sequence[str]) -> FlatLayout:
        """The same layout, with other FQNs."""
        renamed = [replace(info, fqn=fqn) for info, fqn in zip(self.params, fqns, strict=True)]
        return replace(self, params=tuple(renamed))

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The padding, as ranges of the unsharded buffer."""
        gaps, end = [], 0
        for info in sorted((i for i in self.params if i.numel), key=_start):
            if info.start > end:
                gaps.append((end, info.start))
            end = info.stop
        if self.padded_numel > end:
            gaps.append((end, self.padded_numel))
        return tuple(gaps)


def plan_layout(
    params: Sequence[tuple[str, Sequence[int], Sequence[int]]],
    itemsize: int,
    world_size: int,
    cuts: Sequence[Cut] | None = None,
) -> FlatLayout:
    """Lay ``params``, given as (FQN, shape, stride), end to end, and cut the result into ``world_size`` shards.

    ``itemsize`` is the element size in bytes. A dense stride (row-major, channels-last, transposed) is kept, so that kernels
    see the memory format that the user chose; any other (an expanded or a sliced tensor) is replaced by the row-major one.
    ``cuts`` says where each parameter may be cut; None: anywhere. The rows of a parameter that is cut by rows must be
    consecutive in memory. If they are not (transposed), its stride is replaced too.
    """
    align = max(1, PARAM_ALIGNMENT // itemsize)  # [Note: Alignment]
    numels = [math.prod(shape) for _, shape, _ in params]
    is_small = sum(round_up(n, align) for n in numels) * itemsize < 8 * SHARD_ALIGNMENT * world_size
    shard_align = max(1, (PARAM_ALIGNMENT if is_small else SHARD_ALIGNMENT) // itemsize)
    cuts = [Cut()] * len(params) if cuts is None or world_size == 1 else cuts
    if all(cut.block == 1 for cut in cuts):
        starts, end = [], 0
        for numel in numels:
            starts.append(round_up(end, align))
            end = starts[-1] + numel
        shard = round_up(-(-end // world_size), shard_align)
    else:
        pieces = [Piece(n, max(1, cut.block)) for n, cut in zip(numels, cuts, strict=True)]
        starts, shard = pack(pieces, world_size, align, shard_align)
    infos = []
    for (fqn, shape, stride), numel, start, cut in zip(params, numels, starts, cuts, strict=True):
        cut_by_rows = cut.by_rows and cut.block < numel
        stride = _by_rows(shape, stride) if cut_by_rows else dense_stride(shape, stride)
        infos.append(ParamInfo(fqn, tuple(shape), stride, numel, start, max(1, cut.block), cut.by_rows))
    return FlatLayout(tuple(infos), world_size, shard)


def balanced(layout: FlatLayout, works: Sequence[int], loads: list[int]) -> FlatLayout:
    """``layout`` with its shards assigned to other ranks, to balance work on whole parameters over many layouts.

    ``works``: the work of each parameter. ``loads``: the work of each rank so far; the work of this layout is added to it.
    Shards that share a parameter with a neighbour keep their rank. The largest work goes to the rank with the smallest load.
    """
    size = layout.shard_numel
    work = [0] * layout.world_size
    fixed: set[int] = set()
    for index, amount in enumerate(works):
        holders = layout.holders(index)
        if len(holders) > 1:
            fixed.update(holders)
        elif holders:
            work[holders[0]] += amount
    shards = sorted((r for r in range(layout.world_size) if r not in fixed), key=lambda r: -work[r])
    ranks = sorted(sorted(shards), key=lambda r: loads[r])
    moves = dict(zip(shards, ranks, strict=True))
    for shard, amount in enumerate(work):
        loads[moves.get(shard, shard)] += amount
    params = []
    for info in layout.params:
        shard = info.start // size if info.numel else 0
        params.append(replace(info, start=info.start + (moves.get(shard, shard) - shard) * size))
    return replace(layout, params=tuple(params))


def part_shape(shape: Sequence[int], numel: int, by_rows: bool) -> tuple[int, ...]:
    """The shape of ``numel`` elements of a parameter of ``shape``: ``(rows, *rest)`` if ``by_rows``, else 1-D."""
    if not by_rows or not shape:
        return (numel,)
    row = math.prod(shape[1:])
    return (numel // row if row else 0, *shape[1:])


def _by_rows(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    dense = dense_stride(shape, stride)
    ordered = not shape or shape[0] < 2 or dense[0] == math.prod(shape[1:])
    return dense if ordered else _row_major(shape)


def _start(info: ParamInfo) -> int:
    return info.start


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """``stride`` if the elements fill their range without holes or overlap, otherwise the row-major stride."""
    dims = sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1)
    expected = 1
    for step, size in dims:
        if step != expected:
            return _row_major(shape)
        expected *= size
    return tuple(stride) if math.prod(shape) else _row_major(shape)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
