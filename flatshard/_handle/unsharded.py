"""The values of one flat parameter while it is unsharded: the buffer, and the parameters that modules compute with.

- ``flat``: 1-D, ``padded_numel`` elements in the compute dtype: one tensor whose *storage* is resized between zero and full.
  The all-gather writes into it, and the parameters are views of it: no copy-in, no copy-out.
- ``params``: a leaf for each parameter, in its original shape and stride, aliasing its range of ``flat``. Autograd sees
  them. For a DTensor or another tensor subclass, the tensors inside the leaf alias ``flat``.

[Note: .data does not share a version counter]
``compute.data = view`` aliases memory without sharing the buffer's version counter. ``nn.Parameter(view)`` would share it.
So autograd's check for in-place changes does not notice that the buffer is refilled for backward. This is correct, because
the values are the same. The storage must be the same, too: autograd may have saved a view of it, such as ``weight.t()``.

[Note: Closed to autograd]
Backward may enter a unit by a tensor that flatshard has not seen, such as a loss that the forward kept in a list. Then
autograd reads saved parameters whose values are not there: memory without contents while an all-gather is in flight, values
of another unit in a static buffer, or no memory at all, which ends the process. So after a forward that made a graph, from
the moment that the memory is freed until the next gather has ended, the version counters of all unsharded parameters are
raised, and autograd refuses to read them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version

from flatshard._handle.adapters.tensor_subclass import TensorSubclass
from flatshard._handle.adapters.wrapping import Wrapping
from flatshard._handle.layout import FlatLayout
from flatshard._handle.planned import Kind
from flatshard._handle.pool import FlatBuffer
from flatshard._handle.unit_ranks import UnitRanks

_version = operator.attrgetter("_version")  # read for every parameter in every step, so the loop runs in C
# Private API: the public `increment_version` only goes up.
_set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)

# Dtypes that every gloo and NCCL build can send. Others are sent as bytes.
_WIRE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int32, torch.int64)


def as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``tensor`` in a dtype that every backend can send."""
    return tensor if tensor.dtype in _WIRE_DTYPES else tensor.view(torch.uint8)


