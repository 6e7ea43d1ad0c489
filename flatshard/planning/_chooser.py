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
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatshard.planning._report import Plan
from flatshard.planning._shorter import joined
from flatshard.planning._timeline import (
    UNTIL_BACKWARD,
    UNTIL_CHANGE,
    UNTIL_FORWARD,
    Choices,
    Costs,
    Keeps,
    Timeline,
    options_of,
)

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
        self.timeline, self.options = timeline, options_of(start[0], recomputes)
        self.stays_until_change = start[0].stays == UNTIL_CHANGE
        self.last_of = torch.tensor([-1 if r.pair[1] is None else timeline.place[r.pair[1]] for r in timeline.rows])
        self.base, self.rows = _rows(timeline, self.options)
        _settle(self.rows, self.last_of)
        # For each unit: the least that it and later ones add, by the choice before it; and the stretches that they change.
        least, changes = torch.zeros_like(self.base), torch.zeros(len(self.base), dtype=torch.bool)
        self.least, self.changes = [least[None].expand(len(self.options), -1)], [changes]
        for each in reversed(self.rows):
            low = functools.reduce(torch.minimum, each.unbind(1))  # quicker than ``amin`` of integers
            self.least.insert(0, low + least)
            lowest = functools.reduce(torch.minimum, low.unbind(0))
            least = least + lowest
            changes = changes | (lowest < functools.reduce(torch.maximum, each.flatten(0, 1).unbind(0)))
            self.changes.insert(0, changes)

    def cheapest(self, costs: Costs, limit: float) -> Choices | None:
        """See the function ``cheapest``."""
        most = MOST if len(self.timeline.order) <= FEW else MOST_OF_MANY
        steps: list[list[_Partials]] = []
        nothing = torch.zeros(1, dtype=torch.int64)
        front = [_Partials(nothing.double(), nothing, self.base[None], torch.zeros(1, 2, dtype=torch.int64))]
        open_rows = torch.arange(len(self.base))
        for place, unit in enumerate(self.timeline.order):
            still = self.changes[place + 1][open_rows]
            coming = self.last_of[open_rows[still]] > place
            before_it = torch.cat([each.costs for each in front])
            peaks = torch.cat([each.peaks for each in front])
            links = torch.cat([_links(before, len(each.costs)) for before, each in enumerate(front)])
            adds, rest = self.rows[place][:, :, open_rows], self.least[place + 1][:, open_rows]
            grown = []
            for at, keeps in enumerate(self.options):
                rows = torch.cat([each.rows + adds[before, at] for before, each in enumerate(front)])
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
        return _followed(self.timeline, self.options, steps, *min(found)[2:])


def _settle(rows: list[Tensor], last_of: Tensor) -> None:
    """Write ``rows`` so that what a stretch takes is known as soon as the unit after its own has chosen, where that is so.

    What two neighbours share is counted with the later one. So in a stretch in which that one has not run, or no longer,
    what a unit adds is taken back by the next. What follows from a unit's own choice goes over to the next unit's rows.
    """
    over = torch.zeros_like(rows[0][0])
    for place, each in enumerate(rows):
        more = (each[0] - each[0, 0]) * (last_of < place) if place < len(rows) - 1 else torch.zeros_like(over)
        each += (over[:, None] if place else 0) - more
        over = more


def _links(before: int, count: int) -> Tensor:
    return torch.stack([torch.full((count,), before), torch.arange(count)], 1)


def _within(partials: _Partials, rest: Tensor, still: Tensor, limit: float) -> _Partials:
    """Those that are within ``limit`` if later units add ``rest``. Only the stretches remain that ``still`` change."""
    totals = partials.rows + rest
    peaks = torch.cat([partials.peaks[:, None], totals[:, ~still]], 1).amax(1)
    fits = torch.cat([peaks[:, None], totals], 1).amax(1) <= limit
    return _Partials(partials.costs[fits], peaks[fits], partials.rows[fits][:, still], partials.before[fits])


