"""Which collectives this rank has issued, for which units, and which one it waits for now.

Bookkeeping for the order check and the watch: ``_order_check.py`` compares what ranks are
about to do, ``_watch.py`` what they wait for. And the tags by which gloo does so:

[Note: Data of different units never mix]
Over gloo every message of an all-gather or reduce-scatter carries its unit's tag, the same on all ranks, and only who
asks for that tag receives it. An all-reduce is gloo's own, matched by order: a second, tiny one of the tags goes with it,
and where those are not equal all ranks raise before anybody reads the gradients. (Gloo itself ends the process if the
sizes differ, too: so while the order is checked, an all-reduce is issued only when all ranks are seen to agree.) NCCL and
the like match by order alone: there only the order check helps.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from flatshard._errors import OutOfStepError

GATHER, REDUCE, EXCHANGE = 0, 1, 2
"""Kinds of collectives, added to a unit's tag. Only within a kind all ranks have the same order: see ``GlooCollectives``."""

_RECENT = 5  # collectives to tell about in an error


Flats = list[tuple[str, int, list[tuple[str, list[int]]]]]
"""What a unit's flat parameters are, as JSON has it: dtype, elements of a shard, and the parameters' FQNs and shapes."""


class Label:
    """Whom a collective is for: one label for each handle."""

    __slots__ = ("contents", "identity", "tag", "unit")

    def __init__(self, unit: str, tag: int = 0, identity: str = "") -> None:
        self.unit = unit
        self.tag = tag  # a multiple of four below 2**31
        self.identity = identity
        self.contents: Callable[[], Flats] = list  # to tell units apart that ranks believe to be one


_LAST = 2**31 - 4
CHECK_LABELS = (Label("the order check", _LAST), Label("the order check", _LAST - 4))
"""Of messages about gathers, and about reductions."""
INTERRUPT_TAG = _LAST + 3
"""Of a message that nobody sends."""

NOBODY = Label("something that is no unit")
"""For collectives that a user calls."""

_labels = {label.tag: label for label in (NOBODY, *CHECK_LABELS)}  # to name them in errors


def digest(value: object) -> str:
    """Of what tells a handle from others: it has the same ``repr`` on all ranks."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def mixed_all_reduce(tag: int, tags: tuple[int, int], rank: int, world_size: int) -> OutOfStepError:
    """The error for an all-reduce for the unit of ``tag`` in which ranks took part for those of ``tags``."""
    units = " and ".join(repr(_labels[t].unit or "<root>") if t in _labels else "another" for t in tags)
    mine = _labels[tag].unit
    text = (
        f"ranks reduced the gradients of different units together: {units}, rank {rank} those of "
        f"{mine or '<root>'!r}. They are dropped. {SAME_ORDER}."
    )
    return OutOfStepError("all-reduce", mine, rank, world_size, text)


SAME_ORDER = (
    "All ranks must run the same units in the same order, forward and backward. Where one does not need a unit that others "
    "run, have it call flatshard.skip(unit, x) in that place. Layers dropped at random (layerdrop) must be the same on all "
    "ranks. Functions that gather, such as full_state_dict and summon_full_params, are called by all ranks, not by rank 0 "
    "alone"
)


Place = tuple[int, int, str]
"""How far a rank is: passes begun, backwards begun, and in which it is: ``"forward"``, ``"backward"`` or ``""``."""


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
        self.again = again  # for a backward, of what a forward has had
        self.count = count  # it is this rank's n-th with this key
        self.place = place

    def __str__(self) -> str:
        return f"{self.verb} of {self.unit or '<root>'!r}{' for backward' if self.again else ''}"

    @property
    def when(self) -> str:
        """In words, to be put behind others."""
        return describe_place(self.place)


def describe_place(place: Place | None) -> str:
    """In words, to be put behind others."""
    if place is None:
        return ""
    passes, backwards, inside = place
    number = f"backward {backwards}" if inside == "backward" else f"pass {passes}"
    return f" (in {number} of this process)" if inside else f" (after {number} of this process)"


class Progress:
    """What this rank has done on one process group."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}  # collectives issued, by tag and kind
        self.recent: deque[Issued] = deque(maxlen=_RECENT)
        # Collectives under way that nobody waits for any more. _runtime.py, [Note: Memory lives as long as its works]
        self.abandoned: list[Any] = []
        self.unended: list[Any] = []  # and those that may never end, as another rank does something else: `Unended`
        self.place: Callable[[], Place | None] = lambda: None
        self._last_place: Place | None = None  # of the last collective
        self.first = (0, 0)  # key and count of the first collective there
        self._seen: Counter[str] = Counter()
        self._tags = {0, *(label.tag for label in CHECK_LABELS)}

    def make_label(self, unit: str, identity: str) -> Label:
        """A label for a new handle. Those of one ``identity`` are told apart by the order in which they are made."""
        self._seen[identity] += 1
        tag = int(digest((identity, self._seen[identity]))[:8], 16) >> 3 << 2
        while tag in self._tags:  # for ever: all ranks must find the same one, whatever they have freed by now
            tag = (tag + 4) % 2**31
        self._tags.add(tag)
        label = _labels[tag] = Label(unit, tag, identity)
        return label

    def units(self) -> dict[int, str]:
        """All that were made for this group or have come to it: their FQNs by tag. Read by the watch's thread, too."""
        found = (_labels.get(tag) for tag in {*self._tags, *(key >> 2 << 2 for key in list(self.counts))})
        return {label.tag: label.unit for label in found if label is not None and label.identity}

    def issue(self, verb: str, kind: int, label: Label, again: bool) -> Issued:
        """Note that a collective for ``label`` is about to be issued."""
        key = label.tag + kind
        self.counts[key] = count = self.counts.get(key, 0) + 1
        place = self.place()
        if place != self._last_place:
            self._last_place, self.first = place, (key, count)
        issued = Issued(self, verb, kind, label, again, count, place)
        self.recent.append(issued)
        return issued


class Here:
    """What this process does now, on whatever process group."""

    __slots__ = ("label", "waiting")

    def __init__(self) -> None:
        self.label = NOBODY  # whom the collective is for that is started or waited for now, by its messages' tag
        self.waiting: Issued | None = None  # read by the watch's thread


here = Here()
