"""``plan``: what ``fully_shard`` would build, and what a step would cost."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatshard._composable.construct import validate
from flatshard._composable.construct.options import unit_config
from flatshard._composable.fully_shard import Choice, choose
from flatshard._composable.partition import PlannedUnit
from flatshard._composable.policy import Policy
from flatshard._composable.state import Unit, UnitConfig, units_below
from flatshard._config import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, as_enum
from flatshard._errors import name_list
from flatshard._handle.adapters.tensor_subclass import wrapping_of
from flatshard.debug._describe import UnitDescription, describe
from flatshard.layouts import LayoutChoice
from flatshard.planning._hardware import Bandwidths, Timeline
from flatshard.planning._optimizer import OptimizerChoice, state_nbytes
from flatshard.planning._program import Assumed, Program, Ranks, with_config
from flatshard.planning._report import Plan, StrategyPlan, UnitPlan, in_seconds, size_warnings


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
    static_buffers: bool = False,
    widens: bool | None = None,
    optimizer: OptimizerChoice = None,
    microbatches: int = 1,
    no_sync: bool = False,
    tokens: int = 0,
    activations: int | Mapping[str, int] = 0,
    example_inputs: Any = None,
    bandwidths: Bandwidths | None = None,
    device: str = "cuda",
    compare: bool = True,
) -> Plan:
    """What :func:`fully_shard` would build, and the memory, collectives and time of a step. Needs no process group or memory.

    It shards a copy of the module on the meta device, as one rank of a process group that does not exist, and runs steps with
    the same code and hooks as training. It records what they issue, allocate and free. So units, collectives with their
    order, and memory are exact. Times are modelled: ``bandwidths`` describes the hardware.

    Example::

        with torch.device("meta"):
            model = GPT(...)
        plan = flatshard.plan(model, policy={Block}, world_size=64, optimizer=torch.optim.AdamW, tokens=8192)
        print(plan)
        plan.trace("step.json")  # for https://ui.perfetto.dev

    The result is about the second step and later ones. Gradients are dropped (``zero_grad()``) before forward. Without
    ``example_inputs`` it assumes that modules run one after the other, each once, in the order in which they are registered,
    and that every trainable parameter gets a gradient. Not counted are temporary memory in the optimizer's ``step()``,
    buffers of communicators, fragmentation of the allocator, and memory that kernels allocate themselves.

    Args:
        module: the whole module on any device; on meta it takes no memory. It is deep-copied, and not changed.
        policy, mixed_precision, cpu_offload, ignored_states, backward_prefetch, forward_prefetch, prefetch_limit_bytes,
            reshard_after_forward, layout, static_buffers: as for :func:`fully_shard`. With collectives that have an
            ``allocate``, pass ``static_buffers=True``.
        world_size: the number of ranks. For hybrid strategies it may be (replicas, ranks to shard over), like the shape of a
            2-D mesh. With a single number they shard within a node of ``bandwidths.gpus_per_node``.
        strategy: as for :func:`fully_shard`.
        widens: whether gradients are sent in the dtype that they were computed in and added in ``reduce_dtype``, as by
            ``flatshard.comm.DefaultCollectives(group, widens=True)``. None: as by the built-in collectives, True for gloo and
            False for NCCL.
        optimizer: for the size of its state: a class or function that makes an optimizer of a list of parameters
            (``torch.optim.AdamW``, ``functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)``); or an optimizer on
            ``module``'s parameters; or the number of bytes of state per element. None: no state. The size is measured by a
            step on the meta device.
        microbatches: the number of forwards and backwards in a step.
        no_sync: whether all but the last of them run under :func:`no_sync`.
        example_inputs: arguments of ``module``'s forward: a tuple, or a dict of keyword arguments. Only shapes and dtypes
            matter. With them the copy runs its own forward, and backward from the sum of its outputs, so that the order of
            units, activations and floating-point operations are recorded, too.
        tokens: without ``example_inputs``: the number of positions that each rank computes in a microbatch. A forward is
            assumed to take 2 operations per token and element of matrices (embeddings excepted), and backward as many for the
            gradient of the input and for that of the matrix. 0: computing takes no time.
        activations: without ``example_inputs``: the bytes that autograd saves in each unit except the outermost, or a dict of
            them by FQN.
        bandwidths: the hardware, for times.
        device: the type of device to train on. On ``"cpu"`` nothing is offloaded.
        compare: also plan the other strategies over as many ranks, for ``Plan.strategies``.

    Raises:
        TypeError, ValueError: an argument is wrong, as the message says; or a part of ``module`` is sharded already.
        NotImplementedError: not supported here: tensor subclasses (DTensors), and collectives of single units.
    """
    bandwidths = Bandwidths() if bandwidths is None else bandwidths
    step = _StepOptions(
        optimizer, microbatches, no_sync, tokens, activations, example_inputs, bandwidths, device, widens
    )
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
        static_buffers=static_buffers,
    )
    if isinstance(module, nn.Module) and (units := units_below(module)):
        raise ValueError(
            f"plan: unit {units[0].fqn or '<root>'!r} of this {type(module).__name__} is sharded already. describe() shows "
            "its units. To plan, build the model again: `with torch.device('meta'):` takes no memory"
        )
    validate.check_module(module)
    choice = choose(module, policy, config, ignored_states, ranks.shards)
    _check(choice.planned)
    if any(c.collectives is not None for c in choice.configs.values()):
        raise NotImplementedError(
            "plan: the policy overrides collectives for a unit, but only the built-in ones can be planned"
        )
    chosen = _Run(module, choice, ranks, step)
    alternatives = _alternatives(choice, ranks, step) if compare else []
    others = [_Run(module, other, its_ranks, step).summary() for other, its_ranks in alternatives]
    return chosen.report(others)


def _ranks(world_size: Any, strategy: ShardingStrategy, bandwidths: Bandwidths) -> Ranks:
    """The argument ``world_size`` as ranks to shard over and replicas."""
    sizes = world_size if isinstance(world_size, tuple) else (world_size,)
    if not sizes or len(sizes) > 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise ValueError(
            "plan: world_size must be a number of ranks of at least 1, or for hybrid strategies (replicas, ranks to shard "
            f"over), got {world_size!r}"
        )
    if len(sizes) == 2:
        if not strategy.is_hybrid:
            raise ValueError(
                f"plan: world_size={world_size} is for hybrid strategies, (replicas, ranks to shard over), but strategy is "
                f"{strategy}: pass the number of ranks, or strategy=ShardingStrategy.HYBRID_SHARD"
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


def _check(planned: Sequence[PlannedUnit]) -> None:
    """Check the parameters.

    Raises:
        ValueError: ``fully_shard`` could not shard a parameter.
        NotImplementedError: a parameter is a tensor subclass, which can be sharded but not planned.
    """
    for unit in planned:
        for owned in unit.owned:
            validate.check_parameter(owned.fqn, owned.param)
            if wrapping_of(owned.param) is not None:
                raise NotImplementedError(
                    f"plan: parameter {owned.fqn!r} is a {type(owned.param).__name__}, and tensor subclasses cannot be "
                    "planned. Plan the model with plain parameters of the sizes that this rank has"
                )
    validate.check_parameters(list(planned), torch.device("meta"), [])


@dataclasses.dataclass(frozen=True)
class _StepOptions:
    """The arguments of ``plan`` that describe a step.

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
    device: str
    widens: bool | None

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
        if not isinstance(self.example_inputs, Tensor | tuple | list | dict | None):
            raise TypeError(
                "plan: example_inputs must be a tuple of arguments, a dict of keyword arguments, or a tensor, got a "
                f"{type(self.example_inputs).__name__}"
            )
        if not isinstance(self.no_sync, bool) or not isinstance(self.widens, bool | None):
            raise ValueError(f"plan: no_sync and widens must be True or False, got {self.no_sync!r}, {self.widens!r}")
        if not isinstance(self.bandwidths, Bandwidths):
            raise TypeError(f"plan: bandwidths must be a flatshard.planning.Bandwidths, got {self.bandwidths!r}")
        if not isinstance(self.device, str):
            raise TypeError(f"plan: device must be a type of device, such as 'cuda', got {self.device!r}")

    @property
    def inputs(self) -> Any:
        """The inputs of a forward, or what is assumed without them."""
        given = self.example_inputs
        if given is None:
            return Assumed(self.tokens, self.activations)
        return (given,) if isinstance(given, Tensor) else given


