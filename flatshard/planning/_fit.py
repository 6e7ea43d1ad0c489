"""``fit_to_memory``: choose what to give up so that a step is within a budget of memory. ``_search.py`` finds it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from flatshard._base.config import MixedPrecision
from flatshard._composable.construct.policy import Policy
from flatshard._composable.find import units_of_parameters
from flatshard.planning._arguments import check_arguments, device_type, largest, parse_bytes, repeated
from flatshard.planning._fitted import Baseline, MemoryFit, Tradeoff, UnitFit, names_in_short
from flatshard.planning._optimizer import OptimizerChoice
from flatshard.planning._picture import in_bytes
from flatshard.planning._program import StepOptions
from flatshard.planning._records import Ranks
from flatshard.planning._search import Change, Search
from flatshard.planning._step import Configuration, Step


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
    """Choose what to give up so that a training step takes at most ``bytes_per_rank``. Needs no ranks.

    It decides for each unit whether its parameters stay gathered from forward to backward, and whether it computes its
    forward again in backward in place of keeping activations. With ``microbatches`` units may stay gathered for the whole
    step, and :func:`no_sync` may save reductions: ``MemoryFit.no_sync``.

    If that is not enough: whether embeddings, final norm and head are units of their own
    (:class:`~flatshard.policies.SplitRoot`), which units are too large to be gathered ahead, with ``offload_optimizer``
    whether optimizer state is on the host, and with ``cpu_offload`` which units have all that is theirs there: as few as are
    enough. The peak that it predicts is that of :func:`plan_step`, which runs the program on meta.

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
            decides between gathering again and computing again. The default is that of an accelerator: 400e12 operations
            and 50e9 bytes a second. :func:`~flatshard.planning.measure_flops_per_byte` measures it.

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
        no_sync=False,  # ``Search`` decides
        activations=0,
        example_inputs=example_inputs,
        device=device_type(device),
        widens=None,
        loss=loss,
        receives=True,
    )
    others = {"mixed_precision": mixed_precision, "ignored_states": ignored_states}
    if offload_optimizer and not callable(optimizer):
        raise ValueError(
            "fit_to_memory: with offload_optimizer, optimizer must be a class or a function that makes one"
        )
    hosts = (offload_optimizer, cpu_offload) if options.device != "cpu" else (False, False)

    def search_of(inputs: Any) -> Search:
        step = Step(module, dataclasses.replace(options, example_inputs=inputs), others)
        return Search(
            step,
            ranks,
            step.units(policy, ranks),
            budget=budget,
            flops_per_byte=flops_per_byte,
            recomputes=recompute,
            hosts=hosts,
        )

    def least_peak(rows: int) -> int:
        search = search_of(repeated(example_inputs, rows))
        return search.step.plan(search.lowest(), ranks).total_peak.nbytes

    size, inputs = None, example_inputs
    if largest_batch:
        size = largest(least_peak, budget)
        inputs = repeated(example_inputs, size)
    found_units = "blocks that are repeated" if policy is None else "the units of the policy"
    return _result(search_of(inputs), found_units, size)


def _result(search: Search, found_units: str, batch: int | None) -> MemoryFit:
    """Search, and return the result.

    Raises:
        ValueError: nothing fits.
    """
    step, ranks, changes = search.step, search.ranks, search.find()
    plan, chosen = search.plan(changes), search.after(changes)
    if plan.total_peak.nbytes > search.budget:
        raise ValueError(_nothing_fits(search, search.lowest()))
    hosts = chosen.hosts()
    return MemoryFit(
        budget=search.budget,
        plan=plan,
        baseline=Baseline(search.first.total_peak.nbytes, search.first.sent_nbytes, search.first.flops or 0),
        units=tuple(
            UnitFit(unit.fqn, chosen.strategy_of(unit.stays, ranks).name, unit.recomputes, unit.fqn in hosts)
            for unit in chosen.units
        ),
        tradeoffs=tuple(_tradeoffs(search, changes)),
        arguments=chosen.arguments(ranks) | {name: value for name, value in step.others.items() if value is not None},
        found=found_units,
        notes=tuple(search.notes),
        batch=batch,
        makes_optimizer=step.options.optimizer,
        microbatches=step.options.microbatches,
        no_sync=chosen.no_sync,
        offloads_optimizer=chosen.states,
    )


def _tradeoffs(search: Search, changes: Sequence[Change]) -> Iterator[Tradeoff]:
    """Yield what is given up by ``changes``, those of one kind together, with what the plan after them has more."""
    names = [unit.fqn for unit in search.start.units]
    done: list[Change] = []
    before, copied_before = search.first, 0
    kinds = list(dict.fromkeys(change.kind for change in changes))
    for _, group in itertools.groupby(sorted(changes, key=lambda change: kinds.index(change.kind)), lambda m: m.kind):
        these = list(group)
        done += these
        plan, copied = search.plan(done), search.copied_nbytes(done)
        units = [names[number] for number in sorted(change.unit for change in these if change.unit is not None)]
        yield Tradeoff(
            names_in_short(units, names) if units else "",
            these[-1].what,
            plan.total_peak.nbytes,
            plan.sent_nbytes - before.sent_nbytes,
            copied - copied_before,
            (plan.flops or 0) - (before.flops or 0),
        )
        before, copied_before = plan, copied


def _nothing_fits(search: Search, lowest: Configuration) -> str:
    """Return the message for a budget that even ``lowest``, the configuration of the lowest peak, exceeds."""
    at = search.step.plan(lowest, search.ranks).total_peak
    said = (
        f"fit_to_memory: {type(search.step.module).__name__} does not fit into {in_bytes(search.budget)} on "
        f"{search.ranks}. The least possible peak is {at.nbytes:,} bytes ({in_bytes(at.nbytes)}). "
    )
    if (ranks := _ranks_that_fit(search, lowest)) is not None:
        return said + f"It would fit on {ranks}"
    return said + (
        f"More ranks are not enough: at the peak, in {at.phase} at unit {at.unit or '<root>'!r}, there are "
        f"{in_bytes(at.memory.activations)} of activations and {in_bytes(at.memory.unsharded)} of gathered parameters. "
        "Take smaller batches, or smaller units (policy=...)"
    )


def _ranks_that_fit(search: Search, lowest: Configuration) -> Ranks | None:
    """Return the least number of ranks that is found to be enough, beyond 8 a multiple of 8, or None if none is."""
    have, peak = search.ranks, search.step.plan(lowest, search.ranks).total_peak
    sharded = peak.memory.shards + peak.memory.gradients + peak.memory.optimizer
    room = search.budget - (peak.nbytes - sharded)
    for more in (1.0, 1.05, 1.2, 2.0, 8.0) if room > 0 else ():
        shards = max(have.shards + 1, int(more * have.shards * sharded / room))
        ranks = Ranks(have.replicas, shards if shards <= 8 else -(-shards // 8) * 8)
        if search.step.plan(lowest, ranks).total_peak.nbytes <= search.budget:
            return ranks
    return None
