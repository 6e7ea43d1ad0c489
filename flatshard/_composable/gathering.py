"""Units are gathered, also ahead of their use: in a forward, in a backward, and what is freed if nothing has used it.

[Note: One order of gathers in backward]
Backward may reach a unit and the last unit inside it at the same node (if the outer one returned the inner one's output), or
one after the other, perhaps with a recomputation in between. This may depend on a rank's data, and a rank that skips a unit
cannot know. So the order is the same in all cases. A unit is gathered before the units inside it (``gather``). When it is
recomputed, the inner unit that backward needs first comes before the one that ran first (``gather_last_inside``).

[Note: Gathered before it changes]
A module may change parameters of units inside it, in its own forward: a momentum encoder (MoCo, BYOL) does. A unit that
was gathered ahead may have its shard read while such a write runs. The write cannot be made to wait: sharded parameters
are plain tensors to torch (an optimizer would pay for a ``__torch_function__`` in every operation), so nothing tells
when it is enqueued. And the current stream cannot wait for the read after each prefetch: collectives read the shard
until they end, so there would be no prefetch left. What the gather has read does no harm, as the version of the shards
has changed when the unit is used, and it is gathered again. From then on the unit is not gathered ahead in a forward any
more, so no read is in flight while it is written, and nothing is gathered twice. Versions are the same on all ranks, so
all do the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from flatshard._base.config import BackwardPrefetch
from flatshard._base.names import UNIT_KEY
from flatshard._composable.backward import enter_backward, touch
from flatshard._composable.claims import Reason
from flatshard._composable.module_tree import called_modules
from flatshard._composable.state import (
    Ahead,
    Context,
    ForwardRecord,
    Pass,
    Unit,
    current_graph_task,
    made_units,
)
from flatshard._composable.to_come import has_all_gradients, was_completed
from flatshard._handle.lifetime import UNSHARDING

_BACKWARD_PRE = BackwardPrefetch.BACKWARD_PRE  # for each step: see lifetime.py


# -- in forward --------------------------------------------------------------------------------------------------------


def prefetch_in_forward(unit: Unit, module: nn.Module, gathers: bool) -> None:
    """Note that ``module`` of ``unit`` runs. If it ``gathers``, gather the units that the user chose, or that followed."""
    context = unit.context
    latest = context.latest_pass
    before, at = latest.before, len(latest.order)
    latest.order.append(module)
    if not gathers:
        return
    targets = unit.forward_targets
    if targets is None:
        if at >= len(before) or before[at] is not module:  # the order has changed
            if module not in before:
                return
            at = before.index(module)
        if at + 1 >= len(before) or not unit.config.forward_prefetch:
            return
        following: Unit | None = before[at + 1].__dict__.get(UNIT_KEY)
        if following is None:
            return
        targets = (following,)
    for target in targets:
        prefetch(target, unit.config.prefetch_limit_bytes)


def has_run_in_part(latest: Pass, unit: Unit) -> bool:
    """Return whether some modules of ``unit`` have run and others have not. Counting starts anew when all have run."""
    modules = called_modules(unit.module)
    to_come = set(modules)
    for module in latest.order:
        to_come.discard(module)
        to_come = to_come or set(modules)
    return len(to_come) < len(modules)


def keep_for_next(unit: Unit) -> None:
    """Keep ``unit`` unsharded for another module of its group, as if it had been gathered ahead for it."""
    unit.context.ahead.kept[unit] = None


def stop_keeping(unit: Unit) -> None:
    """Take back ``keep_for_next``, as the next module has run."""
    unit.context.ahead.kept.pop(unit, None)


# -- ahead -------------------------------------------------------------------------------------------------------------


def prefetch(unit: Unit, limit: int | None, for_backward: bool = False) -> None:
    """Gather ``unit`` ahead, unless more than ``limit`` bytes would be ahead then. It is freed if it is not used.

    Args:
        unit: on the context whose forward or backward computes meanwhile.
        limit: None for no limit.
        for_backward: for a backward that needs the values of its forward.
    """
    context = unit.context
    if limit is not None and _bytes_with(context.ahead, unit) > limit:
        return
    for needed in unit.needs:
        handle, claims = needed.handle, needed.claims
        if claims and not for_backward and not claims.in_use and needed.is_outdated:
            needed.release(Reason.OUTDATED)
        if handle.stamp is not None or (handle.has_static_buffers and _stays_blocked(needed)):
            continue
        if claims and claims.show_copies:
            continue
        if not for_backward:
            if needed.history.changes_in_passes:
                continue
            handle.check_parameters()
        handle.unshard(context.latest_pass.id, for_backward)
        context.ahead.units[needed] = None


def _bytes_with(ahead: Ahead, unit: Unit) -> int:
    """Return the bytes of unsharded parameters that are not in use yet, including those of ``unit``."""
    unused = {*_unused(ahead), *(needed for needed in unit.needs if needed.handle.is_sharded)}
    return sum(u.handle.memory.nbytes for u in unused)


def _unused(ahead: Ahead) -> list[Unit]:
    """Return the units that are unsharded, and that nothing has waited for yet."""
    unused = [u for u in ahead.units if u.handle.state is UNSHARDING]
    return [*unused, *[u for u in ahead.kept if not u.handle.is_sharded]]


def free_unused(context: Context) -> None:
    """Free the units that were gathered ahead and are not in use, and forget all."""
    for unit in _unused(context.drop_ahead()):
        unit.release(Reason.NOT_USED)


def _stays_blocked(unit: Unit) -> bool:
    """Free units that only this rank still has, and return whether another unit is using the static buffer of ``unit``.

    The result is the same on all ranks.
    """
    memory = unit.handle.memory
    if memory.is_blocked:
        _free_complete()
    return memory.is_blocked


def _free_complete() -> None:
    """Free the units that are complete, and that stay only because the graph of this rank lacks some of their parameters.

    A rank whose graph has all has freed them. An idle unit stays: other ranks may await gradients of it.
    """
    for unit in made_units.values():
        if unit.handle.gradients.accumulators.are_all and has_all_gradients(unit):
            unit.release(Reason.ROOM_NEEDED)


def make_room(unit: Unit) -> None:
    """Free memory of other units that ``unit`` needs. unsharded.py, [Note: Static buffers]"""
    if not _stays_blocked(unit):
        return
    free_unused(unit.context)  # by now it is blocked on all ranks, so all free the same
    if not unit.history.live_forwards:
        unit.handle.memory.unblock()


# -- in backward -------------------------------------------------------------------------------------------------------


def gather(unit: Unit) -> None:
    """Gather a unit for the current backward, and the units that it needs."""
    context = unit.context
    for needed in unit.needs:
        if needed.graph.status is None:
            touch(enter_backward(unit), needed)
        if needed.handle.stamp is None:  # sharded
            needed.handle.unshard(context.latest_pass.id, for_backward=True)


def gather_ahead(unit: Unit) -> None:
    """Gather a unit that backward has reached or will reach, unless the running graph task has completed it."""
    if unit.handle.stamp is None and not was_completed(unit):
        gather(unit)


def gather_last_inside(record: ForwardRecord) -> None:
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


def prefetch_after_unit(unit: Unit) -> None:
    """Gather the next unit, as the backward of ``unit`` has computed."""
    if (status := unit.graph.status) is not None and status.last_forward is not None:
        prefetch_in_backward(status.last_forward)


def prefetch_in_backward(record: ForwardRecord) -> None:
    """Gather the unit that comes after that of ``record`` in backward, or the units that the user chose instead."""
    task = current_graph_task()
    for unit in _next(record):
        # `was_completed`, without a call: it runs for each unit.
        if (status := unit.graph.status) is None or status.completed_in != task:
            for needed in unit.needs:
                if needed.graph.status is None:
                    touch(enter_backward(unit), needed)
            prefetch(unit, record.unit.config.prefetch_limit_bytes, for_backward=not unit.context.forwards)


def _next(record: ForwardRecord) -> Iterable[Unit]:
    if record.unit.backward_targets is not None:
        return record.unit.backward_targets
    before = record.previous_other  # an earlier forward of the same unit needs no gather
    backward = record.unit.context.backward
    # Backward has reached `before` already if `record` is of an enclosing unit.
    if before is None or (backward is not None and before.reached_in >= backward.task):
        return ()
    return (before.unit,)
