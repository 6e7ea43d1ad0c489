"""The verbs of a backward: over many units, in which order they are complete; and of one unit, how it completes.

[Note: What completes a unit]
When backward reaches a unit, autograd's engine tells how many of the unit's parameters are in the running graph (as for
``torch.autograd.graph.register_multi_grad_hook``). The unit is complete when that many gradients have come. A parameter that
is not in the graph is unused here, and is not waited for. But on another rank it may be in the graph. So these units are idle
when they have all awaited gradients, and complete when backward reaches a unit before them, or recomputes one in a reentrant
checkpoint:

- a unit without any parameter in the graph: it is unused, or inside a reentrant checkpoint;
- a unit that backward will come to again, for another forward (``Way``): of a module called twice, of an earlier pass if
  losses of two passes were added, or of a unit that uses its tied parameters;
- a unit that lacks parameters and has units inside that backward has not reached: a reentrant checkpoint may run both.

The end of the graph task (the run of the autograd engine) that reached a unit first completes all others:
[Note: Nested backwards].

[Note: Nested backwards]
Reentrant checkpointing runs a backward inside a backward: another *graph task*. A unit is completed in the graph task
that reached it first. The backward ends with its outermost graph task. The engine drops the callbacks of a graph task
that failed with an exception, so a dead callback shows that its task has failed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch.autograd import Variable

from flatshard._base import trace
from flatshard._base.errors import InternalError, name_list
from flatshard._composable import reduction_queue
from flatshard._composable.claims import Reason
from flatshard._composable.find import contexts_of, units_below
from flatshard._composable.state import (
    AWAITING,
    COMPLETE,
    COMPLETE_EARLY,
    IDLE,
    TOUCHED,
    AwaitedGradients,
    Backward,
    CompletionState,
    ForwardRecord,
    ReductionQueue,
    Unit,
    UnitBackward,
    current_graph_task,
)
from flatshard._composable.to_come import (
    comes_again,
    count_gradients,
    has_gradients,
    is_completed_by,
    is_over,
)
from flatshard._handle.lifetime import BY_NONE, SHARDED, UNSHARDING
from flatshard._handle.registrations import SHARDED_PARAMS

# Whether the running graph task retains the graph. Private API, as there is no public way.
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

COMPLETION_TRANSITIONS: dict[tuple[CompletionState, str], CompletionState] = {
    (TOUCHED, "reach with gradients"): AWAITING,
    (TOUCHED, "reach with none"): IDLE,
    # These four: in a graph task inside the one that completes it.
    (AWAITING, "reach with gradients"): AWAITING,
    (AWAITING, "reach with none"): AWAITING,
    (IDLE, "reach with gradients"): IDLE,
    (IDLE, "reach with none"): IDLE,
    (AWAITING, "postpone"): IDLE,
    (IDLE, "postpone"): IDLE,
    (AWAITING, "complete"): COMPLETE,
    (IDLE, "complete"): COMPLETE,
    (IDLE, "complete early"): COMPLETE_EARLY,
    (COMPLETE, "reach with gradients"): AWAITING,  # in another graph task
    (COMPLETE, "reach with none"): IDLE,
    (COMPLETE_EARLY, "reach with gradients"): AWAITING,  # or in the same one, at another forward of it
    (COMPLETE_EARLY, "reach with none"): IDLE,
}
"""``reach``: a graph task reaches the unit, and has gradients for it or none."""


def enter_backward(unit: Unit) -> Backward:
    """Return the running backward on the process group of ``unit``, which it reaches or gathers."""
    context, task = unit.context, current_graph_task()
    if (backward := context.backward) is not None:
        if next(reversed(backward.tasks)) == task:
            return backward
        if backward.has_failed:
            drop(backward)
            backward = None
    if backward is None:
        Backward.every.add(backward := Backward(context, task, _keeps_graph()))
        context.set_backward(backward)
    _enter(backward, task)
    return backward


def _enter(backward: Backward, task: int) -> None:
    end = functools.partial(_end, backward, task)
    backward.tasks[task] = weakref.ref(end, functools.partial(_on_death, backward))
    # FSDP and DDP use this, too: autograd has no public way to call a function at the end of a backward.
    Variable._execution_engine.queue_callback(end)


# -- during ------------------------------------------------------------------------------------------------------------


def touch(backward: Backward, unit: Unit) -> UnitBackward:
    """Return the record of ``unit`` for this backward, made if needed. The end of the backward reshards the unit."""
    if (status := unit.graph.status) is None:
        unit.handle.sync_unfrozen()
        status = unit.graph.status = UnitBackward()
        backward.touched.append(unit)
    return status


def await_gradients(backward: Backward, unit: Unit) -> AwaitedGradients:
    """Await the gradients that the running graph task has for ``unit``, which backward reaches. Return all awaited ones."""
    status, task = unit.graph.status or touch(backward, unit), current_graph_task()
    if (before := status.awaited) is not None and task in before.expected:
        return before
    backward.keeps_unsharded |= torch.is_grad_enabled() or (unit.history.was_kept_unsharded and _keeps_graph())
    accumulators, queue = unit.handle.gradients.accumulators, backward.context.reductions
    if accumulators.nodes and before is None:
        reduction_queue.add_back(queue, unit)
    of_params, of_stand_ins = count_gradients(unit)
    if of_params or not of_stand_ins:  # else this rank has passed the unit by, which says nothing of its parameters
        status.lacks_some |= of_params < len(accumulators.nodes)
    count = of_params + of_stand_ins
    _move(backward, unit, status, "reach with gradients" if count else "reach with none")
    pending = count if before is None else before.pending + count
    # reduction_queue.py, [Note: Reductions in flight]
    ends_previous_at = pending - max(1, pending // 6) if queue.finishes_early and pending else 0
    if before is None:
        awaited = AwaitedGradients(task, not accumulators.are_all, {task: count}, pending, ends_previous_at)
    else:  # a graph task inside the one that reached the unit first
        expected = before.expected | {task: count}
        awaited = replace(before, expected=expected, pending=pending, ends_previous_at=ends_previous_at)
    status.awaited = awaited
    if count:
        backward.bringing.add(task)
        backward.ready.discard(unit)
    return awaited


def _move(backward: Backward, unit: Unit, status: UnitBackward, event: str) -> None:
    """Change the state of ``status``, the record of ``unit``, by an event of the table."""
    state = COMPLETION_TRANSITIONS.get((status.completion, event))
    if state is None:
        raise InternalError(f"cannot {event} unit {unit.fqn!r} in a backward while it is {status.completion.name}")
    status.completion = state
    if state is IDLE:
        backward.idle[unit] = None
    else:
        backward.idle.pop(unit, None)


def reach_forward(backward: Backward, record: ForwardRecord) -> AwaitedGradients | None:
    """Note that backward reaches a forward of a unit, and complete idle units before it. [Note: What completes a unit]

    Returns what the unit awaits, or None if it is complete.
    """
    task, unit = current_graph_task(), record.unit
    record.reached_in = task
    status = unit.graph.status or touch(backward, unit)
    if status.completed_in != task:  # `was_completed`, without a call: it runs for each unit
        await_gradients(backward, unit)
    status.open_forwards = (status.open_forwards or 0) + 1
    status.last_forward = record
    if record.leaks:
        backward.leaking.append(record)
    if backward.idle and (idle := [u for u in backward.idle if u not in record.outer]):
        _complete_idle(backward, unit, idle)
    return status.awaited


def reach_recomputed(backward: Backward, unit: Unit) -> None:
    """Note that a forward of ``unit`` runs in backward. In a reentrant checkpoint that is when backward comes to it."""
    touch(backward, unit)
    if backward.idle and not comes_again(unit):
        _complete_idle(backward, unit, [u for u in backward.idle if unit not in units_below(u.module)])


def _complete_idle(backward: Backward, unit: Unit, idle: Iterable[Unit]) -> None:
    """Complete those of ``idle`` that are over, as backward comes to ``unit``."""
    task = current_graph_task()
    # Other ranks may have completed these units when their last gradient came: before they gather what comes next, too.
    over = [u for u in idle if u not in unit.needs and is_completed_by(u, task) and is_over(u)]
    if over:
        to_come = any(has_gradients(u) for queue in ReductionQueue.every for u in queue.units())
        _complete_rest(backward, over, to_come or _bring_gradients(backward.tasks), early=True)


def leave_forward(unit: Unit) -> None:
    """Note that backward leaves a forward of ``unit`` through its inputs."""
    if (status := unit.graph.status) is not None:
        status.open_forwards = max(0, (status.open_forwards or 0) - 1)


def postpone(backward: Backward, unit: Unit) -> None:
    """Make ``unit`` idle: it has all awaited gradients, but other ranks may have some to come."""
    status = unit.graph.status
    assert status is not None
    _move(backward, unit, status, "postpone")


def complete(backward: Backward, unit: Unit, reduces: bool = False, early: bool = False) -> None:
    """Reduce ``unit`` when it is its turn: it has all gradients of the graph task that reached it first.

    Args:
        reduces: whether to reduce a unit without expected gradients.
        early: the backward may reach another forward of the unit in the same graph task.
    """
    queue = backward.context.reductions
    status = unit.graph.status
    assert status is not None
    _move(backward, unit, status, "complete early" if early else "complete")
    awaited, status.awaited = status.awaited, None
    assert awaited is not None
    status.completed_in = awaited.task
    # Only this rank's gradients may have come, but the queue waits for turns, and a unit without any is completed, too.
    if reduces or any(awaited.expected.values()):
        if unit.handle.gradients.reduces:
            backward.ready.add(unit)
            reduction_queue.reduce_in_turn(queue, backward.ready)
        else:
            unit.handle.gradients.hold()  # it stays in the queue, so that a later reduction keeps the order
    elif unit not in backward.ready and not unit.handle.gradients.is_unreduced:
        reduction_queue.remove(queue, unit)


# -- the end -----------------------------------------------------------------------------------------------------------


def _end(backward: Backward, task: int) -> None:
    """End a graph task: complete units with fewer gradients than expected. In the outermost one, end the backward."""
    if backward.tasks.pop(task, None) is None:  # this backward has been dropped
        return
    if not backward.tasks:
        backward.context.set_backward(None)  # before hooks of the user, which run outside of it
    try:
        brings_gradients = _bring_gradients((task,))
        ended = [u for u in backward.context.reductions.units() if is_completed_by(u, task)]
        _complete_rest(backward, ended, brings_gradients)
        if not backward.tasks:
            _reduce_rest(backward, brings_gradients)
    except BaseException:
        drop(backward)  # otherwise these gradients would be added to those of the next step
        raise


def _bring_gradients(tasks: Iterable[int]) -> bool:
    """Return whether one of ``tasks`` has gradients for a unit of any process group: ranks may not agree on one.

    Ranks agree if each uses a parameter of some unit, or none does. A rank that uses none of the whole model must ``skip``
    it: nothing tells `loss.backward()` there from a gradient with respect to inputs, which reduces nothing.
    """
    return any(not backward.bringing.isdisjoint(tasks) for backward in Backward.every)


def _complete_rest(backward: Backward, units: Iterable[Unit], brings_gradients: bool, early: bool = False) -> None:
    """Complete the remaining units, used or not. Other ranks may have used them, and wait for the reduction.

    Nothing is reduced if no unit of any process group gets a gradient: ``torch.autograd.grad`` with respect to inputs.
    """
    for unit in units:
        complete(backward, unit, brings_gradients and bool(unit.handle.gradients.accumulators.nodes), early)


def _reduce_rest(backward: Backward, brings_gradients: bool) -> None:
    """Reduce the units that still wait for their turn, and those that hold gradients. Forget all."""
    held = [unit for unit in backward.context.reductions.units() if unit.handle.gradients.wants_reduction]
    if held:  # what is reached together is one model from now on
        for unit in backward.touched:
            unit.tree.join(backward.touched[0].tree)
    if held and brings_gradients:
        # Reduce what this model holds of earlier backwards, even if this one added nothing to it.
        mine = {unit.tree.model for unit in backward.touched[:1]}
        backward.ready.update(u for u in held if u.handle.gradients.reduces and u.tree.model in mine)
    reduction_queue.reduce_and_finish(backward.context.reductions, backward.ready)
    if brings_gradients:
        _reduce_held_inside(backward)
    _forget_touched(backward)
    backward.context.runtime.join()
    backward.context.runtime.wait_for_host_reads()


def _reduce_held_inside(backward: Backward) -> None:
    """Reduce held gradients of units on other process groups that are inside units of this backward and were not run."""
    others = [queue for queue in ReductionQueue.every if queue is not backward.context.reductions and queue.is_holding]
    if not others:
        return
    inside = dict.fromkeys(below for unit in backward.touched for below in units_below(unit.module))
    idle = (u for u in inside if u.context.reductions in others and u.context.backward is None)
    for context in contexts_of(idle):
        reducible = {u for u in inside if u.context is context and u.handle.gradients.reduces}
        reduction_queue.reduce_held(context.reductions, reducible)


def _forget_touched(backward: Backward) -> None:
    backward.context.drop_ahead()  # what is ahead is touched, too
    for record in () if backward.retains_graph else backward.leaking:
        record.unit.history.drop_leak(record)
    for unit in backward.touched:
        unit.history.was_kept_unsharded = backward.keeps_unsharded
        if (status := unit.graph.status) is not None and backward.bringing:
            unit.history.leaves_out |= status.lacks_some
        unit.graph.status = None
        if backward.keeps_unsharded:
            unit.show()
            unit.handle.set_used_by(BY_NONE)
        elif unit.claims or unit.handle.registrations.shows is not SHARDED_PARAMS or unit.handle.state is not SHARDED:
            unit.release(Reason.BACKWARD_ENDED)  # otherwise it was freed when it was complete


def _on_death(backward: Backward, callback: object) -> None:
    """Register the user's parameters, which ``zero_grad`` needs, if the engine dropped a graph task after an exception.

    The next forward cleans up the rest, because this callback may run at any point.
    """
    if backward.has_failed:
        backward.context.publish_place(bool(backward.context.forwards))
        for unit in backward.touched:
            unit.graph.status = None  # it would keep the unit alive: see `UnitGraph`
            unit.show()
        if ahead := [u.fqn for u in backward.touched if u.handle.state is UNSHARDING]:
            trace.logger.warning(
                "backward failed before it came to unit %s by an output. If torch reports a tensor that was modified by "
                "an inplace operation, backward entered the unit by a tensor that its forward handed over in another "
                "way, as by a list or an object: return that tensor from the forward, too",
                name_list(ahead),
            )


def drop(backward: Backward) -> None:
    """Drop its gradients and free everything, after an exception.

    This includes reductions in flight: the user may have called ``zero_grad`` already, and they would set ``.grad`` after
    it. It includes gradients held by earlier backwards, as this backward has added to some of them.
    """
    backward.context.set_backward(None)
    backward.tasks.clear()
    backward.keeps_unsharded = False
    reduction_queue.discard(backward.context.reductions, backward.touched)
    _forget_touched(backward)
