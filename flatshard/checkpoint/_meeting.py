"""What all ranks do together besides tensors: meet, hand objects to rank 0 and get answers back.

[Note: Who is missing]
A collective that one rank never begins hangs the others until a timeout of half an hour, and says nothing. So ranks first
meet at the process group's store: each leaves its name there, rank 0 waits for all, and says go, or who did not come.

[Note: One rank's error is everybody's]
In a :class:`Meeting` every rank does its part, hands in what came of it, and waits for rank 0. An error on any rank, rank 0's
own included, is raised on all, with the names of those that had it. So no rank waits for one that has given up, and none goes
on where another could not.

``torch.distributed`` has collectives for objects (``gather_object``), but they need numpy.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from flatshard._comm.messages import Messages, default_group, membership
from flatshard._errors import name_list

T = TypeVar("T")

# Meetings so far: the same number on all ranks that came to all.
_held: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class MeetingError(RuntimeError):
    """A rank did not come, or could not do its part: raised on all ranks that came."""


class Meeting:
    """All ranks of a process group in one undertaking. With one rank nothing is sent."""

    def __init__(self, group: dist.ProcessGroup | None, what: str, timeout: timedelta) -> None:
        """Wait for all ranks.

        Args:
            group: None: the default group, or this process alone where there is none.
            what: the call and its arguments, which must be the same on all ranks, for errors.
            timeout: how much later than the first the last rank may come.

        Raises:
            MeetingError: some did not come, or came for something else.
        """
        self.what = what
        group = default_group() if group is None else group
        self.rank, self.size, _ = membership(group)
        self._failed: str | None = None
        if group is not None and self.size > 1:
            self._messages = Messages(group, _meet(group, what, timeout))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, produce: Callable[[], T]) -> list[T]:
        """Call ``produce`` on every rank. On rank 0: what all produced, by rank; elsewhere nothing. ``scatter`` is next."""
        mine = _try(produce)
        rows = [] if self.size == 1 else self._messages.gather(pickle.dumps(mine))
        everybody: list[tuple[str | None, Any]] = [mine] if self.size == 1 else [pickle.loads(row) for row in rows]
        errors = {rank: text for rank, (text, _) in enumerate(everybody) if text is not None}
        if errors:
            alike = len(errors) == self.size and len(set(errors.values())) == 1
            self._failed = errors[0] if alike else "; ".join(f"rank {r}: {text}" for r, text in errors.items())
            return []
        return [value for _, value in everybody]

    def scatter(self, produce: Callable[[], Sequence[T] | None]) -> T | None:
        """On every rank its item of what ``produce`` gives on rank 0, which alone calls it. None: None for all.

        Raises:
            MeetingError: some rank, or rank 0 just now, could not do its part.
        """
        answers: list[tuple[str | None, Any]] = [(None, None)] * self.size
        if self.rank == 0:
            text, items = (self._failed, None) if self._failed is not None else _try(produce)
            answers = [(text, None if items is None else items[r]) for r in range(self.size)]
        if self.size == 1:
            text, mine = answers[0]
        else:
            packed = [pickle.dumps(answer) for answer in answers] if self.rank == 0 else None
            text, mine = pickle.loads(self._messages.scatter(packed))
        if text is not None:
            raise MeetingError(f"{self.what}: {text}")
        result: T | None = mine
        return result


def _try(produce: Callable[[], T]) -> tuple[str | None, T | None]:
    try:
        return None, produce()
    except Exception as e:
        return f"{type(e).__name__}: {e}", None


# -- [Note: Who is missing] --------------------------------------------------------------------------------------------

_GRACE = timedelta(seconds=5)  # that the others give rank 0 to say who is missing


def _meet(group: dist.ProcessGroup, what: str, timeout: timedelta) -> str:
    """Returns a name that only this meeting has."""
    rank, size, store = membership(group)
    key = f"flatshard/meeting/{_held.setdefault(group, 0)}"
    _held[group] += 1
    store.set(f"{key}/{rank}", what)
    if rank == 0:
        verdict = _wait_for_all(store, key, size, what, timeout)
        store.set(f"{key}/go", verdict or "go")
        if verdict:
            raise MeetingError(f"{what}: {verdict}")
        return key
    deadline = time.monotonic() + (timeout + _GRACE).total_seconds()
    while not store.check([f"{key}/go"]):
        if time.monotonic() > deadline:
            store.set(f"{key}/left", "")
            _name_late(what, _late(store, key, size), timeout)
        time.sleep(0.02)
    verdict = store.get(f"{key}/go").decode()
    if verdict != "go":
        raise MeetingError(f"{what}: {verdict}")
    return key


def _wait_for_all(store: Any, key: str, size: int, what: str, timeout: timedelta) -> str:
    """What is wrong, if anything."""
    deadline = time.monotonic() + timeout.total_seconds()
    late = _late(store, key, size)
    while late and time.monotonic() < deadline:
        time.sleep(0.02)
        late = [r for r in late if not store.check([f"{key}/{r}"])]
    if late or store.check([f"{key}/left"]):
        return _describe_late(late or [0], timeout)
    found = {r: store.get(f"{key}/{r}").decode() for r in range(size)}
    other = [f"rank {r}: {said}" for r, said in found.items() if said != what]
    return f"ranks came for different things. Rank 0: {what}; {'; '.join(other)}" if other else ""


def _late(store: Any, key: str, size: int) -> list[int]:
    return [r for r in range(size) if not store.check([f"{key}/{r}"])]


def _describe_late(late: Sequence[int], timeout: timedelta) -> str:
    names = name_list([f"rank {r}" for r in late], 10)
    return f"{names} did not come within {timeout.total_seconds():g} s. All ranks must make this call"


def _name_late(what: str, late: Sequence[int], timeout: timedelta) -> NoReturn:
    raise MeetingError(f"{what}: {_describe_late(late or [0], timeout)}")
