"""The values of parameters and buffers before they are sharded: initialised, moved and broadcast, one unit at a time.

[Note: Nothing trains on garbage]
A module on the meta device gets memory that is filled with a byte pattern. No initialiser writes this pattern. If a tensor
still has the pattern afterwards, it was never initialised, and an error names it. This happens most often to non-persistent
buffers, such as ``inv_freq`` of a rotary embedding. If a ``param_init_fn`` allocates memory itself (``module.to_empty``),
torch fills it with NaN or the largest integer, and these are checked in the same way.

The values of a module that was on meta are always broadcast from rank 0, because ranks may have different random generators.
If rank 0 has values already (``sync_module_states``), the other ranks need not initialise theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from flatshard._base.errors import name_list, why_not_called
from flatshard._base.names import module_names
from flatshard._comm.runtime import Runtime, on_any_rank
from flatshard._composable.construct.partition import PlannedUnit
from flatshard._handle.adapters.tensor_parallel import TensorParallel, local_tensor
from flatshard._handle.adapters.tensor_subclass import is_wrapper, plain_tensors, wrapping_of
from flatshard._handle.layout import Groups
from flatshard._handle.tensors.grad_dtype import choose, hand_on, has_chosen
from flatshard._handle.unit_ranks import Runtimes

PATTERN = 0xA7
"""The byte that memory is filled with until it is initialised. No initialiser leaves it behind."""


class Materialization:
    """Gives the parameters and buffers of all units of one call their memory, values and device, before they are sharded.

    Args:
        root: the module to shard.
        units: its planned units.
        ignored: parameters to leave alone.
        device: the device to allocate on, and to move to.
        param_init_fn: the argument of ``fully_shard``.
        at_once: whether a module on meta gets memory now, and does not stay there.
        syncs: whether rank 0 broadcasts its values.

    Raises:
        TypeError: ``param_init_fn`` cannot be called with a module.
        RuntimeError: nothing can initialise a parameter or buffer on meta.
    """

    def __init__(
        self,
        root: nn.Module,
        units: list[PlannedUnit],
        ignored: Collection[nn.Parameter],
        device: torch.device,
        param_init_fn: Callable[[nn.Module], None] | None,
        at_once: bool,
        syncs: bool,
    ) -> None:
        self._root, self._ignored, self._device = root, ignored, device
        self._init, self._syncs = param_init_fn, syncs
        if param_init_fn is not None:
            _check_callable(param_init_fn)
        owned = [o.param for unit in units for o in unit.owned]
        on_meta = bool(owned) and all(p.is_meta and not is_wrapper(p) for p in owned)
        self._stays = on_meta and not (
            at_once or syncs or param_init_fn is not None
        )  # filled_later.py, [Note: Filled later]
        # Found here, because the owner of a shared parameter initialises modules of other units that it is registered in.
        self._was_meta = {u.module for u in units if any([self._on_meta(m) for m in u.holders])}
        # Tensors that nothing can initialise. Tensors that an initialiser leaves out are found later.
        self._left = [
            (m, name)
            for unit in units
            if param_init_fn is None and unit.module in self._was_meta
            for m in unit.modules
            if _own_initialiser(m) is None
            for name, _ in self._on_meta(m)
        ]
        if self._left and not (self._stays or syncs):
            self._refuse()

    def agree(self, runtimes: Runtimes) -> None:
        """Agree with the other ranks that rank 0 of the call's groups has values to broadcast.

        Raises:
            RuntimeError: it has none. All ranks raise.
        """
        self._runtimes = {groups: [r for r in both if r is not None] for groups, both in runtimes.items()}
        # The groups of which this is rank 0.
        self._first_of = {groups for groups, both in self._runtimes.items() if all([r.rank == 0 for r in both])}
        if self._syncs and on_any_rank(self._runtimes[None], None in self._first_of and bool(self._left)):
            self._refuse()

    def prepare(self, unit: PlannedUnit) -> None:
        """Initialise, move and broadcast the parameters and buffers of ``unit``.

        Raises:
            RuntimeError: a parameter or buffer was not initialised.
        """
        if self._stays:
            return
        if unit.module in self._was_meta:
            self._initialise(unit)
        self._move(unit)
        if self._syncs or unit.module in self._was_meta:
            for groups in unit.groups:
                for runtime in self._runtimes[groups]:
                    _broadcast(unit, groups, runtime)

    def _refuse(self) -> NoReturn:
        """Raise, before anything is changed, because nothing can initialise some tensors."""
        what = f"{self._fqns(self._left)} are" if self._left else "some parameters or buffers of rank 0 are"
        raise RuntimeError(f"{what} on the meta device and their modules cannot initialise them. {_CURE}")

    def _fqns(self, tensors: Iterable[tuple[nn.Module, str]]) -> str:
        """Return the FQNs of these registrations, for an error."""
        names = module_names(self._root)
        return name_list([f"{names[module]}.{name}" if names[module] else name for module, name in tensors])

    def _tensors(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters and buffers that are registered on ``module`` itself, by name."""
        found: list[tuple[str, Any]] = [*module._parameters.items(), *module._buffers.items()]
        return [(name, tensor) for name, tensor in found if tensor is not None and tensor not in self._ignored]

    def _on_meta(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Return those that have no memory."""
        found: list[tuple[str, Any]] = [*module._parameters.items(), *module._buffers.items()]
        return [(n, t) for n, t in found if t is not None and t.is_meta and t not in self._ignored]

    def _initialise(self, unit: PlannedUnit) -> None:
        """Initialise the tensors on meta in place. Parameters stay the same objects, and tied."""
        todo = [m for m in unit.holders if self._on_meta(m)]
        for module in todo:
            for _, tensor in self._on_meta(module):
                _allocate(tensor, self._device)
            if self._init is not None:
                _call_init(self._init, module)
            elif (reset := _own_initialiser(module)) is not None:
                reset()
        overwritten = self._syncs and self._first_of.isdisjoint(unit.groups)  # by rank 0: memory is enough
        left = [
            (m, name) for m in todo for name, t in self._tensors(m) if t.is_meta or (_untouched(t) and not overwritten)
        ]
        if left:
            raise RuntimeError(
                f"{self._fqns(left)} were on the meta device and have not been initialised"
                + (" (param_init_fn was called for their modules)" if self._init is not None else "")
                + f". {_CURE}"
            )

    def _move(self, unit: PlannedUnit) -> None:
        """Move buffers, and the parameters that ``unit`` owns, to the device. Parameters stay the same objects.

        Parameters of other units that are registered in it are left alone: they may be sharded already.
        """
        device = self._device
        for owned in unit.owned:
            param = owned.param
            if param.device == device or param.is_meta:
                continue
            if is_wrapper(param):  # sharding registers another object in its place in any case
                moved = nn.Parameter(param.detach().to(device), param.requires_grad)
                hand_on(param, moved)
                moved.__dict__.update({k: v for k, v in param.__dict__.items() if k not in moved.__dict__})
                owned.replace(moved)
                continue
            param.data = param.data.to(device)
            if param.grad is not None:
                param.grad = param.grad.to(device)
        for module in unit.holders:
            for name, buffer in list(module._buffers.items()):
                if buffer is not None and buffer.device != device and not (buffer.is_meta or is_wrapper(buffer)):
                    module._buffers[name] = buffer.to(device)


def _check_callable(param_init_fn: Any) -> None:
    if (why := why_not_called(param_init_fn, "module")) is not None:
        raise TypeError(
            f"param_init_fn={param_init_fn!r} cannot be called with a module ({why}): it must be None or a function that "
            "takes a module, and gives values to the module's own parameters and buffers"
        )


_CURE = (
    "Give their modules a reset_parameters() that sets every parameter and buffer (non-persistent ones too), or pass "
    "param_init_fn=... to fully_shard"
)


def _own_initialiser(module: nn.Module) -> Callable[[], object] | None:
    reset = getattr(module, "reset_parameters", None)
    return reset if callable(reset) else None


def _call_init(param_init_fn: Callable[[nn.Module], None], module: nn.Module) -> None:
    """Call the user's function with ``module``. Parameters stay the same objects, and keep their attributes."""
    # A param_init_fn written for FSDP1 begins with module.to_empty(...). With swapping, the Parameter objects stay the same.
    before = torch.__future__.get_swap_module_params_on_conversion()
    attributes = [(p, dict(p.__dict__)) for p in module.parameters(recurse=False)]
    grad_dtypes = [(p, p.grad_dtype) for p, _ in attributes if has_chosen(p)]
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.__future__.set_swap_module_params_on_conversion(True)
    # Only in this mode torch fills the memory that it allocates.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        param_init_fn(module)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    for param, kept in attributes:
        param.__dict__.update(kept)  # swapping moved the attributes to another object
    for param, dtype in grad_dtypes:
        choose(param, dtype)


def _allocate(tensor: torch.Tensor, device: torch.device) -> None:
    """Give ``tensor`` memory on ``device``, filled with the pattern. It stays the same object."""
    local, parallel = local_tensor(tensor), TensorParallel.of(tensor)
    empty = torch.empty_strided(local.shape, local.stride(), dtype=tensor.dtype, device=device)
    fill_with_pattern(empty)
    if parallel is not None:
        empty = parallel.wrap(empty)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, tensor.requires_grad)
        hand_on(tensor, empty)
    if parallel is None:
        swap_memory(tensor, empty)
    else:
        empty.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, empty)  # type: ignore[no-untyped-call]


