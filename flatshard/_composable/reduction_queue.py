"""Which units have yet to be reduced over one process group, in which order, and the reductions in flight.

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
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import ClassVar

from flatshard._composable.state import Unit
from flatshard._runtime import Runtime


class ReductionQueue:
    """The units that ran forward with gradients, until their reduction has been started. It outlives backwards."""

    holding: ClassVar[weakref.WeakSet[ReductionQueue]] = weakref.WeakSet()
    """Those with units that hold gradients of earlier backwards for a later reduction (``UnitGradients.is_held``)."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.waits_early = runtime.streams is None  # [Note: Reductions in flight]
        # In the order of their first forward; they are reduced from the end. Weak references: a forward without a backward
        # must not keep its model alive.
        self._open: OrderedDict[weakref.ref[Unit], None] = OrderedDict()
        self._reducing: Unit | None = None
        self._reduced: list[Unit] = []  # they get `.grad` at the end of the backward: see `_finish`

    def expect(self, unit: Unit) -> None:
        """Called in the forward of ``unit``: a backward may reach it."""
        self._open.setdefault(weakref.ref(unit))

    def add_last(self, unit: Unit) -> None:
        """Called when backward reaches ``unit``. It is reduced last if no forward since its last reduction has added it."""
        if (ref := weakref.ref(unit)) not in self._open:
            self._open[ref] = None
            self._open.move_to_end(ref, last=False)

    def remove(self, unit: Unit) -> None:
        """``unit`` is not to be reduced."""
        self._open.pop(weakref.ref(unit), None)

    def units(self) -> Iterator[Unit]:
        """The units in it that still exist, in the order in which they are reduced."""
        return (unit for ref in reversed(self._open) if (unit := ref()) is not None)

    def hold(self, unit: Unit) -> None:
        """Keep the gradients of ``unit``. It stays in the queue, so that a later reduction keeps the order."""
        unit.handle.gradients.hold()
        self.holding.add(self)

    def reduce(self, ready: set[Unit], may_come: Callable[[Unit], bool] | None = None) -> None:
        """Reduce the units of ``ready`` whose turn it is, and take them out of it.

        ``may_come``: whether gradients of another unit may still come, so that it is its turn first. None: of none.
        """
        if not ready:
            return
        allowed: list[Unit] = []
        for ref in reversed(self._open):
            if (unit := ref()) is None:
                continue
            if unit in ready:
                allowed.append(unit)
                if len(allowed) == len(ready):
                    break
            elif may_come is not None and may_come(unit):
                break
        for unit in allowed:
            self._reduce(unit)
            ready.remove(unit)
            stays_open = unit.handle.has_replicas and not unit.handle.placement.averaging.reduces_replicas
            if stays_open:
                self.holding.add(self)
            else:
                del self._open[weakref.ref(unit)]

    def _reduce(self, unit: Unit) -> None:
        if self._reducing is not None:
            self._finish()
        unit.handle.gradients.reduce()
        unit.handle.gradients.accumulates = not unit.requires_gradient_sync
        self._reducing = unit

    def _finish(self) -> None:
        """End the reduction in flight. Under CPU offload the host waits only at the end of backward, for all together."""
        unit, self._reducing = self._reducing, None
        if unit is None:
            return
        if unit.context.runtime.host is not None and unit.handle.gradients.gives_late:
            self._reduced.append(unit)
            unit.handle.gradients.free_reduced()
        else:
            unit.handle.gradients.finish()

    def finish_previous(self) -> None:
        """Called when some of a unit's gradients have come: end the previous reduction. [Note: Reductions in flight]"""
        if self._reducing is None:
            return
        if self._reducing.handle.has_replicas:
            self._reducing.handle.gradients.advance()
        else:
            self._finish()

    def reduce_all(self, ready: set[Unit]) -> None:
        """Reduce all units of ``ready``, and wait for all reductions."""
        try:
            self.reduce(ready)
            for ref in [ref for ref in self._open if ref() is None]:
                del self._open[ref]
            self._finish()
            while self._reduced:  # from the last: its copy to the host ends after the others
                self._reduced.pop().handle.gradients.finish()
        except BaseException:  # may come from a user's hook
            self.discard()
            raise
        if self in self.holding and not any(unit.handle.gradients.is_held for unit in self.units()):
            self.holding.discard(self)

    def reduce_held(self, units: Collection[Unit]) -> None:
        """Outside of a backward: reduce the gradients that earlier backwards hold for ``units``."""
        held = {u for u in self.units() if u in units and u.handle.gradients.wants_reduction}
        for unit in held:
            unit.handle.gradients.come_home()
        self.reduce_all(held)
        self._runtime.join()

    def discard(self, others: Iterable[Unit] = (), keeps_held: bool = False) -> None:
        """Drop all gradients of its units and ``others`` that are not in ``.grad`` yet, also those of reductions in flight.

        ``keeps_held``: except for gradients that backwards hold for a later reduction.
        """
        reduced, self._reducing, self._reduced = [*self._reduced, self._reducing], None, []
        for unit in {*others, *self.units(), *(unit for unit in reduced if unit is not None)}:
            gradients = unit.handle.gradients
            if not (keeps_held and gradients.is_held):
                gradients.discard()
                gradients.arrivals.pending = 0
                self.remove(unit)
