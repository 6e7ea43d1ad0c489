"""Payloads between ranks of one host, read where they lie in shared memory. Gloo carries a header for each.

[Note: Headers and payloads]
Each rank has a segment of memory that others map. A payload lies there in a block, behind a byte for each rank. To send it,
a rank sends a header by gloo: where it is. Who waits gets the header, reads the payload in the sender's segment, and sets its
byte; when all have, the sender uses the block again. So order, tags, deaths, timeouts and the watch are those of gloo's
messages, and a wait blocks in gloo. No rank waits until another one waits, and no thread is needed: in training on CPU
whoever waits has a core to spare, its own.

A payload is read in one pass: a gather copies it to its place, a reduction adds it, in rank order.

[Note: What is copied before it is sent]
The input of a reduction lies in the segment from the start (``lend``), as nobody but flatshard writes there: it is not
copied. A gather copies this rank's shard to the segment, cast if needed, and all parts from the segments when it is waited
for. So what it fills needs no memory before (``BuiltinCollectives.takes``): a unit that is gathered ahead takes one shard of
the segment. A shard may not be read where it lies: an optimizer, a hook or any
code of the user may write there as soon as the gather has been issued, and must not wait for other ranks. Nor may this
rank's part of the gathered values, which the module may change.

[Note: How ranks meet]
At the first large collective of a group, ranks tell each other where their segments are, try to map them, and tell each other
what they could map. Between two ranks of which one cannot map the other's segment (they are on different hosts, in
different containers, or the system forbids it), payloads go by gloo in that direction. A thread does that, once for each
group, and begins the collectives that have been issued meanwhile, the small ones, too: messages of one tag must not overtake
each other. So they begin when all ranks have issued the first one, whatever each of them waits for.

[Note: No room]
A payload that the system gives no memory for goes by gloo, and its header says with which tag. As its receiver asks for it
when it waits, its sender does not wait until it is received: it sends a copy, which it drops when it has been.

[Note: Nothing is left behind]
A segment is a file without a name (``memfd_create``), which other ranks open by ``/proc``. It is not in ``/dev/shm``, however
small that is, and the system frees it with the last process that has mapped it, however that ends. A random token in the
segment proves that a rank has mapped the right one. A forked process lets go of its copies.

[Note: The size of a segment]
It grows to what is under way at a time. In training that is two shards of the largest unit, and the input of a reduction, or
two where another rank lags; they take no other memory, nor does what is received. Payloads lie as low as there is room.
At the end of a pass and of a backward (``rest``) the segment gives back the memory above what both of the last two have used:
in training, that of reductions. So it holds none for them while an optimizer steps, and where a forward leaves the most to be
kept. What other ranks have yet to read is given back when they have, at the next payload. To give back all would save two
shards more, and cost as much time again: the system clears each page. Addresses stay, and the file is freed with its group.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar

import torch

from flatshard import _config, _trace
from flatshard._comm.backends import GlooCollectives, Receive, Then
from flatshard._comm.collectives import Pending
from flatshard._comm.progress import RESERVED

_TOKEN_BYTES = 8
_FIRST_BYTES = 2**16  # of a new segment: room to say that there is no more
_ALIGNMENT = 64
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python's mmap does not name
_HEADER = (
    3  # numbers in a header: where the block begins, where its payload is (or minus the tag of its message), bytes
)
_INTRODUCTION_TAG = RESERVED + 1
_FIRST_TAG, _TAGS = RESERVED + 8, 2**15  # of payloads that are sent as there is no room
_CURE = "FLATSHARD_SHARED_MEMORY=0 on all ranks sends everything by gloo"


def _up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step


class _Mapping:
    """A segment, mapped."""

    def __init__(self, fd: int) -> None:
        self.map = mmap.mmap(fd, 0)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def map_pages(self, first: int, last: int) -> None:
        """All at once, where the system can: one by one, when they are written first, takes longer."""
        with contextlib.suppress(OSError):
            self.map.madvise(_POPULATE_WRITE, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)

    @property
    def token(self) -> bytes:
        return self.map[:_TOKEN_BYTES]

    def view(self, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self.bytes[start : start + nbytes].view(dtype)


class _Block:
    """A part of this rank's segment: a mark for each rank that has read its payload, and the payload."""

    __slots__ = ("lent", "nbytes", "payload", "start", "stop")

    def __init__(self, start: int, size: int, nbytes: int) -> None:
        """``size``: the number of ranks. ``nbytes``: of the payload."""
        self.start, self.nbytes = start, nbytes
        self.payload = start + _up(size, _ALIGNMENT)
        self.stop = self.payload + _up(nbytes, _ALIGNMENT)
        self.lent: weakref.ref[ctypes.Array[ctypes.c_char]] | None = None  # the memory, as long as a tensor uses it


