"""The changes in a cell, as bytes.

[Note: Sections]
The changes of a cell are sections, each in one form: all elements or some, with their values or with the low half of their
bits. With small learning rates a value moves by a few of its last bits, so the low half is enough: among all numbers with
that low half, the new value is the one nearest to the receiver's. In bfloat16 that is one byte in place of two. If few
elements change, the place of each costs a byte or two more (``_gaps.py``); if more than an eighth do, a bit for
each element. Places cost both sides time: on CPU 15 ns for each element of the cell, in which a link of 50 MB/s sends a byte.
So if more than half of the elements move by few bits, the low halves of all are sent, which takes no more bytes. If sections
of some elements would save less than a quarter of the bytes, all values are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from flatshard.checkpoint._container import memory_of
from flatshard.weights._gaps import bits, decode_gaps, differ, encode_gaps, measure_gaps

_HEAD = 9  # bytes: the cell in four, the form in one, and in four how many elements, words of gaps or bytes of bits there are
_ALL, _GAPS, _BITS = (
    0,
    {1: torch.uint8, 2: torch.int16},
    3,
)  # where elements are, in the form; of gaps the bytes of a word
_HALF = 4  # beside it, in the form
_PACK = 0x0102040810204080  # moves the lowest bits of eight bytes, each to its own place in the highest byte
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
        if self.form & 3 == _ALL:
            return None
        places = _tensor(self.places, _GAPS.get(self.form & 3, torch.uint8))
        if self.form & 3 == _BITS:
            return places.unsqueeze(1).bitwise_and(_powers()).view(-1).nonzero().view(-1)
        return decode_gaps(places)

    def read(self) -> torch.Tensor:
        """Copy the values: 1-D."""
        return _tensor(self.values, self.dtype)


def nearest(before: torch.Tensor, halves: torch.Tensor) -> torch.Tensor:
    """Return the values with these low halves that are nearest to ``before``, with bits compared as integers."""
    old = bits(before)
    step = halves - old.to(halves.dtype)  # as integers wrap around
    return (old + step.to(old.dtype)).view(before.dtype)


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
    if at.numel() * 8 > chosen.numel():
        places, form = _as_bits(chosen), _BITS
    else:
        places = encode_gaps(at)
        form = places.itemsize
    if half is not None:
        values, form = values.to(half), form | _HALF
    return [_head(cell, form, places.numel()) + _bytes(places) + _bytes(values)]


def _as_bits(chosen: torch.Tensor) -> torch.Tensor:
    """Pack eight flags into a byte, the first into its lowest bit."""
    eights = torch.nn.functional.pad(chosen, (0, -len(chosen) % 8)).view(torch.int64)  # a byte for each
    return ((eights * _PACK) >> 56).to(torch.uint8)


def _powers() -> torch.Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device="cpu")


def sections(payload: memoryview, cells: Sequence[tuple[int, torch.dtype]]) -> Iterator[Section]:
    """Yield the sections of a payload. ``cells``: the number of elements and the dtype of each.

    Raises:
        ValueError: the payload does not fit these cells. _messages.py, [Note: What anybody may send]
    """
    start = 0
    while start < len(payload):
        places = start + _HEAD
        cell, form = (
            int.from_bytes(payload[start : start + 4], "little"),
            int.from_bytes(payload[start + 4 : start + 5]),
        )
        count = int.from_bytes(payload[start + 5 : places], "little")
        if cell >= len(cells) or form >= 2 * _HALF or (form & _HALF and cells[cell][1].itemsize not in _HALVES):
            raise ValueError(f"form {form} of cell {cell}, of {len(cells)} cells")
        numel, dtype = cells[cell]
        values, last = places, count
        if form & 3 != _ALL:
            values += count * _GAPS.get(form & 3, torch.uint8).itemsize
            count, last = _measure(form & 3, payload[places:values])
        dtype = _HALVES[dtype.itemsize] if form & _HALF else dtype
        end = values + count * dtype.itemsize
        if not 0 < count <= last <= numel or (form & 3 == _ALL and count < numel) or end > len(payload):
            raise ValueError(
                f"{count} elements, the last {last} of {numel} of cell {cell}, in {end} of {len(payload)} bytes"
            )
        yield Section(cell, form, payload[places:values], payload[values:end], dtype, payload[start:end])
        start = end


def _measure(form: int, places: memoryview) -> tuple[int, int]:
    """Return the number of elements that have places, and the end of the last."""
    if form == _BITS:
        as_one = int.from_bytes(places, "little")
        return as_one.bit_count(), as_one.bit_length()
    size = _GAPS[form].itemsize
    return measure_gaps(_tensor(places[: len(places) // size * size], _GAPS[form])) if len(places) >= size else (0, 0)


def _head(cell: int, form: int, count: int) -> bytes:
    return cell.to_bytes(4, "little") + bytes([form]) + count.to_bytes(4, "little")


def _tensor(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Copy bytes into a tensor, as they may be unaligned."""
    return torch.frombuffer(bytearray(data), dtype=dtype)


def _bytes(values: torch.Tensor) -> bytes:
    return bytes(memory_of(values.cpu().contiguous()))
