"""Calls that all ranks of a process group make together: they wait for each other, hand objects to rank 0, and get answers.

[Note: An error of one rank is raised on all]
In an exchange each rank does its share of the work, hands the result to rank 0, and waits for the answer. An error on any
rank, rank 0 included, is raised on all, with the names of the ranks that had it. So no rank waits for one that has given up,
and none continues where another could not. The work may take any time: meanwhile a thread of each rank writes a sign of life,
and a rank without one counts as dead.

[Note: Ranks that do not come]
A collective that one rank never begins hangs the others for the timeout of the group, half an hour, without a word. So the
first exchange compares the calls that ranks came for. Each rank puts its call under a key with its rank number, and deletes
it if it gives up. Nothing is counted, so a rank that skipped one call meets the others at the next. Rank 0 waits for all, and
its answer names the missing ranks. The others wait for rank 0 as long, from the time at which they came.

[Note: A call by one rank alone]
``if rank == 0: full_state_dict(model)`` is the first mistake that users make with sharded models: the other ranks never issue
the all-gather. So :func:`barrier` precedes each call that gathers full values: a rank that waits for long logs a warning, and
raises in the end. The wait counts as a wait for a collective, so the watch reports within seconds that another rank waits for
this one in a forward.

Everything goes over the store of the group, a star with its server in the center: without connections among ranks, and
without numpy, which the object collectives of ``torch.distributed`` need. Its reader deletes a key.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist

from flatshard._base.trace import logger
from flatshard._comm.collectives import EXCHANGE
from flatshard._comm.process_groups import timeout_of
from flatshard._comm.progress import Label, digest, here
from flatshard._comm.rendezvous import Rendezvous, polls
from flatshard._comm.runtime import Runtime
from flatshard._handle.unit_ranks import UnitRanks

T = TypeVar("T")
Outcome = tuple[str | None, Any]
"""The result of a rank's work: the text of an error or None, and the object that the rank hands in."""

GIVE_UP_AFTER = 300.0  # seconds that `barrier` waits for the last rank, unless the group's timeout is shorter
_GRACE = 5.0  # seconds that other ranks give rank 0 to name the missing ranks
_LEAVE_AFTER = 2.0  # seconds in which any rank that is alive has read its answer
_LOOK_AFTER, _WARN_AFTER = 1.0, 10.0  # seconds
_GAVE_UP = "had come, and waited no longer"


class RankError(RuntimeError):
    """A rank did not come, or failed in its share of the work. All ranks that came raise it.

    Example::

        try:
            flatshard.load_checkpoint("run/latest", {"model": model})
        except flatshard.RankError as e:
            print(e)  # names what is missing, and the ranks; nothing has changed on any
    """


def barrier(runtimes: Iterable[Runtime], call: str, problem: str | None = None) -> None:
    """Wait until all ranks of each process group have come to ``call``: its name, the same on all ranks.

    ``problem``: the reason if this rank cannot continue. Then no rank does.

    Raises:
        RankError: some have not come in time, came for something else, or have a problem; the message names them.
    """
    failed: str | None = None
    for runtime in sorted({r.number: r for r in runtimes}.values(), key=lambda r: r.number):
        if runtime.progress is not None and (store := runtime.store()) is not None:
            try:
                _wait_as_for_a_collective(runtime, store, call, problem)
            except RankError as e:
                problem, failed = problem or str(e), failed or str(e)  # the ranks of the next group raise it, too
    if failed is not None:
        raise RankError(failed)


def agree(all_ranks: Iterable[UnitRanks], call: str, problem: str | None, kind: type[Exception]) -> None:
    """Raise an error of this ``kind`` for ``problem``, or for the problem of another rank, with its name."""
    try:
        barrier(
            dict.fromkeys(runtime for r in all_ranks for runtime in (r.shards, r.replicas) if runtime), call, problem
        )
    except RankError:
        if problem is None:
            raise
    if problem is not None:
        raise kind(problem)


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
        monitor = runtime.peers.monitor
        why = None if monitor is None else monitor.explain(issued)
        try:
            if why is not None:
                raise why
        finally:
            del why  # else the error has a frame that has the error

    def check_problems(problems: list[str | None]) -> None:
        if found := [f"rank {rank}: {text}" for rank, text in zip(names, problems, strict=True) if text is not None]:
            raise RankError("; ".join(found))

    names = dist.get_process_group_ranks(runtime.group)
    seconds = patience(runtime.group, GIVE_UP_AFTER)
    try:
        Barrier(store, runtime.rank, names, call, seconds, look, problem, check_problems).wait()
    except BaseException:
        runtime.progress.counts[issued.key] -= 1  # not counted by the others either
        raise
    finally:
        here.waiting = before_this


