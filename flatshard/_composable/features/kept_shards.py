"""What units keep from forward to backward, so that backward gathers from nearer than the shards of all ranks.

[Note: The life of a kept shard]
A kept shard has the values of the unit's last forward, so the next all-gather over the whole group drops it. The backward
that uses it drops it too: a second backward of the same graph gathers over the whole group. And it is freed with the last
graph that could use it. All of this follows from the program alone, so all ranks agree on the group that they gather over.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flatshard import _trace
from flatshard._comm.collectives import Pending
from flatshard._handle.flat_param import FlatParam


class KeptShards:
    """The kept shards of one unit: a ``Source`` that its handle gathers from again. A subclass says what is kept."""

    def __init__(self) -> None:
        # The shards, by the steps that may need them: the same dict for all steps.
        self._by_step: weakref.WeakKeyDictionary[object, dict[FlatParam, torch.Tensor]] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptShards:
        """For the copied unit, without shards."""
        return type(self)()

    @property
    def _shards(self) -> dict[FlatParam, torch.Tensor]:
        return next(iter(self._by_step.values()), {})

    @property
    def kept(self) -> list[torch.Tensor]:
        """The shards that exist now."""
        return list(self._shards.values())

    def keep(self, flats: Sequence[FlatParam], until: object) -> None:
        """Copy parts of the unsharded buffers. The copies belong to the gather stream as well, which alone reads them."""
        shards = self._shards
        shards.clear()
        shards.update((flat, part.clone()) for flat in flats if (part := self.part(flat)) is not None)
        self._by_step[until] = shards

    def gathers(self, flats: Sequence[FlatParam], again: bool) -> Iterator[Pending] | None:
        """Use up the shards. None if there are none, or if newer values are needed. [Note: The life of a kept shard]"""
        shards = self._shards
        taken = dict(shards)
        shards.clear()
        if not (taken and again):
            return None
        if _trace.sinks:
            _trace.event(self.verb(flats[0]), flats[0].placement.label.unit)
        return (self.gather(flat, taken.get(flat)) for flat in flats)

    def part(self, flat: FlatParam) -> torch.Tensor | None:
        """The part of the unsharded buffer to keep; None: nothing."""
        raise NotImplementedError

    def verb(self, flat: FlatParam) -> str:
        """The name of the gather in traces."""
        raise NotImplementedError

    def gather(self, flat: FlatParam, kept: torch.Tensor | None) -> Pending:
        """Gather ``flat`` again. ``kept``: what ``part`` was."""
        raise NotImplementedError


class KeptCasts(KeptShards):
    """``keep_cast_shard``: this rank's cast shard, which backward copies instead of casting again.

    This takes memory, and pays if the shard is on another device (CPU offload), because it is transferred once. Collectives
    that approximate leave another value in the buffer, so then nothing is kept.
    """

    def part(self, flat: FlatParam) -> torch.Tensor | None:
        is_cast, runtime = flat.kind.compute_dtype is not flat.kind.dtype, flat.placement.runtime
        return flat.unsharded.own if is_cast and runtime is runtime.exact else None

    def verb(self, flat: FlatParam) -> str:
        return "cast" if flat.placement.shards is None else "all-gather"

    def gather(self, flat: FlatParam, kept: torch.Tensor | None) -> Pending:
        return flat.gather(False, True, kept)
