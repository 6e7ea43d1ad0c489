"""Memory of unsharded parameters that stays allocated while they are sharded, so that addresses stay the same.

A CUDA graph that has captured a forward reads parameters at the addresses of its capture. Usually a unit's storage is resized
to zero when it is resharded, and the allocator may place it elsewhere next time. Units with static buffers share memory that
is never freed; this is memory of a unit's own, and takes that of the whole model once all units have been gathered.
"""

from __future__ import annotations

from collections.abc import Iterable

from flatshard._composable.state import Unit
from flatshard._errors import name_list
from flatshard._handle.pool import FlatBuffer


class KeptBuffer(FlatBuffer):
    """A buffer that keeps its memory, once it has any."""

    __slots__ = ()

    def take(self, user: object) -> None:
        """Allocate the memory for ``user``, at the first time."""
        if self._storage.nbytes():
            self.user = user
        else:
            super().take(user)

    def free(self) -> None:
        """Mark the memory as free."""
        self.user = None


def check_may_keep(units: Iterable[Unit]) -> None:
    """Raise for units whose memory is shared with other units."""
    if pooled := [unit.fqn for unit in units if unit.handle.has_static_buffers]:
        raise ValueError(
            f"configure(keep_unsharded_storage=True): units {name_list(pooled, 3)} have static buffers (static_buffers=True, "
            "or collectives with allocate()), which are never freed, and which units use in turn. For a buffer of its own "
            "for each unit, shard without them"
        )


def set_kept(unit: Unit, keep: bool) -> None:
    """Keep the memory of ``unit`` from its next gather on. False: free it as ever, now if the unit is sharded."""
    for flat in unit.handle.flats:
        flat.unsharded.use_buffers(KeptBuffer if keep else FlatBuffer)
