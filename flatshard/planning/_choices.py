"""What units keep, what that costs, and what follows for units inside of others.

[Note: Units inside of units]
Where a unit is computed again, so are those inside, but for the last ones that recompute themselves: torch begins a
recomputation when backward first needs something of it, and ends it as soon as all is there. So of a unit inside it matters,
too, whether it is computed again with one around it, and when: its *state* says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

UNTIL_CHANGE, UNTIL_BACKWARD, UNTIL_FORWARD = range(3)
"""How long a unit's parameters stay gathered: until the parts change, until its backward has ended, until its forward has."""

NOT_AGAIN, AGAIN, FIRST, LEFT_OUT = range(4)
"""Whether a unit is computed again when one around it is. ``LEFT_OUT``: no, as it and all after it recompute themselves, and
the recomputation ends before them. ``FIRST``: yes, and as all after it are left out, that begins in its backward. ``AGAIN``:
yes, and it began before its backward. ``NOT_AGAIN``: no unit around it recomputes."""


class Keeps(NamedTuple):
    """What one unit keeps."""

    stays: int  # UNTIL_CHANGE, UNTIL_BACKWARD or UNTIL_FORWARD
    recomputes: bool
    again: int = NOT_AGAIN  # follows from what others keep; only a ``State`` has it


Choices = tuple[Keeps, ...]
"""Of the units in order."""


class State(NamedTuple):
    """What follows from all choices for one unit. [Note: Units inside of units]"""

    keeps: Keeps
    around: tuple[bool, ...] = ()  # whether each unit around it recomputes, the outermost first


@dataclass(frozen=True)
class Costs:
    """What giving up costs in a step, for each unit."""

    gather: Sequence[float]  # bytes sent by one gather
    flops: Sequence[Mapping[tuple[bool, int], float]]  # operations computed again, by ``recomputes`` and ``again``
    gathers: int  # of a unit that is freed after its backward: the microbatches
    flops_per_byte: float  # operations that are worth one byte sent

    def of(self, unit: int, keeps: Keeps) -> float:
        """In bytes sent, beside the least that the unit costs."""
        return self.sent(unit, keeps) + self.computed_again(unit, keeps) / self.flops_per_byte

    def sent(self, unit: int, keeps: Keeps) -> float:
        """Bytes, beside those that the unit always sends."""
        more = {UNTIL_CHANGE: 0, UNTIL_BACKWARD: self.gathers - 1, UNTIL_FORWARD: 2 * self.gathers - 1}[keeps.stays]
        return self.gather[unit] * more

    def computed_again(self, unit: int, keeps: Keeps) -> float:
        """Operations."""
        known = self.flops[unit]
        if (flops := known.get(keeps[1:])) is not None:
            return flops
        return known.get((keeps.recomputes, NOT_AGAIN), 0.0) + known.get((False, keeps.again), 0.0)

    def total(self, keeps: Sequence[Keeps]) -> float:
        """Of all units. ``keeps``: with ``again``."""
        return sum(itertools.starmap(self.of, enumerate(keeps)))


_NEVER = -1


class Nesting:
    """Which units are inside of which. [Note: Units inside of units]

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
        """Of ``unit``."""
        keeps, around = choices[unit], tuple(choices[each].recomputes for each in self.around[unit])
        return State(keeps._replace(again=self._again(unit, choices)) if any(around) else keeps, around)

    def in_full(self, choices: Choices) -> list[Keeps]:
        """``choices`` with ``again``."""
        return [self.state(unit, choices).keeps for unit in range(len(choices))]

    def _again(self, unit: int, choices: Sequence[Keeps]) -> int:
        if not choices[self.around[unit][-1]].recomputes:
            return AGAIN
        following = self.following[unit]
        while following is not None:
            if following == _NEVER or not choices[following].recomputes:
                return AGAIN
            following = self.following[following]
        return LEFT_OUT if choices[unit].recomputes else FIRST

    def states(self, unit: int, options: Sequence[Keeps]) -> list[State]:
        """All that it may have, if each unit has these ``options``."""
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
        """Whether ``unit`` can have ``state``, if the ``last`` one before it has the state ``before``."""
        chain = *before.around, before.keeps.recomputes
        if chain[: len(state.around)] != state.around:
            return False
        is_beside = self.following[last] == unit
        return not is_beside or (before.keeps.again in (FIRST, LEFT_OUT)) == (state.keeps.again == LEFT_OUT)


def joined(holder: str, key: str) -> str:
    """Return the FQN of the child ``key`` of ``holder``."""
    return f"{holder}.{key}" if holder else key


def around_of(names: Sequence[str]) -> list[tuple[int, ...]]:
    """For each unit those around it, the outermost first, by their names."""
    number = {name: at for at, name in enumerate(names)}
    holders = [itertools.accumulate(name.split(".")[:-1], joined) for name in names]
    return [tuple(number[holder] for holder in each if holder in number) for each in holders]


def options_of(start: Keeps, recomputes: bool) -> list[Keeps]:
    """What a unit may keep that keeps ``start`` if nothing is given up."""
    again = (start.recomputes, True) if recomputes and not start.recomputes else (start.recomputes,)
    return [Keeps(stays, each) for stays in range(start.stays, UNTIL_FORWARD + 1) for each in again]


def steps_between(start: Choices, end: Choices, order: Sequence[int]) -> Iterator[tuple[int, Keeps]]:
    """What is given up from ``start`` to ``end``, one thing of one unit after the other, with what it keeps then."""
    for unit in order:
        for stays in range(start[unit].stays + 1, end[unit].stays + 1):
            yield unit, Keeps(stays, start[unit].recomputes)
    for unit in order:
        if end[unit].recomputes != start[unit].recomputes:
            yield unit, end[unit]


def patterns(names: Sequence[str]) -> list[tuple[bool, ...]]:
    """Rows that say of each unit whether it recomputes. With these each two neighbours have each two choices.

    Of the units of a depth none does, or the odd ones, the even ones, or all, for each choice of those of a lesser depth,
    which all do the same. Of those of a greater depth none does. In the first row none does.
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
