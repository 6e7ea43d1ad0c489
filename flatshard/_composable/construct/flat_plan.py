"""Plans the flat parameters of a unit and their layouts over the ranks, without changing anything.

[Note: A network and its frozen copy]
A target or a teacher (BYOL, MoCo, DINO) is a copy of a network, and follows it: ``target.lerp_(online, 0.01)`` for each
parameter. So on each rank the parts of both must be the same elements. If each is a unit, they are cut alike, as shapes are
the same. If one unit has both, they are cut alike if each has a flat parameter without other parameters. So those of a
network and of its copy are laid out apart from the rest (a predictor), which takes one more collective. A copy is what is
frozen, with the names, shapes and dtypes of one module that is not. It must be most of what is frozen in the unit: else one
frozen layer of many would be taken for a copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from flatshard._composable.construct.layout_plan import Cut, balanced, plan_layout
from flatshard._composable.construct.partition import PlannedUnit
from flatshard._config import CPUOffload, MixedPrecision
from flatshard._handle.adapters.encoding import encoded_dtype
from flatshard._handle.adapters.tensor_subclass import TensorSubclass, wrapping_of
from flatshard._handle.adapters.wrapping import Wrapping
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.planned import FlatOptions, Groups, PlannedFlat, PlannedParam
from flatshard.layouts import Elements, Layout, LayoutChoice, Rows, Whole, excess_padding, layout_for, work_of

_Member = tuple[PlannedParam, torch.Tensor, Layout]
"""A parameter, its tensor that is sharded (for a tensor subclass the plain tensor inside), and its layout."""


def _options(
    owned: PlannedParam,
    plain: torch.Tensor,
    wrapping: Wrapping | None,
    policy: MixedPrecision,
    offload: CPUOffload,
) -> FlatOptions:
    """The options of one parameter. ``plain``: the tensor that is sharded."""
    placed = offload.offload_params, offload.pin_memory
    if not plain.is_floating_point() or any(policy.ignores(m) for m, _ in owned.registrations):
        return FlatOptions(offload=placed[0], pin_memory=placed[1])
    # A tensor subclass may not be cast, because only the class knows how. Its gradients are reduced as the policy says.
    compute = policy.compute_dtype_of(owned.fqn, owned.param)
    if compute is not None and wrapping is not None and not wrapping.computes_in(compute):
        compute = None
    return FlatOptions(
        compute, policy.reduce_dtype, policy.reduce_in_param_dtype, policy.keep_low_precision_grads, *placed
    )


Loads = dict[Groups | None, list[int]]
"""The work on whole parameters of each rank so far, for each of the groups that parameters are sharded over."""


def plan_flats(unit: PlannedUnit, world_size: int, loads: Loads) -> list[PlannedFlat]:
    """The flat parameters of ``unit`` over ``world_size`` ranks, in the order of their first parameters.

    ``loads``: the work of these flat parameters is added.

    Raises:
        TypeError: a callable layout did not return a layout.
        ValueError: a strict layout would exceed its limit on padding, or a parameter's dtype is none that it can have.
    """
    config = unit.config
    found: dict[tuple[Groups | None, torch.dtype, bool, FlatOptions, bool], list[_Member]] = {}
    copied = _copied(unit.owned)
    for owned in unit.owned:
        param, wrapping = owned.param, wrapping_of(owned.param)
        plain = param if wrapping is None else wrapping.unwrap(param)
        options = _options(owned, plain, wrapping, config.mixed_precision, config.cpu_offload)
        ranks = _shards(unit, owned.groups, world_size)
        if isinstance(wrapping, TensorSubclass) and ranks > 1 and FlatParam.encoded is not None:
            options = replace(options, encoded_dtype=encoded_dtype(wrapping))
        layout = layout_for(config.layout, owned.fqn, param)
        if isinstance(wrapping, TensorSubclass) and len(wrapping.leaves) > 1:
            layout = Elements()  # sharded as bytes
        key = owned.groups, plain.dtype, param.requires_grad, options, owned.fqn in copied
        found.setdefault(key, []).append((owned, plain, layout))
    flats = []
    for (groups, dtype, _, options, _), members in found.items():
        of_ranks = loads.setdefault(groups, [0] * _ranks(groups, world_size))
        flats.append(_lay_out(unit.fqn, members, dtype, options, _shards(unit, groups, world_size), of_ranks))
    return flats


def _copied(owned: Sequence[PlannedParam]) -> set[str]:
    """FQNs of parameters in a network and in its copy. [Note: A network and its frozen copy]"""
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


def plan_again(
    flat: FlatParam, unit: str, choice: LayoutChoice, world_size: int, loads: dict[int, list[int]]
) -> PlannedFlat:
    """``flat``, of the unit ``unit`` and sharded already, over ``world_size`` ranks. Planned parameters stand for its own.

    ``loads``: as for ``plan_flats``, by the number of ranks.
    """
    members: list[_Member] = []
    for param, info in zip(flat.params, flat.layout.params, strict=True):
        whole = torch.empty_strided(info.shape, info.stride, dtype=flat.kind.dtype, device="meta")
        stand_in = nn.Parameter(whole, param.requires_grad and flat.is_trainable)
        stand_in.__dict__.update({k: v for k, v in vars(param).items() if k != "_flatshard_info"})
        members.append((PlannedParam(info.fqn, stand_in), stand_in, layout_for(choice, info.fqn, stand_in)))
    of_ranks = loads.setdefault(world_size, [0] * world_size)
    return _lay_out(unit, members, flat.kind.dtype, flat.options, world_size, of_ranks)


def _ranks(groups: Groups | None, world_size: int) -> int:
    return world_size if groups is None else dist.get_world_size(groups[0])


def _shards(unit: PlannedUnit, groups: Groups | None, world_size: int) -> int:
    """In how many parts parameters of ``groups`` are cut."""
    return 1 if unit.config.strategy.is_whole else _ranks(groups, world_size)


def _lay_out(
    unit: str,
    members: list[_Member],
    dtype: torch.dtype,
    options: FlatOptions,
    world_size: int,
    loads: list[int],
) -> PlannedFlat:
    owned, layouts = tuple(m[0] for m in members), [m[2] for m in members]
    sizes = [(o.fqn, tuple(plain.shape), tuple(plain.stride())) for o, plain, _ in members]
    itemsize = min(options.gathered_dtype(dtype).itemsize, dtype.itemsize)
    layout, warning = plan_layout(sizes, itemsize, world_size), None
    if world_size > 1 and not all(isinstance(each, Elements) for each in layouts):
        densest = layout
        layout = plan_layout(sizes, itemsize, world_size, [_cut(plain, each) for _, plain, each in members])
        padding = layout.padded_numel / max(1, densest.padded_numel) - 1
        warning = excess_padding(unit, [o.fqn for o in owned], layouts, padding)
        if warning is not None:
            layout = densest
        elif any(isinstance(each, Whole) for each in layouts):
            works = [work_of(tuple(plain.shape)) if isinstance(each, Whole) else 0 for _, plain, each in members]
            layout = balanced(layout, works, loads)
    return PlannedFlat(owned, options, layout, warning)


def _cut(plain: torch.Tensor, layout: Layout) -> Cut:
    block = layout.block(tuple(plain.shape))
    return Cut(max(1, min(block, plain.numel())), plain.ndim > 0 and isinstance(layout, Whole | Rows))
