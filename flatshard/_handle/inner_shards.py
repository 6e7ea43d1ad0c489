"""Inner shards: what a unit keeps from forward to backward with an int for ``reshard_after_forward``.

After forward the unit is resharded to a smaller group. Each of its ``k`` ranks keeps one of ``k`` equal parts of the
unsharded buffer, in the compute dtype. Backward's all-gather runs among these ranks only, which are usually those of one
node. On an accelerator this is a different communicator than that of the whole group's gathers, but the same stream, so the
order is the same on all ranks.

[Note: The life of an inner shard]
An inner shard has the values of the unit's last forward, so the next all-gather over the whole group drops it. The backward
that uses it drops it too: a second backward of the same graph gathers over the whole group. And it is freed with the last
graph that could use it: autograd's graphs refer to it (through their ``Step``), and the handle only weakly. All of this
follows from the program alone, so all ranks agree on the group that they gather over.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from flatshard._handle.flat_param import FlatParam
from flatshard._runtime import Runtime


class Kept:
    """The inner shards of one unit, one per flat parameter; None after their use. Graphs that may need them hold this."""

    __slots__ = ("__weakref__", "shards")

    def __init__(self) -> None:
        self.shards: list[torch.Tensor] | None = None


class InnerShards:
    """Keeps and takes the inner shards of one unit."""

    def __init__(self, runtime: Runtime) -> None:
        """``runtime``: the runtime of the smaller group."""
        self.runtime = runtime
        self._kept: weakref.ref[Kept] | None = None

    def keep(self, gathered: Sequence[FlatParam]) -> Kept:
        """Copy this rank's part of the unsharded buffers. The copies live as long as the result does."""
        kept = self._alive
        if kept is None:
            kept = Kept()
            self._kept = weakref.ref(kept)
        kept.shards = [b.unsharded.inner_wire(self.runtime.world_size, self.runtime.rank).clone() for b in gathered]
        return kept

    def take(self, again: bool) -> list[torch.Tensor] | None:
        """Take and clear the kept shards. None if there are none, or if ``again`` is False: newer values are needed."""
        kept = self._alive
        if kept is None:
            return None
        shards, kept.shards = kept.shards, None
        return shards if again else None

    @property
    def nbytes(self) -> int:
        """Bytes kept now."""
        kept = self._alive
        return sum([s.nbytes for s in kept.shards]) if kept is not None and kept.shards else 0

    @property
    def _alive(self) -> Kept | None:
        return None if self._kept is None else self._kept()

    def copy(self) -> InnerShards:
        """An object for another unit, with the same runtime and no shards."""
        return InnerShards(self.runtime)
