"""The memory of a step for any choice of what units give up, from the plans of two: nothing given up, and everything.

[Note: Timelines]
A step is a row of stretches, in each of which one unit runs. What is in memory in a stretch is what its own unit takes there,
and what units leave that have run forward and not yet backward. Both follow from each unit's own choice: what it leaves of
activations differs between the two plans by its recomputation alone, and gathered parameters are added where they are kept.
So the peak of any choice is a sum, without running it. It is exact where units do not share what they leave; whoever chooses
by it plans the choice itself afterwards.
"""

from __future__ import annotations

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


class Give(NamedTuple):
    """One thing that a unit gives up."""

    unit: int
    what: str  # "step", "backward" or "activations"


@dataclass(frozen=True)
class Costs:
    """What giving up costs in a step, for each unit."""

    gather: Sequence[float]  # bytes sent by one gather
    flops: Sequence[float]  # operations to compute its forward again
    gathers: int  # of a unit that is freed after its backward: the microbatches
    flops_per_byte: float  # operations that are worth one byte sent

    def of(self, give: Give) -> float:
        """In bytes sent."""
        if give.what == "activations":
            return self.flops[give.unit] / self.flops_per_byte
        return self.gather[give.unit] * (self.gathers - 1 if give.what == "step" else self.gathers)

    def total(self, gives: Sequence[Give]) -> float:
        """Of all of them."""
        return sum(map(self.of, gives))


class _Stretch(NamedTuple):
    phase: str
    unit: str
    total: int  # the most bytes
    unsharded: int  # the most of gathered parameters
    left: int  # at the end, without gathered parameters


def _stretches(plan: Plan) -> list[_Stretch]:
    found = []
    for (phase, unit), group in itertools.groupby(plan.samples, key=lambda sample: (sample.phase, sample.unit)):
        memory = [sample.device for sample in group]
        totals, gathered = [m.total for m in memory], [m.unsharded for m in memory]
        found.append(_Stretch(phase, unit, max(totals), max(gathered), totals[-1] - gathered[-1]))
    return found


