"""The collectives under way: which this rank has issued, for which units, and how the host waits for them.

The order check (``monitor/monitor.py``) compares what ranks are about to do, and the watch (``monitor/watch.py``)
compares what they wait for. Both use this bookkeeping. It also assigns the tags of gloo messages:

[Note: Labels of a user's collectives]
The runtime passes each unit's label to the backend's collectives. A user's class has no such argument, and may call the
backend's collectives, of this group or of others, in the call or in the wait. If these get no label, they take that of the
collective that is being called (``here.called``) or waited for (``here.waiting``). It is no argument of the interface: a
class that forgot to pass it on would work until ranks differ, and then data of different units would mix unnoticed.

[Note: Data of different units never mix]
Over gloo every message of an all-gather or a reduce-scatter carries its unit's tag, which is the same on all ranks. Only a
receive with that tag gets the message. An all-reduce is gloo's own, and is matched by order. So a second, tiny all-reduce
of the tags goes with it, and if the tags differ, all ranks raise before the gradients are read. (If the sizes differ, gloo
ends the process. So while the order is checked, an all-reduce is issued only after all ranks have been found to agree.)
NCCL and similar backends match by order alone: there only the order check helps.

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

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from flatshard._base import trace
from flatshard._base.errors import OutOfStepError
from flatshard._comm.collectives import ALL_REDUCE, KINDS, NUMBERS, Capabilities, Pending
from flatshard._comm.streams import Streams

_RECENT = 5  # number of collectives that an error lists
_MEMBERS = 8  # number of ranks of a group that an error lists


class ComparedFlat(NamedTuple):
    """A flat parameter of a unit, described for a comparison of ranks."""

    dtype: str  # that is gathered
    shard_numel: int
    params: Iterable[tuple[str, Sequence[int]]]  # FQNs and shapes
    hash_start: Callable[[], bytes | None]  # of the values it was sharded from; None: they are unknown, or have changed


class Label:
    """The name of the unit that a collective is for. Each handle has one label, which outlives it."""

    __slots__ = ("describe_flats", "identity", "tag", "unit")

    def __init__(self, unit: str, tag: int = 0, identity: str = "") -> None:
        self.unit = unit
        self.tag = tag  # a multiple of four below 2**31
        self.identity = identity
        # Describes the unit's flat parameters, as long as the unit lives. Ranks that have the same label may find others.
        self.describe_flats: Callable[[], list[ComparedFlat]] = list


RESERVED = 2**31 - 2**16
"""The lowest of the tags that no unit has."""

NOBODY = Label("<no unit>")
"""The label of collectives that a user calls."""

_labels = {NOBODY.tag: NOBODY}  # by tag, for the names in errors


def digest(value: object) -> str:
    """Hash a value that identifies a handle. Its ``repr`` must be the same on all ranks."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def mixed_all_reduce(tag: int, tags: tuple[int, int], rank: int, world_size: int) -> OutOfStepError:
    """Return the error for an all-reduce of the unit of ``tag``, in which ``tags`` are the ranks' lowest and highest."""
    units = " and ".join(repr(_labels[t].unit or "<root>") if t in _labels else "another" for t in tags)
    mine = _labels[tag].unit
    text = (
        f"ranks reduced the gradients of different units together: {units}; rank {rank} those of "
        f"{mine or '<root>'!r}. These gradients are dropped. {SAME_ORDER}."
    )
    return OutOfStepError(ALL_REDUCE, mine, rank, world_size, text)


SAME_ORDER = (
    "All ranks must run the same units in the same order, forward and backward. If a rank does not need a unit that others "
    "run, have it call flatshard.skip(unit, x) in its place. If its data ended before those of others, have it call "
    "flatshard.skip(model, torch.zeros(())).backward() in place of each step that the others still make. Layers "
    "dropped at random (layerdrop) must be the same on all ranks. What communicates, such as full_state_dict, "
    "summon_full_params and the norm of a gradient, is called by all ranks, not by rank 0 alone"
)

SAME_NUMBERS = (
    "A norm, sum or maximum of sharded parameters or gradients is computed by all ranks together. Have all ranks call what "
    "computes it, and print the result on one of them. A rank without a use for it in its loss adds the same term times zero"
)


Place = tuple[int, int, str]
"""Progress of a rank: passes begun, backwards begun, and the current phase (``"forward"``, ``"backward"`` or ``""``)."""


class Members(NamedTuple):
    """The ranks of a process group, for errors: their numbers are those of the world."""

    ranks: tuple[int, ...] = ()  # by their rank in the group. Empty if it has all ranks of the world in order
    name: str = ""  # of the dimension of a mesh

    def world_rank(self, rank: int) -> int:
        """Return the number that ``rank`` of the group has in the world."""
        return self.ranks[rank] if self.ranks else rank

    def __str__(self) -> str:
        """Name the ranks after a collective. Empty for all ranks of the world."""
        if not self.ranks:
            return ""
        shown = f"ranks {', '.join(map(str, self.ranks[:_MEMBERS]))}{', ...' if len(self.ranks) > _MEMBERS else ''}"
        return f" over {self.name!r} ({shown})" if self.name else f" over {shown}"


