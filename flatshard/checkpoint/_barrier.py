"""What all ranks do together besides tensors: come to one call, hand objects to rank 0, and get answers back.

[Note: One rank's error is everybody's]
In an exchange every rank does its part, hands in what came of it, and waits for rank 0, which answers each. An error on any
rank, rank 0's own included, is raised on all, with the names of those that had it. So no rank waits for one that has given
up, and none goes on where another could not. A part may take as long as it needs: a thread of each rank gives a sign of life
meanwhile, and a rank that gives none is taken for dead, by name.

[Note: Who is missing]
A collective that one rank never begins hangs the others until a timeout of half an hour, and says nothing. So the first
exchange is of the call that each rank came for. What ranks hand in there is a note under their numbers, which they take back
if they give up. Nothing is counted, so a rank that skipped a call meets the others at the next one. Rank 0 waits for all, and
its answer names who did not come. The others wait for rank 0 as long, counted from when it came.

[Note: One rank alone]
``if rank == 0: full_state_dict(model)`` is the first mistake that people make with sharded models: the others never issue the
all-gather. So :func:`barrier` comes before each verb that gathers whole values: a rank that waits for long logs a warning,
and raises in the end. The wait counts as one for a collective, so the watch sees within seconds when another rank waits for
this one in a forward.

All goes over the store, whose server is the centre of a star: no connections among ranks, and no numpy, which the object
collectives of ``torch.distributed`` need. Every key is deleted by who reads it. What is there may be gone when it is read, as
a process may be stopped at any point and go on later: so no read waits.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist

from flatshard._comm.backends import timeout_of
from flatshard._comm.monitor.messages import read_now
from flatshard._comm.progress import EXCHANGE, Label, digest, here
from flatshard._handle.unit_ranks import UnitRanks
from flatshard._runtime import Runtime
from flatshard._trace import logger

T = TypeVar("T")
Outcome = tuple[str | None, Any]
"""What came of a rank's part: an error in words, or what it hands in."""

GIVE_UP_AFTER = 300.0  # seconds that `barrier` waits for the last rank, if the group's timeout is no shorter
_PREFIX = "flatshard/barrier"
_GRACE = 5.0  # seconds that the others give rank 0 to say who is missing
_LEAVE_AFTER = 2.0  # seconds, in which whoever is alive has looked for an answer
_LOOK_AFTER, _WARN_AFTER = 1.0, 10.0  # seconds
_GAVE_UP = "had come, and waited no longer"
_PIECE = 2**20  # bytes under one key: stores limit them


class MeetingError(RuntimeError):
    """A rank did not come, or could not do its part: raised on all ranks that came.

    Example::

        try:
            flatshard.load_checkpoint("run/latest", {"model": model})
        except flatshard.MeetingError as e:
            print(e)  # what is missing, on which rank; nothing was changed on any
    """


def barrier(runtimes: Iterable[Runtime], call: str, problem: str | None = None) -> None:
    """Wait until all ranks of each process group have come to ``call``: its name, the same on all ranks.

    ``problem``: why this rank cannot go on. Then no rank does.

    Raises:
        MeetingError: some have not come in time, came for something else, or have a problem; the message names them.
    """
    failed: MeetingError | None = None
    for runtime in sorted({r.number: r for r in runtimes}.values(), key=lambda r: r.number):
        if runtime.progress is not None and (store := runtime.store()) is not None:
            try:
                _wait_as_for_a_collective(runtime, store, call, problem)
            except MeetingError as e:
                problem, failed = problem or str(e), failed or e  # the ranks of the next group are told
    if failed is not None:
        raise failed


def agree(all_ranks: Iterable[UnitRanks], call: str, problem: Exception | None) -> None:
    """Raise ``problem``; or that of another rank, by name. What all ranks do together, none does then."""
    try:
        of_all = dict.fromkeys(runtime for ranks in all_ranks for runtime in (ranks.shards, ranks.replicas) if runtime)
        barrier(of_all, call, None if problem is None else str(problem))
    except MeetingError:
        if problem is None:
            raise
    if problem is not None:
        raise problem


