"""A choice of units over some ranks, walked through, and the numbers that come of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from flatshard._composable.fully_shard import Choice
from flatshard._config import ShardingStrategy
from flatshard._errors import name_list
from flatshard._plan_actions import WalkedStep
from flatshard._plan_build import Built, build, with_strategy
from flatshard._plan_cost import Ranks
from flatshard._plan_data import Numbers, StrategyPlan, UnitPlan
from flatshard._plan_ledger import Memory
from flatshard._plan_optimizer import OptimizerChoice, state_nbytes
from flatshard._plan_order import Pass, order_of_modules
from flatshard._plan_step import walk_step
from flatshard._plan_text import in_seconds, size_warnings
from flatshard._plan_time import Bandwidths, run_through
from flatshard._plan_trace import recorded_order


@dataclass(frozen=True)
class StepChoice:
    """What the arguments of ``plan`` say of a step beyond those of ``fully_shard``.

    Raises:
        TypeError, ValueError: one of them is wrong.
    """

    optimizer: OptimizerChoice
    microbatches: int
    no_sync: bool
    tokens: int
    activations: int | Mapping[str, int]
    example_inputs: Any
    bandwidths: Bandwidths

    def __post_init__(self) -> None:
        for name, least in (("microbatches", 1), ("tokens", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"plan: {name} must be an int of at least {least}, got {value!r}")
        given = self.activations
        sizes = [given] if not isinstance(given, Mapping) else [*given.values()]
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in sizes):
            raise ValueError(f"plan: activations must be bytes for each unit, or a dict of them by FQN, got {given!r}")
        if self.example_inputs is not None and (self.tokens or given):
            raise ValueError(
                "plan: with example_inputs, operations and activations are recorded: leave out tokens and activations"
            )
        if not isinstance(self.no_sync, bool):
            raise ValueError(f"plan: no_sync must be True or False, got {self.no_sync!r}")
        if not isinstance(self.bandwidths, Bandwidths):
            raise TypeError(f"plan: bandwidths must be a flatshard.Bandwidths, got {self.bandwidths!r}")


class Walked:
    """One choice over some ranks, walked through."""

    def __init__(self, module: nn.Module, choice: Choice, built: Built, step: StepChoice) -> None:
        self.module, self.choice, self.built, self.step = module, choice, built, step
        self.rank_numels = built.numels_by_rank()
        fullest = max(range(len(self.rank_numels)), key=self.rank_numels.__getitem__)
        holds = step.no_sync and step.microbatches > 1
        self.costs = built.costs if holds else tuple(cost.holding_nothing() for cost in built.costs)
        self.states = state_nbytes(step.optimizer, built.parts(fullest))
        self.order = self._order()
        self.walked = self._walk()
        names = [cost.name for cost in built.costs]
        self.timeline = run_through(self.walked.actions, names, step.bandwidths, built.ranks.shards)

    def _order(self) -> Pass:
        given, costs = self.step.activations, self.costs
        if isinstance(given, Mapping):
            names = [cost.fqn for cost in costs]
            if unknown := [name for name in given if name not in names]:
                raise ValueError(f"plan: activations has {unknown[0]!r}, which is no unit; the units are {names}")
        if self.step.example_inputs is not None:
            return recorded_order(self.module, self.built, self.step.example_inputs)
        units = self.choice.planned

        def saved_of(unit: int) -> int:
            return given.get(costs[unit].fqn, 0) if isinstance(given, Mapping) else given if unit else 0

        def flops_of(module: nn.Module, param: nn.Parameter) -> int:
            looked_up = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            return 0 if looked_up or param.ndim < 2 else 2 * param.numel() * self.step.tokens

        return order_of_modules(self.module, units, self.choice.ignored, self.built.places, flops_of, saved_of)

    def optimizer_nbytes(self, unit: int) -> int:
        return sum(self.states.get(o.param, 0) for o in self.choice.planned[unit].owned)

    def _walk(self) -> WalkedStep:
        device = {"shards": 0, "optimizer": 0, "others": self.built.others_nbytes(self.module)}
        host = {"shards": 0, "optimizer": 0}
        for flats, cost in zip(self.built.flats, self.costs, strict=True):
            for flat, sizes in zip(flats, cost.flats, strict=True):
                books = host if sizes.offloaded else device
                books["shards"] += sizes.shard_nbytes
                books["optimizer"] += sum(self.states.get(o.param, 0) for o in flat.owned)
        self.between, self.host = Memory(**device), Memory(**host)
        step = self.step
        on_cpu = self.built.device == "cpu"
        return walk_step(
            self.costs, self.order, self.between, self.host, step.microbatches, step.no_sync, waits_early=on_cpu
        )

    @property
    def strategy(self) -> ShardingStrategy:
        return self.choice.config.strategy

    def summary(self) -> StrategyPlan:
        ranks, walked, timeline = self.built.ranks, self.walked, self.timeline
        return StrategyPlan(
            self.strategy.name,
            (ranks.replicas, ranks.shards),
            self.between.total,
            walked.device.peak(held_only=False).nbytes,
            len(walked.collectives),
            sum(c.sent_nbytes for c in walked.collectives),
            timeline.step_seconds,
            timeline.hidden_share,
        )

    def unit(self, number: int) -> UnitPlan:
        cost, bandwidths = self.costs[number], self.step.bandwidths
        mine = [c for c in self.walked.collectives if c.unit == cost.fqn]
        gathers = [c for c in mine if c.kind == "all-gather" and c.phase == "forward"]
        local = [f for f in cost.flats if f.description.trainable and not f.is_reduced]
        return UnitPlan(
            cost.fqn,
            cost.module,
            cost.config.strategy.name,
            tuple(f.description for f in cost.flats),
            cost.config.reshard_after_forward,
            sum(f.shard_nbytes for f in cost.flats),
            sum(f.gradient_nbytes for f in cost.flats)
            + sum(f.local_gradient_nbytes(i) for f in local for i in range(len(f.numels))),
            self.optimizer_nbytes(number),
            cost.unsharded_nbytes,
            sum(f.input_nbytes + f.output_nbytes for f in cost.flats),
            len(mine),
            sum(c.sent_nbytes for c in mine),
            sum(bandwidths.seconds_of(c, self.built.ranks.shards) for c in gathers) / max(1, self.step.microbatches),
        )

    def report(self, others: tuple[StrategyPlan, ...]) -> Numbers:
        ranks, walked = self.built.ranks, self.walked
        units = tuple(self.unit(number) for number in range(len(self.costs)))
        starts = (*self.timeline.starts, self.timeline.step_seconds)
        return Numbers(
            type(self.module).__name__,
            self.strategy.name,
            (ranks.replicas, ranks.shards),
            self.built.device,
            units,
            self.between,
            self.host,
            walked.device.peak(held_only=True),
            walked.device.peak(held_only=False),
            walked.host.peak(held_only=False),
            walked.collectives,
            self.timeline,
            tuple((starts[min(at, len(starts) - 1)], memory) for at, memory in walked.device.samples),
            (self.summary(), *others),
            (min(self.rank_numels), max(self.rank_numels)),
            tuple(self.warnings(units)),
            tuple(self.assumptions()),
        )

    def warnings(self, units: tuple[UnitPlan, ...]) -> list[str]:
        """What the user may want to change."""
        found = [f.warning for cost in self.costs for f in cost.flats if f.warning is not None]
        if len(found) > 3:
            found = [*found[:2], f"likewise {len(found) - 2} more flat parameters"]
        found += size_warnings(units, statistics.fmean(self.rank_numels), max(self.rank_numels))
        bandwidths, ranks = self.step.bandwidths, self.built.ranks
        nodes = -(-ranks.shards // bandwidths.gpus_per_node)
        least = bandwidths.seconds("all-gather", 0, ranks.shards, min(ranks.shards, bandwidths.gpus_per_node))
        slow = [u.fqn or "<root>" for u in units if u.gather_seconds and least > 0.5 * u.gather_seconds]
        if slow:
            cure = "make larger units (several layers each)"
            if nodes > 1 and not self.strategy.is_hybrid:
                cure += ", or shard over fewer ranks: strategy=HYBRID_SHARD"
            found.append(
                f"{len(slow)} of {len(units)} units are too small for {ranks.shards:,} ranks: latency ({in_seconds(least)}) "
                f"is more than half of the time of an all-gather of {name_list(slow, 3)}: {cure}"
            )
        return found

    def assumptions(self) -> list[str]:
        """What the numbers stand on."""
        step, bandwidths = self.step, self.step.bandwidths
        found = ["a step from the second on; gradients dropped before forward; sizes of the fullest rank"]
        if self.order.recorded:
            found.append(
                "order, operations and activations as recorded on the meta device; loss: the sum of the outputs"
            )
        else:
            found.append(
                "modules run one after the other, in the order of registration; every trainable parameter is used"
            )
            given = "as given" if step.activations else "not known, and not counted"
            found.append(f"activations: {given}")
        if step.microbatches > 1:
            how = "under no_sync but for the last" if step.no_sync else "each reduced"
            found.append(f"{step.microbatches} microbatches, {how}")
        if step.optimizer is None:
            found.append("no optimizer was given: no state")
        if self.order.flops:
            computed = "recorded" if self.order.recorded else f"2 for each token ({step.tokens:,}) and matrix element"
            found.append(
                f"operations of a forward: {computed}; at {bandwidths.flops * bandwidths.efficiency / 1e12:.0f} TFLOP/s"
            )
        else:
            found.append("computing is not known and takes no time: the step's time is that of communication alone")
        found.append(
            f"ring collectives: {bandwidths.intra / 1e9:.0f} GB/s and {in_seconds(bandwidths.latency_intra)} a hop in a node "
            f"of {bandwidths.gpus_per_node}, {bandwidths.inter / 1e9:.0f} GB/s a GPU and "
            f"{in_seconds(bandwidths.latency_inter)} a hop between nodes; neither the host's nor the optimizer's time"
        )
        return found


def compare(walked: Walked) -> tuple[StrategyPlan, ...]:
    """The strategies that were not chosen, over the same number of ranks."""
    ranks, per_node = walked.built.ranks, walked.step.bandwidths.gpus_per_node
    over = {s: Ranks(ranks.total) for s in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)}
    over[ShardingStrategy.NO_SHARD] = Ranks(ranks.total)
    if walked.strategy.is_hybrid:
        over[ShardingStrategy.HYBRID_SHARD] = over[ShardingStrategy.HYBRID_SHARD_ZERO2] = ranks
    elif ranks.total > per_node and ranks.total % per_node == 0:
        over[ShardingStrategy.HYBRID_SHARD] = Ranks(per_node, ranks.total // per_node)
    others = []
    for strategy, its_ranks in over.items():
        if strategy is not walked.strategy:
            choice = with_strategy(walked.choice, strategy)
            built = build(choice, its_ranks, walked.built.device)
            others.append(Walked(walked.module, choice, built, walked.step).summary())
    return tuple(others)
