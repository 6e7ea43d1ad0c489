"""The memory of a step for any choice of what units give up, from the plans of a few choices.

[Note: Timelines]
A step is a row of *stretches*, in each of which one unit runs. A stretch begins with the memory left before it, adds some at
its peak, and leaves some. Both follow from the states of its own unit and of the unit before it in forward: a tensor between
two units is kept if either keeps it. So plans that cover all pairs of choices of neighbours determine the memory of any
choice, as a sum. Unsharded parameters that other units keep are counted separately: a prefetched unit arrives in the middle
of a stretch, and a kept one is there from its beginning. If the plan of a choice shows another number, the timeline learns
from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from flatshard.planning._choices import (
    AGAIN,
    NOT_AGAIN,
    UNTIL_BACKWARD,
    UNTIL_CHANGE,
    UNTIL_FORWARD,
    Choices,
    Keeps,
    Nesting,
    State,
    around_of,
)
from flatshard.planning._report import StepPlan

Pair = tuple[Keeps | None, Keeps | None]
"""The choices of the unit before, in forward, and of a stretch's own unit, each None if there is no such unit."""


class Place(NamedTuple):
    """The key of a stretch, which is the same in the plans of all choices.

    Backward is numbered from its end: what is computed again comes before, and is not in all plans.
    """

    phase: str
    number: int  # so many phases were before
    unit: str  # that runs; not always one of those that choose
    run: int  # which run of it in this phase, since ``after``
    after: tuple[str, int]  # the last of those that choose, and which run of it


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


def _stretches(plan: StepPlan, units: Sequence[str]) -> dict[Place, _Stretch]:
    found: dict[Place, _Stretch] = {}
    held = 0
    for number, (phase, samples) in enumerate(itertools.groupby(plan.samples, key=lambda sample: sample.phase)):
        runs = [
            (unit, [sample.device for sample in run]) for unit, run in itertools.groupby(samples, key=lambda s: s.unit)
        ]
        names = _numbered([unit for unit, _ in runs], units, phase == "backward")
        for name, (unit, memory) in zip(names, runs, strict=True):
            parts, before = [(0, 0)], memory[0].unsharded
            for now in memory:
                parts += [(now.unsharded - before, 0)] if now.unsharded > before else []
                parts[-1] = parts[-1][0], max(parts[-1][1], now.total)
                before = now.unsharded
            left, first = memory[-1].total - memory[-1].unsharded, max(0, memory[0].unsharded - held)
            place = Place(phase, number, unit, *name)
            found[place] = _Stretch(max(m.total for m in memory), left, tuple(parts), first)
            held = before
    return found


def _numbered(ran: Sequence[str], units: Sequence[str], from_end: bool) -> list[tuple[int, tuple[str, int]]]:
    """``run`` and ``after`` of each ``Place`` of a phase in which these ``ran``."""
    found = []
    runs: dict[str, int] = {}
    since: dict[str, int] = {}
    after = ("", 0)
    for unit in reversed(ran) if from_end else ran:
        if unit in units:
            runs[unit] = runs.get(unit, 0) + 1
            after, since = (unit, runs[unit]), {}
        since[unit] = since.get(unit, 0) + 1
        found.append((since[unit], after))
    return found[::-1] if from_end else found


class Wanted(NamedTuple):
    """A stretch of the step whose memory is wanted."""

    like: int  # the stretch of the plans that says what it takes
    own: int | None  # the unit that runs, of those that choose
    pair: tuple[int | None, int | None]  # the units on which it depends: the one before that, and the last that ran
    ahead: int | None  # that is gathered ahead
    alive: int  # so many units have run forward and not backward: the first ones


