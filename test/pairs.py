"""Selections of cases: all pairs of some choices, or some of many. A thorough run has all cases."""

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

thorough = bool(os.environ.get("PAIRS_THOROUGH"))
"""Whether ``--thorough`` runs every case. It is set before tests are collected; ranks read it from the environment."""


def some(cases: Iterable[T], count: int, turn: int = 0) -> list[T]:
    """Return ``count`` of the cases, evenly spread; another ``turn`` selects others. A thorough run has all of them.

    Use it for similar cases that differ in one respect.

        >>> some("abcdef", 2), some("abcdef", 2, turn=1)
        (['a', 'd'], ['b', 'e'])
    """
    everything = list(cases)
    if thorough or count >= len(everything):
        return everything
    return [everything[(turn + i * len(everything) // count) % len(everything)] for i in range(count)]


def all_pairs(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cases with a value of each of ``choices``, such that every pair of values is in one of them.

    The result is the same at every call. Most failures of combined options need two of them; the fuzzer finds failures that
    need three. A thorough run has the full product.

        >>> all_pairs("ab", "xy", (1, 2))
        [('a', 'x', 1), ('a', 'y', 2), ('b', 'x', 2), ('b', 'y', 1)]
    """
    if thorough:
        return list(itertools.product(*choices))
    places = list(itertools.combinations(range(len(choices)), 2))
    rows = list(itertools.product(*map(range, map(len, choices))))
    open_pairs = {(i, j, row[i], row[j]) for row in rows for i, j in places}
    chosen = []
    while open_pairs:
        best = max(rows, key=lambda row: sum((i, j, row[i], row[j]) in open_pairs for i, j in places))
        open_pairs -= {(i, j, best[i], best[j]) for i, j in places}
        chosen.append(best)
    return [tuple(c[k] for c, k in zip(choices, row, strict=True)) for row in sorted(chosen)]
