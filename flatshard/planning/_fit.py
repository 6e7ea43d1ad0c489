"""``fit_to_memory``: choose what to give up so that a step is within a budget of memory.

[Note: What is given up]
Within one *setting* each unit gives up what it must: gathered parameters cost bytes sent, activations cost operations.
Splitting the outermost unit costs bytes, too, so the cheaper of both settings is chosen. Bytes do not tell the cost of the
other settings: less prefetch, shards of a hybrid strategy over all ranks, shards on the host. So these are tried in a fixed
order, the next one only if nothing fits before. The highest prefetch limit that fits is chosen.

``_search.py`` finds the choice: ``_timeline.py`` predicts the memory of each, ``_chooser.py`` finds the cheapest. The choice
that is returned has been planned itself, so its peak is exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from flatshard._base.config import MixedPrecision, ShardingStrategy
from flatshard._composable.construct.policy import Policy
from flatshard._composable.find import units_of_parameters
from flatshard.planning._arguments import check_arguments, default_loss, device_type, largest, parse_bytes, repeated
from flatshard.planning._choices import UNTIL_FORWARD, Choices, steps_between
from flatshard.planning._chooser import peaks_along
from flatshard.planning._fitted import Baseline, MemoryFit, Tradeoff, UnitFit, in_words, names_in_short
from flatshard.planning._on_host import copied_for, copied_nbytes
from flatshard.planning._optimizer import OptimizerChoice
from flatshard.planning._picture import in_bytes
from flatshard.planning._program import StepOptions
from flatshard.planning._records import Ranks
from flatshard.planning._report import StepPlan
from flatshard.planning._search import Search
from flatshard.planning._settings import EVERYTHING, Setting, Step, steps_to, strategies_of
from flatshard.planning._step_model import StepModel
from flatshard.planning._stitched import step_model


def fit_to_memory(
    module: nn.Module,
    *,
    bytes_per_rank: float | str,
    world_size: int | tuple[int, int],
    optimizer: OptimizerChoice,
    example_inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    policy: Policy = None,
    mixed_precision: MixedPrecision | Any = None,
    ignored_states: Iterable[nn.Module | nn.Parameter] | None = None,
    microbatches: int = 1,
    largest_batch: bool = False,
    recompute: bool = True,
    cpu_offload: bool = False,
    offload_optimizer: bool = False,
    flops_per_byte: float = 8000.0,
    device: str = "cuda",
) -> MemoryFit:
    """Choose what to give up so that a training step takes at most ``bytes_per_rank``, at the least cost. Needs no ranks.

    It decides for each unit whether its parameters stay gathered from forward to backward, and whether it computes its
    forward again in backward in place of keeping activations. If that is not enough: whether embeddings, final norm and
    head are units of their own (:class:`~flatshard.policies.SplitRoot`), which units are too large to be gathered ahead, with
    ``offload_optimizer`` whether optimizer state is on the host, and with ``cpu_offload`` which units have all that is theirs
    there: as few as are enough. The peak that it predicts is that of :func:`plan_step`, which runs the program on meta.

    Example::

        fit = flatshard.fit_to_memory(
            model, bytes_per_rank="2 MiB", world_size=4, optimizer=torch.optim.AdamW, example_inputs=(batch,), device="cpu"
        )
        print(fit)  # fit.plot("step.svg") draws the memory over the step, with the budget

    A step is: forward, backward from ``loss``, ``optimizer.step()``, ``zero_grad()``, while the batch is kept. What the model
    returned is not kept beyond the loss. See :func:`plan_step` for what is counted. Leave room for what is not: buffers of
    communicators, fragmentation, what kernels allocate themselves, and the device's own context.

    Args:
        module: the whole module, not sharded, on any device; on meta it takes no memory. It is copied, and not changed.
        bytes_per_rank: the budget: bytes, or a text such as ``"40 GiB"``.
        world_size: the number of ranks to shard over. (replicas, ranks to shard over): hybrid strategies. Then pass
            ``device_mesh=`` to ``MemoryFit.apply``, or ``process_group=``.
        optimizer, ignored_states, mixed_precision, microbatches, device: as for :func:`plan_step`.
        example_inputs: as for :func:`plan_step`: one microbatch of one rank. Shapes matter, and values of integers.
        loss: a function of what ``module`` returns. None: its ``loss``, if it has one, or else the sum of all tensors.
        policy: the units, as for :func:`fully_shard`, without arguments that it overrides. None: the blocks that the module
            repeats, as :func:`~flatshard.policies.find_blocks` finds them.
        largest_batch: True: find the largest microbatch with which a step fits, whatever is given up: ``MemoryFit.batch``.
            ``example_inputs`` are repeated along the first dimension of those tensors that have as many rows as the first.
        recompute: False: no unit computes its forward again.
        cpu_offload: True: units may be on the host, or all of the model, if nothing else is enough.
        offload_optimizer: True: optimizer state may be on the host, and come to the device unit by unit. Then train with
            ``fit.optimizer(model.parameters())``. ``optimizer`` must be a class or a function.
        flops_per_byte: how many floating-point operations take as long as to send one byte: what is dear on your machine. It
            decides between gathering again and computing again.

    Raises:
        ValueError: nothing fits; the message has the least possible peak, and the number of ranks with which it would fit. Or
            an argument is wrong.
        NotImplementedError: the policy makes one unit of several modules, or overrides arguments.
    """
    check_arguments("fit_to_memory", locals())
    budget = parse_bytes(bytes_per_rank)
    if not isinstance(module, nn.Module):
        raise TypeError(f"fit_to_memory takes an nn.Module, got a {type(module).__name__}")
    ranks = Ranks(*world_size) if isinstance(world_size, tuple) else Ranks(1, world_size)
    if example_inputs is None:
        raise ValueError("fit_to_memory: example_inputs must be the inputs of one microbatch, got None")
    if units_of_parameters(module):
        raise ValueError("fit_to_memory: the module is sharded already: build it again, on meta it takes no memory")
    options = StepOptions(
        optimizer=optimizer,
        microbatches=microbatches,
        no_sync=microbatches > 1,
        activations=0,
        example_inputs=example_inputs,
        device=device_type(device),
        widens=None,
        loss=loss or default_loss,
        keeps_inputs=True,
        receives=True,
    )
    others = {"mixed_precision": mixed_precision, "ignored_states": ignored_states}
    if offload_optimizer and not callable(optimizer):
        raise ValueError(
            "fit_to_memory: with offload_optimizer, optimizer must be a class or a function that makes one"
        )
    offloads = [Setting(states=True)] if offload_optimizer else []
    offloads += [Setting(states=offload_optimizer, offload=EVERYTHING)] if cpu_offload else []
    offloads = [] if options.device == "cpu" else offloads

    def search_of(inputs: Any) -> Search:
        step = Step(module, dataclasses.replace(options, example_inputs=inputs), others)
        model = step_model(step, ranks, step.units(policy, ranks))
        return Search(model, budget, flops_per_byte, recompute)

    size, inputs = None, example_inputs
    if largest_batch:
        size = largest(lambda rows: search_of(repeated(example_inputs, rows)).least_peak(offloads), budget)
        inputs = repeated(example_inputs, size)
    found_units = "blocks that are repeated" if policy is None else "the units of the policy"
    return dataclasses.replace(_result(search_of(inputs), offloads, found_units), batch=size)


def _result(search: Search, offloads: Sequence[Setting], found_units: str) -> MemoryFit:
    """Search, and return what is found.

    Raises:
        ValueError: nothing fits.
    """
    model = search.model
    setting, choices = search.find(offloads)
    if search.peak(setting, choices) > search.budget:
        raise ValueError(_nothing_fits(search, setting, choices))
    plan = model.plan_in_full(setting, choices)
    if plan.total_peak.nbytes != search.peak(setting, choices):  # its blocks are not as alike as they look
        model = StepModel(model.step, model.ranks, model.names)
        search = Search(model, search.budget, search.flops_per_byte, search.recomputes)
        return _result(search, offloads, found_units)
    strategies = dict(strategies_of(model.ranks))
    if setting.joined:
        strategies[UNTIL_FORWARD] = ShardingStrategy.HYBRID_FULL_SHARD
    units = [
        UnitFit(name, strategies[choice.stays].name, choice.recomputes, setting.is_on_host(name))
        for name, choice in zip(model.names, choices, strict=True)
    ]
    first = model.plan(Setting(), model.start)
    others = {name: value for name, value in model.step.others.items() if value is not None}
    by_units = [] if choices == model.start else _tradeoffs_by_units(search, setting, choices, plan)
    return MemoryFit(
        budget=search.budget,
        plan=plan,
        baseline=Baseline(first.total_peak.nbytes, first.sent_nbytes, first.flops or 0),
        units=tuple(units),
        tradeoffs=(*_tradeoffs_by_setting(search, setting, plan, by_units), *by_units),
        arguments=model.arguments(setting, choices) | others,
        found=found_units,
        notes=tuple(search.notes),
        makes_optimizer=model.step.options.optimizer,
        offloads_optimizer=setting.states,
    )


def _tradeoffs_by_setting(
    search: Search, setting: Setting, plan: StepPlan, by_units: Sequence[Tradeoff]
) -> Iterator[Tradeoff]:
    """Yield the changes that lead to ``setting``, in order, each with the peak after it by the program."""
    model, before = search.model, Setting()
    for text, changed in zip(setting.given_up, steps_to(setting), strict=True):
        sent = model.plan(changed, model.start).sent_nbytes - model.plan(before, model.start).sent_nbytes
        of, copied = "", 0
        if changed.offload:
            hosts = None if changed.offload == EVERYTHING else changed.offload
            of = names_in_short(hosts, model.names) if hosts else ""
            copied = copied_nbytes(plan, hosts) - sum(each.copied_nbytes for each in by_units)
        elif changed.states and not before.states:
            stay = [each.optimizer_nbytes for each in plan.units if setting.is_on_host(each.fqn)]
            copied = 2 * (plan.host.optimizer - sum(stay))
        yield Tradeoff(of, text, search.peak(changed, model.start), sent, copied, 0)
        before = changed


def _tradeoffs_by_units(search: Search, setting: Setting, choices: Choices, plan: StepPlan) -> list[Tradeoff]:
    """Return what units give up, in order, each with the peak after it by the timeline. The last peak is the program's."""
    model, timeline, costs = search.model, search.timeline(setting), search.costs(setting)
    steps = list(steps_between(model.start, choices, timeline.order))
    peaks = peaks_along(timeline, model.start, steps, search.recomputes)
    plans = {unit.fqn: unit for unit in plan.units}
    shards = model.ranks.shards
    done, found = list(model.start), []

    def computed_again(unit: int) -> float:
        beside = timeline.nesting.beside[unit]
        return sum(costs.computed_again(each, timeline.nesting.state(each, done).keeps) for each in beside)

    for (unit, keeps), peak in zip(steps, peaks, strict=True):
        name, before, had = model.names[unit], computed_again(unit), done[unit]
        done[unit] = keeps
        sent = costs.sent(unit, keeps) - costs.sent(unit, had)
        gathered = sent * shards / max(1, shards - 1)
        copied = round(copied_for(plans[name], gathered)) if setting.is_on_host(name) else 0
        again = round(computed_again(unit) - before)
        found.append(Tradeoff(name, in_words(keeps, had), peak, round(sent), copied, again))
    return [*found[:-1], found[-1]._replace(peak=plan.total_peak.nbytes)]


