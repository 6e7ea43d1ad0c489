"""The memory of a step for any choice of what units give up, from the plans of a few choices.

[Note: Timelines]
A step is a row of stretches, in each of which one unit runs. A stretch begins with what those before it have left, adds
something at its highest, and leaves something. What it adds and leaves follows from the choices of its own unit and of the
one that ran before it in forward: a tensor between two units is kept if either keeps it. So plans in which each two
neighbours have each two choices say all of it, and the memory of any other choice is a sum. Gathered parameters of other
units that stay are added beside; a unit that is gathered ahead comes in the middle of a stretch, and one that has stayed was
there before. Where this does not hold, the plan of a choice says so, and what it says is learned.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flatshard.planning._report import Plan

UNTIL_CHANGE, UNTIL_BACKWARD, UNTIL_FORWARD = range(3)
"""How long a unit's parameters stay gathered: until the parts change, until its backward has ended, until its forward has."""


class Keeps(NamedTuple):
    """What one unit keeps."""

    stays: int  # one of the three above
    recomputes: bool


Choices = tuple[Keeps, ...]
"""Of the units in order."""

Pair = tuple[Keeps | None, Keeps | None]
"""The choices of the unit before, in forward, and of a stretch's own unit. None: there is none."""


@dataclass(frozen=True)
class Costs:
    """What giving up costs in a step, for each unit."""

    gather: Sequence[float]  # bytes sent by one gather
    flops: Sequence[float]  # operations to compute its forward again
    gathers: int  # of a unit that is freed after its backward: the microbatches
    flops_per_byte: float  # operations that are worth one byte sent

    def of(self, unit: int, keeps: Keeps) -> float:
        """In bytes sent, beside the least that the unit costs."""
        more = {UNTIL_CHANGE: 0, UNTIL_BACKWARD: self.gathers - 1, UNTIL_FORWARD: 2 * self.gathers - 1}[keeps.stays]
        return self.gather[unit] * more + (self.flops[unit] / self.flops_per_byte if keeps.recomputes else 0.0)

    def total(self, choices: Choices) -> float:
        """Of all units."""
        return sum(itertools.starmap(self.of, enumerate(choices)))


class Place(NamedTuple):
    """Which stretch of a step: the same in the plans of all choices."""

    phase: str
    unit: str  # that runs; not always one of those that choose
    number: int  # so many of this phase and unit were before, since ``after`` ran
    after: tuple[str, str, int]  # the last of those that choose, with its phase, and which run of it in that


class _Stretch(NamedTuple):
    total: int  # the most bytes
    left: int  # at the end, without gathered parameters
    # From each time that something is gathered: its bytes, and the most bytes then.
    parts: tuple[tuple[int, int], ...] = ()
    first: int = 0  # bytes that are gathered as it begins

    def with_kept(self, size: int, later: bool) -> int:
        """The most bytes, if the unit of this ``size`` that is gathered in it had stayed gathered; ``later``: after it, if
        not in it."""
        none = len(self.parts) if later else 0
        at = next((at for at, (gathered, _) in enumerate(self.parts) if at and gathered == size), none)
        return max([self.total, *(most + size for _, most in self.parts[:at])])


class _Taken(NamedTuple):
    most: int  # it adds at its highest
    left: int  # it leaves
    with_kept: int  # it adds at its highest, if the unit that is gathered ahead has stayed


def _stretches(plan: Plan, units: Sequence[str]) -> dict[Place, _Stretch]:
    found: dict[Place, _Stretch] = {}
    runs: dict[tuple[str, str], int] = {}
    since: dict[tuple[str, str], int] = {}
    after, held = ("", "", 0), 0
    for key, group in itertools.groupby(plan.samples, key=lambda sample: (sample.phase, sample.unit)):
        if key[1] in units:
            runs[key] = runs.get(key, 0) + 1
            after, since = (*key, runs[key]), {}
        since[key] = since.get(key, 0) + 1
        memory = [sample.device for sample in group]
        parts, before = [(0, 0)], memory[0].unsharded
        for now in memory:
            parts += [(now.unsharded - before, 0)] if now.unsharded > before else []
            parts[-1] = parts[-1][0], max(parts[-1][1], now.total)
            before = now.unsharded
        left, first = memory[-1].total - memory[-1].unsharded, max(0, memory[0].unsharded - held)
        found[Place(*key, since[key], after)] = _Stretch(max(m.total for m in memory), left, tuple(parts), first)
        held = before
    return found


class Wanted(NamedTuple):
    """One stretch of the step whose memory is wanted."""

    like: int  # the stretch of the plans that says what it takes
    own: int | None  # the unit that runs, of those that choose
    pair: tuple[int | None, int | None]  # the units on which it depends: the one before that, and the last that ran
    ahead: int | None  # that is gathered ahead
    alive: int  # so many units have run forward and not backward: the first ones
    more: int = 0  # bytes that it takes beside what the plans say


