"""Which flat parameters a unit gets, and how each is laid out over the ranks: planned without changing anything."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flatshard._composable.partition import Owned, PlannedUnit
from flatshard._composable.precision import flat_options
from flatshard._composable.state import UnitConfig
from flatshard._config import ShardingStrategy
from flatshard._handle.buffers import FlatOptions
from flatshard._handle.layout import Cut, FlatLayout, balanced, plan_layout
from flatshard._handle.tensor_subclass import TensorSubclass, wrapping_of
from flatshard._layouts import Elements, Layout, Rows, Whole, excess_padding, layout_for, work_of


@dataclass(frozen=True, slots=True)
class PlannedFlat:
    """A flat parameter to be made: of parameters equal in dtype, in being trainable, and in options."""

    owned: tuple[Owned, ...]  # as in ``layout``
    options: FlatOptions
    layout: FlatLayout
    dtype: torch.dtype
    trainable: bool
    warning: str | None = None  # why it is not laid out as was asked for


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What is to be sharded of one parameter: of a tensor subclass, the plain tensor inside."""

    owned: Owned
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    layout: Layout


def plan_flats(unit: PlannedUnit, config: UnitConfig, world_size: int, loads: list[int]) -> list[PlannedFlat]:
    """The flat parameters of ``unit`` over ``world_size`` ranks, in the order of their first parameters.

    ``loads``: of each rank, the work of whole parameters so far; what these add is added.

    Raises:
        TypeError: a callable layout returned something else.
        ValueError: a strict layout would exceed its limit on padding.
    """
    world_size = 1 if config.strategy is ShardingStrategy.NO_SHARD else world_size
    groups: dict[tuple[torch.dtype, bool, FlatOptions], list[_Sizes]] = {}
    for owned in unit.owned:
        param, wrapping = owned.param, wrapping_of(owned.param)
        plain = param if wrapping is None else wrapping.unwrap(param)
        options = flat_options(plain, wrapping, [m for m, _ in owned.slots], config.mixed_precision, config.cpu_offload)
        layout = layout_for(config.layout, owned.fqn, param)
        if isinstance(wrapping, TensorSubclass) and len(wrapping.leaves) > 1:
            layout = Elements()  # bytes
        sizes = _Sizes(owned, tuple(plain.shape), tuple(plain.stride()), layout)
        groups.setdefault((plain.dtype, param.requires_grad, options), []).append(sizes)
    return [_lay_out(unit, members, *kind, world_size, loads) for kind, members in groups.items()]


def _lay_out(
    unit: PlannedUnit,
    members: list[_Sizes],
    dtype: torch.dtype,
    trainable: bool,
    options: FlatOptions,
    world_size: int,
    loads: list[int],
) -> PlannedFlat:
    sizes = [(m.owned.fqn, m.shape, m.stride) for m in members]
    itemsize = min((options.compute_dtype or dtype).itemsize, dtype.itemsize)
    layout, warning = plan_layout(sizes, itemsize, world_size), None
    layouts = [m.layout for m in members]
    if world_size > 1 and not all(isinstance(each, Elements) for each in layouts):
        densest = layout
        layout = plan_layout(sizes, itemsize, world_size, [_cut(m) for m in members])
        padding = layout.padded_numel / max(1, densest.padded_numel) - 1
        warning = excess_padding(unit.fqn, [m.owned.fqn for m in members], layouts, padding)
        if warning is not None:
            layout = densest
        elif any(isinstance(each, Whole) for each in layouts):
            works = [work_of(m.shape) if isinstance(m.layout, Whole) else 0 for m in members]
            layout = balanced(layout, works, loads)
    return PlannedFlat(tuple(m.owned for m in members), options, layout, dtype, trainable, warning)


def _cut(member: _Sizes) -> Cut:
    block = member.layout.block(member.shape)
    whole = isinstance(member.layout, Whole)
    return Cut(
        max(1, min(block, math.prod(member.shape))), bool(member.shape) and (whole or isinstance(member.layout, Rows))
    )
