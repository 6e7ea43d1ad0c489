"""What autograd tells of a unit in a backward: it is reached, its gradients come, it is left.

reached    at a tensor that its forward returned: ``pre_backward`` gathers it, and prefetches the previous unit
gradients  at each parameter: the first and some others are received, the last one completes the unit
left       at its inputs: ``post_backward`` frees it, if it is not freed when it is complete
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flatshard._base.config import BackwardPrefetch
from flatshard._composable.backward import (
    await_gradients,
    complete,
    enter_backward,
    leave_forward,
    postpone,
    reach_forward,
)
from flatshard._composable.claims import GRADIENTS_CAME, INPUTS_LEFT
from flatshard._composable.gathering import (
    gather,
    gather_ahead,
    prefetch_after_unit,
    prefetch_in_backward,
    prefetches_before,
)
from flatshard._composable.reduction_queue import finish_previous
from flatshard._composable.state import AwaitedGradients, ForwardRecord, Unit, Way, current_graph_task
from flatshard._composable.to_come import (
    comes_again,
    may_get_more,
    needs_no_gather,
    needs_nothing_after_inputs,
    was_completed,
    was_left,
)
from flatshard._handle.registrations import UNSHARDED_PARAMS

BACKWARD_POST = BackwardPrefetch.BACKWARD_POST  # for each step, as in claims.py


# -- it is reached -----------------------------------------------------------------------------------------------------


def pre_backward(way: Way, later: Sequence[Callable[[Any], None]], grads: Any) -> None:
    """Gather the unit, and prefetch the next one, when backward reaches one of its outputs by ``way``.

    ``later``: calls for forwards that ended after this one with the same output. They run first, the last one first. So
    backward reaches forwards in reverse order, on all ranks.
    """
    for reach in reversed(later):
        reach(grads)
    record, task = way.record, current_graph_task()
    unit = record.unit
    if record.reached_in == task:
        for needed in unit.needs if unit.context.runtime.streams is not None else ():
            needed.handle.wait()  # another output of it, perhaps on another stream
        return
    # The backward of a forward that used only frozen parameters may still read their values.
    status = unit.graph.status
    # `was_completed`, without a call: it runs for each unit.
    if status is not None and status.completed_in == task and needs_no_gather(unit):
        return
    backward = enter_backward(unit)
    awaited = reach_forward(backward, record)
    for outer in record.outer:
        gather_ahead(outer)
    for claim in unit.claims:
        claim.check_backward()
    for needed in unit.needs:
        # If it is complete, only its values are needed once more.
        if needed is not unit and not was_completed(needed):
            await_gradients(backward, needed)
    _gather_values_of(record)
    # If a reduction is to end first, `finish_previous_and_gather` gathers the next unit, into the memory that it frees. That
    # is before this unit is reduced, so ranks with other gradients have the same order. [Note: Reductions in flight]
    gathers_later = awaited is not None and awaited.ends_previous_at > 0 and unit.context.reductions.will_free
    if prefetches_before(unit) and not gathers_later:
        prefetch_in_backward(record)


def _gather_values_of(record: ForwardRecord) -> None:
    """Gather the unit of ``record``, and show its parameters. Raise if they are not those of its forward any more."""
    unit = record.unit
    gather(unit)
    for needed in unit.needs:
        needed.handle.wait()
        # For what a checkpoint recomputes, whatever the user is shown.
        needed.handle.registrations.show(UNSHARDED_PARAMS)
    if not unit.handle.has_values_of(record.version):
        raise RuntimeError(
            f"parameters of unit {unit.fqn or '<root>'!r} were changed in place between its forward and its backward "
            "(by an optimizer step, for example), so its gradients would be wrong. Call backward before the step, or "
            "run forward again after it"
        )


# -- gradients come ----------------------------------------------------------------------------------------------------


def hook_parameters(unit: Unit) -> None:
    """Register the hooks of the parameters of ``unit``. They do not keep it alive."""
    for group, flat in enumerate(unit.handle.flats):
        if flat.kind.is_trainable:
            for index, compute in enumerate(flat.unsharded.params):
                # register_post_accumulate_grad_hook needs a parameter that requires grad at this moment.
                wanted = compute.requires_grad
                compute.requires_grad_(True)
                compute.register_post_accumulate_grad_hook(gradient_hook(unit, group, index))  # type: ignore[no-untyped-call]
                compute.requires_grad_(wanted)


def gradient_hook(unit: Unit, group: int, index: int) -> Callable[[torch.Tensor], None]:
    """Return the hook that counts the gradients of parameter ``index`` in the flat parameter ``group`` of ``unit``."""
    graph = unit.graph
    to_unit: Callable[[], Any] = weakref.ref(unit)  # it is alive whenever a hook of its parameters runs

    # This runs for every parameter in every step, so it does little.
    def on_gradient(param: torch.Tensor) -> None:
        """Count the gradient that autograd has accumulated, and leave it there."""
        status, task = graph.status, current_graph_task()
        awaited = None if status is None else status.awaited
        # A frozen parameter that still required grad in its forward has a hook call, but no gradient.
        if awaited is None or awaited.counts_only_in != task or (awaited.some_frozen and not param.requires_grad):
            awaited = receive_gradient(to_unit(), group, index, task)
            if awaited is None:
                return
        awaited.pending = pending = awaited.pending - 1
        if pending > awaited.ends_previous_at:
            return
        if pending > 0:
            awaited.ends_previous_at = 0  # from now on, only the last gradient matters
            finish_previous_and_gather(to_unit())
        elif not pending and awaited.task == task:
            receive_last_gradient(to_unit())

    return on_gradient


def receive_gradient(unit: Unit, group: int, index: int, task: int) -> AwaitedGradients | None:
    """Receive the first gradient of graph task ``task``, or one that must be moved.

    Returns what the unit awaits, or None if this gradient does not count.
    """
    if not unit.handle.flats[group].requires_grad[index]:
        return None  # frozen since its forward: there is no gradient, and none was expected
    status = unit.graph.status
    awaited = None if status is None else status.awaited
    if awaited is None or task not in awaited.expected:
        awaited = await_gradients(enter_backward(unit), unit)
    awaited.counts_only_in = task if unit.handle.gradients.receive(group, index) else None
    return awaited


def receive_stand_in(unit: Unit) -> None:
    """Count the gradient of a stand-in of ``unit``: see ``UnitGraph``."""
    awaited = await_gradients(enter_backward(unit), unit)
    awaited.pending -= 1
    if not awaited.pending and awaited.task == current_graph_task():
        receive_last_gradient(unit)


def finish_previous_and_gather(unit: Unit) -> None:
    """End the reduction of the unit before ``unit``, and gather the next one into the memory that it frees."""
    finish_previous(unit.context.reductions)
    if prefetches_before(unit):
        prefetch_after_unit(unit)


def receive_last_gradient(unit: Unit) -> None:
    """Free ``unit`` and complete it: all its gradients have come. Postpone that if more may come."""
    backward, status = unit.context.backward, unit.graph.status
    assert backward is not None
    assert status is not None
    assert status.awaited is not None
    # No gradient hook has prefetched: all ranks must issue the next all-gather before this reduction.
    if status.awaited.ends_previous_at:
        finish_previous_and_gather(unit)
    if may_get_more(unit):
        postpone(backward, unit)
        # A rank whose graph has all parameters of the unit completes it here, and gathers the next one.
        counts_as_complete = unit.handle.gradients.accumulators.are_all and not comes_again(unit)
        if counts_as_complete and unit.config.backward_prefetch is BACKWARD_POST:
            prefetch_after_unit(unit)
        return
    counts_as_sharded = _free_or_lend(unit)  # before the reduction input is allocated
    complete(backward, unit)
    if counts_as_sharded and unit.config.backward_prefetch is BACKWARD_POST:
        prefetch_after_unit(unit)


def _free_or_lend(unit: Unit) -> bool:
    """Free ``unit``, whose gradients have come, or lend its memory to the rest of the graph of this rank.

    Returns whether the unit counts as sharded now, on all ranks alike. Otherwise ``post_backward`` frees it.
    """
    if unit.last_gradient_frees or was_left(unit):
        unit.release(GRADIENTS_CAME)
        return True
    if unit.handle.gradients.accumulators.are_all:  # this rank lacks some, and others release it: `Unit.lend`
        unit.lend()
        return True
    return False


# -- it is left --------------------------------------------------------------------------------------------------------


def post_backward(unit: Unit) -> None:
    """Note that backward leaves a forward of ``unit`` through its inputs, and free the unit if nothing needs it."""
    leave_forward(unit)
    if needs_nothing_after_inputs(unit):
        unit.release(INPUTS_LEFT)
        if unit.config.backward_prefetch is BACKWARD_POST:
            prefetch_after_unit(unit)


class _Leave(torch.autograd.Function):
    """The identity on a unit's inputs. Its backward tells that backward has left this forward."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.left_unit = unit
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        post_backward(ctx.left_unit)
        return None, *grads


leave: Callable[..., tuple[torch.Tensor, ...]] = _Leave.apply
"""Pass a unit and its inputs through a node by which backward leaves the unit."""
