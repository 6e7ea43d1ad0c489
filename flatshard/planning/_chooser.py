"""The cheapest choice whose memory, by its timeline, is within a limit.

[Note: Choosing]
What each stretch of a step takes is a sum: of each unit one row of numbers, which follows from its own choice and that of
the one before it. The search goes along the units in the order of forward, and adds their rows. Of the partial choices that
end with the same choice it keeps those that no cheaper one beats in all stretches to come, and none that would be over the
limit if all later units took the least. Units mostly run one after the other. Then what the first ones leave is the same in
all stretches to come, and what is dropped cannot be part of the cheapest choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatshard.planning._timeline import UNTIL_BACKWARD, UNTIL_CHANGE, Choices, Costs, Keeps, Timeline, options_of

MOST = 4000
"""Partial choices that are kept for each choice of the last unit, of up to ``FEW`` units; of more units a 64th of that."""
FEW = 16


class _Partials(NamedTuple):
    """Partial choices that end with the same choice."""

    costs: Tensor
    rows: Tensor  # what each takes in each stretch
    before: Tensor  # of each: the choice of the unit before, and its number among those of it


def cheapest(timeline: Timeline, costs: Costs, limit: float, start: Choices, recomputes: bool) -> Choices | None:
    """The choice of the least cost within ``limit`` that gives up something of ``start``. None: there is none."""
    options = options_of(start[0], recomputes)
    base, rows = _rows(timeline, options)
    least = [torch.zeros_like(base)]
    for row in reversed(rows):
        least.append(least[-1] + row.flatten(0, 1).amin(0))
    least.reverse()
    last_of = torch.tensor([-1 if r.pair[1] is None else timeline.place[r.pair[1]] for r in timeline.rows])
    steps: list[list[_Partials]] = []
    front = [_Partials(torch.zeros(1, dtype=torch.float64), base[None], torch.zeros(1, 2, dtype=torch.long))]
    for place, unit in enumerate(timeline.order):
        grown = []
        for at, keeps in enumerate(options):
            taken = [each.rows + rows[place][before, at] for before, each in enumerate(front)]
            links = [
                torch.stack([torch.full((len(each.costs),), before), torch.arange(len(each.costs))], 1)
                for before, each in enumerate(front)
            ]
            every = _Partials(torch.cat([each.costs for each in front]), torch.cat(taken), torch.cat(links))
            fits = (every.rows + least[place + 1]).amax(1) <= limit
            here = _Partials(every.costs[fits] + costs.of(unit, keeps), every.rows[fits], every.before[fits])
            over = (last_of <= place) if start[0].stays == UNTIL_CHANGE else None
            most = MOST if len(timeline.order) <= FEW else MOST // 64
            grown.append(_unbeaten(here, last_of > place, over, most))
        front = grown
        steps.append(front)
    best: tuple[float, float, int, int] | None = None
    for at, each in enumerate(front):
        for number, (cost, most_bytes) in enumerate(zip(each.costs.tolist(), each.rows.amax(1).tolist(), strict=True)):
            if best is None or (cost, most_bytes) < best[:2]:
                best = cost, most_bytes, at, number
    return None if best is None else _followed(timeline, options, steps, best[2], best[3])


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


def _unbeaten(partials: _Partials, coming: Tensor, over: Tensor | None, most: int) -> _Partials:
    """Those that no cheaper one beats in the stretches that are ``coming``; and at the highest of those that are ``over``."""
    if not len(partials.costs):
        return partials
    order = torch.argsort(partials.costs, stable=True)
    if not bool(coming.any()):
        coming = ~coming
    looked_at = partials.rows[order][:, coming]
    if over is not None and bool(over.any()):
        looked_at = torch.cat([looked_at, partials.rows[order][:, over].amax(1, keepdim=True)], 1)
    lowest = looked_at.cummin(0).values
    is_lower = torch.ones(len(order), dtype=torch.bool)
    is_lower[1:] = (looked_at[1:] < lowest[:-1]).any(1)
    kept = order[is_lower]
    if len(kept) > most:
        kept = kept[torch.linspace(0, len(kept) - 1, most).round().long()]
    return _Partials(partials.costs[kept], partials.rows[kept], partials.before[kept])


def _rows(timeline: Timeline, options: Sequence[Keeps]) -> tuple[Tensor, list[Tensor]]:
    """What each stretch takes whatever is chosen, and what each unit adds, in the order of forward: by the choice of the unit
    before (one row for the first unit), its own choice, and the stretch."""
    count = len(timeline.rows)
    base = torch.full((count,), timeline.begins, dtype=torch.int64)
    befores = [[None] if place == 0 else list(options) for place in range(len(timeline.order))]
    found = [torch.zeros(len(before), len(options), count, dtype=torch.int64) for before in befores]
    for number, row in enumerate(timeline.rows):
        if row.pair[1] is None:
            taken, left = timeline.taken(row, (None, None))
            base[number] += taken + row.more
            base[number + 1 :] += left
            continue
        place = timeline.place[row.pair[1]]
        for first, before in enumerate(befores[place]):
            for second, keeps in enumerate(options):
                taken, left = timeline.taken(row, (before, keeps))
                found[place][first, second, number] += taken
                found[place][first, second, number + 1 :] += left
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
