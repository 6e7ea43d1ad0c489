"""The verbs of a `ReductionQueue`: units get their turns, are reduced in this order, and get ``.grad``.

[Note: Every rank reduces in the same order]
Collectives of one group match by order. But a unit may complete earlier on one rank than on another, if they took different
branches inside it. So units are reduced in one canonical order, the reverse of the order of their first forward since their
last reduction. A complete unit waits for the units that ran forward after it

- if they are in the graph: gradients of them may come;
- if they are inside it, or ran between two forwards of it in one pass, and backward has not reached them
  (``another_may_come_first``). The graph of this rank may have none of their parameters, and yet they will be reduced when
  backward reaches them: that of another rank may have some. Other units that ran after it were reached before, because
  autograd runs what was computed last first.

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
order. Only the results wait, for ``finish_deferred``, which the user's call makes. A backward that reaches such a unit makes
it first, and so ``.grad`` accumulates as ever. On an accelerator the end of a backward does not wait for the reduce stream
then.

[Note: Reductions and gathers]
A rank must not block on a reduction before it has issued an all-gather that other ranks wait for. So every rank completes a
unit before it gathers the unit after the next one, even if it used none of the unit's parameters.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable

from flatshard._composable.state import ReductionQueue, Unit
from flatshard._composable.to_come import another_may_come_first, may_get_gradients


def take_over(queue: ReductionQueue, other: ReductionQueue, units: Iterable[Unit]) -> None:
    """Move the units of ``other`` to ``queue``. ``units`` has all that have had a turn in it, and perhaps others."""
    for unit in units:
        unit.history.turn += queue.turns
    queue.open.update(other.open)
    queue.turns += other.turns
    queue.drops += other.drops


# -- turns -------------------------------------------------------------------------------------------------------------


def expect(queue: ReductionQueue, unit: Unit) -> None:
    """Add ``unit`` in its forward: a backward may reach it."""
    if (ref := weakref.ref(unit)) not in queue.open:
        queue.open[ref] = False
        unit.history.turn = queue.turns = queue.turns + 1


def add_back(queue: ReductionQueue, unit: Unit) -> None:
    """Add ``unit`` when backward reaches it. It keeps its turn if no forward since its last reduction has added it."""
    if queue.reducing is unit:  # this backward has reduced it before
        _finish_reduction(queue)
    if unit in queue.deferred:  # all at once, so that ranks have one order
        finish_deferred(queue)
    if (ref := weakref.ref(unit)) not in queue.open:
        turns = {r: u.history.turn for r in queue.open if (u := r()) is not None} | {ref: unit.history.turn}
        queue.open[ref] = True
        queue.open = OrderedDict((r, queue.open[r]) for r in sorted(turns, key=turns.__getitem__))


def remove(queue: ReductionQueue, unit: Unit) -> None:
    """Remove ``unit``: it is not to be reduced."""
    queue.open.pop(weakref.ref(unit), None)


# -- reductions --------------------------------------------------------------------------------------------------------


def reduce_in_turn(queue: ReductionQueue, ready: set[Unit], waits: bool = True) -> None:
    """Reduce the units of ``ready`` whose turn it is, and take them out of it.

    ``waits``: in a backward, wait for the turns of units that may still come. Else only those of ``ready`` have turns.
    """
    if not ready:
        return
    allowed: list[Unit] = []
    passed_over = False
    for ref, is_back in reversed(queue.open.items()):
        if (unit := ref()) is None:
            continue
        if unit in ready:
            if waits and (is_back or passed_over) and another_may_come_first(unit):
                break
            allowed.append(unit)
            if len(allowed) == len(ready):
                break
        elif waits and may_get_gradients(unit):
            break
        else:
            passed_over = True
    for unit in allowed:
        _start_reduction(queue, unit)
        ready.remove(unit)
        in_part = unit.handle.has_replicas and not unit.handle.ranks.averaging.reduces_replicas
        if not in_part:
            del queue.open[weakref.ref(unit)]


def _start_reduction(queue: ReductionQueue, unit: Unit) -> None:
    if queue.reducing is not None:
        _finish_reduction(queue)
    unit.handle.gradients.reduce()
    queue.reducing = unit


def _finish_reduction(queue: ReductionQueue) -> None:
    """End the reduction in flight. Under CPU offload the host waits only at the end of backward, for all together."""
    unit, queue.reducing = queue.reducing, None
    if unit is None:
        return
    gradients = unit.handle.gradients
    if gradients.defers:
        gradients.free_inputs()
        _defer(queue, unit)
    elif queue.runtime.host is not None and gradients.sets_grads_late:
        queue.reduced.append(unit)
        gradients.free_inputs()
    else:
        gradients.finish()


def _defer(queue: ReductionQueue, unit: Unit) -> None:
    unit.handle.gradients.defer()
    queue.deferred[unit] = None


def _leave_in_flight(queue: ReductionQueue) -> None:
    """Defer the reduction in flight. Its input keeps its memory, and nothing waits for it before ``finish_deferred``."""
    unit, queue.reducing = queue.reducing, None
    if unit is not None:
        _defer(queue, unit)
        queue.runtime.join_reductions_later()


def finish_previous(queue: ReductionQueue) -> None:
    """End the previous reduction, as some of a unit's gradients have come. [Note: Reductions in flight]"""
    if queue.reducing is not None and queue.reducing.handle.has_replicas:
        queue.reducing.handle.gradients.advance()
    else:
        _finish_reduction(queue)


