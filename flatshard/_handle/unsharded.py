"""The values of one flat parameter while it is unsharded: its memory, and the parameters that modules compute with.

- ``flat``: 1-D, ``padded_numel`` elements in the compute dtype: one tensor whose *storage* is resized between zero and full,
  and placed by the device's allocator (:class:`FlatBuffer`), or a buffer that units share (:class:`Pool`).
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
of another unit in a static buffer, or no memory at all, which ends the process. So from the moment that the memory is freed
until the next gather has ended, the version counters of all unsharded parameters are raised, and autograd refuses to read
them. They stay raised if the gather brings other values than before, as after an optimizer's step: a graph of an earlier
forward must not read these. Versions are those of a unit: a step of one of its parameters closes all to such a graph.

[Note: Static buffers]
CUDA graphs, NCCL's registered buffers and symmetric memory need a few buffers with fixed addresses. With
``static_buffers=True``, or with collectives that have an ``allocate``, buffers come from a :class:`Pool`. Each is created
once, and kept.

- *Gathered parameters.* A flat parameter is bound to one buffer at its first unshard and keeps it, because autograd has saved
  views of that storage by the time of backward. It gets the free buffer whose last gather is the oldest, if another free one
  remains. So a unit and the unit that is prefetched next never share a buffer. A model of equal blocks takes two buffers for
  the blocks, and one for the outermost unit, which stays unsharded. This much is in use at a time anyway. If another unit
  is using the buffer, because units now run in a different order, the unit is bound again, unless a graph of it is alive.
  Until then it is not gathered ahead. So all ranks must bind alike. They gather in one order, but one may free a unit later
  than another. So gathers choose the buffer. The units of one module tree share buffers, and no others do:
  rank_group.py, [Note: Ranks collect garbage at different times].
- *Reduction inputs* take any free buffer each time, because autograd has no views of them.

Streams: a buffer for gathered parameters is written on the gather stream, which waits for whatever was freed before. A buffer
for inputs belongs to the stream that it was created on, like memory of the device's allocator: backward writes an input on
that stream, and reuses it after that stream has waited for the reduction.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from flatshard._comm.collectives import Collectives
from flatshard._comm.runtime import Runtime
from flatshard._handle.adapters.tensor_subclass import TensorSubclass
from flatshard._handle.adapters.wrapping import Wrapping
from flatshard._handle.layout import FlatLayout, Kind

_clock = itertools.count()
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


class FlatBuffer:
    """A buffer, used by one flat parameter at a time. ``free`` frees its memory."""

    __slots__ = ("_nbytes", "_storage", "flat", "taken_by")

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat  # 1-D
        self._storage, self._nbytes = flat.untyped_storage(), flat.nbytes
        self.taken_by: object | None = None  # Local to this rank: see `UnshardedMemory.is_blocked`

    # An interrupt in between must not leave memory without a user: it would not be freed.

    def take(self, user: object) -> None:
        """Allocate the memory, for ``user``."""
        self.taken_by = user
        self._storage.resize_(self._nbytes)

    def follow(self, before: FlatBuffer) -> None:
        """Replace ``before``, another buffer over the same memory."""
        self.taken_by = before.taken_by

    def free(self) -> None:
        """Free the memory."""
        self._storage.resize_(0)
        self.taken_by = None


class StaticBuffer(FlatBuffer):
    """A buffer that keeps its memory while it is free."""

    __slots__ = ("stream", "taken_at")

    def __init__(self, flat: torch.Tensor, stream: Any) -> None:
        super().__init__(flat)
        self.stream = stream  # that `flat` was allocated on; None on CPU
        self.taken_at = 0  # increases with every `take` of a buffer

    def take(self, user: object) -> None:
        """Mark the buffer as used by ``user``."""
        assert self.taken_by is None or self.taken_by is user
        self.taken_by, self.taken_at = user, next(_clock)

    def free(self) -> None:
        """Mark the buffer as free. If collectives on side streams use it: after ``Runtime.before_free``."""
        self.taken_by = None


class Pools:
    """The pools of one module tree. Inner units that an earlier call has sharded may have brought some."""

    def __init__(self, inner: Iterable[Pool | None] = ()) -> None:
        self._by_collectives: dict[Collectives, Pool] = {}
        for pool in inner:
            if pool is not None:
                pool.join(self._by_collectives.setdefault(pool.runtime.collectives, pool))

    def of(self, runtime: Runtime, static_buffers: bool) -> Pool | None:
        """Return the pool for units with the collectives of ``runtime``, or None if each unit has memory of its own."""
        if not static_buffers and runtime.capabilities.allocate is None:
            return None
        return self._by_collectives.setdefault(runtime.collectives, Pool(runtime))


class Pool:
    """The buffers of the units of a module tree that share collectives. [Note: Static buffers]"""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._for_parameters: list[StaticBuffer] = []
        self._inputs: list[StaticBuffer] = []

    def join(self, other: Pool) -> None:
        """Share all buffers, also later ones, with ``other``."""
        for mine, shared in ((self._for_parameters, other._for_parameters), (self._inputs, other._inputs)):
            shared.extend(buffer for buffer in mine if buffer not in shared)
        self._for_parameters, self._inputs = other._for_parameters, other._inputs

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a 1-D tensor of ``numel`` elements, with the collectives' ``allocate`` if they have one.

        Raises:
            TypeError: ``allocate`` returned something else. The user gets a ``CollectiveError`` with the unit's name.
        """
        device = self.runtime.device
        if (allocate := self.runtime.capabilities.allocate) is None:
            return torch.empty(numel, dtype=dtype, device=device)
        made = allocate(numel, dtype, device)
        who = f"{type(self.runtime.collectives).__name__}.allocate({numel}, {dtype}, {str(device)!r})"
        if made.shape != (numel,) or made.dtype is not dtype or made.device != device or not made.is_contiguous():
            raise TypeError(
                f"{who} returned a tensor of shape {tuple(made.shape)}, {made.dtype} on {made.device}: it must be 1-D and "
                "contiguous, with the requested size, dtype and device"
            )
        return made

    def buffer_for_parameters(self, numel: int, dtype: torch.dtype) -> StaticBuffer:
        """Return a free buffer for the gathered values of one flat parameter, which keeps it. [Note: Static buffers]"""
        fit = [s for s in self._for_parameters if s.flat.dtype is dtype and numel <= s.flat.numel() <= 2 * numel]
        free = [s for s in fit if s.taken_by is None]
        if len(free) > 1:
            return min(free, key=lambda buffer: buffer.taken_at)
        return self._add(self._for_parameters, numel, dtype)

    def buffer_for_input(self, numel: int, dtype: torch.dtype) -> StaticBuffer:
        """Return a free buffer for the input of one reduction."""
        stream = self.runtime.current_stream
        for buffer in self._inputs:
            fits = buffer.flat.dtype is dtype and buffer.flat.numel() >= numel
            if fits and buffer.stream == stream and buffer.taken_by is None:
                return buffer
        return self._add(self._inputs, numel, dtype)

    def _add(self, buffers: list[StaticBuffer], numel: int, dtype: torch.dtype) -> StaticBuffer:
        with torch.inference_mode(False):  # the next user may be no inference
            buffers.append(StaticBuffer(self.allocate(numel, dtype), self.runtime.current_stream))
        return buffers[-1]

    @property
    def buffers(self) -> list[StaticBuffer]:
        """All buffers, for parameters and for inputs."""
        return [*self._for_parameters, *self._inputs]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.flat.nbytes for buffer in self.buffers)


