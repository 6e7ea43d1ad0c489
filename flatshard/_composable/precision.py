"""Mixed precision around a forward: what is cast on the way in and out, and the warning about low-precision masters.

The parameters' own casts are the handle's affair (``FlatBuffers``, ``FlatGradients``).
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map

from flatshard._config import CPUOffload, MixedPrecision
from flatshard._errors import name_list
from flatshard._handle.buffers import FlatOptions
from flatshard._handle.sharded_parameter import shard_info
from flatshard._handle.tensor_subclass import TensorSubclass
from flatshard._handle.wrapping import Wrapping


def flat_options(
    plain: torch.Tensor,
    wrapping: Wrapping | None,
    modules: Iterable[nn.Module],
    policy: MixedPrecision,
    offload: CPUOffload,
) -> FlatOptions:
    """What a user's choices mean for one parameter, which is registered in ``modules``: the ``plain`` tensor of it."""
    placed = offload.offload_params, offload.pin_memory
    if not plain.is_floating_point() or any(policy.ignores(m) for m in modules):
        return FlatOptions(offload=placed[0], pin_memory=placed[1])
    # What another dtype would mean to a tensor subclass only it knows: it keeps its own, with gradients reduced as said.
    casts = policy.param_dtype is not plain.dtype and not isinstance(wrapping, TensorSubclass)
    compute = policy.param_dtype if casts else None
    return FlatOptions(
        compute,
        policy.reduce_dtype,
        policy.keep_low_precision_grads,
        policy.keep_cast_shard and compute is not None,
        *placed,
    )


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating-point tensor in it cast to ``dtype``. Autograd sees the casts."""
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
        fields = {f.name: cast_floats(getattr(value, f.name), dtype) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return tree_map(lambda v: cast_floats(v, dtype) if isinstance(v, torch.Tensor) else v, value)


def cast_buffers(modules: Iterable[nn.Module], policy: MixedPrecision) -> None:
    """Give the floating-point buffers of ``modules`` the policy's ``buffer_dtype``."""
    if policy.buffer_dtype is not None:
        for module in modules:
            if not policy.ignores(module):
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.is_floating_point():
                        module._buffers[name] = buffer.to(policy.buffer_dtype)


class FullPrecisionModule:
    """The forward hooks of one module that a policy ignores: inputs to its parameters' dtype, outputs back."""

    def __init__(self) -> None:
        self._outer: list[torch.dtype | None] = []  # of the inputs, of the forwards under way

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        own = next((p.dtype for p in module.parameters(recurse=False) if p.is_floating_point()), torch.float32)
        floats = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.is_floating_point()]
        self._outer.append(floats[0].dtype if floats else None)
        return cast_floats((args, kwargs), own)  # type: ignore[no-any-return]

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self._outer:
            return output  # another hook raised before ours
        outer = self._outer.pop()
        return output if output is None or outer is None else cast_floats(output, outer)


_LOW = (torch.bfloat16, torch.float16)
_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_watching: list[Callable[[], None]] = []


def warn_about_low_precision_masters(params: Iterable[nn.Parameter]) -> None:
    """Have the first step of an optimizer that keeps state in bf16 or fp16 for a sharded parameter warn about it."""
    if not _watching and any(p.requires_grad and p.dtype in _LOW for p in params):
        _watching.append(register_optimizer_step_post_hook(_check_optimizer).remove)


def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _checked:
        return
    _checked.add(optimizer)
    found = [
        info.fqn
        for p, state in optimizer.state.items()
        if (info := shard_info(p)) is not None
        and p.dtype in _LOW
        and any(isinstance(v, torch.Tensor) and v.dtype in _LOW for v in state.values())
    ]
    if found:
        warnings.warn(
            f"{type(optimizer).__name__} keeps its state for {name_list(found, 3)} in 16 bits, as these sharded parameters "
            "are: small updates round to nothing, and training stalls. Load the model in float32 and pass "
            "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16) to fully_shard",
            stacklevel=2,
        )
