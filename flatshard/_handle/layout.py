"""The layout of one flat parameter: which elements of which parameters are where. Integers only, no tensors.

Parameters lie end to end in one *unsharded buffer*, which is cut into ``world_size`` equal *shards*::

    unsharded buffer   [ w0 w0 w0 | b0 . | w1 w1 w1 w1 w1 | . . ]      '.' = padding
    shards             [   rank 0    |   rank 1    |   rank 2   ]

Parameters with blocks that must not be cut (``block``) may have padding between them, and another order in memory. Where each
lies is planned once, in ``_composable/construct/layout_plan.py``; offsets of parts are computed here only. All ranges are
half-open; an absent part is an empty range, not a flag.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


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


def part_shape(shape: Sequence[int], numel: int, by_rows: bool) -> tuple[int, ...]:
    """The shape of ``numel`` elements of a parameter of ``shape``: ``(rows, *rest)`` if ``by_rows``, else 1-D."""
    if not by_rows or not shape:
        return (numel,)
    row = math.prod(shape[1:])
    return (numel // row if row else 0, *shape[1:])


def _start(info: ParamInfo) -> int:
    return info.start


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """``stride`` if the elements fill their range without holes or overlap, otherwise the row-major stride."""
    dims = sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1)
    expected = 1
    for step, size in dims:
        if step != expected:
            return row_major(shape)
        expected *= size
    return tuple(stride) if math.prod(shape) else row_major(shape)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
