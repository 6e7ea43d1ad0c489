"""Headers in shared memory: each rank writes those of its payloads to its own segment, where the others read them.

[Note: Mailboxes]
A rank's headers lie in a chunk of its segment, in the order in which they were sent. All readers read the same ones. A header
begins with its number, which is written last: a reader that finds the number it expects finds the rest of the header, and the
payload. The last place of a chunk refers to the next one. A reader marks a chunk as read when it leaves it, as it marks a
payload. So a rank never waits for room: it takes another chunk.

[Note: The order of memory]
A reader must not see a header's number before the rest of the header and the payload. On x86 a processor's writes become
visible in their order, it reads in order, and each Python statement here is a call of its own, which no compiler reorders.
Other processors need barriers that Python lacks: there gloo carries the headers (``are_ordered``). A number that is half
written is no other number that a reader may expect. Sleep needs more: a reader writes that it asks to be woken and then reads
the header, the sender writes the header and then reads who asks. One must see the other. So each takes a lock in between: an
atomic read and write, which on x86 is a full barrier.

[Note: How a rank waits]
A reader polls for a header, with ``sched_yield`` in between, for as long as a rank in step may be late (``_SPIN``). Then it
asks to be woken, and waits in gloo for an empty message of the sender, its *bell*. The sender sends it with its next header.
So deaths, timeouts and the watch are those of gloo's messages, and a long wait takes no processor time. Ranks in step send no
messages at all. Over gloo alone, each of two ranks sends a message for each collective and wakes up for two: this took 0.9 to
1.4 of the 1.7 milliseconds of a small unit's collective on two cores, mostly to wake threads.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from flatshard._comm.collectives import Addressed, Pending
from flatshard._comm.progress import RESERVED
from flatshard._comm.shared_memory.segment import Block, PeerSegment, Segment, align, first_block, place_of_asks

SendMessages = Callable[[Addressed, Addressed, int], Pending]
"""``GlooCollectives.messages``: sends tensors, receives others, with a tag."""

are_ordered = platform.machine().lower() in ("x86_64", "amd64")
"""Whether headers may lie in shared memory. [Note: The order of memory]"""

BELL = RESERVED + 2  # the tag of bells
_SPIN = 1e-3  # seconds
_WORDS = 8  # of 8 bytes, in a header: a line of the processor's cache
_HEADERS = 64  # in a chunk
CHUNK_BYTES = _HEADERS * _WORDS * 8
_LINK = -1  # in place of a tag: the block is the next chunk
_lock = threading.Lock()


class Header(NamedTuple):
    """A payload of one rank for another."""

    block: int
    """The start of its block."""
    start: int
    """The start of the payload, or minus the tag of its message: shared_memory, [Note: No room]"""
    nbytes: int


def _order_memory() -> None:
    """Have other processes see this thread's writes before its next read. [Note: The order of memory]"""
    with _lock:
        pass


def _place_of(chunk: int, number: int) -> int:
    """Return the place of a header, in words. ``chunk``: where its headers begin."""
    return chunk // 8 + (number - 1) % _HEADERS * _WORDS


