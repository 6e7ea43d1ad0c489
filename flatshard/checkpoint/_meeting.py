"""What all ranks do together besides tensors: meet, hand objects to rank 0 and get answers back.

[Note: Who is missing]
A collective that one rank never begins hangs the others until a timeout of half an hour, and says nothing. So ranks first
meet at the process group's store. Each of the others leaves a note there under its rank, with the call that it came for. Rank
0 waits for all notes, and answers each: a name for the meeting that nobody else has, or who did not come. A rank that gives
up takes its note back. Nothing is counted, so a rank that skipped a call meets the others at the next one.

[Note: One rank's error is everybody's]
In a :class:`Meeting` every rank does its part, hands in what came of it, and waits for rank 0. An error on any rank, rank 0's
own included, is raised on all, with the names of those that had it. So no rank waits for one that has given up, and none goes
on where another could not. A part may take as long as it needs: a thread of each rank gives a sign of life meanwhile, and a
rank that gives none is taken for dead, by name.

All goes over the store, whose server is the centre of a star: no connections among ranks, and no numpy, which the object
collectives of ``torch.distributed`` need. Every key is deleted by who reads it.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist

from flatshard._comm.monitor.messages import default_group, membership
from flatshard._errors import name_list
from flatshard._trace import logger

T = TypeVar("T")

_PREFIX = "flatshard/meeting"
_GRACE = 5.0  # seconds that the others give rank 0 to say who is missing
_LEAVE_AFTER = 2.0  # seconds, in which whoever is alive has looked for an answer
_LOOK_AFTER, _WARN_AFTER = 1.0, 10.0  # seconds
_PIECE = 2**20  # bytes under one key: stores limit them


class MeetingError(RuntimeError):
    """A rank did not come, or could not do its part: raised on all ranks that came.

    Example::

        try:
            flatshard.load_checkpoint("run/latest", {"model": model})
        except flatshard.MeetingError as e:
            print(e)  # what is missing, on which rank; nothing was changed on any
    """


class _SilentError(Exception):
    """A rank gives no sign of life."""


class Meeting:
    """All ranks of a process group in one undertaking; a context. With one rank nothing is sent."""

    def __init__(self, group: dist.ProcessGroup | None, what: str, timeout: timedelta) -> None:
        """
        Args:
            group: None: the default group, or this process alone where there is none.
            what: the call and its arguments, which must be the same on all ranks, for errors.
            timeout: how much later than the first the last rank may come, and how long one may give no sign of life.
        """
        self.what, self._timeout, self._rounds = what, timeout.total_seconds(), 0
        self.rank, self.size, self._store = membership(default_group() if group is None else group)
        self._over = threading.Event()

    def __enter__(self) -> Self:
        """Wait for all ranks.

        Raises:
            MeetingError: some did not come, or came for something else.
        """
        if self.size > 1:
            assert self._store is not None
            with self._explained():
                self._name = Rendezvous(
                    self._store, self.rank, range(self.size), self.what, self._timeout, self._timeout
                ).meet()
            threading.Thread(target=self._beat, name="flatshard-meeting", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if self.rank == 0 and self._rounds:
            with contextlib.suppress(RuntimeError):  # the store is gone: the others know
                self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        """Until the others have read the last answer. The process may end after this, and the store with it."""
        waits = _waits()
        for rank in range(1, self.size):
            while self._store.check([f"{self._key}/down/{rank}/0"]) and next(waits) < _LEAVE_AFTER:
                pass

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def round(self, produce: Callable[[], T], decide: Callable[[list[T]], Sequence[Any] | None] | None = None) -> Any:
        """Call ``produce`` on every rank, then ``decide`` on rank 0 with what all produced, by rank.

        Returns:
            This rank's item of what ``decide`` returned, or None.

        Raises:
            MeetingError: on all ranks, when each has done its part: some rank could not.
        """
        self._rounds += 1
        try:
            mine = _outcome(produce)
        except BaseException as e:  # an interrupt: the others must not wait
            if self.size > 1 and self.rank:
                self._send(f"up/{self.rank}", (f"{type(e).__name__}", None))
            elif self.size > 1:
                self._answer([(f"rank 0: {type(e).__name__}", None)] * self.size)
            raise
        with self._explained():
            if self.rank == 0:
                answers = self._decide([mine, *map(self._outcome_of, range(1, self.size))], decide)
                self._answer(answers)
                error, item = answers[0]
            else:
                self._send(f"up/{self.rank}", mine)
                error, item = self._receive(f"down/{self.rank}", 0)
        if error is not None:
            raise MeetingError(f"{self.what}: {error}")
        return item

    def _outcome_of(self, rank: int) -> tuple[str | None, Any]:
        try:
            found: tuple[str | None, Any] = self._receive(f"up/{rank}", rank)
        except _SilentError as e:
            return str(e), None
        return found

    def _decide(
        self, every: list[tuple[str | None, Any]], decide: Callable[[list[Any]], Sequence[Any] | None] | None
    ) -> list[tuple[str | None, Any]]:
        errors = {rank: text for rank, (text, _) in enumerate(every) if text is not None}
        if errors:
            alike = len(errors) == self.size and len(set(errors.values())) == 1
            said = errors[0] if alike else "; ".join(f"rank {r}: {text}" for r, text in errors.items())
            return [(said, None)] * self.size
        if decide is None:
            return [(None, None)] * self.size
        error, items = _outcome(lambda: decide([value for _, value in every]))
        return [(error, None if items is None else items[r]) for r in range(self.size)]

    # -- over the store ------------------------------------------------------------------------------------------------

    @property
    def _key(self) -> str:
        """How keys of this round begin."""
        return f"{_PREFIX}/{self._name}/{self._rounds}"

    def _answer(self, answers: list[tuple[str | None, Any]]) -> None:
        for rank in range(1, self.size):
            self._send(f"down/{rank}", answers[rank])

    def _send(self, key: str, value: Any) -> None:
        data = pickle.dumps(value)
        pieces = [data[i : i + _PIECE] for i in range(0, len(data), _PIECE)]
        at = f"{self._key}/{key}"
        for i, piece in reversed(list(enumerate(pieces))):
            self._store.set(f"{at}/{i}", b"%d " % len(pieces) + piece)

    def _receive(self, key: str, sender: int) -> Any:
        at = f"{self._key}/{key}"
        alive = f"{_PREFIX}/{self._name}/alive/{sender}"
        sign, heard = b"", time.monotonic()
        for waited in _waits():
            if self._store.check([f"{at}/0"]):
                break
            if waited > self._timeout / 4 and self._store.check([alive]) and (new := self._store.get(alive)) != sign:
                sign, heard = new, time.monotonic()
            elif time.monotonic() - heard > self._timeout:
                raise _SilentError(f"no sign of life for {self._timeout:g} s, so it died, or its machine did")
        found, i, count = [], 0, 1
        while i < count:
            number, _, piece = self._store.get(f"{at}/{i}").partition(b" ")
            self._store.delete_key(f"{at}/{i}")
            found.append(piece)
            i, count = i + 1, int(number)
        return pickle.loads(b"".join(found))

    def _beat(self) -> None:
        key, count = f"{_PREFIX}/{self._name}/alive/{self.rank}", 0
        with contextlib.suppress(RuntimeError):  # the store is gone: the main thread finds that, too
            while not self._over.wait(self._timeout / 8):
                count += 1
                self._store.set(key, str(count))
            if count:
                self._store.delete_key(key)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except MeetingError:
            raise
        except _SilentError as e:
            raise MeetingError(f"{self.what}: rank 0: {e}") from None
        except RuntimeError as e:
            raise MeetingError(
                f"{self.what}: the process group's store cannot be reached. Its host, rank 0 or torchrun, may have died: {e}"
            ) from e


# -- [Note: Who is missing] --------------------------------------------------------------------------------------------


@dataclass
class Rendezvous:
    """One rank's side of a meeting at the store of the ranks' process group.

    Args:
        store: of the group.
        rank: this one, of its ranks.
        names: what errors call each.
        what: the call that ranks come for, the same on all.
        seconds: how much later than the first the last rank may come.
        told_for: seconds for which ranks that come too late are told so, and do not take the next call for this one.
        look: called now and then in a long wait: to raise what ends it.
    """

    store: Any
    rank: int
    names: Sequence[int]
    what: str
    seconds: float
    told_for: float = 0.0
    look: Callable[[], object] = lambda: None

    def meet(self) -> str:
        """Wait until all ranks have come. Returns a name that they alone have.

        Raises:
            MeetingError: some did not come, or came for something else.
        """
        return self._host() if self.rank == 0 else self._visit()

    def _host(self) -> str:
        """Rank 0 waits for all, and gives the meeting its name."""
        others = range(1, len(self.names))
        self.store.set(f"{_PREFIX}/at/0", "")
        try:
            late: list[int] = []
            for waited in self._waits():
                late = self._late(late or others)
                if waited > self.seconds or not (late or (late := self._late(others))):
                    break
            problem = self._describe_late(late) if late else ""
            until = time.time() + self.told_for
            for r in late if self.told_for else ():
                self.store.set(f"{_PREFIX}/missed/{r}", pickle.dumps((self.what, problem, until)))
            notes = {r: self._take(f"{_PREFIX}/at/{r}") for r in others}
        finally:
            self.store.delete_key(f"{_PREFIX}/at/0")
        other = [f"rank {self.names[r]}: {n[1]}" for r, n in notes.items() if n is not None and n[1] != self.what]
        if other and not problem:
            problem = f"ranks came for different things. Rank {self.names[0]}: {self.what}; {'; '.join(other)}"
        name = uuid.uuid4().hex
        for r, note in notes.items():
            if note is not None:
                self.store.set(f"{_PREFIX}/go/{r}/{note[0]}", pickle.dumps((problem, name)))
        if problem:
            raise MeetingError(f"{self.what}: {problem}")
        return name

    def _visit(self) -> str:
        """Another rank leaves its note, and waits to be told the name."""
        own, note = f"{_PREFIX}/at/{self.rank}", uuid.uuid4().hex
        missed = self._take(f"{_PREFIX}/missed/{self.rank}")
        if missed is not None and missed[0] == self.what and time.time() < missed[2]:
            raise MeetingError(f"{self.what}: {missed[1]}")
        self.store.set(own, pickle.dumps((note, self.what)))
        try:
            for waited in self._waits():
                if self.store.check([f"{_PREFIX}/go/{self.rank}/{note}"]):
                    break
                if waited > self.seconds + _GRACE:
                    raise MeetingError(f"{self.what}: {self._describe_late(self._late(range(len(self.names))) or [0])}")
        except BaseException:
            self.store.delete_key(own)
            raise
        problem, name = self._take(f"{_PREFIX}/go/{self.rank}/{note}")
        if problem:
            raise MeetingError(f"{self.what}: {problem}")
        return str(name)

    def _waits(self) -> Iterator[float]:
        warned = False
        for waited in _waits():
            yield waited
            if waited > _LOOK_AFTER:
                self.look()
            if waited > _WARN_AFTER and not warned:
                warned = True
                late = self._list(self._late(range(len(self.names))))
                logger.warning(
                    f"{self.what}: rank {self.names[self.rank]} has waited for {late} for {waited:.0f} s. All ranks must "
                    "make this call"
                )

    def _late(self, ranks: Sequence[int]) -> list[int]:
        keys = [f"{_PREFIX}/at/{r}" for r in ranks]
        return (
            [] if self.store.check(keys) else [r for r, k in zip(ranks, keys, strict=True) if not self.store.check([k])]
        )

    def _list(self, ranks: Sequence[int]) -> str:
        return name_list([f"rank {self.names[r]}" for r in ranks], 10)

    def _describe_late(self, late: Sequence[int]) -> str:
        return f"{self._list(late)} did not come within {self.seconds:g} s. All ranks must make this call"

    def _take(self, key: str) -> Any:
        """What is under ``key``, which is deleted, or None."""
        if not self.store.check([key]):
            return None
        found = pickle.loads(self.store.get(key))
        self.store.delete_key(key)
        return found


def _outcome(produce: Callable[[], T]) -> tuple[str | None, T | None]:
    try:
        return None, produce()
    except Exception as e:
        return f"{type(e).__name__}: {e}", None


def _waits() -> Iterator[float]:
    """Seconds waited so far: asked for again after a twentieth of them, so long waits cost the store little."""
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        yield waited
        time.sleep(min(max(waited / 20, 0.0005), 0.5))
