"""Which units are on the host, where not all have to be.

[Note: Units on the host]
As few units are on the host as are enough, with everything else given up, gathering ahead, too; then as little else as is
enough with those. First those for which the fewest bytes are copied for each byte that is freed (not those that are frozen,
if others are left), small ones before large ones, and of those that are alike the last ones in the model. Their gradients
come first in backward, so nothing that is freed would be freed for longer elsewhere; their copies have most time; and forward
begins with units that need not come from the host. If it is not enough that all units are, the outermost one is, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from flatshard.planning._report import Plan, UnitPlan

FEW = 16
"""Units, up to which it is tried to leave out each of them."""


def best_on_host(plan: Plan, names: Sequence[str], like: Sequence[int]) -> list[int]:
    """The units, those first that are best on the host. ``like``: for each the one of ``names`` that ``plan`` has."""
    units = {unit.fqn: unit for unit in plan.units}
    costs = []
    for name in names:
        freed = units[name].shard_nbytes + units[name].gradient_nbytes + units[name].optimizer_nbytes
        costs.append((round(copied_nbytes(plan, [name]) / max(1, freed), 2), freed))
    return sorted(range(len(like)), key=lambda unit: (*costs[like[unit]], -unit))


def fewest_on_host(
    order: Sequence[int],
    can_have: Callable[[Sequence[bool]], bool] | None,
    is_enough: Callable[[Sequence[bool]], bool],
) -> Sequence[bool] | None:
    """For each unit whether it is on the host: as few as are enough, from the beginning of ``order``. None: all of them are
    not enough.

    Args:
        order: the units, by number.
        can_have: which rows are possible; None: all.
        is_enough: whether a row is.
    """
    rows = [[False] * len(order) for _ in order]
    for at, unit in enumerate(order):
        for row in rows[at:]:
            row[unit] = True
    rows = [row for row in rows if can_have is None or can_have(row)]
    enough, less = len(rows), -1
    while enough - less > 1:
        middle = (enough + less) // 2
        enough, less = (middle, less) if is_enough(rows[middle]) else (enough, middle)
    if enough == len(rows):
        return None
    few = rows[enough]
    for unit in reversed(order if len(order) <= FEW else ()):
        fewer = [on_host and at != unit for at, on_host in enumerate(few)]
        if few[unit] and is_enough(fewer):
            few = fewer
    return few


def copied_nbytes(plan: Plan, units: Collection[str] | None) -> int:
    """Bytes between host and device in a step, if ``units`` are on the host: parts to gather, and gradients, which are
    reduced once. None: all are."""
    gathered: Counter[str] = Counter()
    for each in plan.collectives:
        gathered[each.unit] += each.nbytes * (each.kind == "all-gather")
    those = [unit for unit in plan.units if units is None or unit.fqn in units]
    return round(sum(copied_for(unit, gathered[unit.fqn]) + unit.gradient_nbytes for unit in those))


def copied_for(unit: UnitPlan, gathered: float) -> float:
    """Bytes that are copied so that so many are gathered. A part is copied as it is kept, and cast on the device."""
    return unit.shard_nbytes * gathered / max(1, unit.unsharded_nbytes)
