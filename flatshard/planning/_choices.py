"""The choices of units, their costs, and their effect on units inside of others.

[Note: Units inside of units]
A unit that recomputes its forward runs the units inside again, too, except for the last ones that recompute themselves: torch
starts a recomputation when backward first needs one of its tensors, and stops as soon as all of them are there. So the memory
of an inner unit also depends on whether an outer unit runs it again, and when. The *state* of the unit has both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

UNTIL_CHANGE, UNTIL_BACKWARD, UNTIL_FORWARD = range(3)
"""How long a unit's parameters stay unsharded: until the shards change, until its backward ends, until its forward ends."""

NOT_AGAIN, AGAIN, FIRST, LEFT_OUT = range(4)
"""Whether a unit runs again when the unit around it recomputes.

``NOT_AGAIN``: no unit around it recomputes. ``AGAIN``: it runs again, in a recomputation that began before its backward.
``FIRST``: it runs again, and as all units after it are left out, the recomputation begins in its backward. ``LEFT_OUT``: it
does not run again: it and all units after it recompute themselves, and the recomputation ends before them.
"""


class Keeps(NamedTuple):
    """The choice for one unit."""

    stays: int  # UNTIL_CHANGE, UNTIL_BACKWARD or UNTIL_FORWARD
    recomputes: bool
    again: int = NOT_AGAIN  # follows from the choices of others; set only in a ``State``


Choices = tuple[Keeps, ...]
"""The choices of all units, in module order."""


class State(NamedTuple):
    """The choice for one unit, and the part of the others that affects it. [Note: Units inside of units]"""

    keeps: Keeps
    around: tuple[bool, ...] = ()  # whether each unit around it recomputes, the outermost first


@dataclass(frozen=True)
class Costs:
    """The costs of each unit's choices in a step."""

    gather: Sequence[float]  # bytes sent by one gather
    flops: Sequence[Mapping[tuple[bool, int], float]]  # operations computed again, by ``recomputes`` and ``again``
    gathers: int  # of a unit that is freed after its backward: the microbatches
    flops_per_byte: float  # operations that are worth one byte sent

    def of(self, unit: int, keeps: Keeps) -> float:
        """Return the cost of ``keeps`` in bytes sent, beyond the least that the unit costs."""
        return self.sent(unit, keeps) + self.computed_again(unit, keeps) / self.flops_per_byte

    def sent(self, unit: int, keeps: Keeps) -> float:
        """Return the bytes that ``unit`` sends beyond the fewest possible."""
        more = {UNTIL_CHANGE: 0, UNTIL_BACKWARD: self.gathers - 1, UNTIL_FORWARD: 2 * self.gathers - 1}[keeps.stays]
        return self.gather[unit] * more

    def computed_again(self, unit: int, keeps: Keeps) -> float:
        """Return the operations that ``unit`` computes again."""
        known = self.flops[unit]
        if (flops := known.get(keeps[1:])) is not None:
            return flops
        return known.get((keeps.recomputes, NOT_AGAIN), 0.0) + known.get((False, keeps.again), 0.0)

    def total(self, keeps: Sequence[Keeps]) -> float:
        """Return the cost of all units, whose ``keeps`` have ``again`` set."""
        return sum(itertools.starmap(self.of, enumerate(keeps)))


_NEVER = -1