def swap_memory(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange the memory of two tensors of one class, with device and dtype, but without their attributes.

    Unlike torch.utils.swap_tensors this does not refuse weak references, which an RNN has to its parameters.
    """
    torch._C._swap_tensor_impl(tensor, other)


def _untouched(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` still has the values that it was filled with. [Note: Nothing trains on garbage]"""
    tensor = local_tensor(tensor).detach()
    if not tensor.numel() or is_wrapper(tensor):
        return False
    if shows_pattern(tensor):
        return True
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return tensor.dtype is not torch.bool and bool((tensor == torch.iinfo(tensor.dtype).max).all())


def _broadcast(unit: PlannedUnit, groups: Groups | None, runtime: Runtime) -> None:
    """Broadcast the parameters of ``unit`` that are sharded over ``groups`` from rank 0 of ``runtime``, one of the groups.

    With the groups of the call, None, buffers are broadcast, too.
    """
    buffers = (b for module in unit.modules for b in module._buffers.values() if b is not None and groups is None)
    # Parameters that units below share are broadcast with the unit that owns them.
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


def fill_with_pattern(tensor: torch.Tensor) -> None:
    """Mark all of the storage of ``tensor`` as never initialised."""
    torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).fill_(PATTERN)


def shows_pattern(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor``, plain and not empty, is as ``fill_with_pattern`` left it."""
    return bool((tensor.detach().contiguous().view(-1).view(torch.uint8) == PATTERN).all())
