"""Turns a hang into an error: a thread detects that ranks wait for each other, and ends their waits.

[Note: Slow or stuck]
A rank is *stuck* if it waits for a collective that another rank has not issued and never will, because that rank is stuck
itself, has left the forward or backward that the collective belongs to, or waits in a collective of the user's for the first
one (``dist.barrier()``). A slow rank is not stuck. So this is exact, with no guess and no time limit: while no rank is stuck,
waiting continues until the process group's own timeout.

Ranks may wait for each other on different groups: one for a norm over all ranks, the next for a reduction over an axis of
their mesh. So a position has the counts of all groups of its rank, and the wait of the rank on any of them. A rank judges
with the positions of the group that it waits on itself, and publishes the verdict in all groups that stuck ranks wait on.

In normal operation the thread wakes every few seconds, checks whether the same wait is still going on, and asks the
process group's store for an alarm. The cost to a collective is two assignments. A rank with a long wait raises the alarm.
Then every rank publishes its position, also a rank that waits elsewhere. A rank that finds
itself stuck, from positions that have not changed in between, publishes the verdict and interrupts the group.

[Note: Interrupting gloo]
A blocked wait has no handle to end it, and ``abort`` does nothing. But a receive that times out, on any thread, closes all
connections of its rank. This ends every wait on this rank, and every wait for this rank, but for those that gloo forgets
([Note: What ends a wait] in ``backends.py``). An all-reduce on torch's own thread may wait for such a message, until the
group's timeout. A rank that still waits for a third rank finds the verdict in the store the next time its thread wakes, and
interrupts the group too.
"""

from __future__ import annotations

import atexit
import inspect
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist

from flatshard._base import environment, frames, trace
from flatshard._comm.backends import BuiltinCollectives, GlooCollectives
from flatshard._comm.collectives import NUMBERS
from flatshard._comm.monitor.differences import described, difference
from flatshard._comm.process_groups import interrupt, name_of
from flatshard._comm.progress import SAME_NUMBERS, SAME_ORDER, Progress, here
from flatshard._comm.rendezvous import Rendezvous

_PREFIX, _ALARM, _VERDICT, _POSITION = "flatshard/", "alarm", "verdict", "position/"

Position = dict[str, Any]
"""A rank's position, as JSON. ``waits``: [group, key, count, text] of the collective that it waits for, or None; ``unit``:
that collective's unit, see ``Described``; ``counts``: collectives issued, by group and key; ``place`` and ``first``: see
``Progress``, of the group that is judged; ``recent``: texts; ``rank``: in the world; ``inside``: see ``_inside``; ``failed``:
see ``_failed``; ``at``: increases with every publication."""