class Timeline:
    """The stretches of a step, and what units add to each. [Note: Timelines]"""

    def __init__(self, kept: Plan, least: Plan, units: Sequence[str], costs: Costs) -> None:
        """``kept``: nothing is given up but what stays until the parts change. ``least``: everything is."""
        self.costs, self.units = costs, units
        number = {unit: at for at, unit in enumerate(units)}
        rows, others = _stretches(least), _matched(_stretches(kept), _stretches(least))
        self.own = [number.get(row.unit) for row in rows]
        self.gathered = [row.unsharded for row in rows]
        # What a stretch takes beside gathered parameters, if its unit keeps its activations, and if it recomputes.
        self.rest = [(o.total - o.unsharded, r.total - r.unsharded) for o, r in zip(others, rows, strict=True)]
        sizes = {unit.fqn: unit.unsharded_nbytes for unit in least.units}
        self.size = [sizes[unit] for unit in units]
        self.next = self._next_in_backward(rows)
        self.ran_in: list[list[int]] = [[] for _ in units]
        for at, own in enumerate(self.own):
            if own is not None:
                self.ran_in[own].append(at)
        self.alive: list[list[int]] = [[] for _ in units]
        self.saved = [0] * len(units)  # activations that a unit leaves, and does not if it recomputes
        self._follow(rows, others)
        self.all_saved = [0] * len(rows)
        for unit, stretches in enumerate(self.alive):
            for at in stretches:
                self.all_saved[at] += self.saved[unit]

    def _next_in_backward(self, rows: list[_Stretch]) -> list[int | None]:
        """The unit that is gathered ahead in each stretch."""
        found: list[int | None] = [None] * len(rows)
        coming: int | None = None
        for at in range(len(rows) - 1, -1, -1):
            if rows[at].phase != "backward":
                coming = None
                continue
            later = at + 1 < len(rows) and rows[at + 1].phase == "backward"
            after = self.own[at + 1] if later else None
            coming = after if after is not None else coming if later else None
            found[at] = coming if coming != self.own[at] else None
        return found

    def _follow(self, rows: list[_Stretch], others: list[_Stretch]) -> None:
        """Find where each unit has run forward and not backward, and what it has left there."""
        waiting: dict[int, None] = {}
        for at, row in enumerate(rows):
            own = self.own[at]
            if own is not None:
                waiting.pop(own, None)
            for unit in waiting:
                self.alive[unit].append(at)
            if own is not None and row.phase == "forward":
                waiting[own] = None
                before = at - 1 if at else at
                kept = others[at].left - others[before].left
                self.saved[own] = kept - (row.left - rows[before].left)

    def memory(self, choices: Choices) -> list[int]:
        """The most bytes in each stretch."""
        found = [gathered + rest[1] for gathered, rest in zip(self.gathered, self.rest, strict=True)]
        for at, own in enumerate(self.own):
            if own is not None and not choices[own].recomputes:
                found[at] = self.gathered[at] + self.rest[at][0] - self.all_saved[at]
        for unit, choice in enumerate(choices):
            if not choice.recomputes:
                for at in self.alive[unit]:
                    found[at] += self.saved[unit]
            for at in self._gathered_in(unit, choice.stays):
                found[at] += self.size[unit]
        return found

    def _gathered_in(self, unit: int, stays: int) -> Iterator[int]:
        """The stretches in which it is gathered, and would not be if it gave that up."""
        if stays != UNTIL_FORWARD:
            for at in self.alive[unit] if stays == UNTIL_BACKWARD else range(len(self.own)):
                if unit not in (self.own[at], self.next[at]):
                    yield at

    # -- the search --------------------------------------------------------------------------------------------------

    def search(self, limit: float, start: Choices, recomputes: bool) -> list[Give] | None:
        """What to give up so that all is within ``limit``, in order; the least cost that is found. None: it cannot be.

        Each time what frees the peak for the least cost a byte; of equals the unit that runs first, as it is freed for
        longest. Then what is no longer needed is taken back, and what can be done more cheaply is.
        """
        gives: list[Give] = []
        choices, memory = start, self.memory(start)
        while (peak := max(memory)) > limit:
            at = memory.index(peak)
            best = min(
                (
                    (self.costs.of(give) / gain, give.unit, give)
                    for give in possible(choices, recomputes)
                    if (gain := self._gain(choices, give, at)) > 0
                ),
                default=None,
            )
            if best is None:
                return None
            gives.append(best[2])
            self._add(memory, choices, best[2], 1)
            choices = after(choices, best[2])
        return self._improved(gives, memory, limit, start, recomputes)

    def in_order(self, start: Choices, recomputes: bool) -> list[list[Give]]:
        """All choices, the cheapest first."""
        every = list(all_gives(start, recomputes))
        rows = [
            [give for give, taken in zip(every, row, strict=True) if taken]
            for row in itertools.product((False, True), repeat=len(every))
        ]
        return sorted((gives for gives in rows if is_possible(gives, start)), key=self.costs.total)

    def _add(self, memory: list[int], choices: Choices, give: Give, sign: int) -> None:
        """Change ``memory``, of ``choices``, by what ``give`` frees. With ``sign`` -1: back again."""
        unit = give.unit
        if give.what == "activations":
            for at in self.alive[unit]:
                memory[at] -= sign * self.saved[unit]
            for at in self.ran_in[unit]:
                memory[at] += sign * (self.rest[at][1] - self.rest[at][0] + self.all_saved[at])
            return
        stays = choices[unit].stays
        freed = set(self._gathered_in(unit, stays)).difference(self._gathered_in(unit, stays + 1))
        for at in freed:
            memory[at] -= sign * self.size[unit]

    def _gain(self, choices: Choices, give: Give, at: int) -> float:
        """The bytes that ``give`` frees in stretch ``at``."""
        unit = give.unit
        if give.what == "activations":
            if self.own[at] == unit:
                return self.rest[at][0] - self.all_saved[at] - self.rest[at][1]
            return self.saved[unit] if self._is_alive(unit, at) else 0
        if unit in (self.own[at], self.next[at]):
            return 0
        return self.size[unit] if give.what == "step" or self._is_alive(unit, at) else 0

    def _is_alive(self, unit: int, at: int) -> bool:
        stretches = self.alive[unit]
        low, high = 0, len(stretches)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if stretches[middle] < at else (low, middle)
        return low < len(stretches) and stretches[low] == at

    def fits(self, gives: Sequence[Give], limit: float, start: Choices) -> bool:
        """Whether all is within ``limit``, when these are given up."""
        return max(self.memory(after(start, *gives))) <= limit

    def _improved(
        self, gives: list[Give], memory: list[int], limit: float, start: Choices, recomputes: bool
    ) -> list[Give]:
        for give in sorted(gives, key=self.costs.of, reverse=True):
            rest = [each for each in gives if each != give]
            if is_possible(rest, start):
                before = after(start, *rest)
                self._add(memory, before, give, -1)
                if max(memory) <= limit:
                    gives = rest
                else:
                    self._add(memory, before, give, 1)
        if len(self.units) > MANY:
            return gives
        improves = True
        while improves:
            improves = False
            for less in self._cheaper(gives, start, recomputes):
                if self.fits(less, limit, start):
                    gives, improves = less, True
                    break
        return gives

    def _cheaper(self, gives: list[Give], start: Choices, recomputes: bool) -> Iterator[list[Give]]:
        """Choices of less cost: without one or two of ``gives``, or with another one in their place. Cheapest first."""
        total = self.costs.total(gives)
        found = []
        for gone in itertools.chain(itertools.combinations(gives, 1), itertools.combinations(gives, 2)):
            rest = [each for each in gives if each not in gone]
            if not is_possible(rest, start):
                continue
            open_ = list(possible(after(start, *rest), recomputes))
            for number in range(2):
                for more in itertools.combinations(open_, number):
                    changed = [*rest, *more]
                    cost = self.costs.total(changed)
                    if cost < total * (1 - 1e-9) and is_possible(changed, start):
                        found.append((cost, changed))
        return (changed for _, changed in sorted(found))


