"""Bookkeeping of the collectives that this rank has issued, for which units, and of the one that it waits for.

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
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple

from flatshard._base.errors import OutOfStepError
from flatshard._comm.collectives import NUMBERS, Pending

_RECENT = 5  # number of collectives that an error lists


class Label:
    """The name of the unit that a collective is for. Each handle has one label."""

    __slots__ = ("handle", "identity", "tag", "unit")

    def __init__(self, unit: str, tag: int = 0, identity: str = "") -> None:
        self.unit = unit
        self.tag = tag  # a multiple of four below 2**31
        self.identity = identity
        self.handle: Callable[[], Any] = NoneType  # a weak reference


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
    return OutOfStepError("all-reduce", mine, rank, world_size, text)


SAME_ORDER = (
    "All ranks must run the same units in the same order, forward and backward. If a rank does not need a unit that others "
    "run, have it call flatshard.skip(unit, x) in its place. Layers dropped at random (layerdrop) must be the same on all "
    "ranks. What communicates, such as full_state_dict, summon_full_params and the norm of a gradient, is called by all "
    "ranks, not by rank 0 alone"
)

SAME_NUMBERS = (
    "A norm, sum or maximum of sharded parameters or gradients is computed by all ranks together. Have all ranks call what "
    "computes it, and print the result on one of them. A rank without a use for it in its loss adds the same term times zero"
)


Place = tuple[int, int, str]
"""Progress of a rank: passes begun, backwards begun, and the current phase (``"forward"``, ``"backward"`` or ``""``)."""


class Issued(NamedTuple):
    """A collective that this rank has issued."""

    progress: Progress
    verb: str
    kind: int
    label: Label
    again: bool  # the backward gathers parameters that the forward has already gathered
    number: int  # this rank has issued so many collectives with this key, this one included
    place: Place | None  # when it was issued

    @property
    def key(self) -> int:
        """The number by which ranks count collectives."""
        return self.label.tag + self.kind

    def __str__(self) -> str:
        if self.kind == NUMBERS:
            return f"{self.verb} for {self.label.unit}"
        return f"{self.verb} of {self.label.unit or '<root>'!r}{' for backward' if self.again else ''}"

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

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}  # collectives issued, by key (tag + kind)
        # Collectives in flight: dropped before a wait; or endless, perhaps, because other ranks have issued different ones.
        # pending.py, [Note: Memory lives as long as its works]
        self.abandoned: list[Pending] = []
        self.unended: list[tuple[Issued, Pending]] = []
        self.place: Place | None = None  # set by the context of the group's units; also read by the watch's thread
        # For the watch: the latest collectives, and key and number of the first one in the same place as the last.
        self.recent: deque[Issued] = deque(maxlen=_RECENT)
        self.first = (0, 0)
        self._seen: Counter[str] = Counter()
        self._tags = {NOBODY.tag}

    def make_label(self, unit: str, identity: str) -> Label:
        """Make the label of a new handle. Handles of equal ``identity`` differ by the order of their creation."""
        self._seen[identity] += 1
        tag = int(digest((identity, self._seen[identity]))[:8], 16) >> 3 << 2
        # Tags are never reused: all ranks must find the same one, whatever they have freed.
        while tag in self._tags or tag >= RESERVED:
            tag = (tag + 4) % 2**31
        self._tags.add(tag)
        label = _labels[tag] = Label(unit, tag, identity)
        return label

    def units(self) -> dict[int, str]:
        """Return FQNs by tag, of units made for this group or with collectives on it. The watch's thread calls this, too."""
        found = (_labels.get(tag) for tag in {*self._tags, *(key >> 2 << 2 for key in list(self.counts))})
        return {label.tag: label.unit for label in found if label is not None and label.identity}

    def issue(self, verb: str, kind: int, label: Label, again: bool) -> Issued:
        """Record that a collective for ``label`` is about to be issued."""
        key = label.tag + kind
        self.counts[key] = number = self.counts.get(key, 0) + 1
        issued = Issued(self, verb, kind, label, again, number, self.place)
        if not self.recent or self.recent[-1].place != self.place:
            self.first = key, number
        self.recent.append(issued)
        return issued


def make_label(progress: Progress | None, unit: str, identity: str) -> Label:
    """Make the label of a new handle. ``progress``: None if there is no other process."""
    return Label(unit, identity=identity) if progress is None else progress.make_label(unit, identity)


class Here:
    """The collectives that this process calls and waits for now, on any process group."""

    __slots__ = ("called", "waiting")

    def __init__(self) -> None:
        self.called: Label | None = None  # that a user's collective is being called for
        self.waiting: Issued | None = None  # also read by the watch's thread

    @property
    def label(self) -> Label:
        """The label of a collective that is called without one. [Note: Labels of a user's collectives]"""
        if self.called is not None:
            return self.called
        return NOBODY if self.waiting is None else self.waiting.label


here = Here()
