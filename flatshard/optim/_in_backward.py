"""``step_in_backward``: steps each unit as soon as its gradients are reduced, and frees them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn
from torch.utils.hooks import RemovableHandle

from flatshard._base.errors import name_list
from flatshard._base.optimizers import params_of
from flatshard._composable.features.user_hooks import register_gradients_reduced_hook
from flatshard._composable.find import units_of_parameters
from flatshard._composable.state import Unit
from flatshard.optim._hooks import check_optimizer
from flatshard.optim._offload import OffloadedOptimizer

_stepped: weakref.WeakKeyDictionary[Unit, list[StepInBackwardHandle]] = (
    weakref.WeakKeyDictionary()
)  # by the units that they step


class StepInBackwardHandle:
    """The handle that :func:`step_in_backward` returns. After ``remove()`` gradients stay until ``optimizer.step()`` again.

    Example::

        optimizer = flatshard.optim.OffloadedOptimizer(model.parameters(), torch.optim.AdamW)
        steps = flatshard.optim.step_in_backward(model, optimizer)
        steps.remove()
    """

    def __init__(self, optimizer: OffloadedOptimizer, units: dict[Unit, list[nn.Parameter]]) -> None:
        self.optimizer, self._units = optimizer, list(units.values())
        self._names = [unit.fqn for unit in units]
        self._handles: list[RemovableHandle] = []
        for number, unit in enumerate(units):

            def reduced(_: nn.Module, number: int = number) -> None:
                self._step(number)

            self._handles.append(register_gradients_reduced_hook(unit.module, reduced))
            _stepped.setdefault(unit, []).append(self)

    def __repr__(self) -> str:
        return f"StepInBackwardHandle of {type(self.optimizer.inner).__name__} ({len(self._units)} units)"

    def remove(self) -> None:
        """Stop stepping in backward. Idempotent."""
        for handle in self._handles:
            handle.remove()
        for steps in _stepped.values():
            if self in steps:
                steps.remove(self)

    def _step(self, number: int) -> None:
        optimizer, params = self.optimizer, self._units[number]
        if any(p in optimizer.ahead for p in params):
            raise RuntimeError(
                f"step_in_backward: the gradients of unit {self._names[number] or '<root>'!r} were reduced twice before "
                f"{type(optimizer).__name__}.step(), so that it would be stepped twice, each time by a part of its gradient. "
                "Call optimizer.step() after each backward; run all but the last of several in flatshard.no_sync; make a "
                "module a unit if a checkpoint with use_reentrant=True is around it; and with several losses, or forwards "
                "that one backward reaches separately, do without step_in_backward"
            )
        # Mostly backward reaches units in the reverse of their order. Else this has copied in vain.
        optimizer.step_ahead(params, self._units[number - 1] if number else [])


def step_in_backward(module: nn.Module, optimizer: OffloadedOptimizer) -> StepInBackwardHandle:
    """Step each unit of ``module`` in backward as soon as its gradients are reduced, and free its gradients.

    So the gradients of all units never exist at once. ``optimizer.step()`` then steps parameters in no unit and ends the
    step: call it after each backward that reduces, and schedulers after it. Run all but the last of several microbatches in
    ``flatshard.no_sync``. While a unit is stepped, the state of the one before it in the module is copied to the device. The
    results are bit for bit those of ``optimizer.step()`` alone.

    Functions that need all gradients at once do not work: ``flatshard.clip_grad_norm_``, ``get_total_norm`` and
    ``GradScaler`` raise. ``torch.nn.utils.clip_grad_norm_`` finds no gradients, clips nothing and returns 0. Clip by value in
    a hook on parameters (``p.register_post_accumulate_grad_hook``), which runs before.

    Example::

        optimizer = flatshard.optim.OffloadedOptimizer(model.parameters(), torch.optim.AdamW)
        flatshard.optim.step_in_backward(model, optimizer)
        model(batch).square().mean().backward()
        optimizer.step()

    Args:
        module: a sharded module, of whose units ``optimizer`` steps all or some parameters. Parameters that are added to it
            later are stepped by ``optimizer.step()``.
        optimizer: an :class:`OffloadedOptimizer`.

    Returns:
        A handle with ``remove()``.

    Raises:
        TypeError: ``optimizer`` is of another class.
        ValueError: it steps no parameter of a unit of ``module``, or some are stepped in backward already.
        RuntimeError: it may not step shards, or not unit by unit.
    """
    if not isinstance(optimizer, OffloadedOptimizer):
        raise TypeError(
            f"step_in_backward takes a flatshard.optim.OffloadedOptimizer, got a {type(optimizer).__name__}: make it by "
            f"flatshard.optim.OffloadedOptimizer(model.parameters(), {type(optimizer).__name__}, ...). On CPU it moves "
            "nothing"
        )
    own = set(params_of(optimizer))
    units: dict[Unit, list[nn.Parameter]] = {}
    for unit in units_of_parameters(module):
        held: list[nn.Parameter | None] = [p for flat in unit.handle.flats for p in (flat.shard_param, *flat.params)]
        if params := [p for p in held if p is not None and p in own]:
            units[unit] = params
    if not units:
        raise ValueError(
            f"step_in_backward: the optimizer steps no parameter of a unit of this {type(module).__name__}: pass the sharded "
            "module that its parameters come from"
        )
    twice = [unit.fqn for unit in units for steps in _stepped.get(unit, ()) if steps.optimizer.is_for(units[unit])]
    if twice:
        raise ValueError(
            f"step_in_backward: units {name_list(twice, 3)} are stepped in backward already: remove() the first handle"
        )
    check_optimizer(optimizer)  # no hook sees a step in backward
    return StepInBackwardHandle(optimizer, units)


def check_kept(units: Iterable[Unit], verb: str) -> None:
    """Raise if the gradients of some ``units`` are freed in backward: ``verb`` needs all of them at once."""
    if gone := [unit.fqn for unit in units if _stepped.get(unit)]:
        raise RuntimeError(
            f"{verb}: the gradients of units {name_list(gone, 3)} are stepped and freed in backward, one unit after the "
            "other (step_in_backward), so there is no norm of all before a step. remove() its handle to clip, or clip by "
            "value in p.register_post_accumulate_grad_hook"
        )