def patience(group: dist.ProcessGroup | None, seconds: float) -> float:
    """Return how long the first rank waits for the last one: ``seconds``, or the timeout of ``group`` if that is shorter."""
    timeout = None if group is None else timeout_of(group)
    return seconds if timeout is None else min(seconds, timeout.total_seconds())


def _wait_as_for_a_collective(runtime: Runtime, store: Any, call: str, problem: str | None) -> None:
    assert runtime.progress is not None
    label = Label(call, int(digest(call)[:7], 16) << 2)
    issued = runtime.progress.issue("call", EXCHANGE, label, False)
    before_this, here.waiting = here.waiting, issued

    def look() -> None:
        if runtime.monitor is not None and (why := runtime.monitor.explain(issued)) is not None:
            raise why

    def hear(problems: list[str | None]) -> None:
        if found := [f"rank {rank}: {text}" for rank, text in zip(names, problems, strict=True) if text is not None]:
            raise MeetingError("; ".join(found))

    names = dist.get_process_group_ranks(runtime.group)
    seconds = patience(runtime.group, GIVE_UP_AFTER)
    try:
        Barrier(store, runtime.rank, names, call, seconds, look, problem, hear).wait()
    except BaseException:
        runtime.progress.counts[issued.key] -= 1  # not counted by the others either
        raise
    finally:
        here.waiting = before_this


