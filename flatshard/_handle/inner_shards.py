"""What a unit keeps from forward to backward where it reshards to fewer ranks (an int for ``reshard_after_forward``).

After forward each of the smaller group's ``k`` ranks keeps one of ``k`` equal parts of what was gathered, in the compute
dtype, and backward's all-gather runs among these ranks only, which are usually those of one node. On an accelerator it is
on another communicator than the gathers over the whole group, but on the same stream, so that their order is the same on
all ranks.

[Note: The life of an inner shard]
It has the values of the unit's last forward, so the next all-gather over the whole group drops it. The backward that uses it
drops it too: another backward of the same graph gathers over the whole group. And it ends with the last graph that would
come back to it: autograd's graphs hold it, by their ``Step``, and a handle does not. All of that follows from what
the program does, so all ranks agree on which group they gather over.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from flatshard._handle.buffers import FlatBuffers
from flatshard._runtime import Runtime


class Kept:
    """The inner shards of one unit, one for each flat parameter; None once they are used. Who may need them holds this."""

    __slots__ = ("__weakref__", "shards")

    def __init__(self) -> None:
        self.shards: list[torch.Tensor] | None = None


class InnerShards:
    """Of one unit."""

    def __init__(self, runtime: Runtime) -> None:
        """``runtime``: of the smaller group."""
        self.runtime = runtime
        self._kept: weakref.ref[Kept] | None = None

    def keep(self, gathered: Sequence[FlatBuffers]) -> Kept:
        """Copy this rank's part of what was gathered. It lives as long as the result does."""
        kept = self._alive
        if kept is None:
            kept = Kept()
            self._kept = weakref.ref(kept)
        kept.shards = [b.unsharded.inner_wire(self.runtime.world_size, self.runtime.rank).clone() for b in gathered]
        return kept

    def take(self, again: bool) -> list[torch.Tensor] | None:
        """Take and clear the kept shards. None if there are none, or without ``again``: then newer values are wanted."""
        kept = self._alive
        if kept is None:
            return None
        shards, kept.shards = kept.shards, None
        return shards if again else None

    @property
    def nbytes(self) -> int:
        """Bytes that are kept now."""
        kept = self._alive
        return sum([s.nbytes for s in kept.shards]) if kept is not None and kept.shards else 0

    @property
    def _alive(self) -> Kept | None:
        return None if self._kept is None else self._kept()

    def copy(self) -> InnerShards:
        """The same for another unit."""
        return InnerShards(self.runtime)