class _Run:
    """A recorded step of ``module``, sharded as ``choice`` says over ``ranks``."""

    def __init__(self, module: nn.Module, choice: Choice, ranks: Ranks, step: _StepOptions) -> None:
        self.module, self.choice, self.ranks, self.step = module, choice, ranks, step
        names = [unit.fqn for unit in choice.planned]
        if isinstance(step.activations, Mapping) and (odd := [n for n in step.activations if n not in names]):
            raise ValueError(f"plan: activations has {odd[0]!r}, which is not a unit; the units are {names}")
        kind = step.device.partition(":")[0]
        widens = kind == "cpu" if step.widens is None else step.widens
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fully_shard itself will warn
            self.program = Program(module, with_config(choice, _pinned), ranks, kind, step.bandwidths, widens)
            try:
                self.program.run(step.microbatches, step.no_sync, step.inputs, self._optimize)
            except Exception as e:
                if step.example_inputs is not None and not str(e).startswith("plan:"):
                    e.add_note(
                        "plan: this was the forward or backward of a copy on the meta device, where tensors have no values. "
                        "If the model needs values, leave example_inputs out, and pass tokens= and activations="
                    )
                raise
        clock = self.program.clock
        self.collectives = clock.collectives
        self.timeline = Timeline(tuple(clock.spans), self.program.step_seconds)

    def _optimize(self) -> dict[nn.Parameter, int]:
        return state_nbytes(self.step.optimizer, self.program.params)

    @property
    def strategy(self) -> ShardingStrategy:
        return self.choice.config.strategy

    def summary(self) -> StrategyPlan:
        return StrategyPlan(
            self.strategy.name,
            (self.ranks.replicas, self.ranks.shards),
            self.program.between.total,
            self.program.books.device.peak.nbytes,
            len(self.collectives),
            sum(c.sent_nbytes for c in self.collectives),
            self.timeline.step_seconds,
            self.timeline.hidden_share,
        )

    def unit(self, unit: Unit, described: UnitDescription) -> UnitPlan:
        mine = [c for c in self.collectives if c.unit == unit.fqn]
        gathers = [c for c in mine if c.kind == "all-gather" and c.phase == "forward"]
        flats = unit.handle.flats
        params = [p for f in flats for p in f.params]
        grads = {id(s): s.nbytes() for s in (p.grad.untyped_storage() for p in params if p.grad is not None)}
        reduced = [f for f in flats if f.gradients.is_reduced and any(f.requires_grad)]
        cut = [f.layout.shard_numel * f.gradients.reduction.reduce_dtype.itemsize for f in reduced if not f.is_whole]
        inputs = [c.nbytes for c in mine if c.kind == ("reduce-scatter" if cut else "all-reduce")]
        return UnitPlan(
            **vars(described),
            shard_nbytes=sum(f.shard.nbytes for f in flats),
            gradient_nbytes=sum(grads.values()),
            optimizer_nbytes=sum(self.program.states.get(p, 0) for p in params),
            unsharded_nbytes=unit.handle.unsharded_nbytes,
            reduction_nbytes=sum(inputs[len(inputs) - len(reduced) :]) + sum(cut),
            collectives=len(mine),
            sent_nbytes=sum(c.sent_nbytes for c in mine),
            gather_seconds=sum(self.step.bandwidths.seconds_of(c, self.ranks.total) for c in gathers)
            / self.step.microbatches,
        )

    def report(self, others: Sequence[StrategyPlan]) -> Plan:
        program, numels = self.program, self.program.numels
        described = {d.fqn: d for d in describe(program.root).units}
        units = tuple(self.unit(unit, described[unit.fqn]) for unit in program.units)
        return Plan(
            type(self.module).__name__,
            self.strategy.name,
            (self.ranks.replicas, self.ranks.shards),
            self.step.device,
            units,
            program.between,
            program.host_between,
            program.books.device.held_peak,
            program.books.device.peak,
            program.books.host.peak,
            tuple(self.collectives),
            self.timeline,
            tuple(program.books.device.samples),
            (self.summary(), *others),
            (min(numels), max(numels)),
            tuple(self.warnings(units)),
            tuple(self.assumptions()),
        )

    def warnings(self, units: tuple[UnitPlan, ...]) -> list[str]:
        """Warnings about layouts and sizes."""
        found = self.program.layout_warnings
        if len(found) > 3:
            found = [*found[:2], f"likewise {len(found) - 2} more flat parameters"]
        numels = self.program.numels
        found = [*found, *size_warnings(units, statistics.fmean(numels), max(numels))]
        bandwidths, shards = self.step.bandwidths, self.ranks.shards
        nodes = -(-shards // bandwidths.gpus_per_node)
        least = bandwidths.seconds("all-gather", 0, shards, min(shards, bandwidths.gpus_per_node))
        slow = [u.fqn or "<root>" for u in units if u.gather_seconds and least > 0.5 * u.gather_seconds]
        if slow:
            cure = "make larger units (several layers each)"
            if nodes > 1 and not self.strategy.is_hybrid:
                cure += ", or shard over fewer ranks: strategy=HYBRID_SHARD"
            found.append(
                f"{len(slow)} of {len(units)} units are too small for {shards:,} ranks: latency ({in_seconds(least)}) "
                f"is more than half of the time of an all-gather of {name_list(slow, 3)}: {cure}"
            )
        return found

    def assumptions(self) -> list[str]:
        """What the numbers assume."""
        step, bandwidths, recorded = self.step, self.step.bandwidths, self.step.example_inputs is not None
        found = [
            "the second step or a later one; gradients dropped before forward; sizes on the rank with most elements"
        ]
        if recorded:
            found.append(
                "order, operations and activations recorded on the meta device; the loss is the sum of the outputs"
            )
        else:
            found.append(
                "modules run one after the other, in the order of registration; every trainable parameter is used"
            )
            given = "as passed to plan" if step.activations else "not known, and not counted"
            found.append(f"activations: {given}")
        if step.microbatches > 1:
            how = "all but the last under no_sync" if step.no_sync else "each one reduced"
            found.append(f"{step.microbatches} microbatches, {how}")
        if step.optimizer is None:
            found.append("no optimizer was given: no state")
        if self.timeline.compute_seconds:
            computed = "recorded" if recorded else f"2 per token ({step.tokens:,}) and matrix element"
            found.append(
                f"operations of a forward: {computed}; at {bandwidths.flops * bandwidths.efficiency / 1e12:.0f} TFLOP/s"
            )
        else:
            found.append("computing is not known, and takes no time: the step's time is that of communication")
        found.append(
            f"ring collectives: {bandwidths.intra / 1e9:.0f} GB/s and {in_seconds(bandwidths.latency_intra)} per hop in a "
            f"node of {bandwidths.gpus_per_node}, {bandwidths.inter / 1e9:.0f} GB/s per GPU and "
            f"{in_seconds(bandwidths.latency_inter)} per hop between nodes; without the time of the host and the optimizer"
        )
        return found


def _alternatives(choice: Choice, ranks: Ranks, step: _StepOptions) -> list[tuple[Choice, Ranks]]:
    """The other strategies over the same number of ranks, with their own defaults of ``reshard_after_forward``."""
    per_node, chosen = step.bandwidths.gpus_per_node, choice.config.strategy
    plain = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
    over = dict.fromkeys(plain, Ranks(ranks.total))
    if chosen.is_hybrid:
        over[ShardingStrategy.HYBRID_SHARD] = over[ShardingStrategy.HYBRID_SHARD_ZERO2] = ranks
    elif ranks.total > per_node and ranks.total % per_node == 0:
        over[ShardingStrategy.HYBRID_SHARD] = Ranks(per_node, ranks.total // per_node)
    return [
        (with_config(choice, functools.partial(dataclasses.replace, strategy=s, reshard_after_forward=None)), its_ranks)
        for s, its_ranks in over.items()
        if s is not chosen
    ]


def _pinned(config: UnitConfig) -> UnitConfig:
    """The same with pinned host memory, by which ``Books`` recognises memory on the host."""
    return dataclasses.replace(config, cpu_offload=dataclasses.replace(config.cpu_offload, pin_memory=True))
