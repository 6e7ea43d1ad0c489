"""All values of one flat parameter while it is unsharded: the buffer, and the parameters that modules compute with.

- ``flat``: 1-D, ``padded_numel`` elements in the compute dtype. It is one tensor whose *storage* is resized between zero
  and full. The all-gather writes into it, and the parameters are views of it: no copy-in, no copy-out.
- ``computes``: one leaf per parameter, in its original shape and stride, aliasing its range of ``flat``. Autograd sees
  these. For a DTensor or another tensor subclass, the tensors inside the leaf alias ``flat``.

[Note: .data does not share a version counter]
``compute.data = view`` aliases memory without sharing the buffer's version counter. ``nn.Parameter(view)`` would share it.
So autograd's check for in-place changes does not notice that the buffer is refilled for backward. This is correct, because
the values are the same. The storage must be the same too: autograd may have saved a view of it, such as ``weight.t()``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from flatshard._handle.adapters.tensor_subclass import TensorSubclass, wrapping_of
from flatshard._handle.layout import FlatLayout
from flatshard._handle.pool import BufferPool, Slot

# Dtypes that every gloo and NCCL build can send. Others are sent as bytes.
_WIRE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int32, torch.int64)


class UnshardedBuffer:
    """The unsharded values of one flat parameter. It has no storage between ``free`` and ``allocate``."""

    def __init__(
        self,
        layout: FlatLayout,
        rank: int,
        originals: Sequence[nn.Parameter],
        pool: BufferPool | None,
        device: torch.device,
    ) -> None:
        """Call ``place`` next.

        ``originals``: the user's parameters; the compute parameters share their attributes. ``pool``: provides the memory;
        None: the buffer has its own storage, which is resized. pool.py, [Note: Static buffers] ``device``: of the compute
        parameters.
        """
        self.layout = layout
        self.rank = rank
        self._pool = pool
        self._slot: Slot | None = None  # the pool's slot, from the first ``allocate`` on
        self.computes = tuple([self._make_compute(param, device) for param in originals])

    @staticmethod
    def _make_compute(param: nn.Parameter, device: torch.device) -> nn.Parameter:
        wrapping = wrapping_of(param)
        empty = torch.empty(0, dtype=param.dtype, device=device)
        if wrapping is not None and not isinstance(wrapping, TensorSubclass):  # `place` builds these, over real memory
            empty = wrapping.wrap(empty)
        compute = nn.Parameter(empty, param.requires_grad)
        compute.__dict__ = param.__dict__  # one dict: attributes set on the user's parameter, now or later, are on both
        return compute

    def place(self, dtype: torch.dtype, device: torch.device, alias: torch.Tensor | None) -> None:
        """Build every view, then free the storage. ``alias``: the local shard, if it is the whole flat parameter."""
        self.is_alias = alias is not None
        flat = alias if alias is not None else torch.empty(self.layout.padded_numel, dtype=dtype, device=device)
        self._slot = None
        self._point_at(flat)
        self.free()

    def _point_at(self, flat: torch.Tensor) -> None:
        """Make ``flat`` the buffer, and all tensors views of it."""
        self.flat, layout = flat, self.layout
        dtype, device = flat.dtype, flat.device
        for info, compute in zip(layout.params, self.computes, strict=True):
            view = self.flat.as_strided(info.shape, info.stride, info.start)
            if (wrapping := wrapping_of(compute)) is not None:
                plain = torch.empty(0, dtype=dtype, device=device)
                plain.data = view  # a tensor of its own: compiled graphs save the tensors inside a subclass
                wrapping.point(compute, plain)
                continue
            if compute.dtype is not dtype or compute.device != device:
                compute.data = torch.empty(0, dtype=dtype, device=device)
            compute.data = view
        self.own = self.flat[self.rank * layout.shard_numel :][: layout.shard_numel]
        as_wire = dtype not in _WIRE_DTYPES
        self.wire, self.own_wire = (
            (self.flat.view(torch.uint8), self.own.view(torch.uint8)) if as_wire else (self.flat, self.own)
        )
        self._storage = self.flat.untyped_storage()
        self._plain = [
            c for c, info in zip(self.computes, layout.params, strict=True) if info.numel and wrapping_of(c) is None
        ]
        self._offsets = sum([c.storage_offset() * c.itemsize for c in self._plain]) - len(self._plain) * (
            self.flat.storage_offset() * self.flat.itemsize
        )

    def _take_memory(self) -> None:
        if self._pool is None or self.is_alias:
            self._storage.resize_(self.flat.nbytes)
            return
        if self._slot is None:
            self._slot = self._pool.bind(self.flat.numel(), self.flat.dtype)
            self._point_at(self._slot.flat[: self.flat.numel()])
        self._slot.take(self)

    def unbind(self) -> None:
        """Bind to another slot of the pool next time. No graph may have views of the current slot."""
        self._slot = None

    def leave_memory(self) -> None:
        """Stop using the current memory without freeing it: collectives may use it as long as their group exists."""
        if self._slot is not None and self._slot.user is self:
            assert self._pool is not None
            self._pool.leave(self._slot)
        self.place(self.flat.dtype, self.flat.device, None)

    @property
    def is_taken(self) -> bool:
        """Whether another flat parameter is using the pool's slot of this one. pool.py, [Note: Static buffers]"""
        return self._slot is not None and self._slot.user not in (None, self)

    def allocate(self, shard: torch.Tensor | None) -> None:
        """Allocate the storage, and copy this rank's ``shard`` to its place, cast if needed. None: without the copy."""
        if self._pool is None:
            self._storage.resize_(self.flat.nbytes)
        else:
            self._take_memory()
        if shard is not None:
            self.own.copy_(shard)

    def as_sent(self, shard: torch.Tensor) -> torch.Tensor | None:
        """``shard`` in the dtype of ``own_wire``, without a copy. None if it would have to be cast or moved."""
        if shard.dtype is not self.flat.dtype or shard.device != self.flat.device:
            return None
        return shard if self.own_wire is self.own else shard.view(torch.uint8)

    def take_back_moved(self) -> bool:
        """If the module set the ``.data`` of compute parameters, copy the new values to the buffer, and point back to it.

        Returns whether there were such parameters. Tensor subclasses are not checked.
        """
        if not self.holds_memory:
            return False
        if sum(map(torch.Tensor.data_ptr, self._plain)) == self._offsets + len(self._plain) * self.flat.data_ptr():
            return False
        moved = False
        for info, compute in zip(self.layout.params, self.computes, strict=True):
            view = self.flat.as_strided(info.shape, info.stride, info.start)
            if wrapping_of(compute) is None and compute.data_ptr() != view.data_ptr():
                if compute.shape != view.shape:
                    raise RuntimeError(
                        f"parameter {info.fqn!r} was replaced in its unit's forward by a tensor of shape "
                        f"{tuple(compute.shape)}; it has shape {info.shape}. A sharded parameter cannot be resized"
                    )
                view.copy_(compute.detach())
                compute.data = view
                moved = True
        return moved

    def free(self) -> None:
        """Free the storage. Views stay valid as objects; their values are undefined until the next ``allocate``."""
        if self._slot is not None:
            if self._slot.user is self:
                assert self._pool is not None
                self._pool.free(self._slot)
        elif not self.is_alias:
            self._storage.resize_(0)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` (plain) is a view of the storage."""
        if self._slot is not None and self._slot.user is not self:
            return False
        return tensor.layout is torch.strided and tensor.untyped_storage() is self._storage

    @property
    def holds_memory(self) -> bool:
        """Whether the buffer has storage now."""
        return self._slot.user is self if self._slot is not None else self._storage.nbytes() > 0

    @property
    def nbytes(self) -> int:
        """Bytes of storage that the buffer has now, not counting the local shard."""
        if self._slot is not None:
            return self.flat.nbytes if self._slot.user is self else 0
        return 0 if self.is_alias else self._storage.nbytes()
