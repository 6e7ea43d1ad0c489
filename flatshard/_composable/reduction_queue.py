"""Which units have yet to be reduced over one process group, in which order, and the reductions in flight.

[Note: Every rank reduces in the same order]
Collectives of one group match by order. But a unit may complete earlier on one rank than on another, if they took different
branches inside it. So units are reduced in one canonical order, the reverse of the order of their first forward since their
last reduction. A complete unit waits for the units that ran forward after it

- if they are in the graph: gradients of them may come;
- if they are inside it, or ran between two forwards of it in one pass, and backward has not reached them
  (``may_come_first``). The graph of this rank may have none of their parameters, and yet they will be reduced when backward
  reaches them: that of another rank may have some. Other units that ran after it were reached before, because autograd runs
  what was computed last first.

After a reduction a unit keeps its turn. A backward of another graph that has it (two forwards, then two backwards) puts it
back there, although it reaches units in an order that may depend on the data.

Process groups that units connect have one order: groups.py, [Note: One context for groups that are connected]. Others have
orders of their own. So units on several of those must take the same branches on all ranks, or ranks may wait for each other,
which the watch reports. One order for all groups would make a group whose rank has died hold up others.

[Note: Reductions in flight]
A reduction holds the gradients of a whole unit. So only one is in flight at a time. It ends at the latest when the next unit
is complete. On CPU it ends when a sixth of the next unit's gradients have come (for a transformer block: those of its last
matrix), and only then is the unit after that one gathered ahead, into as much memory as that has freed. Ending it early saves
3 to 5 % of a step's peak memory, and gathering late saves as much again. Over gloo, whose threads have the cores to
themselves while a rank waits, ending it early took 0.98 to 1.00 of a step's time in fp32, and 1.01 to 1.04 in bf16; an
accelerator would be idle. With replicas the first part of a reduction ends then, and the second part when the next unit is
complete, which frees the memory: there no gather waits.

[Note: Deferred gradients]
The user may choose when a backward ends (``configure(manual_finalization=True)``), or start reductions and go on
(``reduce_gradients(async_op=True)``). A backward issues its reductions at the same points as ever, so ranks agree on their
order. Only the results wait, for a ``give`` that the user calls. A backward that reaches such a unit calls it first, and so
``.grad`` accumulates as ever. On an accelerator the end of a backward does not wait for the reduce stream then.

[Note: Reductions and gathers]
A rank must not block on a reduction before it has issued an all-gather that other ranks wait for. So every rank completes a
unit before it gathers the unit after the next one, even if it used none of the unit's parameters.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from flatshard._comm.runtime import Runtime
from flatshard._handle.handle import FlatParamHandle


class Queued(Protocol):
    """The part of a unit that the queue uses. Units know their queue, so this file cannot name their class."""

    handle: FlatParamHandle
    turn: int


Q = TypeVar("Q", bound=Queued)


class ReductionQueue(Generic[Q]):
    """The units that ran forward with gradients, until their reduction has been started. It outlives backwards."""

    every: ClassVar[weakref.WeakSet[ReductionQueue[Any]]] = weakref.WeakSet()
    """The queues of all process groups."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.finishes_early = runtime.streams is None  # [Note: Reductions in flight]
        # By their turns; they are reduced from the end. True: the unit was put back, or left over, after an earlier backward
        # had reduced this or later turns. Weak references: a forward without a backward must not keep its model alive.
        self._open: OrderedDict[weakref.ref[Q], bool] = OrderedDict()
        self._turns = 0
        self._reducing: Q | None = None
        self._reduced: list[Q] = []  # they get `.grad` at the end of the backward: see `_finish_reduction`
        self._deferred: dict[Q, None] = {}  # they get it when the user says so: [Note: Deferred gradients]
        self.drops = 0  # how often gradients of deferred units have been dropped
        self.every.add(self)

    def take_over(self, other: ReductionQueue[Q], units: Iterable[Q]) -> None:
        """Move the units of ``other`` to this queue. ``units`` has all that have had a turn in it, and perhaps others."""
        for unit in units:
            unit.turn += self._turns
        self._open.update(other._open)
        self._turns += other._turns
        self.drops += other.drops

    def expect(self, unit: Q) -> None:
        """Add ``unit`` in its forward: a backward may reach it."""
        if (ref := weakref.ref(unit)) not in self._open:
            self._open[ref] = False
            unit.turn = self._turns = self._turns + 1

    def add_back(self, unit: Q) -> None:
        """Add ``unit`` when backward reaches it. It keeps its turn if no forward since its last reduction has added it."""
        if unit in self._deferred:  # all at once, so that ranks have one order
            self.give()
        if (ref := weakref.ref(unit)) not in self._open:
            turns = {r: u.turn for r in self._open if (u := r()) is not None} | {ref: unit.turn}
            self._open[ref] = True
            self._open = OrderedDict((r, self._open[r]) for r in sorted(turns, key=turns.__getitem__))

    def remove(self, unit: Q) -> None:
        """Remove ``unit``: it is not to be reduced."""
        self._open.pop(weakref.ref(unit), None)

    def units(self) -> Iterator[Q]:
        """Return an iterator over its live units, in the order of their reductions."""
        return (unit for ref in reversed(self._open) if (unit := ref()) is not None)

    def withholding(self) -> Iterable[Q]:
        """Return the units whose gradients of earlier backwards are not in ``.grad`` yet."""
        return (u for u in dict.fromkeys([*self._deferred, *self.units()]) if u.handle.gradients.withholds)

    @property
    def is_deferring(self) -> bool:
        """Whether reductions are in flight that the user is to wait for."""
        return bool(self._deferred)

    @property
    def is_holding(self) -> bool:
        """Whether some units hold gradients of earlier backwards. Such a unit stays in the queue until it is reduced."""
        return any(unit.handle.gradients.is_unreduced for unit in self.units())

    def reduce(
        self,
        ready: set[Q],
        may_come: Callable[[Q], bool] = lambda unit: False,
        may_come_first: Callable[[Q], bool] = lambda unit: False,
    ) -> None:
        """Reduce the units of ``ready`` whose turn it is, and take them out of it.

        Args:
            may_come: whether gradients of another unit may still come, so that it is its turn first.
            may_come_first: whether backward may still reach a unit that ran after this one first did.
        """
        if not ready:
            return
        allowed: list[Q] = []
        passed_over = False
        for ref, is_back in reversed(self._open.items()):
            if (unit := ref()) is None:
                continue
            if unit in ready:
                if (is_back or passed_over) and may_come_first(unit):
                    break
                allowed.append(unit)
                if len(allowed) == len(ready):
                    break
            elif may_come(unit):
                break
            else:
                passed_over = True
        for unit in allowed:
            self._reduce(unit)
            ready.remove(unit)
            in_part = unit.handle.has_replicas and not unit.handle.ranks.averaging.reduces_replicas
            if not in_part:
                del self._open[weakref.ref(unit)]

    def _reduce(self, unit: Q) -> None:
        if self._reducing is not None:
            self._finish_reduction()
        unit.handle.gradients.reduce()
        self._reducing = unit

    def _finish_reduction(self) -> None:
        """End the reduction in flight. Under CPU offload the host waits only at the end of backward, for all together."""
        unit, self._reducing = self._reducing, None
        if unit is None:
            return
        if unit.handle.gradients.defers:
            unit.handle.gradients.free_inputs()
            self._defer(unit)
        elif self._runtime.host is not None and unit.handle.gradients.sets_grads_late:
            self._reduced.append(unit)
            unit.handle.gradients.free_inputs()
        else:
            unit.handle.gradients.finish()

    def _defer(self, unit: Q) -> None:
        unit.handle.gradients.defer()
        self._deferred[unit] = None

    def _leave_in_flight(self) -> None:
        """Defer the reduction in flight. Its input keeps its memory, and nothing waits for it before ``give``."""
        unit, self._reducing = self._reducing, None
        if unit is not None:
            self._defer(unit)
            self._runtime.join_reductions_later()

    @property
    def frees(self) -> bool:
        """Whether the next ``finish_previous`` ends a reduction, and frees its input."""
        return self._reducing is not None and not self._reducing.handle.has_replicas

    def finish_previous(self) -> None:
        """End the previous reduction, as some of a unit's gradients have come. [Note: Reductions in flight]"""
        if self._reducing is not None and self._reducing.handle.has_replicas:
            self._reducing.handle.gradients.advance()
        else:
            self._finish_reduction()

    def reduce_all(self, ready: set[Q]) -> None:
        """Reduce all units of ``ready``, and wait for all reductions that are not deferred."""
        try:
            self.reduce(ready)
            self._open = OrderedDict((ref, True) for ref in self._open if ref() is not None)
            if self._reducing is not None and self._reducing.handle.gradients.defers:
                self._leave_in_flight()
            self._finish_reduction()
            while self._reduced:  # from the last: its copy to the host ends after the others
                self._reduced.pop().handle.gradients.finish()
        except BaseException:  # may come from a user's hook
            self.discard()
            raise

    def reduce_held(self, units: Collection[Q], one_by_one: bool = True) -> None:
        """Reduce the gradients that earlier backwards hold for ``units``, outside of a backward.

        ``one_by_one``: wait for each, so that one input at a time is freed. Otherwise start all, and defer them.
        """
        held = [u for u in self.units() if u in units and u.handle.gradients.wants_reduction]
        for unit in held:
            unit.handle.gradients.stream.wait_for_current(self._runtime)
        if one_by_one:
            self.reduce_all(set(held))
        else:
            try:
                for unit in held:
                    self.reduce({unit})
                    self._leave_in_flight()
            except BaseException:
                self.discard()
                raise
        self._runtime.join()

    def deferred(self, units: Collection[Q]) -> list[Q]:
        """Return the units in ``units`` whose gradients are deferred, in the order of their reductions."""
        return [unit for unit in self._deferred if unit in units]

    def give(self, units: Collection[Q] | None = None) -> None:
        """Wait for deferred reductions of ``units``, by default of all, and set ``.grad``."""
        given = [*self._deferred] if units is None else self.deferred(units)
        try:
            for unit in given:
                unit.handle.gradients.stream.wait_for_current(self._runtime)
                unit.handle.gradients.finish()
                self._deferred.pop(unit, None)
        except BaseException:  # may come from a user's hook
            self.discard()
            raise
        if given:
            self._runtime.join_reductions()

    def discard(self, others: Iterable[Q] = (), keeps_held: bool = False) -> None:
        """Drop all gradients of its units and ``others`` that are not in ``.grad`` yet, also those of reductions in flight.

        ``keeps_held``: except for gradients of earlier backwards, held for a later reduction, or deferred.
        """
        reduced, self._reducing, self._reduced = [*self._reduced, self._reducing], None, []
        if self._deferred and not keeps_held:
            reduced += self._deferred
            self._deferred = {}
            self.drops += 1
        # First what is in flight, in one order on all ranks: what waits for it may issue its second part.
        for unit in dict.fromkeys(unit for unit in [*reduced, *others, *self.units()] if unit is not None):
            gradients = unit.handle.gradients
            if not (keeps_held and (gradients.is_unreduced or gradients.is_deferred)):
                gradients.discard()
                self.remove(unit)
        self._forget_freed()

    def _forget_freed(self) -> None:
        for ref in [ref for ref in self._open if ref() is None]:
            del self._open[ref]
