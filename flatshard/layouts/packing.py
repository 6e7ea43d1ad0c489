"""Places parameters so that cuts between equal shards fall only between their blocks. Integers only.

[Note: Packing]
A piece has ``numel`` elements, in blocks of ``block`` elements that must not be cut. All shards have ``size`` elements, so
cuts are at the multiples of ``size``. Inside a piece there is

- no cut, if the piece lies in one shard;
- one cut, if it comes a multiple of ``block`` elements after the piece's start, which can be chosen so;
- several cuts, only if ``size`` itself is a multiple of ``block``.

So a family of sizes is tried for each number of pieces that may have several cuts, taken from the largest piece down. In a
family, ``size`` is a multiple of the blocks of these pieces, and large enough for the others. Families are tried in the order
of their smallest size, each by a binary search over its multiples. (The blocks are those of veScale's planner, arXiv
2602.22437. To find the optimum is NP-hard, like bin packing.) To test a size, each piece is put at the first place where it
fits, in the given order, and then from the largest to the smallest piece. A gap before a piece can take smaller pieces that
come later, so the order in memory may differ from the order of the pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """A range of elements to place."""

    numel: int
    block: int  # elements that must not be cut, counted from the piece's start


def pack(pieces: Sequence[Piece], world_size: int, align: int, shard_align: int) -> tuple[list[int], int]:
    """Return the start of each piece, and the smallest size of shards that was found. [Note: Packing]

    Starts are multiples of ``align``. The size is a multiple of ``shard_align`` (itself a multiple of ``align``).
    """
    total = sum(round_up(p.numel, align) for p in pieces)
    smallest = max([-(-total // world_size), *(min(p.block, p.numel) for p in pieces)])
    best: tuple[list[int], int] | None = None
    for least, multiple in sorted(_families(pieces, smallest, align, shard_align)):
        if best is not None and least >= best[1]:
            break
        found = _search(pieces, world_size, align, least, multiple, None if best is None else best[1])
        best = found or best
    assert best is not None
    return best


def _families(pieces: Sequence[Piece], smallest: int, align: int, shard_align: int) -> Iterator[tuple[int, int]]:
    """Yield (smallest size, step between sizes) for each number of largest pieces that may have several cuts."""
    ordered = sorted(set(pieces), reverse=True)
    multiple = shard_align
    for count in range(len(ordered) + 1):
        if count:
            multiple = math.lcm(multiple, ordered[count - 1].block)
        rest = max((_least_for_one_cut(p, align) for p in ordered[count:]), default=0)
        yield round_up(max(smallest, rest, 1), multiple), multiple


def _least_for_one_cut(piece: Piece, align: int) -> int:
    """Return the smallest shard size with which ``piece`` has at most one cut."""
    if piece.block == 1:
        return 0
    step = math.lcm(piece.block, align)  # the distance from its start to the cut is a multiple of this
    before = piece.numel // (2 * step)
    return min(piece.numel, before * step + min(step, piece.numel - 2 * before * step))


def _search(
    pieces: Sequence[Piece], world_size: int, align: int, least: int, multiple: int, bound: int | None
) -> tuple[list[int], int] | None:
    """Return the smallest size below ``bound`` that was found to work, among ``least``, ``least + multiple``, ..."""

    def attempt(steps: int) -> tuple[list[int], int] | None:
        size = least + steps * multiple
        if bound is not None and size >= bound:
            return None
        starts = _place(pieces, world_size, align, size)
        return None if starts is None else (starts, size)

    low, high = -1, 0  # `low` does not work, `high` is tried next
    while (found := attempt(high)) is None:
        if bound is not None and least + high * multiple >= bound:
            return None
        low, high = high, 2 * high + 1
    while high - low > 1:
        middle = (low + high) // 2
        if (better := attempt(middle)) is not None:
            found, high = better, middle
        else:
            low = middle
    return found


def _place(pieces: Sequence[Piece], world_size: int, align: int, size: int) -> list[int] | None:
    """Return the start of each piece for shards of ``size``, or None if the pieces fit in neither of two orders."""
    given = range(len(pieces))
    descending = sorted(given, key=lambda i: (-pieces[i].numel, i))
    for order in (given, descending):
        starts = _place_in_order(pieces, order, size * world_size, align, size)
        if starts is not None:
            return starts
    return None


def _place_in_order(pieces: Sequence[Piece], order: Sequence[int], end: int, align: int, size: int) -> list[int] | None:
    starts = [0] * len(pieces)
    free = [(0, end)]
    for index in order:
        piece = pieces[index]
        if not piece.numel:
            continue
        for position, (first, last) in enumerate(free):
            start = _first_start(piece, first, last, align, size)
            if start is not None:
                starts[index] = start
                after = round_up(start + piece.numel, align)
                free[position : position + 1] = [(a, b) for a, b in ((first, start), (after, last)) if a < b]
                break
        else:
            return None
    return starts


def _first_start(piece: Piece, first: int, last: int, align: int, size: int) -> int | None:
    """Return the first start of ``piece`` in a free range with all its cuts between blocks, or None."""
    if last - first < piece.numel:
        return None
    step = math.lcm(piece.block, align)
    candidates = []
    # Before the range's first cut, and in the shard after it. Every later shard has the same possibilities.
    lower = first
    for cut in (first // size + 1, first // size + 2):
        boundary = cut * size
        candidates += [lower, boundary - (boundary - lower) // step * step]
        lower = boundary
    for start in candidates:
        if start + piece.numel <= last and _is_uncut(piece, start, size):
            return start
    return None


def _is_uncut(piece: Piece, start: int, size: int) -> bool:
    cut = (start // size + 1) * size  # the first cut after the start
    stop = start + piece.numel
    if cut >= stop:
        return True
    return (cut - start) % piece.block == 0 and (cut + size >= stop or size % piece.block == 0)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple
