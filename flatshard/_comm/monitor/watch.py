"""A hang becomes an error: a thread that notices when ranks wait for each other, and ends the wait.

[Note: Slow or stuck]
A rank is *stuck* if it waits for a collective that some other rank has not issued, and never will: as that one is stuck
itself, or has left the forward or backward that the collective belongs to. A slow rank is neither. So there is no guess in
this, and no time limit: where nobody is stuck, waiting goes on until the process group's own timeout.

While all goes well the thread wakes every few seconds, looks whether the same wait is still going on, and asks the
process group's store for an alarm: nothing is added to a collective but two assignments. Who waits for long raises the
alarm. Then every rank publishes where it is, also one that waits somewhere else (a barrier of the user's), and who finds
itself stuck, by positions that have not changed in between, publishes the verdict and interrupts the group.

[Note: Interrupting gloo]
A blocked wait has no handle to end it, and ``abort`` does nothing. But a receive that times out closes all connections of
its rank, whichever thread it is on, and so ends every wait there, and those for it. Who still waits for a third rank finds
the verdict in the store at its next look, and does the same.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from flatshard import _config, _trace
from flatshard._comm.backends import BuiltinCollectives, GlooCollectives
from flatshard._comm.monitor.differences import CURE, described, difference
from flatshard._comm.progress import SAME_ORDER, Progress, here

_ALARM, _VERDICT, _POSITION = "flatshard/alarm", "flatshard/verdict", "flatshard/position/"

Position = dict[str, Any]
"""Where a rank is, as JSON. ``waits``: [key, count, text] of what it waits for, or None; ``unit``: of what unit, see
``Described``; ``counts``: collectives issued by key; ``place`` and ``first``: see ``Progress``; ``recent``: texts; ``at``:
grows with every publication."""


def verdict(collectives: BuiltinCollectives) -> str | None:
    """Why the group was interrupted, if it was by a rank that found itself stuck."""
    try:
        store = collectives.store()
        return store.get(_VERDICT).decode() if store is not None and store.check([_VERDICT]) else None
    except RuntimeError as e:  # the rank that hosts the store is gone, which explains less than the error in hand
        _trace.logger.debug("no verdict: %s", e)
        return None


# -- judging -----------------------------------------------------------------------------------------------------------


def position(progress: Progress, at: int) -> Position:
    """Where this rank is now."""
    waits = here.waiting
    if waits is not None and waits.progress is not progress:
        waits = None
    return {
        "at": at,
        "waits": None if waits is None else [waits.key, waits.count, f"{waits}{waits.when}"],
        "unit": None if waits is None else described(waits),
        "counts": {str(key): count for key, count in dict(progress.counts).items()},
        "place": progress.place(),
        "first": list(progress.first),
        "recent": [str(issued) for issued in progress.recent.copy()],
    }


def _missing(positions: Mapping[int, Position], rank: int) -> list[int]:
    """The ranks that have not issued what ``rank`` waits for."""
    key, count, _ = positions[rank]["waits"]
    return [r for r, p in positions.items() if r != rank and p["counts"].get(str(key), 0) < count]


def _has_left(other: Position, mine: Position) -> bool:
    """Whether a rank has ended the forward or backward that we are in: it is in none, and was in ours.

    It was, if it has issued what we issued first in ours. The numbers of forwards tell nothing: a rank may have run some
    alone, with parameters that are kept.
    """
    if (
        other["waits"] is not None
        or not (other["place"] and mine["place"])
        or other["place"][2]
        or not mine["place"][2]
    ):
        return False
    key, count = mine["first"]
    return [key, count] != mine["waits"][:2] and bool(other["counts"].get(str(key), 0) >= count)


def stuck(positions: Mapping[int, Position]) -> list[int]:
    """The ranks that wait for what will never come. [Note: Slow or stuck]"""
    found = {r for r, p in positions.items() if p["waits"] is not None}
    while True:
        freed = {
            r
            for r in found
            if not any(s in found or _has_left(positions[s], positions[r]) for s in _missing(positions, r))
        }
        if not freed:
            return sorted(found)
        found -= freed


def describe(positions: Mapping[int, Position], found: list[int]) -> str:
    """The error for ranks ``found`` to be stuck: where they and those that they wait for are."""
    lines, told = [], sorted({*found, *(s for r in found for s in _missing(positions, r))})
    for rank in told:
        place = positions[rank]
        if place["waits"] is not None:
            text = f"waits for the {place['waits'][2]}"
            if rank in found:
                text += f", which rank {_missing(positions, rank)[0]} has not come to"
        else:
            text = "has left the forward or backward that the others are in, by its end or an exception"
        lines.append(f"\n  rank {rank} {text}. Its last collectives: {'; '.join(place['recent']) or 'none'}")
    units = {rank: unit for rank in told if (unit := positions[rank]["unit"]) is not None}
    why, cure = difference(units), CURE
    if not why:
        why, cure = "they run different units", SAME_ORDER
    return f"ranks wait for each other, as {why}:{''.join(lines)}\n{cure}."


# -- watching ----------------------------------------------------------------------------------------------------------


_Wait = tuple[int, int, int]
"""Which wait it is: the group's progress (its ``id``), key and count. Not the collective, which would hold a dead group's."""


class _Watched:
    """What the thread knows of one group. It holds nothing of it."""

    def __init__(self, collectives: GlooCollectives, progress: Progress) -> None:
        self._collectives = weakref.ref(collectives)
        self._progress = weakref.ref(progress)
        self.world_size = collectives.size
        self._waiting: _Wait | None = None
        self._since = 0.0
        self._told: _Wait | None = None  # the wait that was logged last
        self._alarmed = False  # by us
        self._at = 0
        self._first: dict[int, Position] = {}  # of the positions that have not changed, when they were seen first
        self.is_alarmed = False  # by anybody

    @property
    def is_over(self) -> bool:
        """Whether the group is gone, or all models that used it."""
        return self._collectives() is None or self._progress() is None

    def look(self) -> bool:
        """One look. Returns whether there is to be another."""
        collectives, progress = self._collectives(), self._progress()
        store = None if collectives is None else collectives.store()
        if collectives is None or store is None or progress is None:
            return False
        waiting, now = here.waiting, time.monotonic()
        wait = None if waiting is None else (id(waiting.progress), waiting.key, waiting.count)
        if wait != self._waiting:
            self._waiting, self._since = wait, now
        mine = waiting is not None and waiting.progress is progress
        stalled = mine and now - self._since >= limit()
        if stalled is not self._alarmed:
            store.add(_ALARM, 1 if stalled else -1)
            self._alarmed = stalled
        self.is_alarmed = store.add(_ALARM, 0) > 0
        if not self.is_alarmed:
            self._first.clear()
            return True
        self._at += 1
        store.set(f"{_POSITION}{collectives.rank}", json.dumps(position(progress, self._at)))
        return not (stalled and self._judge(collectives, store))

    def _judge(self, collectives: GlooCollectives, store: Any) -> bool:
        """Whether this rank is stuck. Then the group has been interrupted."""
        if store.check([_VERDICT]):  # by another rank, which closed its own connections: we may wait for a third's
            collectives.interrupt()
            return True
        settled = {}
        for rank in range(self.world_size):
            key = f"{_POSITION}{rank}"
            if not store.check([key]):
                continue
            now: Position = json.loads(store.get(key))
            first = self._first.setdefault(rank, now)
            if any(first[k] != now[k] for k in ("waits", "place", "counts")):
                self._first[rank] = now
            elif first["at"] != now["at"]:
                settled[rank] = now
        found = stuck(settled)
        if collectives.rank not in found:
            self._tell(collectives.rank, settled)
            return False
        store.compare_set(_VERDICT, "", describe(settled, found))
        collectives.interrupt()
        return True

    def _tell(self, rank: int, settled: Mapping[int, Position]) -> None:
        """Log, once, whom this rank waits for, though it may be slow only."""
        if rank not in settled or (waits := settled[rank]["waits"]) is None:
            return
        late = _missing(settled, rank)
        if late and self._waiting != self._told:
            self._told = self._waiting
            _trace.logger.warning(
                "rank %d has waited %.0f s for the %s, which rank %s has not come to: it is slow, or its data ended "
                "before those of others (then have it call flatshard.skip)",
                *(rank, time.monotonic() - self._since, waits[2], late[0]),
            )


def limit() -> float:
    """Seconds after which a wait is a long one. Shorter in the first passes, where mistakes show."""
    waiting = here.waiting
    checked = waiting is not None and waiting.count <= _config.checked_collectives()
    return min(_config.WATCH_SECONDS, 2.0) if checked else _config.WATCH_SECONDS


class _Watch:
    """The thread, and the groups that it looks after."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stopped = False
        atexit.register(self.stop)
        os.register_at_fork(after_in_child=self._forget)  # the stores' connections are the parent's

    def _forget(self) -> None:
        self._watched.clear()
        self._thread = None

    def add(self, collectives: GlooCollectives, progress: Progress) -> None:
        self._watched.append(_Watched(collectives, progress))
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flatshard-watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread: none may return from the store's code to an interpreter that is gone."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(5)

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(self._pause())
            self._wake.clear()
            self._look_at_all()

    def _look_at_all(self) -> None:
        # A function by itself: while the thread sleeps, it holds nothing of a group that is gone.
        for watched in list(self._watched):
            if not self._look(watched):
                self._watched.remove(watched)

    def _pause(self) -> float | None:
        pauses = []
        for watched in self._watched:
            if watched.is_over:
                return 0.0  # to forget it
            pauses.append(max(0.25, watched.world_size / 100) if watched.is_alarmed else limit() / 4)
        return min(pauses, default=None)

    @staticmethod
    def _look(watched: _Watched) -> bool:
        try:
            return watched.look()
        except RuntimeError as e:  # the store is gone: so is the rank that hosts it, and waits will fail by themselves
            _trace.logger.debug("the watch ends: %s", e)
            return False


_watch = _Watch()


def start(collectives: GlooCollectives, progress: Progress) -> None:
    """Look after the ranks of a group until it is destroyed. ``progress``: what this one issues by whichever collectives."""
    if _config.WATCH_SECONDS > 0:
        _watch.add(collectives, progress)
