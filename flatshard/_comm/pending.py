"""Collectives that have been issued, and how they are waited for on the host.

[Note: Memory lives as long as its works]
Gloo's threads read and write a collective's memory until its works end, even if a wait is interrupted or the model is
dropped. So memory is freed only after a wait; after an interrupt, the wait is repeated. A collective that is
garbage-collected before its wait is moved to the group (``Progress.abandoned``). The group waits for it before it issues
the next collective. Works cannot be destroyed instead: half a message would stay on the connection.

If ranks turn out to issue different collectives, works may never end, so nobody waits for them. They stay with the group
until it is destroyed (``Progress.unended``), and so does their memory: its owners drop it without freeing it (see
``drain``). No further collective is issued on such a group: it could receive a message that was sent for one of those works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flatshard._base import trace
from flatshard._base.errors import OutOfStepError
from flatshard._comm.collectives import Capabilities, Pending
from flatshard._comm.progress import Issued, here
from flatshard._comm.streams import Streams


class Works:
    """Async works of a CPU backend (or other pending collectives), and a computation on their results.

    ``then`` runs after the last work. ``describe(index)`` returns the note to add to the error if a work fails. A ``wait``
    after an interrupt continues with the work that was interrupted.
    """

    __slots__ = ("_describe", "_done", "_then", "_works")

    def __init__(
        self,
        works: Sequence[Any],
        then: Callable[[], object] | None = None,
        describe: Callable[[int], str] | None = None,
    ) -> None:
        self._works = list(works)
        self._done = 0  # works waited for: waiting for one again would make gloo wait for another message
        self._then = then
        self._describe = describe

    def add(self, works: Sequence[Any]) -> None:
        """Have ``wait`` also wait for ``works``."""
        self._works += works

    def wait(self) -> None:
        while self._done < len(self._works):
            work = self._works[self._done]
            try:
                work.wait()
            except Exception as e:
                if self._describe is not None:
                    e.add_note(self._describe(self._done))
                    self._describe = None
                # The error's traceback refers to this object, and the caller frees the memory: drop the works that use it.
                self._works, self._done = [work], 0
                raise
            except BaseException:  # an interrupt is raised when the work's own wait has returned
                if getattr(work, "is_completed", bool)():
                    self._done += 1
                raise
            self._done += 1
        if self._then is not None:
            self._then()
            self._then = None


class Chain:
    """Two collectives in a row: ``advance`` or ``wait`` issues the second after the first has ended."""

    __slots__ = ("_first", "_next", "_second")

    def __init__(self, first: Pending, next_one: Callable[[], Pending]) -> None:
        self._first = first
        self._next = next_one
        self._second: Pending | None = None

    def advance(self) -> None:
        """Wait for the first and issue the second. Idempotent."""
        if self._second is None:
            self._first.wait()
            self._second = self._next()

    def wait(self) -> None:
        self.advance()
        assert self._second is not None
        self._second.wait()


class Monitor(Protocol):
    """Detects that ranks issue different collectives: see ``_comm/monitor/monitor.py``. It does not change results."""

    checks_until: float
    """The number of collectives of each unit and kind that are started by ``start``."""

    def start(
        self, issued: Issued, capabilities: Capabilities, start: Callable[[], Pending], streams: Streams | None
    ) -> Pending:
        """Start ``issued`` by calling ``start``. Waiting for it raises if ranks differ.

        Args:
            issued: the collective.
            capabilities: of the collectives that it is one of.
            start: issues it.
            streams: of the accelerator, or None on CPU.
        """

    def explain(self, issued: Issued) -> Exception | None:
        """Return an error that explains why the wait for ``issued`` has failed, or None if the reason is unknown."""


class Awaited:
    """A collective whose wait blocks the host. [Note: Memory lives as long as its works]"""

    __slots__ = ("_issued", "_monitor", "_pending")

    def __init__(self, pending: Pending, issued: Issued, monitor: Monitor | None) -> None:
        self._pending: Pending | None = pending  # None after it has ended
        self._issued = issued
        self._monitor = monitor

    def __del__(self) -> None:
        if self._pending is not None:
            self._issued.progress.abandoned.append(self)

    def wait(self) -> None:
        if self._pending is None:
            return
        issued = self._issued
        before, here.waiting = here.waiting, issued
        try:
            self._pending.wait()
            self._pending = None
        except Exception as e:
            self._pending = None
            is_ours = isinstance(e, OutOfStepError) or not isinstance(e, RuntimeError)
            if not is_ours and self._monitor is not None and (why := self._monitor.explain(issued)) is not None:
                raise why from e
            raise
        finally:
            here.waiting = before


def drain(pending: list[Pending]) -> bool:
    """Wait for collectives and ignore their errors, so that their memory can be freed. Empties the list.

    After an interrupt, the list contains the collectives that have not been waited for yet.

    Returns:
        True if all have ended. False if ranks are out of step, so some may never end, and memory must not be freed.
    """
    ended = True
    while pending:
        try:
            pending[0].wait()
        except OutOfStepError:
            ended = False
        except Exception as e:
            trace.logger.debug("ignored the failure of a collective whose result is not needed: %s", e)
        del pending[0]
    return ended
