"""The elements that a receiver gets from a rank, and their order, in integers.

[Note: A plan of intervals]
A receiver asks for rectangular regions of parameters, one for each target: rows of three matrices for a fused target, columns
of another matrix. A rank has ranges of parameters, each of a few boxes. Their intersections are boxes, too: strided views of
the rank's flat shard on one side, of the targets on the other. They are computed once. In order they form a row of elements,
which is cut into cells of limited size: ranks compare, send and write cells, or offsets in a cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from flatshard.checkpoint._boxes import Box
from flatshard.checkpoint._sharded_value import view_of
from flatshard.weights._sent import Layout

Ints = tuple[int, ...]

CELL = 2**19  # elements: the working memory of both sides is some 60 bytes for each of these


class Asked(NamedTuple):
    """A region of a parameter that a receiver asks for."""

    name: str
    start: Ints
    shape: Ints
    dtype: str  # of the receiver's tensor, as "bfloat16"

    @property
    def kind(self) -> torch.dtype:
        """The dtype of this name.

        Raises:
            ValueError: there is none.
        """
        kind = vars(torch).get(self.dtype)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"{self.name!r} has no dtype {self.dtype!r}")
        return kind


class Region(NamedTuple):
    """A box of a region that was asked for."""

    asked: int  # the number of the region that was asked for
    offsets: Ints  # in that region
    sizes: Ints


class OwnRegion(NamedTuple):
    """A region, and its place in this rank's flat shards."""

    flat: int
    box: Box  # in the flat shard
    region: Region


Cell = list[Region]
"""[Note: A plan of intervals]: neighbours, of one dtype."""


def numel_of(cell: Cell, asked: Sequence[Asked], most: int) -> int:
    """Return the number of elements in a cell from another process. ``most``: the limit.

    Raises:
        ValueError: it is no cell of ``asked``.
    """
    total = 0
    for number, offsets, sizes in cell:
        if not 0 <= number < len(asked) or asked[number].dtype != asked[cell[0].asked].dtype:
            raise ValueError(f"a cell has a region {number}, of {len(asked)}, or several dtypes")
        shape = asked[number].shape
        if not len(shape) == len(offsets) == len(sizes) or not all(
            0 <= o < o + n <= size for o, n, size in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"a region of {asked[number].name!r} has shape {sizes} from {offsets} on, in {shape}")
        total += math.prod(sizes)
    if not 0 < total <= most:
        raise ValueError(f"a cell has {total} elements, and may have {most}")
    return total


OwnCell = list[OwnRegion]
"""A cell in one flat shard."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def own_cells(layout: Layout, asked: Sequence[Asked], most: int) -> list[OwnCell]:
    """Return the cells that a rank with ``layout`` sends for ``asked``. ``most``: the limit on elements in a cell."""
    wanted: dict[str, list[int]] = {}
    for number, each in enumerate(asked):
        wanted.setdefault(each.name, []).append(number)
    found: list[OwnRegion] = []
    for flat, parts in enumerate(layout):
        for placed in parts:
            boxes = [box for box in placed.part.boxes if box.numel]
            for number in [number for name in placed.names for number in wanted.get(name, ())]:
                for box in boxes:
                    common = cut(box, asked[number].start, asked[number].shape)
                    for piece in () if common is None else split(common, most):
                        offsets = tuple(o - s for o, s in zip(piece.offsets, asked[number].start, strict=True))
                        at = piece._replace(start=placed.start + piece.start)
                        found.append(OwnRegion(flat, at, Region(number, offsets, piece.sizes)))
    found.sort(key=lambda own: (own.flat, own.box.start))
    return list(_grouped(found, most))


def cut(box: Box, offsets: Sequence[int], sizes: Sequence[int]) -> Box | None:
    """Return the intersection of a box with a region of the full tensor, or None. It keeps the stride of the box."""
    first = [max(a, b) for a, b in zip(box.offsets, offsets, strict=True)]
    ends = zip(box.offsets, box.sizes, offsets, sizes, strict=True)
    lengths = [min(a + n, b + m) - f for f, (a, n, b, m) in zip(first, ends, strict=True)]
    if not box.numel or any(n <= 0 for n in lengths):
        return None
    steps = [f - o for f, o in zip(first, box.offsets, strict=True)]
    start = box.start + sum(n * s for n, s in zip(steps, box.stride, strict=True))
    inner = tuple(o + n for o, n in zip(box.block_offsets, steps, strict=True))
    return Box(start, math.prod(lengths), tuple(first), tuple(lengths), inner, box.stride)


def split(box: Box, most: int) -> Iterator[Box]:
    """Split ``box`` into pieces of at most ``most`` elements, in the order of its rows."""
    if box.numel <= most:
        yield box
        return
    dim = next(d for d, n in enumerate(box.sizes) if n > 1)
    step = max(1, most * box.sizes[dim] // box.numel)
    offsets, sizes = list(box.offsets), list(box.sizes)
    sizes[dim] = step
    for at in range(0, box.sizes[dim], step):
        offsets[dim] = box.offsets[dim] + at
        piece = cut(box, offsets, sizes)
        assert piece is not None
        yield from split(piece, most)


def _grouped(regions: Iterable[OwnRegion], most: int) -> Iterator[OwnCell]:
    cell: OwnCell = []
    for own in regions:
        if cell and (cell[0].flat != own.flat or sum(o.box.numel for o in cell) + own.box.numel > most):
            yield cell
            cell = []
        cell.append(own)
    if cell:
        yield cell


def read(cell: OwnCell, flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements of a cell in a flat shard: 1-D."""
    parts = [view_of(flat, own.box).to(dtype).reshape(-1) for own in cell]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Places:
    """The places of a cell's elements in the targets."""

    def __init__(self, cell: Cell, targets: Sequence[torch.Tensor]) -> None:
        self._parts: list[
            tuple[int, int, torch.Tensor, int]
        ] = []  # elements of the cell, the view, and of which target
        end = 0
        for number, offsets, sizes in cell:
            view = targets[number]
            for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                view = view.narrow(dim, offset, size)
            start, end = end, end + math.prod(sizes)
            self._parts.append((start, end, view, number))

    def parts(self, at: torch.Tensor | None) -> Iterator[tuple[int, slice, torch.Tensor, torch.Tensor | None]]:
        """Yield (target, slice of the given elements in it, view of the target, their row-major numbers in the view).

        ``at``: ascending offsets in the cell, or None for all. Then the numbers are None, too.
        """
        edges = torch.tensor([start for start, *_ in self._parts] + [self._parts[-1][1]], device="cpu")
        first = edges.tolist() if at is None else torch.searchsorted(at, edges).tolist()
        for (start, _, view, number), begin, end in zip(self._parts, first, first[1:], strict=False):
            if begin < end:
                own = None if at is None else (at[begin:end] - start).to(view.device)
                yield number, slice(begin, end), view, own
