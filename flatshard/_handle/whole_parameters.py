"""Whole parameters and gradients of a handle, which a user can read and change inside ``summon_full_params``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from flatshard._handle.adapters.wrapping import Wrapping
from flatshard._handle.handle import FlatParamHandle


class WholeParameters:
    """Copies the unsharded parameters and gradients of one handle, and writes changes back to its shards."""

    def __init__(self, handle: FlatParamHandle) -> None:
        self._handle = handle

    def copy_full_precision(self, device: torch.device | None = None) -> dict[int, nn.Parameter]:
        """The whole parameters in the user's dtypes, by ``id`` of the sharded ones. ``device``: None: the compute device.

        Communicates, unless the parameters are unsharded in the user's dtype already.
        """
        copies = {}
        for flat in self._handle.flats:
            if flat.compute_dtype is not flat.dtype or self._handle.is_sharded:
                whole = flat.gather_full_precision(self._handle.runtime).computes
            else:
                whole = tuple([_copy(c, w, device) for c, w in zip(flat.computes, flat.wrappings, strict=True)])
            for param, value, wrapping in zip(flat.params, whole, flat.wrappings, strict=True):
                value.requires_grad_(param.requires_grad)
                copies[id(param)] = value if device in (None, value.device) else _copy(value, wrapping, device)
        return copies

    def copy_copies(self, copies: dict[int, nn.Parameter], device: torch.device) -> dict[int, nn.Parameter]:
        """Copies of ``copies``, without their gradients."""
        return {
            id(param): _copy(copies[id(param)], wrapping, device)
            for flat in self._handle.flats
            for param, wrapping in zip(flat.params, flat.wrappings, strict=True)
        }

    def copy_shown_gradients(self, copies: dict[int, nn.Parameter]) -> None:
        """Copy the whole gradients of the registered parameters to ``copies``."""
        for sharded, shown in self._handle.slots.shown():
            target = copies[id(sharded)]
            if shown is not None and shown.grad is not None and target.grad is None:
                target.grad = shown.grad.to(target.device, copy=True)

    def copy_unsharded(self) -> list[torch.Tensor]:
        """Copies of the unsharded buffers, for ``restore_unsharded``."""
        return [b.unsharded.flat.clone() for b in self._handle.flats]

    def restore_unsharded(self, before: Sequence[torch.Tensor]) -> None:
        """Undo changes of the unsharded parameters."""
        for flat, values in zip(self._handle.flats, before, strict=True):
            flat.unsharded.flat.copy_(values)

    def write_back(self, with_grads: bool) -> None:
        """Write this rank's part of the unsharded parameters, and of their gradients, to the shards."""
        for flat in self._handle.flats:
            flat.write_back()
            if with_grads:
                flat.gradients.write_back([c.grad for c in flat.computes])

    def write_back_copies(self, copies: dict[int, nn.Parameter], with_grads: bool) -> None:
        """The same from ``copies``, see ``copy_full_precision``."""
        for flat in self._handle.flats:
            values = [copies[id(p)] for p in flat.params]
            flat.write_back_from(values)
            if with_grads:
                flat.gradients.write_back([v.grad for v in values])

    def gather_gradients(self, copies: dict[int, nn.Parameter] | None) -> None:
        """Gather whole gradients and set them on the unsharded parameters or their ``copies``. Communicates."""
        for flat in self._handle.flats:
            # Frozen parameters are included: they may have an old gradient.
            if flat.dtype.is_floating_point or flat.dtype.is_complex:
                whole = flat.gradients.gather(self._handle.runtime)
                for param, compute, wrapping, grad in zip(
                    flat.params, flat.computes, flat.wrappings, whole, strict=True
                ):
                    target = compute if copies is None else copies[id(param)]
                    if grad is not None and grad.dtype is not target.dtype:
                        target.grad_dtype = grad.dtype  # keep_low_precision_grads
                    if grad is not None and wrapping is not None:
                        grad = wrapping.wrap_gradient(grad)
                    target.grad = None if grad is None else grad.to(target.device)

    def drop_full_gradients(self) -> None:
        """Undo ``gather_gradients``."""
        for flat in self._handle.flats:
            for compute in flat.computes:
                compute.grad = None


def _copy(param: nn.Parameter, wrapping: Wrapping | None, device: torch.device | None = None) -> nn.Parameter:
    """A copy of a whole parameter, without its gradient. ``device``: None: the same device."""
    plain = param.detach() if wrapping is None else wrapping.unwrap(param)
    value = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=device or plain.device).copy_(
        plain
    )
    return nn.Parameter(value if wrapping is None else wrapping.wrap(value), param.requires_grad)
