"""One run of backward over many units: when a unit's gradients are complete, and in which order units are reduced.

[Note: What completes a unit]
When backward comes to a unit, it asks autograd's engine which of the unit's parameters are in the running graph (as
``torch.autograd.graph.register_multi_grad_hook`` does). The unit is complete when that many gradients have come. A
parameter that is not in the graph is unused here, and is not waited for. One that is in the graph and gets no gradient
(a custom function returned None) is noticed at the end of backward, and so is a unit that uses none of its parameters.

[Note: Every rank reduces in the same order]
Collectives of one group match by order, and a unit may complete earlier on one rank than on another: another branch
was taken inside it. So units are reduced in one canonical order, the reverse of the order of their first forward. A
complete unit waits for those that ran forward after it and are in the graph.

[Note: Nested backwards]
Reentrant checkpointing runs a backward inside a backward: another *graph task*. A unit is completed in the graph task
that came to it first, and the end of a backward is the end of the outermost graph task. A graph task that died of an
exception is known by its callback, which died with it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch.autograd import Variable

from flatshard import _config
from flatshard._composable.state import Unit


def current_graph_task() -> int:
    """The id of the running graph task, -1 outside backward. Private API; there is no public way to ask."""
    return torch._C._current_graph_task_id()


class _Task:
    """A graph task that has come to one of our units."""

    __slots__ = ("brings_gradients", "callback", "id")

    def __init__(self, task: int, callback: weakref.ref[Callable[[], None]]) -> None:
        self.id = task
        self.brings_gradients = False  # to any unit
        self.callback = callback  # dead when the engine has dropped the task


class Backward:
    """The backwards of all units on one process group."""

    def __init__(self) -> None:
        # Units that ran forward with gradients and wait to be reduced, by first such forward. Reduced from the end.
        self._open: list[Unit] = []
        self._ready: set[Unit] = set()  # those of them that are complete
        self._tasks: list[_Task] = []  # outermost first
        self._touched: dict[Unit, None] = {}  # units that may be unsharded for this backward
        self._reducing: deque[Unit] = deque()
        self._keep = False  # a graph of this backward is being built (create_graph): its units stay unsharded

    # -- before and during -------------------------------------------------------------------------------------------

    def expect(self, unit: Unit) -> None:
        """``unit`` runs forward and may come back."""
        if unit not in self._open:
            self._open.append(unit)

    def touch(self, unit: Unit) -> None:
        """``unit`` is unsharded during backward: look after it at the end."""
        self._enter()
        self._touched[unit] = None

    def begin(self, unit: Unit) -> int:
        """Backward is at ``unit``: open it if it is not open, and count what the running graph task will bring."""
        task = self._enter()
        if unit.task is None:
            unit.task = task
            self._touched[unit] = None
            if unit not in self._open:
                self._open.insert(0, unit)
        if task not in unit.counted_tasks:
            unit.counted_tasks.add(task)
            expected = self._expected(unit)
            unit.pending += expected
            if expected:
                unit.reduce_wanted = self._tasks[-1].brings_gradients = True
        return task

    def _enter(self) -> int:
        task = current_graph_task()
        if not self._tasks or self._tasks[-1].id != task:
            if any(t.callback() is None for t in self._tasks):
                self.recover()

            def end() -> None:
                self._end(task)

            self._tasks.append(_Task(task, weakref.ref(end)))
            self._keep |= torch.is_grad_enabled()
            # FSDP and DDP use this too; autograd has no public way to run something when a backward ends.
            Variable._execution_engine.queue_callback(end)
        return task

    @staticmethod
    def _expected(unit: Unit) -> int:
        """How many gradients the running graph task has for ``unit``. [Note: What completes a unit]"""
        will_run = torch._C._will_engine_execute_node
        return sum([will_run(node) for node in unit.handle.gradient_nodes()])

    # -- reducing ----------------------------------------------------------------------------------------------------

    def complete(self, unit: Unit) -> None:
        """``unit`` has all gradients that will come in the graph task that it began in: reduce it, in order."""
        assert unit.task is not None
        unit.finished_task = unit.task
        unit.task = None
        unit.counted_tasks.clear()
        unit.pending = 0
        if unit.reduce_wanted:
            unit.reduce_wanted = False
            self._ready.add(unit)
            self._reduce_ready()
        elif unit in self._open:
            self._open.remove(unit)

    def _reduce_ready(self, all_of_them: bool = False) -> None:
        """Reduce what the canonical order allows. [Note: Every rank reduces in the same order]"""
        at = len(self._open) - 1
        while self._ready and at >= 0:
            unit = self._open[at]
            if unit in self._ready:
                self._ready.remove(unit)
                del self._open[at]
                self._reduce(unit)
            elif not all_of_them and (unit.task is not None or self._expected(unit)):
                return
            at -= 1

    def _reduce(self, unit: Unit) -> None:
        while len(self._reducing) >= _config.REDUCTIONS_IN_FLIGHT:
            self._reducing.popleft().handle.finish_reduce()
        unit.handle.reduce()
        self._reducing.append(unit)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _end(self, task: int) -> None:
        """A graph task is over: complete what got less than expected; at the outermost, leave nothing behind."""
        brings_gradients = any(t.brings_gradients for t in self._tasks if t.id == task)
        self._tasks = [t for t in self._tasks if t.id != task]
        for unit in [u for u in reversed(self._open) if u.task == task]:
            # Parameters that this rank left out may be in another rank's graph, which then waits for us. Not so where
            # no unit gets a gradient: that is ``torch.autograd.grad`` with respect to inputs.
            unit.reduce_wanted |= brings_gradients and unit.handle.any_trainable
            self.complete(unit)
        if self._tasks:
            return
        self._reduce_ready(all_of_them=True)
        while self._reducing:
            self._reducing.popleft().handle.finish_reduce()
        if not self._keep:
            self._release_touched()
        self._keep = False

    def _release_touched(self) -> None:
        touched, self._touched = self._touched, {}
        for unit in touched:
            unit.active_steps = 0
            unit.last_step = None
            if unit.holds == 0:
                unit.handle.reshard()

    def recover(self) -> None:
        """After an exception in backward: finish the reductions under way, drop the rest, free everything."""
        self._tasks.clear()
        self._ready.clear()
        self._keep = False
        while self._reducing:
            self._reducing.popleft().handle.finish_reduce()
        for unit in [*self._touched, *self._open]:
            unit.handle.discard_gradients()
            unit.task = None
            unit.counted_tasks.clear()
            unit.pending = 0
            unit.reduce_wanted = False
        self._open.clear()
        self._release_touched()

    @property
    def keeps_unsharded(self) -> bool:
        """Whether units must outlive this backward: it builds a graph (create_graph) that will be run backward too."""
        return self._keep

    @property
    def is_stale(self) -> bool:
        """Whether a backward died of an exception and was not cleaned up after."""
        return any(t.callback() is None for t in self._tasks)
