"""A backward over many units: when a unit's gradients are complete, and in which order units are reduced and gathered.

[Note: What completes a unit]
When backward reaches a unit, autograd's engine tells how many of the unit's parameters are in the running graph (as for
``torch.autograd.graph.register_multi_grad_hook``). The unit is complete when that many gradients have come. A parameter
that is not in the graph is unused here, and is not waited for. If no parameter is in the graph (the unit is unused, or inside
a reentrant checkpoint), the unit is complete when backward reaches a unit before it.

[Note: Every rank reduces in the same order]
Collectives of one group match by order. But a unit may complete earlier on one rank than on another, if they took different
branches inside it. So units are reduced in one canonical order, the reverse of the order of their first forward. A complete
unit waits for the units that ran forward after it and are in the graph.

[Note: Reductions in flight]
A reduction holds the gradients of a whole unit. So only one is in flight at a time. It ends at the latest when the next
unit is complete. On CPU it ends when a sixth of the next unit's gradients have come (for a transformer block: those of its
last matrix). This takes 3 to 5 % off a step's peak memory. Over gloo, whose threads have the cores to themselves while a rank
waits, a step took 0.98 to 1.00 of the time in fp32, and 1.01 to 1.04 in bf16; an accelerator would be idle. With replicas
the first part of a reduction ends then, and the second part when the next unit is complete.

If a rank waits for a reduction, no other rank may wait for an all-gather that this rank has yet to issue. So every rank
completes a unit before it gathers the unit after the next one, even if it used none of the unit's parameters.

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
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import ClassVar

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node

from flatshard._composable.state import BackwardRecord, Step, Unit, units_below
from flatshard._config import BackwardPrefetch
from flatshard._handle.slots import SHARDED
from flatshard._runtime import Runtime

# The id of the running graph task, -1 outside of backward; whether it retains the graph; whether it will run a given node.
# Private API: there is no public way to find out.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
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


class _Task:
    """A graph task that has reached one of the units."""

    __slots__ = ("brings_gradients", "callback", "id")

    def __init__(self, task: int, callback: weakref.ref[Callable[[], None]]) -> None:
        self.id = task
        self.brings_gradients = False  # to at least one unit
        self.callback = callback  # dead after the engine has dropped the task


class Backward:
    """The backwards of all units on one process group."""

    _holding: ClassVar[weakref.WeakSet[Backward]] = weakref.WeakSet()  # those that hold gradients for a later reduction

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.waits_early = runtime.streams is None  # for reductions: [Note: Reductions in flight]
        # Units that ran forward with gradients and have yet to be reduced, in the order of their first such forward. They are
        # reduced from the end. Weak references: a forward without a backward must not keep its model alive.
        self._open: OrderedDict[weakref.ref[Unit], None] = OrderedDict()
        self._ready: set[Unit] = set()  # open units that are complete
        self._tasks: list[_Task] = []  # outermost first
        self.count = 0  # backwards that have reached a unit
        self._reached: list[Unit] = []  # by the current backward, or gathered for it: those that have a record
        self._reducing: Unit | None = None
        self._reduced: list[Unit] = []  # `.grad` is set at the end of the backward: see `_finish_reduction`
        self._idle: list[Unit] = []  # reached in a graph task that has no gradients for them
        # The current backward builds a graph (create_graph), or a graph built so is retained (retain_graph). A backward of
        # that graph runs none of flatshard's hooks, so units stay unsharded.
        self.keeps_unsharded = False
        self._kept = False  # `keeps_unsharded` of the last backward
        self._retains_graph = False  # whether the current backward retains its graph
        self._first_task = 0  # the id of its outermost graph task; ids increase

    # -- before and during -------------------------------------------------------------------------------------------

    def expect(self, unit: Unit) -> None:
        """Called in the forward of ``unit``: a backward may reach it."""
        self._open.setdefault(weakref.ref(unit))

    def touch(self, unit: Unit) -> BackwardRecord:
        """Called when ``unit`` is unsharded in backward: it is cleaned up at the end of the backward."""
        self._enter()
        if unit.record is None:
            unit.handle.sync_thawed()
            unit.record = BackwardRecord()
            self._reached.append(unit)
        return unit.record

    def begin(self, unit: Unit) -> BackwardRecord:
        """Called when backward reaches ``unit``: count the gradients that the running graph task has for it."""
        record, task = self.touch(unit), current_graph_task()
        if task in record.counted_tasks:
            return record
        self.keeps_unsharded |= torch.is_grad_enabled() or (self._kept and _keeps_graph())
        if record.task is None:
            record.task = task
            if (ref := weakref.ref(unit)) not in self._open:
                self._open[ref] = None
                self._open.move_to_end(ref, last=False)
        record.counted_tasks.add(task)
        expected = self._expected(unit)
        others = sum(map(_will_run, unit.stand_ins))
        if expected > others or not others:
            unit.partial |= expected - others < len(unit.handle.gradients.accumulators.nodes)
        unit.handle.gradients.arrivals.expect(expected, self.waits_early)
        if expected:
            record.reduces = self._tasks[-1].brings_gradients = True
            self._ready.discard(unit)
        elif record.task == task:
            self._idle.append(unit)
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
        around = (step.unit, *step.outer)
        over = []
        for unit in self._idle:
            awaited = unit.record is not None and unit.record.task == task
            if awaited and not unit.handle.gradients.arrivals.pending and unit not in around:
                over.append(unit)
        if over:
            to_come = any(map(self._expected, self._open_units()))
            self._complete_all(over, to_come or any(t.brings_gradients for t in self._tasks))
            for early in over:
                assert early.record is not None
                early.record.finished_early = True

    def has_come_to(self, step: Step) -> bool:
        """Whether the current backward has reached this forward, in any of its graph tasks."""
        return bool(self._tasks) and step.opened_in >= self._first_task

    def _enter(self) -> int:
        task = current_graph_task()
        if not self._tasks or self._tasks[-1].id != task:
            if any(t.callback() is None for t in self._tasks):
                self.recover()

            def end() -> None:
                self._end(task)

            if not self._tasks:
                self.count += 1
                self._retains_graph, self._first_task = _keeps_graph(), task
            self._tasks.append(_Task(task, weakref.ref(end, self._on_death)))
            # FSDP and DDP use this, too: autograd has no public way to call a function at the end of a backward.
            Variable._execution_engine.queue_callback(end)
        return task

    @staticmethod
    def _expected(unit: Unit) -> int:
        """How many gradients the running graph task has for ``unit``. [Note: What completes a unit]"""
        nodes = unit.handle.gradients.accumulators.nodes
        nodes = [*nodes, *unit.stand_ins] if unit.stand_ins else nodes
        try:
            return sum(map(_will_run, nodes))
        except RuntimeError:
            return sum(map(_will_accumulate, nodes))

    # -- reducing ----------------------------------------------------------------------------------------------------

    def complete(self, unit: Unit) -> None:
        """Called when ``unit`` has all gradients of the graph task that reached it first. Reduce it, in order."""
        assert unit.record is not None
        if unit in self._idle:
            self._idle.remove(unit)
        unit.handle.gradients.arrivals.pending = 0
        if unit.record.complete():
            if unit.requires_gradient_sync:
                self._ready.add(unit)
                self._reduce_ready()
            else:
                unit.handle.gradients.hold()  # the unit stays open, so that a later reduction keeps the order
                self._holding.add(self)
        elif not unit.handle.gradients.is_held:
            self._open.pop(weakref.ref(unit), None)

    def _reduce_ready(self, all_of_them: bool = False) -> None:
        """Reduce the complete units whose turn it is. [Note: Every rank reduces in the same order]"""
        if not self._ready:
            return
        allowed: list[Unit] = []
        for ref in reversed(self._open):
            if (unit := ref()) is None:
                continue
            if unit in self._ready:
                allowed.append(unit)
                if len(allowed) == len(self._ready):
                    break
            elif not all_of_them and (self._is_awaited(unit) or self._expected(unit)):
                break
        for unit in allowed:
            self._reduce(unit)
            self._ready.remove(unit)
            stays_open = unit.handle.has_replicas and not unit.handle.placement.averaging.reduces_replicas
            if not stays_open:
                del self._open[weakref.ref(unit)]

    @staticmethod
    def _is_awaited(unit: Unit) -> bool:
        return unit.record is not None and unit.record.task is not None

    def _open_units(self) -> Iterator[Unit]:
        """The open units that still exist, in the order in which they are reduced."""
        return (unit for ref in reversed(self._open) if (unit := ref()) is not None)

    def _reduce(self, unit: Unit) -> None:
        if self._reducing is not None:
            self._finish_reduction()
        unit.handle.gradients.reduce()
        unit.handle.gradients.accumulates = not unit.requires_gradient_sync
        self._reducing = unit

    def _finish_reduction(self) -> None:
        """End the reduction in flight. Under CPU offload the host waits only at the end of backward, for all together."""
        unit, self._reducing = self._reducing, None
        if unit is None:
            return
        if self._runtime.host is not None and unit.handle.gradients.gives_late:
            self._reduced.append(unit)
            unit.handle.gradients.free_reduced()
        else:
            unit.handle.gradients.finish()

    def _finish_reductions(self) -> None:
        self._finish_reduction()
        while self._reduced:  # from the last: its copy to the host ends after the others
            self._reduced.pop().handle.gradients.finish()

    def finish_previous(self) -> None:
        """Called when some of a unit's gradients have come: end the previous reduction. [Note: Reductions in flight]"""
        if self._reducing is None:
            return
        if self._reducing.handle.has_replicas:
            self._reducing.handle.gradients.advance()
        else:
            self._finish_reduction()

    # -- the end -----------------------------------------------------------------------------------------------------

    def _end(self, task: int) -> None:
        """End a graph task: complete units with fewer gradients than expected. In the outermost one, end the backward."""
        brings_gradients = any(t.brings_gradients for t in self._tasks if t.id == task)
        self._tasks = [t for t in self._tasks if t.id != task]
        try:
            self._finish(task, brings_gradients)
        except BaseException:
            self.recover()  # otherwise these gradients would be added to those of the next step
            raise

    def _complete_all(self, units: Iterable[Unit], brings_gradients: bool) -> None:
        """Complete units that this rank may not have used. Other ranks may have, and then wait for the reduction.

        Nothing is reduced if no unit gets a gradient: ``torch.autograd.grad`` with respect to inputs.
        """
        for unit in units:
            assert unit.record is not None
            unit.record.reduces |= brings_gradients and bool(unit.handle.gradients.accumulators.nodes)
            self.complete(unit)

    def _finish(self, task: int, brings_gradients: bool) -> None:
        self._complete_all([u for u in self._open_units() if u.record and u.record.task == task], brings_gradients)
        if self._tasks:
            return
        if brings_gradients:  # gradients held by earlier backwards are reduced now, even if this one added none to them
            self._ready.update(
                u for u in self._open_units() if u.handle.gradients.wants_reduction and u.requires_gradient_sync
            )
        self._reduce_all()
        if brings_gradients and Backward._holding:
            self._reduce_held_inside()
        self._drop_records()
        self.keeps_unsharded, self._kept = False, self.keeps_unsharded
        self._runtime.join()
        self._runtime.wait_for_host_reads()

    def _reduce_held_inside(self) -> None:
        """Also reduce what units on other process groups hold, if they are inside units of this backward and were not run."""
        others = [b for b in Backward._holding if b is not self and b.is_idle]
        if not others:
            return
        inside = dict.fromkeys(below for unit in self._reached for below in units_below(unit.module))
        contexts = {below.context for below in inside if below.context.backward in others}
        for context in sorted(contexts, key=lambda context: context.runtime.number):
            context.backward.reduce_held({u for u in inside if u.context is context and u.requires_gradient_sync})

    def reduce_held(self, units: Collection[Unit]) -> None:
        """Outside of a backward: reduce the gradients that earlier backwards hold for ``units``."""
        self._ready.update(u for u in self._open_units() if u in units and u.handle.gradients.wants_reduction)
        self._reduce_all()

    def _reduce_all(self) -> None:
        """Reduce all complete units, and wait for all reductions."""
        try:
            self._reduce_ready(all_of_them=True)
            for ref in [ref for ref in self._open if ref() is None]:
                del self._open[ref]
            self._finish_reductions()
        except BaseException:  # may come from a user's hook
            self.recover(drop_held=True)
            raise
        if self in self._holding and not any(unit.handle.gradients.wants_reduction for unit in self._open_units()):
            self._holding.discard(self)

    def _drop_records(self) -> None:
        units, self._reached = self._reached, []
        for unit in units:
            unit.record = None
            if unit.leaks and not self._retains_graph:
                unit.leaks -= {step for step in unit.leaks if step.opened_in >= self._first_task}
            if self.keeps_unsharded:
                unit.show()
            elif unit.claims or unit.handle.slots.shows is not SHARDED or not unit.handle.is_sharded:
                unit.free_if_unused()  # otherwise it was freed when it was complete

    def _on_death(self, callback: object) -> None:
        """The engine dropped a graph task, perhaps after an exception. Then register the user's parameters, which
        ``zero_grad`` needs. The next forward cleans up the rest, because this callback may run at any point.
        """
        if self.is_stale:
            for unit in self._reached:
                unit.show()

    def recover(self, drop_held: bool = False) -> None:
        """After an exception in backward: drop its gradients, and free everything.

        This includes reductions in flight: the user may have called ``zero_grad`` already, and they would set ``.grad`` after
        it. It includes gradients held by earlier backwards, as this backward has added to some of them.
        """
        drop_held |= bool(self._tasks)
        self._tasks.clear()
        self._ready.clear()
        self._idle.clear()
        self.keeps_unsharded = self._kept = False
        reduced, self._reducing, self._reduced = [*self._reduced, self._reducing], None, []
        units = {*self._reached, *self._open_units(), *(unit for unit in reduced if unit is not None)}
        for unit in units:
            if unit.handle.gradients.is_held and not drop_held:
                continue
            unit.handle.gradients.discard()
            unit.handle.gradients.arrivals.pending = 0
            self._open.pop(weakref.ref(unit), None)
        self._drop_records()

    @property
    def is_idle(self) -> bool:
        """Whether no backward that reached a unit is running."""
        return not self._tasks

    @property
    def is_stale(self) -> bool:
        """Whether a backward failed with an exception and has not been cleaned up."""
        return any(t.callback() is None for t in self._tasks)


def is_finished(unit: Unit) -> bool:
    """Whether ``unit`` has all its gradients from the running graph task."""
    return unit.record is not None and unit.record.finished_in == current_graph_task()


def gather(unit: Unit) -> None:
    """Gather a unit for the current backward, and the units that it needs."""
    context = unit.context
    for needed in unit.needs:
        if needed.record is None:
            context.backward.touch(needed)
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
                unit.context.backward.touch(needed)
            unit.context.prefetch(unit, step.unit.config.prefetch_limit_bytes)


def _next(step: Step) -> Iterable[Unit]:
    if step.unit.backward_prefetch is not None:
        return step.unit.backward_prefetch
    before = step.previous
    while before is not None and before.unit is step.unit:  # an earlier forward of the same unit needs no gather
        before = before.previous
    # Backward has reached `before` already if `step` is of an enclosing unit.
    if before is None or step.unit.context.backward.has_come_to(before):
        return ()
    return (before.unit,)