MANY = 16
"""Units, above which no choice is exchanged for another."""


def all_gives(start: Choices, recomputes: bool) -> Iterator[Give]:
    """Everything that may be given up."""
    for unit, kept in enumerate(start):
        for stays in range(kept.stays, UNTIL_FORWARD):
            yield Give(unit, "step" if stays == UNTIL_CHANGE else "backward")
        if recomputes:
            yield Give(unit, "activations")


def after(choices: Choices, *gives: Give) -> Choices:
    """``choices`` without what is given up."""
    now = list(choices)
    for unit, what in gives:
        stays, recomputes = now[unit]
        now[unit] = Keeps(stays, True) if what == "activations" else Keeps(stays + 1, recomputes)
    return tuple(now)


def possible(choices: Choices, recomputes: bool) -> Iterator[Give]:
    """What may be given up next."""
    for unit, choice in enumerate(choices):
        if choice.stays != UNTIL_FORWARD:
            yield Give(unit, "step" if choice.stays == UNTIL_CHANGE else "backward")
        if recomputes and not choice.recomputes:
            yield Give(unit, "activations")


def is_possible(gives: Sequence[Give], start: Choices) -> bool:
    """Whether each unit that gives up its parameters for backward does so for the step, too, where it has them that long."""
    return all(
        give.what != "backward" or start[give.unit].stays != UNTIL_CHANGE or Give(give.unit, "step") in gives
        for give in gives
    )


def _matched(rows: list[_Stretch], like: list[_Stretch]) -> list[_Stretch]:
    """For each stretch of ``like``, that of ``rows``: the same number of its phase and unit, or else the same one."""
    named: dict[tuple[str, str], list[_Stretch]] = {}
    for row in rows:
        named.setdefault((row.phase, row.unit), []).append(row)
    counts: dict[tuple[str, str], int] = {}
    found = []
    for row in like:
        key = row.phase, row.unit
        number = counts[key] = counts.get(key, -1) + 1
        same = named.get(key, [])
        found.append(same[min(number, len(same) - 1)] if same else row)
    return found
