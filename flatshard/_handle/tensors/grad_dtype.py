"""The dtype of a parameter's gradient, which the user chooses by torch's own attribute ``p.grad_dtype``.


[Note: The dtype of a gradient]
``p.grad_dtype`` of the user's parameter is the only place that says which dtype its ``.grad`` has. The user sets it, before
``fully_shard`` or later. ``keep_low_precision_grads`` sets it to the reduce dtype, where the user has chosen none. torch's
default is the parameter's own dtype; anything else is a *choice*. ``GradDtypes`` follows it:

- The unsharded parameter has the same choice. So autograd adds up the gradients of several uses in that dtype, as it does in
  one process. Without a choice gradients arrive in the compute dtype.
- Without a reduce dtype in the policy, gradients are reduced in the dtype that they arrive in. Those of several dtypes in a
  flat parameter are reduced in the promoted dtype.
- The parameter's shard of the result is cast to it.

A choice of None means any dtype. Such a gradient is reduced like one without a choice, and ``.grad`` keeps the reduce dtype.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from flatshard._handle.layout import FlatOptions

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


@functools.cache
def exactly_sent_as(compute: torch.dtype, reduce: torch.dtype) -> torch.dtype:
    """Return the narrowest dtype that holds gradients exactly, computed in ``compute`` and reduced in ``reduce``."""
    wide = reduce in (torch.float32, torch.float64)
    narrow = compute in (torch.bfloat16, torch.float16, torch.float32) and compute.itemsize < reduce.itemsize
    return compute if wide and narrow else reduce


class GradDtypes:
    """The dtypes in which gradients arrive, are sent, reduced and stored. [Note: The dtype of a gradient]"""

    __slots__ = ("_arriving", "_computed", "choices", "of_all", "of_each", "reduce", "sent", "takes_any")

    def __init__(self, options: FlatOptions, own: torch.dtype, owners: Sequence[nn.Parameter], are_added: bool) -> None:
        """Choose them, by the choices of the user.

        Args:
            options: of the flat parameter.
            own: dtype of the flat parameter.
            owners: the user's parameters that get the gradients.
            are_added: some gradients may have been added up before they arrive, by a wrapping.
        """
        self._computed = computed = options.compute_dtype or own  # also if it was encoded
        unset = computed if options.reduce_as_computed else own
        if options.keep_low_precision_grads:
            for param in owners:
                if not has_chosen(param):
                    choose(param, options.reduce_dtype or unset)
        self.choices = choices = [param.grad_dtype for param in owners]
        others = [None if choice is own else choice for choice in choices]
        self.reduce = options.reduce_dtype or promoted([other or unset for other in others])  # of the sums
        self.takes_any = options.reduce_dtype is None and None in choices
        self._arriving = [computed if other is None else promoted((computed, other)) for other in others]
        # Gradients that arrive in any dtype, or were added up before, may not fit into a narrower one.
        known = None not in choices and not are_added
        self.sent = exactly_sent_as(promoted(self._arriving), self.reduce) if known else self.reduce
        self.of_each = [choice or self.reduce for choice in choices]  # each ``.grad``
        self.of_all = promoted(self.of_each)  # all of them together

    def apply_to(self, unsharded: Sequence[nn.Parameter]) -> None:
        """Set the dtype in which autograd adds up the gradient of each unsharded parameter."""
        # The parameter over a shard makes one choice for all of them.
        of_each = zip(unsharded, itertools.cycle(self.choices), itertools.cycle(self._arriving))
        for compute, choice, dtype in of_each:
            arrives = None if choice is None else compute.dtype if dtype is self._computed else dtype
            if compute.grad_dtype is not arrives:
                compute.grad_dtype = arrives
