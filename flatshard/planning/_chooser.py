"""The cheapest choice whose memory, by its timeline, is within a limit.

[Note: Choosing]
The memory of each stretch of a step is a sum with one term per unit, which follows from the unit's state and that of the unit
before it. The search extends *partial choices* unit by unit, in the order of forward, and adds the terms of all stretches. It
drops a partial choice in two cases: it exceeds the limit even if all later units take the least; or a cheaper one that ends
with the same state takes no more in any stretch that later units still change. If units run one after the other, what is
dropped cannot be part of the cheapest choice.
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
"""Most partial choices that are kept for each state of the last unit."""
MOST_OF_MANY = 25
"""Most partial choices of a model that has more than ``FEW`` units."""
FEW = 16


class _Partials(NamedTuple):
    """Partial choices that end with the same state."""

    costs: Tensor
    peaks: Tensor  # the most that each takes in closed stretches, which later units do not change
    rows: Tensor  # what each takes in each open stretch
    before: Tensor  # of each: the state of the unit before, and the number among its partial choices


def cheapest(timeline: Timeline, costs: Costs, limit: float, start: Choices, recomputes: bool) -> Choices | None:
    """Return the choice of the least cost within ``limit``, or None if there is none. It gives up something of ``start``."""
    return Sums(timeline, start, recomputes).cheapest(costs, limit)


class Sums:
    """The memory of each stretch as sums over units, for any costs and limit. [Note: Choosing]"""

    def __init__(self, timeline: Timeline, start: Choices, recomputes: bool) -> None:
        self.timeline = timeline
        options = options_of(start[0], recomputes)
        self.states = states_of(timeline, options)
        self.stays_until_change = start[0].stays == UNTIL_CHANGE
        self.base, self.rows = _rows(timeline, options)
        self.last_of = self.base.new_tensor(
            [-1 if row.pair[1] is None else timeline.place[row.pair[1]] for row in timeline.rows]
        )
        _shift_forward(self.rows, self.last_of)
        # For each unit and state: the states that the unit before may have.
        self.befores = _befores(timeline, self.states)
        # For each unit: the least that it and later ones add, by the state before it, and the stretches that they change.
        least, changes = torch.zeros_like(self.base), torch.zeros_like(self.base, dtype=torch.bool)
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
        """Return the choice of the least cost within ``limit``, or None if there is none."""
        most = MOST if len(self.timeline.order) <= FEW else MOST_OF_MANY
        steps: list[list[_Partials]] = []
        nothing = self.base.new_zeros(1)
        front = [_Partials(nothing.double(), nothing, self.base[None], self.base.new_zeros(1, 2))]
        open_rows = torch.arange(len(self.base), device=self.base.device)
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
        return _trace_back(self.timeline, self.states, steps, *min(found)[2:])


def states_of(timeline: Timeline, options: Sequence[Keeps]) -> list[list[State]]:
    """Return the states of each unit, in the order of forward, if it chooses from ``options``."""
    return [timeline.nesting.states(unit, options) for unit in timeline.order]


def _befores(timeline: Timeline, states: Sequence[list[State]]) -> list[list[tuple[int, ...]]]:
    """Return for each unit and state the numbers of the states that the unit before may have."""
    found: list[list[tuple[int, ...]]] = [[(0,) for _ in states[0]]]
    for place, (before, here) in enumerate(itertools.pairwise(states), start=1):
        last, unit = timeline.order[place - 1 : place + 1]
        rows = [[timeline.nesting.follows(last, each, unit, state) for each in before] for state in here]
        found.append([tuple(itertools.compress(range(len(before)), row)) for row in rows])
    return found


def _joined(front: Sequence[_Partials], befores: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return costs, peaks and links of the partial choices that end with the states ``befores``."""
    return (
        torch.cat([front[before].costs for before in befores]),
        torch.cat([front[before].peaks for before in befores]),
        torch.cat([_links(before, front[before].before) for before in befores]),
    )


def _shift_forward(rows: list[Tensor], last_of: Tensor) -> None:
    """Shift terms in ``rows`` from a unit to the next, so that a stretch is closed as soon as possible.

    The memory that two neighbours share is counted with the later one. In a stretch that the later one does not reach, it
    takes back what the earlier one added. So the part that follows from a unit's own state is moved to the next unit's row.
    """
    over = torch.zeros_like(rows[0][0])
    for place, each in enumerate(rows):
        more = (each[0] - each[0, 0]) * (last_of < place) if place < len(rows) - 1 else torch.zeros_like(each[0])
        each += (over[:, None] if place else 0) - more
        over = more