class UnshardedBuffer:
    """The unsharded values of one flat parameter. It has no storage between ``free`` and ``allocate``."""

    def __init__(
        self,
        layout: FlatLayout,
        rank: int,
        kind: Kind,
        pool: Pool | None,
        shard: torch.Tensor,
        originals: Sequence[nn.Parameter],
        wrappings: Sequence[Wrapping | None],
    ) -> None:
        """
        Args:
            layout: of the flat parameter.
            rank: the number of this rank's shard.
            kind: its dtypes and devices.
            pool: provides the memory, or None if the buffer has memory of its own.
            shard: this rank's shard.
            originals: the user's parameters. The unsharded parameters share their attributes.
            wrappings: each parameter's wrapping of the plain tensor in the buffer, or None for a plain parameter.
        """
        self._layout, self._rank, self._pool = layout, rank, pool
        self._wrappings = wrappings
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

    def move(self, layout: FlatLayout, rank: int, kind: Kind, pool: Pool | None, shard: torch.Tensor) -> None:
        """Build every view for other ranks: see ``FlatParam.move``."""
        self._layout, self._rank, self._pool = layout, rank, pool
        self.place(kind, shard)

    def place(self, kind: Kind, shard: torch.Tensor) -> None:
        """Build every view, for the flat parameter's dtype and device, then free the storage."""
        numel = self._layout.padded_numel
        self.is_alias = self._layout.world_size == 1 and kind.is_one  # the buffer is the shard
        self._buffer: FlatBuffer | None = None  # of a pool: from the first `allocate` on
        self.allocates_late = False  # whether collectives may call `ensure_memory` instead of `allocate` before
        if self.is_alias:
            self.open()  # it is never gathered, so nothing else opens it
            self._point_at(shard)
            return
        own = FlatBuffer(torch.empty(numel, dtype=kind.buffer_dtype, device=kind.compute_device))
        self._point_at(own.flat)
        own.free()
        if self._pool is None:
            self._buffer = self._make_buffer(own.flat)
            self.allocates_late = self.gather_output is self.flat

    def use_buffers(self, make: Callable[[torch.Tensor], FlatBuffer]) -> None:
        """Make buffers for memory of its own by ``make`` from now on. Addresses in use stay the same."""
        self._make_buffer = make
        if self._pool is None and (before := self._buffer) is not None:
            self._buffer = now = make(self.flat)
            if before.taken_by is None:
                now.free()
            else:
                now.follow(before)

    def use_buffers_of(self, other: UnshardedBuffer) -> None:
        """Make buffers as ``other`` does: see ``use_buffers``."""
        self.use_buffers(other._make_buffer)

    def _point_at(self, flat: torch.Tensor) -> None:
        """Make ``flat`` the buffer, and all tensors views of it."""
        self.flat, layout, rank = flat, self._layout, self._rank
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
        self.gather_output = as_sent(self.flat)
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

    def ensure_memory(self) -> None:
        """Allocate the storage, unless it has been: for collectives that fill it when they end."""
        assert self._buffer is not None
        if self._buffer.taken_by is not self or not self._storage.nbytes():  # a storage that is resized anew is copied
            self._buffer.take(self)

    def keep_own(self) -> None:
        """Keep a copy of this rank's shard until ``free``, as an approximate all-gather has delivered it."""
        self.kept_own = self.own.clone()

    def free(self, seen: bool = False) -> None:
        """Free the storage, and close it to autograd. Views stay valid as objects.

        ``seen``: the parameters cannot have changed since the last call of ``was_changed``.
        """
        self.kept_own = None
        if self._buffer is not None and self._buffer.taken_by is self:
            self.close(seen)
            self._buffer.free()

    def close(self, seen: bool = False) -> None:
        """Have autograd refuse to read the unsharded parameters until ``open``. [Note: Closed to autograd]

        ``seen``: they cannot have changed since the last call of ``was_changed``.
        """
        if not self._is_closed:
            if not seen or not self._versions:  # `assume_changed` drops them
                self._versions = tuple(map(_version, self.params))
            increment_version(self.params)
            self._is_closed = True

    def open(self, to_earlier: bool = True) -> None:
        """Let autograd read the unsharded parameters again: they have their values.

        ``to_earlier``: also in graphs from before ``close``. The values are the same.
        """
        if not to_earlier:
            if not self._is_closed:
                increment_version(self.params)
            self._versions = tuple(map(_version, self.params))
        elif self._is_closed:
            _set_versions(self.params, self._versions)
        self._is_closed = False

    def unbind(self) -> None:
        """Bind to a free buffer at the next ``allocate``. No graph may have views of the current one."""
        self._buffer = None

    @property
    def is_taken(self) -> bool:
        """Whether another flat parameter is using the pool's buffer of this one. [Note: Static buffers]"""
        return self._buffer is not None and self._buffer.taken_by not in (None, self)

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
        if not self.is_alias and (self._buffer is None or self._buffer.taken_by is not self):
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
        if (self._buffer is not None and self._buffer.taken_by is not self) or tensor.layout is not torch.strided:
            return False
        start = self.flat.data_ptr()
        if start and not start <= tensor.data_ptr() < start + self.flat.nbytes:  # on meta there are no addresses
            return False
        return tensor.untyped_storage() is self._storage  # slower, as it makes a Python object

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the buffer has now, not counting the local shard."""
        return self.flat.nbytes if self._buffer is not None and self._buffer.taken_by is self else 0
