"""Where parameters lie so that cuts between equal shards fall between their blocks only: in integers.

[Note: Packing]
A piece has ``numel`` elements, in blocks of ``block`` that must not be cut. Shards all have ``size`` elements, so cuts are at
its multiples. Inside a piece there is

- no cut, if it lies in one shard;
- one cut, if it begins a multiple of ``block`` before it: its start can be chosen so;
- or several, and then ``size`` itself must be a multiple of ``block``.

So for each number of pieces, the largest ones, that may have several cuts, ``size`` is a multiple of their blocks, and not
too small for the others: that gives the sizes to try, in increasing order, each in steps of that multiple, and a binary
search over the steps. (After veScale's planner, arXiv 2602.22437, whose blocks are the same; finding the optimum is NP-hard,
as packing bins is.) Whether pieces fit a size is tried by putting each at the first place that there is, in the given order
and from the largest to the smallest. Room left before a piece takes later, smaller ones: so pieces are permuted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """What is to be placed."""

    numel: int
    block: int  # elements that stay together, counted from the first


def pack(pieces: Sequence[Piece], world_size: int, align: int, shard_align: int) -> tuple[list[int], int]:
    """The first element of each piece, and the shards' size: the smallest found. [Note: Packing]

    Starts are multiples of ``align``, the size is one of ``shard_align`` (itself a multiple of ``align``).
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
    """(least size, what it is a multiple of), for each number of the largest pieces that may have several cuts."""
    ordered = sorted(set(pieces), reverse=True)
    multiple = shard_align
    for count in range(len(ordered) + 1):
        if count:
            multiple = math.lcm(multiple, ordered[count - 1].block)
        rest = max((_least_for_one_cut(p, align) for p in ordered[count:]), default=0)
        yield round_up(max(smallest, rest, 1), multiple), multiple


def _least_for_one_cut(piece: Piece, align: int) -> int:
    """The smallest size of shards in which ``piece`` can lie with at most one cut."""
    if piece.block == 1:
        return 0
    step = math.lcm(piece.block, align)  # of its start, before a cut
    before = piece.numel // (2 * step)
    return min(piece.numel, before * step + min(step, piece.numel - 2 * before * step))


def _search(
    pieces: Sequence[Piece], world_size: int, align: int, least: int, multiple: int, bound: int | None
) -> tuple[list[int], int] | None:
    """The smallest size below ``bound`` of one family that was found to do."""

    def attempt(steps: int) -> tuple[list[int], int] | None:
        size = least + steps * multiple
        if bound is not None and size >= bound:
            return None
        starts = _place(pieces, world_size, align, size)
        return None if starts is None else (starts, size)

    low, high = -1, 0  # `low` fails, `high` is tried
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
    """Starts with shards of ``size``; None if no order that is tried fits."""
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
    """The first start of ``piece`` in the free range, where every cut inside of it is between blocks; None: nowhere."""
    if last - first < piece.numel:
        return None
    step = math.lcm(piece.block, align)
    candidates = []
    # In front of the first cut of the range, and in the whole shard after it, which stands for all the others.
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
    cut = (start // size + 1) * size  # the first that may lie inside
    stop = start + piece.numel
    if cut >= stop:
        return True
    return (cut - start) % piece.block == 0 and (cut + size >= stop or size % piece.block == 0)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple
