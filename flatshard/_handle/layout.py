"""The layout of one flat parameter: the place of each parameter in it. Integers only, no tensors.

Parameters lie end to end in one *unsharded buffer*, which is cut into ``world_size`` equal *shards*::

    unsharded buffer   [ w0 w0 w0 | b0 . | w1 w1 w1 w1 w1 | . . ]      '.' = padding
    shards             [   rank 0    |   rank 1    |   rank 2   ]

Parameters with blocks that must not be cut (``block``) may have padding between them, and another order in memory. Their
places are planned once, in ``_composable/construct/layout_plan.py``; offsets of slices are computed only here. All ranges are
half-open; an absent slice is an empty range, not a flag.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class ShardSlice(NamedTuple):
    """The elements of one parameter that one rank holds; empty if it holds none."""

    start: int  # first element in the local shard
    stop: int
    offset: int  # index of the slice's first element in the parameter, in memory order
    numel: int = 0


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """The place of one parameter in the unsharded buffer."""

    fqn: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # dense: the elements fill [start, start + numel) without holes
    numel: int
    start: int  # first element in the unsharded buffer
    block: int = 1  # a cut between ranks must be at a multiple of this many elements, in memory order
    by_rows: bool = False  # blocks consist of rows, and each rank's slice keeps the parameter's dimensions

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def shape_of(self, part: ShardSlice) -> tuple[int, ...]:
        """Return the shape of a rank's slice: ``(rows, *rest)`` if cut by rows, else 1-D."""
        return part_shape(self.shape, part.numel, self.by_rows)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The layout of one flat parameter: ``world_size`` shards of ``shard_numel`` elements each."""

    params: tuple[ParamInfo, ...]
    world_size: int
    shard_numel: int

    @property
    def padded_numel(self) -> int:
        """The number of elements of the unsharded buffer."""
        return self.shard_numel * self.world_size

    @property
    def numel(self) -> int:
        """The number of elements of the parameters, without padding."""
        return sum([info.numel for info in self.params])

    def shard_slices(self, rank: int) -> tuple[ShardSlice, ...]:
        """Return the slice of each parameter that is in the shard of ``rank``."""
        first, last = rank * self.shard_numel, (rank + 1) * self.shard_numel
        slices = []
        for info in self.params:
            start, stop = max(info.start, first), min(info.start + info.numel, last)
            if start >= stop:
                slices.append(ShardSlice(0, 0, 0, 0))
            else:
                slices.append(ShardSlice(start - first, stop - first, start - info.start, stop - start))
        return tuple(slices)

    def holders(self, index: int) -> range:
        """Return the ranks that hold elements of parameter ``index``; none for a parameter without elements."""
        info = self.params[index]
        if not info.numel:
            return range(0)
        return range(info.start // self.shard_numel, -(-(info.start + info.numel) // self.shard_numel))

    def renamed(self, fqns: Sequence[str]) -> FlatLayout:
        """Return the same layout with other FQNs."""
        renamed = [replace(info, fqn=fqn) for info, fqn in zip(self.params, fqns, strict=True)]
        return replace(self, params=tuple(renamed))

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Return the padding, as ranges of the unsharded buffer."""
        gaps, end = [], 0
        for start, numel in sorted([(info.start, info.numel) for info in self.params if info.numel]):
            if start > end:
                gaps.append((end, start))
            end = start + numel
        if self.padded_numel > end:
            gaps.append((end, self.padded_numel))
        return tuple(gaps)


def part_shape(shape: Sequence[int], numel: int, by_rows: bool) -> tuple[int, ...]:
    """Return the shape of ``numel`` elements of a parameter of ``shape``: ``(rows, *rest)`` if ``by_rows``, else 1-D."""
    if not by_rows or not shape:
        return (numel,)
    row = math.prod(shape[1:])
    return (numel // row if row else 0, *shape[1:])


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return ``stride`` if the elements fill their range without holes or overlap, otherwise the row-major stride."""
    dims = sorted([(step, size) for size, step in zip(shape, stride, strict=True) if size != 1])
    expected = 1
    for step, size in dims:
        if step != expected:
            return row_major(shape)
        expected *= size
    return tuple(stride) if math.prod(shape) else row_major(shape)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