_SYMMETRIC: tuple[str, ...] = (
    "barrier",
    "monitored_barrier",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
)
_SYMMETRIC += ("all_reduce", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single")
"""Of ``torch.distributed``: no rank returns from them before all ranks have come."""
_FILE = inspect.getfile(dist.get_rank)  # where they are


def verdict(collectives: BuiltinCollectives) -> str | None:
    """Return the reason why a stuck rank interrupted the group, or None if none did."""
    try:
        store = collectives.store()
        return None if store is None else Rendezvous(store, _PREFIX).read(_VERDICT)
    except RuntimeError as e:  # the rank that hosts the store is gone, so the original error has to do
        trace.logger.debug("no verdict: %s", e)
        return None


# -- judging -----------------------------------------------------------------------------------------------------------


def position(own: str, groups: Mapping[str, Progress], at: int) -> Position:
    """Return this rank's position now, for the ranks of group ``own``. ``groups``: the progress on each watched group."""
    progress, waits = groups[own], here.waiting
    on = None if waits is None else next((name for name, each in groups.items() if each is waits.progress), None)
    if on is None:
        waits = None
    issued = progress.recent if waits is None else waits.progress.recent
    return {
        "at": at,
        "waits": None if waits is None else [on, waits.key, waits.number, f"{waits}{waits.when}"],
        "unit": None if waits is None else described(waits),
        "counts": {
            name: {str(key): count for key, count in dict(each.counts).items()} for name, each in groups.items()
        },
        "place": progress.place,
        "first": list(progress.first),
        "recent": [str(each) for each in issued.copy()],
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "inside": _inside() if waits is None else None,
        "failed": _failed(progress),
    }


def _failed(progress: Progress) -> str | None:
    """Return the collective, of any group, that has failed in the last pass and backward of this rank, or None."""
    if here.failed is None or progress.place is None:
        return None
    place, text = here.failed
    return text if place is not None and place[:2] == progress.place[:2] else None


def _inside() -> list[Any] | None:
    """Return the user's collective that the main thread is in and the ranks that it needs, or None if it is in none."""
    found = frames.main_thread_in(_SYMMETRIC, _FILE)
    if found is None:
        return None
    name, arguments = found
    group = arguments.get("group")  # None: all ranks
    is_member = group is not dist.GroupMember.NON_GROUP_MEMBER
    return [name, sorted(dist.get_process_group_ranks(group))] if is_member else None


def _missing(positions: Mapping[int, Position], rank: int) -> list[int]:
    """Return the ranks that have not issued the collective that ``rank`` waits for."""
    group, key, count, _ = positions[rank]["waits"]
    counts = {r: p["counts"][group] for r, p in positions.items() if r != rank and group in p["counts"]}
    return [r for r, issued in counts.items() if issued.get(str(key), 0) < count]


def _waits_for_numbers(mine: Position) -> bool:
    """Return whether this rank waits for a norm or other numbers."""
    return mine["waits"] is not None and mine["waits"][1] == NUMBERS


def _has_left(other: Position, mine: Position, group: str) -> bool:
    """Return whether the rank of ``other`` has left the forward or backward that the rank of ``mine`` is in.

    It has if it is in no forward or backward now, and has issued the first collective of that one on ``group``. Numbers of
    forwards cannot be compared: a rank may have run some alone, with parameters that stay unsharded.
    """
    if (
        mine["waits"][0] != group
        or (other["waits"] is not None and other["waits"][0] == group)
        or not (other["place"] and mine["place"])
        or other["place"][2]
        or not mine["place"][2]
    ):
        return False
    key, count = mine["first"]
    return [key, count] != mine["waits"][1:3] and bool(other["counts"][group].get(str(key), 0) >= count)


def _needs(other: Position, mine: Position) -> bool:
    """Return whether the rank of ``other`` is in a collective of the user that the rank of ``mine`` has not begun."""
    return other["inside"] is not None and mine["rank"] in other["inside"][1]


def stuck(positions: Mapping[int, Position], group: str) -> list[int]:
    """Return the ranks of ``group`` that wait for a collective that will never be issued. [Note: Slow or stuck]"""
    found = {r for r, p in positions.items() if p["waits"] is not None}
    while True:
        freed = {
            r
            for r in found
            if not any(
                s in found or _has_left(positions[s], positions[r], group) or _needs(positions[s], positions[r])
                for s in _missing(positions, r)
            )
        }
        if not freed:
            return sorted(found)
        found -= freed


def describe(positions: Mapping[int, Position], found: list[int], group: str) -> str:
    """Return the error text for the stuck ranks ``found``: their positions, and the positions of ranks that they wait for."""
    lines, told = [], sorted({*found, *(s for r in found for s in _missing(positions, r))})
    world = {rank: place["rank"] for rank, place in positions.items()}
    for rank in told:
        place = positions[rank]
        if place["waits"] is not None:
            text = f"waits for the {place['waits'][3]}"
            if rank in found:
                text += f", which rank {world[_missing(positions, rank)[0]]} has not come to"
        else:
            why = "by its end or an exception" if place["failed"] is None else f"as its {place['failed']} failed"
            text = f"has left the forward or backward that the others are in, {why}"
            if place["inside"] is not None:
                inside = f"is in torch.distributed.{place['inside'][0]}()"
                has_left = any(_has_left(place, positions[r], group) for r in found)
                text = f"{text}, and {inside}" if has_left else inside
        lines.append(f"\n  rank {world[rank]} {text}. Its last collectives: {'; '.join(place['recent']) or 'none'}")
    units = {world[rank]: unit for rank in told if (unit := positions[rank]["unit"]) is not None}
    if any(_waits_for_numbers(positions[rank]) for rank in found):
        otherwise = "not all of them compute the same norm, sum or maximum", SAME_NUMBERS
    else:
        otherwise = "they run different units", SAME_ORDER
    why, cure = difference(units) or otherwise
    return f"ranks wait for each other, as {why}:{''.join(lines)}\n{cure}."


# -- watching ----------------------------------------------------------------------------------------------------------


_Wait = tuple[int, int, int]
"""Identifies a wait: the ``id`` of the group's progress, key, count. (An ``Issued`` would keep a destroyed group alive.)"""


class _Watched:
    """The thread's record of one group. It holds only weak references to the group's objects."""

    def __init__(self, collectives: GlooCollectives, progress: Progress) -> None:
        self._collectives = weakref.ref(collectives)
        self._progress = weakref.ref(progress)
        self.world_size = collectives.size
        self._group = name_of(collectives.group)
        self._waiting: _Wait | None = None
        self._since = 0.0
        self._told: _Wait | None = None  # the wait that was logged last
        self._alarmed = False  # this rank has raised the alarm
        self._at = 0
        self._first: dict[int, Position] = {}  # by rank: the first published position since it last changed
        self.is_alarmed = False  # any rank has raised the alarm

    @property
    def is_over(self) -> bool:
        """Whether the group, or every model that used it, has been freed."""
        return self._collectives() is None or self._progress() is None

    def look(self, all_watched: Iterable[_Watched]) -> bool:
        """Check the group once. Returns False if it need not be checked again. ``all_watched``: of all groups."""
        collectives, progress = self._collectives(), self._progress()
        store = None if collectives is None else collectives.store()
        if collectives is None or store is None or progress is None:
            return False
        keys = Rendezvous(store, _PREFIX)
        waiting, now = here.waiting, time.monotonic()
        wait = None if waiting is None else (id(waiting.progress), waiting.key, waiting.number)
        if wait != self._waiting:
            self._waiting, self._since = wait, now
        mine = waiting is not None and waiting.progress is progress
        stalled = mine and now - self._since >= limit()
        if stalled is not self._alarmed:
            keys.add(_ALARM, 1 if stalled else -1)
            self._alarmed = stalled
        self.is_alarmed = keys.count(_ALARM) > 0
        if not self.is_alarmed:
            self._first.clear()
            return True
        self._at += 1
        groups = {w._group: w for w in all_watched if w._group and not w.is_over} | {self._group: self}
        each = {name: on for name, w in groups.items() if (on := w._progress()) is not None}
        keys.put(f"{_POSITION}{collectives.rank}", position(self._group, each, self._at))
        return not (stalled and self._judge(collectives, keys, groups))

    def _judge(self, collectives: GlooCollectives, keys: Rendezvous, groups: Mapping[str, _Watched]) -> bool:
        """Return whether this rank is stuck. If so, interrupt the group. ``groups``: all that are watched."""
        if keys.has(_VERDICT):  # another rank closed its connections, but this one may wait for a third rank
            interrupt(collectives.group)
            return True
        settled = {}
        for rank in range(self.world_size):
            now: Position | None = keys.read(f"{_POSITION}{rank}")
            if now is None:
                continue
            first = self._first.setdefault(rank, now)
            if any(first[k] != now[k] for k in ("waits", "inside", "place", "counts")):
                self._first[rank] = now
            elif first["at"] != now["at"]:
                settled[rank] = now
        found = stuck(settled, self._group)
        if collectives.rank not in found:
            self._log_slow_rank(collectives.rank, settled)
            return False
        text = describe(settled, found, self._group)
        for name in {settled[rank]["waits"][0] for rank in found} & {*groups}:
            groups[name]._propose(text)
        interrupt(collectives.group)
        return True

    def _propose(self, text: str) -> None:
        """Publish the verdict, unless there is one."""
        collectives = self._collectives()
        if collectives is not None and (store := collectives.store()) is not None:
            Rendezvous(store, _PREFIX).propose(_VERDICT, text)

    def _log_slow_rank(self, rank: int, settled: Mapping[int, Position]) -> None:
        """Log, once per wait, which rank this one waits for. That rank may just be slow."""
        if rank not in settled or (waits := settled[rank]["waits"]) is None:
            return
        late = _missing(settled, rank)
        if late and self._waiting != self._told:
            self._told = self._waiting
            trace.logger.warning(
                "rank %d has waited %.0f s for the %s, which rank %s has not come to: it is slow, or %s",
                *(settled[rank]["rank"], time.monotonic() - self._since, waits[3], settled[late[0]]["rank"]),
                "does not compute it: all ranks must"
                if _waits_for_numbers(settled[rank])
                else "its data ended before those of others (then have it call flatshard.skip)",
            )


def limit() -> float:
    """Return the seconds after which a wait counts as long: fewer in the first passes, where most mistakes show."""
    waiting = here.waiting
    checked = waiting is not None and waiting.number <= environment.checked_collectives()
    return min(environment.WATCH_SECONDS, 2.0) if checked else environment.WATCH_SECONDS


class _Watch:
    """The thread, and the groups that it watches."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stopped = False
        atexit.register(self.stop)
        os.register_at_fork(after_in_child=self._forget)  # the stores' connections belong to the parent process

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
        """End the thread before the interpreter exits: it must not return from the store's C++ code afterwards."""
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
        # A separate function, so that the sleeping thread has no local variable that refers to a freed group.
        for watched in list(self._watched):
            if not self._look(watched, self._watched):
                self._watched.remove(watched)

    def _pause(self) -> float | None:
        pauses = []
        for watched in self._watched:
            if watched.is_over:
                return 0.0  # wake at once, to remove it
            pauses.append(max(0.25, watched.world_size / 100) if watched.is_alarmed else limit() / 4)
        return min(pauses, default=None)

    @staticmethod
    def _look(watched: _Watched, all_watched: list[_Watched]) -> bool:
        try:
            return watched.look(all_watched)
        except RuntimeError as e:  # the rank that hosts the store is gone, so waits will fail without our help
            trace.logger.debug("the watch ends: %s", e)
            return False


_watch = _Watch()


def start(collectives: GlooCollectives, progress: Progress) -> None:
    """Watch a group until it is destroyed. ``progress``: what this rank issues on it, by any collectives."""
    if environment.WATCH_SECONDS > 0:
        _watch.add(collectives, progress)
