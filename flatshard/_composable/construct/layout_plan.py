"""Plans the flat parameters of a unit, and where each parameter lies in them. Nothing is changed.

[Note: Alignment]
Every parameter starts at a multiple of 16 bytes, for vectorised kernels. Every shard is a multiple of 128 bytes, or of 16
if it is smaller than a kilobyte: NCCL has been seen to lose up to 12x of an all-gather's bandwidth when the bytes per
rank are not a multiple of 16. On thousands of ranks, 16 bytes for each can be many times the unit. A collective of a few
bytes per rank takes the time of its messages, at any bandwidth. So where the ends of shards would take over an eighth of the
unit, and over 4 KiB, they are multiples of 8 bytes, 4, 2, or one element. The cost is at most ``16 * params`` bytes per flat
parameter, and for the ends of shards an eighth of the unit, 4 KiB, or an element per rank, the largest of these.

[Note: A network and its frozen copy]
A target or a teacher (BYOL, MoCo, DINO) is a frozen copy of a network, and follows it: ``target.lerp_(online, 0.01)`` for
each parameter. So on each rank the shards of both must be the same elements. Two units with the same shapes are cut alike.
In one unit, both are cut alike if each has a flat parameter of its own. So a network and its copy are laid out apart from the
rest of the unit (a predictor), which takes one more collective. A copy is a frozen module with the names, shapes and dtypes
of one module that is not frozen. It must be most of what is frozen in the unit: else one frozen layer of many would be taken
for a copy.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from flatshard._base.config import CPUOffload, MixedPrecision
from flatshard._composable.construct.partition import PlannedUnit
from flatshard._handle.adapters.encoding import encoded_dtype
from flatshard._handle.adapters.tensor_subclass import TensorSubclass, wrapping_of
from flatshard._handle.adapters.wrapping import Wrapping
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.layout import (
    FlatLayout,
    FlatOptions,
    Groups,
    ParamInfo,
    PlannedFlat,
    PlannedParam,
    dense_stride,
    row_major,
)
from flatshard.layouts import Elements, Layout, LayoutChoice, Rows, Whole, excess_padding, layout_for, work_of
from flatshard.layouts.packing import Piece, pack

PARAM_ALIGNMENT = 16  # bytes
SHARD_ALIGNMENT = 128  # bytes; a shard smaller than eight times as much uses PARAM_ALIGNMENT, or less
LITTLE_PADDING = 4096  # bytes of a unit after its last parameter that are worth an alignment

Loads = dict[Groups | None, Counter[int]]
"""The work of each rank on uncut parameters so far, for each of the groups that parameters are sharded over."""


class _Member(NamedTuple):
    """A parameter of a flat parameter to plan."""

    owned: PlannedParam
    plain: torch.Tensor  # the tensor that is sharded: for a tensor subclass the plain tensor inside
    layout: Layout


class Cut(NamedTuple):
    """The places at which one parameter may be cut."""

    block: int = 1  # as in ``ParamInfo``
    by_rows: bool = False


# -- flat parameters ---------------------------------------------------------------------------------------------------


def plan_flats(unit: PlannedUnit, world_size: int, loads: Loads) -> list[PlannedFlat]:
    """Return the flat parameters of ``unit`` over ``world_size`` ranks, in the order of their first parameters.

    The work of these flat parameters is added to ``loads``.

    Raises:
        TypeError: a callable layout did not return a layout.
        ValueError: a strict layout would exceed its limit on padding, or a parameter's dtype is none that it can have.
    """
    config = unit.config
    is_sharded = not config.strategy.is_replicated
    sizes = {groups: world_size if groups is None else groups[0].size() for groups in unit.groups}
    found: dict[tuple[Groups | None, torch.dtype, bool, FlatOptions, bool], list[_Member]] = {}
    copied = _copied(unit.owned)
    wrappings = [wrapping_of(owned.param) for owned in unit.owned]
    for owned, wrapping in zip(unit.owned, wrappings, strict=True):
        param = owned.param
        plain = param if wrapping is None else wrapping.unwrap(param)
        options = _options(owned, plain, wrapping, config.mixed_precision, config.cpu_offload)
        layout = Elements() if config.layout is None else layout_for(config.layout, owned.fqn, param)
        if isinstance(wrapping, TensorSubclass):
            if is_sharded and sizes[owned.groups] > 1 and FlatParam.encoded is not None:
                options = replace(options, encoded_dtype=encoded_dtype(wrapping))
            if len(wrapping.leaves) > 1:
                layout = Elements()  # sharded as bytes
        key = owned.groups, plain.dtype, param.requires_grad, options, owned.fqn in copied
        found.setdefault(key, []).append(_Member(owned, plain, layout))
    flats = []
    for (groups, dtype, _, options, _), members in found.items():
        size = sizes[groups]
        works = loads.setdefault(groups, Counter())
        flats.append(_lay_out(unit.fqn, members, dtype, options, size if is_sharded else 1, works))
    return flats


def plan_again(
    flat: FlatParam, unit: str, choice: LayoutChoice, world_size: int, loads: dict[int, Counter[int]]
) -> PlannedFlat:
    """Plan ``flat`` of ``unit``, which is sharded already, over ``world_size`` ranks. Its parameters have stand-ins on meta.

    The work is added to ``loads``, which has that of each rank by the number of ranks.
    """
    members = []
    for param, info in zip(flat.params, flat.layout.params, strict=True):
        unsharded = torch.empty_strided(info.shape, info.stride, dtype=flat.kind.dtype, device="meta")
        stand_in = nn.Parameter(unsharded, param.requires_grad and flat.kind.is_trainable)
        stand_in.__dict__.update({k: v for k, v in vars(param).items() if k != "_flatshard_info"})
        members.append(_Member(PlannedParam(info.fqn, stand_in), stand_in, layout_for(choice, info.fqn, stand_in)))
    works = loads.setdefault(world_size, Counter())
    return _lay_out(unit, members, flat.kind.dtype, flat.options, world_size, works)


def _options(
    owned: PlannedParam,
    plain: torch.Tensor,
    wrapping: Wrapping | None,
    policy: MixedPrecision,
    offload: CPUOffload,
) -> FlatOptions:
    """Return the options of one parameter, of which the tensor ``plain`` is sharded."""
    placed = offload.offload_params, offload.pin_memory
    ignored = policy.module_classes_to_ignore
    if not plain.is_floating_point() or any([isinstance(m, ignored) for m, _ in owned.registrations]):
        return FlatOptions(offload=placed[0], pin_memory=placed[1])
    # A tensor subclass may not be cast, because only the class knows how. Its gradients are reduced as the policy says.
    compute = policy.param_dtype
    if policy.param_dtype_override_fn is not None:
        compute = policy.compute_dtype_of(owned.fqn, owned.param)
    if compute is not None and wrapping is not None and not wrapping.computes_in(compute):
        compute = None
    return FlatOptions(
        compute, policy.reduce_dtype, policy.reduce_in_param_dtype, policy.keep_low_precision_grads, *placed
    )


def _copied(owned: Sequence[PlannedParam]) -> set[str]:
    """Return the FQNs of parameters in a network and in its copy. [Note: A network and its frozen copy]"""
    frozen = {each.fqn: each.param.numel() for each in owned if not each.param.requires_grad}
    if len(frozen) in (0, len(owned)):
        return set()
    inside = defaultdict[str, list[PlannedParam]](list)  # by the FQN of a module
    for each in owned:
        for at in (i for i, char in enumerate(each.fqn) if char == "."):
            inside[each.fqn[:at]].append(each)
    alike = defaultdict[object, tuple[list[str], list[str]]](lambda: ([], []))  # modules that are frozen, and others
    for fqn, params in inside.items():
        if len({each.param.requires_grad for each in params}) == 1:
            kind = tuple((each.fqn[len(fqn) :], each.param.shape, each.param.dtype) for each in params)
            alike[kind][params[0].param.requires_grad].append(fqn)
    pairs = [
        fqn for copies, networks in alike.values() if len(copies) == len(networks) == 1 for fqn in copies + networks
    ]
    copied = {each.fqn for fqn in pairs for each in inside[fqn]}
    return copied if 2 * sum(frozen[fqn] for fqn in copied & frozen.keys()) > sum(frozen.values()) else set()


def _lay_out(
    unit: str,
    members: list[_Member],
    dtype: torch.dtype,
    options: FlatOptions,
    world_size: int,
    loads: Counter[int],
) -> PlannedFlat:
    """Plan one flat parameter of ``members``. A layout that takes too much padding is replaced by ``Elements``."""
    owned, layouts = tuple([m.owned for m in members]), [m.layout for m in members]
    sizes = [(m.owned.fqn, tuple(m.plain.shape), tuple(m.plain.stride())) for m in members]
    itemsize = min(options.gathered_dtype(dtype).itemsize, dtype.itemsize)
    layout, warning = plan_layout(sizes, itemsize, world_size), None
    if world_size > 1 and not all([isinstance(each, Elements) for each in layouts]):
        densest = layout
        layout = plan_layout(sizes, itemsize, world_size, [_cut(m.plain, m.layout) for m in members])
        padding = layout.padded_numel / max(1, densest.padded_numel) - 1
        warning = excess_padding(unit, [o.fqn for o in owned], layouts, padding)
        if warning is not None:
            layout = densest
        elif any(isinstance(each, Whole) for each in layouts):
            works = [work_of(tuple(m.plain.shape)) if isinstance(m.layout, Whole) else 0 for m in members]
            layout = balanced(layout, works, loads)
    return PlannedFlat(owned, options, layout, warning)


def _cut(plain: torch.Tensor, layout: Layout) -> Cut:
    block = layout.block(tuple(plain.shape))
    return Cut(max(1, min(block, plain.numel())), plain.ndim > 0 and isinstance(layout, Whole | Rows))


# -- one flat parameter, in integers -----------------------------------------------------------------------------------


def plan_layout(
    params: Sequence[tuple[str, Sequence[int], Sequence[int]]],
    itemsize: int,
    world_size: int,
    cuts: Sequence[Cut] | None = None,
) -> FlatLayout:
    """Lay ``params``, given as (FQN, shape, stride), end to end, and cut the result into ``world_size`` shards.

    A dense stride (row-major, channels-last, transposed) is kept, so that kernels see the memory format that the user chose.
    Any other (an expanded or a sliced tensor) is replaced by the row-major one. The rows of a parameter that is cut by rows
    must be consecutive in memory. If they are not (transposed), its stride is replaced too.

    Args:
        params: FQN, shape and stride of each.
        itemsize: the element size in bytes.
        world_size: the number of shards.
        cuts: where each parameter may be cut; None: anywhere.
    """
    align = max(1, PARAM_ALIGNMENT // itemsize)  # [Note: Alignment]
    numels = [math.prod(shape) for _, shape, _ in params]
    rounded = [-(-n // align) * align for n in numels]
    is_small = sum(rounded) * itemsize < 8 * SHARD_ALIGNMENT * world_size
    shard_align = max(1, (PARAM_ALIGNMENT if is_small else SHARD_ALIGNMENT) // itemsize)
    cuts = [Cut()] * len(params) if cuts is None or world_size == 1 else cuts
    if all([cut.block == 1 for cut in cuts]):
        starts = [end - n for end, n in zip(itertools.accumulate(rounded), rounded, strict=True)]
        end = starts[-1] + numels[-1] if starts else 0
        shard = -(-end // (world_size * shard_align)) * shard_align
        most = end + max(end // 8, LITTLE_PADDING // itemsize)
        while shard_align > 1 and shard * world_size > most:
            shard_align //= 2
            shard = -(-end // (world_size * shard_align)) * shard_align
    else:
        pieces = [Piece(n, max(1, cut.block)) for n, cut in zip(numels, cuts, strict=True)]
        starts, shard = pack(pieces, world_size, align, shard_align)
    infos = []
    for (fqn, shape, stride), numel, start, cut in zip(params, numels, starts, cuts, strict=True):
        stride = dense_stride(shape, stride)
        if cut.by_rows and cut.block < numel and len(shape) and shape[0] > 1 and stride[0] != math.prod(shape[1:]):
            stride = row_major(shape)
        infos.append(ParamInfo(fqn, tuple(shape), stride, numel, start, max(1, cut.block), cut.by_rows))
    return FlatLayout(tuple(infos), world_size, shard)


def balanced(layout: FlatLayout, works: Sequence[int], loads: Counter[int]) -> FlatLayout:
    """Return ``layout`` with its shards assigned to other ranks, to balance work on uncut parameters over many layouts.

    Shards that share a parameter with a neighbour keep their rank. The largest work goes to the rank with the smallest load.

    Args:
        layout: where parameters lie.
        works: the work of each parameter.
        loads: the work of each rank so far; the work of this layout is added to it.
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
