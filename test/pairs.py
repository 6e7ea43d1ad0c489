"""All pairs of some choices, in fewer cases than their product has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def all_pairs(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases, one of each of ``choices`` in each, such that every two values of two choices come together in one of them.

    The same at every call. Most mistakes in how options work together are mistakes of two of them; what takes three is for
    the fuzzers.

        >>> all_pairs("ab", "xy", (1, 2))
        [('a', 'x', 1), ('a', 'y', 2), ('b', 'x', 2), ('b', 'y', 1)]
    """
    places = list(itertools.combinations(range(len(choices)), 2))
    rows = list(itertools.product(*map(range, map(len, choices))))
    open_pairs = {(i, j, row[i], row[j]) for row in rows for i, j in places}
    chosen = []
    while open_pairs:
        best = max(rows, key=lambda row: sum((i, j, row[i], row[j]) in open_pairs for i, j in places))
        open_pairs -= {(i, j, best[i], best[j]) for i, j in places}
        chosen.append(best)
    return [tuple(c[k] for c, k in zip(choices, row, strict=True)) for row in sorted(chosen)]
