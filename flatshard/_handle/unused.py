"""Finds out whether any rank used a parameter, for ranks that did not use it and hold no element of it.

[Note: Naming what a rank did not use]
An unused parameter is marked in its elements (gradients.py, [Note: Negative zero marks an unused parameter]). A rank that
holds none of them cannot see the mark. But all ranks must agree whether ``.grad`` is None: optimizers keep state and count
steps by it, and ``p.grad.norm()`` communicates. Such a rank has no room for a mark in its shard, which is a piece of memory
in which parameters lie end to end, and other ranks do not know that it needs one. So ranks write to the process group's
store: a rank that did not use such parameters appends their numbers to a list *before* it starts the reduction, and reads the
list after the reduction, which ends on no rank before all have started it. What all ranks have named, no rank used. A rank
that used all parameters does nothing, so this costs nothing if all ranks do. Otherwise a rank pays three round trips to the
store for each unit with an unused parameter.

With replicas this is done twice, before each of the two collectives: if no rank of a shard group used a parameter, they
name it among their replicas.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

from flatshard._comm.collectives import Pending
from flatshard._comm.pending import Chain
from flatshard._comm.progress import REDUCE, Label
from flatshard._comm.streams import wait_on_host
from flatshard._handle.layout import FlatLayout
from flatshard._runtime import Runtime


class Unused:
    """Which parameters no rank used, among those of one flat parameter of which some rank holds no element."""

    __slots__ = ("_is_reduced", "_read", "_spread", "_unread", "found")

    def __init__(self, layout: FlatLayout) -> None:
        self._spread = {i for i in range(len(layout.params)) if len(layout.holders(i)) < layout.world_size}
        self._is_reduced = layout.padded_numel > 0
        self.found: set[int] = set()
        self._unread: tuple[Runtime, str] | None = None  # the runtime and key of a list that has not been read yet
        self._read: dict[int, str] = {}  # by runtime: the list read last, to be deleted

    def begin(self, unused: Iterable[int]) -> None:
        """Before a reduction: this rank has no gradient for the parameters ``unused``."""
        self._unread = None
        self.found = self._spread.intersection(unused)

    def narrow(self, unused: set[int]) -> None:
        """Of the parameters in ``found``, earlier reductions had no gradients for ``unused`` only."""
        self.found &= unused

    def tell(self, runtime: Runtime, label: Label) -> None:
        """Name ``found`` to the other ranks. The next collective of ``runtime`` must be the reduction."""
        progress = runtime.progress
        if not self.found or not self._is_reduced or progress is None:
            return
        key = f"flatshard/unused/{label.tag}/{progress.counts.get(label.tag + REDUCE, 0) + 1}"
        # With the rank, as a store without an append of its own (a file's) takes equal bytes for those that it has.
        runtime.store().append(key, f"{runtime.rank}:{sum(1 << index for index in self.found):x} ")
        self._unread = runtime, key

    def ask(self, pending: Pending) -> None:
        """After the reduction: keep in ``found`` only the parameters that no rank used. If there is a list to read, the
        host waits for ``pending``, the reduction.
        """
        if self._unread is None:
            return
        if not isinstance(pending, Chain):  # which has ended
            wait_on_host(pending)
        (runtime, key), store = self._unread, self._unread[0].store()
        told = [int(named.partition(b":")[2], 16) for named in store.get(key).split()]
        by_all = functools.reduce(operator.and_, told) if len(told) == runtime.world_size else 0
        # All ranks have started this reduction, so they have read the list of the one before.
        if (before := self._read.get(runtime.number)) is not None:
            store.delete_key(before)
        self._read[runtime.number] = key
        self.found, self._unread = {index for index in self.found if by_all >> index & 1}, None
