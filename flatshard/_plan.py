"""``plan``: what ``fully_shard`` would build, and what a step would cost, before there is a process group or a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from flatshard._composable import validate
from flatshard._composable.fully_shard import Choice, choose, unit_config
from flatshard._composable.policy import Policy
from flatshard._config import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, as_enum
from flatshard._inspect import FlatDescription
from flatshard._layouts import LayoutChoice
from flatshard._plan_build import Built, build, check_parameters, check_plannable, with_strategy
from flatshard._plan_cost import Ranks
from flatshard._plan_ledger import Memory, Peak
from flatshard._plan_optimizer import OptimizerChoice, state_nbytes
from flatshard._plan_order import Pass, order_of_modules
from flatshard._plan_step import Collective, WalkedStep, walk_step
from flatshard._plan_time import Bandwidths, Timeline, run_through


@dataclass(frozen=True)
class UnitPlan:
    """One unit. Bytes are those of one rank."""

    fqn: str
    module: str  # class name
    strategy: str
    flats: tuple[FlatDescription, ...]  # as in ``describe``
    reshard_after_forward: bool | int | None
    shard_nbytes: int
    gradient_nbytes: int  # of `.grad`
    optimizer_nbytes: int
    unsharded_nbytes: int
    reduction_nbytes: int  # the input and the output of its reduction
    collectives: int  # in a step
    sent_nbytes: int  # in a step: see ``Collective.sent_nbytes``
    gather_seconds: float  # of one all-gather, modelled

    @property
    def numel(self) -> int:
        return sum(f.numel for f in self.flats)

    @property
    def padding(self) -> int:
        """Elements over all ranks."""
        return sum(f.padded_numel - f.numel for f in self.flats)


@dataclass(frozen=True)
class StrategyPlan:
    """A strategy beside the others."""

    strategy: str
    world_size: tuple[int, int]  # (replicas, ranks to shard over)
    between_steps_nbytes: int
    peak_nbytes: int
    collectives: int
    sent_nbytes: int
    step_seconds: float
    hidden_share: float | None


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` found. ``print(plan(...))`` shows it as tables; sizes are bytes on one rank, the fullest."""

    module: str  # class name
    strategy: str
    world_size: tuple[int, int]  # (replicas, ranks to shard over)
    device: str
    units: tuple[UnitPlan, ...]  # in module order
    between_steps: Memory
    """What is held between steps, gradients dropped."""
    host: Memory
    """The same off the device, with ``cpu_offload``."""
    peak: Peak
    """The most that flatshard and the optimizer hold during a step: without activations, buffers and ignored parameters."""
    total_peak: Peak
    """The most of everything known."""
    host_peak: Peak
    collectives: tuple[Collective, ...]
    """Of a step, in the order in which they are issued."""
    timeline: Timeline
    memory: tuple[tuple[float, Memory], ...]
    """(seconds, what is held from then on)."""
    strategies: tuple[StrategyPlan, ...]
    """This plan's strategy and others, side by side."""
    rank_numels: tuple[int, int]
    """Elements of parameters on the emptiest and on the fullest rank, without padding."""
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def numel(self) -> int:
        return sum(u.numel for u in self.units)

    @property
    def sent_nbytes(self) -> int:
        """Bytes that a rank sends in a step by ring algorithms."""
        return sum(c.sent_nbytes for c in self.collectives)

    @property
    def step_seconds(self) -> float:
        """Modelled, without the optimizer's step."""
        return self.timeline.step_seconds

    @property
    def hidden_share(self) -> float | None:
        """The part of communication that runs while something computes. None: no communication, or computing unknown."""
        return self.timeline.hidden_share


def plan(
    module: nn.Module,
    *,
    policy: Policy = None,
    world_size: int | tuple[int, int],
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    mixed_precision: MixedPrecision | Any = None,
    cpu_offload: CPUOffload | Any = None,
    ignored_states: Iterable[nn.Module | nn.Parameter] | None = None,
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    forward_prefetch: bool = True,
    prefetch_limit_bytes: int | None = None,
    reshard_after_forward: bool | int | None = None,
    layout: LayoutChoice = None,
    optimizer: OptimizerChoice = None,
    microbatches: int = 1,
    no_sync: bool = False,
    tokens: int = 0,
    activations: int | Mapping[str, int] = 0,
    bandwidths: Bandwidths | None = None,
    device: str = "cuda",
) -> Plan:
    bandwidths = Bandwidths() if bandwidths is None else bandwidths
    strategy = as_enum(ShardingStrategy, strategy, "strategy")
    ranks = _ranks(world_size, strategy, bandwidths)
    config = unit_config(
        strategy=strategy,
        backward_prefetch=backward_prefetch,
        forward_prefetch=forward_prefetch,
        mixed_precision=mixed_precision,
        cpu_offload=cpu_offload,
        collectives=None,
        prefetch_limit_bytes=prefetch_limit_bytes,
        reshard_after_forward=reshard_after_forward,
        layout=layout,
    )
    check_plannable(module)
    validate.check_module(module)
    step = StepChoice(optimizer, microbatches, no_sync, tokens, activations, bandwidths)
    choice = choose(module, policy, config, ignored_states, ranks.shards)
    check_parameters(choice.planned)
    planned = _Planned(module, choice, build(choice, ranks, device), step)
    return planned.report(_compare(planned))


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
        if not isinstance(self.no_sync, bool):
            raise ValueError(f"plan: no_sync must be True or False, got {self.no_sync!r}")
        if not isinstance(self.bandwidths, Bandwidths):
            raise TypeError(f"plan: bandwidths must be a flatshard.Bandwidths, got {self.bandwidths!r}")


