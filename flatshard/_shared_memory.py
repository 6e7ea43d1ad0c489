"""Payloads between ranks of one host, read where they lie in shared memory. Gloo carries a header for each.

[Note: Headers and payloads]
Each rank has a segment of memory that others map. To send, it copies the payload there and sends a header by gloo: where it
lies. Who waits gets the header, reads the payload in the sender's segment, and marks it there as read; then the sender uses
the place again. So order, tags, deaths, timeouts and the watch are those of gloo's messages, and a wait blocks in gloo. What
is sent is staged when it is issued, so no rank waits until another one waits. No thread is needed: in training on CPU whoever
waits has a core to spare, its own.

A payload is read in one pass: a gather copies it to its place, a reduction adds it, in rank order.

[Note: How ranks meet]
At the first large collective of a group, ranks tell each other where their segments are, try to map them, and tell each other
what they could map. Between two ranks of which one cannot map the other's segment (they are on different hosts, in
different containers, or the system forbids it), payloads go by gloo in that direction. Collectives that are issued before all
ranks have met begin when one of them is waited for.

[Note: Nothing is left behind]
A segment is a file without a name (``memfd_create``), which other ranks open by ``/proc``. It is not in ``/dev/shm``, however
small that is, and the system frees it with the last process that has mapped it, however that ends. A random token in the
segment proves that a rank has mapped the right one.

[Note: The size of a segment]
It grows to what is under way at a time, and is freed with its group. A gather stages this rank's shard, a reduce-scatter the
parts of its input for other ranks. An all-reduce is gloo's own. In training that is two shards of the largest unit, and
the inputs of two reductions. In turn, no memory is needed to receive the parts of a reduction.
"""

from __future__ import annotations

import functools
import mmap
import os
import stat
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch

from flatshard import _config, _trace
from flatshard._comm.backends import Addressed, GlooCollectives, Receive, Then
from flatshard._comm.collectives import Pending
from flatshard._comm.progress import RESERVED


class Messages(Protocol):
    """Sends and receives messages by gloo, with the tag of a collective."""

    def __call__(self, sent: Addressed, received: Addressed) -> Pending: ...


_TOKEN_BYTES = 8
_SLOTS = 256  # payloads in a segment at a time
_ALIGNMENT = 64
_HEADER = 3  # numbers in a header: slot, start and bytes of a payload
_INTRODUCTION_TAG = RESERVED + 1
_CURE = "FLATSHARD_SHARED_MEMORY=0 on all ranks sends everything by gloo"


def _up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step


