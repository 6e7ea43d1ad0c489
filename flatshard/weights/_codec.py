"""The changes in a cell, as bytes.

[Note: Sections]
The changes of a cell are sections, each in one form: all elements or some, with their values or with the low half of their
bits. With small learning rates a value moves by a few of its last bits, so the low half is enough: among all numbers with
that low half, the new value is the one nearest to the receiver's. In bfloat16 that is one byte in place of two. If only some
elements are sent, the place of each costs a byte or two more (``_gaps.py``), and both sides time: on CPU 15 ns for
each element of the cell, in which a link of 50 MB/s sends a byte. So if more than half of the elements move by few bits, the
low halves of all are sent, which takes no more bytes. If sections of some elements would save less than a quarter of the
bytes, all values are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from flatshard.checkpoint._container import memory_of
from flatshard.weights._gaps import bits, decode_gaps, differ, encode_gaps, measure_gaps

_HEAD = 9  # bytes: the cell in four, the form in one, and in four the number of elements or words of gaps
_GAPS = {1: torch.uint8, 2: torch.int16}  # by form: the dtype of gaps. The form of all elements is 0
_HALF = 4  # beside it, in the form
_HALVES = {2: torch.int8, 4: torch.int16, 8: torch.int32}


class Section(NamedTuple):
    """A section of a message. [Note: Sections]"""

    cell: int
    form: int
    places: memoryview  # of the elements
    values: memoryview
    dtype: torch.dtype  # of the values: the cell's, or an integer for low halves
    data: memoryview  # the section

    @property
    def is_half(self) -> bool:
        return bool(self.form & _HALF)

    def at(self) -> torch.Tensor | None:
        """Decode the offsets of the elements in the cell. Return None for all elements."""
        gaps = _GAPS.get(self.form & ~_HALF)
        return None if gaps is None else decode_gaps(_tensor(self.places, gaps))

    def read(self) -> torch.Tensor:
        """Copy the values: 1-D."""
        return _tensor(self.values, self.dtype)


def nearest(before: torch.Tensor, halves: torch.Tensor) -> torch.Tensor:
    """Return the values with these low halves that are nearest to ``before``, with bits compared as integers."""
    old = bits(before)
    step = halves - old.to(halves.dtype)  # as integers wrap around
    return (old + step.to(old.dtype)).view(before.dtype)


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """View values as integers of their size: torch's ``put_`` and ``take`` lack some dtypes."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(kinds.get(values.itemsize, values.dtype))


def full_section(cell: int, values: torch.Tensor) -> bytes:
    """Return the section with all elements of a cell."""
    return _head(cell, 0, values.numel()) + _bytes(values)


def encode_changes(cell: int, now: torch.Tensor, before: torch.Tensor) -> Iterator[bytes]:
    """Yield the sections that turn ``before`` into ``now``: 1-D, of one dtype."""
    found: list[bytes] = []
    kind = _HALVES.get(now.itemsize)
    if kind is None:
        rest = differ(now, before)
    else:
        step = bits(now) - bits(before)  # as integers wrap around
        rest = step != step.to(kind).to(step.dtype)
        near = (step != 0).logical_and_(~rest)
        number = int(near.sum())
        if number * 2 <= now.numel():
            found += _some(cell, near, bits(now), kind)
        else:
            found.append(_head(cell, _HALF, now.numel()) + _bytes(bits(now).to(kind)))
    found += _some(cell, rest, now)
    if sum(map(len, found)) * 4 < now.nbytes * 3:
        yield from found
    else:
        yield full_section(cell, now)


def _some(cell: int, chosen: torch.Tensor, values: torch.Tensor, half: torch.dtype | None = None) -> list[bytes]:
    """Return sections of the chosen elements. ``half``: the integer dtype of low halves, or None for values."""
    at = chosen.nonzero().view(-1)
    if not at.numel():
        return []
    values = values[at]  # in a tenth of the time of `values[chosen]`
    places = encode_gaps(at)
    form = places.itemsize
    if half is not None:
        values, form = values.to(half), form | _HALF
    return [_head(cell, form, places.numel()) + _bytes(places) + _bytes(values)]


def sections(payload: memoryview, cells: Sequence[tuple[int, torch.dtype]]) -> Iterator[Section]:
    """Yield the sections of a payload. ``cells``: the number of elements and the dtype of each.

    Raises:
        ValueError: the payload does not fit these cells. _messages.py, [Note: What anybody may send]
    """
    start = 0
    while start < len(payload):
        places = start + _HEAD
        cell, form, count = (
            int.from_bytes(payload[start + a : start + b], "little") for a, b in ((0, 4), (4, 5), (5, 9))
        )
        gaps, is_half = _GAPS.get(form & ~_HALF), bool(form & _HALF)
        if cell >= len(cells) or form not in (0, 1, 2, 4, 5, 6) or (is_half and cells[cell][1].itemsize not in _HALVES):
            raise ValueError(f"form {form} of cell {cell}, of {len(cells)} cells")
        numel, dtype = cells[cell]
        values, last = places, count
        if gaps is not None:
            values += count * gaps.itemsize
            is_there = count > 0 and values <= len(payload)
            count, last = measure_gaps(_tensor(payload[places:values], gaps)) if is_there else (0, 0)
        dtype = _HALVES[dtype.itemsize] if is_half else dtype
        end = values + count * dtype.itemsize
        if not 0 < count <= last <= numel or (gaps is None and count < numel) or end > len(payload):
            raise ValueError(
                f"{count} elements, the last {last} of {numel} of cell {cell}, in {end} of {len(payload)} bytes"
            )
        yield Section(cell, form, payload[places:values], payload[values:end], dtype, payload[start:end])
        start = end


def _head(cell: int, form: int, count: int) -> bytes:
    return cell.to_bytes(4, "little") + bytes([form]) + count.to_bytes(4, "little")


def _tensor(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Copy bytes into a tensor, as they may be unaligned."""
    return torch.frombuffer(bytearray(data), dtype=dtype)


def _bytes(values: torch.Tensor) -> bytes:
    return bytes(memory_of(values.cpu().contiguous()))
