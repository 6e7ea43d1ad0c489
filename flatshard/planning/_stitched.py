"""The step of a long model, stitched from plans of models with fewer of its blocks.

[Note: Long models]
The memory of a block in a step depends on its own choices and on those of ``REACH`` blocks on each side. So a model with
fewer blocks is planned, in which each block of the long one has a *double*: a block with the same choices among the same
neighbours. The step of the long model is the step of the doubles in a row, each of which begins with the memory that is left
before it. Each block adds a fixed amount to the memory between steps and in the optimizer's step. A plan with one more block
tells how much.

So the search is that on the long model, with these plans in place of its own. The choice that it finds is planned in full. If
that plan says something else, the search is made on plans of the long model itself.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from flatshard.planning._choices import UNTIL_CHANGE, Choices, joined
from flatshard.planning._records import MemoryPair, PlannedCollective, Ranks, Sample
from flatshard.planning._report import StepPlan
from flatshard.planning._settings import EVERYTHING, Setting, Step
from flatshard.planning._shorter import Run, runs_of_blocks, without
from flatshard.planning._step_model import StepModel

REACH = 2
"""Blocks on each side whose choices change the memory of a block."""

Block = tuple[int, int]
"""The numbers of a run and of a block in it."""


def step_model(step: Step, ranks: Ranks, names: Sequence[str]) -> StepModel:
    """Return the step of a module, which is stitched if the module is long."""
    runs = runs_of_blocks(step.module, names) if step.others["ignored_states"] is None else []
    return Stitched(step, ranks, names, runs) if runs else StepModel(step, ranks, names)


class _Passage(NamedTuple):
    """The samples in a row while one block runs, or while none does."""

    phase: str
    block: Block | None
    before: MemoryPair  # the last sample before
    samples: list[Sample]


class _Growth(NamedTuple):
    """The memory that one more block adds."""

    begins: MemoryPair  # between steps
    steps: tuple[list[MemoryPair], list[MemoryPair]]  # ``_steps`` without and with the block


class Stitched(StepModel):
    """The step of a long model, by plans of models with fewer of its blocks. [Note: Long models]"""

    is_exact = False

    def __init__(self, step: Step, ranks: Ranks, names: Sequence[str], runs: Sequence[Run]) -> None:
        super().__init__(step, ranks, names)
        self.runs = runs
        self.blocks = [run.names for run in runs]
        self._block_of = {name: (at, number) for at, each in enumerate(self.blocks) for number, name in enumerate(each)}
        self._shorter: dict[tuple[int, ...], StepModel] = {}  # by the blocks of each run
        self._growths: dict[Hashable, _Growth] = {}
        self._stitched: dict[tuple[Setting, Choices], StepPlan | None] = {}
        self._block = functools.cache(self._find_block)

    def plan(self, setting: Setting, choices: Choices) -> StepPlan:
        """Return the stitched plan, or the plan in full if too many blocks choose differently."""
        key = setting, choices
        if key not in self._stitched:
            self._stitched[key] = self._stitched_plan(setting, choices)
        return self._stitched[key] or self.plan_in_full(setting, choices)

    def _stitched_plan(self, setting: Setting, choices: Choices) -> StepPlan | None:
        """Return the plan of the long model, or None if it must be planned in full."""
        chosen: list[list[tuple[Any, ...]]] = [[()] * len(names) for names in self.blocks]
        hosts = set(setting.offload)
        for name, choice in zip(self.names, choices, strict=True):
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
            for at, names in enumerate(self.blocks)
            for block in sorted({*range(len(names))} - {*kept[at]})
        ]
        order = _in_order(_passages(short, self._block), doubles)
        return None if order is None else self._stitch(short, order, grown, doubles)

    def _find_block(self, unit: str) -> Block | None:
        """Return the block that contains ``unit``, or None."""
        around = itertools.accumulate(unit.split("."), joined)
        return next((self._block_of[name] for name in around if name in self._block_of), None)

    def _planned(self, setting: Setting, choices: Choices, kept: Sequence[Sequence[int]]) -> StepPlan:
        """Return the plan of a model that has only the blocks ``kept`` of each run."""
        counts = tuple(map(len, kept))
        blocks = [self._block(name) for name in self.names]
        if counts not in self._shorter:
            step = Step(without(self.step.module, self.runs, counts), self.step.options, self.step.others)
            step.learnt = self.step.learnt
            names = [n for n, b in zip(self.names, blocks, strict=True) if b is None or b[1] < counts[b[0]]]
            self._shorter[counts] = StepModel(step, self.ranks, names)
        shorter = self._shorter[counts]
        those = [at for at, block in enumerate(blocks) if block is None or block[1] in kept[block[0]]]
        if setting.offload != EVERYTHING:
            hosts = set(setting.offload)
            on_host = [self.names[number] in hosts for number in those]
            setting = dataclasses.replace(setting, offload=tuple(itertools.compress(shorter.names, on_host)))
        return shorter.plan(setting, tuple(choices[number] for number in those))

    def _growth(
        self, setting: Setting, choices: Choices, kept: Sequence[Sequence[int]], block: Block, chosen: tuple[Any, ...]
    ) -> _Growth:
        """Return what one more block like ``block``, whose units keep ``chosen``, adds."""
        between_steps = tuple((keeps.stays == UNTIL_CHANGE, on_host) for keeps, on_host in chosen)
        # If any unit is on the host, the optimizer steps parameters one by one (``foreach`` of torch is for one device).
        offload = bool(setting.offload), setting.offload == EVERYTHING
        key = block[0], between_steps, setting.joined, setting.states, offload
        if key not in self._growths:
            more = [sorted({*blocks, block[1]}) if at == block[0] else blocks for at, blocks in enumerate(kept)]
            short, grown = (self._planned(setting, choices, each) for each in (kept, more))
            begins = _less(_pair(grown.samples[0]), _pair(short.samples[0]))
            self._growths[key] = _Growth(begins, (_steps(short), _steps(grown)))
        return self._growths[key]

    def _stitch(
        self,
        short: StepPlan,
        order: Sequence[tuple[_Passage, int]],
        grown: Sequence[_Growth],
        doubles: Sequence[list[int]],
    ) -> StepPlan:
        """Return the plan of the long model. Its collectives are grouped by unit, not in order."""
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
        issued: dict[str, list[PlannedCollective]] = {}
        for each in short.collectives:
            issued.setdefault(each.unit, []).append(each)
        by_name = {unit.fqn: unit for unit in short.units}
        doubled: dict[int, dict[str, str]] = {at: {} for at in range(len(self.runs))}  # the units of each run
        for name in self.names:
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
        """Return the name of the same unit in the block of this ``number``."""
        block = self._block(unit)
        return unit if block is None else self.blocks[block[0]][number] + unit[len(self.blocks[block[0]][block[1]]) :]


def windows(chosen: Sequence[Hashable]) -> list[Hashable]:
    """Return for each block the choices that its memory depends on."""
    edge = (None,) * REACH
    padded = (*edge, *chosen, *edge)
    return [padded[at : at + 2 * REACH + 1] for at in range(len(chosen))]


def fewest(around: Sequence[Hashable]) -> list[int]:
    """Return the blocks to keep so that each other one has a double. ``around`` is the result of ``windows``.

    If all blocks between two equal ones have doubles before them, the second is dropped together with these.
    """
    kept: list[int] = []
    for block, window in enumerate(around):
        kept.append(block)
        same = [place for place, other in enumerate(kept[:-1]) if around[other] == window]
        if same and {around[each] for each in kept[same[-1] + 1 :]} <= {around[each] for each in kept[: same[-1] + 1]}:
            del kept[same[-1] + 1 :]
    return kept


def _passages(plan: StepPlan, block_of: Callable[[str], Block | None]) -> list[_Passage]:
    """Split the samples of ``plan`` before the optimizer's step by block.

    Samples of the outermost unit after a block's belong to that block.
    """
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
    """Return the passages of the long model with the numbers of their blocks, or None if blocks do not run in a row."""
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


def _steps(plan: StepPlan) -> list[MemoryPair]:
    """Return the memory in the optimizer's step, beside what there is as it begins."""
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
