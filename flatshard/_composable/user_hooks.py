"""What a user registered to run as gradients come: on parameters, and on units."""

from __future__ import annotations

from torch import nn

from flatshard._composable.state import Unit
from flatshard._errors import name_list
from flatshard._handle.gradients import FlatGradients


def run_user_hooks(unit: Unit) -> None:
    """The unit's gradients have come into ``.grad``: run what the user registered on its parameters, then on the unit."""
    for grads in unit.handle.grads:
        given, grads.given = grads.given, ()
        if grads.flat_param is not None:
            _refuse_unreachable(grads)
        if grads.buffers.is_watched or grads.is_watched:
            for param in given:
                for hook in list((param._post_accumulate_grad_hooks or {}).values()):
                    hook(param)
    if unit.reduced_callbacks:
        # A callback that asks its module for parameters is to see the user's own, which have the gradients.
        slots, was_unsharded = unit.handle.slots, unit.handle.slots.unsharded
        slots.register_sharded()
        try:
            for callback in list(unit.reduced_callbacks.values()):
                callback(unit.module)
        finally:
            if was_unsharded:
                slots.register_unsharded()


def _refuse_unreachable(grads: FlatGradients) -> None:
    if grads.buffers.is_watched:
        named = zip(grads.buffers.params, grads.buffers.layout.params, strict=True)
        if found := [info.fqn for param, info in named if _is_hooked(param)]:
            raise RuntimeError(
                f"{name_list(found)} have hooks that would never run: since flat_parameters() was called, the flat parameter "
                "alone receives gradients. Register them on that one"
            )


def _is_hooked(param: nn.Parameter) -> bool:
    return bool(param._post_accumulate_grad_hooks)
