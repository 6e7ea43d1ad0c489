"""A rank takes part in a unit's collectives without running the unit.

[Note: Taking part without running]
Ranks that skip a unit must gather and reduce it as the others do, at the same points. So all that the unit's hooks do
around a forward is done here around nothing: gathering, prefetching, the record of the order, freeing. A tensor that goes
by is marked as the unit's output would be: backward comes to the unit where it comes to the mark, and gathers it.

In place of the unit's parameters the graph holds its *anchor*, an empty leaf. Autograd brings the anchor a gradient when
it would have brought the parameters theirs: after all forwards that passed by the unit, and none in a backward that is
after other gradients only. It counts as one more gradient to wait for. When all have come, a unit that ran nowhere on
this rank is reduced as one whose parameters are unused: [Note: Negative zero marks an unused parameter].
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from flatshard._composable.backward import current_graph_task
from flatshard._composable.hooks import UnitHooks
from flatshard._composable.state import Unit

Tensors = tuple[torch.Tensor, ...]


def pass_by(unit: Unit, tensors: Tensors, inside: Callable[[Tensors], Tensors]) -> Tensors:
    """Do what the others do in a forward of ``unit``. ``inside``: in the forwards that they run inside it.

    Returns ``tensors``, marked.
    """
    hooks = UnitHooks.of(unit)
    marked: Tensors = ()
    try:
        hooks.pre_forward(unit.module, (), {}, sys._getframe())
        if torch.is_grad_enabled():
            if not unit.is_done_with_gradients and not unit.handle.is_alias:
                watched = hooks.watch_inputs(tensors, {})
                tensors = tensors if watched is None else watched[0]
            tensors = marked = _mark(unit, inside(tensors))
        else:
            tensors = inside(tensors)
        if current_graph_task() == -1:
            unit.ran_inside = unit.context.ran_since(unit)
    finally:
        if (forward := unit.context.exit_forward(unit)) is not None:
            hooks.end_forward(forward, hooks.come_back(marked, forward), False)
    return tensors


def _mark(unit: Unit, tensors: Tensors) -> Tensors:
    anchors = [_anchor(needed) for needed in unit.needs if needed.handle.any_trainable]
    if not anchors and not any([t.requires_grad for t in tensors]):
        return tensors
    marked: Tensors = _Mark.apply(len(anchors), *anchors, *tensors)  # type: ignore[no-untyped-call]
    return marked


def _anchor(unit: Unit) -> torch.Tensor:
    if unit.anchor is None:
        device = unit.handle.flats[0].unsharded.flat.device
        unit.anchor = torch.empty(0, device=device, requires_grad=True)
        unit.anchor_node = get_gradient_edge(unit.anchor).node
        unit.anchor.register_post_accumulate_grad_hook(_make_anchor_hook(unit))  # type: ignore[no-untyped-call]
    return unit.anchor


def _make_anchor_hook(unit: Unit) -> Callable[[torch.Tensor], None]:
    to_hooks = weakref.ref(UnitHooks.of(unit))

    def on_gradient(anchor: torch.Tensor) -> None:
        anchor.grad = None
        hooks = to_hooks()
        assert hooks is not None
        unit, task = hooks.unit, current_graph_task()
        record = unit.record
        if record is None or task not in record.counted_tasks:
            record = unit.context.backward.begin(unit)
        unit.handle.arrivals.pending -= 1
        if not unit.handle.arrivals.pending and record.task == task:
            hooks.complete()

    return on_gradient


class _Mark(torch.autograd.Function):
    """The identity on what passes by a unit."""

    @staticmethod
    def forward(ctx: Any, anchors: int, *tensors: torch.Tensor) -> Tensors:
        ctx.none = [t.new_empty(0) for t in tensors[:anchors]]
        # As the unit would: checkpointing recomputes when saved tensors are asked for.
        ctx.save_for_backward(tensors[0].new_empty(0))
        return tensors[anchors:]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        return None, *ctx.none, *grads
