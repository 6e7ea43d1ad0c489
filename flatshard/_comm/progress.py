"""Which collectives this rank has issued, for which units, and which one it waits for now.

The order check (``monitor/order_check.py``) compares what ranks are about to do, and the watch (``monitor/watch.py``)
compares what they wait for. Both use this bookkeeping. It also assigns the tags of gloo messages:

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
from typing import NamedTuple

from flatshard._comm.collectives import Pending, settle
from flatshard._errors import OutOfStepError

GATHER, REDUCE, EXCHANGE, NUMBERS = 0, 1, 2, 3
"""Kinds of collectives, added to a unit's tag. All ranks have the same order only within a kind: see ``GlooCollectives``.
``NUMBERS`` are a few numbers of several units, such as a norm. Their label says what is computed, and has the tag 0."""

_RECENT = 5  # number of collectives that an error lists


Flats = list[tuple[str, int, list[tuple[str, list[int]]]]]
"""A unit's flat parameters, as JSON: for each its dtype, the elements of a shard, and the parameters' FQNs and shapes."""


class Label:
    """Names the unit that a collective is for. Each handle has one label."""

    __slots__ = ("contents", "identity", "tag", "unit")

    def __init__(self, unit: str, tag: int = 0, identity: str = "") -> None:
        self.unit = unit
        self.tag = tag  # a multiple of four below 2**31
        self.identity = identity
        self.contents: Callable[[], Flats] = list  # to find units that have the same tag, but differ between ranks


_LAST = 2**31 - 4
CHECK_LABELS = (Label("the order check", _LAST), Label("the order check", _LAST - 4))
"""For the order check's messages about gathers, and about reductions."""
INTERRUPT_TAG = _LAST + 3
"""The tag of a receive that is meant to time out: no message with it is ever sent."""

NOBODY = Label("<no unit>")
"""For collectives that a user calls."""

_labels = {label.tag: label for label in (NOBODY, *CHECK_LABELS)}  # by tag, for the names in errors


def digest(value: object) -> str:
    """Hash a value that identifies a handle. Its ``repr`` must be the same on all ranks."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def mixed_all_reduce(tag: int, tags: tuple[int, int], rank: int, world_size: int) -> OutOfStepError:
    """The error for an all-reduce for the unit of ``tag``, in which the ranks' lowest and highest tags are ``tags``."""
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
    "computes it, and print the result on one of them"
)


Place = tuple[int, int, str]
"""How far a rank has come: passes begun, backwards begun, and the current phase (``"forward"``, ``"backward"`` or ``""``)."""


class Issued:
    """One collective that this rank has issued."""

    __slots__ = ("again", "count", "key", "kind", "label", "place", "progress", "tag", "unit", "verb")

    def __init__(
        self, progress: Progress, verb: str, kind: int, label: Label, again: bool, count: int, place: Place | None
    ) -> None:
        self.progress = progress
        self.verb = verb
        self.kind = kind
        self.label = label
        self.tag = self.label.tag
        self.key = self.tag + kind
        self.unit = self.label.unit
        self.again = again  # the backward gathers parameters that the forward has already gathered
        self.count = count  # this rank has issued `count` collectives with this key, this one included
        self.place = place

    def __str__(self) -> str:
        if self.kind == NUMBERS:
            return f"{self.verb} for {self.unit}"
        return f"{self.verb} of {self.unit or '<root>'!r}{' for backward' if self.again else ''}"

    @property
    def when(self) -> str:
        """``place`` in words, for the end of a sentence. Empty if it is not known."""
        return describe_place(self.place)


def describe_place(place: Place | None) -> str:
    """``place`` in words, for the end of a sentence. Empty for None."""
    if place is None:
        return ""
    passes, backwards, inside = place
    number = f"backward {backwards}" if inside == "backward" else f"pass {passes}"
    return f" (in {number} of this process)" if inside else f" (after {number} of this process)"


class Unended(NamedTuple):
    """A collective that may never end, because other ranks have issued a different one. It is never waited for."""

    issued: Issued
    pending: Pending
    rank: int
    world_size: int


class Progress:
    """What this rank has issued on one process group."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}  # collectives issued, by key (tag + kind)
        self.recent: deque[Issued] = deque(maxlen=_RECENT)
        # Collectives in flight that were dropped before a wait. _runtime.py, [Note: Memory lives as long as its works]
        self.abandoned: list[Pending] = []
        self.unended: list[Unended] = []
        self.place: Callable[[], Place | None] = lambda: None
        self._last_place: Place | None = None  # when the last collective was issued
        self.first = (0, 0)  # key and count of the first collective that was issued in `_last_place`
        self._seen: Counter[str] = Counter()
        self._tags = {label.tag for label in (NOBODY, *CHECK_LABELS)}

    def make_label(self, unit: str, identity: str) -> Label:
        """A label for a new handle. Handles of equal ``identity`` are told apart by the order of their creation."""
        self._seen[identity] += 1
        tag = int(digest((identity, self._seen[identity]))[:8], 16) >> 3 << 2
        while tag in self._tags:  # tags are never reused: all ranks must find the same one, whatever they have freed
            tag = (tag + 4) % 2**31
        self._tags.add(tag)
        label = _labels[tag] = Label(unit, tag, identity)
        return label

    def units(self) -> dict[int, str]:
        """FQNs by tag, of the units made for this group or with collectives on it. The watch's thread calls this, too."""
        found = (_labels.get(tag) for tag in {*self._tags, *(key >> 2 << 2 for key in list(self.counts))})
        return {label.tag: label.unit for label in found if label is not None and label.identity}

    def prepare(self, verb: str, label: Label) -> None:
        """Called before a collective is issued: wait for what has been abandoned.

        Raises:
            OutOfStepError: it must not be issued, because messages of an unended collective may still arrive.
        """
        if self.unended:
            first, _, rank, world_size = self.unended[0]
            text = (
                f"the {verb} of {label.unit or '<root>'!r} was not issued: ranks got out of step before on this process "
                f"group, at the {first}{first.when}, and messages of that collective may still arrive. Save what you need "
                "without collectives, fix the cause that the first error names, and restart all ranks"
            )
            raise OutOfStepError(verb, label.unit, rank, world_size, text)
        if self.abandoned:
            settle(self.abandoned)

    def issue(self, verb: str, kind: int, label: Label, again: bool) -> Issued:
        """Record that a collective for ``label`` is about to be issued."""
        key = label.tag + kind
        self.counts[key] = count = self.counts.get(key, 0) + 1
        place = self.place()
        if place != self._last_place:
            self._last_place, self.first = place, (key, count)
        issued = Issued(self, verb, kind, label, again, count, place)
        self.recent.append(issued)
        return issued


class Here:
    """What this process is doing now, on any process group."""

    __slots__ = ("label", "waiting")

    def __init__(self) -> None:
        self.label = NOBODY  # the unit whose collective is being started or waited for: gives messages their tag
        self.waiting: Issued | None = None  # also read by the watch's thread


here = Here()
