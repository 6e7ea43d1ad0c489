"""From a module and the arguments of ``fully_shard`` to the units' costs, by the functions that ``fully_shard`` uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from flatshard._composable import validate
from flatshard._composable.flat_plan import PlannedFlat, plan_flats
from flatshard._composable.fully_shard import Choice
from flatshard._composable.partition import PlannedUnit
from flatshard._composable.state import UnitConfig, units_below
from flatshard._config import ShardingStrategy
from flatshard._handle.layout import FlatLayout
from flatshard._handle.tensor_subclass import wrapping_of
from flatshard._plan_cost import FlatCost, Ranks, UnitCost
from flatshard._plan_optimizer import Part
from flatshard._plan_order import Place


def check_plannable(module: nn.Module) -> None:
    """Nothing in ``module`` is sharded. Whether it is a module is asked elsewhere.

    Raises:
        ValueError: something is.
    """
    if isinstance(module, nn.Module) and (units := units_below(module)):
        raise ValueError(
            f"plan: unit {units[0].fqn or '<root>'!r} of this {type(module).__name__} is sharded already. describe() tells "
            "what was built; to plan, build the model anew: `with torch.device('meta'):` takes no memory"
        )


def check_parameters(planned: Sequence[PlannedUnit]) -> None:
    """What ``fully_shard`` refuses, and what only this does.

    Raises:
        ValueError: a parameter cannot be sharded.
        NotImplementedError: one is a tensor subclass.
    """
    for unit in planned:
        for owned in unit.owned:
            validate.check_parameter(owned.fqn, owned.param)
            if wrapping_of(owned.param) is not None:
                raise NotImplementedError(
                    f"plan: parameter {owned.fqn!r} is a {type(owned.param).__name__}; sizes and collectives of tensor "
                    "subclasses are not planned. Plan the model with plain parameters of this rank's sizes"
                )
    validate.check_parameters(list(planned), torch.device("meta"), [])


@dataclass(frozen=True)
class Built:
    """The units of a module over some ranks."""

    choice: Choice
    ranks: Ranks
    flats: tuple[tuple[PlannedFlat, ...], ...]  # of each unit
    costs: tuple[UnitCost, ...]
    device: str

    @property
    def places(self) -> dict[nn.Parameter, Place]:
        """Where each parameter is."""
        return {
            owned.param: (number, index, position)
            for number, flats in enumerate(self.flats)
            for index, flat in enumerate(flats)
            for position, owned in enumerate(flat.owned)
        }

    def others_nbytes(self, root: nn.Module) -> int:
        """Bytes of buffers, and of parameters that are ignored."""
        policies = {m: self.choice.config_of(u).mixed_precision for u in self.choice.planned for m in u.modules}
        seen: dict[torch.Tensor, int] = {p: p.numel() * p.itemsize for p in self.choice.ignored_params}
        for module in root.modules():
            policy = policies.get(module)
            for buffer in module._buffers.values():
                if buffer is not None:
                    casts = policy is not None and policy.buffer_dtype is not None and not policy.ignores(module)
                    cast = policy.buffer_dtype if policy is not None and casts and buffer.is_floating_point() else None
                    seen[buffer] = buffer.numel() * (cast or buffer.dtype).itemsize
        return sum(seen.values())

    def parts(self, rank: int) -> list[Part]:
        """What the optimizer gets on ``rank``."""
        parts = []
        for flats, cost in zip(self.flats, self.costs, strict=True):
            for flat, sizes in zip(flats, cost.flats, strict=True):
                if not flat.trainable:
                    continue
                layout = flat.layout
                whole = layout.world_size == 1
                for owned, info, part in zip(flat.owned, layout.params, layout.shard_slices(rank), strict=True):
                    shape = info.shape if whole else info.shape_of(part)
                    parts.append(Part(owned.param, shape, flat.dtype, sizes.description.grad_dtype))
        return parts

    def numels_by_rank(self) -> list[int]:
        """Elements of parameters, without padding, that each rank of a shard group holds."""
        steps = [0] * (self.ranks.shards + 1)  # differences between a rank and the one before
        for flats in self.flats:
            for flat in flats:
                if flat.layout.world_size == 1:
                    steps[0] += flat.layout.numel
                else:
                    _add_numels(flat.layout, steps)
        totals, total = [], 0
        for step in steps[:-1]:
            total += step
            totals.append(total)
        return totals


def _add_numels(layout: FlatLayout, steps: list[int]) -> None:
    size = layout.shard_numel
    for start, stop in ((i.start, i.stop) for i in layout.params if i.numel):
        first, last = start // size, (stop - 1) // size
        for rank, numel in (
            (first, min(stop, (first + 1) * size) - start),
            (last, stop - last * size if last > first else 0),
        ):
            steps[rank] += numel
            steps[rank + 1] -= numel
        if last > first + 1:
            steps[first + 1] += size
            steps[last] -= size


def build(choice: Choice, ranks: Ranks, device: str) -> Built:
    """Lay out every unit's flat parameters.

    Raises:
        TypeError, ValueError: see ``plan_flats``.
    """
    loads = [0] * ranks.shards
    units = {unit.module: number for number, unit in enumerate(choice.planned)}
    all_flats, costs = [], []
    for number, unit in enumerate(choice.planned):
        config = choice.config_of(unit)
        flats = tuple(plan_flats(unit, config, ranks.shards, loads))
        all_flats.append(flats)
        sizes = tuple(FlatCost.of(flat, config, ranks, device) for flat in flats)
        needs = (number, *(units[m] for m in unit.uses))
        costs.append(UnitCost(unit.fqn, type(unit.module).__name__, config, sizes, needs, ranks))
    return Built(choice, ranks, tuple(all_flats), tuple(costs), device)


def with_strategy(choice: Choice, strategy: ShardingStrategy) -> Choice:
    """The same choice with another strategy for every unit, which alone says what is kept after forward."""

    def change(config: UnitConfig) -> UnitConfig:
        return dataclasses.replace(config, strategy=strategy, reshard_after_forward=None)

    configs = {m: change(c) for m, c in choice.configs.items()}
    return dataclasses.replace(choice, config=change(choice.config), configs=configs)
