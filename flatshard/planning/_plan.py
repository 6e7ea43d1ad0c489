"""``plan_step``: the units that ``fully_shard`` would build, and the memory and collectives of a step.

``_program.py`` shards a copy of the module on the meta device, and runs steps. ``_recording.py`` records their collectives,
operations and memory. ``_report.py`` shows the result.
"""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from flatshard._base.config import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from flatshard._base.errors import name_list
from flatshard._composable.construct.partition import check_parameters
from flatshard._composable.construct.policy import Policy, check_module
from flatshard._composable.find import units_of_parameters
from flatshard._composable.fully_shard import Choice, choose
from flatshard._composable.state import Unit
from flatshard._composable.unit_config import UnitConfig, unit_config
from flatshard._handle.adapters.tensor_subclass import is_wrapper
from flatshard.debug._describe import UnitDescription, describe
from flatshard.layouts import LayoutChoice
from flatshard.planning._arguments import check_arguments, device_type
from flatshard.planning._axes import RanksChoice, choose_ranks
from flatshard.planning._optimizer import OptimizerChoice
from flatshard.planning._program import META, LossChoice, Program, StepOptions
from flatshard.planning._records import PlannedCollective, Ranks
from flatshard.planning._report import StepPlan, UnitPlan


def plan_step(
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
    shard_mesh_fn: RanksChoice = None,
    recompute: bool = False,
    widens: bool | None = None,
    optimizer: OptimizerChoice = None,
    microbatches: int = 1,
    no_sync: bool = False,
    activations: int | Mapping[str, int] = 0,
    example_inputs: Any = None,
    loss: LossChoice = None,
    ranks_per_node: int = 8,
    device: str = "cuda",
    compare: bool = True,
) -> StepPlan:
    """Plan the units that :func:`fully_shard` would build, and the memory and collectives of a step, without a process group.

    It shards a copy of the module on the meta device, as one rank of a process group that does not exist, and runs steps with
    the same code and hooks as training. It records what they issue, allocate and free. So units, collectives with their
    order, and memory are exact.

    Example::

        plan = flatshard.plan_step(model, policy={Block}, world_size=64, optimizer=torch.optim.AdamW, example_inputs=(batch,))
        print(plan)  # plan.plot("step.svg") draws the memory over a step

    The result is about the second step and later ones. Gradients are dropped (``zero_grad()``) before forward. Without
    ``example_inputs`` it assumes that modules run one after the other, each once, in the order in which they are registered,
    and that every trainable parameter gets a gradient. Temporary memory in the optimizer's ``step()`` is counted (as
    activations), if an optimizer is given that can be made. Not counted are buffers of communicators, fragmentation of the
    allocator, and memory that kernels allocate themselves. Attention takes what the kernels of ``device`` take.

    Args:
        module: the whole module on any device; on meta it takes no memory. It is deep-copied, and not changed.
        policy, mixed_precision, cpu_offload, ignored_states, backward_prefetch, forward_prefetch: as for :func:`fully_shard`.
        prefetch_limit_bytes, reshard_after_forward, layout, static_buffers, recompute: the same. With collectives that have
            an ``allocate``, pass ``static_buffers=True``.
        shard_mesh_fn: as for :func:`fully_shard`. In place of a mesh it may return its shape, a number of ranks:
            ``lambda fqn, param: 8 if "experts" in fqn else None``. The module has the experts of one rank, as DTensors or as
            plain parameters of their local shapes. Ranks with the same shard are consecutive, as in a mesh ``("dp", "ep")``.
        world_size: the number of ranks. For hybrid strategies it may be (replicas, ranks to shard over), like the shape of a
            2-D mesh. With a single number they shard within a node of ``ranks_per_node``.
        strategy: as for :func:`fully_shard`.
        widens: whether gradients are sent in the dtype that they were computed in and added in ``reduce_dtype``, as by
            ``flatshard.comm.DefaultCollectives(group, widens=True)``. None: as by the built-in collectives, True for gloo and
            False for NCCL.
        optimizer: for the size of its state: a class or function that makes an optimizer of a list of parameters
            (``torch.optim.AdamW``, ``functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)``); or an optimizer on
            ``module``'s parameters; or the number of bytes of state per element. None: no state. The size is measured by a
            step on the meta device. That of an ``OffloadedOptimizer`` is on the host, and comes unit by unit in its step;
            ``step_in_backward`` is not planned.
        microbatches: the number of forwards and backwards in a step.
        no_sync: whether all but the last of them run under :func:`no_sync`.
        example_inputs: arguments of ``module``'s forward: a tuple, or a dict of keyword arguments. Only shapes and dtypes
            matter, unless the model looks at integers and booleans (masks, positions): their values are used. With them the
            copy runs its own forward and backward, so that the order of units, activations and floating-point operations are
            recorded, too. They are in memory through the step, as in a loop over batches.
        loss: with ``example_inputs``: a function of what ``module`` returns, from which backward runs. None: its ``loss``, if
            it has one, or else the sum of all tensors.
        activations: without ``example_inputs``: the bytes that autograd saves in each unit except the outermost, or a dict of
            them by FQN.
        ranks_per_node: for hybrid strategies whose shape is not given, and for comparing with them.
        device: the type of device to train on. On ``"cpu"`` nothing is offloaded; memory is that of ranks on several hosts.
            Ranks of one host take the memory of what is gathered ahead later, and have shared memory beside it
            (``FLATSHARD_SHARED_MEMORY``). In all they hold at most about two shards of the largest unit, or 1 MiB, more.
        compare: also plan the other strategies over as many ranks, for ``StepPlan.strategies``.

    Raises:
        TypeError, ValueError: an argument is wrong, as the message says; or a part of ``module`` is sharded already.
        NotImplementedError: not supported here: tensor subclasses other than DTensors, and collectives of single units.
    """
    check_arguments("plan_step", locals())
    given = locals() | {"device": device_type(device)}
    options = StepOptions(
        **{field.name: given[field.name] for field in dataclasses.fields(StepOptions) if field.name in given},
        receives=True,
    )
    of_unit = [field.name for field in dataclasses.fields(UnitConfig) if field.name in given]
    config = unit_config(collectives=None, **{name: given[name] for name in of_unit})
    ranks = _ranks(world_size, config.strategy, ranks_per_node)
    if isinstance(module, nn.Module) and (units := units_of_parameters(module)):
        raise ValueError(
            f"plan_step: unit {units[0].fqn or '<root>'!r} of this {type(module).__name__} is sharded already. describe() "
            "shows its units. To plan, build the model again: `with torch.device('meta'):` takes no memory"
        )
    check_module(module)
    choice = choose(module, policy, config, ignored_states, ranks.shards)
    check(choice, activations)
    choose_ranks(choice.planned, ranks)
    others = _alternatives(choice, ranks, ranks_per_node) if compare else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fully_shard itself will warn
        recorded = tuple(plan_of(Program(module, *other, options)) for other in others)
        return plan_of(Program(module, changed(choice), ranks, options), recorded)


