"""Whether any rank used a parameter: for ranks that did not, and hold no element of it that would tell them.

[Note: Counting who did not use a parameter]
The mark of an unused parameter lies in its elements (gradients.py, [Note: Negative zero marks an unused parameter]), and a
rank that holds none of them sees none. All ranks must agree whether ``.grad`` is None: optimizers keep state and count
steps by it, and ``p.grad.norm()`` communicates. There is no room for a mark in such a rank's shard, and no other rank knows
that it is in doubt. So ranks count each other in the process group's store: who did not use a parameter counts itself there
*before* it starts the reduction, and looks when the reduction has ended, which no rank's can before all have started
theirs. If all ranks have counted themselves, none used the parameter. A rank that used all parameters has nothing to do with
this, so where all do it costs nothing; who did not pays three round trips to the store for each unit.

With replicas this is done twice, ahead of either collective: what the ranks of a shard group have not used, they count among
their replicas.
"""

from __future__ import annotations

from collections.abc import Iterable

from flatshard._comm.progress import REDUCE, Label
from flatshard._handle.layout import FlatLayout
from flatshard._runtime import Runtime

_BITS = 62  # of a counter in the store


class Unused:
    """The parameters of one flat parameter that nobody is known to have used, of those that some rank has no part of."""

    __slots__ = ("_asked", "_done", "_held", "_is_reduced", "_places", "found")

    def __init__(self, layout: FlatLayout) -> None:
        spread = [i for i in range(len(layout.params)) if len(layout.holders(i)) < layout.world_size]
        self._places = {index: place for place, index in enumerate(spread)}  # in the counters
        self._is_reduced = layout.padded_numel > 0
        self.found: set[int] = set()
        self._held: set[int] | None = None  # of earlier backwards, whose result waits to be averaged over the replicas
        self._asked: tuple[Runtime, str] | None = None  # what has been counted and not been looked up yet
        self._done: dict[int, tuple[str, set[int]]] = {}  # the same, looked up before: to be deleted

    def begin(self, unused: Iterable[int]) -> None:
        """A reduction is about to start, for which this rank has no gradient of the parameters ``unused``."""
        self._asked = None
        self.found = {index for index in unused if index in self._places}

    def tell(self, runtime: Runtime, label: Label) -> None:
        """The next collective of ``runtime`` is the reduction: count this rank among those that did not use them."""
        progress = runtime.progress
        if not self.found or not self._is_reduced or progress is None:
            return
        name = f"flatshard/unused/{label.tag}/{progress.counts.get(label.tag + REDUCE, 0) + 1}"
        for number, places in self._counters(runtime).items():
            runtime.store().add(f"{name}/{number}", sum(1 << shift for shift, _ in places))
        self._asked = runtime, name

    @property
    def is_open(self) -> bool:
        """Whether there is anything to look up, when the reduction has ended on the host."""
        return self._asked is not None

    def ask(self) -> None:
        """The reduction has ended: keep in ``found`` what nobody used."""
        if self._asked is None:
            return
        runtime, name = self._asked
        counters, store, size = self._counters(runtime), runtime.store(), runtime.world_size
        mask = (1 << size.bit_length()) - 1
        found = set()
        for number, places in counters.items():
            count = store.add(f"{name}/{number}", 0)
            found |= {index for shift, index in places if count >> shift & mask == size}
        if runtime.number in self._done:  # all ranks have started this reduction, so they have looked those up
            before, numbers = self._done[runtime.number]
            for number in numbers:
                store.delete_key(f"{before}/{number}")
        self._done[runtime.number] = name, set(counters)
        self.found, self._asked = found, None

    def _counters(self, runtime: Runtime) -> dict[int, list[tuple[int, int]]]:
        """The counters that ``found`` are counted in, by number: (bit where its count starts, parameter) of each."""
        width = runtime.world_size.bit_length()
        each = _BITS // width
        counters: dict[int, list[tuple[int, int]]] = {}
        for index in sorted(self.found):
            number, place = divmod(self._places[index], each)
            counters.setdefault(number, []).append((place * width, index))
        return counters

    def hold(self) -> None:
        """The result is kept for a later reduction to add to."""
        self._held = self.found

    def add_held(self) -> None:
        """What is kept has been added to the result."""
        if self._held is not None:
            self.found &= self._held
            self._held = None

    def discard(self) -> None:
        """Forget everything."""
        self.found, self._held, self._asked = set(), None, None
