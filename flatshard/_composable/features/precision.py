"""Mixed precision around a forward: casts of inputs, outputs and buffers.

Parameters and gradients are cast by the handle (``FlatParam``, ``FlatGradients``).
"""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from flatshard._composable.claims import Need, Reason
from flatshard._composable.extensions import Extension, ForwardFeature
from flatshard._composable.features.full_parameters import FullParameters
from flatshard._composable.features.keep import Keep
from flatshard._composable.features.summon import summoned_units
from flatshard._composable.outputs import tensors_in
from flatshard._composable.state import Forward, Unit
from flatshard._handle.registrations import UNSHARDED_PARAMS


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with every floating-point tensor in it cast to ``dtype``. Autograd sees the casts."""
    kind = type(value)
    if kind is torch.Tensor or isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype is not dtype else value
    if kind is tuple:
        return tuple([cast_floats(v, dtype) for v in value])
    if kind is list:
        return [cast_floats(v, dtype) for v in value]
    if kind is dict:
        return {k: cast_floats(v, dtype) for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # `dataclasses.fields()` is a generator, which dynamo cannot trace. Fields without a value are left out.
        own = getattr(value, "__dict__", value.__dataclass_fields__)
        names = [name for name, field in value.__dataclass_fields__.items() if field.init and name in own]
        return dataclasses.replace(value, **{name: cast_floats(getattr(value, name), dtype) for name in names})
    return tree_map(lambda v: cast_floats(v, dtype) if isinstance(v, torch.Tensor) else v, value)


class Precision(Extension):
    """Casts the inputs, outputs and buffers of units as their mixed-precision policies say."""

    concerns = operator.attrgetter("config.casts")

    def attach(self, unit: Unit, modules: list[nn.Module]) -> MixedForward | None:
        policy = unit.config.mixed_precision
        for module in modules:
            if isinstance(module, policy.module_classes_to_ignore):
                if policy.param_dtype is not None:
                    full = FullPrecisionModule()
                    module.register_forward_pre_hook(full.before, with_kwargs=True)
                    module.register_forward_hook(full.after, with_kwargs=True, always_call=True)
            elif policy.buffer_dtype is not None:
                cast_buffers(module, policy.buffer_dtype)
        return None if policy.param_dtype is None and policy.output_dtype is None else MixedForward(unit)


def cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point buffers of ``module`` to ``dtype``."""
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


class MixedForward(ForwardFeature):
    """The casts around forwards of one unit. With ``full_precision_in_eval`` it shows full-precision parameters instead."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        # Forwards that `summon_full_params` has in another dtype than the one around them, with that one's dtype.
        self._around: list[tuple[Forward, torch.dtype]] = []

    def enter(self, forward: Forward) -> None:
        """If this forward is to run in full precision, show the parameters in their own dtype."""
        unit = self.unit
        if torch.is_grad_enabled():
            return
        wanted = unit.config.mixed_precision.full_precision_in_eval and not forward.module.training
        around = any([isinstance(claim.shows, dict) and not claim.shown_to_user for claim in unit.claims])
        if not wanted and not around:  # a forward around this one may run in full precision already
            return
        forward.gathers = False
        for needed, claim in forward.claims:
            if not needed.claims.show_copies:
                if needed.claims.is_only_use(claim):
                    needed.release(Reason.OUTDATED)
                    needed.handle.check_parameters()
                claim.show(_full_precision(needed), Need.COPIES)
                needed.show()

    def before(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        running = self.unit.context.forwards
        outermost = len(running) == 1 and running[0].unit is self.unit
        if summoned_units and not outermost and (dtype := self._differs(forward, args, kwargs)) is not None:
            return cast_floats(args, dtype), cast_floats(kwargs, dtype)
        if forward.claim.shows is not UNSHARDED_PARAMS:
            return None
        return self.before_unrecorded(args, kwargs, outermost)

    def _differs(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
        """Return the dtype of this forward, if only one of it and the forward around it is in full precision, else None."""
        low = self.unit.config.mixed_precision.param_dtype
        full = next((f.kind.dtype for f in self.unit.handle.flats if f.kind.dtype.is_floating_point), None)
        given = next((t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()), None)
        own, other = (low, full) if forward.claim.shows is UNSHARDED_PARAMS else (full, low)
        if own is None or given is None or own is other or given is not other:
            return None
        self._around.append((forward, given))
        return own

    def after(self, forward: Forward, output: Any) -> Any:
        if self._around and self._around[-1][0] is forward:
            _, dtype = self._around.pop()
            return cast_floats(output, dtype)
        return self.after_unrecorded(output)

    def before_unrecorded(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], outermost: bool
    ) -> tuple[Any, Any] | None:
        """Cast the inputs to the compute dtype."""
        policy = self.unit.config.mixed_precision
        casts = policy.cast_root_forward_inputs if outermost else policy.cast_forward_inputs
        if policy.param_dtype is None or not casts:
            return None
        return cast_floats(args, policy.param_dtype), cast_floats(kwargs, policy.param_dtype)

    def after_unrecorded(self, output: Any) -> Any:
        """Cast the output."""
        dtype = self.unit.config.mixed_precision.output_dtype
        return None if output is None or dtype is None else cast_floats(output, dtype)


def _full_precision(unit: Unit) -> dict[int, nn.Parameter]:
    """Return unsharded parameters in their own dtype. ``keep_unsharded`` reuses the copies until the parameters change."""
    keep = next((claim for claim in unit.claims if isinstance(claim, Keep)), None)
    if keep is None:
        return FullParameters(unit.handle).copy_full_precision()
    version = unit.handle.version()
    if keep.full_precision is None or keep.full_precision[0] != version:
        keep.full_precision = None  # frees the old copies before new ones are made
        keep.full_precision = version, FullParameters(unit.handle).copy_full_precision()
    return keep.full_precision[1]


class FullPrecisionModule:
    """Forward hooks of one ignored module, which cast its inputs to the dtype of its parameters, and its outputs back."""

    def __init__(self) -> None:
        # The dtype of the inputs, for each forward under way, by thread.
        self._outer: defaultdict[int, list[torch.dtype | None]] = defaultdict(list)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        own = next((p.dtype for p in module.parameters(recurse=False) if p.is_floating_point()), torch.float32)
        floats = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.is_floating_point()]
        self._outer[threading.get_ident()].append(floats[0].dtype if floats else None)
        return cast_floats((args, kwargs), own)  # type: ignore[no-any-return]

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        thread = threading.get_ident()
        if not self._outer[thread]:
            return output  # another pre-hook raised before `before` ran
        outer = self._outer[thread].pop()
        return output if output is None or outer is None else cast_floats(output, outer)