def _links(before: int, partials: Tensor) -> Tensor:
    """Return rows of the state ``before`` and the number of each of ``partials``."""
    numbers = torch.arange(len(partials), device=partials.device)
    return torch.stack([torch.full_like(numbers, before), numbers], 1)


def _within(partials: _Partials, rest: Tensor, still: Tensor, limit: float) -> _Partials:
    """Return the partial choices that are within ``limit`` if later units add ``rest``, with the stretches ``still`` open."""
    totals = partials.rows + rest
    peaks = torch.cat([partials.peaks[:, None], totals[:, ~still]], 1).amax(1)
    fits = torch.cat([peaks[:, None], totals], 1).amax(1) <= limit
    return _Partials(partials.costs[fits], peaks[fits], partials.rows[fits][:, still], partials.before[fits])


def peaks_along(timeline: Timeline, start: Choices, steps: Sequence[tuple[int, Keeps]], recomputes: bool) -> list[int]:
    """Return the peak in bytes after each of ``steps``, which give up something of one unit each."""
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


def _trace_back(
    timeline: Timeline, states: Sequence[list[State]], steps: Sequence[list[_Partials]], at: int, number: int
) -> Choices:
    """Return the choice that ends with state ``at``, and is the one of this ``number`` with it."""
    found: dict[int, Keeps] = {}
    for unit, those, front in zip(reversed(timeline.order), reversed(states), reversed(steps), strict=True):
        found[unit] = those[at][0]
        at, number = front[at].before[number].tolist()
    return tuple(found[unit] for unit in range(len(found)))


def _unbeaten(partials: _Partials, coming: Tensor, by_peak: bool, most: int) -> _Partials:
    """Return the partial choices that no cheaper one beats in the stretches ``coming``, or ``by_peak`` in closed ones."""
    if not len(partials.costs):
        return partials
    order = torch.argsort(partials.peaks, stable=True)
    order = order[torch.argsort(partials.costs[order], stable=True)]
    compared = partials.rows[order][:, coming]
    if by_peak:
        over = torch.cat([partials.peaks[order][:, None], partials.rows[order][:, ~coming]], 1).amax(1, keepdim=True)
        compared = torch.cat([compared, over], 1)
    elif not bool(coming.any()):
        compared = partials.rows[order]
    is_lower = torch.ones_like(order, dtype=torch.bool)
    is_lower[1:] = (compared[1:] < compared.cummin(0).values[:-1]).any(1) if compared.size(1) else False
    kept = order[is_lower]
    if len(kept) > most:
        kept = kept[torch.linspace(0, len(kept) - 1, most, device=kept.device).round().long()]
    return _Partials(partials.costs[kept], partials.peaks[kept], partials.rows[kept], partials.before[kept])


def _rows(timeline: Timeline, options: Sequence[Keeps]) -> tuple[Tensor, list[Tensor]]:
    """Return the memory of each stretch that no choice changes, and the terms of each unit in the order of forward.

    Terms are indexed by the state of the unit before (one row for the first unit), the unit's own state, and the stretch.
    """
    count = len(timeline.rows)
    # On the CPU whatever the default device is. All other tensors of the search are on the device of this one.
    base = torch.full((count,), timeline.begins, dtype=torch.int64, device="cpu")
    states = states_of(timeline, options)
    befores: list[Sequence[State | None]] = [[None], *states]
    found = [base.new_zeros(len(b), len(s), count) for b, s in zip(befores, states, strict=False)]
    for number, row in enumerate(timeline.rows):
        if row.pair[1] is None:
            taken, left = timeline.taken(row, (None, None))
            base[number] += taken
            base[number + 1 :] += left
            continue
        place = timeline.place[row.pair[1]]
        each = [[timeline.taken(row, pair_of(before, state)) for state in states[place]] for before in befores[place]]
        taken_left = base.new_tensor(each)[..., None]
        found[place][..., number : number + 1] += taken_left[:, :, 0]
        found[place][..., number + 1 :] += taken_left[:, :, 1]
    alive = base.new_tensor([row.alive for row in timeline.rows])
    here = [torch.zeros_like(base) for _ in timeline.order]
    for number, row in enumerate(timeline.rows):
        for unit, size in timeline.here(row).items():
            here[timeline.place[unit]][number] = size
    for place, unit in enumerate(timeline.order):
        for second, (keeps, _) in enumerate(states[place]):
            stays = torch.zeros_like(base, dtype=torch.bool)
            if keeps.stays == UNTIL_CHANGE:
                stays[:] = True
            elif keeps.stays == UNTIL_BACKWARD:
                stays = alive > place
            found[place][:, second] += stays * (timeline.size[unit] - here[place])
    return base, found
