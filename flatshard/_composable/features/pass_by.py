"""Takes part in a unit's collectives without running the unit: the mechanism of ``skip``.

[Note: Taking part without running]
A rank that skips a unit must gather and reduce it at the same points as the other ranks. So ``pass_by`` runs the unit's hooks
without a forward in between: they gather, prefetch, record the order, and free. The tensors that are passed through get a
node in autograd's graph (``_Mark``), as if they were the unit's outputs. When backward reaches that node, it gathers the
unit.

The graph holds an *anchor* in place of the unit's parameters: an empty leaf tensor. Autograd computes a gradient for the
anchor at the point where it would have computed those of the parameters. The unit waits for this gradient, too. When all
gradients have come, a unit that did not run on this rank is reduced as one whose parameters are unused: [Note: Negative zero
marks an unused parameter].
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from flatshard import _frames
from flatshard._composable.backward import Backward
from flatshard._composable.extensions import Extension, ForwardFeature
from flatshard._composable.hooks import UnitHooks
from flatshard._composable.state import Forward, Unit, current_graph_task

Tensors = tuple[torch.Tensor, ...]


_anchors: weakref.WeakKeyDictionary[Unit, torch.Tensor] = weakref.WeakKeyDictionary()


class PassBy(Extension):
    """Has units note what runs inside them, for ranks that pass by later."""

    def attach(self, unit: Unit, modules: list[nn.Module]) -> RanInside:
        return RanInside()


class RanInside(ForwardFeature):
    """For each module of one unit: the modules of units that ran inside its last forward without an error."""

    def __init__(self) -> None:
        self.modules: dict[nn.Module, list[nn.Module]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> RanInside:
        return RanInside()

    def after(self, forward: Forward, output: Any) -> None:
        if not forward.in_backward and (output is not None or sys.exc_info()[1] is None):
            order = forward.unit.context.order.current
            self.modules[forward.module] = [] if order[-1] is forward.module else _since(forward.module, order)


def _since(module: nn.Module, order: list[nn.Module]) -> list[nn.Module]:
    """The modules in ``order`` after the last occurrence of ``module``: if it has just run, those that ran inside it."""
    at = len(order)
    while at and order[at - 1] is not module:
        at -= 1
    return order[at:] if at else []


def pass_by(unit: Unit, module: nn.Module, tensors: Tensors, inside: Callable[[Tensors], Tensors]) -> Tensors:
    """Do in forward what ranks that run ``module`` do, and pass ``tensors`` through.

    Args:
        unit: the unit to skip.
        module: the unit's, or the one of its group.
        tensors: floating-point or complex.
        inside: skips the units inside, in the same way.

    Returns:
        ``tensors``, with a node in the graph through which backward reaches the unit.
    """
    hooks = UnitHooks.of(unit)
    marked: Tensors = ()
    try:
        hooks.pre_forward(module, (), {}, _frames.of_caller())
        if torch.is_grad_enabled():
            if not unit.is_done_with_gradients and not unit.handle.is_alias:
                watched = hooks.watch_inputs(tensors, {})
                tensors = tensors if watched is None else watched[0]
            tensors = marked = _mark(unit, inside(tensors))
        else:
            tensors = inside(tensors)
        if (ran := unit.feature(RanInside)) is not None and current_graph_task() == -1:
            ran.modules[module] = _since(module, unit.context.order.current)
    finally:
        if (forward := unit.context.exit_forward(module)) is not None:
            hooks.end_forward(forward, hooks.come_back(marked, forward), False)
        forward = None  # it holds this frame: a cycle, in which the tensors would live until the collector comes
    return tensors


def _mark(unit: Unit, tensors: Tensors) -> Tensors:
    anchors = [_anchor(needed) for needed in unit.needs if needed.handle.gradients.accumulators.nodes]
    if not anchors and not any([t.requires_grad for t in tensors]):
        return tensors
    return _add_node(len(anchors), *anchors, *tensors)


def _anchor(unit: Unit) -> torch.Tensor:
    anchor = _anchors.get(unit)
    if anchor is None:
        device = unit.handle.flats[0].kind.compute_device
        anchor = _anchors[unit] = torch.empty(0, device=device, requires_grad=True)
        unit.stand_ins.append(get_gradient_edge(anchor).node)
        anchor.register_post_accumulate_grad_hook(_make_anchor_hook(unit))  # type: ignore[no-untyped-call]
    return anchor


def _make_anchor_hook(unit: Unit) -> Callable[[torch.Tensor], None]:
    to_hooks = weakref.ref(UnitHooks.of(unit))

    def on_gradient(anchor: torch.Tensor) -> None:
        anchor.grad = None
        hooks = to_hooks()
        assert hooks is not None
        unit = hooks.unit
        record = Backward.of(unit).begin(unit)
        unit.handle.gradients.arrivals.pending -= 1
        if not unit.handle.gradients.arrivals.pending and record.task == current_graph_task():
            hooks.complete()

    return on_gradient


class _Mark(torch.autograd.Function):
    """The identity, as a node in autograd's graph through which backward reaches the anchors."""

    @staticmethod
    def forward(ctx: Any, anchors: int, *tensors: torch.Tensor) -> Tensors:
        ctx.none = [t.new_empty(0) for t in tensors[:anchors]]
        # A skipped unit must be recomputed under checkpointing, which happens when backward unpacks a saved tensor.
        ctx.save_for_backward(tensors[0].new_empty(0))
        return tensors[anchors:]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        return None, *ctx.none, *grads


_add_node: Callable[..., Tensors] = _Mark.apply
