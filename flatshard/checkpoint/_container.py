"""The bytes around a tensor in a file, so that ``torch.load`` reads it, and checksums.

[Note: Memory as it is]
``torch.distributed.checkpoint`` keeps each box of a tensor as ``torch.save`` writes it, one after the other in a file: a zip
archive without compression. ``torch.save`` copies the tensor and writes record by record. Here the bytes before and after the
tensor's own are made beforehand, as they follow from its dtype, shape and strides. So a rank writes shards directly from
their memory, in a few large calls, and reads them directly into it.

[Note: Sums]
Each MiB of an entry has a sum. Its 8-byte words are arranged in rows of 4,093 and added by column; the column sums are
multiplied by odd weights and added modulo 2**64. A flipped bit or a page of zeros changes the sum. So do words that change
places, unless their distance is a multiple of 4,093, a prime, so swapped pages and sectors are found. It takes an eighth of
the time of zip's CRC-32, which is left 0, as torch does not check it. Small entries of one size are copied side by side, and
summed together: each sum takes six operations of torch, and a model has hundreds of biases.
"""

from __future__ import annotations

import ctypes
import functools
import io
import pickle
import sys
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch._utils

ALIGNMENT = 64  # of a tensor's bytes in a file
BLOCK = 2**20  # bytes that have a sum of their own
_COLUMNS = 4093  # words
_BATCH = 16  # blocks that are summed at once
_SMALL = 2**15  # bytes of an entry that costs less to copy than to sum alone


class _Storage:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class _Tensor:
    def __init__(self, *args: Any) -> None:
        self._args = args

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v3, self._args


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", torch.UntypedStorage, "0", "cpu", obj.nbytes) if isinstance(obj, _Storage) else None


@functools.lru_cache(maxsize=4096)
def around(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], nbytes: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after the ``nbytes`` of a dense tensor. The former are a multiple of the alignment."""
    stream = io.BytesIO()
    _Pickler(stream, 2).dump(_Tensor(_Storage(nbytes), 0, shape, stride, False, OrderedDict(), dtype))
    small = {"data.pkl": stream.getvalue(), "byteorder": sys.byteorder.encode(), "version": b"3\n"}
    head, directory = bytearray(), bytearray()
    for short, data in [*small.items(), ("data/0", b"")]:
        name, at = f"archive/{short}".encode(), len(head)
        size = _ints(8, len(data) or nbytes)
        pad = -(at + 30 + len(name) + 4) % ALIGNMENT if short == "data/0" else 0
        common = _ints(2, 45, 0, 0, 0, 0) + _ints(4, zlib.crc32(data), _WIDE, _WIDE) + _ints(2, len(name))
        head += b"PK\3\4" + common + _ints(2, 4 + pad) + name + _ints(2, 0x4246, pad) + bytes(pad) + data
        directory += b"PK\1\2" + _ints(2, 45) + common + _ints(2, 20, 0, 0, 0) + _ints(4, 0, at) + name
        directory += _ints(2, 1, 16) + size + size
    count, length, start = len(small) + 1, len(directory), len(head) + nbytes
    end = b"PK\6\6" + _ints(8, 44) + _ints(2, 45, 45) + _ints(4, 0, 0) + _ints(8, count, count, length, start)
    end += b"PK\6\7" + _ints(4, 0) + _ints(8, start + length) + _ints(4, 1)
    end += b"PK\5\6" + _ints(2, 0, 0, count, count) + _ints(4, length, min(start, _WIDE)) + _ints(2, 0)
    return bytes(head), bytes(directory) + end


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain type")


def plain_value(data: bytes) -> Any:
    """Return the value that ``torch.save`` wrote, in a tenth of the time of ``torch.load``.

    Raises:
        Exception: it has other types than numbers, text, None, lists, tuples and dicts, or the bytes are damaged.
    """
    start = 30 + int.from_bytes(data[26:28], "little")  # the archive's first record: header, name, padding, pickle
    if data[8:10] != b"\0\0" or not data[30:start].endswith(b"/data.pkl"):
        raise ValueError("the archive does not begin with an uncompressed pickle")
    return _PlainUnpickler(io.BytesIO(data[start + int.from_bytes(data[28:30], "little") :])).load()


_WIDE = 2**32 - 1  # in zip: the number has 8 bytes and is elsewhere


def _ints(width: int, *numbers: int) -> bytes:
    return b"".join([n.to_bytes(width, "little") for n in numbers])


_Memory = ctypes.c_char * 2**62
"""A type for any size: making one for each size takes ten times as long as a view."""


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a dense tensor on CPU, shared. The view keeps the tensor alive."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    array = _Memory.from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")[: tensor.nbytes]


@functools.cache
def _weights() -> torch.Tensor:
    """Return pseudorandom odd weights: of the columns, of words that fill no row, and of bytes that fill no word."""
    x = torch.arange(1, 2 * _COLUMNS + 1, device="cpu") * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ (x >> shift)) * factor
    return x | 1


def checksums_of(entries: Sequence[memoryview]) -> list[bytes]:
    """Return the ``checksums`` of each entry, of small ones of the same size together. [Note: Sums]"""
    found, alike = [b""] * len(entries), dict[int, list[int]]()
    for i, data in enumerate(entries):
        if (size := data.nbytes) > _SMALL:
            found[i] = checksums(data)
        elif size:
            alike.setdefault(size, []).append(i)
    for size, numbers in alike.items():
        step = max(1, BLOCK // size)
        for start in range(0, len(numbers), step):
            batch = numbers[start : start + step]
            joined = memoryview(bytearray().join([entries[i] for i in batch]))
            for i, total in zip(batch, _totals(joined, len(batch), size), strict=True):
                found[i] = total.to_bytes(8, "little")
    return found


def checksums(data: memoryview) -> bytes:
    """Return the sum of each block, 8 bytes each. [Note: Sums]"""
    blocks = data.nbytes // BLOCK
    batches = [(i * BLOCK, min(_BATCH, blocks - i), BLOCK) for i in range(0, blocks, _BATCH)]
    if data.nbytes % BLOCK:
        batches.append((blocks * BLOCK, 1, data.nbytes % BLOCK))
    totals = [_totals(data[at : at + count * size], count, size) for at, count, size in batches]
    return b"".join([total.to_bytes(8, "little") for batch in totals for total in batch])


def _totals(data: memoryview, count: int, size: int) -> list[int]:
    """Return the sums of ``count`` blocks of ``size`` bytes each."""
    weights, words, totals = _weights(), size // 8, [0] * count
    rest = [data[at + 8 * words : at + size] for at in range(0, count * size, size)] if size % 8 else []
    if words:
        if size % 8 and count > 1:
            data = memoryview(bytearray().join([data[at : at + 8 * words] for at in range(0, count * size, size)]))
        blocks = torch.frombuffer(data, dtype=torch.int64, count=count * words).view(count, words)
        if (rows := words // _COLUMNS) > 1:
            folded = blocks[:, : rows * _COLUMNS].view(count, rows, _COLUMNS).sum(1)
            blocks = torch.cat([folded, blocks[:, rows * _COLUMNS :]], 1)
        totals = (blocks @ weights[: blocks.shape[1]]).tolist()
    if size % 8:
        last = int(weights[-1])
        totals = [total + int.from_bytes(each, "little") * last for total, each in zip(totals, rest, strict=True)]
    return [total % 2**64 for total in totals]