class Issued(NamedTuple):
    """A collective that this rank has issued."""

    progress: Progress
    verb: str
    kind: int
    label: Label
    for_backward: bool  # the backward gathers parameters that the forward has already gathered
    number: int  # this rank has issued so many collectives with this key, this one included
    place: Place | None  # when it was issued

    @property
    def key(self) -> int:
        """The number by which ranks count collectives."""
        return self.label.tag + self.kind

    def __str__(self) -> str:
        if self.kind == NUMBERS:
            return f"{self.verb} for {self.label.unit}"
        of = f"{self.verb} of {self.label.unit or '<root>'!r}"
        return f"{of}{' for backward' if self.for_backward else ''}{self.progress.members}"

    @property
    def when(self) -> str:
        """The end of a sentence that names ``place``. Empty if it is not known."""
        return describe_place(self.place)


def describe_place(place: Place | None) -> str:
    """Return the end of a sentence that names ``place``. Empty for None."""
    if place is None:
        return ""
    passes, backwards, inside = place
    number = f"backward {backwards}" if inside == "backward" else f"pass {passes}"
    return f" (in {number} of this process)" if inside else f" (after {number} of this process)"


class Progress:
    """The collectives that this rank has issued on one process group."""

    def __init__(self, members: Members = Members()) -> None:  # noqa: B008 (a tuple)
        self.members = members
        self.counts: dict[int, int] = {}  # collectives issued, by key (tag + kind)
        # Collectives in flight: dropped before a wait; or endless, perhaps, because other ranks have issued different ones.
        # [Note: Memory lives as long as its works]
        # Local to this rank: an exception may have reached it first. They only make the next collective wait, or raise.
        self.abandoned: list[Pending] = []
        self.unended: list[tuple[Issued, Pending]] = []
        # The place in its training, or None if nothing trains on the group. Local to this rank: errors name it.
        self.place: Place | None = None
        # For the watch: the latest collectives, and key and number of the first one in the same place as the last.
        self.recent: deque[Issued] = deque(maxlen=_RECENT)
        self.first = (0, 0)
        self._seen: Counter[str] = Counter()
        self._tags = {NOBODY.tag}

    def make_label(self, unit: str, identity: str) -> Label:
        """Make the label of a new handle. Handles of equal ``identity`` differ by the order of their creation."""
        self._seen[identity] += 1
        tag = int(digest((identity, self._seen[identity]))[:8], 16) // 2 // KINDS * KINDS
        # Tags are never reused: all ranks must find the same one, whatever they have freed.
        while tag in self._tags or tag >= RESERVED:
            tag = (tag + KINDS) % 2**31
        self._tags.add(tag)
        label = _labels[tag] = Label(unit, tag, identity)
        return label

    def units(self) -> dict[int, str]:
        """Return FQNs by tag, of units made for this group or with collectives on it. The watch's thread calls this, too."""
        found = (_labels.get(tag) for tag in {*self._tags, *(key // KINDS * KINDS for key in list(self.counts))})
        return {label.tag: label.unit for label in found if label is not None and label.identity}

    def issue(self, verb: str, kind: int, label: Label, for_backward: bool) -> Issued:
        """Record that a collective for ``label`` is about to be issued."""
        key = label.tag + kind
        self.counts[key] = number = self.counts.get(key, 0) + 1
        issued = Issued(self, verb, kind, label, for_backward, number, self.place)
        if not self.recent or self.recent[-1].place != issued.place:
            self.first = key, number
        self.recent.append(issued)
        return issued


def make_label(progress: Progress | None, unit: str, identity: str) -> Label:
    """Make the label of a new handle. ``progress``: None if there is no other process."""
    return Label(unit, identity=identity) if progress is None else progress.make_label(unit, identity)


class Here:
    """The collectives that this process calls and waits for now, on any process group."""

    __slots__ = ("called", "failed", "waiting")

    def __init__(self) -> None:
        self.called: Label | None = None  # that a user's collective is being called for
        # The place and the text of the last one whose wait has failed. The watch's thread reads it, too.
        self.failed: tuple[Place | None, str] | None = None
        self.waiting: Issued | None = None  # also read by the watch's thread

    @property
    def label(self) -> Label:
        """The label of a collective that is called without one. [Note: Labels of a user's collectives]"""
        if self.called is not None:
            return self.called
        return NOBODY if self.waiting is None else self.waiting.label


here = Here()


class Works:
    """Async works of a CPU backend (or other pending collectives), and a computation on their results.

    ``then`` runs after the last work. ``describe(index)`` returns the note to add to the error if a work fails. A ``wait``
    after an interrupt continues with the work that was interrupted. ``timeout`` replaces the group's, for each work.
    """

    __slots__ = ("_describe", "_done", "_then", "_timeout", "_works")

    def __init__(
        self,
        works: Sequence[Any],
        then: Callable[[], object] | None = None,
        describe: Callable[[int], str] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self._works = list(works)
        self._timeout = () if timeout is None else (timeout,)
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
                work.wait(*self._timeout)
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
            here.failed = issued.place, str(issued)
            is_ours = isinstance(e, OutOfStepError) or not isinstance(e, RuntimeError)
            if not is_ours and self._monitor is not None and (why := self._monitor.explain(issued)) is not None:
                try:
                    raise why from e
                finally:
                    del why  # as in `Runtime.fail`
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
