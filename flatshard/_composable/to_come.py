"""Is a unit over in the running backward, or is something of it still to come? Each question about it is a function here.

Some are about the running graph task, a run of autograd's engine; a reentrant checkpoint runs one inside another. The
README has them as a table: "Is a unit over, or still to come?".

The answers are local to this rank: its data decide what is in its graph. They decide when a unit completes. All ranks
complete the same units.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.autograd.graph import Node

from flatshard._composable.find import units_below
from flatshard._composable.state import AWAITING, COMPLETE, COMPLETE_EARLY, IDLE, TOUCHED, Unit, current_graph_task

will_run = (
    torch._C._will_engine_execute_node
)  # whether the running graph task will run a node. Private API: no other way

# -- is it over? -------------------------------------------------------------------------------------------------------


def is_over(unit: Unit) -> bool:
    """Return whether all awaited gradients of ``unit`` have come, and the graph task reaches no other forward of it."""
    status = unit.graph.status
    return (status is None or status.awaited is None or not status.awaited.pending) and not comes_again(unit)


def was_completed(unit: Unit) -> bool:
    """Return whether the graph task has completed ``unit``."""
    return (status := unit.graph.status) is not None and status.completed_in == current_graph_task()


def needs_no_gather(unit: Unit) -> bool:
    """Return whether the backward has completed ``unit``, all of whose parameters are trainable.

    The rest of the graph does not use its values, or the graph of this rank lacked some parameters: then their memory is lent
    to it. So no rank gathers the unit.
    """
    status = unit.graph.status
    return status is not None and status.completion is COMPLETE and unit.handle.gradients.accumulators.are_all


def has_all_gradients(unit: Unit) -> bool:
    """Return whether ``unit`` is complete, and no gradient of it is to come. Of an idle unit, other ranks may await some."""
    if (status := unit.graph.status) is None:
        return False
    return status.completion is COMPLETE or (status.completion is COMPLETE_EARLY and is_over(unit))


def was_left(unit: Unit) -> bool:
    """Return whether backward has left all forwards of ``unit`` that it has reached, and the first in its pass is one."""
    if (status := unit.graph.status) is None or status.open_forwards != 0:
        return False
    before = None if status.last_forward is None else status.last_forward.previous
    while before is not None and before.unit is not unit:
        before = before.previous
    return before is None


def needs_nothing_after_inputs(unit: Unit) -> bool:
    """Return whether a unit that backward has left through the inputs of a forward is to be freed. claims.py, [Note: Freeing]

    All ranks free a unit with trainable parameters once in a pass. They gather a frozen one again for each forward.
    """
    status, accumulators = unit.graph.status, unit.handle.gradients.accumulators
    if status is None:  # backward came by a tensor that flatshard has not seen, and may come again, to another forward
        return False
    if not accumulators.nodes:
        return status.open_forwards == 0
    return was_left(unit) and (not accumulators.are_all or is_over(unit))


# -- is it to come? ----------------------------------------------------------------------------------------------------


def comes_again(unit: Unit) -> bool:
    """Return whether the graph task will reach another forward of ``unit``, or of a unit that uses its tied parameters."""
    task = current_graph_task()
    for ref in [*unit.graph.ways]:
        way = ref()
        if way is None or way.record.reached_in == task:
            continue
        after = [node for node, _ in way.after if node is not None]
        if how_many_run(after) == len(after) and not _is_a_last_one(after, unit):
            return True
    return False


def _is_a_last_one(after: Collection[Node], unit: Unit) -> bool:
    """Return whether one of the nodes ``after`` a way accumulates a gradient of ``unit``, and all of them are leaves.

    An embedding's are. Graphs share leaves, so a leaf that runs does not tell which of the graphs runs. But it need not: the
    gradient of the leaf comes later.
    """
    leaves = (*unit.handle.gradients.accumulators.nodes, *unit.graph.stand_ins)
    return any(node in leaves for node in after) and not any(node.next_functions for node in after)


def count_gradients(unit: Unit) -> tuple[int, int]:
    """Return how many gradients of parameters, and of stand-ins, the graph task has, or had, for ``unit``."""
    stand_ins = unit.graph.stand_ins
    return how_many_run(unit.handle.gradients.accumulators.nodes), how_many_run(stand_ins) if stand_ins else 0


def has_gradients(unit: Unit) -> bool:
    """Return whether the graph task has, or had, gradients for ``unit``."""
    return any(count_gradients(unit))


def is_completed_by(unit: Unit, task: int) -> bool:
    """Return whether ``unit`` is awaited or idle, and the end of graph task ``task``, the first to reach it, completes it."""
    return (
        (status := unit.graph.status) is not None and (awaited := status.awaited) is not None and awaited.task == task
    )


def is_used_next(unit: Unit) -> bool:
    """Return whether backward uses the values of ``unit`` next. A recomputation of it ends.

    It does if the unit awaits gradients, is idle, or was completed early (a later forward of it may come).
    """
    return (status := unit.graph.status) is not None and status.completion in (AWAITING, IDLE, COMPLETE_EARLY)


def may_get_gradients(unit: Unit) -> bool:
    """Return whether the backward awaits gradients of ``unit``, has made it idle, or has gradients for it."""
    return ((status := unit.graph.status) is not None and status.completion in (AWAITING, IDLE)) or has_gradients(unit)


def may_get_more(unit: Unit) -> bool:
    """Return whether ``unit`` comes again, or lacks parameters while the backward has not reached all units inside it.

    A reentrant checkpoint may run these with the parameters that are missing.
    """
    status = unit.graph.status
    return comes_again(unit) or (
        status is not None and status.lacks_some and not all(map(_is_reached, units_below(unit.module)))
    )


# -- does another come first? ------------------------------------------------------------------------------------------


def another_may_come_first(unit: Unit) -> bool:
    """Return whether backward has yet to reach a unit with a later turn: inside ``unit``, or between two forwards of it."""
    if any(u.history.turn > unit.history.turn and not _is_reached(u) for u in units_below(unit.module)):
        return True
    record = None if unit.graph.status is None else unit.graph.status.last_forward
    while record is not None:
        if record.unit.history.turn > unit.history.turn and not _is_reached(record.unit):
            return True
        record = record.previous
    return False


def _is_reached(unit: Unit) -> bool:
    return (status := unit.graph.status) is not None and status.completion is not TOUCHED


# -- in autograd's graph -----------------------------------------------------------------------------------------------


def how_many_run(nodes: Collection[Any]) -> int:
    """Return how many of ``nodes`` the running graph task runs, or has run."""
    try:
        return sum(map(will_run, nodes))
    except RuntimeError:  # `torch.autograd.grad` takes the gradients of some nodes for itself
        return sum(map(_will_accumulate, nodes))


def _will_accumulate(node: Node) -> bool:
    try:
        return will_run(node)
    except RuntimeError as e:
        if "autograd.grad" in str(e):
            return False
        raise
