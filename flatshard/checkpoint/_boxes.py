"""A shard of a tensor as rectangular boxes, in integers only.

[Note: A range is a few boxes]
A rank holds elements ``start:stop`` of a tensor in memory order: neither rows nor columns. But such a range of an n-D tensor
is at most ``2 * n - 1`` boxes: the rest of its first row, full rows, the beginning of its last row, and the same within these
two rows. Elements 3:10 of a 4 x 3 tensor with rows of three are two boxes::

    . . .
    a a a
    a a a     a: offsets (1, 0), sizes (2, 3)
    b . .     b: offsets (3, 0), sizes (1, 1)

Checkpoints are made of boxes, so each rank writes and reads its own without communication. If the memory order is not
row-major (channels-last, transposed), boxes are found over the dimensions from the outermost in memory to the innermost, and
then permuted to the tensor's own order of dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

_Ints = tuple[int, ...]


class Box(NamedTuple):
    """A rectangular region of a tensor, whose elements are contiguous in a rank's part."""

    start: int  # first element in the part
    numel: int
    offsets: _Ints  # in the full tensor
    sizes: _Ints
    block_offsets: _Ints  # in the block
    stride: _Ints  # dense


@dataclass(frozen=True)
class Part:
    """Elements ``start:stop`` of a block of a tensor, in the block's memory order.

    The block is the full tensor, or this rank's block of it under tensor parallelism.
    """

    shape: _Ints  # of the full tensor
    block_shape: _Ints
    block_offsets: _Ints
    stride: _Ints  # of the block, dense
    start: int
    stop: int
    is_copy: bool = False  # another rank writes the same elements

    @classmethod
    def of_whole(cls, shape: _Ints, stride: _Ints, start: int, stop: int) -> Self:
        """Return the part of a tensor that is a single block."""
        return cls(shape, shape, (0,) * len(shape), stride, start, stop)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes, in memory order. An empty tensor has one, so that a checkpoint has an entry for it."""
        if math.prod(self.shape) == 0:
            zeros = (0,) * len(self.shape)
            return (Box(0, 0, zeros, self.shape, zeros, zeros),)
        dims = memory_dims(self.block_shape, self.stride)
        boxes, at = [], 0
        order = [dims.index(d) for d in range(len(dims))]
        for offsets, sizes in range_boxes([self.block_shape[d] for d in dims], self.start, self.stop):
            strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
            inner, lengths, stride = (tuple(numbers[i] for i in order) for numbers in (offsets, sizes, strides))
            outer = tuple(o + b for o, b in zip(inner, self.block_offsets, strict=True))
            boxes.append(box := Box(at, math.prod(sizes), outer, lengths, inner, stride))
            at += box.numel
        return tuple(boxes)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self


def memory_dims(shape: Sequence[int], stride: Sequence[int]) -> _Ints:
    """Return the dimensions of a dense tensor, outermost in memory first. The place of those of size 1 is arbitrary."""
    return tuple(sorted(range(len(shape)), key=lambda d: (shape[d] == 1, -stride[d])))


def range_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[_Ints, _Ints]]:
    """Yield (offsets, sizes) of the boxes that make up elements ``start:stop`` of a row-major tensor, in order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    rest = shape[1:]
    row = math.prod(rest)
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        yield from _in_row(first, rest, head, tail)
        return
    if head:
        yield from _in_row(first, rest, head, row)
        first += 1
    if first < last:
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    yield from _in_row(last, rest, 0, tail)


def _in_row(row: int, shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[_Ints, _Ints]]:
    for offsets, sizes in range_boxes(shape, start, stop):
        yield (row, *offsets), (1, *sizes)
