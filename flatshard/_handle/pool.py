"""The memory that collectives read and write: a storage of its own for each flat parameter, or a buffer that units share.

Usually a unit's storage is resized between zero and full, and the device's allocator places it (:class:`FlatBuffer`).

[Note: Static buffers]
CUDA graphs, NCCL's registered buffers and symmetric memory need a few buffers with fixed addresses. With
``static_buffers=True``, or with collectives that have an ``allocate``, buffers come from a :class:`Pool`. Each is created
once, and kept.

- *Gathered parameters.* A flat parameter is bound to one buffer at its first unshard and keeps it, because autograd has saved
  views of that storage by the time of backward. It gets the free buffer that has been free for longest, if another free one
  remains. So a unit and the unit that is prefetched next never share a buffer. A model of equal blocks takes two buffers for
  the blocks, and one for the outermost unit, which stays unsharded. This much is in use at a time anyway. If another unit
  is using the buffer, because units now run in a different order, the unit is bound again, unless a graph of it is alive.
  Until then it is not gathered ahead. So all ranks must bind alike: the units of one module tree share buffers, and no others
  do. rank_group.py, [Note: Ranks collect garbage at different times]
- *Reduction inputs* take any free buffer each time, because autograd has no views of them.

Streams: a buffer for gathered parameters is written on the gather stream, which waits for whatever was freed before. A buffer
for inputs belongs to the stream that it was created on, like memory of the device's allocator: backward writes an input on
that stream, and reuses it after that stream has waited for the reduction.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from flatshard._comm.collectives import Collectives
from flatshard._comm.runtime import Runtime

_clock = itertools.count()


class FlatBuffer:
    """A buffer, used by one flat parameter at a time. ``free`` frees its memory."""

    __slots__ = ("_nbytes", "_storage", "flat", "user")

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat  # 1-D
        self._storage, self._nbytes = flat.untyped_storage(), flat.nbytes
        self.user: object | None = None

    # An interrupt in between must not leave memory without a user: it would not be freed.

    def take(self, user: object) -> None:
        """Allocate the memory, for ``user``."""
        self.user = user
        self._storage.resize_(self._nbytes)

    def follow(self, before: FlatBuffer) -> None:
        """Replace ``before``, another buffer over the same memory."""
        self.user = before.user

    def free(self) -> None:
        """Free the memory."""
        self._storage.resize_(0)
        self.user = None


class StaticBuffer(FlatBuffer):
    """A buffer that keeps its memory while it is free."""

    __slots__ = ("freed", "stream")

    def __init__(self, flat: torch.Tensor, stream: Any) -> None:
        super().__init__(flat)
        self.stream = stream  # that `flat` was allocated on; None on CPU
        self.freed = 0  # the buffer that has been free for longest has the lowest number

    def take(self, user: object) -> None:
        """Mark the buffer as used by ``user``."""
        assert self.user is None or self.user is user
        self.user = user

    def free(self) -> None:
        """Mark the buffer as free. If collectives on side streams use it: after ``Runtime.before_free``."""
        self.user, self.freed = None, next(_clock)


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
        free = [s for s in fit if s.user is None]
        if len(free) > 1:
            return min(free, key=lambda buffer: buffer.freed)
        return self._add(self._for_parameters, numel, dtype)

    def buffer_for_input(self, numel: int, dtype: torch.dtype) -> StaticBuffer:
        """Return a free buffer for the input of one reduction."""
        stream = self.runtime.current_stream
        for buffer in self._inputs:
            fits = buffer.flat.dtype is dtype and buffer.flat.numel() >= numel
            if fits and buffer.stream == stream and buffer.user is None:
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
