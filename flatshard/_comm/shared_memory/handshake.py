"""Ranks of a group map each other's segments, and begin their collectives then. shared_memory, [Note: The handshake]"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch

from flatshard._base import trace
from flatshard._comm.collectives import Pending
from flatshard._comm.progress import RESERVED
from flatshard._comm.shared_memory import mailboxes
from flatshard._comm.shared_memory.mailboxes import Inbox, Outbox, SendMessages
from flatshard._comm.shared_memory.segment import PeerSegment, Segment

_TAG = RESERVED + 1


class Deferred:
    """A collective that begins when the handshake is over."""

    def __init__(self, begin: Callable[[], Pending], wait_for_handshake: Callable[[], object]) -> None:
        self._begin, self._wait_for_handshake = begin, wait_for_handshake
        self._pending: Pending | None = None

    def begin(self) -> None:
        self._pending = self._begin()

    def wait(self) -> None:
        if self._pending is None:
            self._wait_for_handshake()
        assert self._pending is not None
        self._pending.wait()


class Meeting(NamedTuple):
    """The messages of a handshake, and their end. [Note: The handshake]"""

    send: SendMessages
    """Sends messages whose waits have no timeout."""
    end_waits: Callable[[], object]
    """Has every wait in gloo fail."""
    timeout: timedelta | None
    """The group's, for a rank that waits until the handshake is over."""


class Handshake:
    """The segments of the ranks of a group that this rank can read, and the ranks that can read its own."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        """Begin the handshake of ``size`` ranks. A thread continues it."""
        self.rank, self.size = rank, size
        send, self._end_waits, self._timeout = meeting
        self.others = [(rank - step) % size for step in range(1, size)]
        self.own: Segment | None = None
        self.peers: dict[int, PeerSegment] = {}  # the segments that this rank has mapped, by rank
        self.readers: list[int] = []  # the ranks that have mapped this rank's segment
        # Headers, unless gloo carries them: mailboxes.py, [Note: The order of memory]
        self.outbox: Outbox | None = None
        self.inboxes: dict[int, Inbox] = {}
        self._is_over = threading.Event()  # set also when it has failed
        self._failure: BaseException | None = None
        self._deferred: list[Deferred] = []
        self._lock = threading.Lock()
        addresses = torch.zeros(size, 4, dtype=torch.int64, device="cpu")
        try:
            self.own = Segment(size)
            if mailboxes.are_ordered:
                self.outbox = Outbox(self.own, self.others)
            addresses[rank] = torch.tensor(self.own.address, device="cpu")
        except (OSError, AttributeError) as e:  # an address of zeros is nobody's
            trace.logger.debug("no shared memory: %s", e)
        sent = self._send_row(send, addresses)
        threading.Thread(target=self._finish, args=(send, addresses, sent), daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended, which allocates memory of the segment until then."""
        return self._is_over.is_set()

    def after(self, begin: Callable[[], Pending]) -> Pending:
        """Begin a collective once the handshake is over."""
        if self._is_over.is_set() and self._failure is None:
            return begin()
        with self._lock:
            if not self._is_over.is_set():
                self._deferred.append(Deferred(begin, self.wait))
                return self._deferred[-1]
        self.wait()
        return begin()

    def wait(self) -> None:
        """Wait until the handshake is over. Raises if it has failed, or is not over within the group's timeout."""
        if not self._is_over.wait(None if self._timeout is None else self._timeout.total_seconds()):
            self._end_waits()
            self._is_over.wait()
        if self._failure is not None:
            raise copy.copy(self._failure)  # a raised error refers to frames that refer to this object

    def _send_row(self, send: SendMessages, rows: torch.Tensor) -> Pending:
        """Send this rank's row to all others, and receive theirs."""
        sent = [(rows[self.rank], k) for k in reversed(self.others)]
        return send(sent, [(rows[k], k) for k in self.others], _TAG)

    def _finish(self, send: SendMessages, addresses: torch.Tensor, sent: Pending) -> None:
        """Map the segments of other ranks, find out which ranks have mapped this one's, and begin deferred collectives."""
        try:
            sent.wait()
            for rank in self.others:
                try:
                    self.peers[rank] = peer = PeerSegment(addresses[rank].tolist())
                    if mailboxes.are_ordered:
                        self.inboxes[rank] = Inbox(peer, rank, self.rank, self.size)
                except (OSError, ValueError) as e:
                    trace.logger.debug("rank %d of the group cannot read the memory of rank %d: %s", self.rank, rank, e)
            mapped = torch.zeros(self.size, self.size, dtype=torch.int64, device="cpu")
            mapped[self.rank, [*self.peers]] = 1
            self._send_row(send, mapped).wait()
            self.readers = mapped[:, self.rank].nonzero().flatten().tolist()
            if self.outbox is not None:
                self.outbox.address_to(self.readers)
            with self._lock:
                while self._deferred:
                    self._deferred.pop(0).begin()
                self._is_over.set()
        except BaseException as e:
            self._failure = e.with_traceback(None)
            self._is_over.set()
