"""Which units are on the host, where not all have to be.

[Note: Units on the host]
As few units are on the host as are enough, with everything else given up, gathering ahead, too; then as little else as is
enough with those. First those for which the fewest bytes are copied for each byte that is freed (not those that are frozen,
if others are left), small ones before large ones, and of those that are alike the last ones in the model. Their gradients
come first in backward, so nothing that is freed would be freed for longer elsewhere; their copies have most time; and forward
begins with units that need not come from the host. If it is not enough that all units are, the outermost one is, too.

Of few units any may be there in place of those: one large unit for two smaller ones. So of the sets that copy less those are
tried, the cheapest first, whose parts, gradients and optimizer state are as much as has to be freed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from flatshard.planning._report import Plan, UnitPlan

FEW = 16
"""Units, up to which others are tried, too."""
TRIES = 96
"""Sets of few units that are tried because they copy less."""


def best_on_host(plan: Plan, names: Sequence[str], like: Sequence[int]) -> list[int]:
    """The units, those first that are best on the host. ``like``: for each the one of ``names`` that ``plan`` has."""
    costs = [(round(copied / max(1, freed), 2), freed) for copied, freed in map(_sizes(plan).__getitem__, names)]
    return sorted(range(len(like)), key=lambda unit: (*costs[like[unit]], -unit))


def _sizes(plan: Plan) -> dict[str, tuple[int, int]]:
    """Of each unit the bytes that are copied in a step if it is on the host, and those that are freed."""
    return {
        unit.fqn: (copied_nbytes(plan, [unit.fqn]), unit.shard_nbytes + unit.gradient_nbytes + unit.optimizer_nbytes)
        for unit in plan.units
    }


def cheaper_on_host(
    few: Sequence[bool], plan: Plan, names: Sequence[str], least: float, over: Callable[[Sequence[bool]], float]
) -> Sequence[bool]:
    """The set of units that copies least, of those that are enough. ``few`` is enough.

    A set that is not enough tells about how many bytes are needed: those that it frees, and those by which it is over the
    limit. A unit on the host is on the device while it runs, so with a smaller largest unit less may be needed; for this a
    tenth of the largest is taken off, and such sets are not judged. Sets that free less than is needed are tried last.

    Args:
        few: for each unit, whether it is on the host.
        plan: of the model with no unit on the host.
        names: of the units.
        least: bytes to be freed.
        over: by how many bytes a set is over the limit.
    """
    if len(few) > FEW:
        return few
    sizes = [*map(_sizes(plan).__getitem__, names)]
    rows = [_HostSet.of(row, sizes) for row in itertools.product((False, True), repeat=len(few))]
    best = _HostSet.of(few, sizes)
    rows = sorted(row for row in rows if row.copied < best.copied and row.freed >= least)
    failed: dict[_HostSet, float] = {}  # with the bytes that are needed
    for is_last in (False, True):
        for row in rows:
            if row.copied >= best.copied or len(failed) == TRIES:
                break
            is_doubtful = any(row.freed < freed and row.largest >= other.largest for other, freed in failed.items())
            if row in failed or (is_doubtful and not is_last):
                continue
            if (more := over(row.on_host)) <= 0:
                best = row
                break
            failed[row] = row.freed + more - 0.1 * row.largest
    return best.on_host


class _HostSet(NamedTuple):
    """Units on the host."""

    copied: int  # bytes, in a step
    freed: int
    largest: int  # bytes that one of them frees
    on_host: tuple[bool, ...]  # for each unit

    @classmethod
    def of(cls, on_host: Sequence[bool], sizes: Sequence[tuple[int, int]]) -> _HostSet:
        """``sizes``: of each unit: see ``_sizes``."""
        copied, freed = zip((0, 0), *itertools.compress(sizes, on_host), strict=True)
        return cls(sum(copied), sum(freed), max(freed), tuple(on_host))


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
    return rows[enough]


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
