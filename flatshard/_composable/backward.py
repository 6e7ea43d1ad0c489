"""One run of backward over many units: when a unit's gradients are complete, and in which order units are reduced.

[Note: What completes a unit]
When backward comes to a unit, it asks autograd's engine which of the unit's parameters are in the running graph (as
``torch.autograd.graph.register_multi_grad_hook`` does). The unit is complete when that many gradients have come. A
parameter that is not in the graph is unused here, and is not waited for. A unit of which none is in the graph, unused or
within a reentrant checkpoint, is complete when backward comes to a unit before it.

[Note: Every rank reduces in the same order]
Collectives of one group match by order, and a unit may complete earlier on one rank than on another: another branch
was taken inside it. So units are reduced in one canonical order, the reverse of the order of their first forward. A
complete unit waits for those that ran forward after it and are in the graph.

[Note: Reductions in flight]
A reduction holds a whole unit's gradients. So one is under way at a time: it ends at the latest when the next unit is
complete, and on CPU when a sixth of the next unit's gradients are there (of a transformer's block: those of its last
matrix). That takes 3 to 5 % off a step's peak. Over gloo, whose threads have the cores to themselves while a rank waits, a
step took 0.98 to 1.00 of the time in fp32, 1.01 to 1.04 in bf16; an accelerator would stand idle. With replicas the first
part of a reduction ends there, and the second when the next unit is complete.

A rank that waits for a reduction must not be waited for with a gather that it has yet to issue. Hence every rank completes
a unit before it gathers what comes after the next one, also a unit of which it uses nothing.

[Note: Nested backwards]
Reentrant checkpointing runs a backward inside a backward: another *graph task*. A unit is completed in the graph task
that came to it first, and the end of a backward is the end of the outermost graph task. A graph task that died of an
exception is known by its callback, which died with it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import ClassVar

import torch
from torch.autograd import Variable

from flatshard._composable.state import BackwardRecord, Step, Unit, units_below
from flatshard._runtime import Runtime

# The id of the running graph task, -1 outside backward; whether it was told to retain the graph, and whether it comes to a
# node. Private API: there is no public way to ask.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
_will_run = torch._C._will_engine_execute_node


class _Task:
    """A graph task that has come to one of our units."""

    __slots__ = ("brings_gradients", "callback", "id")

    def __init__(self, task: int, callback: weakref.ref[Callable[[], None]]) -> None:
        self.id = task
        self.brings_gradients = False  # to any unit
        self.callback = callback  # dead when the engine has dropped the task


class Backward:
    """The backwards of all units on one process group."""

    _holding: ClassVar[weakref.WeakSet[Backward]] = weakref.WeakSet()  # those with gradients for a later reduction

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.waits_early = runtime.streams is None  # for reductions: [Note: Reductions in flight]
        # Units that ran forward with gradients and wait to be reduced, by first such forward. Reduced from the end. Held
        # weakly: a forward without a backward must not keep its model alive.
        self._open: OrderedDict[weakref.ref[Unit], None] = OrderedDict()
        self._ready: set[Unit] = set()  # those of them that are complete
        self._tasks: list[_Task] = []  # outermost first
        self.count = 0  # backwards that have come to a unit
        self._records: dict[
            Unit, BackwardRecord
        ] = {}  # of the units that the backward under way has come to, or gathered
        self._reducing: Unit | None = None
        self._reduced: list[Unit] = []  # their gradients come into `.grad` at the end: see `_finish_reduction`
        self._idle: dict[Unit, BackwardRecord] = {}  # that backward has come to, with no gradient in that graph task
        # A graph of this backward is being built (create_graph), or one that was built is kept (retain_graph), in which
        # no hook of ours is: its units stay unsharded.
        self.keeps_unsharded = False
        self._kept = False  # the last backward's did
        self._retains_graph = False  # the one under way was told to
        self._first_task = 0  # the id of its outermost graph task; ids grow

    # -- before and during -------------------------------------------------------------------------------------------

    def expect(self, unit: Unit) -> None:
        """``unit`` runs forward and may come back."""
        self._open.setdefault(unit.ref)

    def touch(self, unit: Unit) -> BackwardRecord:
        """``unit`` is unsharded during backward: look after it at the end."""
        self._enter()
        if unit.record is None:
            unit.handle.sync_thawed()
            unit.record = self._records[unit] = BackwardRecord()
        return unit.record

    def begin(self, unit: Unit) -> BackwardRecord:
        """Backward is at ``unit``: await its gradients, and count what the running graph task will bring."""
        record, task = self.touch(unit), current_graph_task()
        self.keeps_unsharded |= torch.is_grad_enabled() or (self._kept and _keeps_graph())
        if record.task is None:
            record.task = task
            if unit.ref not in self._open:
                self._open[unit.ref] = None
                self._open.move_to_end(unit.ref, last=False)
        if task not in record.counted_tasks:
            record.counted_tasks.add(task)
            expected = self._expected(unit)
            anchor = unit.anchor_node  # of a forward that passed by the unit: [Note: Taking part without running]
            skipped = anchor is not None and _will_run(anchor)
            if expected > 1 or not skipped:
                unit.partial |= expected - skipped < len(unit.handle.gradient_nodes)
            unit.handle.arrivals.expect(expected, self.waits_early)
            if expected:
                record.reduces = self._tasks[-1].brings_gradients = True
                self._ready.discard(unit)
            elif record.task == task:
                self._idle[unit] = record
        return record

    def come_to(self, step: Step) -> None:
        """Backward is at a forward of a unit: those that it has come to before get no more. [Note: What completes a unit]"""
        task, record = current_graph_task(), step.unit.record
        if record is None or record.finished_in != task:
            record = self.begin(step.unit)
        record.come_to(step)
        if not self._idle:
            return
        around = (step.unit, *step.outer)
        over = {
            u: r for u, r in self._idle.items() if r.task == task and not u.handle.arrivals.pending and u not in around
        }
        if over:
            to_come = any(map(self._expected, self._open_units()))
            self._complete_all(over, to_come or any(t.brings_gradients for t in self._tasks))
            for early in over.values():
                early.finished_early = True

    def has_come_to(self, step: Step) -> bool:
        """Whether the backward under way has come to a forward of a unit, in whichever of its graph tasks."""
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
            # FSDP and DDP use this too; autograd has no public way to run something when a backward ends.
            Variable._execution_engine.queue_callback(end)
        return task

    @staticmethod
    def _expected(unit: Unit) -> int:
        """How many gradients the running graph task has for ``unit``. [Note: What completes a unit]"""
        nodes = unit.handle.gradient_nodes
        return sum(map(_will_run, nodes if unit.anchor_node is None else [*nodes, unit.anchor_node]))

    # -- reducing ----------------------------------------------------------------------------------------------------

    def complete(self, unit: Unit) -> None:
        """``unit`` has all gradients that will come in the graph task that it began in: reduce it, in order."""
        assert unit.record is not None
        self._idle.pop(unit, None)
        unit.handle.arrivals.pending = 0
        if unit.record.complete():
            if unit.requires_gradient_sync:
                self._ready.add(unit)
                self._reduce_ready()
            else:
                unit.handle.hold_gradients()  # it stays open: whoever reduces keeps the order
                self._holding.add(self)
        elif not unit.handle.holds_gradients:
            self._open.pop(unit.ref, None)

    def _reduce_ready(self, all_of_them: bool = False) -> None:
        """Reduce what the canonical order allows. [Note: Every rank reduces in the same order]"""
        if not self._ready:
            return
        allowed: list[Unit] = []
        for unit in self._open_units():
            if unit in self._ready:
                allowed.append(unit)
                if len(allowed) == len(self._ready):
                    break
            elif not all_of_them and (self._is_awaited(unit) or self._expected(unit)):
                break
        for unit in allowed:
            self._reduce(unit)
            self._ready.remove(unit)
            if unit.handle.replicas is None or unit.handle.reduces_replicas:  # else it stays open
                del self._open[unit.ref]

    @staticmethod
    def _is_awaited(unit: Unit) -> bool:
        return unit.record is not None and unit.record.task is not None

    def _open_units(self) -> Iterator[Unit]:
        """The open units that still exist, in the order in which they are reduced."""
        return (unit for ref in reversed(self._open) if (unit := ref()) is not None)

    def _reduce(self, unit: Unit) -> None:
        self._finish_reduction()
        unit.handle.reduce()
        unit.handle.accumulates = not unit.requires_gradient_sync
        self._reducing = unit

    def _finish_reduction(self) -> None:
        """The one under way. Under CPU offload only the device waits for it; the host does at the end, for all at once."""
        unit, self._reducing = self._reducing, None
        if unit is None:
            return
        if unit.handle.gives_late and not unit.reduced_callbacks:
            self._reduced.append(unit)
            unit.handle.free_reduced()
        else:
            unit.handle.finish_reduce()

    def _finish_reductions(self) -> None:
        self._finish_reduction()
        while self._reduced:  # the last one first: it was copied behind the others
            self._reduced.pop().handle.finish_reduce()

    def finish_previous(self) -> None:
        """Some of a unit's gradients have come. [Note: Reductions in flight]"""
        if self._reducing is None:
            return
        if self._reducing.handle.replicas is None:
            self._finish_reduction()
        else:
            self._reducing.handle.advance_reduce()

    # -- the end -----------------------------------------------------------------------------------------------------

    def _end(self, task: int) -> None:
        """A graph task is over: complete what got less than expected; at the outermost, leave nothing behind."""
        brings_gradients = any(t.brings_gradients for t in self._tasks if t.id == task)
        self._tasks = [t for t in self._tasks if t.id != task]
        try:
            self._finish(task, brings_gradients)
        except BaseException:
            self.recover()  # what has not been reduced must not come into the next step's gradients
            raise

    def _complete_all(self, units: Iterable[Unit], brings_gradients: bool) -> None:
        """Complete units of which this rank may have left out what is in another rank's graph, which then waits for us.

        Not so where no unit gets a gradient: that is ``torch.autograd.grad`` with respect to inputs.
        """
        for unit in units:
            assert unit.record is not None
            unit.record.reduces |= brings_gradients and unit.handle.any_trainable
            self.complete(unit)

    def _finish(self, task: int, brings_gradients: bool) -> None:
        self._complete_all([u for u in self._open_units() if u.record and u.record.task == task], brings_gradients)
        if self._tasks:
            return
        if brings_gradients:  # gradients held by earlier backwards are reduced now, even if this one added none
            self._ready.update(u for u in self._open_units() if u.handle.wants_reduction and u.requires_gradient_sync)
        self._reduce_all()
        if brings_gradients and Backward._holding:
            self._reduce_held_inside()
        self._drop_records()
        self.keeps_unsharded, self._kept = False, self.keeps_unsharded
        self._runtime.join()
        self._runtime.wait_for_host_reads()

    def _reduce_held_inside(self) -> None:
        """The same for units on other process groups, left out, inside those that this backward has come to."""
        others = [b for b in Backward._holding if b is not self and b.is_idle]
        if not others:
            return
        inside = dict.fromkeys(below for unit in self._records for below in units_below(unit.module))
        contexts = {below.context for below in inside if below.context.backward in others}
        for context in sorted(contexts, key=lambda context: context.runtime.number):
            context.backward.reduce_held({u for u in inside if u.context is context and u.requires_gradient_sync})

    def reduce_held(self, units: Collection[Unit]) -> None:
        """Outside of a backward: reduce what earlier ones hold for ``units``."""
        self._ready.update(u for u in self._open_units() if u in units and u.handle.wants_reduction)
        self._reduce_all()

    def _reduce_all(self) -> None:
        """Reduce every complete unit, and wait for all reductions."""
        try:
            self._reduce_ready(all_of_them=True)
            for ref in [ref for ref in self._open if ref() is None]:
                del self._open[ref]
            self._finish_reductions()
        except BaseException:  # of a user's hook
            self.recover(drop_held=True)
            raise
        if self in self._holding and not any(unit.handle.wants_reduction for unit in self._open_units()):
            self._holding.discard(self)

    def _drop_records(self) -> None:
        units, self._records = self._records, {}
        for unit in units:
            unit.record = None
            if unit.leaks and not self._retains_graph:
                unit.leaks -= {step for step in unit.leaks if step.opened_in >= self._first_task}
            if self.keeps_unsharded:
                unit.show()
            else:
                unit.free_if_unused()

    def _on_death(self, callback: object) -> None:
        """The engine dropped a graph task, perhaps because of an exception. Then ``zero_grad`` must find the user's
        parameters; the rest waits for the next forward (this may run in the middle of anything).
        """
        if self.is_stale:
            for unit in self._records:
                unit.show()

    def recover(self, drop_held: bool = False) -> None:
        """After an exception in backward: drop its gradients, free everything.

        Also of reductions under way: the user has called ``zero_grad`` by now, and they would come after it. And those that
        earlier backwards hold, as this one has added to some of them.
        """
        drop_held |= bool(self._tasks)
        self._tasks.clear()
        self._ready.clear()
        self._idle.clear()
        self.keeps_unsharded = self._kept = False
        reduced, self._reducing, self._reduced = [*self._reduced, self._reducing], None, []
        units = {*self._records, *self._open_units(), *(unit for unit in reduced if unit is not None)}
        for unit in units:
            if unit.handle.holds_gradients and not drop_held:
                continue
            unit.handle.discard_gradients()
            unit.handle.arrivals.pending = 0
            self._open.pop(unit.ref, None)
        self._drop_records()

    @property
    def is_idle(self) -> bool:
        """No backward has come to a unit, or all that did are over."""
        return not self._tasks

    @property
    def is_stale(self) -> bool:
        """Whether a backward died of an exception and was not cleaned up after."""
        return any(t.callback() is None for t in self._tasks)