class _Planned:
    """One choice over some ranks, walked through."""

    def __init__(self, module: nn.Module, choice: Choice, built: Built, step: StepChoice) -> None:
        self.module, self.choice, self.built, self.step = module, choice, built, step
        self.rank_numels = built.numels_by_rank()
        fullest = max(range(len(self.rank_numels)), key=self.rank_numels.__getitem__)
        self.states = state_nbytes(step.optimizer, built.parts(fullest))
        self.order = self._order()
        self.walked = self._walk()
        names = [cost.name for cost in built.costs]
        self.timeline = run_through(self.walked.actions, names, step.bandwidths, built.ranks.shards)

    def _order(self) -> Pass:
        given, costs = self.step.activations, self.built.costs
        if isinstance(given, Mapping):
            names = [cost.fqn for cost in costs]
            if unknown := [name for name in given if name not in names]:
                raise ValueError(f"plan: activations has {unknown[0]!r}, which is no unit; the units are {names}")
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
        for flats, cost in zip(self.built.flats, self.built.costs, strict=True):
            for flat, sizes in zip(flats, cost.flats, strict=True):
                books = host if sizes.offloaded else device
                books["shards"] += sizes.shard_nbytes
                books["optimizer"] += sum(self.states.get(o.param, 0) for o in flat.owned)
        self.between, self.host = Memory(**device), Memory(**host)
        step = self.step
        return walk_step(self.built.costs, self.order, self.between, self.host, step.microbatches, step.no_sync)

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
        cost, bandwidths = self.built.costs[number], self.step.bandwidths
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

    def report(self, others: tuple[StrategyPlan, ...]) -> Plan:
        ranks, walked = self.built.ranks, self.walked
        units = tuple(self.unit(number) for number in range(len(self.built.costs)))
        starts = (*self.timeline.starts, self.timeline.step_seconds)
        return Plan(
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
            (),
            (),
        )


def _compare(planned: _Planned) -> tuple[StrategyPlan, ...]:
    """The strategies that were not chosen, over the same number of ranks."""
    ranks, per_node = planned.built.ranks, planned.step.bandwidths.gpus_per_node
    over = {s: Ranks(ranks.total) for s in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)}
    over[ShardingStrategy.NO_SHARD] = Ranks(ranks.total)
    if planned.strategy.is_hybrid:
        over[ShardingStrategy.HYBRID_SHARD] = over[ShardingStrategy.HYBRID_SHARD_ZERO2] = ranks
    elif ranks.total > per_node and ranks.total % per_node == 0:
        over[ShardingStrategy.HYBRID_SHARD] = Ranks(per_node, ranks.total // per_node)
    others = []
    for strategy, its_ranks in over.items():
        if strategy is not planned.strategy:
            choice = with_strategy(planned.choice, strategy)
            built = build(choice, its_ranks, planned.built.device)
            others.append(_Planned(planned.module, choice, built, planned.step).summary())
    return tuple(others)


def _ranks(world_size: Any, strategy: ShardingStrategy, bandwidths: Bandwidths) -> Ranks:
    """``world_size`` as ranks to shard over and replicas."""
    sizes = world_size if isinstance(world_size, tuple) else (world_size,)
    if not sizes or len(sizes) > 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise ValueError(
            "plan: world_size must be a number of ranks of at least 1, or for hybrid strategies (replicas, ranks to shard "
            f"over), got {world_size!r}"
        )
    if len(sizes) == 2:
        if not strategy.is_hybrid:
            raise ValueError(
                f"plan: world_size={world_size} is (replicas, ranks to shard over), which hybrid strategies take, but "
                f"strategy is {strategy}: pass the number of ranks, or strategy=ShardingStrategy.HYBRID_SHARD"
            )
        return Ranks(sizes[1], sizes[0])
    (total,) = sizes
    if not strategy.is_hybrid:
        return Ranks(total)
    if total % bandwidths.gpus_per_node:
        raise ValueError(
            f"plan: {strategy} shards within a node, but {bandwidths.gpus_per_node} GPUs a node do not divide {total} ranks: "
            "pass world_size=(replicas, ranks to shard over), or bandwidths=Bandwidths(gpus_per_node=...)"
        )
    return Ranks(bandwidths.gpus_per_node, total // bandwidths.gpus_per_node)
