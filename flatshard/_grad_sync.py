"""When gradients are reduced, and what they are divided by: ``no_sync`` and its relatives.

By default every backward reduces into ``.grad``, which adds up: gradient accumulation needs nothing from here, and holds no
more memory than one microbatch. ``no_sync`` trades memory (the unsharded gradients, in the reduce dtype) for communication.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from flatshard._composable.state import Unit, units_below


def _units(module: nn.Module, recurse: bool, verb: str) -> list[Unit]:
    units = units_below(module, recurse)
    if not units:
        kind = type(module).__name__
        what = f"nothing in this {kind} is sharded" if recurse else f"this {kind} is no unit"
        raise ValueError(f"{verb}: {what}; call fully_shard first")
    return units


@contextlib.contextmanager
def no_sync(module: nn.Module, recurse: bool = True) -> Iterator[None]:
    """Backwards inside keep their gradients on this rank; the first backward after it reduces their sum.

    A backward counts as inside if it *runs* inside; where its forward ran does not matter. All ranks must enter alike.
    ``.grad`` does not change inside, so ``zero_grad()`` there drops nothing: the next backward outside reduces what was
    held. To drop it, call :func:`recover`, or let the exception be raised in backward. A single rank has nobody to hold
    back from: its gradients are in ``.grad`` at once.

    Example::

        with flatshard.no_sync(model):
            for x in microbatches[:-1]:
                model(x).sum().backward()
        model(microbatches[-1]).sum().backward()

    Raises:
        ValueError: nothing in ``module`` is sharded.
    """
    units = _units(module, recurse, "no_sync")
    before = [(unit.requires_gradient_sync, unit.syncs_after) for unit in units]
    for unit in units:
        if unit.syncs_after is None:
            unit.syncs_after = unit.requires_gradient_sync
        unit.set_gradient_sync(False)
    try:
        yield
    finally:
        for unit, values in zip(units, before, strict=True):
            sync, unit.syncs_after = values
            unit.set_gradient_sync(sync)


def reduce_gradients(module: nn.Module, recurse: bool = True) -> None:
    """Reduce into ``.grad`` what backwards under :func:`no_sync` hold, without another backward. Every rank must call it.

    For loops whose last backward cannot be told from the others, such as a pipeline schedule's::

        with flatshard.no_sync(stage):
            schedule.step(x)
        flatshard.reduce_gradients(stage)  # one reduction, whatever the number of microbatches

    Raises:
        ValueError: nothing in ``module`` is sharded.
        RuntimeError: called inside a forward or a backward.
        CollectiveError: a reduction failed. What was held is dropped.
    """
    units = _units(module, recurse, "reduce_gradients")
    contexts = sorted({unit.context for unit in units}, key=lambda context: context.runtime.number)
    if any(context.is_running for context in contexts):
        raise RuntimeError("reduce_gradients: called inside a forward or a backward. Call it after them")
    for context in contexts:
        if context.backward.is_stale:
            context.recover()
        context.backward.reduce_held({unit for unit in units if unit.context is context})


def set_requires_gradient_sync(module: nn.Module, value: bool, *, recurse: bool = True) -> None:
    """Whether backwards from now on reduce gradients: :func:`no_sync` without a context, as FSDP2 has it."""
    for unit in _units(module, recurse, "set_requires_gradient_sync"):
        unit.set_gradient_sync(value)


def set_requires_all_reduce(module: nn.Module, value: bool, *, recurse: bool = True) -> None:
    """Whether backwards from now on average over the replicas of a hybrid strategy, besides the shard group.

    False holds this rank's part, reduced within the shard group, for the next backward to add to: "reduce-scatter now,
    all-reduce at the last microbatch". It takes the memory of the shard once more, not of the whole gradients.

    Raises:
        ValueError: a unit has no replicas, so that nothing would be averaged later.
    """
    units = _units(module, recurse, "set_requires_all_reduce")
    for unit in units:
        if unit.handle.replicas is None or not unit.config.strategy.is_hybrid:
            raise ValueError(
                f"set_requires_all_reduce: unit {unit.fqn or '<root>'!r} has strategy {unit.config.strategy.name} and no "
                "replicas to reduce over: use set_requires_gradient_sync, or a hybrid strategy over more than one group"
            )
    for unit in units:
        for grads in unit.handle.grads:
            grads.reduction.reduces_replicas = value


def set_gradient_divide_factor(module: nn.Module, factor: float | None, *, recurse: bool = True) -> None:
    """Divide the sum of the gradients over all ranks by ``factor``. None: by the number of ranks, the default.

    Raises:
        ValueError: ``factor`` is not a positive number.
    """
    if factor is not None and not factor > 0:
        raise ValueError(f"set_gradient_divide_factor: factor must be positive or None, got {factor}")
    for unit in _units(module, recurse, "set_gradient_divide_factor"):
        for grads in unit.handle.grads:
            grads.reduction.divide_factor = factor
