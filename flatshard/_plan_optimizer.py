"""Bytes of an optimizer's state, found by asking the optimizer: it takes one step on stand-ins on the meta device."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

OptimizerChoice = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer] | int | None
"""An optimizer on the model's parameters; what makes one of parameters (a class, a ``functools.partial``); bytes of state for
each element; None: no state."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank's optimizer gets of one trainable parameter."""

    param: nn.Parameter  # the user's, whole
    shape: tuple[int, ...]  # of this rank's part
    dtype: torch.dtype
    grad_dtype: torch.dtype

    def stand_in(self) -> nn.Parameter:
        result = nn.Parameter(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        if self.grad_dtype is not self.dtype:
            result.grad_dtype = self.grad_dtype
        result.grad = torch.empty(self.shape, dtype=self.grad_dtype, device="meta")
        return result


def state_nbytes(choice: OptimizerChoice, parts: Sequence[Part]) -> dict[nn.Parameter, int]:
    """Bytes of state for each of ``parts``. What the optimizer keeps in 0-dim tensors counts too.

    Raises:
        TypeError: ``choice`` is none of what it may be.
        ValueError: an optimizer holds parameters that are not the model's; or it cannot step on the meta device.
    """
    if isinstance(choice, int) and not isinstance(choice, bool):
        if choice < 0:
            raise ValueError(f"plan: optimizer={choice} bytes for each element")
        return {part.param: choice * math.prod(part.shape) for part in parts}
    if choice is None or not parts:
        return {}
    stand_ins = {part.param: part.stand_in() for part in parts}
    optimizer = _made(choice, stand_ins)
    try:
        optimizer.step()
    except Exception as e:
        raise ValueError(
            f"plan: the size of {type(optimizer).__name__}'s state is found by a step on the meta device, which failed "
            f"({type(e).__name__}: {e}). If it would not fail on true parameters and gradients of these dtypes, pass "
            "optimizer=the number of bytes of state for each element"
        ) from e
    result = {}
    for param, stand_in in stand_ins.items():
        state = optimizer.state.get(stand_in, {})
        result[param] = sum(t.numel() * t.itemsize for t in state.values() if isinstance(t, torch.Tensor))
    return result


def _made(choice: Any, stand_ins: dict[nn.Parameter, nn.Parameter]) -> torch.optim.Optimizer:
    if isinstance(choice, torch.optim.Optimizer):
        return _like(choice, stand_ins)
    made = choice(list(stand_ins.values())) if callable(choice) else None
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "plan: optimizer must be an optimizer on the model's parameters, a class or function that makes one of a list of "
            f"parameters, a number of bytes for each element, or None, got {choice!r}"
        )
    return made


def _like(given: torch.optim.Optimizer, stand_ins: dict[nn.Parameter, nn.Parameter]) -> torch.optim.Optimizer:
    """One of the class and options of ``given`` over stand-ins: ``given`` is not stepped."""
    groups = []
    for options in given.param_groups:
        if unknown := [tuple(p.shape) for p in options["params"] if p not in stand_ins and p.requires_grad]:
            raise ValueError(
                f"plan: the optimizer holds a trainable parameter of shape {unknown[0]} that is not among those the plan "
                "shards: build it on the parameters of the planned module, without ignored ones"
            )
        params = [stand_ins[p] for p in options["params"] if p in stand_ins]
        if params:
            groups.append({k: v for k, v in options.items() if k != "param_names"} | {"params": params})
    known = inspect.signature(type(given).__init__).parameters
    return type(given)(groups, **{k: v for k, v in given.defaults.items() if k in known})
