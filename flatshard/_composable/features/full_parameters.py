"""Gathers full parameters and gradients: for reading (``Gathering``), or to be read and changed in ``summon_full_params``.

The values gathered are those of parameters, or of other tensors of the same layout, such as gradients. They are exact,
whatever collectives are used for training.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from flatshard._comm.collectives import ALL_GATHER, Done, Pending
from flatshard._handle.adapters.tensor_subclass import TensorSubclass
from flatshard._handle.adapters.wrapping import Wrapping
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.gradients import FlatGradients, views_of
from flatshard._handle.handle import FlatParamHandle
from flatshard._handle.tensors.aggregate import plainly
from flatshard._handle.tensors.shard_info import in_memory_order


class Gathering:
    """An all-gather in flight. All ranks start the same all-gathers in the same order."""

    def __init__(self, flat: FlatParam, own: torch.Tensor | None = None) -> None:
        """Start. ``own``: this rank's shard of the values; the same dtype on all ranks. None: the shard."""
        self._flat, self._layout = flat, flat.layout
        self._pending: Pending = Done()
        own = flat.shard if own is None else own
        if flat.holds_all:
            self.flat = own
            return
        rank, size = flat.ranks.rank, self._layout.shard_numel
        self.flat = torch.zeros(self._layout.padded_numel, dtype=own.dtype, device=flat.kind.compute_device)
        place = self.flat[rank * size :][:size].copy_(own)
        if size:
            self._pending = gather_exactly(flat, self.flat, place)

    def wait(self) -> list[torch.Tensor]:
        """Return the full tensor of each parameter, in its shape and stride: views of one buffer. For a tensor subclass (a
        DTensor, for one) this is the plain tensor inside.
        """
        try:
            self._pending.wait()
        except Exception as e:
            self._flat.ranks.runtime.fail(ALL_GATHER, self._flat.ranks.label.unit, e)
        return views_of(self.flat, self._layout)[0]


def gather_exactly(flat: FlatParam, output: torch.Tensor, own: torch.Tensor) -> Pending:
    """Start to gather ``own``, this rank's shard of ``output``, bit for bit, over the ranks that ``flat`` is sharded over."""
    runtime = flat.ranks.runtime.exact
    try:  # as bytes: no backend supports every dtype
        return runtime.all_gather(output.view(torch.uint8), own.view(torch.uint8), flat.ranks.label)
    except Exception as e:
        runtime.fail(ALL_GATHER, flat.ranks.label.unit, e)