def reduce_and_finish(queue: ReductionQueue, ready: set[Unit]) -> None:
    """Reduce all units of ``ready``, and wait for all reductions that are not deferred."""
    try:
        reduce_in_turn(queue, ready, waits=False)
        queue.open = OrderedDict((ref, True) for ref in queue.open if ref() is not None)
        if queue.reducing is not None and queue.reducing.handle.gradients.defers:
            _leave_in_flight(queue)
        _finish_reduction(queue)
        while queue.reduced:  # from the last: its copy to the host ends after the others
            queue.reduced.pop().handle.gradients.finish()
    except BaseException:  # may come from a user's hook
        discard(queue)
        raise


def reduce_held(queue: ReductionQueue, units: Collection[Unit], one_by_one: bool = True) -> None:
    """Reduce the gradients that earlier backwards hold for ``units``, outside of a backward.

    ``one_by_one``: wait for each, so that one input at a time is freed. Otherwise start all, and defer them.
    """
    held = [u for u in queue.units() if u in units and u.handle.gradients.wants_reduction]
    for unit in held:
        unit.handle.gradients.stream.wait_for_current(queue.runtime)
    if one_by_one:
        reduce_and_finish(queue, set(held))
    else:
        try:
            for unit in held:
                reduce_in_turn(queue, {unit}, waits=False)
                _leave_in_flight(queue)
        except BaseException:
            discard(queue)
            raise
    queue.runtime.join()


def finish_deferred(queue: ReductionQueue, units: Collection[Unit] | None = None) -> None:
    """Wait for deferred reductions of ``units``, by default of all, and set ``.grad``."""
    given = [unit for unit in queue.deferred if units is None or unit in units]
    try:
        for unit in given:
            unit.handle.gradients.stream.wait_for_current(queue.runtime)
            unit.handle.gradients.finish()
            queue.deferred.pop(unit, None)
    except BaseException:  # may come from a user's hook
        discard(queue)
        raise
    if given:
        queue.runtime.join_reductions()


def discard(queue: ReductionQueue, others: Iterable[Unit] = (), keeps_held: bool = False) -> None:
    """Drop all gradients of its units and ``others`` that are not in ``.grad`` yet, also those of reductions in flight.

    ``keeps_held``: except for gradients of earlier backwards, held for a later reduction, or deferred.
    """
    reduced, queue.reducing, queue.reduced = [*queue.reduced, queue.reducing], None, []
    if queue.deferred and not keeps_held:
        reduced += queue.deferred
        queue.deferred = {}
        queue.drops += 1
    # First what is in flight, in one order on all ranks: what waits for it may issue its second part.
    for unit in dict.fromkeys(unit for unit in [*reduced, *others, *queue.units()] if unit is not None):
        gradients = unit.handle.gradients
        if not (keeps_held and (gradients.is_unreduced or gradients.is_deferred)):
            gradients.discard()
            remove(queue, unit)
    for ref in [ref for ref in queue.open if ref() is None]:
        del queue.open[ref]