class Outbox:
    """The headers that this rank sends."""

    def __init__(self, segment: Segment, others: Sequence[int]) -> None:
        """``segment``: of this rank, in which nothing has been allocated yet. ``others``: the other ranks of the group.

        Raises:
            OSError: the system has no memory.
        """
        self._segment = segment
        self._readers = others
        self._following = self._make_chunk()
        self._place = self._following, 1  # the chunk of the next header, or of the last one; its number
        self._bells = dict[int, tuple[int, Pending]]()  # by rank: how often it had asked, and the latest bell

    def address_to(self, readers: Sequence[int]) -> None:
        """Send to ``readers`` alone. Nothing has been sent yet."""
        self._readers = readers
        self._segment.await_readers(self._following, readers)

    def _make_chunk(self) -> Block:
        chunk = self._segment.allocate(CHUNK_BYTES)
        self._segment.mapping.zero(chunk.payload, chunk.stop)
        self._segment.await_readers(chunk, self._readers)
        return chunk

    def put(self, tag: int, count: int, block: int, start: int, step: int, nbytes: int, send: SendMessages) -> None:
        """Send a header to all readers, and wake those that sleep. After an interrupt it has been sent or not.

        Args:
            tag: of the collective.
            count: of collectives with this tag.
            block: the start of its block.
            start: of rank 0's payload, or minus the tag of its message.
            step: between the payloads of two ranks.
            nbytes: of a payload.
            send: for bells.

        Raises:
            OSError: the system has no memory.
        """
        chunk, number = self._place
        words = self._segment.mapping.words
        if words[at := _place_of(chunk.payload, number)] == number:
            number += 1
            at += _WORDS
        if number % _HEADERS == 0:
            if self._following is chunk:
                self._following = self._make_chunk()
                words = self._segment.mapping.words
            words[at + 1], words[at + 3] = _LINK, self._following.start
            words[at] = number
            self._place = chunk, number = self._following, number + 1
            at = _place_of(chunk.payload, number)
        words[at + 1], words[at + 2], words[at + 3], words[at + 4] = tag, count, block, start
        words[at + 5], words[at + 6] = step, nbytes
        self._place = chunk, number
        words[at] = number  # the last: [Note: The order of memory]
        _order_memory()
        for rank in self._readers:
            if asked := words[place_of_asks(rank)]:
                self._ring(rank, asked, send)

    def _ring(self, rank: int, asked: int, send: SendMessages) -> None:
        """Wake ``rank``, which has ``asked`` so often."""
        before, bell = self._bells.get(rank, (0, None))
        if before == asked:
            return
        with contextlib.suppress(RuntimeError):  # that rank, or its connection, is gone: a wait for it will fail
            if bell is not None:
                bell.wait()  # it has arrived
            self._bells[rank] = asked, send([(torch.empty(0, dtype=torch.uint8, device="cpu"), rank)], [], BELL)


class Inbox:
    """The headers that another rank sends, and this one reads."""

    def __init__(self, peer: PeerSegment, rank: int, own_rank: int, size: int) -> None:
        """``rank``: of the sender, in a group of ``size`` ranks."""
        self._peer, self.rank, self._own_rank, self._size = peer, rank, own_rank, size
        self._place = first_block(size), 1  # the start of the chunk with the next header, and its number
        self.headers = dict[tuple[int, int], Header]()  # that have arrived and are not yet used, by tag and count
        self._bell: tuple[int, Pending | None] = 1, None  # how often this rank has asked for one, and the wait for it

    def _read(self) -> bool:
        """Read a header, if one has arrived. After an interrupt it is read again."""
        chunk, number = self._place
        words, at = self._peer.mapping.words, _place_of(chunk + align(self._size), number)
        if words[at] != number:
            return False
        _, tag, count, block, start, step, nbytes = words[at : at + 7].tolist()
        if tag == _LINK:
            self._peer.map_until(block + align(self._size) + CHUNK_BYTES)
            self._place = block, number + 1  # before the mark: after it, the chunk may hold something else
            self._peer.mapping.mark(chunk + self._own_rank)
        else:
            self.headers[tag, count] = Header(block, start + self._own_rank * step, nbytes)
            self._place = chunk, number + 1
        return True

    def find(self, key: tuple[int, int]) -> Header | None:
        """Return the header with a tag and a count, or None if it has not arrived."""
        while (found := self.headers.get(key)) is None and self._read():
            pass
        return found

    def drop(self, key: tuple[int, int]) -> None:
        """Forget a header that has been used."""
        self.headers.pop(key, None)

    def wait(self, key: tuple[int, int], send: SendMessages) -> Header:
        """Wait for the header with a tag and a count. [Note: How a rank waits]

        Raises:
            RuntimeError: the wait in gloo has failed.
        """
        if (found := self.find(key)) is not None:
            return found
        until = time.perf_counter() + _SPIN
        while time.perf_counter() < until:
            os.sched_yield()
            if (found := self.find(key)) is not None:
                return found
        try:
            return self._sleep_until(key, send)
        except RuntimeError:
            self._bell = self._bell[0], None  # the next wait says whom it waited for, too
            if (found := self.find(key)) is not None:  # its sender has ended after it, and took its bell along
                return found
            raise

    def _sleep_until(self, key: tuple[int, int], send: SendMessages) -> Header:
        """Wait in gloo for the header with a tag and a count. Raises as ``wait``."""
        while True:
            asked, bell = self._bell
            if bell is None:
                bell = send([], [(torch.empty(0, dtype=torch.uint8, device="cpu"), self.rank)], BELL)
                self._bell = asked, bell
            self._peer.mapping.words[place_of_asks(self._own_rank)] = asked
            _order_memory()
            if (found := self.find(key)) is not None:
                return found
            bell.wait()
            self._bell = asked + 1, None
