"""The cheapest choice whose memory, by its timeline, is within a limit.

[Note: Choosing]
What each stretch of a step takes is a sum: of each unit one row of numbers, which follows from its own choice and that of
the one before it. The search goes along the units in the order of forward, and adds their rows. Of the partial choices that
end with the same choice it keeps those that no cheaper one beats in all stretches to come, and none that would be over the
limit if all later units took the least. Units mostly run one after the other. Then what the first ones leave is the same in
all stretches to come, and what is dropped cannot be part of the cheapest choice.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatshard.planning._choices import UNTIL_BACKWARD, UNTIL_CHANGE, Choices, Costs, Keeps, State, options_of
from flatshard.planning._timeline import Timeline, pair_of

MOST = 4000
"""Partial choices that are kept for each choice of the last unit."""
MOST_OF_MANY = 25
"""The same, of a model that has more than ``FEW`` units."""
FEW = 16


class _Partials(NamedTuple):
    """Partial choices that end with the same choice."""

    costs: Tensor
    peaks: Tensor  # the most that each takes in stretches in which later choices change nothing
    rows: Tensor  # what each takes in each of the others
    before: Tensor  # of each: the choice of the unit before, and its number among those of it


def cheapest(timeline: Timeline, costs: Costs, limit: float, start: Choices, recomputes: bool) -> Choices | None:
    """The choice of the least cost within ``limit`` that gives up something of ``start``. None: there is none."""
    return Sums(timeline, start, recomputes).cheapest(costs, limit)


class Sums:
    """What each stretch takes, as sums: the same for all costs and limits. [Note: Choosing]"""

    def __init__(self, timeline: Timeline, start: Choices, recomputes: bool) -> None:
        self.timeline = timeline
        options = options_of(start[0], recomputes)
        self.states = states_of(timeline, options)
        self.stays_until_change = start[0].stays == UNTIL_CHANGE
        self.last_of = torch.tensor(
            [-1 if r.pair[1] is None else timeline.place[r.pair[1]] for r in timeline.rows], device="cpu"
        )
        self.base, self.rows = _rows(timeline, options)
        _settle(self.rows, self.last_of)
        # For each unit and state: the states of the one before with which it may be.
        self.befores = _befores(timeline, self.states)
        # For each unit: the least that it and later ones add, by the state before it; and the stretches that they change.
        least, changes = torch.zeros_like(self.base), torch.zeros(len(self.base), dtype=torch.bool, device="cpu")
        self.least, self.changes = [least[None].expand(len(self.states[-1]), -1)], [changes]
        for each, befores in zip(reversed(self.rows), reversed(self.befores), strict=True):
            low = torch.stack(
                [
                    functools.reduce(
                        torch.minimum, [each[before, at] for at, those in enumerate(befores) if before in those]
                    )
                    for before in range(len(each))
                ]
            )
            self.least.insert(0, low + least)
            lowest = functools.reduce(torch.minimum, low.unbind(0))
            least = least + lowest
            changes = changes | (lowest < functools.reduce(torch.maximum, each.flatten(0, 1).unbind(0)))
            self.changes.insert(0, changes)

    def cheapest(self, costs: Costs, limit: float) -> Choices | None:
        """See the function ``cheapest``."""
        most = MOST if len(self.timeline.order) <= FEW else MOST_OF_MANY
        steps: list[list[_Partials]] = []
        nothing = torch.zeros(1, dtype=torch.int64, device="cpu")
        front = [
            _Partials(nothing.double(), nothing, self.base[None], torch.zeros(1, 2, dtype=torch.int64, device="cpu"))
        ]
        open_rows = torch.arange(len(self.base), device="cpu")
        for place, unit in enumerate(self.timeline.order):
            still = self.changes[place + 1][open_rows]
            coming = self.last_of[open_rows[still]] > place
            adds, rest = self.rows[place][:, :, open_rows], self.least[place + 1][:, open_rows]
            those = functools.cache(functools.partial(_joined, front))
            grown = []
            for at, (keeps, _) in enumerate(self.states[place]):
                befores = self.befores[place][at]
                before_it, peaks, links = those(befores)
                rows = torch.cat([front[before].rows + adds[before, at] for before in befores])
                every = _Partials(before_it + costs.of(unit, keeps), peaks, rows, links)
                within = _within(every, rest[at], still, limit)
                grown.append(_unbeaten(within, coming, self.stays_until_change, most))
            front = grown
            if not any(len(each.costs) for each in front):
                return None
            steps.append(front)
            open_rows = open_rows[still]
        found = [
            (cost, peak, at, number)
            for at, each in enumerate(front)
            for number, (cost, peak) in enumerate(zip(each.costs.tolist(), each.peaks.tolist(), strict=True))
        ]
        return _followed(self.timeline, self.states, steps, *min(found)[2:])


def states_of(timeline: Timeline, options: Sequence[Keeps]) -> list[list[State]]:
    """Of each unit, in the order of forward. ``options``: what it may keep."""
    return [timeline.nesting.states(unit, options) for unit in timeline.order]


def _befores(timeline: Timeline, states: Sequence[list[State]]) -> list[list[tuple[int, ...]]]:
    """For each unit and state the numbers of those of the unit before with which it may be."""
    found: list[list[tuple[int, ...]]] = [[(0,) for _ in states[0]]]
    for place, (before, here) in enumerate(itertools.pairwise(states), start=1):
        last, unit = timeline.order[place - 1 : place + 1]
        rows = [[timeline.nesting.follows(last, each, unit, state) for each in before] for state in here]
        found.append([tuple(itertools.compress(range(len(before)), row)) for row in rows])
    return found


def _joined(front: Sequence[_Partials], befores: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Costs, peaks and links of those that end with these states."""
    return (
        torch.cat([front[before].costs for before in befores]),
        torch.cat([front[before].peaks for before in befores]),
        torch.cat([_links(before, len(front[before].costs)) for before in befores]),
    )


