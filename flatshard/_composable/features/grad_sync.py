"""When gradients are reduced: ``no_sync`` and ``reduce_gradients``.

By default every backward reduces its gradients and adds them to ``.grad``. So gradient accumulation works without anything
from here, with the memory of one microbatch. ``no_sync`` saves communication, but keeps the unsharded gradients in memory, in
the reduce dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from flatshard._composable.features.full_params import shows_gradients
from flatshard._composable.find import units_for
from flatshard._composable.state import Unit
from flatshard._errors import name_list

held_back_units: list[list[Unit]] = []
"""For each ``no_sync`` that is active: its units."""


@contextlib.contextmanager
def no_sync(module: nn.Module, recurse: bool = True) -> Iterator[None]:
    """Backwards inside accumulate gradients on this rank. The first backward after it reduces their sum.

    This is about where backward *runs*; it does not matter where its forward ran. All ranks must enter together. Inside,
    ``.grad`` does not change, and ``zero_grad()`` does not drop the accumulated gradients: the next backward outside reduces
    them. To drop them, call :func:`recover`; an exception in a backward drops them, too. With a single rank gradients are
    added to ``.grad`` at once.

    Example::

        with flatshard.no_sync(model):
            for x in microbatches[:-1]:
                model(x).sum().backward()
        model(microbatches[-1]).sum().backward()

    Raises:
        ValueError: nothing in ``module`` is sharded.
    """
    units = units_for(module, recurse, "no_sync")
    before = [(unit.requires_gradient_sync, unit.syncs_after) for unit in units]
    for unit in units:
        if unit.syncs_after is None:
            unit.syncs_after = unit.requires_gradient_sync
        unit.set_gradient_sync(False)
    held_back_units.append(units)
    try:
        yield
    finally:
        held_back_units.remove(units)
        for unit, values in zip(units, before, strict=True):
            sync, unit.syncs_after = values
            unit.set_gradient_sync(sync)


def reduce_gradients(module: nn.Module, recurse: bool = True) -> None:
    """Reduce the gradients that backwards under :func:`no_sync` accumulated, and add them to ``.grad``.

    Every rank must call it. Use it if the last microbatch cannot run outside of ``no_sync``, as in a pipeline schedule::

        with flatshard.no_sync(stage):
            schedule.step(x)
        flatshard.reduce_gradients(stage)  # one reduction, whatever the number of microbatches

    Raises:
        ValueError: nothing in ``module`` is sharded.
        RuntimeError: called inside a forward or a backward, or inside ``summon_full_params(with_grads=True)``.
        CollectiveError: a reduction failed. The accumulated gradients are dropped.
    """
    units = units_for(module, recurse, "reduce_gradients")
    contexts = sorted({unit.context for unit in units}, key=lambda context: context.runtime.number)
    if any(context.is_running for context in contexts):
        raise RuntimeError("reduce_gradients: called inside a forward or a backward. Call it after them")
    if shown := [unit.fqn or "<root>" for unit in units if shows_gradients(unit)]:
        raise RuntimeError(
            f"reduce_gradients: called inside summon_full_params(with_grads=True) of {name_list(shown)}, which on exit would "
            "overwrite the reduced gradients by those it shows. Call it outside"
        )
    for unit in units:
        if not unit.is_used:
            unit.handle.check_parameters()
    for context in contexts:
        context.settle()
        context.backward.reduce_held({unit for unit in units if unit.context is context})
