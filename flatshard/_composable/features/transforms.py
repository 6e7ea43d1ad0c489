"""Forwards inside the transforms of ``torch.func`` (``grad``, ``vmap``, ``jvp``, ``hessian``), and forward-mode derivatives.

[Note: Inside a transform]
Inside a transform tensors are wrapped, and a function may not write into memory that it did not allocate. So a unit can
neither all-gather there, nor register hooks on autograd's graph. If its parameters are unsharded already, by
``summon_full_params``, nothing has to be gathered, and the forward runs without flatshard's hooks. Otherwise it raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from flatshard._composable.extensions import Extension, ForwardFeature
from flatshard._composable.outputs import tensors_in
from flatshard._composable.state import Unit

# Private API: there is no public one for this.
_innermost: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_unwrapped: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.get_unwrapped

_CURE = "`with torch.no_grad(), flatshard.summon_full_params(module): torch.func.grad(...)(...)`"


class Transforms(Extension):
    """Attaches a :class:`Transformed` to every unit."""

    def attach(self, unit: Unit, modules: list[nn.Module]) -> Transformed:
        return Transformed(unit)


class Transformed(ForwardFeature):
    """Runs forwards of one unit without hooks if they are inside a transform. [Note: Inside a transform]"""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def instead(self) -> Callable[[Any], object] | None:
        """Inside a transform the forward runs without hooks.

        Raises:
            RuntimeError: it does, and the unit would have to gather its parameters.
        """
        if _innermost() is None:
            return None
        if sharded := [u.fqn or "<root>" for u in self.unit.needs if not (u.claims.use or u.handle.is_alias)]:
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

    def leaving(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tangents of ``outputs`` in forward-mode autograd: they have graphs of their own."""
        if forward_ad._current_level < 0:
            return []
        found = [forward_ad.unpack_dual(t).tangent for t in outputs]  # type: ignore[no-untyped-call]
        return [t for t in found if t is not None]
