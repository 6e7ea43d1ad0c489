"""The input of one flat parameter's reduction, with a view for each parameter's gradient.

It is a tensor of ``padded_numel`` elements, laid out as the unsharded buffer. It has memory from the time when a backward's
gradients are complete to the end of their reduction. :func:`make_input` chooses where this memory comes from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flatshard._handle.layout import FlatLayout
from flatshard._handle.pool import BufferPool, Slot

if TYPE_CHECKING:
    from flatshard._handle.flat_param import FlatParam

_Views = tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]


def views_of(flat: torch.Tensor, layout: FlatLayout) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each parameter's slot in ``flat``, in the parameter's shape and stride, and the padding between them."""
    slots = [flat.as_strided(info.shape, info.stride, info.start) for info in layout.params]
    return slots, [flat[start:stop] for start, stop in layout.gaps()]


class ReductionInput:
    """The input. This class resizes the storage of one permanent tensor per dtype; subclasses get memory elsewhere."""

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._known: dict[object, _Views] = {}  # by dtype (and address): the tensors used so far, with their views
        self._nothing: _Views = torch.empty(0, device=device), [], []
        self.flat, self.slots, self.gaps = self._nothing

    def allocate(self, dtype: torch.dtype) -> None:
        """Allocate the memory, and zero the padding."""
        self._take(dtype)
        if self.gaps:
            torch._foreach_zero_(self.gaps)

    def _take(self, dtype: torch.dtype) -> None:
        if dtype not in self._known:
            self._know(dtype, torch.empty(self._layout.padded_numel, dtype=dtype, device=self._device))
        self.flat, self.slots, self.gaps = self._known[dtype]
        self.flat.untyped_storage().resize_(self.flat.nbytes)

    def _know(self, key: object, flat: torch.Tensor) -> None:
        self._known[key] = flat, *views_of(flat, self._layout)

    def free(self) -> None:
        """Free the memory. Idempotent."""
        self.flat.untyped_storage().resize_(0)

    def leave(self) -> None:
        """Stop using the current memory without freeing it: collectives may use it as long as their group exists."""
        self._known.clear()
        self.flat, self.slots, self.gaps = self._nothing


class NewInput(ReductionInput):
    """A new tensor each time, for parameters that are not sharded: it is all-reduced in place and becomes the gradients."""

    def __init__(self, layout: FlatLayout, device: torch.device, pool: BufferPool | None) -> None:
        super().__init__(layout, device)
        self._pool = pool

    def _take(self, dtype: torch.dtype) -> None:
        numel = self._layout.padded_numel
        if self._pool is None:
            self.flat = torch.empty(numel, dtype=dtype, device=self._device)
        else:
            self.flat = self._pool.allocate(numel, dtype)
        self.slots, self.gaps = views_of(self.flat, self._layout)

    def free(self) -> None:
        self.flat, self.slots, self.gaps = self._nothing

    leave = free


class PooledInput(ReductionInput):
    """Memory from the pool, a slot that units share by taking turns. pool.py, [Note: Static buffers]"""

    def __init__(self, layout: FlatLayout, device: torch.device, pool: BufferPool) -> None:
        super().__init__(layout, device)
        self._pool = pool
        self._slot: Slot | None = None  # the slot in use

    def _take(self, dtype: torch.dtype) -> None:
        numel = self._layout.padded_numel
        self._slot = slot = self._pool.take_input(numel, dtype, self)
        key = dtype, slot.flat.data_ptr()
        if key not in self._known:
            self._know(key, slot.flat[:numel])
        self.flat, self.slots, self.gaps = self._known[key]

    def free(self) -> None:
        if self._slot is not None:
            self._slot.free()
            self._slot = None
        self.flat, self.slots, self.gaps = self._nothing

    def leave(self) -> None:
        if self._slot is not None:
            self._pool.leave(self._slot)
            self._slot = None
        super().leave()


def make_input(flat: FlatParam, dtype: torch.dtype) -> ReductionInput:
    """Create the input of a flat parameter. ``dtype``: its usual dtype."""
    layout, device, pool = flat.layout, flat.kind.compute_device, flat.unsharded.pool
    if flat.is_whole:
        return NewInput(layout, device, pool)
    if pool is not None:
        return PooledInput(layout, device, pool)
    result = ReductionInput(layout, device)
    if flat.is_trainable:
        result.allocate(dtype)  # creates the views here, to save the time in the first step
        result.free()
    return result
