"""All values of one flat parameter, while they are gathered: the buffer, and the parameters that modules compute with.

- ``flat``: 1-D, ``padded_numel`` elements in the compute dtype. One tensor whose *storage* is resized between zero and
  full. It is the all-gather's output, and the parameters' memory at once: no copy-in, no copy-out.
- ``computes``: one leaf per parameter, in its original shape and stride, aliasing its range of ``flat``. Autograd sees these.
  Of a DTensor or another tensor subclass: one whose tensors inside do so.

[Note: .data does not share a version counter]
``compute.data = view`` aliases memory without sharing the buffer's version counter, while ``nn.Parameter(view)`` would
share it. So refilling the buffer for backward is invisible to autograd's check for in-place changes, as it must be; and
the storage (not another one: autograd may have saved a view such as ``weight.t()``) is refilled with the same values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from flatshard._handle.adapters.tensor_subclass import TensorSubclass, wrapping_of
from flatshard._handle.layout import FlatLayout
from flatshard._handle.pool import BufferPool, Slot

# What every gloo and NCCL build can send as it is. Anything else travels as bytes.
_WIRE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int32, torch.int64)


class UnshardedBuffer:
    """The unsharded values of one flat parameter. Without storage between ``free`` and ``allocate``."""

    def __init__(
        self, layout: FlatLayout, rank: int, originals: Sequence[nn.Parameter], pool: BufferPool | None = None
    ) -> None:
        """``place`` comes next.

        ``originals``: the user's parameters, whose attributes the compute parameters share. ``pool``: whose memory to use;
        None: storage of its own, resized. pool.py, [Note: Static buffers]
        """
        self.layout = layout
        self.rank = rank
        self._pool = pool
        self._slot: Slot | None = None  # of the pool, from the first ``allocate`` on
        self.computes = tuple(map(self._make_compute, originals))

    @staticmethod
    def _make_compute(param: nn.Parameter) -> nn.Parameter:
        wrapping = wrapping_of(param)
        empty = torch.empty(0, dtype=param.dtype, device=param.device)
        if wrapping is not None and not isinstance(
            wrapping, TensorSubclass
        ):  # that is made by `place`, over true memory
            empty = wrapping.wrap(empty)
        compute = nn.Parameter(empty, param.requires_grad)
        compute.__dict__ = param.__dict__  # attributes set on the user's parameter are seen on both, now and later
        return compute

    def place(self, dtype: torch.dtype, device: torch.device, alias: torch.Tensor | None) -> None:
        """Build every view once, then free the storage. ``alias``: the local shard, where that is the whole."""
        self.is_alias = alias is not None
        flat = alias if alias is not None else torch.empty(self.layout.padded_numel, dtype=dtype, device=device)
        self._slot = None
        self._point_at(flat)
        self.free()

    def _point_at(self, flat: torch.Tensor) -> None:
        """Have everything show the memory of ``flat``."""
        self.flat, layout = flat, self.layout
        dtype, device = flat.dtype, flat.device
        for info, compute in zip(layout.params, self.computes, strict=True):
            view = self.flat.as_strided(info.shape, info.stride, info.start)
            if (wrapping := wrapping_of(compute)) is not None:
                plain = torch.empty(0, dtype=dtype, device=device)
                plain.data = view  # compiled graphs save what is inside a subclass
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
        """Take other memory of the pool next time. No graph has views of what it had."""
        self._slot = None

    def leave_memory(self) -> None:
        """Take other memory from now on: collectives may use this for as long as their group lives."""
        if self._slot is not None and self._slot.user is self:
            assert self._pool is not None
            self._pool.leave(self._slot)
        self.place(self.flat.dtype, self.flat.device, None)

    @property
    def is_taken(self) -> bool:
        """Whether another flat parameter is using the memory that this one needs. pool.py, [Note: Static buffers]"""
        return self._slot is not None and self._slot.user not in (None, self)

    def allocate(self, shard: torch.Tensor | None) -> None:
        """Take storage, and put this rank's ``shard`` in its place there, cast as need be; None: somebody else will."""
        if self._pool is None:
            self._storage.resize_(self.flat.nbytes)
        else:
            self._take_memory()
        if shard is not None:
            self.own.copy_(shard)

    def as_sent(self, shard: torch.Tensor) -> torch.Tensor | None:
        """``shard`` as ``own_wire`` is; None if it would have to be cast or moved for that."""
        if shard.dtype is not self.flat.dtype or shard.device != self.flat.device:
            return None
        return shard if self.own_wire is self.own else shard.view(torch.uint8)

    def take_back_moved(self) -> bool:
        """Have parameters whose ``.data`` the module set to another tensor lie in the buffer again, with its values.

        Returns whether there were any. Not those of tensor subclasses.
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

    def inner_wire(self, size: int, rank: int) -> torch.Tensor:
        """Number ``rank`` of ``size`` equal parts, as it is sent."""
        return self.wire.view(size, -1)[rank]

    def allocate_inner(self, part: torch.Tensor, size: int, rank: int) -> torch.Tensor:
        """Take storage, and put ``part`` into its place there, which is returned."""
        self._take_memory()
        return self.inner_wire(size, rank).copy_(part)

    def free(self) -> None:
        """Give the storage back. Views stay valid, and show nothing until the next ``allocate``."""
        if self._slot is not None:
            if self._slot.user is self:
                assert self._pool is not None
                self._pool.free(self._slot)
        elif not self.is_alias:
            self._storage.resize_(0)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether plain ``tensor`` lies in the storage."""
        if self._slot is not None and self._slot.user is not self:
            return False
        return tensor.layout is torch.strided and tensor.untyped_storage() is self._storage

    @property
    def holds_memory(self) -> bool:
        """Whether it has storage now."""
        return self._slot.user is self if self._slot is not None else self._storage.nbytes() > 0

    @property
    def nbytes(self) -> int:
        """Bytes of storage that it has now, and shares with nobody."""
        if self._slot is not None:
            return self.flat.nbytes if self._slot.user is self else 0
        return 0 if self.is_alias else self._storage.nbytes()