class _Mapping:
    """A segment, mapped: a token, for each slot a byte for each rank that has read the slot's payload, and payloads."""

    def __init__(self, fd: int, size: int) -> None:
        """``size``: the number of ranks."""
        self._size = size
        self.map = mmap.mmap(fd, 0)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    @property
    def token(self) -> bytes:
        return self.map[:_TOKEN_BYTES]

    def row(self, slot: int) -> slice:
        """The marks of a slot."""
        return slice(_TOKEN_BYTES + slot * self._size, _TOKEN_BYTES + (slot + 1) * self._size)

    def mark(self, slot: int, rank: int) -> None:
        """``rank`` has read the slot's payload."""
        self.map[self.row(slot).start + rank] = 1

    def view(self, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self.bytes[start : start + nbytes].view(dtype)


class _Segment:
    """The memory that this rank sends from."""

    _fd = -1

    def __init__(self, size: int) -> None:
        """``size``: the number of ranks.

        Raises:
            OSError: the system gives none.
        """
        self._size = size
        self._begin = _up(_TOKEN_BYTES + _SLOTS * size, mmap.PAGESIZE)
        self._used: dict[int, tuple[int, int]] = {}  # where payloads lie, by slot
        self._fd = os.memfd_create("flatshard")
        self.nbytes = 0
        self.token = os.urandom(_TOKEN_BYTES)
        self._grow(self._begin)
        self.mapping.map[:_TOKEN_BYTES] = self.token

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    @property
    def address(self) -> list[int]:
        """By this others find it: see ``_Peer``."""
        return [int.from_bytes(self.token, "little", signed=True), os.getpid(), self._fd, os.fstat(self._fd).st_ino]

    def _grow(self, nbytes: int) -> None:
        os.ftruncate(self._fd, _up(nbytes, mmap.PAGESIZE))
        self.mapping = _Mapping(self._fd, self._size)
        self.nbytes = _up(nbytes, mmap.PAGESIZE)

    def take(self, nbytes: int, readers: Sequence[int]) -> tuple[int, int]:
        """Slot and offset of memory for a payload, until all ``readers`` have read it.

        Raises:
            OSError: the system gives no more memory.
        """
        marks = self.mapping
        for slot in [slot for slot in self._used if 0 not in marks.map[marks.row(slot)]]:
            del self._used[slot]
        free = next((slot for slot in range(_SLOTS) if slot not in self._used), None)
        if free is None:
            raise OSError(f"{_SLOTS} payloads are under way")
        start, nbytes = self._begin, _up(nbytes, _ALIGNMENT)
        for other, end in sorted(self._used.values()):
            if start + nbytes <= other:
                break
            start = end
        if start + nbytes > self.nbytes:
            self._grow(start + nbytes)
        self.mapping.map[marks.row(free)] = bytes(rank not in readers for rank in range(self._size))
        self._used[free] = start, start + nbytes
        return free, start


class _Peer:
    """The segment of another rank."""

    def __init__(self, address: Sequence[int], size: int) -> None:
        """Map it. ``address``: see ``_Segment``. ``size``: the number of ranks.

        Raises:
            OSError: this process cannot map it.
        """
        token, pid, fd, self._inode = address
        self._token = token.to_bytes(_TOKEN_BYTES, "little", signed=True)
        self._path, self._size = f"/proc/{pid}/fd/{fd}", size
        self._map()

    def _map(self) -> None:
        found = os.stat(self._path)  # first, as it is safe whatever this is on another host
        if not stat.S_ISREG(found.st_mode) or found.st_ino != self._inode or not found.st_size:
            raise OSError("it is not there")
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.mapping = _Mapping(fd, self._size)
        finally:
            os.close(fd)
        if self.mapping.token != self._token:
            raise OSError("it is not there")

    def view(self, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """A payload."""
        if start + nbytes > len(self.mapping.map):  # it has grown
            self._map()
        return self.mapping.view(start, nbytes, dtype)


class _Deferred:
    """A collective that begins when the ranks have met."""

    def __init__(self, meet: Callable[[], object], start: Callable[[], Pending]) -> None:
        self._meet, self._start = meet, start
        self._pending: Pending | None = None

    def start(self) -> None:
        """Idempotent."""
        if self._pending is None:
            self._pending = self._start()

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
        self._own: _Segment | None = None
        self._peers: dict[int, _Peer] = {}  # those whose segments this rank has mapped
        self._readers: set[int] = set()  # those that have mapped this rank's
        # How they meet: addresses, then what each has mapped.
        self._addresses, self._mapped = (torch.zeros(size, n, dtype=torch.int64) for n in (4, size))
        self._telling: list[Pending] = []
        self._deferred: list[_Deferred] = []
        self._have_met = False

    @classmethod
    def of(cls, group: Hashable, rank: int, size: int) -> SharedMemory:
        """That of a process group. It lives as long as the group."""
        found = cls._known.get(group)
        if found is None or (found._rank, found._size) != (rank, size):  # it may have been given other ranks
            found = cls._known[group] = cls(rank, size)
        return found

    # -- how ranks meet ----------------------------------------------------------------------------------------------

    def when_met(self, messages: Messages, start: Callable[[], Pending]) -> Pending:
        """``start`` a collective once the ranks have met. ``messages``: by which they do."""
        if self._have_met:
            return start()
        if not self._telling:
            try:
                self._own = _Segment(self._size)
                self._addresses[self._rank] = torch.tensor(self._own.address)
            except (OSError, AttributeError) as e:  # an address of zeros is nobody's
                _trace.logger.debug("no shared memory: %s", e)
            self._telling.append(self._tell(messages, self._addresses))
        deferred = _Deferred(lambda: self._meet(messages), start)
        self._deferred.append(deferred)
        return deferred

    def _tell(self, messages: Messages, rows: torch.Tensor) -> Pending:
        """Send this rank's row to all others, and receive theirs."""
        others = [(self._rank - step) % self._size for step in range(1, self._size)]
        return messages([(rows[self._rank], k) for k in reversed(others)], [(rows[k], k) for k in others])

    def _meet(self, messages: Messages) -> None:
        """Wait for all ranks, and begin what has been deferred. After an interrupt it goes on."""
        self._telling[0].wait()
        if len(self._telling) == 1:
            addresses = self._addresses.tolist()
            for rank in {*range(self._size)} - {self._rank} - {*self._peers}:
                try:
                    self._peers[rank] = _Peer(addresses[rank], self._size)
                except OSError as e:
                    _trace.logger.debug(
                        "rank %d of the group cannot read the memory of rank %d: %s", self._rank, rank, e
                    )
            self._mapped[self._rank, [self._rank, *self._peers]] = 1
            self._telling.append(self._tell(messages, self._mapped))
        self._telling[1].wait()
        self._readers = {*self._mapped[:, self._rank].nonzero().flatten().tolist()} - {self._rank}
        while self._deferred:
            self._deferred[0].start()
            del self._deferred[0]
        self._have_met = True

    # -- payloads ----------------------------------------------------------------------------------------------------

    def swap(
        self,
        messages: Messages,
        sent: Sequence[torch.Tensor],
        receive: Receive,
        then: Then | None,
    ) -> Pending:
        """Send payloads of one size to all other ranks, and receive theirs. The ranks have met.

        Args:
            messages: sends headers, and payloads between ranks that share no memory.
            sent: by rank: one for each, or one for all.
            receive: memory for the payload of a rank: where it is received, if that rank shares none.
            then: called by whoever waits, and again after an interrupt: with all ranks' payloads. None: copies them to
                what ``receive`` gives.
        """
        others = [(self._rank - step) % self._size for step in range(1, self._size)]
        own = self._stage(sent) if self._readers else _Staged(sent[self._rank], {}, None)
        received = {k: torch.empty(_HEADER, dtype=torch.int64) if k in self._peers else receive(k) for k in others}
        outgoing = [(own.headers.get(k, sent[k]), k) for k in reversed(others)]
        works = messages(outgoing, [(received[k], k) for k in others])

        def place(parts: Sequence[torch.Tensor]) -> None:
            for k in self._peers:
                receive(k).copy_(parts[k])

        return _Reading(works, own, received, self._peers, then or place, self._rank)

    def _stage(self, sent: Sequence[torch.Tensor]) -> _Staged:
        """Copy to the segment what others read there."""
        own, payload, readers = self._own, sent[self._rank], sorted(self._readers)
        assert own is not None
        nbytes, dtype = payload.nbytes, payload.dtype
        is_one, step = all(each is payload for each in sent), _up(nbytes, _ALIGNMENT)
        try:
            slot, start = own.take(step * (1 if is_one else len(readers)), [*readers, self._rank])
        except OSError as e:
            raise RuntimeError(f"no shared memory of {nbytes} bytes to send from ({e}): {_CURE}") from e
        mapping = own.mapping
        if is_one:
            header = torch.tensor([slot, start, nbytes])
            copied = mapping.view(start, nbytes, dtype).copy_(payload)
            return _Staged(copied, dict.fromkeys(readers, header), (mapping, slot))
        starts = {k: start + index * step for index, k in enumerate(readers)}
        for k in readers:
            mapping.view(starts[k], nbytes, dtype).copy_(sent[k])
        headers = {k: torch.tensor([slot, starts[k], nbytes]) for k in readers}
        return _Staged(payload, headers, (mapping, slot))


def through_memory(
    collectives: GlooCollectives, sent: Sequence[torch.Tensor], receive: Receive, tag: int, then: Then | None
) -> Pending | None:
    """See ``GlooCollectives._through_memory``. None: these payloads are sent, as they are small, or not of a unit."""
    if tag >= RESERVED or collectives.size == 1 or not 0 < _config.SHARED_MEMORY <= sent[0].nbytes:
        return None
    memory = SharedMemory.of(collectives.group, collectives.rank, collectives.size)
    introductions, messages = (functools.partial(collectives._messages, tag=each) for each in (_INTRODUCTION_TAG, tag))
    return memory.when_met(introductions, lambda: memory.swap(messages, sent, receive, then))


class _Staged(NamedTuple):
    """What this rank sends in one collective."""

    own: torch.Tensor
    """Its own payload. It stays until this rank has marked it as read."""
    headers: dict[int, torch.Tensor]
    """By rank, of those that read payloads in the segment."""
    place: tuple[_Mapping, int] | None
    """Where payloads are staged, and their slot."""


class _Reading:
    """A collective whose payloads are read when their headers have arrived. [Note: Headers and payloads]"""

    def __init__(
        self,
        works: Pending,
        own: _Staged,
        received: dict[int, torch.Tensor],
        peers: dict[int, _Peer],
        then: Then,
        rank: int,
    ) -> None:
        self._works, self._own, self._received, self._peers = works, own, received, peers
        self._then: Then | None = then
        self._rank = rank

    def wait(self) -> None:
        self._works.wait()
        if self._then is None:
            return
        read = [] if self._own.place is None else [self._own.place]
        parts = {**self._received, self._rank: self._own.own}
        for rank, header in self._received.items():
            if (peer := self._peers.get(rank)) is not None:
                slot, start, nbytes = header.tolist()
                parts[rank] = self._view(rank, peer, start, nbytes)
                read.append((peer.mapping, slot))
        then, self._then = self._then, None
        try:
            then([parts[rank] for rank in range(len(parts))])
        except Exception:
            self._free(read)
            raise
        except BaseException:
            self._then = then
            raise
        self._free(read)

    def _view(self, rank: int, peer: _Peer, start: int, nbytes: int) -> torch.Tensor:
        own = self._own.own
        if nbytes != own.nbytes:
            raise RuntimeError(f"rank {rank} of the group sent {nbytes} bytes, and this rank {own.nbytes}")
        try:
            return peer.view(start, nbytes, own.dtype)
        except OSError as e:
            raise RuntimeError(f"rank {rank} of the group has sent, and its memory is gone") from e

    def _free(self, read: list[tuple[_Mapping, int]]) -> None:
        """Tell the senders of ``read`` that their memory may be used again."""
        self._received = {}
        for mapping, slot in read:
            mapping.mark(slot, self._rank)
