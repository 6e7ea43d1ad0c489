"""When gradients are reduced, and when they become ``.grad``: ``no_sync`` and ``reduce_gradients``.

By default every backward reduces its gradients and adds them to ``.grad``. So gradient accumulation works without anything
from here, with the memory of one microbatch. ``no_sync`` saves communication, but keeps the unsharded gradients in memory, in
the reduce dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, overload

import torch
from torch import nn

from flatshard._base.errors import name_list
from flatshard._base.old_names import old_arguments
from flatshard._composable.features.summon import shows_gradients
from flatshard._composable.find import contexts_of, units_of
from flatshard._composable.hooks import is_running, settle_context
from flatshard._composable.reduction_queue import finish_deferred, reduce_held
from flatshard._composable.state import ReductionQueue, Unit


@old_arguments(positional=("recurse",))
@contextlib.contextmanager
def no_sync(module: nn.Module, *, recurse: bool = True) -> Iterator[None]:
    """Accumulate gradients on this rank in backwards inside. The first backward after it reduces their sum.

    This is about where backward *runs*; it does not matter where its forward ran. All ranks must enter together. Inside,
    ``.grad`` does not change, and ``zero_grad()`` does not drop the accumulated gradients: its next backward outside reduces
    them. To drop them, call :func:`recover`; an exception in a backward drops them, too. If a parameter is
    frozen meanwhile, its gradient is dropped with a warning. To keep it, call :func:`reduce_gradients` before
    ``requires_grad_(False)``. With a single rank gradients are added to ``.grad`` at once.

    flatshard's norms, its clipping and an optimizer's step raise as long as gradients are held, inside and after the block:
    they would miss them. (torch's own ``clip_grad_norm_`` finds ``.grad`` None, and returns 0; the step raises.) If all
    backwards ran inside, call :func:`reduce_gradients`.

    Example::

        *first, last = batch.chunk(4)  # microbatches
        with flatshard.no_sync(model):
            for x in first:
                model(x).sum().backward()
        model(last).sum().backward()

    Args:
        module: a unit, or another module with sharded parameters.
        recurse: also the units below ``module``.

    Raises:
        ValueError: nothing in ``module`` is sharded.
    """
    units = units_of(module, "no_sync", recurse)
    for unit in units:
        unit.handle.gradients.begin_holding()
    try:
        yield
    finally:
        for unit in units:
            unit.handle.gradients.end_holding()


def held_units() -> list[Unit]:
    """Return units whose gradients of earlier backwards are not in ``.grad`` yet: they are held, partial or deferred."""
    return sorted((u for queue in ReductionQueue.every for u in queue.withholding()), key=lambda unit: unit.fqn)


def check_reduced(units: Iterable[Unit], verb: str) -> None:
    """Raise if some of ``units`` hold gradients, which ``verb`` would miss."""
    held = [unit for unit in units if unit.handle.gradients.withholds]
    if not held:
        return
    if deferred := [unit.fqn for unit in held if unit.handle.gradients.is_deferred]:
        raise RuntimeError(
            f"{verb}: gradients of units {name_list(deferred, 3)} are being reduced, and are not in .grad yet. Call "
            "flatshard.reduce_gradients(module), or wait() on what reduce_gradients(module, async_op=True) returned; then "
            f"{verb.rpartition('.')[2]}"
        )
    where = "" if all(unit.handle.gradients.reduces for unit in held) else " inside no_sync"
    cure = "flatshard.reduce_gradients(module) after it"
    if not all(unit.handle.gradients.wants_reduction for unit in held):
        cure = f"flatshard.configure(module, all_reduce=True), then {cure}"
    raise RuntimeError(
        f"{verb}{where}: units {name_list((u.fqn for u in held), 3)} hold gradients that have not been averaged over all "
        "ranks, and that are not in .grad. Run the last backward outside of no_sync, or call "
        f"{cure}; then {verb.rpartition('.')[2]}"
    )


class ReductionHandle:
    """Reductions in progress, as returned by :func:`reduce_gradients` with ``async_op=True``.

    Example::

        with flatshard.no_sync(model):
            model(batch).sum().backward()
        handle = flatshard.reduce_gradients(model, async_op=True)
        handle.wait()  # now .grad is complete
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        """Create the handle for ``units`` with deferred gradients, in the order of their reductions."""
        self._units = units
        self._drops = {unit.context: unit.context.reductions.drops for unit in units}

    def wait(self) -> None:
        """Wait for the reductions, and add their results to ``.grad``. Idempotent.

        On an accelerator the current stream waits, and not the host (but under CPU offload). Call it on the thread of the
        training. A backward that reaches one of the units, and ``reduce_gradients``, do so before it.

        Raises:
            RuntimeError: the gradients were dropped, by :func:`recover` or an exception in a backward; or called inside a
                forward or a backward.
            CollectiveError: a reduction failed. The gradients are dropped.
        """
        if not self._units:
            return
        if any(is_running(context) for context in self._drops):
            raise RuntimeError("wait() of reduce_gradients: called inside a forward or a backward. Call it after them")
        units, self._units = self._units, ()
        if any(context.reductions.drops != before for context, before in self._drops.items()):
            raise RuntimeError(
                f"wait() of reduce_gradients: the gradients of units {name_list((u.fqn for u in units), 3)} were dropped, by "
                "flatshard.recover or an exception in a backward. Call zero_grad(), and run the step again"
            )
        with torch.inference_mode(False), torch.no_grad():  # later backwards add to these gradients
            for context in self._drops:
                finish_deferred(context.reductions, units)


@overload
def reduce_gradients(module: nn.Module, *, recurse: bool = True, async_op: Literal[False] = False) -> None: ...


@overload
def reduce_gradients(module: nn.Module, *, recurse: bool = True, async_op: Literal[True]) -> ReductionHandle: ...


@overload
def reduce_gradients(module: nn.Module, *, recurse: bool = True, async_op: bool) -> ReductionHandle | None: ...


@old_arguments(positional=("recurse",))
def reduce_gradients(module: nn.Module, *, recurse: bool = True, async_op: bool = False) -> ReductionHandle | None:
    """Reduce the gradients that backwards under :func:`no_sync` accumulated, and add them to ``.grad``.

    Every rank must call it. Use it if the last microbatch cannot run outside of ``no_sync``, as in a pipeline schedule::

        with flatshard.no_sync(model):
            for x in batch.chunk(4):
                model(x).sum().backward()
        flatshard.reduce_gradients(model)  # one reduction, whatever the number of microbatches

    It also ends backwards that wait for it: ``configure(module, manual_finalization=True)``.

    Args:
        module: a module with sharded parameters: the units that own them are reduced.
        recurse: also the units below ``module``.
        async_op: start all reductions, and return at once. ``.grad`` changes in ``wait()`` of the handle that is returned, or
            before in a backward of the same units. Until then norms, clipping and an optimizer's step raise, and
            ``zero_grad()`` does not drop these gradients. Forwards and backwards of other units may run meanwhile. The memory
            of all held gradients is freed in ``wait()``; else one unit's after the other.

    Raises:
        ValueError: nothing in ``module`` is sharded.
        RuntimeError: called inside a forward or a backward, or inside ``summon_full_params(with_grads=True)``.
        CollectiveError: a reduction failed. The accumulated gradients are dropped.
    """
    units = units_of(module, "reduce_gradients", recurse)
    return finalize(units, units, async_op)


def finalize(units: Sequence[Unit], held: Sequence[Unit], async_op: bool) -> ReductionHandle | None:
    """End the backwards of ``units``: see ``reduce_gradients``. Units in ``held`` also reduce gradients that they hold."""
    contexts = contexts_of(units)
    if any(is_running(context) for context in contexts):
        raise RuntimeError("reduce_gradients: called inside a forward or a backward. Call it after them")
    if shown := [unit.fqn or "<root>" for unit in units if shows_gradients(unit)]:
        raise RuntimeError(
            f"reduce_gradients: called inside summon_full_params(with_grads=True) of {name_list(shown)}, which on exit would "
            "overwrite the reduced gradients by those it shows. Call it outside"
        )
    for context in contexts:
        settle_context(context)
    for unit in units:
        if not unit.claims.in_use:
            unit.handle.check_parameters()
    with torch.inference_mode(False), torch.no_grad():  # later backwards add to these gradients
        for context in contexts:
            reduce_held(context.reductions, {unit for unit in held if unit.context is context}, one_by_one=not async_op)
    handle = ReductionHandle([u for context in contexts for u in context.reductions.deferred if u in units])
    if async_op:
        return handle
    handle.wait()
    return None