def _ranks(world_size: Any, strategy: ShardingStrategy, per_node: int) -> Ranks:
    """Return the argument ``world_size`` as replicas and ranks to shard over."""
    if isinstance(world_size, tuple) and not strategy.is_hybrid:
        raise ValueError(
            f"plan_step: world_size={world_size} is for hybrid strategies, (replicas, ranks to shard over), but strategy is "
            f"{strategy}: pass the number of ranks, or strategy=ShardingStrategy.HYBRID_SHARD"
        )
    if isinstance(world_size, tuple):
        return Ranks(*world_size)
    if not strategy.is_hybrid:
        return Ranks(1, world_size)
    if world_size % per_node:
        raise ValueError(
            f"plan_step: {strategy} shards within a node, but {per_node} ranks a node do not divide {world_size} ranks: "
            "pass world_size=(replicas, ranks to shard over), or ranks_per_node=..."
        )
    return Ranks(world_size // per_node, per_node)


def check(choice: Choice, activations: int | Mapping[str, int]) -> None:
    """Raise if the units that the policy chose cannot be planned.

    Raises:
        ValueError: ``fully_shard`` could not shard a parameter, or ``activations`` names something that is no unit.
        NotImplementedError: this can be sharded but not planned.
    """
    check_parameters(choice.planned, META, None)
    for owned in (owned for unit in choice.planned for owned in unit.owned):
        if is_wrapper(owned.param):
            raise NotImplementedError(
                f"plan_step: parameter {owned.fqn!r} is a {type(owned.param).__name__}, and tensor subclasses other than "
                "DTensors cannot be planned. Plan the model with plain parameters of the sizes that this rank has"
            )
    if any(config.collectives is not None for config in choice.configs):
        raise NotImplementedError(
            "plan_step: the policy overrides collectives for a unit, but only the built-in ones can be planned"
        )
    names = [unit.fqn for unit in choice.planned]
    if isinstance(activations, Mapping) and (odd := [n for n in activations if n not in names]):
        raise ValueError(f"plan_step: activations has {odd[0]!r}, which is not a unit; the units are {names}")


def _alternatives(choice: Choice, ranks: Ranks, per_node: int) -> list[tuple[Choice, Ranks]]:
    """Return the other strategies over the same number of ranks, with their defaults of ``reshard_after_forward``."""
    over = dict.fromkeys((s for s in ShardingStrategy if not s.is_hybrid), Ranks(1, ranks.total))
    if choice.strategy.is_hybrid:
        over |= dict.fromkeys((s for s in ShardingStrategy if s.is_hybrid), ranks)
    elif ranks.total > per_node and ranks.total % per_node == 0:
        over[ShardingStrategy.HYBRID_SHARD] = Ranks(ranks.total // per_node, per_node)
    del over[choice.strategy]
    if any(len(unit.groups) > 1 for unit in choice.planned):  # ``shard_mesh_fn`` chose for this kind of strategy
        kinds = choice.strategy.is_hybrid, False, False
        over = {s: each for s, each in over.items() if (s.is_hybrid, s.is_replicated, s.joins_axes) == kinds}
    return [(changed(choice, strategy=s, reshard_after_forward=None), its_ranks) for s, its_ranks in over.items()]


def changed(choice: Choice, **options: Any) -> Choice:
    """Return ``choice`` with other ``options`` for every unit, and with pinned memory, by which ``Books`` knows the host."""

    def change(config: UnitConfig) -> UnitConfig:
        pinned = dataclasses.replace(config.cpu_offload, pin_memory=True)
        return dataclasses.replace(config, cpu_offload=pinned, **options)

    planned = [dataclasses.replace(unit, config=change(unit.config)) for unit in choice.planned]
    return dataclasses.replace(choice, planned=planned, strategy=options.get("strategy", choice.strategy))


def plan_of(program: Program, others: tuple[StepPlan, ...] = ()) -> StepPlan:
    """Run ``program``, and return the plan of what it has recorded."""
    program.run()
    collectives = program.recorder.collectives
    recorded = program.options.example_inputs is not None
    issued = {unit.fqn: [c for c in collectives if c.unit == unit.fqn] for unit in program.units}
    described = zip(program.units, describe(program.root).units, strict=True)
    flops = program.recorder.flops
    others_send = program.dtensor_groups.names
    units = tuple(
        _unit_plan(unit, of_unit, issued[unit.fqn], others_send, program.states, flops[unit.fqn])
        for unit, of_unit in described
    )
    return StepPlan(
        module=type(program.root).__name__,
        strategy=program.choice.strategy.name,
        world_size=program.ranks,
        device=program.options.device,
        units=units,
        samples=tuple(program.books.samples),
        collectives=tuple(collectives),
        flops=flops.total() if recorded else None,
        others=others,
        warnings=tuple(_warnings(program, units)),
        assumptions=tuple(_assumptions(program)),
    )


def _unit_plan(
    unit: Unit,
    described: UnitDescription,
    issued: Sequence[PlannedCollective],
    others_send: set[str],
    states: Mapping[nn.Parameter, int],
    flops: int,
) -> UnitPlan:
    flats = unit.handle.flats
    params = [p for f in flats for p in f.params]
    grads = {id(s): s.nbytes() for s in (p.grad.untyped_storage() for p in params if p.grad is not None)}
    reduced = [g for g in unit.handle.gradients.flats if g.takes_part and any(g.flat.requires_grad)]
    outputs = [g.flat.layout.shard_numel * g.dtypes.reduce.itemsize for g in reduced if not g.flat.holds_all]
    kind = "reduce-scatter" if outputs else "all-reduce"
    inputs = [c.nbytes for c in issued if c.kind == kind and c.group not in others_send]
    return UnitPlan(
        **vars(described),
        shard_nbytes=sum(f.shard.nbytes for f in flats),
        gradient_nbytes=sum(grads.values()),
        optimizer_nbytes=sum(states.get(p, 0) for p in params),
        unsharded_nbytes=unit.handle.memory.nbytes,
        reduction_nbytes=sum(inputs[len(inputs) - len(reduced) :]) + sum(outputs),
        collectives=len(issued),
        sent_nbytes=sum(c.sent_nbytes for c in issued),
        flops=flops,
    )


MUCH_PADDING = 0.05  # warn if more than this part of a unit's elements is padding
MUCH_IMBALANCE = 0.1  # warn if the fullest rank has more elements than the average, by more than this part
DOMINANT = 0.5  # warn if one unit has more than this part of all elements


def _warnings(program: Program, units: Sequence[UnitPlan]) -> list[str]:
    """Return warnings about layouts, and about the sizes of units and shards."""
    found = program.layout_warnings
    if len(found) > 3:
        found = [*found[:2], f"likewise {len(found) - 2} more flat parameters"]
    padding = {u.fqn or "<root>": u.padding / max(1, u.numel) for u in units if u.padding > MUCH_PADDING * u.numel}
    if padding:
        worst = max(padding, key=padding.__getitem__)
        have = f"{len(padding)} units ({name_list(padding, 3)}) have" if len(padding) > 1 else f"unit {worst!r} has"
        found.append(
            f"{have} more than {MUCH_PADDING:.0%} padding ({worst!r}: {padding[worst]:.0%}). "
            "Parameters begin at multiples of 16 bytes, and each shard has an element at least. So small parameters, few "
            "elements for many ranks, and layouts by rows or blocks need padding: make larger units"
        )
    most, mean = program.numels.most, program.numels.mean
    if most > (1 + MUCH_IMBALANCE) * mean:
        found.append(f"shards are unbalanced: the fullest rank has {most:,} elements, the average is {mean:,.0f}")
    largest, numel = max(units, key=operator.attrgetter("numel")), sum(u.numel for u in units)
    if len(units) > 1 and largest.numel > DOMINANT * numel:
        found.append(
            f"unit {largest.fqn or '<root>'!r} has {largest.numel / numel:.0%} of all elements, which are unsharded at the "
            "same time: choose units inside it, too"
        )
    return found


def _assumptions(program: Program) -> list[str]:
    """Return the assumptions behind the numbers."""
    options, own = program.options, {groups for unit in program.choice.planned for groups in unit.groups[1:]}
    recorded = options.example_inputs is not None
    given = "as passed to plan" if options.activations else "not known, and not counted"
    reduced = "all but the last under no_sync" if options.no_sync else "each one reduced"
    found = {
        "the second step or a later one; gradients dropped before forward; sizes on the rank with most elements": True,
        "order, operations and activations recorded on the meta device": recorded,
        "modules run one after the other, in the order of registration; every trainable parameter is used": not recorded,
        f"activations: {given}": not recorded,
        "parameters on other ranks (shard_mesh_fn): counted as this rank's groups have them": bool(own),
        "what DTensors send in the model's operations is not known, and not counted": (
            bool(program.dtensor_groups.names) and not recorded
        ),
        f"{options.microbatches} microbatches, {reduced}": options.microbatches > 1,
        "no optimizer was given: no state": options.optimizer is None,
    }
    return [text for text, holds in found.items() if holds]