def peaks_along(timeline: Timeline, start: Choices, steps: Sequence[tuple[int, Keeps]], recomputes: bool) -> list[int]:
    """The most bytes after each of ``steps``, which give up something of a unit each."""
    options = options_of(start[0], recomputes)
    number = {keeps: at for at, keeps in enumerate(options)}
    base, rows = _rows(timeline, options)
    now = [number[start[unit]] for unit in timeline.order]

    def taken(place: int) -> Tensor:
        return rows[place][now[place - 1] if place else 0, now[place]]

    total = base + torch.stack([taken(place) for place in range(len(now))]).sum(0)
    found = []
    for unit, keeps in steps:
        place = timeline.place[unit]
        touched = range(place, min(place + 2, len(now)))
        for each in touched:
            total = total - taken(each)
        now[place] = number[keeps]
        for each in touched:
            total = total + taken(each)
        found.append(int(total.max()))
    return found


def _followed(
    timeline: Timeline, options: Sequence[Keeps], steps: Sequence[list[_Partials]], at: int, number: int
) -> Choices:
    """The choice that ends with option ``at``, and is the one of this ``number`` of those."""
    found: dict[int, Keeps] = {}
    for unit, front in zip(reversed(timeline.order), reversed(steps), strict=True):
        found[unit] = options[at]
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
    is_lower = torch.ones(len(order), dtype=torch.bool)
    is_lower[1:] = (looked_at[1:] < looked_at.cummin(0).values[:-1]).any(1) if looked_at.size(1) else False
    kept = order[is_lower]
    if len(kept) > most:
        kept = kept[torch.linspace(0, len(kept) - 1, most).round().long()]
    return _Partials(partials.costs[kept], partials.peaks[kept], partials.rows[kept], partials.before[kept])


def _rows(timeline: Timeline, options: Sequence[Keeps]) -> tuple[Tensor, list[Tensor]]:
    """What each stretch takes whatever is chosen, and what each unit adds, in the order of forward: by the choice of the unit
    before (one row for the first unit), its own choice, and the stretch."""
    count = len(timeline.rows)
    base = torch.full((count,), timeline.begins, dtype=torch.int64)
    befores: list[list[Keeps | None]] = [[None] if place == 0 else [*options] for place in range(len(timeline.order))]
    found = [torch.zeros(len(before), len(options), count, dtype=torch.int64) for before in befores]
    for number, row in enumerate(timeline.rows):
        if row.pair[1] is None:
            taken, left = timeline.taken(row, (None, None))
            base[number] += taken + row.more
            base[number + 1 :] += left
            continue
        place = timeline.place[row.pair[1]]
        each = [[timeline.taken(row, (before, keeps)) for keeps in options] for before in befores[place]]
        taken_left = torch.tensor(each)[..., None]
        found[place][..., number : number + 1] += taken_left[:, :, 0]
        found[place][..., number + 1 :] += taken_left[:, :, 1]
    alive = torch.tensor([row.alive for row in timeline.rows])
    here: list[list[int]] = [[] for _ in timeline.order]
    for number, row in enumerate(timeline.rows):
        for unit in {row.own, row.ahead} - {None}:
            here[timeline.place[unit]].append(number)  # type: ignore[index]
    for place, unit in enumerate(timeline.order):
        for second, keeps in enumerate(options):
            stays = torch.zeros(count, dtype=torch.bool)
            if keeps.stays == UNTIL_CHANGE:
                stays[:] = True
            elif keeps.stays == UNTIL_BACKWARD:
                stays = alive > place
            stays[here[place]] = False
            found[place][:, second] += stays * timeline.size[unit]
    return base, found


def flops_again(names: Sequence[str], kept: Plan, planned: Callable[[Choices], Plan], recomputes: bool) -> list[float]:
    """For each unit the operations to compute its forward again, with the units inside, if none of these does.

    ``kept``: the plan in which no unit does. ``planned``: makes that of other choices.
    """
    number = {name: at for at, name in enumerate(names)}
    parents = [itertools.accumulate(name.split("."), joined) for name in names]
    chains = [[name for name in each if name in number] for each in parents]  # from the outermost unit to each
    before = {unit.fqn: unit.flops for unit in kept.units}
    found = [0.0] * len(names)
    for depth in range(max(map(len, chains), default=0)):
        choices = tuple(Keeps(UNTIL_FORWARD, recomputes and len(chain) == depth + 1) for chain in chains)
        now = {unit.fqn: unit.flops for unit in planned(choices).units}
        for chain in chains:
            if len(chain) > depth:
                found[number[chain[depth]]] += now[chain[-1]] - before[chain[-1]]
    return found