def _settle(rows: list[Tensor], last_of: Tensor) -> None:
    """Write ``rows`` so that what a stretch takes is known as soon as the unit after its own has chosen, where that is so.

    What two neighbours share is counted with the later one. So in a stretch in which that one has not run, or no longer,
    what a unit adds is taken back by the next. What follows from a unit's own choice goes over to the next unit's rows.
    """
    over = torch.zeros_like(rows[0][0])
    for place, each in enumerate(rows):
        more = (each[0] - each[0, 0]) * (last_of < place) if place < len(rows) - 1 else torch.zeros_like(each[0])
        each += (over[:, None] if place else 0) - more
        over = more


def _links(before: int, count: int) -> Tensor:
    return torch.stack([torch.full((count,), before, device="cpu"), torch.arange(count, device="cpu")], 1)


def _within(partials: _Partials, rest: Tensor, still: Tensor, limit: float) -> _Partials:
    """Those that are within ``limit`` if later units add ``rest``. Only the stretches remain that ``still`` change."""
    totals = partials.rows + rest
    peaks = torch.cat([partials.peaks[:, None], totals[:, ~still]], 1).amax(1)
    fits = torch.cat([peaks[:, None], totals], 1).amax(1) <= limit
    return _Partials(partials.costs[fits], peaks[fits], partials.rows[fits][:, still], partials.before[fits])


def peaks_along(timeline: Timeline, start: Choices, steps: Sequence[tuple[int, Keeps]], recomputes: bool) -> list[int]:
    """The most bytes after each of ``steps``, which give up something of a unit each."""
    options = options_of(start[0], recomputes)
    numbers = [{state: at for at, state in enumerate(states)} for states in states_of(timeline, options)]
    base, rows = _rows(timeline, options)
    choices = list(start)

    def number(place: int) -> int:
        return numbers[place][timeline.nesting.state(timeline.order[place], choices)]

    now = [number(place) for place in range(len(numbers))]

    def taken(place: int) -> Tensor:
        return rows[place][now[place - 1] if place else 0, now[place]]

    total = base + torch.stack([taken(place) for place in range(len(now))]).sum(0)
    found = []
    for unit, keeps in steps:
        places = [timeline.place[each] for each in timeline.nesting.beside[unit]]
        touched = [place for place in range(min(places), max(places) + 2) if place < len(now)]
        for each in touched:
            total = total - taken(each)
        choices[unit] = keeps
        for each in places:
            now[each] = number(each)
        for each in touched:
            total = total + taken(each)
        found.append(int(total.max()))
    return found


