"""``plan``: what ``fully_shard`` would build, and what a step would cost, before there is a process group or a GPU."""

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
from flatshard._composable.fully_shard import Choice, choose, unit_config
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
    """What :func:`fully_shard` would build of ``module``, and what a step would take, without a process group or memory.

    A copy of the module on the meta device is sharded and stepped by the functions and hooks that train, as one rank of a
    world that does not exist. What they issue, allocate and free is recorded: units, collectives in their order, and memory
    are exact. Times are a model of the hardware, which ``bandwidths`` describes.

    Example::

        with torch.device("meta"):
            model = GPT(...)
        plan = flatshard.plan(model, policy={Block}, world_size=64, optimizer=torch.optim.AdamW, tokens=8192)
        print(plan)
        plan.trace("step.json")  # for https://ui.perfetto.dev

    What is planned is a step from the second on. Gradients are dropped (``zero_grad()``) before a forward. Without
    ``example_inputs``, modules are taken to run one after the other, each once, in the order in which they are registered,
    and every trainable parameter to get a gradient. Not counted: an optimizer's own temporary memory in ``step()``, a
    communicator's buffers, the allocator's fragmentation, and what a kernel allocates for itself.

    Args:
        module: the module, whole, on any device; meta takes no memory. It is not changed, and must allow a deep copy.
        policy, mixed_precision, cpu_offload, ignored_states, backward_prefetch, forward_prefetch, prefetch_limit_bytes,
            reshard_after_forward, layout, static_buffers: as for :func:`fully_shard`. With collectives that have an
            ``allocate``, pass ``static_buffers=True``.
        world_size: the number of ranks; for hybrid strategies also (replicas, ranks to shard over), as a 2-D mesh has them.
            Default there: shard within a node of ``bandwidths.gpus_per_node``.
        strategy: as for :func:`fully_shard`.
        widens: gradients are sent in the dtype that they were computed in and added in ``reduce_dtype``, as by
            ``flatshard.comm.DefaultCollectives(group, widens=True)``. None: as the built-in collectives do: gloo's widen,
            NCCL's do not.
        optimizer: for the bytes of its state: a class or function that makes one of a list of parameters
            (``torch.optim.AdamW``, ``functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)``), or one made of ``module``'s
            parameters, or a number of bytes for each element on a rank. It takes a step on the meta device. None: no state.
        microbatches: forwards and backwards in a step.
        no_sync: all but the last of them run under :func:`no_sync`. Else each is reduced.
        example_inputs: of ``module``'s forward: a tuple of arguments or a dict of keyword arguments, of which only shapes and
            dtypes count. Then the copy runs its own forward, and backward from the sum of its outputs: the order of units,
            activations and floating-point operations are recorded too.
        tokens: without them: positions that each rank computes in a microbatch. Takes a forward for 2 operations for each
            token and element of matrices, embeddings left out, and backward for as many for each gradient that is needed:
            of the input, and of the matrix. 0: computing takes no time.
        activations: without them: bytes that autograd saves for each unit but the outermost, or by FQN.
        bandwidths: the hardware, for times.
        device: the type of device to train on. On ``"cpu"`` there is nothing to offload.
        compare: plan the other strategies over as many ranks too, for ``Plan.strategies``.

    Raises:
        TypeError, ValueError: an argument is wrong; the message says which and what to do. Or something is sharded already.
        NotImplementedError: what is not modelled: tensor subclasses (DTensors), other collectives for single units.
    """
    bandwidths = Bandwidths() if bandwidths is None else bandwidths
    step = _Step(optimizer, microbatches, no_sync, tokens, activations, example_inputs, bandwidths, device, widens)
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
            f"plan: unit {units[0].fqn or '<root>'!r} of this {type(module).__name__} is sharded already. describe() tells "
            "what was built; to plan, build the model anew: `with torch.device('meta'):` takes no memory"
        )
    validate.check_module(module)
    choice = choose(module, policy, config, ignored_states, ranks.shards)
    _check(choice.planned)
    if any(c.collectives is not None for c in choice.configs.values()):
        raise NotImplementedError(
            "plan: the policy overrides collectives for a unit; only the built-in ones are planned"
        )
    chosen = _Run(module, choice, ranks, step)
    alternatives = _alternatives(choice, ranks, step) if compare else []
    others = [_Run(module, other, its_ranks, step).summary() for other, its_ranks in alternatives]
    return chosen.report(others)


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


def _check(planned: Sequence[PlannedUnit]) -> None:
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


@dataclasses.dataclass(frozen=True)
class _Step:
    """What the arguments say of a step beyond those of ``fully_shard``.

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
        """Of a forward; or what is assumed."""
        given = self.example_inputs
        if given is None:
            return Assumed(self.tokens, self.activations)
        return (given,) if isinstance(given, Tensor) else given


class _Run:
    """One choice over some ranks, recorded."""

    def __init__(self, module: nn.Module, choice: Choice, ranks: Ranks, step: _Step) -> None:
        self.module, self.choice, self.ranks, self.step = module, choice, ranks, step
        names = [unit.fqn for unit in choice.planned]
        if isinstance(step.activations, Mapping) and (odd := [n for n in step.activations if n not in names]):
            raise ValueError(f"plan: activations has {odd[0]!r}, which is no unit; the units are {names}")
        kind = step.device.partition(":")[0]
        widens = kind == "cpu" if step.widens is None else step.widens
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of fully_shard come when it is called
            self.program = Program(module, with_config(choice, _pinned), ranks, kind, step.bandwidths, widens)
            try:
                self.program.run(step.microbatches, step.no_sync, step.inputs, self._optimize)
            except Exception as e:
                if step.example_inputs is not None and not str(e).startswith("plan:"):
                    e.add_note(
                        "plan: so ended the forward or backward of a copy on the meta device, where tensors have no values. "
                        "Where the model needs them, leave example_inputs out, and pass tokens= and activations="
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
            unit.fqn,
            described.module,
            described.strategy,
            described.flats,
            unit.config.reshard_after_forward,
            sum(f.shard.nbytes for f in flats),
            sum(grads.values()),
            sum(self.program.states.get(p, 0) for p in params),
            unit.handle.unsharded_nbytes,
            sum(inputs[len(inputs) - len(reduced) :]) + sum(cut),
            len(mine),
            sum(c.sent_nbytes for c in mine),
            sum(self.step.bandwidths.seconds_of(c, self.ranks.total) for c in gathers) / self.step.microbatches,
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
        """What the user may want to change."""
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
        """What the numbers stand on."""
        step, bandwidths, recorded = self.step, self.step.bandwidths, self.step.example_inputs is not None
        found = ["a step from the second on; gradients dropped before forward; sizes of the fullest rank"]
        if recorded:
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
        if self.timeline.compute_seconds:
            computed = "recorded" if recorded else f"2 for each token ({step.tokens:,}) and matrix element"
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


def _alternatives(choice: Choice, ranks: Ranks, step: _Step) -> list[tuple[Choice, Ranks]]:
    """The strategies that were not chosen, over the same number of ranks. They alone say what is kept after forward."""
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
    """With host memory that the books can tell: it is pinned."""
    return dataclasses.replace(config, cpu_offload=dataclasses.replace(config.cpu_offload, pin_memory=True))
