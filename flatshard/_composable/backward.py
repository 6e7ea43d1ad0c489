"""One backward over many units: when a unit's gradients are complete, and in which order units are gathered.

[Note: What completes a unit]
When backward reaches a unit, autograd's engine tells how many of the unit's parameters are in the running graph (as for
``torch.autograd.graph.register_multi_grad_hook``). The unit is complete when that many gradients have come. A parameter
that is not in the graph is unused here, and is not waited for. If no parameter is in the graph (the unit is unused, or inside
a reentrant checkpoint), the unit is complete when backward reaches a unit before it, unless it will come to the unit again:
to its forward in an earlier pass, if losses of two passes were added.

[Note: Nested backwards]
Reentrant checkpointing runs a backward inside a backward: another *graph task*. A unit is completed in the graph task
that reached it first. The backward ends with its outermost graph task. The engine drops the callbacks of a graph task
that failed with an exception, so a dead callback shows that its task has failed.

[Note: One order of gathers in backward]
Backward may reach a unit and the last unit inside it at the same node (if the outer one returned the inner one's output), or
one after the other, perhaps with a recomputation in between. This may depend on a rank's data, and a rank that skips a unit
cannot know. So the order is the same in all cases. A unit is gathered before the units inside it (``gather``). When it is
recomputed, the inner unit that backward needs first comes before the one that ran first (``gather_last_inside``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node

from flatshard._composable.find import units_below
from flatshard._composable.reduction_queue import ReductionQueue
from flatshard._composable.state import BackwardRecord, Step, Unit, current_graph_task
from flatshard._config import BackwardPrefetch
from flatshard._handle.slots import SHARDED

# Whether the running graph task retains the graph; whether it will run a given node. Private API, as there is no public way.
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
_will_run = torch._C._will_engine_execute_node


def _will_accumulate(node: Node) -> bool:
    """``_will_run``, also in ``torch.autograd.grad``, which takes the gradients of some nodes for itself."""
    try:
        return _will_run(node)
    except RuntimeError as e:
        if "autograd.grad" in str(e):
            return False
        raise


def _expected(unit: Unit) -> int:
    """How many gradients the running graph task has for ``unit``. [Note: What completes a unit]"""
    nodes = unit.handle.gradients.accumulators.nodes
    nodes = [*nodes, *unit.stand_ins] if unit.stand_ins else nodes
    try:
        return sum(map(_will_run, nodes))
    except RuntimeError:
        return sum(map(_will_accumulate, nodes))


def _may_come(unit: Unit) -> bool:
    """Whether gradients of ``unit`` may still come, in the running graph task or one around it."""
    return bool(unit.record is not None and unit.record.expected) or _expected(unit) > 0


def _may_come_inside(unit: Unit) -> bool:
    """Whether the backward may yet reach a unit inside ``unit`` that ran after it."""
    inside = [u for u in units_below(unit.module) if u.turn > unit.turn]
    return any(u.record is None or not u.record.is_reached for u in inside)


def _comes_again(unit: Unit) -> bool:
    """Whether the running graph task will reach another forward of ``unit``. [Note: What completes a unit]"""
    task = current_graph_task()
    return any(leave.ran_in != task and _will_accumulate(leave) for leave in unit.leaves)


class Backward:
    """One backward on one process group, from the first unit that it reaches until it ends or fails. See ``of``."""

    def __init__(self, unit: Unit) -> None:
        """``unit``: one of the group."""
        self._context = unit.context
        self._queue = unit.context.reductions
        self.task = current_graph_task()  # the outermost one; ids increase
        self._retains_graph = _keeps_graph()
        # The callbacks of the graph tasks under way, outermost first. They die when the engine drops the task.
        self._tasks: dict[int, weakref.ref[Callable[[], None]]] = {}
        self._bringing: set[int] = set()  # graph tasks with gradients for at least one unit
        self._reached: list[Unit] = []  # or gathered for it: those that have a record
        self._idle: dict[Unit, None] = {}  # reached in a graph task that has no gradients for them
        self._ready: set[Unit] = set()  # complete units in the queue
        # It builds a graph (create_graph), or retains a graph that was built so (retain_graph). A backward of that graph
        # runs none of flatshard's hooks, so units stay unsharded.
        self.keeps_unsharded = False

    @classmethod
    def of(cls, unit: Unit) -> Backward:
        """The running backward, on the process group of ``unit``, which it is reaching or gathering."""
        context, task = unit.context, current_graph_task()
        backward = context.backward
        if isinstance(backward, Backward) and next(reversed(backward._tasks)) == task:
            return backward
        if backward is not None and backward.has_failed:
            backward.drop()
        backward = context.backward
        if not isinstance(backward, Backward):
            context.backward = backward = cls(unit)
            context.backwards += 1
        backward._enter(task)
        return backward

    def _enter(self, task: int) -> None:
        def end() -> None:
            self._end(task)

        self._tasks[task] = weakref.ref(end, self._on_death)
        # FSDP and DDP use this, too: autograd has no public way to call a function at the end of a backward.
        Variable._execution_engine.queue_callback(end)

    # -- during --------------------------------------------------------------------------------------------------------

    def touch(self, unit: Unit) -> BackwardRecord:
        """Called when ``unit`` is unsharded in backward: it is cleaned up at the end of the backward."""
        if unit.record is None:
            unit.handle.sync_thawed()
            unit.record = BackwardRecord()
            self._reached.append(unit)
        return unit.record

    def begin(self, unit: Unit) -> BackwardRecord:
        """Called when backward reaches ``unit``: count the gradients that the running graph task has for it."""
        record, task = unit.record or self.touch(unit), current_graph_task()
        if task in record.expected:
            return record
        self.keeps_unsharded |= torch.is_grad_enabled() or (self._context.kept_unsharded and _keeps_graph())
        if not record.expected:
            self._queue.add_back(unit)
        record.expected[task] = expected = _expected(unit)
        others = sum(map(_will_run, unit.stand_ins))
        if expected > others or not others:
            unit.partial |= expected - others < len(unit.handle.gradients.accumulators.nodes)
        unit.handle.gradients.arrivals.expect(expected, self._queue.waits_early)
        if expected:
            self._bringing.add(task)
            self._ready.discard(unit)
        elif len(record.expected) == 1:
            self._idle[unit] = None
        return record

    def come_to(self, step: Step) -> None:
        """Called when backward reaches a forward of a unit. Completes idle units before it. [Note: What completes a unit]"""
        task, record = current_graph_task(), step.unit.record
        if record is None or record.finished_in != task:
            record = self.begin(step.unit)
        record.steps = max(0, record.steps) + 1
        record.last_step = step
        if not self._idle:
            return
        over = [
            u for u in self._idle if u is not step.unit and u not in step.outer and u.record and u.record.task == task
        ]
        over = [u for u in over if not u.handle.gradients.arrivals.pending and not _comes_again(u)]
        if over:
            to_come = any(map(_expected, self._queue.units()))
            self._complete_all(over, to_come or not self._bringing.isdisjoint(self._tasks))
            for unit in over:
                assert unit.record is not None
                unit.record.finished_early = True

    def waits_to_come_again(self, unit: Unit) -> bool:
        """Called when all gradients of ``unit`` have come, and its values are still needed: whether backward will gather it
        again. It is as idle then as it may be on other ranks, which gather it again before they reduce it.
        """
        if not _comes_again(unit):
            return False
        self._idle[unit] = None
        return True

    def complete(self, unit: Unit, reduces: bool = False) -> None:
        """Called when ``unit`` has all gradients of the graph task that reached it first. Reduce it, in order.

        ``reduces``: even if none were expected.
        """
        assert unit.record is not None
        self._idle.pop(unit, None)
        unit.handle.gradients.arrivals.pending = 0
        if unit.record.complete() or reduces:
            if unit.requires_gradient_sync:
                self._ready.add(unit)
                self._queue.reduce(self._ready, _may_come, _may_come_inside)
            else:
                self._queue.hold(unit)
        elif not unit.handle.gradients.is_held:
            self._queue.remove(unit)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end(self, task: int) -> None:
        """End a graph task: complete units with fewer gradients than expected. In the outermost one, end the backward."""
        if self._tasks.pop(task, None) is None:  # this backward has been dropped
            return
        if not self._tasks:
            self._context.backward = None  # before hooks of the user, which run outside of it
        try:
            self._finish(task, task in self._bringing)
        except BaseException:
            self.drop()  # otherwise these gradients would be added to those of the next step
            raise

    def _complete_all(self, units: Iterable[Unit], brings_gradients: bool) -> None:
        """Complete units that this rank may not have used. Other ranks may have, and then wait for the reduction.

        Nothing is reduced if no unit gets a gradient: ``torch.autograd.grad`` with respect to inputs.
        """
        for unit in units:
            self.complete(unit, brings_gradients and bool(unit.handle.gradients.accumulators.nodes))

    def _finish(self, task: int, brings_gradients: bool) -> None:
        self._complete_all([u for u in self._queue.units() if u.record and u.record.task == task], brings_gradients)
        if self._tasks:
            return
        if brings_gradients:  # gradients held by earlier backwards are reduced now, even if this one added none to them
            self._ready.update(
                u for u in self._queue.units() if u.handle.gradients.wants_reduction and u.requires_gradient_sync
            )
        self._queue.reduce_all(self._ready)
        if brings_gradients and ReductionQueue.holding:
            self._reduce_held_inside()
        self._drop_records()
        self._context.runtime.join()
        self._context.runtime.wait_for_host_reads()

    def _reduce_held_inside(self) -> None:
        """Also reduce what units on other process groups hold, if they are inside units of this backward and were not run."""
        others = ReductionQueue.holding - {self._queue}
        if not others:
            return
        inside = dict.fromkeys(below for unit in self._reached for below in units_below(unit.module))
        contexts = {u.context for u in inside if u.context.reductions in others and u.context.backward is None}
        for context in sorted(contexts, key=lambda context: context.runtime.number):
            context.reductions.reduce_held({u for u in inside if u.context is context and u.requires_gradient_sync})

    def _drop_records(self) -> None:
        self._context.kept_unsharded = self.keeps_unsharded
        for unit in self._reached:
            unit.record = None
            if unit.leaks and not self._retains_graph:
                unit.drop_leaks(self.task)
            if self.keeps_unsharded:
                unit.show()
            elif unit.claims or unit.handle.slots.shows is not SHARDED or not unit.handle.is_sharded:
                unit.free_if_unused()  # otherwise it was freed when it was complete

    @property
    def has_failed(self) -> bool:
        """Whether a graph task failed with an exception. The watch's thread asks, too."""
        return any(callback() is None for callback in [*self._tasks.values()])

    def _on_death(self, callback: object) -> None:
        """The engine dropped a graph task, perhaps after an exception. Then register the user's parameters, which
        ``zero_grad`` needs. The next forward cleans up the rest, because this callback may run at any point.
        """
        if self.has_failed:
            for unit in self._reached:
                unit.show()

    def drop(self) -> None:
        """After an exception: drop its gradients, and free everything.

        This includes reductions in flight: the user may have called ``zero_grad`` already, and they would set ``.grad`` after
        it. It includes gradients held by earlier backwards, as this backward has added to some of them.
        """
        self._context.backward = None
        self._tasks.clear()
        self.keeps_unsharded = False
        self._queue.discard(self._reached)
        self._drop_records()


