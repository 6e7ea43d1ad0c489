"""What to gather for backward, and in which order.

[Note: One order of gathers in backward]
Backward comes to a unit and to the last one inside it at one node, where the one returned what the other did, else one
after the other, and perhaps with a recomputation in between. Which it is may depend on the data of a rank, and a rank that
passes by a unit cannot see it. So all cases have one order: a unit is gathered before those inside it (``gather``), and
when it is recomputed, the one inside it that backward needs first before the one that ran first (``gather_last_inside``).
"""

from __future__ import annotations

from collections.abc import Iterable

from flatshard._composable.backward import current_graph_task
from flatshard._composable.state import Step, Unit
from flatshard._config import BackwardPrefetch


def is_finished(unit: Unit) -> bool:
    """Whether the graph task that runs now has brought ``unit`` all its gradients."""
    return unit.record is not None and unit.record.finished_in == current_graph_task()


def gather(unit: Unit) -> None:
    """Gather what backward will come to, or has come to, unless it is done with it."""
    if unit.handle.is_sharded and not is_finished(unit):
        for needed in unit.needs:
            unit.context.backward.touch(needed)
            unit.context.make_room(needed)
            needed.handle.unshard(again=True)


def gather_last_inside(step: Step) -> None:
    """Backward has come to a unit by ``step``, and the unit is about to be recomputed."""
    last = step
    while last.previous is not None and last.unit in last.previous.outer:
        last = last.previous
        gather(last.unit)
    if last is not step and prefetches(last.unit):
        for unit in _next(last):
            gather(unit)


def prefetches(unit: Unit) -> bool:
    """Whether the next unit is gathered before this one's backward computes."""
    when = unit.config.backward_prefetch
    return when is BackwardPrefetch.BACKWARD_PRE or (when is None and unit.backward_prefetch is not None)


def prefetch_before(step: Step) -> None:
    """Gather what comes after this step in backward, or what the user chose to be gathered meanwhile."""
    for unit in _next(step):
        if not is_finished(unit):
            for needed in unit.needs:
                unit.context.backward.touch(needed)
            unit.context.prefetch(unit, step.unit.config.prefetch_limit_bytes)


def _next(step: Step) -> Iterable[Unit]:
    if step.unit.backward_prefetch is not None:
        return step.unit.backward_prefetch
    before = step.previous
    if before is None or step.unit.context.backward.has_come_to(before):  # as where ``step`` is of a unit around it
        return ()
    return (before.unit,)
