"""Ranks of a group map each other's segments, and begin their collectives then. shared_memory, [Note: The handshake]"""

from __future__ import annotations

import copy
import os
import stat
import threading
from collections.abc import Callable, Sequence

import torch

from flatshard._base import trace
from flatshard._comm.collectives import Addressed, Pending
from flatshard._comm.progress import RESERVED
from flatshard._comm.shared_memory.segment import TOKEN_BYTES, Mapping, Segment

SendMessages = Callable[[Addressed, Addressed, int], Pending]
"""``GlooCollectives.messages``: sends tensors, receives others, with a tag."""

_TAG = RESERVED + 1


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
        if not stat.S_ISREG(found.st_mode) or found.st_ino != inode or not found.st_size:
            raise OSError("it is not there")
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # kept: that rank may end before all is read
        self.mapping = Mapping(self._fd)
        if self.mapping.token != token.to_bytes(TOKEN_BYTES, "little", signed=True):
            raise OSError("it is not there")

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def view(self, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of a payload.

        Raises:
            OSError: the segment has grown, and this process cannot map it.
        """
        if start + nbytes > len(self.mapping.map):
            self.mapping = Mapping(self._fd)
        return self.mapping.view(start, nbytes, dtype)


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


class Handshake:
    """The segments of the ranks of a group that this rank can read, and the ranks that can read its own."""

    def __init__(self, rank: int, size: int, send: SendMessages) -> None:
        """Begin the handshake of ``size`` ranks. A thread continues it."""
        self.rank, self.size = rank, size
        self.others = [(rank - step) % size for step in range(1, size)]
        self.own: Segment | None = None
        self.peers: dict[int, PeerSegment] = {}  # the segments that this rank has mapped, by rank
        self.readers: list[int] = []  # the ranks that have mapped this rank's segment
        self._is_over = threading.Event()  # set also when it has failed
        self._failure: BaseException | None = None
        self._deferred: list[Deferred] = []
        self._lock = threading.Lock()
        addresses = torch.zeros(size, 4, dtype=torch.int64, device="cpu")
        try:
            self.own = Segment(size)
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
        with self._lock:
            if not self._is_over.is_set():
                self._deferred.append(Deferred(begin, self.wait))
                return self._deferred[-1]
        self.wait()
        return begin()

    def wait(self) -> None:
        """Wait until the handshake is over. Raises if it has failed."""
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
                    self.peers[rank] = PeerSegment(addresses[rank].tolist())
                except (OSError, ValueError) as e:
                    trace.logger.debug("rank %d of the group cannot read the memory of rank %d: %s", self.rank, rank, e)
            mapped = torch.zeros(self.size, self.size, dtype=torch.int64, device="cpu")
            mapped[self.rank, [*self.peers]] = 1
            self._send_row(send, mapped).wait()
            self.readers = mapped[:, self.rank].nonzero().flatten().tolist()
            with self._lock:
                while self._deferred:
                    self._deferred.pop(0).begin()
                self._is_over.set()
        except BaseException as e:
            self._failure = e.with_traceback(None)
            self._is_over.set()
