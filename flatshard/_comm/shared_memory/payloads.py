"""Payloads between the ranks of one process group: written to this rank's segment, read from those of others."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from flatshard._base import trace
from flatshard._comm.collectives import Done, Pending
from flatshard._comm.progress import RESERVED
from flatshard._comm.shared_memory.handshake import Handshake, Meeting
from flatshard._comm.shared_memory.mailboxes import SendMessages
from flatshard._comm.shared_memory.segment import Block, Mapping, align

Receive = Callable[[int], torch.Tensor]
"""Returns memory for the payload of a rank."""

Combine = Callable[[Sequence[torch.Tensor]], object]
"""Is called with the payloads of all ranks, in rank order."""

_HEADER = 3  # numbers in a header that gloo carries: see ``Header``
_FIRST_TAG, _TAGS = RESERVED + 8, 2**15  # of payloads that are sent by gloo: shared_memory, [Note: No room]
_CURE = "FLATSHARD_SHARED_MEMORY=0 on all ranks sends everything by gloo"


def _no_room_for_headers(error: OSError) -> RuntimeError:
    return RuntimeError(f"no shared memory to say where payloads are ({error}): {_CURE}")


def _cannot_map(rank: int) -> RuntimeError:
    return RuntimeError(f"the memory of rank {rank} of the group has grown, and cannot be mapped: {_CURE}")


class SharedMemory:
    """The shared memory of the ranks of one process group, for one of them."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        """Begin to share memory among ``size`` ranks. shared_memory, [Note: The handshake]"""
        self.rank, self.size = rank, size
        self.handshake = Handshake(rank, size, meeting)
        # Payloads that there was no memory for: shared_memory, [Note: No room]
        self._tags = itertools.cycle(range(_FIRST_TAG, _FIRST_TAG + _TAGS))
        self._messages: list[tuple[Block, Pending]] = []
        self._counts = Counter[int]()  # of collectives that have begun, by tag

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory that other ranks can read, or None if there is none."""
        handshake = self.handshake
        if handshake.own is None or not (handshake.is_over and handshake.readers):
            return None
        try:
            return handshake.own.lend(numel, dtype)
        except OSError as e:
            trace.logger.debug("no shared memory of %d elements: %s", numel, e)
            return None

    def release_unused(self) -> None:
        """Return memory of this rank's segment that is not in use."""
        if self.handshake.own is not None and self.handshake.is_over:
            self.handshake.own.release_unused()

    def exchange(
        self, send: SendMessages, sent: Sequence[torch.Tensor], receive: Receive, tag: int, combine: Combine | None
    ) -> Pending:
        """Send payloads of one size to all other ranks, and receive theirs: see ``GlooCollectives._exchange``."""
        return self.handshake.after(functools.partial(self._exchange, send, sent, receive, tag, combine))

    def _exchange(
        self, send: SendMessages, sent: Sequence[torch.Tensor], receive: Receive, tag: int, combine: Combine | None
    ) -> Pending:
        handshake = self.handshake
        others, peers, inboxes = handshake.others, handshake.peers, handshake.inboxes
        self._counts[tag] += 1
        key = tag, self._counts[tag]
        headers = self._write(send, sent, key) if handshake.readers else {}
        # By gloo: headers if they do not lie in shared memory, and the payloads of ranks that share none.
        received = {
            k: torch.empty(_HEADER, dtype=torch.int64, device="cpu") if k in peers else receive(k)
            for k in others
            if k not in inboxes
        }
        outgoing = [
            (headers.get(k, sent[k]), k) for k in reversed(others) if k in headers or k not in handshake.readers
        ]
        works = send(outgoing, [(received[k], k) for k in received], tag) if outgoing or received else Done()

        def place(payloads: Sequence[torch.Tensor]) -> None:
            for k in peers:
                receive(k).copy_(payloads[k])

        return Reading(works, sent[self.rank], received, key, handshake, send, receive, combine or place)

    def _write(self, send: SendMessages, sent: Sequence[torch.Tensor], key: tuple[int, int]) -> dict[int, torch.Tensor]:
        """Write ``sent`` to the segment, unless it lies there: shared_memory, [Note: What is copied before it is sent]

        Returns a header for each reader, unless headers lie in shared memory, too.
        """
        handshake, nbytes = self.handshake, sent[0].nbytes
        own, readers, is_one = handshake.own, handshake.readers, sent[0] is sent[-1]
        assert own is not None
        lent = own.find_lent(sent[0])
        if lent is not None and own.is_read(lent[0]):
            block, begin = lent
            start, step = block.payload + sent[0].data_ptr() - begin, 0 if is_one else nbytes
        else:
            step = 0 if is_one else align(nbytes)
            try:
                block = own.allocate(nbytes if is_one else step * self.size)
                start = block.payload
            except OSError as e:
                trace.logger.debug("no shared memory of %d bytes: %s", nbytes, e)
                (block, start), step = self._send_by_gloo(send, sent), 0
            for k in readers[:1] if is_one else readers:
                if start > 0:
                    own.mapping.view(start + k * step, nbytes, sent[k].dtype).copy_(sent[k])
        own.await_readers(block, readers)
        if (outbox := handshake.outbox) is not None:
            try:
                outbox.put(*key, block.start, start, step, nbytes, send)
            except OSError as e:
                raise _no_room_for_headers(e) from e
            return {}
        return {k: torch.tensor([block.start, start + k * step, nbytes], device="cpu") for k in readers}

    def _send_by_gloo(self, send: SendMessages, sent: Sequence[torch.Tensor]) -> tuple[Block, int]:
        """Send copies of ``sent`` by gloo. shared_memory, [Note: No room]

        Returns a block without a payload, and minus the messages' tag.
        """
        own = self.handshake.own
        assert own is not None
        for block, messages in [each for each in self._messages if own.is_read(each[0])]:
            messages.wait()
            self._messages.remove((block, messages))
        try:
            block = own.allocate(0)
        except OSError as e:
            raise _no_room_for_headers(e) from e
        tag, copies = next(self._tags), {id(each): each.clone() for each in sent}
        self._messages.append((block, send([(copies[id(sent[k])], k) for k in self.handshake.readers], [], tag)))
        return block, -tag