class Timeline:
    """The stretches of a step, and what they take by the choices of their units. [Note: Timelines]

    Args:
        plans: of some choices; that which has most stretches says which there are.
        units: those that choose.
        limit: for what is gathered ahead, in bytes. None: there is none. 0: nothing is.
    """

    def __init__(self, plans: Sequence[StepPlan], units: Sequence[str], limit: int | None) -> None:
        self.units = list(units)
        places, plan = max(((_stretches(plan, self.units), plan) for plan in plans), key=lambda each: len(each[0]))
        self.places = {place: at for at, place in enumerate(places)}
        number = {unit: at for at, unit in enumerate(self.units)}
        owns = [number.get(place.unit) for place in places]
        forwards = [
            own for place, own in zip(places, owns, strict=True) if place.phase == "forward" and own is not None
        ]
        self.order = list(dict.fromkeys(forwards))
        self.order += [unit for unit in range(len(self.units)) if unit not in self.order]
        self.place = {unit: place for place, unit in enumerate(self.order)}
        self.nesting = Nesting(around_of(units), self.order)
        sizes = {unit.fqn: unit.unsharded_nbytes for unit in plan.units}
        self.size = [sizes[unit] for unit in self.units]
        self.rows = self._rows(list(places), owns, limit)
        seen = [*places.values()]
        self.more_if_kept = [
            0 if row.ahead is None else self._with_kept(row, row.ahead, each, seen) - each.total
            for row, each in zip(self.rows, seen, strict=True)
        ]
        self.begins = plan.samples[0].device.total - plan.samples[0].device.unsharded
        # By stretch and pair of choices: what it adds at its highest, and what it leaves.
        self.takes: list[dict[Pair, _Taken]] = [{} for _ in places]
        # The operations of each unit in a step, by what ``Costs`` has them.
        self.flops: list[dict[tuple[bool, int], int]] = [{} for _ in self.units]
        self.similar: dict[tuple[int, Pair], Pair] = {}  # of those that were in no plan: the one whose numbers are used

    def _rows(self, places: list[Place], owns: list[int | None], limit: int | None) -> list[Wanted]:
        rows = []
        lasts: list[int | None] = [None]
        ran = 0  # so many units have run forward: the first ones
        for phase, group in itertools.groupby(range(len(places)), key=lambda number: places[number].phase):
            numbers = list(group)
            at = [-1 if (own := owns[number]) is None else self.place[own] for number in numbers]
            if phase == "forward":
                alive = [1 + most for most in itertools.accumulate([-1, *at], max)]
                ran = alive[-1]
                lasts = [self.order[most - 1] if most else lasts[-1] for most in alive[1:]]
            elif phase == "backward":
                first = next((number for number, place in enumerate(at) if place >= 0), len(at))
                coming = [1 + most for most in itertools.accumulate(at[::-1], max)][::-1]
                alive = [*[ran] * first, *coming[first:]]
                lasts = self._lasts_of_backward([owns[number] for number in numbers], lasts[-1])
            else:
                alive, lasts = [0] * len(at), [None] * len(at)
            for number, living, last in zip(numbers, alive, lasts, strict=False):
                before = self.order[self.place[last] - 1] if last is not None and self.place[last] else None
                ahead = self._ahead(places, owns, number)
                if ahead is not None and limit is not None and self.size[ahead] > limit:
                    ahead = None
                rows.append(Wanted(number, owns[number], (before, last), ahead, living))
        return rows

    def _lasts_of_backward(self, owns: list[int | None], last: int | None) -> list[int | None]:
        """The units whose choices say what these stretches take. Of a unit that has others inside: the one inside that ran
        last; before they run, the last of them in forward; and it itself, when they have all run."""
        found = []
        ends = {unit: number for number, own in enumerate(owns) if own is not None for unit in self.nesting.around[own]}
        for number, own in enumerate(owns):
            if own is not None and ends.get(own, -1) < number:
                last = own
            elif own is not None and (last is None or own not in self.nesting.around[last]):
                last = next(unit for unit in reversed(self.order) if own in self.nesting.around[unit])
            found.append(last)
        return found

    @staticmethod
    def _ahead(places: list[Place], owns: list[int | None], number: int) -> int | None:
        for later in range(number + 1, len(places)):
            if places[later].phase != places[number].phase:
                return None
            if places[later].unit not in ("", places[number].unit):
                return owns[later]  # None: one that does not choose
        return None

    def pair(self, row: Wanted, choices: Choices) -> Pair:
        """Return the choices that ``row`` depends on."""
        before, last = (None if unit is None else self.nesting.state(unit, choices) for unit in row.pair)
        return pair_of(before, last)

    def learn(self, choices: Choices, plan: StepPlan) -> None:
        """Learn the memory of each stretch from the plan of ``choices``."""
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
        flops = {unit.fqn: unit.flops or 0 for unit in plan.units}
        for unit, keeps in enumerate(self.nesting.in_full(choices)):
            self.flops[unit][keeps[1:]] = flops[self.units[unit]]
        level = self.begins
        for row, kept in zip(self.rows, self.kept(choices), strict=True):
            stretch = seen[row.like] or _Stretch(level + kept, level)
            stayed = stretch.total
            if row.ahead is not None:
                stayed = self._with_kept(row, row.ahead, stretch, seen)
            taken = _Taken(stretch.total - kept - level, stretch.left - level, stayed - kept - level)
            self.takes[row.like][self.pair(row, choices)] = taken
            level = stretch.left

    def _with_kept(self, row: Wanted, ahead: int, stretch: _Stretch, seen: Sequence[_Stretch | None]) -> int:
        """The most bytes that ``row`` would have, if the unit that is gathered ahead in it had stayed gathered."""
        size = self.size[ahead]
        begins = seen[next(each for each in self.rows[row.like :] if each.own == ahead).like]
        # Whether that unit is gathered only as the stretch begins in which it runs. If it had stayed, its parameters would be
        # in memory all through this one.
        is_later = stretch.first < size and begins is not None and begins.first >= size
        return stretch.with_kept(size, is_later)

    def computed_again(self) -> list[dict[tuple[bool, int], float]]:
        """Return ``Costs.flops``, once the plan of a choice without recomputation has been learned."""
        return [{key: flops - known[False, NOT_AGAIN] for key, flops in known.items()} for known in self.flops]

    def taken(self, row: Wanted, pair: Pair) -> tuple[int, int]:
        """Return the bytes that ``row`` adds at its peak, and leaves. The most similar pair tells if no plan had this one."""
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
        """Return the peak of each stretch in bytes."""
        level, found = self.begins, []
        for row, kept in zip(self.rows, self.kept(choices), strict=True):
            most, left = self.taken(row, self.pair(row, choices))
            found.append(level + most + kept)
            level += left
        return found

    def kept(self, choices: Choices) -> list[int]:
        """Return for each stretch the bytes of unsharded parameters that are there only because units keep them."""
        always = sum(self.size[u] for u, choice in enumerate(choices) if choice.stays == UNTIL_CHANGE)
        sums = [0]
        for unit in self.order:
            sums.append(sums[-1] + (self.size[unit] if choices[unit].stays == UNTIL_BACKWARD else 0))
        found = []
        for row in self.rows:
            here = self.here(row).items()
            found.append(always + sums[row.alive] - sum(n for unit, n in here if self.keeps(unit, choices[unit], row)))
        return found

    def here(self, row: Wanted) -> dict[int, int]:
        """The units that have their parameters in ``row`` whatever they choose: those that run, and the one that is gathered
        ahead. Of each the bytes that it takes no more if it stays: not all, if ``row`` does not depend on its choice."""
        running = () if row.own is None else (row.own, *self.nesting.around[row.own])
        found = {unit: self.size[unit] for unit in running}
        if row.ahead is not None and row.ahead not in found:
            found[row.ahead] = self.size[row.ahead] - (0 if row.ahead in row.pair else self.more_if_kept[row.like])
        return found

    def keeps(self, unit: int, choice: Keeps, row: Wanted) -> bool:
        """Whether ``unit`` has its parameters in ``row`` because of its choice, or would have, if it did not run then."""
        is_alive = self.place[unit] < row.alive
        return choice.stays == UNTIL_CHANGE or (choice.stays == UNTIL_BACKWARD and is_alive)


