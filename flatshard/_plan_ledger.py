"""What a rank holds, by category, while a step is walked through: the most there was, when, and of what."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank, by category."""

    shards: int = 0
    """This rank's part of the parameters, with padding."""
    gradients: int = 0
    """``.grad``: this rank's part, with padding, from reduction to ``zero_grad``."""
    optimizer: int = 0
    """The optimizer's state."""
    unsharded: int = 0
    """What was gathered and not freed yet, with casts of shards kept or on their way."""
    reductions: int = 0
    """Inputs and outputs of gradient reductions."""
    arriving: int = 0
    """Gradients as autograd makes them, until they are copied into a reduction's input."""
    activations: int = 0
    """What autograd saves for backward, where that is known."""
    others: int = 0
    """Buffers, and parameters that are ignored."""

    @property
    def total(self) -> int:
        nbytes: list[int] = [getattr(self, f.name) for f in fields(self)]
        return sum(nbytes)

    @property
    def held(self) -> int:
        """Bytes that flatshard and the optimizer hold: without activations, and without what was there before."""
        return self.total - self.activations - self.others


CATEGORIES = tuple(f.name for f in fields(Memory))


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes at a time, and what they are."""

    nbytes: int
    memory: Memory
    phase: str  # "forward", "backward" or "optimizer"
    unit: str  # the one at work


class Ledger:
    """The books of one device during a step."""

    def __init__(self, start: Memory) -> None:
        self._held = {name: getattr(start, name) for name in CATEGORIES}
        self._total = start.total
        self.samples: list[tuple[int, Memory]] = []  # (time, as given; what was held from then on)
        self.now = 0
        self.phase, self.unit = "forward", ""
        self._most: dict[bool, tuple[int, dict[str, int], str, str]] = {}
        self._note()

    def add(self, category: str, nbytes: int) -> None:
        """``nbytes`` more, or less where negative."""
        if nbytes:
            self._held[category] += nbytes
            self._total += nbytes
            assert self._held[category] >= 0, (category, self._held, self.phase, self.unit)
            self._note()

    def move(self, source: str, target: str, nbytes: int) -> None:
        """``nbytes`` are another category's now."""
        self._held[source] -= nbytes
        self._held[target] += nbytes
        assert self._held[source] >= 0, (source, self._held, self.phase, self.unit)
        self._note()

    def _note(self) -> None:
        if self.samples and self.samples[-1][0] == self.now:
            self._record_peak()
            if self._total < self.samples[-1][1].total:
                return  # of one moment, the most
            self.samples.pop()
        self.samples.append((self.now, Memory(**self._held)))
        self._record_peak()

    def _record_peak(self) -> None:
        outside = self._held["activations"] + self._held["others"]
        for held_only, nbytes in ((False, self._total), (True, self._total - outside)):
            if held_only not in self._most or nbytes > self._most[held_only][0]:
                self._most[held_only] = nbytes, dict(self._held), self.phase, self.unit

    def settle(self) -> None:
        """Have the last sample show what is held, rather than the most of that moment."""
        self.now += 1
        self._note()

    def peak(self, held_only: bool) -> Peak:
        """The most of everything; or of what flatshard and the optimizer hold (``Memory.held``)."""
        nbytes, held, phase, unit = self._most[held_only]
        return Peak(nbytes, Memory(**held), phase, unit)

    @property
    def memory(self) -> Memory:
        """What is held now."""
        return Memory(**self._held)
