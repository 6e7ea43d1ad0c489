"""From what the user built to parameters with values on the right device: one unit at a time.

[Note: Nothing trains on garbage]
A module built on the meta device is given memory, filled with a byte pattern that no initialiser leaves behind. What
still shows the pattern afterwards was never initialised: an error with its FQN, not a parameter of random bytes (the
classic victim is a non-persistent buffer such as a rotary embedding's ``inv_freq``). Memory that a ``param_init_fn``
allocates itself (``module.to_empty``) is filled by torch with NaN or the largest integer, and looked at likewise.

What a meta module was initialised to is always broadcast from rank 0: ranks whose random generators differ would
otherwise train different models. Where rank 0 was not on meta (``sync_module_states``), the others may leave it out.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from flatshard._composable.partition import PlannedUnit
from flatshard._errors import name_list
from flatshard._handle.adapters.tensor_parallel import TensorParallel, local_tensor
from flatshard._handle.adapters.tensor_subclass import is_wrapper, plain_tensors, wrapping_of
from flatshard._handle.unfilled import fill_with_pattern, shows_pattern
from flatshard._runtime import Runtime


def without_initialiser(
    units: list[PlannedUnit],
    names: dict[nn.Module, str],
    param_init_fn: Callable[[nn.Module], None] | None,
    ignored: set[nn.Parameter],
) -> list[str]:
    """The FQNs of what nothing can initialise. What an initialiser leaves out shows later.

    Raises:
        TypeError: ``param_init_fn`` cannot be called with a module.
    """
    if param_init_fn is not None:
        _check_callable(param_init_fn)
    return [
        _fqn(names[m], name)
        for unit in units
        for m in unit.modules
        if param_init_fn is None and _own_initialiser(m) is None
        for name, t in _tensors(m, ignored)
        if t.is_meta
    ]


def refuse(left: list[str]) -> NoReturn:
    """Raise for what nothing can initialise, before anything is changed."""
    what = f"{name_list(left)} are" if left else "some parameters or buffers of rank 0 are"
    raise RuntimeError(f"{what} on the meta device and their modules cannot initialise them. {_CURE}")


def _check_callable(param_init_fn: Any) -> None:
    wanted = (
        "it must be None or a function that takes a module, and gives values to the module's own parameters and buffers"
    )
    if not callable(param_init_fn) or isinstance(param_init_fn, type):
        raise TypeError(f"param_init_fn={param_init_fn!r} is not a function: {wanted}")
    try:
        inspect.signature(param_init_fn).bind("module")
    except TypeError as e:
        raise TypeError(f"param_init_fn={param_init_fn!r} cannot be called with a module ({e}): {wanted}") from None
    except ValueError:  # a callable that tells no signature
        pass


_CURE = (
    "Give their modules a reset_parameters() that sets every parameter and buffer (non-persistent ones too), or pass "
    "param_init_fn=... to fully_shard"
)


def is_on_meta(unit: PlannedUnit, ignored: set[nn.Parameter]) -> bool:
    """Whether anything in ``unit`` is on the meta device."""
    return any(t.is_meta for m in unit.holders for _, t in _tensors(m, ignored))


def can_stay_on_meta(units: list[PlannedUnit]) -> bool:
    """Whether the parameters of ``units`` can be sharded without values. [Note: Filled later]"""
    owned = [o.param for unit in units for o in unit.owned]
    return bool(owned) and all(p.is_meta and wrapping_of(p) is None for p in owned)


def materialize(
    unit: PlannedUnit,
    names: dict[nn.Module, str],
    device: torch.device,
    param_init_fn: Callable[[nn.Module], None] | None,
    ignored: set[nn.Parameter],
    overwritten: bool,
) -> None:
    """Give values to what is on meta in ``unit``, in place.

    The parameters keep their identity and their ties. ``names``: each module's FQN. ``overwritten``: the values will come
    from another rank, so memory is enough.

    Raises:
        RuntimeError: something was left uninitialised.
    """
    todo = [m for m in unit.holders if any(t.is_meta for _, t in _tensors(m, ignored))]
    for module in todo:
        _allocate(module, device, ignored)
        if param_init_fn is not None:
            _call_init(param_init_fn, module)
        elif (reset := _own_initialiser(module)) is not None:
            reset()
    left = [
        _fqn(names[m], name)
        for m in todo
        for name, t in _tensors(m, ignored)
        if t.is_meta or (_untouched(t) and not overwritten)
    ]
    if left:
        raise RuntimeError(
            f"{name_list(left)} were on the meta device and nothing initialised them"
            + (" (param_init_fn was called for their modules)" if param_init_fn is not None else "")
            + f". {_CURE}"
        )


def _own_initialiser(module: nn.Module) -> Callable[[], object] | None:
    reset = getattr(module, "reset_parameters", None)
    return reset if callable(reset) else None


def _fqn(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _call_init(param_init_fn: Callable[[nn.Module], None], module: nn.Module) -> None:
    # A param_init_fn may begin with module.to_empty(...), as FSDP1's had to: with swapping, the Parameter objects survive.
    before = torch.__future__.get_swap_module_params_on_conversion()
    attributes = [(p, dict(p.__dict__)) for p in module.parameters(recurse=False)]
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.use_deterministic_algorithms(True, warn_only=True)  # only in this mode does torch fill what it allocates
    try:
        param_init_fn(module)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    for param, kept in attributes:
        param.__dict__.update(kept)  # swapping gave them away


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
        local, parallel = local_tensor(tensor), TensorParallel.of(tensor)
        empty = torch.empty_strided(local.shape, local.stride(), dtype=tensor.dtype, device=device)
        fill_with_pattern(empty)
        if parallel is not None:
            empty = parallel.wrap(empty)
        if isinstance(tensor, nn.Parameter):
            fresh = nn.Parameter(empty, tensor.requires_grad)
            fresh.__dict__.update(tensor.__dict__)
            torch.utils.swap_tensors(tensor, fresh)  # type: ignore[no-untyped-call]
        else:
            torch.utils.swap_tensors(tensor, empty)  # type: ignore[no-untyped-call]


def _untouched(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` still shows what it was filled with. [Note: Nothing trains on garbage]"""
    tensor = local_tensor(tensor).detach()
    if not tensor.numel() or is_wrapper(tensor):
        return False
    if shows_pattern(tensor):
        return True
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return tensor.dtype is not torch.bool and bool((tensor == torch.iinfo(tensor.dtype).max).all())


