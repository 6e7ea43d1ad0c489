"""``skip``: for a rank that does not need a unit which others run (experts, towers of a multimodal model, uneven data)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flatshard._composable.features.pass_by import RanInside, Tensors, pass_by
from flatshard._composable.state import Unit, units_below


def skip(module: nn.Module, *tensors: torch.Tensor) -> Any:
    """Take part in the collectives of ``module``'s units without running it: in place of ``module(x)`` on other ranks.

    All ranks must run the same units in the same order, or wait for each other. Where data decide, a rank calls this for
    the units that it does not need. It gathers and frees them as the others do, in forward and in backward, and adds
    nothing to their gradients: as the average is over all ranks, they are those of one process in which only the other
    ranks' slices of the batch used the unit. If no rank uses it, its parameters get no gradient (``.grad is None``).

    Example::

        for i, expert in enumerate(self.experts):        # each a unit
            chosen = (route == i).nonzero().squeeze(1)
            if len(chosen):
                x = x.index_add(0, chosen, expert(x[chosen]))
            else:
                x = flatshard.skip(expert, x)

    Backward comes to the unit through what this returns, so use it in what the loss depends on. Under ``torch.no_grad()``
    it only gathers and frees. A rank that has run out of data skips the whole model: ``flatshard.skip(model,
    torch.zeros(())).backward()`` in a training step, ``flatshard.skip(model)`` in evaluation and generation.

    Units inside are joined in the order in which they ran in the last forward of the unit around them on this rank; in
    module order if there was none. Where other ranks run them in another order, skip them one by one, in that order. So too
    where other ranks run several of them in one activation checkpoint, with the calls in a checkpoint of the same kind: it
    gathers them in another order in backward. A unit with a reentrant checkpoint inside may not run in one forward and be
    skipped in another of the same backward: use ``use_reentrant=False``. The module's own forward hooks do not run, and its
    buffers don't change.

    Args:
        module: a unit, or a module with units inside, which then are skipped one after the other.
        tensors: what passes by, of any shape and device. At least one must be floating-point or complex if there is to be
            a backward. With gradients enabled and something trainable in ``module``, what is returned requires grad, as
            the output of ``module`` does.

    Returns:
        ``tensors`` as they are: one tensor if one was given, else a tuple. They are views; clone before changing them in
        place.

    Raises:
        ValueError: nothing in ``module`` is sharded; or backward could not come by, as there is no tensor for it.
        TypeError: ``tensors`` are not tensors.
    """
    for value in tensors:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"skip: what passes by must be tensors, got a {type(value).__name__}")
    units = units_below(module)
    if not units:
        raise ValueError(f"skip: nothing in this {type(module).__name__} is sharded; call fully_shard first")
    differentiable = tuple(t for t in tensors if t.is_floating_point() or t.is_complex())
    if torch.is_grad_enabled() and not differentiable and any(u.handle.any_trainable for u in units):
        raise ValueError(
            f"skip: backward must come by unit {units[0].fqn or '<root>'!r}, so pass a floating-point tensor that the loss "
            "depends on, x = flatshard.skip(module, x); or call it under torch.no_grad() if no rank will run backward"
        )
    marked = iter(_Inside(units)(differentiable))
    result = tuple(next(marked) if t.is_floating_point() or t.is_complex() else t for t in tensors)
    return result[0] if len(result) == 1 else result


class _Inside:
    """Passes by units in the given order, each with those that are inside it. A unit may be there more than once."""

    def __init__(self, order: list[Unit]) -> None:
        self._order = order
        self._at = 0

    def __call__(self, tensors: Tensors) -> Tensors:
        while self._at < len(self._order):
            tensors = self._pass_by_next(tensors)
        return tensors

    def _pass_by_next(self, tensors: Tensors) -> Tensors:
        unit = self._order[self._at]
        self._at += 1
        below = set(units_below(unit.module))
        inside: list[Unit] = []
        while self._at < len(self._order) and self._order[self._at] in below:
            inside.append(self._order[self._at])
            self._at += 1
        ran = unit.feature(RanInside)
        return pass_by(unit, tensors, _Inside(inside if ran is None or ran.units is None else ran.units))