class Timeline:
    """The stretches of a step, and what they take by the choices of their units. [Note: Timelines]

    Args:
        plan: of any choice.
        units: those that choose.
        limit: for what is gathered ahead, in bytes. None: there is none. 0: nothing is.
    """

    def __init__(self, plan: Plan, units: Sequence[str], limit: int | None) -> None:
        self.units = list(units)
        places = _stretches(plan, self.units)
        self.places = {place: at for at, place in enumerate(places)}
        number = {unit: at for at, unit in enumerate(self.units)}
        owns = [number.get(place.unit) for place in places]
        forwards = [
            own for place, own in zip(places, owns, strict=True) if place.phase == "forward" and own is not None
        ]
        self.order = list(dict.fromkeys(forwards))
        self.order += [unit for unit in range(len(self.units)) if unit not in self.order]
        self.place = {unit: place for place, unit in enumerate(self.order)}
        sizes = {unit.fqn: unit.unsharded_nbytes for unit in plan.units}
        self.size = [sizes[unit] for unit in self.units]
        self.rows = self._rows(list(places), owns, limit)
        self.begins = plan.samples[0].device.total - plan.samples[0].device.unsharded
        # By stretch and pair of choices: what it adds at its highest, and what it leaves.
        self.takes: list[dict[Pair, _Taken]] = [{} for _ in places]
        self.similar: dict[tuple[int, Pair], Pair] = {}  # of those that were in no plan: the one whose numbers are used

    def _rows(self, places: list[Place], owns: list[int | None], limit: int | None) -> list[Wanted]:
        at = self.place
        last: int | None = None
        ran, alive = "", 0
        rows = []
        for number, (place, own) in enumerate(zip(places, owns, strict=True)):
            if place.phase == "optimizer":
                last, ran, alive = None, "", 0
            elif own is not None:
                last, ran, alive = own, place.phase, at[own]
            elif last is not None and ran == "forward":
                alive = at[last] + 1
            before = self.order[at[last] - 1] if last is not None and at[last] else None
            ahead = self._ahead(places, owns, number)
            if ahead is not None and limit is not None and self.size[ahead] > limit:
                ahead = None
            rows.append(Wanted(number, own, (before, last), ahead, alive))
        return rows

    @staticmethod
    def _ahead(places: list[Place], owns: list[int | None], number: int) -> int | None:
        for later in range(number + 1, len(places)):
            if places[later].phase != places[number].phase:
                return None
            if places[later].unit not in ("", places[number].unit):
                return owns[later]  # None: one that does not choose
        return None

    def pair(self, row: Wanted, choices: Choices) -> Pair:
        """The choices on which it depends."""
        before, last = row.pair
        return None if before is None else choices[before], None if last is None else choices[last]

    def learn(self, choices: Choices, plan: Plan) -> None:
        """Take what each stretch takes from the plan of ``choices``."""
        seen: list[_Stretch | None] = [None] * len(self.rows)
        at = 0
        for place, stretch in _stretches(plan, self.units).items():
            at = self.places.get(place, at)  # one that other choices do not have belongs to the one before it
            known = seen[at]
            if known is not None:
                most = max(known.total, stretch.total)
                stretch = _Stretch(most, stretch.left, known.parts + stretch.parts, known.first)
            seen[at] = stretch
        self.similar.clear()
        level = self.begins
        for row, kept in zip(self.rows, self.kept(choices), strict=True):
            stretch = seen[row.like] or _Stretch(level + kept, level)
            stayed = stretch.total
            if row.ahead is not None:
                size = self.size[row.ahead]
                runs = next(each for each in self.rows[row.like :] if each.own == row.ahead)
                begins = seen[runs.like]
                # Whether that unit is gathered only as the stretch begins in which it runs. If it had stayed, its parameters
                # would be in memory all through this one.
                is_later = stretch.first < size and begins is not None and begins.first >= size
                stayed = stretch.with_kept(size, is_later)
            taken = _Taken(stretch.total - kept - level, stretch.left - level, stayed - kept - level)
            self.takes[row.like][self.pair(row, choices)] = taken
            level = stretch.left

    def taken(self, row: Wanted, pair: Pair) -> tuple[int, int]:
        """What ``row`` adds at its highest, and what it leaves; of the most similar pair, if this one was in no plan."""
        known = self.takes[row.like]
        if (exact := known.get(pair)) is not None:
            return exact.most, exact.left
        if (alike := self.similar.get((row.like, pair))) is None:
            alike = min(known, key=lambda other: _difference(pair, other))
            self.similar[row.like, pair] = alike
        taken = known[alike]
        stays, stayed = (self._ahead_stays(row, each) for each in (pair, alike))
        return taken.with_kept if stays and not stayed else taken.most, taken.left

    @staticmethod
    def _ahead_stays(row: Wanted, pair: Pair) -> bool:
        """Whether, by the choices on which ``row`` depends, the unit that is gathered ahead has stayed gathered."""
        for unit, choice in zip(row.pair, pair, strict=True):
            if unit is not None and unit == row.ahead and choice is not None:
                return choice.stays != UNTIL_FORWARD
        return False

    def memory(self, choices: Choices) -> list[int]:
        """The most bytes in each stretch."""
        level, found = self.begins, []
        for row, kept in zip(self.rows, self.kept(choices), strict=True):
            most, left = self.taken(row, self.pair(row, choices))
            found.append(level + most + kept + row.more)
            level += left
        return found

    def kept(self, choices: Choices) -> list[int]:
        """For each stretch the bytes of gathered parameters that are there only because units keep them."""
        always = sum(self.size[u] for u, choice in enumerate(choices) if choice.stays == UNTIL_CHANGE)
        sums = [0]
        for unit in self.order:
            sums.append(sums[-1] + (self.size[unit] if choices[unit].stays == UNTIL_BACKWARD else 0))
        found = []
        for row in self.rows:
            here = {unit for unit in (row.own, row.ahead) if unit is not None}  # what runs takes its parameters anyway
            found.append(always + sums[row.alive] - sum(self.size[u] for u in here if self.keeps(u, choices[u], row)))
        return found

    def keeps(self, unit: int, choice: Keeps, row: Wanted) -> bool:
        """Whether ``unit`` has its parameters in ``row`` because of its choice, or would have, if it did not run then."""
        is_alive = self.place[unit] < row.alive
        return choice.stays == UNTIL_CHANGE or (choice.stays == UNTIL_BACKWARD and is_alive)

    def repeated(self, units: Sequence[str], like: Sequence[int], begins: int, more: int) -> Timeline:
        """That of a longer model, whose ``units`` are each ``like`` one of this model's, in the order of forward.

        Args:
            units, like: of the longer model.
            begins: bytes that it has more, all the time.
            more: bytes that its optimizer takes more, while it steps.
        """
        longer = copy.copy(self)
        longer.units, longer.order = list(units), list(range(len(units)))
        longer.place = {unit: unit for unit in longer.order}
        longer.size = [self.size[unit] for unit in like]
        longer.begins = self.begins + begins
        phases = list(self.places)
        longer.rows = []
        for phase, group in itertools.groupby(self.rows, key=lambda row: phases[row.like].phase):
            rows: dict[int, list[Wanted]] = {}
            for row in group:
                rows.setdefault(-1 if row.pair[1] is None else self.place[row.pair[1]], []).append(row)
            longer.rows += [row._replace(more=more * (phase == "optimizer")) for row in rows.get(-1, ())]
            if rows.keys() - {-1}:
                for unit in longer.order if phase == "forward" else longer.order[::-1]:
                    longer.rows += [self._moved(row, like[unit], unit) for row in rows[like[unit]]]
        return longer

    def _moved(self, row: Wanted, old: int, new: int) -> Wanted:
        """``row`` of unit ``old``, for unit ``new`` of a longer model. Places are units there."""
        ahead = None if row.ahead is None else new + self.place[row.ahead] - old
        own = None if row.own is None else new
        return Wanted(row.like, own, (new - 1 if new else None, new), ahead, new + row.alive - old)


