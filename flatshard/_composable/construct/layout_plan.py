"""Plans the layout of one flat parameter: which parameter starts where. Integers only, no tensors.

[Note: Alignment]
Every parameter starts at a multiple of 16 bytes, for vectorised kernels. Every shard is a multiple of 128 bytes, or of 16
if it is smaller than a kilobyte: NCCL has been seen to lose up to 12x of an all-gather's bandwidth when the bytes per
rank are not a multiple of 16. The cost is at most ``16 * params`` bytes per flat parameter, and an eighth of a shard, or 16
bytes, per rank. So a small unit stays small over thousands of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from flatshard._handle.layout import FlatLayout, ParamInfo, dense_stride, row_major
from flatshard.layouts.packing import Piece, pack, round_up

PARAM_ALIGNMENT = 16  # bytes
SHARD_ALIGNMENT = 128  # bytes; a shard smaller than eight times as much uses PARAM_ALIGNMENT


class Cut(NamedTuple):
    """Where one parameter may be cut."""

    block: int = 1  # as in ``ParamInfo``
    by_rows: bool = False


def plan_layout(
    params: Sequence[tuple[str, Sequence[int], Sequence[int]]],
    itemsize: int,
    world_size: int,
    cuts: Sequence[Cut] | None = None,
) -> FlatLayout:
    """Lay ``params``, given as (FQN, shape, stride), end to end, and cut the result into ``world_size`` shards.

    ``itemsize`` is the element size in bytes. A dense stride (row-major, channels-last, transposed) is kept, so that kernels
    see the memory format that the user chose; any other (an expanded or a sliced tensor) is replaced by the row-major one.
    ``cuts`` says where each parameter may be cut; None: anywhere. The rows of a parameter that is cut by rows must be
    consecutive in memory. If they are not (transposed), its stride is replaced too.
    """
    align = max(1, PARAM_ALIGNMENT // itemsize)  # [Note: Alignment]
    numels = [math.prod(shape) for _, shape, _ in params]
    is_small = sum(round_up(n, align) for n in numels) * itemsize < 8 * SHARD_ALIGNMENT * world_size
    shard_align = max(1, (PARAM_ALIGNMENT if is_small else SHARD_ALIGNMENT) // itemsize)
    cuts = [Cut()] * len(params) if cuts is None or world_size == 1 else cuts
    if all(cut.block == 1 for cut in cuts):
        starts, end = [], 0
        for numel in numels:
            starts.append(round_up(end, align))
            end = starts[-1] + numel
        shard = round_up(-(-end // world_size), shard_align)
    else:
        pieces = [Piece(n, max(1, cut.block)) for n, cut in zip(numels, cuts, strict=True)]
        starts, shard = pack(pieces, world_size, align, shard_align)
    infos = []
    for (fqn, shape, stride), numel, start, cut in zip(params, numels, starts, cuts, strict=True):
        cut_by_rows = cut.by_rows and cut.block < numel
        stride = _by_rows(shape, stride) if cut_by_rows else dense_stride(shape, stride)
        infos.append(ParamInfo(fqn, tuple(shape), stride, numel, start, max(1, cut.block), cut.by_rows))
    return FlatLayout(tuple(infos), world_size, shard)


def balanced(layout: FlatLayout, works: Sequence[int], loads: list[int]) -> FlatLayout:
    """``layout`` with its shards assigned to other ranks, to balance work on whole parameters over many layouts.

    ``works``: the work of each parameter. ``loads``: the work of each rank so far; the work of this layout is added to it.
    Shards that share a parameter with a neighbour keep their rank. The largest work goes to the rank with the smallest load.
    """
    size = layout.shard_numel
    work = [0] * layout.world_size
    fixed: set[int] = set()
    for index, amount in enumerate(works):
        holders = layout.holders(index)
        if len(holders) > 1:
            fixed.update(holders)
        elif holders:
            work[holders[0]] += amount
    shards = sorted((r for r in range(layout.world_size) if r not in fixed), key=lambda r: -work[r])
    ranks = sorted(sorted(shards), key=lambda r: loads[r])
    moves = dict(zip(shards, ranks, strict=True))
    for shard, amount in enumerate(work):
        loads[moves.get(shard, shard)] += amount
    params = []
    for info in layout.params:
        shard = info.start // size if info.numel else 0
        params.append(replace(info, start=info.start + (moves.get(shard, shard) - shard) * size))
    return replace(layout, params=tuple(params))


def _by_rows(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    dense = dense_stride(shape, stride)
    ordered = not shape or shape[0] < 2 or dense[0] == math.prod(shape[1:])
    return dense if ordered else row_major(shape)
