"""Choose which units are on the host, if not all have to be.

[Note: Units on the host]
As few units as are enough go to the host, with everything else given up, prefetch included. Then as little else as possible
is given up with those units there. The order of units is: fewest bytes copied per byte freed, then the smallest, then the
last in the model. The last units reduce their gradients first in backward, so what they free is free for longest, and forward
begins with units that need no copy from the host. If all units on the host are not enough, the outermost one goes there, too.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from flatshard.planning._report import StepPlan, UnitPlan


def best_on_host(plan: StepPlan, names: Sequence[str]) -> list[str]:
    """Return the units ``names`` of ``plan``, those first that are best on the host. [Note: Units on the host]"""
    costs = {}
    for unit in plan.units:
        freed = unit.shard_nbytes + unit.gradient_nbytes + unit.optimizer_nbytes
        costs[unit.fqn] = round(copied_nbytes(plan, [unit.fqn]) / max(1, freed), 2), freed
    last_first = names[::-1]  # of those that are alike
    return sorted(last_first, key=costs.__getitem__)


def fewest_on_host(order: Sequence[str], is_enough: Callable[[Sequence[str]], bool]) -> Sequence[str] | None:
    """Return as few units as are enough on the host, from the beginning of ``order``, or None if all are not enough."""
    counts = range(1, len(order) + 1)
    at = bisect.bisect_left(counts, True, key=lambda count: is_enough(order[:count]))
    return None if at == len(order) else order[: counts[at]]


def copied_nbytes(plan: StepPlan, units: Collection[str] | None) -> int:
    """Return the bytes copied between host and device in a step if ``units``, or all units if None, are on the host.

    These are shards to gather, and gradients, which are reduced once.
    """
    gathered: Counter[str] = Counter()
    for each in plan.collectives:
        gathered[each.unit] += each.nbytes * (each.kind == "all-gather")
    those = [unit for unit in plan.units if units is None or unit.fqn in units]
    return round(sum(copied_for(unit, gathered[unit.fqn]) + unit.gradient_nbytes for unit in those))


def copied_for(unit: UnitPlan, gathered: float) -> float:
    """Return the bytes copied for ``gathered`` bytes. A shard is copied in the dtype that it is kept in, then cast."""
    return unit.shard_nbytes * gathered / max(1, unit.unsharded_nbytes)