def _difference(one: Pair, other: Pair) -> tuple[int, int, int, int]:
    """How much ``other`` choices differ from ``one``: first by what is computed again, as gathered parameters are counted
    apart. Of those that stay it is known what they take more, and not what others would take less."""
    both = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    again = [a is not None and b is not None and a.recomputes != b.recomputes for a, b in zip(one, other, strict=True)]
    longer = sum(b.stays < a.stays for a, b in both)
    return int(again[1]), int(again[0]), longer, sum(b.stays > a.stays for a, b in both)


def options_of(start: Keeps, recomputes: bool) -> list[Keeps]:
    """What a unit may keep that keeps ``start`` if nothing is given up."""
    again = (start.recomputes, True) if recomputes and not start.recomputes else (start.recomputes,)
    return [Keeps(stays, each) for stays in range(start.stays, UNTIL_FORWARD + 1) for each in again]


def steps_between(start: Choices, end: Choices, order: Sequence[int]) -> Iterator[tuple[int, Keeps]]:
    """What is given up from ``start`` to ``end``, one thing of one unit after the other, with what it keeps then."""
    for unit in order:
        for stays in range(start[unit].stays + 1, end[unit].stays + 1):
            yield unit, Keeps(stays, start[unit].recomputes)
    for unit in order:
        if end[unit].recomputes != start[unit].recomputes:
            yield unit, end[unit]


def patterns(units: int) -> list[tuple[bool, ...]]:
    """Three rows that say of each unit whether it is computed again: none, the odd ones, the even ones. With a row in which
    all are, each two neighbours have each two choices."""
    return [(False,) * units, *(tuple(unit % 2 == first for unit in range(units)) for first in range(2))]