class Reading:
    """A collective whose wait reads its payloads when their headers have arrived. [Note: Headers and payloads]"""

    def __init__(
        self,
        works: Pending,
        own: torch.Tensor,
        received: dict[int, torch.Tensor],
        key: tuple[int, int],
        handshake: Handshake,
        send: SendMessages,
        receive: Receive,
        combine: Combine,
    ) -> None:
        """
        Args:
            works: the messages of ``received``.
            own: this rank's payload for itself.
            received: headers by rank, as numbers, unless they lie in shared memory; for ranks that share none, payloads.
            key: the tag of the collective, and the number of collectives that have had it.
            handshake: the segments of the ranks.
            send: for payloads that come by gloo.
            receive: memory for them.
            combine: called with all payloads.
        """
        self._works, self._own, self._received, self._key = works, own, received, key
        self._handshake, self._send, self._receive = handshake, send, receive
        self._combine: Combine | None = combine
        self._messages: dict[int, tuple[torch.Tensor, Pending]] = {}  # payloads that come by gloo: [Note: No room]
        self._read: list[tuple[Mapping, int]] = []  # marks to set

    def wait(self) -> None:
        if self._combine is None:
            self._mark_read()
            return
        self._works.wait()
        inboxes = self._handshake.inboxes
        for rank, inbox in inboxes.items():
            try:
                inbox.wait(self._key, self._send)
            except OSError as e:
                raise _cannot_map(rank) from e
        self._read.clear()
        try:
            self._combine([self._payload(rank) for rank in range(self._handshake.size)])
        except Exception:
            self._mark_read()
            raise
        self._combine = None
        self._mark_read()
        for inbox in inboxes.values():
            inbox.drop(self._key)
        del self._works, self._own, self._received, self._receive  # lent memory may be used again

    def _payload(self, rank: int) -> torch.Tensor:
        """Return the payload that ``rank`` has sent to this rank."""
        own, this_rank, peer = self._own, self._handshake.rank, self._handshake.peers.get(rank)
        if rank == this_rank:
            return own
        if peer is None:
            return self._received[rank]
        inbox = self._handshake.inboxes.get(rank)
        block, start, nbytes = self._received[rank].tolist() if inbox is None else inbox.headers[self._key]
        if nbytes != own.nbytes:
            raise RuntimeError(f"rank {rank} of the group sent {nbytes} bytes, and this rank {own.nbytes}")
        try:  # a payload that comes by gloo has a mark, too
            payload = peer.view(*((start, nbytes, own.dtype) if start > 0 else (block, this_rank + 1, torch.uint8)))
        except OSError as e:
            raise _cannot_map(rank) from e
        if start < 0:
            payload = self._receive_by_gloo(rank, -start)
        self._read.append((peer.mapping, block + this_rank))
        return payload

    def _receive_by_gloo(self, rank: int, tag: int) -> torch.Tensor:
        """Receive a payload that ``rank`` had no shared memory for. shared_memory, [Note: No room]"""
        if rank not in self._messages:
            payload = self._receive(rank)
            self._messages[rank] = payload, self._send([], [(payload, rank)], tag)
        payload, message = self._messages[rank]
        message.wait()
        return payload

    def _mark_read(self) -> None:
        """Tell the senders that their memory may be used again."""
        while self._read:
            mapping, place = self._read.pop()  # first: after an interrupt it may be another payload's already
            mapping.mark(place)