def move(unit: PlannedUnit, device: torch.device, ignored: set[nn.Parameter]) -> None:
    """Move the parameters (keeping their identity) and buffers of ``unit`` to ``device``."""
    for module in unit.holders:
        for name, tensor in list(_tensors(module, ignored)):
            if tensor.device == device or tensor.is_meta:
                continue
            if is_wrapper(tensor):
                continue
            if isinstance(tensor, nn.Parameter):
                tensor.data = tensor.data.to(device)
                if tensor.grad is not None:
                    tensor.grad = tensor.grad.to(device)
            else:
                module._buffers[name] = tensor.to(device)

    for owned in unit.owned:  # of a tensor subclass another object is sharded in any case
        if is_wrapper(owned.param) and owned.param.device != device:
            moved = nn.Parameter(owned.param.detach().to(device), owned.param.requires_grad)
            moved.__dict__.update({k: v for k, v in owned.param.__dict__.items() if k not in moved.__dict__})
            owned.param = moved


def broadcast(unit: PlannedUnit, runtime: Runtime, ignored: set[nn.Parameter]) -> None:
    """Give every rank the parameters and buffers of the group's rank 0."""
    buffers = (b for module in unit.modules for b in module._buffers.values() if b is not None)
    # Shared parameters of units below are broadcast with their owner.
    tensors = {id(t): t for t in itertools.chain((owned.param for owned in unit.owned), buffers)}
    try:
        for tensor in tensors.values():
            wrapping = wrapping_of(tensor)
            runtimes = [*([] if wrapping is None else wrapping.replicas(runtime.device)), runtime]
            for each in runtimes:
                for plain in plain_tensors(tensor):
                    each.broadcast_now(plain)
    except Exception as e:
        runtime.fail("broadcast", unit.fqn, e)