def pair_of(before: State | None, last: State | None) -> Pair:
    """Return the pair of choices that a stretch depends on.

    Units around the one before that are not around the last one have ended. Of these only one fact still matters: whether the
    one before runs again at all, by itself or with one of them.
    """
    if last is None or before is None:
        return None, None if last is None else last.keeps
    keeps, count = before.keeps, len(last.around)
    if len(before.around) > count:
        again = AGAIN if any(last.around) else NOT_AGAIN
        keeps = keeps._replace(recomputes=keeps.recomputes or any(before.around[count:]), again=again)
    return keeps, last.keeps


def _difference(one: Pair, other: Pair) -> tuple[int, ...]:
    """Return how much ``other`` differs from ``one``, as a key for sorting.

    Recomputation comes first, as unsharded parameters are counted separately. A pair with units that are freed early is
    preferred: it tells what a kept one would take more, and not the reverse.
    """
    both = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    again = [a is not None and b is not None and a.recomputes != b.recomputes for a, b in zip(one, other, strict=True)]
    longer = sum(b.stays < a.stays for a, b in both)
    inside = [a is not None and b is not None and a.again != b.again for a, b in zip(one, other, strict=True)]
    return int(again[1]), int(inside[1]), int(again[0]), int(inside[0]), longer, sum(b.stays > a.stays for a, b in both)