def joined(flat: FlatParam, pieces: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
    """Return ``pieces`` of all parameters, laid out as this rank's shard: 1-D in memory order, or None for zeros."""
    result = torch.zeros(flat.layout.shard_numel, dtype=dtype, device=flat.kind.compute_device)
    for part, piece in zip(flat.slices, pieces, strict=True):
        if piece is not None:
            result[part.start : part.stop].copy_(piece)
    return result


class FullParameters:
    """Copies the unsharded parameters and gradients of one handle, and writes changes back to its shards."""

    def __init__(self, handle: FlatParamHandle) -> None:
        self._handle = handle

    def copy_full_precision(self, device: torch.device | None = None) -> dict[int, nn.Parameter]:
        """Return full parameters in the user's dtypes, by ``id`` of the sharded ones. ``device``: None: the compute device.

        Communicates, unless the parameters are unsharded in the user's dtype already.
        """
        copies = {}
        for flat in self._handle.flats:
            if flat.kind.buffer_dtype is not flat.kind.dtype or self._handle.is_sharded:
                full = gather_full_precision(flat)
            else:
                full = [_copy(c, w, device) for c, w in zip(flat.unsharded.params, flat.wrappings, strict=True)]
            for param, value, wrapping in zip(flat.params, full, flat.wrappings, strict=True):
                copies[id(param)] = value if device in (None, value.device) else _copy(value, wrapping, device)
        return copies

    def write_back(self, copies: dict[int, nn.Parameter] | None, with_grads: bool, adopts: bool) -> None:
        """Write this rank's shards of the unsharded parameters, and of their gradients, to the shards.

        ``copies``: write those instead, see ``copy_full_precision``. ``adopts``: adopt conversions by the user first.
        """
        flats, given = self._handle.flats, self._handle.user_changes.conversions(copies)
        shown = [f.unsharded.params if copies is None else [copies[id(p)] for p in f.params] for f in flats]
        values = [[v.detach().clone() if given else v for v in of_flat] for of_flat in shown]
        grads = [[v.grad for v in of_flat] for of_flat in shown]
        if given and adopts:
            self._handle.adopt(given)
        for flat, of_flat, held, gradients in zip(flats, values, self._handle.gradients.flats, grads, strict=True):
            flat.write_back(None if copies is None and not given else flat.cut(of_flat))
            if with_grads:
                _write_back_gradients(held, gradients)

    def gather_gradients(self, copies: dict[int, nn.Parameter] | None) -> None:
        """Gather full gradients and set them on the unsharded parameters or their ``copies``. Communicates."""
        for flat, grads in zip(self._handle.flats, self._handle.gradients.flats, strict=True):
            if not flat.kind.is_trainable:  # but frozen parameters are included: they may have an old gradient
                continue
            computes, full = flat.unsharded.params, _gather_full_gradients(grads)
            for param, compute, wrapping, grad in zip(flat.params, computes, flat.wrappings, full, strict=True):
                target = compute if copies is None else copies[id(param)]
                if grad is not None and wrapping is not None:
                    grad = wrapping.wrap_gradient(grad)
                _set_gradient(target, None if grad is None else grad.to(target.device))

    def drop_full_gradients(self) -> None:
        """Undo ``gather_gradients``."""
        for flat in self._handle.flats:
            for compute in flat.unsharded.params:
                compute.grad = None


def _set_gradient(target: nn.Parameter, grad: torch.Tensor | None) -> None:
    if grad is not None and target.grad_dtype not in (None, grad.dtype):
        target.grad_dtype = grad.dtype
    target.grad = grad


def gather_full_precision(flat: FlatParam) -> list[nn.Parameter]:
    """Return the full parameters in their own dtype, in new memory."""
    own = flat.on_compute_device()
    full = Gathering(flat, own.clone() if flat.holds_all and own is flat.shard else own).wait()
    result = []
    for param, value, wrapping in zip(flat.params, full, flat.wrappings, strict=True):
        copy = nn.Parameter(value if wrapping is None else wrapping.wrap(value), param.requires_grad)
        if isinstance(wrapping, TensorSubclass):
            for name, attribute in param.__dict__.items():
                copy.__dict__.setdefault(name, attribute)
        else:
            copy.__dict__ = param.__dict__
        result.append(copy)
    return result


def _gather_full_gradients(gradients: FlatGradients) -> list[torch.Tensor | None]:
    """Gather full gradients, in the parameters' shapes. None for a parameter that has no gradient on any rank."""
    flat = gradients.flat
    device, local = flat.kind.compute_device, flat.local_grads()
    present = torch.zeros(flat.layout.world_size, len(local), dtype=torch.uint8, device=device)
    here = present[flat.ranks.rank]
    here.copy_(torch.tensor([grad is not None for grad in local], dtype=torch.uint8, device="cpu"))
    if not flat.holds_all:
        gather_exactly(flat, present.view(-1), here).wait()
    seen: list[int] = present.amax(0).tolist()
    if not any(seen):
        return [None] * len(seen)
    with plainly():
        pieces = [
            grad if grad is None or len(grad.shape) == 1 else in_memory_order(grad, info.stride)
            for grad, info in zip(local, flat.layout.params, strict=True)
        ]
        mine = joined(flat, pieces, gradients.dtypes.of_all)
    full = Gathering(flat, mine).wait()
    of_each = zip(full, seen, itertools.cycle(gradients.dtypes.of_each))
    return [grad.to(dtype) if somewhere else None for grad, somewhere, dtype in of_each]


def _write_back_gradients(gradients: FlatGradients, full: list[torch.Tensor | None]) -> None:
    """Write this rank's shards of full gradients to ``.grad``: the inverse of ``_gather_full_gradients``."""
    flat = gradients.flat
    of_each = zip(flat.params, full, flat.local_grads(), itertools.cycle(gradients.dtypes.of_each), strict=False)
    for index, (param, grad, held, dtype) in enumerate(of_each):
        if grad is None:
            param.grad = None
            continue
        info, part, wrapping = flat.layout.params[index], flat.slices[index], flat.wrappings[index]
        plain = grad.detach() if wrapping is None else wrapping.local_gradient(grad.detach())
        mine = in_memory_order(plain, info.stride)[part.offset : part.offset + part.numel]
        if held is None:
            param.grad = flat.shaped(index, mine).to(flat.kind.device, dtype, copy=True)
        else:
            held.copy_(flat.shaped(index, mine))


def _copy(param: nn.Parameter, wrapping: Wrapping | None, device: torch.device | None = None) -> nn.Parameter:
    """Return a copy of a full parameter without its gradient, on ``device`` or on its own if None."""
    plain = param.detach() if wrapping is None else wrapping.unwrap(param)
    value = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=device or plain.device).copy_(
        plain
    )
    return nn.Parameter(value if wrapping is None else wrapping.wrap(value), param.requires_grad)