class _Segment:
    """The memory that this rank sends from."""

    _fd = -1

    def __init__(self, size: int) -> None:
        """``size``: the number of ranks.

        Raises:
            OSError: the system gives none.
        """
        self._size = size
        self._blocks: list[_Block] = []  # those in use, by where they lie
        self._late: list[_Block] = []  # those that were in use at the last rest
        self._kept = self._before = self._top = 0  # where blocks end: that rest keeps; before the last rest; since then
        self._fd = os.memfd_create("flatshard")
        self._pages = bytearray()  # 1 for each page that the system has given memory for
        self._fill(0, _FIRST_BYTES)
        self.token = self.mapping.map[:_TOKEN_BYTES] = os.urandom(_TOKEN_BYTES)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    @property
    def address(self) -> list[int]:
        """By this others find it: see ``_Peer``."""
        return [int.from_bytes(self.token, "little", signed=True), os.getpid(), self._fd, os.fstat(self._fd).st_ino]

    @property
    def nbytes(self) -> int:
        """Up to the last page that there has been memory for."""
        return len(self._pages) * mmap.PAGESIZE

    def _fill(self, start: int, stop: int) -> None:
        """Have memory from ``start`` to ``stop``.

        Raises:
            OSError: the system gives no more memory.
        """
        first, last, size = start // mmap.PAGESIZE, -(-stop // mmap.PAGESIZE), len(self._pages)
        if last > size or 0 in self._pages[first:last]:  # fails now, not when the memory is used
            os.posix_fallocate(self._fd, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)
            self._pages[first:last] = bytes([1]) * (last - first)
            if last > size:
                self.mapping = _Mapping(self._fd)
            self.mapping.map_pages(first, last)

    def _empty(self, start: int, stop: int) -> None:
        """Give back the memory of the pages from ``start`` to ``stop``, as far as it is not to be kept."""
        first, last = -(-max(start, self._kept) // mmap.PAGESIZE), stop // mmap.PAGESIZE
        if 1 in self._pages[first:last]:
            # Before the memory is gone, so that an interrupt in between does not leave pages that only seem to have some.
            self._pages[first:last] = bytes(last - first)
            try:
                self.mapping.map.madvise(mmap.MADV_REMOVE, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)
            except OSError as e:
                _trace.logger.debug("the system takes no shared memory back: %s", e)

    def _gaps(self) -> list[tuple[int, int]]:
        """What lies between the blocks in use, and behind them."""
        starts = [_up(_TOKEN_BYTES, _ALIGNMENT), *[block.stop for block in self._blocks]]
        return list(zip(starts, [*[block.start for block in self._blocks], self.nbytes], strict=True))

    def _drop_read(self) -> None:
        """Forget the blocks that are no longer in use."""
        self._blocks = [b for b in self._blocks if (b.lent is not None and b.lent() is not None) or not self.is_read(b)]

    def rest(self) -> None:
        """Give back memory that is not in use. [Note: The size of a segment]"""
        self._drop_read()
        self._kept, self._before, self._top = min(self._before, self._top), self._top, 0
        for start, stop in self._gaps():
            self._empty(start, stop)
        self._late = [*self._blocks]

    def _marks(self, block: _Block) -> slice:
        return slice(block.start, block.start + self._size)

    def is_read(self, block: _Block) -> bool:
        """Whether all who were to read its payload have."""
        return 0 not in self.mapping.map[self._marks(block)]

    def await_readers(self, block: _Block, readers: Sequence[int]) -> None:
        """The payload is sent: the block stays in use until all ``readers`` have read it."""
        self.mapping.map[self._marks(block)] = bytes(rank not in readers for rank in range(self._size))

    def take(self, nbytes: int) -> _Block:
        """Memory for a payload. It is in use as long as readers are awaited, or a tensor uses it.

        Raises:
            OSError: the system gives no more memory.
        """
        self._drop_read()
        for late in [block for block in self._late if block not in self._blocks]:
            self._empty(late.start, late.stop)
            self._late.remove(late)
        size, gaps = _Block(0, self._size, nbytes).stop, self._gaps()
        index = next((i for i, (start, stop) in enumerate(gaps) if start + size <= stop), len(gaps) - 1)
        block = _Block(gaps[index][0], self._size, nbytes)
        self._fill(block.start, block.stop)
        self._top = max(self._top, block.stop)
        self.await_readers(block, ())
        self._blocks.insert(index, block)
        return block

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in a block of its own, which is in use as long as a tensor uses its memory.

        Raises:
            OSError: the system gives no more memory.
        """
        block = self.take(numel * dtype.itemsize)
        memory = (ctypes.c_char * block.nbytes).from_buffer(self.mapping.map, block.payload)
        block.lent = weakref.ref(memory)
        return torch.frombuffer(memory, dtype=dtype)

    def find(self, tensor: torch.Tensor) -> tuple[_Block, int] | None:
        """Where ``tensor`` lies, if in a block that was lent, and where that begins in this process's memory."""
        address = tensor.data_ptr()
        for block in self._blocks:
            memory = None if block.lent is None else block.lent()
            if memory is not None and 0 <= address - (begin := ctypes.addressof(memory)) < block.nbytes:
                return block, begin
        return None


class _Peer:
    """The segment of another rank."""

    _fd = -1

    def __init__(self, address: Sequence[int]) -> None:
        """Map it. ``address``: see ``_Segment``.

        Raises:
            OSError: this process cannot map it.
        """
        token, pid, fd, inode = address
        path = f"/proc/{pid}/fd/{fd}"
        found = os.stat(path)  # first, as it is safe whatever this is on another host
        if not stat.S_ISREG(found.st_mode) or found.st_ino != inode or not found.st_size:
            raise OSError("it is not there")
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # kept: that rank may end before all is read
        self.mapping = _Mapping(self._fd)
        if self.mapping.token != token.to_bytes(_TOKEN_BYTES, "little", signed=True):
            raise OSError("it is not there")

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def view(self, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """A payload.

        Raises:
            OSError: it has grown, and this process cannot map it.
        """
        if start + nbytes > len(self.mapping.map):
            self.mapping = _Mapping(self._fd)
        return self.mapping.view(start, nbytes, dtype)


class _Deferred:
    """A collective that begins when the ranks have met."""

    def __init__(self, begin: Callable[[], Pending], meet: Callable[[], object]) -> None:
        """``meet``: waits for that."""
        self._begin, self._meet = begin, meet
        self._pending: Pending | None = None

    def begin(self) -> None:
        self._pending = self._begin()

    def wait(self) -> None:
        if self._pending is None:
            self._meet()
        assert self._pending is not None
        self._pending.wait()


class SharedMemory:
    """The segments of the ranks of one process group, for one of them."""

    _known: ClassVar[weakref.WeakKeyDictionary[Hashable, SharedMemory]] = weakref.WeakKeyDictionary()

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._others = [(rank - step) % size for step in range(1, size)]
        self._own: _Segment | None = None
        self._peers: dict[int, _Peer] = {}  # those whose segments this rank has mapped
        self._readers: list[int] = []  # those that have mapped this rank's
        self._have_met = threading.Event()  # or have failed to
        self._failure: BaseException | None = None
        self._deferred: list[_Deferred] = []  # that are to begin
        self._lock = threading.Lock()
        # Payloads for which there was no room: [Note: No room]
        self._tags = itertools.cycle(range(_FIRST_TAG, _FIRST_TAG + _TAGS))
        self._messages: list[tuple[_Block, Pending]] = []

    @classmethod
    def known(cls, collectives: GlooCollectives) -> SharedMemory | None:
        """That of a process group whose ranks have begun to meet."""
        found = cls._known.get(collectives.group)
        # The group may have been given other ranks.
        return None if found is None or (found._rank, found._size) != (collectives.rank, collectives.size) else found

    @classmethod
    def of(cls, collectives: GlooCollectives) -> SharedMemory:
        """That of a process group. It lives as long as the group."""
        found = cls.known(collectives)
        if found is None:
            found = cls._known[collectives.group] = cls(collectives.rank, collectives.size)
            found._begin_to_meet(collectives)
        return found

    @classmethod
    @functools.cache
    def forget_in_forks(cls) -> None:
        """Have a process that is forked from this one let go of all segments."""
        os.register_at_fork(after_in_child=cls._known.clear)

    # -- how ranks meet ----------------------------------------------------------------------------------------------

    def when_met(self, begin: Callable[[], Pending]) -> Pending:
        """``begin`` a collective once the ranks have met."""
        with self._lock:
            if not self._have_met.is_set():
                self._deferred.append(_Deferred(begin, self._meet))
                return self._deferred[-1]
        self._meet()
        return begin()

    def _meet(self) -> None:
        self._have_met.wait()
        if self._failure is not None:
            raise self._failure

    def _begin_to_meet(self, collectives: GlooCollectives) -> None:
        addresses = torch.zeros(self._size, 4, dtype=torch.int64, device="cpu")
        try:
            self._own = _Segment(self._size)
            self.forget_in_forks()
            addresses[self._rank] = torch.tensor(self._own.address, device="cpu")
        except (OSError, AttributeError) as e:  # an address of zeros is nobody's
            _trace.logger.debug("no shared memory: %s", e)
        told = self._tell(collectives, addresses)
        threading.Thread(target=self._introduce, args=(collectives, addresses, told), daemon=True).start()

    def _tell(self, collectives: GlooCollectives, rows: torch.Tensor) -> Pending:
        """Send this rank's row to all others, and receive theirs."""
        sent = [(rows[self._rank], k) for k in reversed(self._others)]
        return collectives.messages(sent, [(rows[k], k) for k in self._others], _INTRODUCTION_TAG)

    def _introduce(self, collectives: GlooCollectives, addresses: torch.Tensor, told: Pending) -> None:
        """Map what other ranks have, find out what they have mapped, and begin what waits for that. A thread runs this."""
        try:
            told.wait()
            for rank in self._others:
                try:
                    self._peers[rank] = _Peer(addresses[rank].tolist())
                except (OSError, ValueError) as e:
                    _trace.logger.debug(
                        "rank %d of the group cannot read the memory of rank %d: %s", self._rank, rank, e
                    )
            mapped = torch.zeros(self._size, self._size, dtype=torch.int64, device="cpu")
            mapped[self._rank, [*self._peers]] = 1
            self._tell(collectives, mapped).wait()
            self._readers = mapped[:, self._rank].nonzero().flatten().tolist()
            with self._lock:
                while self._deferred:
                    self._deferred.pop(0).begin()
                self._have_met.set()
        except BaseException as e:
            self._failure = e
            self._have_met.set()

    # -- payloads ----------------------------------------------------------------------------------------------------

    def swap(
        self, collectives: GlooCollectives, sent: Sequence[torch.Tensor], receive: Receive, tag: int, then: Then | None
    ) -> Pending:
        """Send payloads of one size to all other ranks, and receive theirs: see ``_exchange``. The ranks have met."""
        headers = self._send(collectives, sent) if self._readers else {}
        received = {
            k: torch.empty(_HEADER, dtype=torch.int64, device="cpu") if k in self._peers else receive(k)
            for k in self._others
        }
        outgoing = [(headers.get(k, sent[k]), k) for k in reversed(self._others)]
        works = collectives.messages(outgoing, [(received[k], k) for k in self._others], tag)

        def place(parts: Sequence[torch.Tensor]) -> None:
            for k in self._peers:
                receive(k).copy_(parts[k])

        return _Reading(works, sent[self._rank], received, self, collectives, receive, then or place)

    def _send(self, collectives: GlooCollectives, sent: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Lay ``sent`` where others read it. Returns a header for each of them. [Note: What is copied before it is sent]"""
        own, nbytes = self._own, sent[0].nbytes
        assert own is not None
        lent = own.find(sent[0])
        if lent is not None and own.is_read(lent[0]):
            block, begin = lent
            starts = {k: block.payload + sent[k].data_ptr() - begin for k in self._readers}
        else:
            is_one, step = all(each is sent[0] for each in sent), _up(nbytes, _ALIGNMENT)
            try:
                block = own.take(step * (1 if is_one else len(self._readers)))
            except OSError as e:
                _trace.logger.debug("no shared memory of %d bytes: %s", nbytes, e)
                return self._send_by_gloo(collectives, sent)
            starts = {k: block.payload + (0 if is_one else index * step) for index, k in enumerate(self._readers)}
            for k in self._readers[:1] if is_one else self._readers:
                own.mapping.view(starts[k], nbytes, sent[k].dtype).copy_(sent[k])
        own.await_readers(block, self._readers)
        return {k: torch.tensor([block.start, starts[k], nbytes], device="cpu") for k in self._readers}

    def _send_by_gloo(self, collectives: GlooCollectives, sent: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """[Note: No room]"""
        own, headers = self._own, {}
        assert own is not None
        for block, message in [each for each in self._messages if own.is_read(each[0])]:
            message.wait()
            self._messages.remove((block, message))
        copies = {id(each): each.clone() for each in sent}
        for k in self._readers:
            try:
                block = own.take(0)
            except OSError as e:
                raise RuntimeError(f"no shared memory to say that there is none ({e}): {_CURE}") from e
            tag = next(self._tags)
            own.await_readers(block, [k])
            self._messages.append((block, collectives.messages([(copies[id(sent[k])], k)], [], tag)))
            headers[k] = torch.tensor([block.start, -tag, sent[k].nbytes], device="cpu")
        return headers


class _Reading:
    """A collective whose payloads are read when their headers have arrived. [Note: Headers and payloads]"""

    def __init__(
        self,
        works: Pending,
        own: torch.Tensor,
        received: dict[int, torch.Tensor],
        memory: SharedMemory,
        collectives: GlooCollectives,
        receive: Receive,
        then: Then,
    ) -> None:
        """``own``: this rank's payload for itself. ``received``: by rank, headers, or payloads of those that share none."""
        self._works, self._own, self._received = works, own, received
        self._memory, self._collectives, self._receive = memory, collectives, receive
        self._then: Then | None = then
        self._messages: dict[int, tuple[torch.Tensor, Pending]] = {}  # payloads that go by gloo after all
        self._read: list[tuple[_Mapping, int]] = []  # where marks are to be set

    def wait(self) -> None:
        if self._then is None:
            self._mark()
            return
        self._works.wait()
        self._read.clear()
        try:
            self._then([self._part(rank) for rank in range(len(self._received) + 1)])
        except Exception:
            self._mark()
            raise
        self._then = None
        self._mark()
        del self._works, self._own, self._received, self._receive  # what was lent may be used again

    def _part(self, rank: int) -> torch.Tensor:
        """What ``rank`` has sent."""
        own, peer = self._own, self._memory._peers.get(rank)
        if rank == self._memory._rank:
            return own
        if peer is None:
            return self._received[rank]
        block, start, nbytes = self._received[rank].tolist()
        if nbytes != own.nbytes:
            raise RuntimeError(f"rank {rank} of the group sent {nbytes} bytes, and this rank {own.nbytes}")
        try:
            part = peer.view(
                *((start, nbytes, own.dtype) if start > 0 else (block, self._memory._rank + 1, torch.uint8))
            )
        except OSError as e:
            raise RuntimeError(
                f"the memory of rank {rank} of the group has grown, and cannot be mapped: {_CURE}"
            ) from e
        if start < 0:
            part = self._by_gloo(rank, -start)
        self._read.append((peer.mapping, block + self._memory._rank))
        return part

    def _by_gloo(self, rank: int, tag: int) -> torch.Tensor:
        """[Note: No room]"""
        if rank not in self._messages:
            part = self._receive(rank)
            self._messages[rank] = part, self._collectives.messages([], [(part, rank)], tag)
        part, message = self._messages[rank]
        message.wait()
        return part

    def _mark(self) -> None:
        """Tell the senders that their memory may be used again."""
        while self._read:
            mapping, place = self._read.pop()  # first: after an interrupt it may be another payload's already
            mapping.map[place] = 1


def through_memory(
    collectives: GlooCollectives, sent: Sequence[torch.Tensor], receive: Receive, tag: int, then: Then | None
) -> Pending:
    """See ``GlooCollectives._through_memory``."""
    by_messages = functools.partial(collectives._by_messages, sent, receive, tag, then)
    if tag >= RESERVED or collectives.size == 1:
        return by_messages()
    if 0 < _config.SHARED_MEMORY <= sent[0].nbytes:
        memory = SharedMemory.of(collectives)
        return memory.when_met(functools.partial(memory.swap, collectives, sent, receive, tag, then))
    known = SharedMemory.known(collectives)
    return by_messages() if known is None else known.when_met(by_messages)


def rest_memory(collectives: GlooCollectives) -> None:
    """See ``GlooCollectives._rest_memory``."""
    memory = SharedMemory.known(collectives)
    # While ranks meet, the thread takes memory of the segment.
    if memory is not None and memory._own is not None and memory._have_met.is_set():
        memory._own.rest()


def lend_memory(
    collectives: GlooCollectives, numel: int, dtype: torch.dtype, to_all: bool = False
) -> torch.Tensor | None:
    """See ``GlooCollectives._lend_memory``. ``to_all``: every rank reads all of it, and not each its part."""
    memory = SharedMemory.known(collectives)
    is_large = 0 < _config.SHARED_MEMORY * (1 if to_all else collectives.size) <= numel * dtype.itemsize
    # While ranks meet, the thread takes memory of the segment.
    if memory is None or memory._own is None or not (is_large and memory._have_met.is_set() and memory._readers):
        return None
    try:
        return memory._own.lend(numel, dtype)
    except OSError as e:
        _trace.logger.debug("no shared memory of %d elements: %s", numel, e)
        return None
