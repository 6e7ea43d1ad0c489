"""The seam of a feature that has kept a unit's gathered values somewhere nearer than in the shards of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from flatshard._comm.collectives import Pending
from flatshard._handle.flat_param import FlatParam


class Source(Protocol):
    """Where a feature has a unit gathered from, instead of the shards of all ranks. A deep copy is for the copied unit."""

    def gathers(self, flats: Sequence[FlatParam], again: bool) -> Iterable[Pending] | None:
        """Called before each all-gather of ``flats``. Returns None, or what to do instead: an iterator that starts the
        all-gather of each. ``again``: see ``FlatParamHandle.unshard``.
        """

    def keep(self, flats: Sequence[FlatParam], until: object) -> None:
        """Called before the gathered ``flats`` are freed. As long as ``until`` lives, ``gathers`` may be called ``again``."""
