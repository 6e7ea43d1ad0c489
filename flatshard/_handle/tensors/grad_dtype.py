"""The dtype of a parameter's gradient, which the user chooses by torch's own attribute ``p.grad_dtype``.

[Note: The dtype of a gradient]
``p.grad_dtype`` of the user's parameter is the only place that says which dtype its ``.grad`` has. The user sets it, before
``fully_shard`` or later. ``keep_low_precision_grads`` sets it to the reduce dtype, where the user has chosen none. torch's
default is the parameter's own dtype; anything else is a *choice*. ``FlatGradients`` follows it:

- The unsharded parameter has the same choice. So autograd adds up the gradients of several uses in that dtype, as it does in
  one process. Without a choice gradients arrive in the compute dtype.
- Without a reduce dtype in the policy, gradients are reduced in the dtype that they arrive in. Those of several dtypes in a
  flat parameter are reduced in the promoted dtype.
- The parameter's part of the result is cast to it.

A choice of None means any dtype. Such a gradient is reduced like one without a choice, and ``.grad`` keeps the reduce dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

plain_grad_dtype: Any = torch.Tensor.grad_dtype
"""The attribute of a plain parameter: a descriptor in C."""


def has_chosen(param: nn.Parameter) -> bool:
    """Return whether the dtype of ``param``'s gradient is another than that of ``param``."""
    return param.grad_dtype is not param.dtype


def choose(param: nn.Parameter, dtype: torch.dtype | None) -> None:
    """Set ``param.grad_dtype``, and cast a gradient that ``param`` has."""
    grad, param.grad = param.grad, None
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad if dtype is None else grad.to(dtype)


def hand_on(old: nn.Parameter, new: nn.Parameter) -> None:
    """Give ``new``, which takes the place of ``old``, the choice of ``old``."""
    if has_chosen(old):
        choose(new, old.grad_dtype)


def promoted(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype that holds numbers of all ``dtypes``."""
    return functools.reduce(torch.promote_types, set(dtypes))
