"""One backward over many units: when units are complete (unit_backward.py), and in which order they are gathered.

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
from typing import Any, ClassVar

import torch
from torch.autograd import Variable

from flatshard._base import trace
from flatshard._base.config import BackwardPrefetch
from flatshard._base.errors import name_list
from flatshard._composable.claims import Reason
from flatshard._composable.find import contexts_of, units_below
from flatshard._composable.reduction_queue import ReductionQueue
from flatshard._composable.state import Unit, made_units
from flatshard._composable.to_come import (
    another_may_come_first,
    comes_again,
    has_gradients,
    is_completed_by,
    is_over,
    may_get_gradients,
    was_completed,
    was_left,
)
from flatshard._composable.unit_backward import (
    AWAITING,
    COMPLETE,
    IDLE,
    AwaitedGradients,
    ForwardRecord,
    UnitBackward,
    current_graph_task,
)
from flatshard._handle.lifetime import BY_NONE, ParamState
from flatshard._handle.registrations import SHARDED

_BACKWARD_PRE = BackwardPrefetch.BACKWARD_PRE  # for each step: see lifetime.py
_referent: Any = weakref.ref.__call__
# Whether the running graph task retains the graph. Private API, as there is no public way.
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


class Backward:
    """A running backward on one process group, from the first unit that it reaches until it ends or fails. See ``of``."""

    every: ClassVar[weakref.WeakSet[Backward]] = weakref.WeakSet()
    """The backwards of all process groups. The engine keeps them alive until their graph tasks have ended."""

    def __init__(self, unit: Unit) -> None:
        """``unit``: one of the group."""
        self._context = unit.context
        self._queue = unit.context.reductions
        self.task = current_graph_task()  # the outermost one; ids increase
        self._retains_graph = _keeps_graph()
        # The callbacks of the graph tasks under way, outermost first. They die when the engine drops the task.
        self._tasks: dict[int, weakref.ref[Callable[[], None]]] = {}
        self._bringing: set[int] = set()  # graph tasks with gradients for at least one unit
        self._touched: list[Unit] = []  # gathered or reached, in the order of the first touch
        self._idle: dict[Unit, None] = {}  # in the state IDLE: each forward that is reached asks for them
        self._ready: set[Unit] = set()  # complete units in the queue
        # It builds a graph (create_graph), or retains a graph that was built so (retain_graph). A backward of that graph
        # runs none of flatshard's hooks, so units stay unsharded.
        self.keeps_unsharded = False
        self.every.add(self)

    @classmethod
    def of(cls, unit: Unit) -> Backward:
        """Return the running backward on the process group of ``unit``, which it reaches or gathers."""
        context, task = unit.context, current_graph_task()
        backward = context.backward
        if isinstance(backward, Backward) and next(reversed(backward._tasks)) == task:
            return backward
        if backward is not None and backward.has_failed:
            backward.drop()
        backward = context.backward
        if not isinstance(backward, Backward):
            context.set_backward(backward := cls(unit))
        backward._enter(task)
        return backward

    def _enter(self, task: int) -> None:
        def end() -> None:
            self._end(task)

        self._tasks[task] = weakref.ref(end, self._on_death)
        # FSDP and DDP use this, too: autograd has no public way to call a function at the end of a backward.
        Variable._execution_engine.queue_callback(end)

    # -- during --------------------------------------------------------------------------------------------------------

    def touch(self, unit: Unit) -> UnitBackward[Unit]:
        """Return the record of ``unit`` for this backward, made if needed. The end of the backward reshards the unit."""
        if (now := unit.graph.now) is None:
            unit.handle.sync_unfrozen()
            now = unit.graph.now = UnitBackward(unit.handle.ranks.label)
            self._touched.append(unit)
        return now

    def await_gradients(self, unit: Unit) -> AwaitedGradients:
        """Count the gradients that the running graph task has for ``unit``, when backward reaches it."""
        now, task = unit.graph.now or self.touch(unit), current_graph_task()
        if (awaited := now.awaited) is not None and task in awaited.expected:
            return awaited
        self.keeps_unsharded |= torch.is_grad_enabled() or (unit.history.was_kept_unsharded and _keeps_graph())
        accumulators = unit.handle.gradients.accumulators
        if accumulators.nodes and awaited is None:
            self._queue.add_back(unit)
        awaited = now.reach(task, accumulators, unit.graph.stand_ins, self._queue.finishes_early)
        if awaited.expected[task]:
            self._bringing.add(task)
            self._ready.discard(unit)
        elif now.state is IDLE:
            self._idle[unit] = None
        unit.history.leaves_out |= now.lacks_some
        return awaited

    def reach_forward(self, record: ForwardRecord[Unit]) -> AwaitedGradients | None:
        """Note that backward reaches a forward of a unit, and complete idle units before it. [Note: What completes a unit]

        Returns what the unit awaits, or None if it is complete.
        """
        task, unit = current_graph_task(), record.unit
        record.reached_in = task
        now = unit.graph.now or self.touch(unit)
        if now.completed_in != task:  # `was_completed`, without a call
            self.await_gradients(unit)
        now.open_forwards = (now.open_forwards or 0) + 1
        now.last_forward = record
        if self._idle and (idle := [u for u in self._idle if u not in record.outer]):
            self._complete_idle(unit, idle)
        return now.awaited

    def reach_recomputed(self, unit: Unit) -> None:
        """Note that a forward of ``unit`` runs in backward. In a reentrant checkpoint that is when backward comes to it."""
        self.touch(unit)
        if self._idle and not comes_again(unit):
            self._complete_idle(unit, [u for u in self._idle if unit not in units_below(u.module)])

    def _complete_idle(self, unit: Unit, idle: Iterable[Unit]) -> None:
        """Complete those of ``idle`` that are over, as backward comes to ``unit``."""
        task = current_graph_task()
        over = [u for u in idle if u not in unit.needs and is_completed_by(u, task) and is_over(u)]
        if over:
            to_come = any(has_gradients(u) for queue in ReductionQueue.every for u in queue.units())
            self._complete_unused(over, to_come or self._bring_gradients(self._tasks), early=True)

    @staticmethod
    def leave_forward(unit: Unit) -> bool:
        """Note that backward leaves a forward of ``unit`` through its inputs, and return whether it has left all of them.

        Forwards of earlier passes don't count. claims.py, [Note: Freeing]
        """
        if (now := unit.graph.now) is None:
            return True
        now.open_forwards = max(0, (now.open_forwards or 0) - 1)
        return was_left(unit) if unit.handle.gradients.accumulators.nodes else now.open_forwards == 0

    def postpone(self, unit: Unit) -> None:
        """Make ``unit`` idle: it has all awaited gradients, but other ranks may have some to come."""
        now = unit.graph.now
        assert now is not None
        now.move("postpone")
        self._idle[unit] = None

    def complete(self, unit: Unit, reduces: bool = False, early: bool = False) -> None:
        """Reduce ``unit`` when it is its turn: it has all gradients of the graph task that reached it first.

        ``reduces``: even if none were expected. ``early``: see ``UnitBackward.complete``.
        """
        self._idle.pop(unit, None)
        now = unit.graph.now
        assert now is not None
        if now.complete(early) or reduces:
            if unit.handle.gradients.reduces:
                self._ready.add(unit)
                self._queue.reduce(self._ready, may_get_gradients, another_may_come_first)
            else:
                unit.handle.gradients.hold()  # it stays in the queue, so that a later reduction keeps the order
        elif unit not in self._ready and not unit.handle.gradients.is_unreduced:
            self._queue.remove(unit)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end(self, task: int) -> None:
        """End a graph task: complete units with fewer gradients than expected. In the outermost one, end the backward."""
        if self._tasks.pop(task, None) is None:  # this backward has been dropped
            return
        if not self._tasks:
            self._context.set_backward(None)  # before hooks of the user, which run outside of it
        try:
            brings_gradients = self._bring_gradients((task,))
            self._complete_unused([u for u in self._queue.units() if is_completed_by(u, task)], brings_gradients)
            if not self._tasks:
                self._reduce_rest(brings_gradients)
        except BaseException:
            self.drop()  # otherwise these gradients would be added to those of the next step
            raise

    def _bring_gradients(self, tasks: Iterable[int]) -> bool:
        """Return whether one of ``tasks`` has gradients for a unit of any process group: ranks may not agree on one."""
        return any(not backward._bringing.isdisjoint(tasks) for backward in self.every)

    def _complete_unused(self, units: Iterable[Unit], brings_gradients: bool, early: bool = False) -> None:
        """Complete units that this rank may not have used. Other ranks may have, and then wait for the reduction.

        Nothing is reduced if no unit of any process group gets a gradient: ``torch.autograd.grad`` with respect to inputs.
        """
        for unit in units:
            self.complete(unit, brings_gradients and bool(unit.handle.gradients.accumulators.nodes), early)

    def _reduce_rest(self, brings_gradients: bool) -> None:
        """Reduce the units that still wait for their turn, and those that hold gradients. Forget all."""
        held = [unit for unit in self._queue.units() if unit.handle.gradients.wants_reduction]
        if held:  # what is reached together is one model from now on
            for unit in self._touched:
                unit.tree.join(self._touched[0].tree)
        if held and brings_gradients:
            # Reduce what this model holds of earlier backwards, even if this one added nothing to it.
            mine = {unit.tree.model for unit in self._touched[:1]}
            self._ready.update(u for u in held if u.handle.gradients.reduces and u.tree.model in mine)
        self._queue.reduce_all(self._ready)
        if brings_gradients:
            self._reduce_held_inside()
        self._forget_touched()
        self._context.runtime.join()
        self._context.runtime.wait_for_host_reads()

    def _reduce_held_inside(self) -> None:
        """Reduce held gradients of units on other process groups that are inside units of this backward and were not run."""
        others = [queue for queue in ReductionQueue.every if queue is not self._queue and queue.is_holding]
        if not others:
            return
        inside = dict.fromkeys(below for unit in self._touched for below in units_below(unit.module))
        idle = (u for u in inside if u.context.reductions in others and u.context.backward is None)
        for context in contexts_of(idle):
            context.reductions.reduce_held({u for u in inside if u.context is context and u.handle.gradients.reduces})

    def _forget_touched(self) -> None:
        self._context.prefetcher.clear()  # what it has is touched, too
        for unit in self._touched:
            unit.history.was_kept_unsharded = self.keeps_unsharded
            unit.graph.now = None
            if unit.history.leaks and not self._retains_graph:
                unit.history.drop_leaks(self.task)
            if self.keeps_unsharded:
                unit.show()
                unit.handle.take_over(BY_NONE)
            elif unit.claims or unit.handle.registrations.shows is not SHARDED or not unit.handle.is_sharded:
                unit.release(Reason.BACKWARD_ENDED)  # otherwise it was freed when it was complete

    @property
    def has_failed(self) -> bool:
        """Whether a graph task failed with an exception. Other threads ask, too."""
        return None in [*map(_referent, [*self._tasks.values()])]

    def _on_death(self, callback: object) -> None:
        """Register the user's parameters, which ``zero_grad`` needs, if the engine dropped a graph task after an exception.

        The next forward cleans up the rest, because this callback may run at any point.
        """
        if self.has_failed:
            self._context.publish_place(bool(self._context.forwards))
            for unit in self._touched:
                unit.graph.now = None  # it would keep the unit alive: see `UnitGraph`
                unit.show()
            if ahead := [u.fqn for u in self._touched if u.handle.state is ParamState.UNSHARDING]:
                trace.logger.warning(
                    "backward failed before it came to unit %s by an output. If torch reports a tensor that was modified by "
                    "an inplace operation, backward entered the unit by a tensor that its forward handed over in another "
                    "way, as by a list or an object: return that tensor from the forward, too",
                    name_list(ahead),
                )

    def drop(self) -> None:
        """Drop its gradients and free everything, after an exception.

        This includes reductions in flight: the user may have called ``zero_grad`` already, and they would set ``.grad`` after
        it. It includes gradients held by earlier backwards, as this backward has added to some of them.
        """
        self._context.set_backward(None)
        self._tasks.clear()
        self.keeps_unsharded = False
        self._queue.discard(self._touched)
        self._forget_touched()


def make_room(unit: Unit) -> None:
    """Free memory of other units that ``unit`` needs. unsharded.py, [Note: Static buffers]"""
    unit.context.prefetcher.free_unused()
    for other in made_units.values():  # that stay until the end of the backward, though their values are not needed
        now, are_all = other.graph.now, other.handle.gradients.accumulators.are_all
        if now is None or not are_all or now.state <= AWAITING:
            continue
        if now.state is COMPLETE or is_over(other):
            other.release(Reason.ROOM_NEEDED)
    if not unit.history.live_forwards:
        unit.handle.memory.unblock()


def gather(unit: Unit) -> None:
    """Gather a unit for the current backward, and the units that it needs."""
    context = unit.context
    for needed in unit.needs:
        if needed.graph.now is None:
            Backward.of(unit).touch(needed)
        if needed.handle.stamp is None:  # sharded
            needed.handle.unshard(context.latest_pass.id, for_backward=True)


def gather_ahead(unit: Unit) -> None:
    """Gather a unit that backward has reached or will reach, unless the running graph task has completed it."""
    if unit.handle.stamp is None and not was_completed(unit):
        gather(unit)


def gather_last_inside(record: ForwardRecord[Unit]) -> None:
    """Gather the unit inside that backward needs first, before the unit of ``record`` is recomputed."""
    last = record
    while last.previous is not None and last.unit in last.previous.outer:
        last = last.previous
        gather_ahead(last.unit)
    if last is not record and prefetches_before(last.unit):
        for unit in _next(last):
            gather_ahead(unit)


def prefetches_before(unit: Unit) -> bool:
    """Return whether the next unit is gathered before this unit's backward computes."""
    when = unit.config.backward_prefetch
    return when is _BACKWARD_PRE or (when is None and unit.backward_targets is not None)


