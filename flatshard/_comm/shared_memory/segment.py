"""The memory that a rank sends from: blocks in a file without a name. See the notes of the package."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import stat
import weakref
from collections.abc import Sequence

import torch

from flatshard._base import trace

TOKEN_BYTES = 8
FIRST_BYTES = 2**16  # of a new segment: room for headers that say that there is no more
_KEPT = 2**20  # bytes that a segment keeps once it has had them
_ALIGNMENT = 64
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python's mmap does not name


def align(nbytes: int) -> int:
    """Round ``nbytes`` up to the alignment of payloads."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def first_block(size: int) -> int:
    """Return the start of the first block in the segment of a rank of ``size``: behind the token and ``place_of_asks``."""
    return align(TOKEN_BYTES + 8 * size)


def place_of_asks(rank: int) -> int:
    """Return the place, in words, of the number of bells for which ``rank`` has asked: see ``mailboxes.py``."""
    return TOKEN_BYTES // 8 + rank


class Mapping:
    """A segment that this process has mapped."""

    def __init__(self, fd: int) -> None:
        self.map = mmap.mmap(fd, 0)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.words = memoryview(self.map).cast("q")  # of 8 bytes

    def map_pages(self, first: int, last: int) -> None:
        """Map pages at once, if the system can. It takes longer to map each when it is first written."""
        with contextlib.suppress(OSError):
            self.map.madvise(_POPULATE_WRITE, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)

    @property
    def token(self) -> bytes:
        return self.map[:TOKEN_BYTES]

    def mark(self, place: int) -> None:
        """Set the mark at ``place``: see ``Block``."""
        self.map[place] = 1

    def zero(self, start: int, stop: int) -> None:
        self.map[start:stop] = bytes(stop - start)

    def view(self, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self.bytes[start : start + nbytes].view(dtype)


class Block:
    """A range of a segment: a mark for each rank that has read its payload, and the payload."""

    __slots__ = ("lent", "nbytes", "payload", "start", "stop")

    def __init__(self, start: int, size: int, nbytes: int) -> None:
        """``size``: the number of ranks. ``nbytes``: of the payload."""
        self.start, self.nbytes = start, nbytes
        self.payload = start + align(size)
        self.stop = self.payload + align(nbytes)
        self.lent: weakref.ref[ctypes.Array[ctypes.c_char]] | None = None  # the memory, as long as a tensor uses it


class Segment:
    """The memory that this rank sends from."""

    _fd = -1

    def __init__(self, size: int) -> None:
        """``size``: the number of ranks.

        Raises:
            OSError: the system has no memory.
        """
        self._size = size
        self._blocks: list[Block] = []  # in use, by address
        self._late: list[Block] = []  # in use at the last ``release_unused``
        # Ends of blocks: below which memory is kept; the highest before the last ``release_unused``; the highest since then.
        self._kept, self._before, self._top = _KEPT, 0, 0
        self._fd = os.memfd_create("flatshard")
        self._pages = bytearray()  # 1 for each page that has memory
        self._populate(0, FIRST_BYTES)
        self.token = self.mapping.map[:TOKEN_BYTES] = os.urandom(TOKEN_BYTES)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    @property
    def address(self) -> list[int]:
        """Four numbers by which other ranks find the segment: see ``PeerSegment``."""
        return [int.from_bytes(self.token, "little", signed=True), os.getpid(), self._fd, os.fstat(self._fd).st_ino]

    @property
    def nbytes(self) -> int:
        """The end of the last page that has had memory."""
        return len(self._pages) * mmap.PAGESIZE

    # -- pages -------------------------------------------------------------------------------------------------------

    def _populate(self, start: int, stop: int) -> None:
        """Have memory from ``start`` to ``stop``.

        Raises:
            OSError: the system has no more memory.
        """
        first, last, size = start // mmap.PAGESIZE, -(-stop // mmap.PAGESIZE), len(self._pages)
        if last > size or 0 in self._pages[first:last]:  # fails now, not when the memory is used
            os.posix_fallocate(self._fd, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)
            if last > size:
                self.mapping = Mapping(self._fd)
            self._pages[first:last] = bytes([1]) * (last - first)  # when they are mapped: a mapping may fail, too
            self.mapping.map_pages(first, last)

    def _return_pages(self, start: int, stop: int) -> None:
        """Return the memory of the pages from ``start`` to ``stop``, but for pages that are kept."""
        first, last = -(-max(start, self._kept) // mmap.PAGESIZE), stop // mmap.PAGESIZE
        if 1 in self._pages[first:last]:
            # Noted before the memory is gone, so that an interrupt in between leaves no page that only seems to have memory.
            self._pages[first:last] = bytes(last - first)
            try:
                self.mapping.map.madvise(mmap.MADV_REMOVE, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)
            except OSError as e:
                trace.logger.debug("the system takes no shared memory back: %s", e)

    def release_unused(self) -> None:
        """Return memory that is not in use. shared_memory, [Note: The size of a segment]"""
        self._drop_read_blocks()
        self._kept, self._before, self._top = max(_KEPT, min(self._before, self._top)), self._top, 0
        for start, stop in self._gaps():
            self._return_pages(start, stop)
        self._late = [*self._blocks]

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _gaps(self) -> list[tuple[int, int]]:
        """Return the ranges between the blocks in use, and the one behind them."""
        starts = [first_block(self._size), *[block.stop for block in self._blocks]]
        return list(zip(starts, [*[block.start for block in self._blocks], self.nbytes], strict=True))

    def _drop_read_blocks(self) -> None:
        """Forget the blocks that are no longer in use."""
        self._blocks = [b for b in self._blocks if (b.lent is not None and b.lent() is not None) or not self.is_read(b)]

    def _marks(self, block: Block) -> slice:
        return slice(block.start, block.start + self._size)

    def is_read(self, block: Block) -> bool:
        """Return whether all readers of the payload have read it."""
        return 0 not in self.mapping.map[self._marks(block)]

    def await_readers(self, block: Block, readers: Sequence[int]) -> None:
        """Keep the block in use until all ``readers`` have read its payload."""
        self.mapping.map[self._marks(block)] = bytes(rank not in readers for rank in range(self._size))

    def allocate(self, nbytes: int) -> Block:
        """Allocate a block for a payload. It is in use as long as readers are awaited, or a tensor uses it.

        Raises:
            OSError: the system has no more memory.
        """
        self._drop_read_blocks()
        for late in [block for block in self._late if block not in self._blocks]:
            self._return_pages(late.start, late.stop)
            self._late.remove(late)
        index, block = 0, Block(first_block(self._size), self._size, nbytes)
        for index, other in enumerate(self._blocks, 1):
            if block.stop <= other.start:
                index -= 1
                break
            block = Block(other.stop, self._size, nbytes)
        self._populate(block.start, block.stop)
        self._top = max(self._top, block.stop)
        self.mapping.map[self._marks(block)] = b"\1" * self._size
        self._blocks.insert(index, block)
        return block

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in a block of its own, which is in use as long as a tensor uses its memory.

        Raises:
            OSError: the system has no more memory.
        """
        block = self.allocate(numel * dtype.itemsize)
        memory = (ctypes.c_char * block.nbytes).from_buffer(self.mapping.map, block.payload)
        block.lent = weakref.ref(memory)
        return torch.frombuffer(memory, dtype=dtype)

    def find_lent(self, tensor: torch.Tensor) -> tuple[Block, int] | None:
        """Return the lent block that has ``tensor``, and its payload's address in this process, or None if there is none."""
        address = tensor.data_ptr()
        for block in self._blocks:
            memory = None if block.lent is None else block.lent()
            if memory is not None and 0 <= address - (begin := ctypes.addressof(memory)) < block.nbytes:
                return block, begin
        return None


class PeerSegment:
    """The segment of another rank."""

    _fd = -1

    def __init__(self, address: Sequence[int]) -> None:
        """Map the segment at ``address``: see ``Segment.address``.

        Raises:
            OSError: this process cannot map it.
        """
        token, pid, fd, inode = address
        path = f"/proc/{pid}/fd/{fd}"
        found = os.stat(path)  # first, as it is safe for any file of this path on another host
        is_segment = stat.S_ISREG(found.st_mode) and found.st_size > 0 and found.st_size % mmap.PAGESIZE == 0
        if not is_segment or found.st_ino != inode:
            raise OSError("it is not there")
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # kept: that rank may end before all is read
        self.mapping = Mapping(self._fd)
        if self.mapping.token != token.to_bytes(TOKEN_BYTES, "little", signed=True):
            raise OSError("it is not there")

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def view(self, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of a payload. Raises as ``map_until``."""
        self.map_until(start + nbytes)
        return self.mapping.view(start, nbytes, dtype)

    def map_until(self, stop: int) -> None:
        """Map memory that the segment has got since.

        Raises:
            OSError: this process cannot map it.
        """
        if stop > len(self.mapping.map):
            self.mapping = Mapping(self._fd)
