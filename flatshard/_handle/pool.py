"""The memory that collectives read and write: a storage of its own for each flat parameter, or one that a feature provides.

Usually a unit's storage is resized between zero and full, and the device's allocator chooses its address: a :class:`Slot`.
A feature may have slots come from a :class:`Pool` that units share: [Note: Static buffers].
"""

from __future__ import annotations

from typing import Protocol

import torch


class Slot:
    """One buffer, used by one flat parameter at a time. ``free`` frees its memory."""

    __slots__ = ("_storage", "flat", "user")

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat  # 1-D
        self._storage = flat.untyped_storage()
        self.user: object | None = None

    # An interrupt in between must not leave memory without a user: it would not be freed.

    def take(self, user: object) -> None:
        """Allocate the memory, for ``user``."""
        self.user = user
        self._storage.resize_(self.flat.nbytes)

    def free(self) -> None:
        """Free the memory."""
        self._storage.resize_(0)
        self.user = None


class Pool(Protocol):
    """The slots of the units that share a process group, a device and collectives."""

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a 1-D tensor of ``numel`` elements."""

    def slot_for_parameters(self, numel: int, dtype: torch.dtype) -> Slot:
        """A free slot for the gathered values of one flat parameter, which keeps it: autograd saves views of it."""

    def slot_for_input(self, numel: int, dtype: torch.dtype) -> Slot:
        """A free slot for the input of one reduction."""

    def leave(self, slot: Slot) -> None:
        """Remove a slot from the pool: collectives may use its memory as long as their group exists."""
