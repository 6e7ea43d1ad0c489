"""Initialises, moves and broadcasts the parameters and buffers of one unit, before it is sharded.

[Note: Nothing trains on garbage]
A module on the meta device gets memory that is filled with a byte pattern. No initialiser writes this pattern. If a tensor
still has the pattern afterwards, it was never initialised, and an error names it. This happens most often to non-persistent
buffers, such as ``inv_freq`` of a rotary embedding. If a ``param_init_fn`` allocates memory itself (``module.to_empty``),
torch fills it with NaN or the largest integer, and these are checked in the same way.

The values of a module that was on meta are always broadcast from rank 0, because ranks may have different random generators.
If rank 0 has values already (``sync_module_states``), the other ranks need not initialise theirs.
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
from flatshard._handle.planned import Groups
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
    except ValueError:  # a callable without a signature
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
    return bool(owned) and all(p.is_meta and not is_wrapper(p) for p in owned)


def materialize(
    unit: PlannedUnit,
    names: dict[nn.Module, str],
    device: torch.device,
    param_init_fn: Callable[[nn.Module], None] | None,
    ignored: set[nn.Parameter],
    overwritten: bool,
) -> None:
    """Initialise the parameters and buffers of ``unit`` that are on meta, in place. Parameters stay the same objects, and
    tied.

    Args:
        unit: the unit.
        names: each module's FQN.
        device: where to allocate.
        param_init_fn: the argument of ``fully_shard``.
        ignored: parameters to leave alone.
        overwritten: another rank will broadcast the values, so it is enough to allocate memory.

    Raises:
        RuntimeError: a parameter or buffer was not initialised.
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
            f"{name_list(left)} were on the meta device and have not been initialised"
            + (" (param_init_fn was called for their modules)" if param_init_fn is not None else "")
            + f". {_CURE}"
        )


def _own_initialiser(module: nn.Module) -> Callable[[], object] | None:
    reset = getattr(module, "reset_parameters", None)
    return reset if callable(reset) else None


def _fqn(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _call_init(param_init_fn: Callable[[nn.Module], None], module: nn.Module) -> None:
    # A param_init_fn written for FSDP1 begins with module.to_empty(...). With swapping, the Parameter objects stay the same.
    before = torch.__future__.get_swap_module_params_on_conversion()
    attributes = [(p, dict(p.__dict__)) for p in module.parameters(recurse=False)]
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.use_deterministic_algorithms(
        True, warn_only=True
    )  # only in this mode torch fills the memory that it allocates
    try:
        param_init_fn(module)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    for param, kept in attributes:
        param.__dict__.update(kept)  # swapping moved the attributes to another object


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
    """Whether ``tensor`` still has the values that it was filled with. [Note: Nothing trains on garbage]"""
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

    for (
        owned
    ) in unit.owned:  # for a tensor subclass another object will be registered in any case, so it may be replaced
        if is_wrapper(owned.param) and owned.param.device != device:
            moved = nn.Parameter(owned.param.detach().to(device), owned.param.requires_grad)
            moved.__dict__.update({k: v for k, v in owned.param.__dict__.items() if k not in moved.__dict__})
            owned.param = moved


def broadcast(unit: PlannedUnit, groups: Groups | None, runtime: Runtime) -> None:
    """Broadcast the parameters of ``unit`` that are sharded over ``groups``, of which ``runtime`` is one, from its rank 0.
    With those of the call, None, also the buffers.
    """
    buffers = (b for module in unit.modules for b in module._buffers.values() if b is not None and groups is None)
    # Parameters shared with units below are broadcast with the unit that owns them.
    params = (owned.param for owned in unit.owned if owned.groups == groups)
    tensors = {id(t): t for t in itertools.chain(params, buffers)}
    try:
        for tensor in tensors.values():
            wrapping = wrapping_of(tensor)
            runtimes = [*([] if wrapping is None else wrapping.replicas(runtime.device)), runtime]
            for each in runtimes:
                for plain in plain_tensors(tensor):
                    each.broadcast_now(plain)
    except Exception as e:
        runtime.fail("broadcast", unit.fqn, e)
