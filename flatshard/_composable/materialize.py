"""From what the user built to parameters with values on the right device: one unit at a time.

[Note: Nothing trains on garbage]
A module built on the meta device is given memory, filled with a byte pattern that no initialiser leaves behind. What
still shows the pattern afterwards was never initialised: an error with its FQN, not a parameter of random bytes (the
classic victim is a non-persistent buffer such as a rotary embedding's ``inv_freq``). What a meta module was initialised
to is always broadcast from rank 0: ranks whose random generators differ would otherwise train different models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from flatshard._composable.partition import PlannedUnit
from flatshard._errors import name_list
from flatshard._runtime import Runtime

_PATTERN = 0xA7


def materialize(
    unit: PlannedUnit,
    names: dict[nn.Module, str],
    device: torch.device,
    param_init_fn: Callable[[nn.Module], None] | None,
    ignored: set[nn.Parameter],
) -> bool:
    """Give values to what is on meta in ``unit``, in place. Returns whether anything was.

    The parameters keep their identity and their ties. ``names``: each module's FQN.

    Raises:
        RuntimeError: a module can't be initialised, or something in it was left uninitialised.
    """
    todo = [m for m in unit.modules if any(t.is_meta for _, t in _tensors(m, ignored))]
    for module in todo:
        _allocate(module, device, ignored)
        if param_init_fn is not None:
            _call_init(param_init_fn, module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    left = [
        f"{names[m]}.{name}" if names[m] else name
        for m in todo
        for name, t in _tensors(m, ignored)
        if t.is_meta or _untouched(t)
    ]
    if left:
        raise RuntimeError(
            f"{name_list(left)} were on the meta device and nothing initialised them"
            + (" (param_init_fn was called for their modules)" if param_init_fn is not None else "")
            + ". Give their modules a reset_parameters() that sets every parameter and buffer (non-persistent ones too), "
            "or pass param_init_fn=... to fully_shard"
        )
    return bool(todo)


def _call_init(param_init_fn: Callable[[nn.Module], None], module: nn.Module) -> None:
    # A param_init_fn may begin with module.to_empty(...), as FSDP1's had to: with swapping, the Parameter objects survive.
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        param_init_fn(module)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _tensors(module: nn.Module, ignored: set[nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers registered on ``module`` itself."""
    for name, param in module._parameters.items():
        if param is not None and param not in ignored:
            yield name, param
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, buffer


def _allocate(module: nn.Module, device: torch.device, ignored: set[nn.Parameter]) -> None:
    for _, tensor in list(_tensors(module, ignored)):
        if not tensor.is_meta:
            continue
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        _bytes(empty).fill_(_PATTERN)
        if isinstance(tensor, nn.Parameter):
            fresh = nn.Parameter(empty, tensor.requires_grad)
            fresh.__dict__.update(tensor.__dict__)
            torch.utils.swap_tensors(tensor, fresh)  # type: ignore[no-untyped-call]
        else:
            torch.utils.swap_tensors(tensor, empty)  # type: ignore[no-untyped-call]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _untouched(tensor: torch.Tensor) -> bool:
    raw = _bytes(tensor.detach())
    return raw.numel() > 0 and bool((raw == _PATTERN).all())


def move(unit: PlannedUnit, device: torch.device, ignored: set[nn.Parameter]) -> None:
    """Move the parameters (keeping their identity) and buffers of ``unit`` to ``device``."""
    for module in unit.modules:
        for name, tensor in list(_tensors(module, ignored)):
            if tensor.device == device or tensor.is_meta:
                continue
            if isinstance(tensor, nn.Parameter):
                tensor.data = tensor.data.to(device)
                if tensor.grad is not None:
                    tensor.grad = tensor.grad.to(device)
            else:
                module._buffers[name] = tensor.to(device)


def broadcast(unit: PlannedUnit, runtime: Runtime, ignored: set[nn.Parameter]) -> None:
    """Give every rank the parameters and buffers of the group's rank 0."""
    done: set[int] = set()
    for owned in unit.owned:  # shared parameters of units below are broadcast with their owner
        runtime.broadcast_now(owned.param)
        done.add(id(owned.param))
    for module in unit.modules:
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in done:
                runtime.broadcast_now(buffer)
                done.add(id(buffer))
