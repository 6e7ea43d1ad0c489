"""Forwards inside the transforms of ``torch.func`` (``grad``, ``vmap``, ``jvp``, ``hessian``), and forward-mode derivatives.

[Note: Inside a transform]
There the tensors are wrapped, and a function may not write into memory that it did not make: neither an all-gather nor our
hooks on autograd's graph have a meaning. Where the parameters are whole already, in ``summon_full_params``, nothing needs to
be done, and the module is like any other. Elsewhere a unit's forward raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.autograd import forward_ad

from flatshard._composable.state import Unit

# Private API: there is no public way to ask.
_innermost: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_unwrapped: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.get_unwrapped

_CURE = "`with torch.no_grad(), flatshard.summon_full_params(module): torch.func.grad(...)(...)`"


def in_transform() -> bool:
    """Whether a transform of ``torch.func`` is under way."""
    return _innermost() is not None


def check_whole(unit: Unit) -> None:
    """Raise if ``unit`` would have to gather inside a transform."""
    if sharded := [u.fqn or "<root>" for u in unit.needs if not (u.users or u.handle.is_alias)]:
        raise RuntimeError(
            f"unit {sharded[0]!r} cannot gather its parameters inside a transform of torch.func (grad, vmap, jvp, ...). Have "
            f"them whole around it: {_CURE}. Derivatives with respect to inputs are also had by torch.autograd.grad"
        )


def check_no_graph(unit: Unit, tensors: Iterable[torch.Tensor]) -> None:
    """Raise if a forward inside a transform also recorded a graph outside of it: its backward would miss our hooks."""
    for tensor in tensors:
        while _is_wrapped(tensor):
            tensor = _unwrapped(tensor)
        if tensor.requires_grad:
            raise RuntimeError(
                f"unit {unit.fqn or '<root>'!r} ran inside a transform of torch.func while autograd was recording for a "
                f"backward outside of it, which could not gather the parameters again: {_CURE}"
            )


def tangents_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tangents that forward-mode autograd carries along with ``tensors``: they have graphs of their own."""
    found = [forward_ad.unpack_dual(t).tangent for t in tensors]  # type: ignore[no-untyped-call]
    return [t for t in found if t is not None]