class Nesting:
    """The nesting of units. [Note: Units inside of units]

    Args:
        around: for each unit those around it, the outermost first.
        order: the units, as they run in forward.
    """

    def __init__(self, around: Sequence[tuple[int, ...]], order: Sequence[int]) -> None:
        self.around: list[tuple[int, ...]] = [()] * len(order)  # those that run when it begins
        chain: tuple[int, ...] = ()
        for unit in order:
            self.around[unit] = tuple(each for each in chain if each in around[unit])
            chain = (*self.around[unit], unit)
        # For each unit the next one beside it. None: the unit around them ends. Never: either has units inside.
        self.following: list[int | None] = [None] * len(order)
        for unit, following in itertools.pairwise(order):
            if self.around[following] == self.around[unit]:
                self.following[unit] = following
            elif unit in self.around[following]:
                self.following[unit] = _NEVER
        # For each unit those whose states may follow from its choice.
        outermost = [others[0] if others else unit for unit, others in enumerate(self.around)]
        together: dict[int, list[int]] = {}
        for unit, each in enumerate(outermost):
            together.setdefault(each, []).append(unit)
        self.beside = [together[each] for each in outermost]

    def state(self, unit: int, choices: Sequence[Keeps]) -> State:
        """Return the state of ``unit``."""
        keeps, around = choices[unit], tuple(choices[each].recomputes for each in self.around[unit])
        return State(keeps._replace(again=self._again(unit, choices)) if any(around) else keeps, around)

    def in_full(self, choices: Choices) -> list[Keeps]:
        """Return ``choices`` with ``again`` set."""
        return [self.state(unit, choices).keeps for unit in range(len(choices))]

    def _again(self, unit: int, choices: Sequence[Keeps]) -> int:
        """Return whether ``unit`` runs again with a unit around it that recomputes."""
        if not choices[self.around[unit][-1]].recomputes:
            return AGAIN
        following = self.following[unit]
        while following is not None:
            if following == _NEVER or not choices[following].recomputes:
                return AGAIN
            following = self.following[following]
        return LEFT_OUT if choices[unit].recomputes else FIRST

    def states(self, unit: int, options: Sequence[Keeps]) -> list[State]:
        """Return all states that ``unit`` may have if each unit chooses from ``options``."""
        found = []
        for around in itertools.product(sorted({keeps.recomputes for keeps in options}), repeat=len(self.around[unit])):
            for keeps in options:
                again: tuple[int, ...] = (AGAIN,) if any(around) else (NOT_AGAIN,)
                if any(around) and around[-1] and self.following[unit] != _NEVER:
                    last = LEFT_OUT if keeps.recomputes else FIRST
                    again = (last,) if self.following[unit] is None else (AGAIN, last)
                found += [State(keeps._replace(again=each), around) for each in again]
        return found

    def follows(self, last: int, before: State, unit: int, state: State) -> bool:
        """Return whether ``unit`` can have ``state`` if ``last``, the unit before it, has the state ``before``."""
        chain = *before.around, before.keeps.recomputes
        if chain[: len(state.around)] != state.around:
            return False
        is_beside = self.following[last] == unit
        return not is_beside or (before.keeps.again in (FIRST, LEFT_OUT)) == (state.keeps.again == LEFT_OUT)


def joined(holder: str, key: str) -> str:
    """Return the FQN of the child ``key`` of ``holder``."""
    return f"{holder}.{key}" if holder else key


def around_of(names: Sequence[str]) -> list[tuple[int, ...]]:
    """Return for each unit the units around it, the outermost first, by their ``names``."""
    number = {name: at for at, name in enumerate(names)}
    holders = [itertools.accumulate(name.split(".")[:-1], joined) for name in names]
    return [tuple(number[holder] for holder in each if holder in number) for each in holders]


def options_of(start: Keeps, recomputes: bool) -> list[Keeps]:
    """Return the choices of a unit that keeps ``start`` if nothing is given up."""
    again = (start.recomputes, True) if recomputes and not start.recomputes else (start.recomputes,)
    return [Keeps(stays, each) for stays in range(start.stays, UNTIL_FORWARD + 1) for each in again]


def steps_between(start: Choices, end: Choices, order: Sequence[int]) -> Iterator[tuple[int, Keeps]]:
    """Yield the steps from ``start`` to ``end``: a unit and its next choice, which gives up one thing."""
    for unit in order:
        for stays in range(start[unit].stays + 1, end[unit].stays + 1):
            yield unit, Keeps(stays, start[unit].recomputes)
    for unit in order:
        if end[unit].recomputes != start[unit].recomputes:
            yield unit, end[unit]


def patterns(names: Sequence[str]) -> list[tuple[bool, ...]]:
    """Return rows of flags, whether each unit recomputes. Each pair of neighbours has each pair of flags in some row.

    The units of one depth alternate in all four ways. Those of each lesser depth all do the same, in all combinations, and
    those of a greater depth do not recompute. No unit recomputes in the first row.
    """
    depths = [len(around) for around in around_of(names)]
    places = [depths[:number].count(depth) for number, depth in enumerate(depths)]
    found: dict[tuple[bool, ...], None] = {}
    for deepest in range(max(depths, default=0) + 1):
        for around in itertools.product((False, True), repeat=deepest):
            for odd, even in itertools.product((False, True), repeat=2):
                kinds = [(each, each) for each in around] + [(even, odd)] + [(False, False)] * len(depths)
                found[tuple(kinds[depth][place % 2] for depth, place in zip(depths, places, strict=True))] = None
    return list(found)