class UnshardedBuffer:
    """The unsharded values of one flat parameter. It has no storage between ``free`` and ``allocate``."""

    def __init__(
        self,
        layout: FlatLayout,
        kind: Kind,
        ranks: UnitRanks,
        shard: torch.Tensor,
        originals: Sequence[nn.Parameter],
        wrappings: Sequence[Wrapping | None],
    ) -> None:
        """
        Args:
            layout: of the flat parameter.
            kind: its dtypes and devices.
            ranks: the ranks that it is sharded over.
            shard: this rank's shard.
            originals: the user's parameters. The unsharded parameters share their attributes.
            wrappings: each parameter's wrapping of the plain tensor in the buffer, or None for a plain parameter.
        """
        self._layout, self._ranks = layout, ranks
        self._wrappings = wrappings
        self._pool = ranks.pool  # provides the memory, or None if the buffer has memory of its own
        # For memory of its own; a feature may replace it.
        self._make_buffer: Callable[[torch.Tensor], FlatBuffer] = FlatBuffer
        self._is_closed = False
        self.kept_own: torch.Tensor | None = None  # see `keep_own`
        device = kind.compute_device
        self.params = tuple([self._make_param(index, param, device) for index, param in enumerate(originals)])
        self._versions = tuple(map(_version, self.params))  # at the last `was_changed` or `close`
        self.place(kind, shard)

    def _make_param(self, index: int, param: nn.Parameter, device: torch.device) -> nn.Parameter:
        wrapping = self._wrappings[index]
        empty = torch.empty(0, dtype=param.dtype, device=device)
        if wrapping is not None and not isinstance(wrapping, TensorSubclass):  # `place` builds these, over real memory
            empty = wrapping.wrap(empty)
        compute = nn.Parameter(empty, param.requires_grad)
        compute.__dict__ = param.__dict__  # one dict: attributes set on the user's parameter, now or later, are on both
        return compute

    def rename(self, layout: FlatLayout) -> None:
        """Adopt ``layout``, which has the parameters' new FQNs."""
        self._layout = layout

    def move(self, layout: FlatLayout, ranks: UnitRanks, kind: Kind, shard: torch.Tensor) -> None:
        """Build every view for other ranks: see ``FlatParam.move``."""
        self._layout, self._ranks, self._pool = layout, ranks, ranks.pool
        self.place(kind, shard)

    def place(self, kind: Kind, shard: torch.Tensor) -> None:
        """Build every view, for the flat parameter's dtype and device, then free the storage."""
        numel = self._layout.padded_numel
        self.is_alias = self._ranks.is_whole and kind.is_one  # the buffer is the shard
        self._buffer: FlatBuffer | None = None  # of a pool: from the first `allocate` on
        self.allocates_late = False  # whether collectives may call `take` instead of `allocate` before
        if self.is_alias:
            self._point_at(shard)
            return
        own = FlatBuffer(torch.empty(numel, dtype=kind.compute_dtype, device=kind.compute_device))
        self._point_at(own.flat)
        own.free()
        if self._pool is None:
            self._buffer = self._make_buffer(own.flat)
            self.allocates_late = self.wire is self.flat

    def use_buffers(self, make: Callable[[torch.Tensor], FlatBuffer]) -> None:
        """Make buffers for memory of its own by ``make`` from now on. Addresses in use stay the same."""
        self._make_buffer = make
        if self._pool is None and (before := self._buffer) is not None:
            self._buffer = now = make(self.flat)
            if before.user is None:
                now.free()
            else:
                now.follow(before)

    def use_buffers_of(self, other: UnshardedBuffer) -> None:
        """Make buffers as ``other`` does: see ``use_buffers``."""
        self.use_buffers(other._make_buffer)

    def _point_at(self, flat: torch.Tensor) -> None:
        """Make ``flat`` the buffer, and all tensors views of it."""
        self.flat, layout, rank = flat, self._layout, self._ranks.rank
        dtype, device = flat.dtype, flat.device
        for index, (info, compute) in enumerate(zip(layout.params, self.params, strict=True)):
            view = self.flat.as_strided(info.shape, info.stride, info.start)
            if self._wrappings[index] is not None:
                plain = torch.empty(0, dtype=dtype, device=device)
                plain.data = view  # a tensor of its own: compiled graphs save the tensors inside a subclass
                self._point(index, compute, plain)
                continue
            if compute.dtype is not dtype or compute.device != device:
                compute.data = torch.empty(0, dtype=dtype, device=device)
            compute.data = view
        self.own = self.flat[rank * layout.shard_numel :][: layout.shard_numel]
        self.wire = as_sent(self.flat)
        self._storage = self.flat.untyped_storage()
        each = zip(self.params, layout.params, self._wrappings, strict=True)
        self._plain = [c for c, info, wrapping in each if info.numel and wrapping is None]
        start = self.flat.storage_offset() * self.flat.itemsize
        self._offsets = sum([c.storage_offset() * c.itemsize - start for c in self._plain])

    def _point(self, index: int, compute: nn.Parameter, plain: torch.Tensor) -> None:
        """Make ``compute``, a tensor subclass, use ``plain``."""
        wrapping = self._wrappings[index]
        assert wrapping is not None
        wrapping.point(compute, plain)

    def allocate(self, shard: torch.Tensor | None) -> None:
        """Allocate the storage, and copy this rank's ``shard``, if any, to its place, cast if needed."""
        if self._buffer is None:
            assert self._pool is not None
            self._buffer = self._pool.buffer_for_parameters(self.flat.numel(), self.flat.dtype)
            self._point_at(self._buffer.flat[: self.flat.numel()])
        self._buffer.take(self)
        if shard is not None:
            self.own.copy_(shard)

    def take(self) -> None:
        """Allocate the storage, unless it has been: for collectives that fill it when they end."""
        assert self._buffer is not None
        if self._buffer.user is not self or not self._storage.nbytes():  # a storage that is resized anew is copied
            self._buffer.take(self)

    def keep_own(self) -> None:
        """Keep a copy of this rank's shard until ``free``, as an approximate all-gather has delivered it."""
        self.kept_own = self.own.clone()

    def free(self) -> None:
        """Free the storage. Views stay valid as objects; their values are undefined until the next ``allocate``."""
        self.kept_own = None
        if self._buffer is not None and self._buffer.user is self:
            self._buffer.free()

    def close(self, seen: bool = False) -> None:
        """Have autograd refuse to read the unsharded parameters until ``open``. [Note: Closed to autograd]

        ``seen``: they cannot have changed since the last call of ``was_changed``.
        """
        if not self._is_closed:
            if not seen:
                self._versions = tuple(map(_version, self.params))
            increment_version(self.params)
            self._is_closed = True

    def open(self) -> None:
        """Let autograd read the unsharded parameters again: they have their values."""
        if self._is_closed:
            _set_versions(self.params, self._versions)
            self._is_closed = False

    def unbind(self) -> None:
        """Bind to a free buffer at the next ``allocate``. No graph may have views of the current one."""
        self._buffer = None

    @property
    def is_taken(self) -> bool:
        """Whether another flat parameter is using the pool's buffer of this one. [Note: Static buffers]"""
        return self._buffer is not None and self._buffer.user not in (None, self)

    def was_changed(self) -> bool:
        """Return whether a module changed its own (unsharded) parameters since the last gather or call of this.

        It sees ``p.data = ...``, ``p.detach().mul_()``, and ``p.mul_()`` under ``no_grad``, but not ``p.data.mul_()``: see
        ``assume_changed``. Comparing values instead would read each unit once more in every forward.
        """
        if self._is_closed:
            return False
        before, self._versions = self._versions, tuple(map(_version, self.params))
        return self.adopt_moved() or before != self._versions

    def assume_changed(self) -> None:
        """Make the next ``was_changed`` return True: values may be written without a version counter."""
        if not self._is_closed:
            self._versions = ()

    def adopt_moved(self) -> bool:
        """Copy values that a module gave to unsharded parameters by ``p.data = ...`` to the buffer, and point back to it.

        Returns whether there were any. Tensor subclasses are not checked.
        """
        if not self.is_alias and (self._buffer is None or self._buffer.user is not self):
            return False
        if sum(map(torch.Tensor.data_ptr, self._plain)) == self._offsets + len(self._plain) * self.flat.data_ptr():
            return False
        moved = False
        for info, compute, wrapping in zip(self._layout.params, self.params, self._wrappings, strict=True):
            view = self.flat.as_strided(info.shape, info.stride, info.start)
            if wrapping is None and compute.data_ptr() != view.data_ptr():
                if compute.shape != view.shape:
                    raise RuntimeError(
                        f"parameter {info.fqn!r} was replaced in its unit's forward by a tensor of shape "
                        f"{tuple(compute.shape)}; it has shape {info.shape}. A sharded parameter cannot be resized"
                    )
                view.copy_(compute.detach())
                compute.data = view
                moved = True
        return moved

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor``, plain, is a view of the storage."""
        if (self._buffer is not None and self._buffer.user is not self) or tensor.layout is not torch.strided:
            return False
        start = self.flat.data_ptr()
        if start and not start <= tensor.data_ptr() < start + self.flat.nbytes:  # on meta there are no addresses
            return False
        return tensor.untyped_storage() is self._storage  # slower, as it makes a Python object

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the buffer has now, not counting the local shard."""
        return self.flat.nbytes if self._buffer is not None and self._buffer.user is self else 0