class Barrier:
    """One call that all ranks of a process group make together. With one rank nothing is sent.

    ``wait`` lasts until all have come. As a context it also lets them ``share`` what they have.

    Args:
        store: of the group. None: there is one rank.
        rank: this one, of the group's.
        names: what errors call each of them.
        what: the call and its arguments, the same on all ranks, for errors.
        seconds: how much later than the first the last rank may come, and how long one may give no sign of life.
        look: called now and then while ranks wait: to raise what ends it.
        said: what this rank says as it comes.
        hear: called on rank 0 with what all said, by rank: to raise what ends it.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        names: Sequence[int],
        what: str,
        seconds: float,
        look: Callable[[], object] = int,
        said: Any = None,
        hear: Callable[[list[Any]], object] = len,
    ) -> None:
        self.what, self.is_first = what, rank == 0
        self.place = rank, len(names)  # this rank, and how many there are
        self._store, self._rank, self._names = store, rank, names
        self._seconds, self._look = seconds, look
        self._said, self._hear = said, hear
        self._others = range(1, len(names))
        self._ids = {rank: uuid.uuid4().hex}  # of ranks: begin what is in the store of this call
        self._number = -1  # of the exchange: the first, 0, is of notes
        self._has_warned = False
        self._over = threading.Event()

    def __enter__(self) -> Self:
        """As ``wait``."""
        with self._explained():
            self.wait()
        if self._others:
            threading.Thread(target=self._beat, name="flatshard-barrier", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Rank 0 leaves last: its process may end after this, and the store with it."""
        self._over.set()
        if self.is_first and self._number:
            with contextlib.suppress(RuntimeError):  # the store is gone: the others know
                waits = _waits()
                for key in map(self._down, self._others):
                    while self._store.check([key]) and next(waits) < _LEAVE_AFTER:
                        pass

    def wait(self) -> None:
        """Until all ranks have come.

        Raises:
            MeetingError: some did not come, or came for something else; or what ``hear`` raised.
        """
        self._share((None, (self.what, self._said)), self._hear_all)

    def share(self, produce: Callable[[], T], decide: Callable[[list[T]], Sequence[Any] | None] | None = None) -> Any:
        """Call ``produce`` on every rank, then ``decide`` on rank 0 with what all produced, by rank.

        Returns:
            This rank's item of what ``decide`` returned, or None.

        Raises:
            MeetingError: on all ranks, when each has done its part: some rank could not.
        """
        try:
            mine = _outcome(produce)
        except BaseException as e:  # an interrupt: the others must not wait
            self._number += 1
            error = f"rank {self._names[self._rank]}: {type(e).__name__}"
            for rank in self._others if self.is_first else ():
                self._send(self._down(rank), (self._ids[0], (error, None)))
            if not self.is_first:
                self._hand_in((type(e).__name__, None))
            raise
        with self._explained():
            return self._share(mine, decide)

    def _share(self, mine: Outcome, decide: Callable[[list[Any]], Sequence[Any] | None] | None) -> Any:
        self._number += 1
        error, item = self._lead(mine, decide) if self.is_first else self._follow(mine)
        if error is not None:
            raise MeetingError(f"{self.what}: {error}")
        return item

    def _lead(self, mine: Outcome, decide: Callable[[list[Any]], Sequence[Any] | None] | None) -> Outcome:
        """Rank 0's side: hear all, decide, and answer all."""
        began = time.monotonic()
        if self._others and not self._number:
            self._hand_in(mine)
        every = [mine]
        try:
            silent = {rank: self._await(self._up(rank), rank, began) for rank in self._others}
            for rank, problem in silent.items():
                note = self._take(self._up(rank)) if problem is None else None
                if note is not None:
                    self._ids[rank], outcome = note
                every.append((problem or _GAVE_UP, None) if note is None else outcome)
        finally:
            if self._others and not self._number:
                self._store.delete_key(self._up(0))
        answers = self._answers(every, decide)
        for rank in self._others:
            if rank in self._ids:
                self._send(self._down(rank), (self._ids[0], answers[rank]))
        return answers[0]

    def _follow(self, mine: Outcome) -> Outcome:
        """Another rank's side: be heard, and wait for the answer."""
        self._hand_in(mine)
        try:
            problem = self._await(self._down(self._rank), 0, time.monotonic())
            answer = self._take(self._down(self._rank)) if problem is None else None
            if answer is None:
                return f"{self._late()}: {problem or _GAVE_UP}", None
        finally:
            self._store.delete_key(self._up(self._rank))
        self._ids[0], outcome = answer
        return outcome  # type: ignore[no-any-return]

    def _answers(
        self, every: list[Outcome], decide: Callable[[list[Any]], Sequence[Any] | None] | None
    ) -> list[Outcome]:
        ranks_of: dict[str, list[int]] = {}
        for rank, (error, _) in zip(self._names, every, strict=True):
            if error is not None:
                ranks_of.setdefault(error, []).append(rank)
        if ranks_of:
            said = "; ".join(f"{_rank_list(ranks)}: {error}" for error, ranks in ranks_of.items())
            alike = [error for error, ranks in ranks_of.items() if len(ranks) == len(every)]
            return [(alike[0] if alike else said, None)] * len(every)
        error, items = _outcome(lambda: None if decide is None else decide([value for _, value in every]))
        return [(error, None if items is None else items[rank]) for rank in range(len(every))]

    def _hear_all(self, rows: list[tuple[str, Any]]) -> None:
        """Rank 0 has heard for which call each rank came, and what it said."""
        calls = [(rank, call) for rank, (call, _) in zip(self._names, rows, strict=True)]
        if other := [f"rank {rank}: {call}" for rank, call in calls if call != self.what]:
            raise MeetingError(
                f"ranks came for different things. Rank {self._names[0]}: {self.what}; {'; '.join(other)}"
            )
        self._hear([said for _, said in rows])

    def _await(self, key: str, sender: int, began: float) -> str | None:
        """Wait for what ``sender`` puts under ``key``. Returns what is wrong if that does not come.

        ``began``: when this rank came to the first exchange.
        """
        sign, heard = b"", time.monotonic() if self._number else began
        for waited in _waits():
            if self._store.check([key]):
                break
            if waited > self._seconds / 4 and (new := self._sign(sender)) != sign:
                sign, heard = new, time.monotonic()
            elif time.monotonic() - heard > self._seconds + (0 if self.is_first else _GRACE):
                if self._number:
                    return f"no sign of life for {self._seconds:g} s, so it died, or its machine did"
                return f"did not come within {self._seconds:g} s. All ranks must make this call"
            if waited > _LOOK_AFTER:
                self._look()
            if waited > _WARN_AFTER and not self._number and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    f"{self.what}: rank {self._names[self._rank]} has waited for {self._late()} for {waited:.0f} s. All "
                    "ranks must make this call"
                )
        return None

    def _late(self) -> str:
        """Those that have not come; or rank 0, which the others wait for."""
        ranks = [0] if self._number else [i for i in range(len(self._names)) if not self._store.check([self._up(i)])]
        return _rank_list([self._names[i] for i in ranks or [0]])

    def _beat(self) -> None:
        key, count = self._alive(self._rank), 0
        with contextlib.suppress(RuntimeError):  # the store is gone: the main thread finds that, too
            while not self._over.wait(self._seconds / 8):
                count += 1
                self._store.set(key, str(count))
            if count:
                self._store.delete_key(key)

    # -- over the store ------------------------------------------------------------------------------------------------

    def _up(self, rank: int) -> str:
        """Where ``rank`` hands in what it has. Of the first exchange everybody knows where that is."""
        return f"{_PREFIX}/{self._ids[rank]}/{self._number}/up" if self._number else f"{_PREFIX}/at/{rank}"

    def _down(self, rank: int) -> str:
        """Where ``rank`` is answered."""
        return f"{_PREFIX}/{self._ids[rank]}/{self._number}/down"

    def _alive(self, rank: int) -> str:
        return f"{_PREFIX}/{self._ids[rank]}/alive"

    def _sign(self, rank: int) -> bytes:
        """Changes as long as ``rank`` lives."""
        key = self._alive(rank) if self._number else self._up(rank)
        return read_now(self._store, key) or b""

    def _hand_in(self, mine: Outcome) -> None:
        self._send(self._up(self._rank), (self._ids[self._rank], mine))

    def _send(self, key: str, value: Any) -> None:
        data = pickle.dumps(value)
        pieces = [data[i : i + _PIECE] for i in range(0, len(data), _PIECE)]
        for i, piece in enumerate(pieces[1:], 1):
            self._store.set(f"{key}/{i}", piece)
        self._store.set(key, b"%d " % len(pieces) + pieces[0])  # last: who sees it finds all

    def _take(self, key: str) -> Any:
        """What was sent. It is deleted. None: its sender has taken it back."""
        if (head := read_now(self._store, key)) is None:
            return None
        count, _, first = head.partition(b" ")
        more = [f"{key}/{i}" for i in range(1, int(count))]
        pieces = [read_now(self._store, each) for each in more]
        for each in (key, *more):
            self._store.delete_key(each)
        return None if None in pieces else pickle.loads(b"".join([first, *filter(None, pieces)]))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except MeetingError:
            raise
        except RuntimeError as e:
            raise MeetingError(
                f"{self.what}: the process group's store cannot be reached. Its host, rank 0 or torchrun, may have died: {e}"
            ) from e


def _outcome(produce: Callable[[], Any]) -> Outcome:
    try:
        return None, produce()
    except MeetingError as e:
        return str(e), None
    except Exception as e:
        return f"{type(e).__name__}: {e}", None


def _rank_list(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 10} more" if len(ranks) > 10 else ""
    return ", ".join(f"rank {rank}" for rank in ranks[:10]) + more


def _waits() -> Iterator[float]:
    """Seconds waited so far: asked for again after a twentieth of them, so long waits cost the store little."""
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        yield waited
        time.sleep(min(max(waited / 20, 0.0001), 0.5))