class Barrier:
    """A call that all ranks of a process group make together. With one rank nothing is sent.

    ``wait`` returns when all ranks have come. A ``with`` block begins so too, and ranks can ``share`` objects in it.

    Args:
        store: the store of the group, or None if there is one rank.
        rank: the rank in the group.
        names: the number of each rank in error messages.
        call: the call with its arguments, the same on all ranks, for error messages.
        seconds: the time from the first rank to the last, and without a sign of life from a rank.
        look: called from time to time while ranks wait; it may raise to end the wait.
        note: what this rank tells rank 0 when it comes.
        check_notes: called on rank 0 with the notes of all ranks; it may raise to end the call on all.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        names: Sequence[int],
        call: str,
        seconds: float,
        look: Callable[[], object] = int,
        note: Any = None,
        check_notes: Callable[[list[Any]], object] = len,
    ) -> None:
        self.call, self.is_first = call, rank == 0
        self.place = rank, len(names)  # this rank, and the number of ranks
        self._keys, self._rank, self._names = Rendezvous(store, "flatshard/barrier/"), rank, names
        self._seconds, self._look = seconds, look
        self._note, self._check_notes = note, check_notes
        self._others = range(1, len(names))
        self._ids = {rank: uuid.uuid4().hex}  # by rank: the beginning of its keys, new in each call
        self._number = -1  # of the exchange: 0 is the one of notes
        self._has_warned = False
        self._over = threading.Event()

    def __enter__(self) -> Self:
        """Wait until all ranks have come, and begin to give signs of life."""
        with self._explained():
            self.wait()
        if self._others:
            threading.Thread(target=self._give_signs, name="flatshard-barrier", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave. Rank 0 leaves last: its process may end then, and the store with it."""
        self._over.set()
        if self.is_first and self._number:
            with contextlib.suppress(RuntimeError):  # the store is gone: the others know
                waits = polls()
                for key in map(self._answer_key, self._others):
                    while self._keys.has(key) and next(waits) < _LEAVE_AFTER:
                        pass

    def wait(self) -> None:
        """Wait until all ranks have come.

        Raises:
            RankError: a rank did not come, or came for another call; or ``check_notes`` raised.
        """
        self._share((None, (self.call, self._note)), self._compare_calls)

    def share(self, produce: Callable[[], T], decide: Callable[[list[T]], Sequence[Any] | None] | None = None) -> Any:
        """Call ``produce`` on every rank, then ``decide`` on rank 0 with the results of all ranks.

        Returns:
            The item of this rank in the result of ``decide``, or None.

        Raises:
            RankError: on all ranks, when each has done its work: some rank failed.
        """
        try:
            mine = _outcome(produce)
        except BaseException as e:  # an interrupt: the others must not wait
            self._number += 1
            error = f"rank {self._names[self._rank]}: {type(e).__name__}"
            for rank in self._others if self.is_first else ():
                self._keys.put(self._answer_key(rank), (self._ids[0], (error, None)))
            if not self.is_first:
                self._hand_in((type(e).__name__, None))
            raise
        with self._explained():
            return self._share(mine, decide)

    def _share(self, mine: Outcome, decide: Callable[[list[Any]], Sequence[Any] | None] | None) -> Any:
        self._number += 1
        error, item = self._answer_all(mine, decide) if self.is_first else self._await_answer(mine)
        if error is not None:
            raise RankError(f"{self.call}: {error}")
        return item

    def _answer_all(self, mine: Outcome, decide: Callable[[list[Any]], Sequence[Any] | None] | None) -> Outcome:
        """Collect the outcomes of all ranks, decide, and answer each. Only rank 0 does."""
        began = time.monotonic()
        if self._others and not self._number:
            self._hand_in(mine)
        outcomes = [mine]
        try:
            silent = {rank: self._await(self._outcome_key(rank), rank, began) for rank in self._others}
            for rank, problem in silent.items():
                found = self._keys.take(self._outcome_key(rank)) if problem is None else None
                if found is not None:
                    self._ids[rank], outcome = found
                outcomes.append((problem or _GAVE_UP, None) if found is None else outcome)
        finally:
            if self._others and not self._number:
                self._keys.remove(self._outcome_key(0))
        answers = self._decide(outcomes, decide)
        for rank in self._others:
            if rank in self._ids:
                self._keys.put(self._answer_key(rank), (self._ids[0], answers[rank]))
        return answers[0]

    def _await_answer(self, mine: Outcome) -> Outcome:
        """Hand in this rank's outcome, and wait for the answer of rank 0."""
        self._hand_in(mine)
        try:
            problem = self._await(self._answer_key(self._rank), 0, time.monotonic())
            answer = self._keys.take(self._answer_key(self._rank)) if problem is None else None
            if answer is None:
                return f"{self._missing()}: {problem or _GAVE_UP}", None
        finally:
            self._keys.remove(self._outcome_key(self._rank))
        self._ids[0], outcome = answer
        return outcome  # type: ignore[no-any-return]

    def _decide(
        self, outcomes: list[Outcome], decide: Callable[[list[Any]], Sequence[Any] | None] | None
    ) -> list[Outcome]:
        """Return the answer to each rank: the same error for all, or its item of the result of ``decide``."""
        ranks_with: dict[str, list[int]] = {}
        for rank, (error, _) in zip(self._names, outcomes, strict=True):
            if error is not None:
                ranks_with.setdefault(error, []).append(rank)
        if ranks_with:
            text = "; ".join(f"{rank_list(ranks)}: {error}" for error, ranks in ranks_with.items())
            by_all = [error for error, ranks in ranks_with.items() if len(ranks) == len(outcomes)]
            return [(by_all[0] if by_all else text, None)] * len(outcomes)
        error, items = _outcome(lambda: None if decide is None else decide([value for _, value in outcomes]))
        return [(error, None if items is None else items[rank]) for rank in range(len(outcomes))]

    def _compare_calls(self, rows: list[tuple[str, Any]]) -> None:
        """Raise RankError if ranks came for different calls. Then check their notes."""
        calls = [(rank, call) for rank, (call, _) in zip(self._names, rows, strict=True)]
        if other := [f"rank {rank}: {call}" for rank, call in calls if call != self.call]:
            raise RankError(f"ranks came for different things. Rank {self._names[0]}: {self.call}; {'; '.join(other)}")
        self._check_notes([note for _, note in rows])

    def _await(self, key: str, sender: int, began: float) -> str | None:
        """Wait for the key that ``sender`` is to set. Return the problem if it does not come, else None.

        ``began``: when this rank came to the first exchange.
        """
        sign, heard = b"", time.monotonic() if self._number else began
        for waited in polls():
            if self._keys.has(key):
                break
            if waited > self._seconds / 4 and (new := self._sign_of(sender)) != sign:
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
                    f"{self.call}: rank {self._names[self._rank]} has waited for {self._missing()} for {waited:.0f} s. "
                    "All ranks must make this call"
                )
        return None

    def _missing(self) -> str:
        """Return the ranks that have not come; after the first exchange, rank 0."""
        ranks = [] if self._number else [i for i in range(len(self._names)) if not self._keys.has(self._outcome_key(i))]
        return rank_list([self._names[i] for i in ranks or [0]])

    # -- keys ----------------------------------------------------------------------------------------------------------

    def _outcome_key(self, rank: int) -> str:
        """Return the key under which ``rank`` hands in its outcome. In the first exchange all ranks know it."""
        return f"{self._ids[rank]}/{self._number}/outcome" if self._number else f"at/{rank}"

    def _answer_key(self, rank: int) -> str:
        return f"{self._ids[rank]}/{self._number}/answer"

    def _hand_in(self, mine: Outcome) -> None:
        self._keys.put(self._outcome_key(self._rank), (self._ids[self._rank], mine))

    def _give_signs(self) -> None:
        key, count = f"{self._ids[self._rank]}/alive", 0
        with contextlib.suppress(RuntimeError):  # the store is gone: the main thread finds that, too
            while not self._over.wait(self._seconds / 8):
                count += 1
                self._keys.put(key, count)
            if count:
                self._keys.remove(key)

    def _sign_of(self, rank: int) -> bytes:
        """Return bytes that change as long as ``rank`` lives."""
        return self._keys.peek(f"{self._ids[rank]}/alive" if self._number else self._outcome_key(rank)) or b""

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise
        except ValueError as e:
            raise RankError(f"{self.call}: {e}") from e
        except RuntimeError as e:
            raise RankError(
                f"{self.call}: the process group's store cannot be reached. Its host, rank 0 or torchrun, may have died: {e}"
            ) from e


def _outcome(produce: Callable[[], Any]) -> Outcome:
    try:
        return None, produce()
    except RankError as e:
        return str(e), None
    except Exception as e:
        return f"{type(e).__name__}: {e}", None


def rank_list(ranks: Sequence[int]) -> str:
    """Return ``rank 1, rank 2 and 3 more``, for error messages."""
    more = f" and {len(ranks) - 10} more" if len(ranks) > 10 else ""
    return ", ".join(f"rank {rank}" for rank in ranks[:10]) + more
