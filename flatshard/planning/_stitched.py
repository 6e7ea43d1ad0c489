"""The plan of a long model whose blocks have units inside, from that of a model with fewer blocks.

[Note: Blocks with units inside]
What a block does in a step follows from its own choices and from those of ``REACH`` blocks on each side. So a model with
fewer blocks is planned, in which each block of the long one has a *double*: a block that chooses the same, among blocks that
do. The step of the long model is that of the doubles, one after the other: each begins with what those before it have left.
What is in memory between steps, and what the optimizer takes while it steps, grows by the same with each block that does the
same then: a model with one block more says by how much.

So the search is that on the whole model, with these plans in place of its own. The choice that it finds is planned itself.
The blocks need no units inside: of other long models (``_stand_in.py``) the plans of single choices are made so, too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import nn

from flatshard.planning import _shorter
from flatshard.planning._choices import UNTIL_CHANGE, Choices
from flatshard.planning._records import Collective, MemoryPair, Sample
from flatshard.planning._report import Plan
from flatshard.planning._settings import EVERYTHING, Setting, Step
from flatshard.planning._shorter import Run, joined, runs_of, without

REACH = 2
"""Blocks on each side from whose choices it follows what a block does."""

Search = Any
"""``_Search`` of ``_fit.py``, which imports this file."""

Block = tuple[int, int]
"""A run, and which block of it, by number."""


def runs_of_blocks(module: nn.Module, units: Sequence[str]) -> list[Run]:
    """The rows of blocks that are alike and have the same units inside, or none, of a long model."""
    found = []
    for run in runs_of(module, units) if len(units) >= _shorter.LONG else ():
        names = _names(run)
        inside = {tuple(unit[len(name) :] for unit in units if unit.startswith(f"{name}.")) for name in names}
        around = {*itertools.accumulate(run.holder.split("."), joined)}
        is_last = list(module.get_submodule(run.holder)._modules)[run.first :] == [n.rpartition(".")[2] for n in names]
        if is_last and around.isdisjoint(units) and len(inside) == 1:
            found.append(run)
    return found


def _names(run: Run) -> list[str]:
    return [joined(run.holder, str(run.first + number)) for number in range(run.length)]


class _Passage(NamedTuple):
    """Samples while one block runs, or none."""

    phase: str
    block: Block | None
    before: MemoryPair  # what those before have left
    samples: list[Sample]


class _Growth(NamedTuple):
    """What is more with one block more."""

    begins: MemoryPair  # between steps
    steps: tuple[list[MemoryPair], list[MemoryPair]]  # see ``_steps``: without it, and with it


class Stitched:
    """Makes plans for a search on a long model. [Note: Blocks with units inside]"""

    def __init__(self, whole: Search, runs: Sequence[Run]) -> None:
        self.whole, self.runs = whole, runs
        self.names = [_names(run) for run in runs]
        self.of = {name: (at, number) for at, names in enumerate(self.names) for number, name in enumerate(names)}
        self.searches: dict[tuple[int, ...], Search] = {}
        self.growths: dict[Hashable, _Growth] = {}
        self._block = functools.cache(self._find_block)

    def plan(self, setting: Setting, choices: Choices) -> Plan | None:
        """That of the long model. None: it has to be planned itself."""
        chosen: list[list[tuple[Any, ...]]] = [[()] * len(names) for names in self.names]
        hosts = set(setting.offload)
        for name, choice in zip(self.whole.names, choices, strict=True):
            if (block := self._block(name)) is not None:
                chosen[block[0]][block[1]] += ((choice, name in hosts),)
        around = [windows(each) for each in chosen]
        kept = [fewest(each) for each in around]
        if 2 * sum(map(len, kept)) > sum(map(len, around)):
            return None
        short = self._planned(setting, choices, kept)
        doubles = []
        for each, blocks in zip(around, kept, strict=True):
            places = {each[block]: place for place, block in enumerate(blocks)}
            doubles.append([places[window] for window in each])
        grown = [
            self._growth(setting, choices, kept, (at, block), chosen[at][block])
            for at, names in enumerate(self.names)
            for block in sorted({*range(len(names))} - {*kept[at]})
        ]
        order = _in_order(_passages(short, self._block), doubles)
        return None if order is None else self._stitched(short, order, grown, doubles)

    def _find_block(self, unit: str) -> Block | None:
        """The block that it is in."""
        around = itertools.accumulate(unit.split("."), joined)
        return next((self.of[name] for name in around if name in self.of), None)

    def _planned(self, setting: Setting, choices: Choices, kept: Sequence[Sequence[int]]) -> Plan:
        """The plan of a model that has only the blocks ``kept`` of each run."""
        whole, counts = self.whole, tuple(map(len, kept))
        if counts not in self.searches:
            step = Step(without(whole.step.module, self.runs, counts), whole.step.options, whole.step.others)
            step.learnt = whole.step.learnt
            blocks = [self._block(name) for name in whole.names]
            names = [n for n, b in zip(whole.names, blocks, strict=True) if b is None or b[1] < counts[b[0]]]
            self.searches[counts] = type(whole)(
                step, whole.ranks, names, whole.budget, whole.flops_per_byte, whole.recomputes
            )
        search = self.searches[counts]
        those = [
            number
            for number, block in enumerate(map(self._block, whole.names))
            if block is None or block[1] in kept[block[0]]
        ]
        if setting.offload != EVERYTHING:
            hosts = set(setting.offload)
            on_host = [whole.names[number] in hosts for number in those]
            setting = dataclasses.replace(setting, offload=tuple(itertools.compress(search.names, on_host)))
        made: Plan = search.plan(setting, tuple(choices[number] for number in those))
        return made

    def _growth(
        self, setting: Setting, choices: Choices, kept: Sequence[Sequence[int]], block: Block, chosen: tuple[Any, ...]
    ) -> _Growth:
        """By one block more that is as ``block``. ``chosen``: what its units do."""
        between_steps = tuple((keeps.stays == UNTIL_CHANGE, on_host) for keeps, on_host in chosen)
        key = block[0], between_steps, setting.joined, setting.states, setting.offload == EVERYTHING
        if key not in self.growths:
            more = [sorted({*blocks, block[1]}) if at == block[0] else blocks for at, blocks in enumerate(kept)]
            short, grown = (self._planned(setting, choices, each) for each in (kept, more))
            begins = _less(_pair(grown.samples[0]), _pair(short.samples[0]))
            self.growths[key] = _Growth(begins, (_steps(short), _steps(grown)))
        return self.growths[key]

    def _stitched(
        self, short: Plan, order: Sequence[tuple[_Passage, int]], grown: Sequence[_Growth], doubles: Sequence[list[int]]
    ) -> Plan:
        """The plan of the long model. Its collectives are not in order."""
        level = functools.reduce(_more, (each.begins for each in grown), _pair(short.samples[0]))
        samples = []
        for passage, number in order:
            begin = level
            for sample in passage.samples:
                level = _more(begin, _less(_pair(sample), passage.before))
                samples.append(Sample(sample.phase, self._name(sample.unit, number), *level))
        steps, growths = _steps(short), [each.steps for each in grown]
        if {*map(len, itertools.chain(*growths))} - {len(steps)}:  # it steps parameters one after the other
            steps, growths = _highest(steps), [(_highest(less), _highest(more)) for less, more in growths]
        for at, step in enumerate(steps):
            taken = functools.reduce(_more, (_less(more[at], less[at]) for less, more in growths), step)
            samples.append(Sample("optimizer", "", *_more(level, taken)))
        issued: dict[str, list[Collective]] = {}
        for each in short.collectives:
            issued.setdefault(each.unit, []).append(each)
        by_name = {unit.fqn: unit for unit in short.units}
        doubled: dict[int, dict[str, str]] = {at: {} for at in range(len(self.runs))}  # the units of each run
        for name in self.whole.names:
            if (of := self._block(name)) is not None:
                doubled[of[0]][name] = self._name(name, doubles[of[0]][of[1]])
        units, collectives = [], []
        for unit in short.units:
            block = self._block(unit.fqn)
            for name, like in ({unit.fqn: unit.fqn} if block is None else doubled.pop(block[0], {})).items():
                units.append(dataclasses.replace(by_name[like], fqn=name))
                collectives += [dataclasses.replace(each, unit=name) for each in issued.get(like, ())]
        return dataclasses.replace(
            short,
            units=tuple(units),
            samples=tuple(samples),
            collectives=tuple(collectives),
            flops=sum(unit.flops for unit in units),
        )

    def _name(self, unit: str, number: int) -> str:
        """That of the same unit in the block of this ``number``."""
        block = self._block(unit)
        return unit if block is None else self.names[block[0]][number] + unit[len(self.names[block[0]][block[1]]) :]


def windows(chosen: Sequence[Hashable]) -> list[Hashable]:
    """For each block what those chose on which it depends what it does."""
    edge = (None,) * REACH
    padded = (*edge, *chosen, *edge)
    return [padded[at : at + 2 * REACH + 1] for at in range(len(chosen))]


def fewest(around: Sequence[Hashable]) -> list[int]:
    """The blocks that remain, so that each other one has a double. ``around``: see ``windows``.

    Where the blocks between two that are alike have doubles before them, they go, and the second goes in place of the first.
    """
    kept: list[int] = []
    for block, window in enumerate(around):
        kept.append(block)
        same = [place for place, other in enumerate(kept[:-1]) if around[other] == window]
        if same and {around[each] for each in kept[same[-1] + 1 :]} <= {around[each] for each in kept[: same[-1] + 1]}:
            del kept[same[-1] + 1 :]
    return kept


def _passages(plan: Plan, block_of: Callable[[str], Block | None]) -> list[_Passage]:
    """The samples of ``plan`` before the optimizer steps. The outermost unit's after a block's are its own."""
    found: list[_Passage] = []
    before = _pair(plan.samples[0])
    for sample in plan.samples:
        if sample.phase == "optimizer":
            break
        is_new = not found or found[-1].phase != sample.phase
        block = block_of(sample.unit) if sample.unit or is_new else found[-1].block
        if is_new or found[-1].block != block:
            found.append(_Passage(sample.phase, block, before, []))
        found[-1].samples.append(sample)
        before = _pair(sample)
    return found


def _in_order(passages: Sequence[_Passage], doubles: Sequence[list[int]]) -> list[tuple[_Passage, int]] | None:
    """The passages of the long model, each as its double's, and the block's number. None: blocks do not run in a row."""
    order: list[tuple[_Passage, int]] = []
    for (_, run), group in itertools.groupby(passages, key=lambda each: (each.phase, each.block and each.block[0])):
        parts = list(group)
        if run is None:
            order += [(each, 0) for each in parts]
            continue
        numbers = [each.block[1] for each in parts if each.block]
        by_number = dict(zip(numbers, parts, strict=True))
        if numbers not in ([*range(len(set(doubles[run])))], [*range(len(set(doubles[run])))][::-1]):
            return None
        blocks = [*enumerate(doubles[run])]
        order += [(by_number[double], block) for block, double in (blocks if numbers[0] == 0 else blocks[::-1])]
    return order


def _steps(plan: Plan) -> list[MemoryPair]:
    """What there is while the optimizer steps, beside what there is as it begins."""
    samples = [_pair(sample) for sample in plan.samples if sample.phase == "optimizer"]
    last = next(_pair(sample) for sample in reversed(plan.samples) if sample.phase != "optimizer")
    return [_less(sample, last) for sample in samples]


def _highest(steps: list[MemoryPair]) -> list[MemoryPair]:
    return [max(steps, key=lambda step: step[0].total)]


def _pair(sample: Sample) -> MemoryPair:
    return sample.device, sample.host


def _more(one: MemoryPair, other: MemoryPair) -> MemoryPair:
    return one[0] + other[0], one[1] + other[1]


def _less(one: MemoryPair, other: MemoryPair) -> MemoryPair:
    return one[0] - other[0], one[1] - other[1]