def _followed(
    timeline: Timeline, states: Sequence[list[State]], steps: Sequence[list[_Partials]], at: int, number: int
) -> Choices:
    """The choice that ends with state ``at``, and is the one of this ``number`` of those."""
    found: dict[int, Keeps] = {}
    for unit, those, front in zip(reversed(timeline.order), reversed(states), reversed(steps), strict=True):
        found[unit] = those[at][0]
        at, number = front[at].before[number].tolist()
    return tuple(found[unit] for unit in range(len(found)))


def _unbeaten(partials: _Partials, coming: Tensor, by_peak: bool, most: int) -> _Partials:
    """Those that no cheaper one beats in the stretches that are ``coming``; ``by_peak``: or in those that are over."""
    if not len(partials.costs):
        return partials
    order = torch.argsort(partials.peaks, stable=True)
    order = order[torch.argsort(partials.costs[order], stable=True)]
    looked_at = partials.rows[order][:, coming]
    if by_peak:
        over = torch.cat([partials.peaks[order][:, None], partials.rows[order][:, ~coming]], 1).amax(1, keepdim=True)
        looked_at = torch.cat([looked_at, over], 1)
    elif not bool(coming.any()):
        looked_at = partials.rows[order]
    is_lower = torch.ones(len(order), dtype=torch.bool, device="cpu")
    is_lower[1:] = (looked_at[1:] < looked_at.cummin(0).values[:-1]).any(1) if looked_at.size(1) else False
    kept = order[is_lower]
    if len(kept) > most:
        kept = kept[torch.linspace(0, len(kept) - 1, most, device="cpu").round().long()]
    return _Partials(partials.costs[kept], partials.peaks[kept], partials.rows[kept], partials.before[kept])


def _rows(timeline: Timeline, options: Sequence[Keeps]) -> tuple[Tensor, list[Tensor]]:
    """What each stretch takes whatever is chosen, and what each unit adds, in the order of forward: by the state of the unit
    before (one row for the first unit), its own state, and the stretch. See ``states_of``."""
    count = len(timeline.rows)
    base = torch.full((count,), timeline.begins, dtype=torch.int64, device="cpu")
    states = states_of(timeline, options)
    befores: list[Sequence[State | None]] = [[None], *states]
    found = [
        torch.zeros(len(b), len(s), count, dtype=torch.int64, device="cpu")
        for b, s in zip(befores, states, strict=False)
    ]
    for number, row in enumerate(timeline.rows):
        if row.pair[1] is None:
            taken, left = timeline.taken(row, (None, None))
            base[number] += taken
            base[number + 1 :] += left
            continue
        place = timeline.place[row.pair[1]]
        each = [[timeline.taken(row, pair_of(before, state)) for state in states[place]] for before in befores[place]]
        taken_left = torch.tensor(each, device="cpu")[..., None]
        found[place][..., number : number + 1] += taken_left[:, :, 0]
        found[place][..., number + 1 :] += taken_left[:, :, 1]
    alive = torch.tensor([row.alive for row in timeline.rows], device="cpu")
    here = [torch.zeros(count, dtype=torch.int64, device="cpu") for _ in timeline.order]
    for number, row in enumerate(timeline.rows):
        for unit, size in timeline.here(row).items():
            here[timeline.place[unit]][number] = size
    for place, unit in enumerate(timeline.order):
        for second, (keeps, _) in enumerate(states[place]):
            stays = torch.zeros(count, dtype=torch.bool, device="cpu")
            if keeps.stays == UNTIL_CHANGE:
                stays[:] = True
            elif keeps.stays == UNTIL_BACKWARD:
                stays = alive > place
            found[place][:, second] += stays * (timeline.size[unit] - here[place])
    return base, found