def prefetch_after(unit: Unit) -> None:
    """Gather the next unit, as the backward of ``unit`` has computed."""
    if (now := unit.graph.now) is not None and now.last_forward is not None:
        prefetch(now.last_forward)


def prefetch(record: ForwardRecord[Unit]) -> None:
    """Gather the unit that comes after that of ``record`` in backward, or the units that the user chose instead."""
    task = current_graph_task()
    for unit in _next(record):
        if (now := unit.graph.now) is None or now.completed_in != task:  # `was_completed`, without a call
            for needed in unit.needs:
                if needed.graph.now is None:
                    Backward.of(unit).touch(needed)
            limit, context = record.unit.config.prefetch_limit_bytes, unit.context
            context.prefetcher.prefetch(unit, limit, context.latest_pass.id, for_backward=not context.forwards)


def _next(record: ForwardRecord[Unit]) -> Iterable[Unit]:
    if record.unit.backward_targets is not None:
        return record.unit.backward_targets
    before = record.previous
    while before is not None and before.unit is record.unit:  # an earlier forward of the same unit needs no gather
        before = before.previous
    backward = record.unit.context.backward
    # Backward has reached `before` already if `record` is of an enclosing unit.
    if before is None or (isinstance(backward, Backward) and before.reached_in >= backward.task):
        return ()
    return (before.unit,)
