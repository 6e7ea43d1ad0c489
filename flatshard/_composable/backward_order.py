"""Which units are gathered for backward, and in which order.

[Note: One order of gathers in backward]
Backward may reach a unit and the last unit inside it at the same node (if the outer one returned the inner one's output), or
one after the other, perhaps with a recomputation in between. This may depend on a rank's data, and a rank that skips a unit
cannot know. So the order is the same in all cases. A unit is gathered before the units inside it (``gather``). When it is
recomputed, the inner unit that backward needs first comes before the one that ran first (``gather_last_inside``).
"""

from __future__ import annotations

from collections.abc import Iterable

from flatshard._composable.backward import current_graph_task
from flatshard._composable.state import Step, Unit
from flatshard._config import BackwardPrefetch


def is_finished(unit: Unit) -> bool:
    """Whether ``unit`` has all its gradients from the running graph task."""
    return unit.record is not None and unit.record.finished_in == current_graph_task()


def gather(unit: Unit) -> None:
    """Gather a unit that backward has reached or will reach, unless the unit is finished."""
    if unit.handle.is_sharded and not is_finished(unit):
        for needed in unit.needs:
            unit.context.backward.touch(needed)
            unit.context.make_room(needed)
            needed.handle.unshard(unit.context.pass_id, again=True)


def gather_last_inside(step: Step) -> None:
    """Called when a unit that backward reached by ``step`` is about to be recomputed."""
    last = step
    while last.previous is not None and last.unit in last.previous.outer:
        last = last.previous
        gather(last.unit)
    if last is not step and prefetches(last.unit):
        for unit in _next(last):
            gather(unit)


def prefetches(unit: Unit) -> bool:
    """Whether the next unit is gathered before this unit's backward computes."""
    when = unit.config.backward_prefetch
    return when is BackwardPrefetch.BACKWARD_PRE or (when is None and unit.backward_prefetch is not None)


def prefetch_before(step: Step) -> None:
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
