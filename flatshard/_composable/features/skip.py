"""``skip``: for a rank that does not need a unit which other ranks run (experts, multimodal towers, uneven data)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flatshard._composable.features.pass_by import RanInside, Tensors, pass_by
from flatshard._composable.find import unit_for, units_below, units_of
from flatshard._composable.state import unit_of


def skip(module: nn.Module, *tensors: torch.Tensor) -> Any:
    """Take part in the collectives of ``module``'s units without running it, while other ranks call ``module(x)``.

    All ranks must run the same units in the same order; else they wait for each other. If the data decide which units run, a
    rank calls ``skip`` for each unit that it does not need. The rank then gathers and frees the unit as the other ranks do,
    in forward and in backward, and adds nothing to its gradients. Gradients are averaged over all ranks, so they are those of
    one process in which only the other ranks' slices of the batch used the unit. If no rank uses the unit, its parameters
    get no gradient (``.grad is None``).

    Example::

        x, route = batch, torch.randint(4, (len(batch),))
        for i, expert in enumerate(model[:4]):  # each a unit
            chosen = (route == i).nonzero().squeeze(1)
            if len(chosen):
                x = x.index_add(0, chosen, expert(x[chosen]))
            else:
                x = flatshard.skip(expert, x)
        x.sum().backward()

    Backward reaches the unit through the returned tensors, so the loss must depend on them. Under ``torch.no_grad()`` the
    unit is only gathered and freed. A rank that has run out of data skips the whole model: ``flatshard.skip(model,
    torch.zeros(())).backward()`` in a training step, ``flatshard.skip(model)`` in evaluation and generation.

    The module's own forward hooks do not run, and its buffers do not change. Units inside ``module`` are skipped in the order
    in which they ran in this rank's last forward of the unit around them, or in module order if there was none. Skip them one
    by one instead

    - if the other ranks run them in another order: in that order;
    - if the other ranks run several of them in one activation checkpoint, which gathers them in another order in backward:
      inside a checkpoint of the same kind.

    A unit with a reentrant checkpoint inside cannot run in one forward and be skipped in another one of the same backward:
    use ``use_reentrant=False``.

    Args:
        module: a unit, or a module that contains units, which are then skipped one after the other. For another module in
            the running forward of its unit nothing is to be done: the tensors come back as they are.
        tensors: tensors of any shape and device, which are passed through. For a backward at least one must be floating-point
            or complex. With gradients enabled and trainable parameters in ``module``, the returned tensors require grad, as
            the output of ``module`` does.

    Returns:
        ``tensors`` unchanged: one tensor if one was given, else a tuple. They are views; clone before changing them in place.

    Raises:
        ValueError: nothing in ``module`` is sharded; or no tensor was given through which backward could reach the unit.
        TypeError: ``tensors`` are not tensors.
    """
    for value in tensors:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"skip takes tensors after the module, got a {type(value).__name__}")
    modules = [m for m in module.modules() if unit_of(m) is not None]
    units = units_below(module)
    differentiable = tuple(t for t in tensors if t.is_floating_point() or t.is_complex())
    if not units and all(any(f.unit is owner for f in owner.context.forwards) for owner in units_of(module, "skip")):
        return (
            tensors[0] if len(tensors) == 1 else tensors
        )  # their forward takes part, and finds these parameters unused
    if not units:
        unit_for(module, "skip")  # raises: names the unit to skip
    if torch.is_grad_enabled() and not differentiable and any(u.handle.gradients.accumulators.nodes for u in units):
        raise ValueError(
            f"skip: backward must reach unit {units[0].fqn or '<root>'!r}, so pass a floating-point tensor that the loss "
            "depends on: x = flatshard.skip(module, x). If no rank will run backward, call it under torch.no_grad()"
        )
    marked = iter(_Inside(modules)(differentiable))
    result = tuple(next(marked) if t.is_floating_point() or t.is_complex() else t for t in tensors)
    return result[0] if len(result) == 1 else result


class _Inside:
    """Skips modules of units in the given order, each with those inside it. A module may occur more than once."""

    def __init__(self, order: list[nn.Module]) -> None:
        self._order = order
        self._at = 0

    def __call__(self, tensors: Tensors) -> Tensors:
        while self._at < len(self._order):
            tensors = self._pass_by_next(tensors)
        return tensors

    def _pass_by_next(self, tensors: Tensors) -> Tensors:
        module = self._order[self._at]
        self._at += 1
        below = set(module.modules())
        inside: list[nn.Module] = []
        while self._at < len(self._order) and self._order[self._at] in below:
            inside.append(self._order[self._at])
            self._at += 1
        unit = unit_of(module)
        assert unit is not None
        ran = unit.feature(RanInside)
        return pass_by(unit, module, tensors, _Inside(inside if ran is None else ran.modules.get(module, inside)))
