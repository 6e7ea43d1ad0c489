"""The optimizer of a plan: its state, and the memory of its step, by steps on the meta device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from flatshard._handle.tensors.sharded_parameter import full_shape
from flatshard.optim._offload import OffloadedOptimizer
from flatshard.optim._suitability import steps_empty_parts

OptimizerChoice = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer] | int | None
"""An optimizer on the model's parameters; a function or class that makes one of a list of parameters; the bytes of state per
element; or None: no state."""


class PlannedOptimizer(NamedTuple):
    """An optimizer on this rank's parts that has made a step, and what its state takes."""

    made: torch.optim.Optimizer | None  # None: there is none, or only its bytes are known
    nbytes: dict[nn.Parameter, int]  # of state for each part, including 0-dim tensors such as step counts

    def state_of(self, part: nn.Parameter) -> list[torch.Tensor]:
        """Return the tensors of its state, or none if only its bytes are known."""
        states = {} if self.made is None else self.made.state.get(part, {})
        return [value for value in states.values() if isinstance(value, torch.Tensor)]


def planned_optimizer(
    choice: OptimizerChoice,
    params: Mapping[nn.Parameter, nn.Parameter],
    device: str,
    on_host: Collection[nn.Parameter],
) -> PlannedOptimizer:
    """Make the optimizer, and have it step once, as on ``device``.

    Args:
        choice: the argument ``optimizer`` of ``plan_step``.
        params: from the parameters of the planned module to this rank's parts on the meta device, which have gradients.
        device: the type of device to train on.
        on_host: the parts that are offloaded.

    Raises:
        TypeError: ``choice`` has the wrong type.
        ValueError: the optimizer has parameters that are not the model's; or it looks at whole parameters, and ranks have
            parts; or it cannot step on the meta device.
    """
    parts = list(params.values())
    if isinstance(choice, int) and not isinstance(choice, bool):
        if choice < 0:
            raise ValueError(f"plan_step: optimizer={choice} bytes for each element")
        return PlannedOptimizer(None, {part: choice * part.numel() for part in parts})
    if choice is None or not parts:
        return PlannedOptimizer(None, {})
    optimizer = _made(choice, params)
    in_turns = isinstance(optimizer, OffloadedOptimizer)  # what is on one device is stepped together
    for options in optimizer.param_groups:
        are_here = in_turns or not any(part in on_host for part in options["params"])
        if device != "cpu" and are_here and options.get("foreach", 0) is None and not options.get("fused"):
            options["foreach"] = True  # torch's own choice if all are on a device, but not on meta
    try:
        optimizer.step()
    except Exception as e:
        raise ValueError(
            f"plan_step: the size of {type(optimizer).__name__}'s state is measured by a step on meta, which "
            f"failed ({type(e).__name__}: {e}). If it works with real parameters and gradients of these dtypes, pass the "
            "number of bytes of state per element: optimizer=8"
        ) from e
    planned = PlannedOptimizer(optimizer, {})
    planned.nbytes.update({part: sum(t.numel() * t.itemsize for t in planned.state_of(part)) for part in parts})
    return planned


def _made(choice: Any, params: Mapping[nn.Parameter, nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer on this rank's shards. If ``choice`` is an optimizer, the result has its class and options."""
    make, groups = choice, list(params.values())
    if isinstance(choice, torch.optim.Optimizer):
        kind: Any = type(choice.inner if isinstance(choice, OffloadedOptimizer) else choice)
        known = inspect.signature(kind.__init__).parameters
        make = functools.partial(kind, **{k: v for k, v in choice.defaults.items() if k in known})
        if isinstance(choice, OffloadedOptimizer):
            make = functools.partial(OffloadedOptimizer, optimizer_class=kind, **make.keywords)
        groups = _groups(choice, params)
    cut = [part for part in params.values() if part.shape != full_shape(part)]
    cure = (
        "For training, flatshard.optim.WholeParameterOptimizer keeps the state of each parameter on one rank. For the plan, "
        "pass the average number of bytes of state per element: optimizer=8"
    )
    try:
        made = make(groups) if callable(make) else None
    except ValueError as e:
        if not cut:
            raise
        kind = getattr(make, "func", make)
        name = getattr(kind, "__name__", type(kind).__name__)
        raise ValueError(f"plan_step: {name} takes no parts of parameters ({e}). {cure}") from e
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "plan_step: optimizer must be an optimizer on the model's parameters, a class or function that makes one of a "
            f"list of parameters, a number of bytes per element, or None, got {choice!r}"
        )
    stepping: Any = made.inner if isinstance(made, OffloadedOptimizer) else made
    steps_empty = steps_empty_parts(stepping)
    if steps_empty is not None and any(part.numel() or not steps_empty for part in cut):
        raise ValueError(
            f"plan_step: {type(stepping).__name__} looks at whole parameters, and a rank has parts. {cure}"
        )
    return made


def _groups(given: torch.optim.Optimizer, params: Mapping[nn.Parameter, nn.Parameter]) -> list[Any]:
    """Return the param groups of ``given``, with this rank's parts."""
    groups = []
    for options in given.param_groups:
        if unknown := [tuple(p.shape) for p in options["params"] if p not in params and p.requires_grad]:
            raise ValueError(
                f"plan_step: the optimizer has a trainable parameter of shape {unknown[0]} that the plan does not shard: "
                "build it on the parameters of the planned module, without ignored ones"
            )
        parts = [params[p] for p in options["params"] if p in params]
        if parts:
            groups.append({k: v for k, v in options.items() if k != "param_names"} | {"params": parts})
    return groups
