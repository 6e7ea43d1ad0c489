"""Forwards inside the transforms of ``torch.func`` (``grad``, ``vmap``, ``jvp``, ``hessian``), and compiled modules.

[Note: Inside a transform]
Inside a transform tensors are wrapped, and a function may not write into memory that it did not allocate. So a unit can
neither all-gather there, nor register hooks on autograd's graph. If its parameters are unsharded already, by
``summon_full_params``, nothing has to be gathered, and the forward runs without flatshard's hooks. Otherwise it raises.

[Note: Compiled modules]
Makes ``torch.compile`` compile the user's modules, but not flatshard.
Dynamo would trace into flatshard's hooks. There is nothing to compile in them, and much that it cannot trace: process groups,
storages that are resized, autograd's engine. So it is told to skip the package. It then breaks its graph at a unit's hooks
and calls them. It must not compile what they call either, such as collectives that the user implements, so it is told not to
look below the hooks. This needs no wrapper around the hooks, so it costs nothing without ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flatshard._base import frames
from flatshard._composable.extensions import Extension, ForwardFeature
from flatshard._composable.hooks import UnitHooks
from flatshard._composable.outputs import tensors_in
from flatshard._composable.state import Unit

# Private API: there is no public one for this.
_innermost: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_unwrapped: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.get_unwrapped

_CURE = (
    "`with torch.no_grad(), flatshard.summon_full_params(module): torch.func.grad(...)(...)`. A derivative along a direction "
    "that is to train (jvp) needs no transform: `with torch.autograd.forward_ad.dual_level(): "
    "forward_ad.unpack_dual(module(forward_ad.make_dual(x, direction))).tangent`"
)


class Transforms(Extension):
    """Attaches a :class:`Transformed` to every unit."""

    def attach(self, unit: Unit, modules: list[nn.Module]) -> Transformed:
        return Transformed(unit)


class Transformed(ForwardFeature):
    """Runs forwards of one unit without hooks if they are inside a transform. [Note: Inside a transform]"""

    wants_instead = staticmethod(_innermost)

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def instead(self) -> Callable[[Any], object] | None:
        """Return a check of the output of a forward inside a transform, where hooks do nothing.

        Raises:
            RuntimeError: the unit would have to gather its parameters.
        """
        if sharded := [u.fqn or "<root>" for u in self.unit.needs if not (u.claims.in_use or u.handle.never_gathers)]:
            raise RuntimeError(
                f"unit {sharded[0]!r} cannot gather its parameters inside a transform of torch.func (grad, vmap, jvp, ...). "
                f"Gather them around it: {_CURE}. For derivatives with respect to inputs, torch.autograd.grad works as well"
            )
        return self._check_graph

    def _check_graph(self, output: Any) -> None:
        """Raise if a forward without hooks recorded a graph for a backward outside of the transform."""
        for tensor in tensors_in(output):
            inside = tensor
            while _is_wrapped(inside):
                inside = _unwrapped(inside)
            if inside.requires_grad:
                raise RuntimeError(
                    f"unit {self.unit.fqn or '<root>'!r} ran inside a transform of torch.func while autograd was recording "
                    f"for a backward outside of it, which could not gather the parameters again: {_CURE}"
                )


_REASON = (
    "flatshard gathers a unit around its forward, which no graph can contain. With fullgraph=True compile units one by "
    "one: `for block in model.blocks: block.compile(fullgraph=True)`. Or omit fullgraph: graphs then end at units"
)


class Compile(Extension):
    """Makes dynamo skip this package."""

    def set_up(self) -> None:
        # This import takes two seconds, but any optimizer does it as well.
        from torch._dynamo import trace_rules  # there is no public way to skip a package

        trace_rules.add("flatshard")

        # Private too: the public torch.compiler.disable wraps the function, which costs time in every call.
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        for hook in (UnitHooks.pre_forward, UnitHooks.post_forward):
            # The attributes that torch.compiler.disable(reason=...) sets: dynamo shows the reason with fullgraph=True.
            vars(hook)["_torchdynamo_disable"] = True
            vars(hook)["_torchdynamo_disable_msg"] = _REASON
            set_code_exec_strategy(frames.code_of(hook), _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
