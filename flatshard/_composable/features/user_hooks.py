"""Runs the user's hooks when gradients have been reduced: those of parameters, and those of units."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from flatshard._base.errors import name_list
from flatshard._composable.extensions import Extension, ForwardFeature
from flatshard._composable.find import unit_for, unwrapped
from flatshard._composable.state import Unit
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.registrations import SHARDED_PARAMS
from flatshard._handle.unit_gradients import WithGradients


class UserHooks(Extension):
    """Attaches a :class:`UserHooksOfUnit` to every unit."""

    def attach(self, unit: Unit, modules: list[nn.Module]) -> UserHooksOfUnit:
        return UserHooksOfUnit(unit)


class UserHooksOfUnit(ForwardFeature):
    """Runs the hooks of one unit and its parameters."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.callbacks: OrderedDict[int, Callable[[], object]] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> UserHooksOfUnit:
        """Return an object for the copied unit, without callbacks, as for hooks on a parameter."""
        return UserHooksOfUnit(copy.deepcopy(self.unit, memo))

    def reduced(self, given: WithGradients) -> None:
        """Run the post-accumulate-grad hooks of the unit's parameters, then the unit's own hooks."""
        unit = self.unit
        for flat, params in zip(unit.handle.flats, given, strict=True):
            if flat.flat_grad is not None:
                _refuse_unreachable(flat)
            if flat.is_watched:
                for param in params or ():
                    for hook in list((param._post_accumulate_grad_hooks or {}).values()):
                        hook(param)
        if self.callbacks:
            # A callback that calls `module.parameters()` must get the sharded parameters, which have the gradients.
            registrations, shown = unit.handle.registrations, unit.handle.registrations.shows
            registrations.show(SHARDED_PARAMS)
            try:
                for callback in list(self.callbacks.values()):
                    callback()
            finally:
                registrations.show(shown)


def _refuse_unreachable(flat: FlatParam) -> None:
    if flat.is_watched:
        named = zip(flat.params, flat.layout.params, strict=True)
        if found := [info.fqn for param, info in named if param._post_accumulate_grad_hooks]:
            raise RuntimeError(
                f"{name_list(found)} have hooks that would never run: since flat_parameters() was called, only the flat "
                "parameter receives gradients. Register the hooks on the flat parameter"
            )


def register_gradients_reduced_hook(module: nn.Module, hook: Callable[[nn.Module], object]) -> RemovableHandle:
    """Call ``hook(module)`` in backward, each time when the gradients of this unit have been reduced into ``.grad``.

    ``.grad`` of the unit's parameters is complete then. The hook may step an optimizer and set ``.grad`` to None, so that the
    gradients of all units never exist at once. It runs in the thread that runs backward, with gradients disabled, after the
    hooks of ``p.register_post_accumulate_grad_hook``. It does not run under ``no_sync``, where nothing is reduced. Backward
    raises its exceptions. Deep copies of the module do not have the hook.

    Example::

        params = {info.fqn: p for p in model.parameters() if (info := flatshard.tensors.shard_info(p))}
        for unit in flatshard.describe(model).units:
            own = [params[fqn] for flat in unit.flats for fqn in flat.fqns]
            optimizer = torch.optim.AdamW(own)

            def step(_, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            flatshard.optim.register_gradients_reduced_hook(model.get_submodule(unit.fqn), step)

    Returns:
        A handle whose ``remove()`` removes the hook.

    Raises:
        ValueError: ``module`` is not a unit.
    """
    unit = unit_for(module, "register_gradients_reduced_hook")
    hooks = unit.feature(UserHooksOfUnit)
    assert hooks is not None
    for flat in unit.handle.flats:
        flat.watch()
    handle = RemovableHandle(hooks.callbacks)
    hooks.callbacks[handle.id] = functools.partial(hook, unwrapped(module))
    return handle