def _nothing_fits(search: Search, setting: Setting, lowest: Choices) -> str:
    """Return the message for a budget that even ``lowest``, the choice of the lowest peak, exceeds."""
    at = search.plan(setting, lowest).total_peak
    said = (
        f"fit_to_memory: {type(search.model.step.module).__name__} does not fit into {in_bytes(search.budget)} on "
        f"{search.model.ranks}. The least possible peak is {at.nbytes:,} bytes ({in_bytes(at.nbytes)})"
    )
    said += f", when {' and '.join(setting.given_up)}. " if setting.given_up else ". "
    if (ranks := _ranks_that_fit(search, setting, lowest)) is not None:
        return said + f"It would fit on {ranks}"
    return said + (
        f"More ranks are not enough: at the peak, in {at.phase} at unit {at.unit or '<root>'!r}, there are "
        f"{in_bytes(at.memory.activations)} of activations and {in_bytes(at.memory.unsharded)} of gathered parameters. "
        "Take smaller batches, or smaller units (policy=...)"
    )


def _ranks_that_fit(search: Search, setting: Setting, lowest: Choices) -> Ranks | None:
    """Return the least number of ranks that is found to be enough, beyond 8 a multiple of 8, or None if none is."""
    model, peak = search.model, search.plan(setting, lowest).total_peak
    sharded = peak.memory.shards + peak.memory.gradients + peak.memory.optimizer
    room = search.budget - (peak.nbytes - sharded)
    for more in (1.0, 1.05, 1.2, 2.0, 8.0) if room > 0 else ():
        shards = max(model.ranks.shards + 1, int(more * model.ranks.shards * sharded / room))
        ranks = Ranks(model.ranks.replicas, shards if shards <= 8 else -(-shards // 8) * 8)
        other = step_model(model.step, ranks, model.names)
        if other.plan(setting, lowest).total_peak.nbytes <= search.budget:
            return ranks
    return None