def is_finished(unit: Unit) -> bool:
    """Whether ``unit`` has all its gradients from the running graph task."""
    return unit.record is not None and unit.record.finished_in == current_graph_task()


def gather(unit: Unit) -> None:
    """Gather a unit for the current backward, and the units that it needs."""
    context = unit.context
    for needed in unit.needs:
        if needed.record is None:
            Backward.of(unit).touch(needed)
        needed.handle.unshard(context.pass_id, again=True)


def gather_ahead(unit: Unit) -> None:
    """Gather a unit that backward has reached or will reach, unless the unit is finished."""
    if unit.handle.is_sharded and not is_finished(unit):
        gather(unit)


def gather_last_inside(step: Step) -> None:
    """Called when a unit that backward reached by ``step`` is about to be recomputed."""
    last = step
    while last.previous is not None and last.unit in last.previous.outer:
        last = last.previous
        gather_ahead(last.unit)
    if last is not step and prefetches_before(last.unit):
        for unit in _next(last):
            gather_ahead(unit)


def prefetches_before(unit: Unit) -> bool:
    """Whether the next unit is gathered before this unit's backward computes."""
    when = unit.config.backward_prefetch
    return when is BackwardPrefetch.BACKWARD_PRE or (when is None and unit.backward_prefetch is not None)


def prefetch_after(unit: Unit) -> None:
    """Called when this unit's backward has computed."""
    if unit.record is not None and unit.record.last_step is not None:
        prefetch(unit.record.last_step)


def prefetch(step: Step) -> None:
    """Gather the unit that comes after this step in backward, or the units that the user chose instead."""
    for unit in _next(step):
        if not is_finished(unit):
            for needed in unit.needs:
                Backward.of(unit).touch(needed)
            unit.context.prefetch(unit, step.unit.config.prefetch_limit_bytes)


def _next(step: Step) -> Iterable[Unit]:
    if step.unit.backward_prefetch is not None:
        return step.unit.backward_prefetch
    before = step.previous
    while before is not None and before.unit is step.unit:  # an earlier forward of the same unit needs no gather
        before = before.previous
    backward = step.unit.context.backward
    # Backward has reached `before` already if `step` is of an enclosing unit.
    if before is None or (backward is not None and before.opened_in >= backward.task):
        return ()
    return (before.unit,)
