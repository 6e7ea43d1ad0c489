"""Sharded parameters that a loss uses directly, outside of their unit's forward: ``loss + 0.1 * p.square().sum()``.

[Note: What bypasses the table]
Methods of a parameter, and functions of what they return, follow the table in ``operations.py``. A function of torch on the
parameter itself does not: ``F.mse_loss(p, q)`` takes the shard for all of it. To notice each call, the class would need a
``__torch_function__``, which reads of attributes and operations of optimizers look for. Switched off where autograd is, it
costs a step of AdamW 5 percent, and each read of ``.grad`` in ``zero_grad`` 1.5 microseconds; always on, 28 to 43 percent.
So backward notices it, which costs nothing. Operations of the table compute with another leaf over the same memory, whose
gradient is added to that of the parameter. Then a gradient that reaches the parameter's own node has bypassed the table, and
raises. Without a backward nothing notices: ``torch.sum(p)`` is this rank's number.

A parameter that each rank has in full is as a plain tensor to methods and functions. There the gradient that comes to its own
node is averaged over the ranks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from flatshard._handle.tensors.aggregate import plainly
from flatshard._handle.tensors.grad_dtype import hand_on

_view_as: Any = torch.Tensor.view_as
_WATCHED = "flatshard watches"
"""A note in the metadata of a node."""


def watch_all(params: Iterable[nn.Parameter]) -> list[Node]:
    """Check gradients that reach sharded ``params`` themselves, as long as the returned nodes are kept.

    All of them require grad.
    """
    nodes = []
    with torch.inference_mode(False), torch.enable_grad(), plainly():
        for param in params:
            # The plain method, not that of the table. `get_gradient_edge` calls the latter.
            node: Any = _view_as(param, param).grad_fn.next_functions[0][0]
            if _WATCHED not in (notes := node.metadata):
                notes[_WATCHED] = True
                node.register_prehook(functools.partial(_take, weakref.ref(param)))
            nodes.append(node)
    return nodes


def _take(of: weakref.ref[Any], grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the gradients that the parameter gets in place of ``grads``."""
    info: Any = of()._flatshard_info  # type: ignore[union-attr]  # the node keeps it
    if not info.is_full:
        raise RuntimeError(
            f"{info.describe()}, and a function of torch took this shard for the full parameter, so its gradient would be "
            "wrong. Methods are those of the full parameter: p.sum() for torch.sum(p), (p - q).square().mean() for "
            "F.mse_loss(p, q). Or compute it in the forward of its unit"
        )
    (grad,) = grads
    real = torch.view_as_real(grad) if grad.is_complex() else grad
    average = info.average(real.detach().double().flatten(), f"the gradient of {info.fqn!r}").view_as(real).to(real)
    return (torch.view_as_complex(average) if grad.is_complex() else average,)


def leaf_of(param: nn.Parameter) -> torch.Tensor:
    """Return a leaf over the memory of ``param``, for a graph."""
    leaf: Any = param.detach()
    hand_on(param, leaf)
    leaf.requires_grad_().register_post_accumulate_grad_hook(functools.partial(_add_grad, param))
    return leaf  # type: ignore[no-any-return]


def _add_grad(param: nn.Parameter, leaf: torch.Tensor) -> None:
    """Do what autograd does with the gradient of a leaf."""
    grad, leaf.grad = leaf.grad, None
    if not param.requires_grad:  # frozen since
        return
    if param.grad is None or grad is None:
        param.grad = grad
    elif torch.is_grad_enabled():  # it has a graph
        param.grad = param.grad + grad
    else:
        param.grad.add_(grad)
    for hook in tuple((param._post_accumulate_grad_hooks or {}).values()):
        hook(param)
