"""The input of one flat parameter's reductions, with a view for each parameter's gradient.

It is a tensor of ``padded_numel`` elements, laid out as the unsharded buffer. It has memory from the time when a backward's
gradients are complete to the end of their reduction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flatshard._handle.layout import FlatLayout
from flatshard._handle.pool import Slot

if TYPE_CHECKING:
    from flatshard._handle.flat_param import FlatParam

_Views = tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]


def views_of(flat: torch.Tensor, layout: FlatLayout) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each parameter's slot in ``flat``, in the parameter's shape and stride, and the padding between them."""
    slots = [flat.as_strided(info.shape, info.stride, info.start) for info in layout.params]
    return slots, [flat[start:stop] for start, stop in layout.gaps()]


class ReductionInput:
    """The input. Its memory is a slot of the pool, or slots of its own: one for each dtype.

    If nothing is sharded, the memory is new each time: it is all-reduced in place and becomes the gradients.
    """

    def __init__(self, flat: FlatParam, dtype: torch.dtype) -> None:
        """``dtype``: the usual one."""
        self._layout = flat.layout
        self._device = flat.kind.compute_device
        self._pool = flat.placement.pool
        self._is_result = flat.is_whole
        self._slot: Slot | None = None  # in use
        self._known: dict[Slot, _Views] = {}  # the slots used so far, with their views
        self._nothing: _Views = torch.empty(0, device=self._device), [], []
        self.flat, self.slots, self.gaps = self._nothing
        if self._pool is None and flat.is_trainable and not flat.is_whole:
            own = self._find_slot(dtype)
            self._views(own)  # here, to save the time in the first step
            own.free()

    def allocate(self, dtype: torch.dtype) -> None:
        """Allocate the memory, and zero the padding."""
        if self._is_result:
            self.flat = self._new(dtype)
            self.slots, self.gaps = views_of(self.flat, self._layout)
        else:
            self._slot = slot = self._find_slot(dtype)
            slot.take(self)
            self.flat, self.slots, self.gaps = self._known.get(slot) or self._views(slot)
        if self.gaps:
            torch._foreach_zero_(self.gaps)

    def _find_slot(self, dtype: torch.dtype) -> Slot:
        if self._pool is not None:
            return self._pool.slot_for_input(self._layout.padded_numel, dtype)
        for slot in self._known:
            if slot.flat.dtype is dtype:
                return slot
        return Slot(self._new(dtype))

    def _new(self, dtype: torch.dtype) -> torch.Tensor:
        numel = self._layout.padded_numel
        if self._pool is not None:
            return self._pool.allocate(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self._device)

    def _views(self, slot: Slot) -> _Views:
        flat = slot.flat[: self._layout.padded_numel]
        self._known[slot] = views = flat, *views_of(flat, self._layout)
        return views

    def free(self) -> None:
        """Free the memory. Idempotent."""
        self.flat, self.slots, self.gaps = self._nothing
        if self._slot is not None:
            self._slot.free()
            self._slot = None

    def leave(self) -> None:
        """Stop using the current memory without freeing it: collectives may use it as long as their group exists."""
        self.flat, self.slots, self.gaps = self._nothing
        self._known.clear()
        if self._slot is not None and self._pool is not None:
            self._pool.leave(self._slot)
        self._slot = None
