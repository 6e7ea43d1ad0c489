"""Finds out whether any rank used a parameter, for ranks that did not use it and hold no element of it.

[Note: Counting who did not use a parameter]
An unused parameter is marked in its elements (gradients.py, [Note: Negative zero marks an unused parameter]). A rank that
holds none of them cannot see the mark. But all ranks must agree whether ``.grad`` is None: optimizers keep state and count
steps by it, and ``p.grad.norm()`` communicates. Such a rank has no room for a mark in its shard, and other ranks do not know
that it needs one. So there is a counter for each parameter in the process group's store. A rank that did not use the
parameter increments it *before* it starts the reduction, and reads it after the reduction, which ends on no rank before all
have started it. If all ranks have counted, no rank used the parameter. A rank that used all parameters does nothing, so this
costs nothing if all ranks do. Otherwise a rank pays three round trips to the store for each unit with an unused parameter.

With replicas this is done twice, before each of the two collectives: if no rank of a shard group used a parameter, they
count it among their replicas.
"""

from __future__ import annotations

from collections.abc import Iterable

from flatshard._comm.collectives import Pending
from flatshard._comm.progress import REDUCE, Label
from flatshard._handle.layout import FlatLayout
from flatshard._runtime import Runtime, Then, wait_on_host

_BITS = 62  # usable bits of an integer in the store


class Unused:
    """Which parameters no rank used, among those of one flat parameter of which some rank holds no element."""

    __slots__ = ("_is_reduced", "_positions", "_read", "_unread", "found")

    def __init__(self, layout: FlatLayout) -> None:
        spread = [i for i in range(len(layout.params)) if len(layout.holders(i)) < layout.world_size]
        self._positions = {index: place for place, index in enumerate(spread)}  # the position of its counter
        self._is_reduced = layout.padded_numel > 0
        self.found: set[int] = set()
        self._unread: tuple[Runtime, str] | None = None  # the runtime and key of counters that have not been read yet
        self._read: dict[int, tuple[str, set[int]]] = {}  # by runtime: the counters read last, to be deleted

    def begin(self, unused: Iterable[int]) -> None:
        """Before a reduction: this rank has no gradient for the parameters ``unused``."""
        self._unread = None
        self.found = self._positions.keys() & unused

    def narrow(self, unused: set[int]) -> None:
        """Of the parameters in ``found``, earlier reductions had no gradients for ``unused`` only."""
        self.found &= unused

    def tell(self, runtime: Runtime, label: Label) -> None:
        """Count this rank for each parameter in ``found``. The next collective of ``runtime`` must be the reduction."""
        progress = runtime.progress
        if not self.found or not self._is_reduced or progress is None:
            return
        name = f"flatshard/unused/{label.tag}/{progress.counts.get(label.tag + REDUCE, 0) + 1}"
        for number, places in self._counters(runtime).items():
            runtime.store().add(f"{name}/{number}", sum(1 << shift for shift, _ in places))
        self._unread = runtime, name

    def ask(self, pending: Pending) -> None:
        """After the reduction: keep in ``found`` only the parameters that no rank used. If there are counters to read, the
        host waits for ``pending``, the reduction.
        """
        if self._unread is None:
            return
        if not isinstance(pending, Then):  # which has ended
            wait_on_host(pending)
        runtime, name = self._unread
        counters, store, size = self._counters(runtime), runtime.store(), runtime.world_size
        mask = (1 << size.bit_length()) - 1
        found = set()
        for number, places in counters.items():
            count = store.add(f"{name}/{number}", 0)
            found |= {index for shift, index in places if count >> shift & mask == size}
        if runtime.number in self._read:  # all ranks started this reduction, so they have read the previous counters
            before, numbers = self._read[runtime.number]
            for number in numbers:
                store.delete_key(f"{before}/{number}")
        self._read[runtime.number] = name, set(counters)
        self.found, self._unread = found, None

    def _counters(self, runtime: Runtime) -> dict[int, list[tuple[int, int]]]:
        """The integers in the store with the counters of ``found``: by number, a list of (first bit, parameter)."""
        width = runtime.world_size.bit_length()
        each = _BITS // width
        counters: dict[int, list[tuple[int, int]]] = {}
        for index in sorted(self.found):
            number, place = divmod(self._positions[index], each)
            counters.setdefault(number, []).append((place * width, index))
        return counters
