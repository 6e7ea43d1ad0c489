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
the time of zip's CRC-32, which is left 0, as torch does not check it.
"""

from __future__ import annotations

import ctypes
import functools
import io
import pickle
import sys
import zlib
from collections import OrderedDict
from typing import Any

import torch
import torch._utils

ALIGNMENT = 64  # of a tensor's bytes in a file
BLOCK = 2**20  # bytes that have a sum of their own
_COLUMNS = 4093  # words
_BATCH = 16  # blocks that are summed at once


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


def checksums(data: memoryview) -> bytes:
    """Return the sum of each block, 8 bytes each. [Note: Sums]"""
    blocks = data.nbytes // BLOCK
    batches = [(i * BLOCK, min(_BATCH, blocks - i), BLOCK) for i in range(0, blocks, _BATCH)]
    if data.nbytes % BLOCK:
        batches.append((blocks * BLOCK, 1, data.nbytes % BLOCK))
    return b"".join([_checksums(data[at : at + count * size], count, size) for at, count, size in batches])


def _checksums(data: memoryview, count: int, size: int) -> bytes:
    """Return the sums of ``count`` blocks of ``size`` bytes each."""
    weights, words, totals = _weights(), size // 8, [0]
    if words:
        blocks = torch.frombuffer(data, dtype=torch.int64, count=count * words).view(count, words)
        if (rows := words // _COLUMNS) > 1:
            folded = blocks[:, : rows * _COLUMNS].view(count, rows, _COLUMNS).sum(1)
            blocks = torch.cat([folded, blocks[:, rows * _COLUMNS :]], 1)
        totals = (blocks @ weights[: blocks.shape[1]]).tolist()
    if size % 8:  # then it is one block
        totals[0] += int.from_bytes(data[words * 8 :], "little") * int(weights[-1])
    return b"".join([(total % 2**64).to_bytes(8, "little") for total in totals])
