"""The search for the cheapest choice within a budget. [Note: What is given up]"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from flatshard.planning._choices import UNTIL_FORWARD, Choices, Costs, Keeps, options_of, patterns
from flatshard.planning._chooser import Sums, cheapest
from flatshard.planning._on_host import best_on_host, fewest_on_host
from flatshard.planning._settings import EVERYTHING, Setting
from flatshard.planning._step_model import StepModel
from flatshard.planning._timeline import Timeline

REFINED = 16
"""Largest number of units whose choice is refined by the program itself, where the timeline is not exact."""
ROUGHLY = 1.1
"""How many times the budget a choice may take by a rough timeline for the search in its setting to continue."""
TRIES = 8
"""How often a search is corrected by what the program says."""


class Search:
    """The search for the cheapest choice within ``budget`` for the step of ``model``. [Note: What is given up]"""

    def __init__(self, model: StepModel, budget: int, flops_per_byte: float, recomputes: bool) -> None:
        self.model, self.names, self.start, self.plan = model, model.names, model.start, model.plan
        self.budget, self.flops_per_byte, self.recomputes = budget, flops_per_byte, recomputes
        self.notes: list[str] = []  # what is not possible
        self._timelines: dict[Setting, Timeline] = {}
        self._lowest: dict[Setting, Choices] = {}
        self._possible: dict[Setting, bool] = {}  # whether a step can run

    @property
    def least(self) -> Choices:
        """The choice in which every unit gives up all that it can."""
        return tuple(Keeps(UNTIL_FORWARD, self.recomputes) for _ in self.names)

    def find(self, offloads: Sequence[Setting]) -> tuple[Setting, Choices]:
        """Return the cheapest setting and choice that fit, or those of the lowest peak if nothing fits.

        Args:
            offloads: the settings to try last. [Note: What is given up]
        """
        if (found := self._first_that_fits(offloads)) is not None:
            return found
        lowest = [(setting, self.lowest(setting)) for setting in self._possible_settings(offloads)]
        best = min(lowest, key=lambda each: self.peak(*each))
        if self.peak(*best) > self.budget:
            return best
        # A rough timeline left this setting out (``_may_fit``). By now each setting has learned from all of its plans.
        return self._first_that_fits(offloads) or best

    def _first_that_fits(self, offloads: Sequence[Setting]) -> tuple[Setting, Choices] | None:
        """Return the cheapest choice in the first kind of setting that fits, or None if none does."""
        for kind in self._kinds(offloads):
            found = self._best_on_host(kind) if kind.offload else self._best(kind) or self._best_with_limit(kind)
            if found is not None:
                return found
        return None

    def _kinds(self, offloads: Sequence[Setting]) -> list[Setting]:
        """Return the kinds of settings in the order in which they are tried, each without ``split`` and ``limit``."""
        self.peak(Setting(), self.start)
        self._check_recompute()
        joins = self.model.ranks.replicas > 1 and self.model.step.options.microbatches == 1
        return [Setting(), *([Setting(joined=True)] if joins else []), *offloads]

    def _possible_settings(self, offloads: Sequence[Setting]) -> Iterator[Setting]:
        """Yield the settings in which a step can run, with no prefetch limit or with a limit of 0."""
        for kind in self._kinds(offloads):
            for limit, split in itertools.product((None, 0), (False, True)):
                setting = dataclasses.replace(kind, limit=limit, split=split)
                if self._is_possible(setting):
                    yield setting

    def _is_possible(self, setting: Setting) -> bool:
        """Return whether a step can run in ``setting``. If it fails, ``notes`` says why."""
        if setting not in self._possible:
            try:
                self.peak(setting, self.least)
                self._possible[setting] = True
            except Exception as e:
                if setting == Setting():
                    raise
                self._possible[setting] = False
                self.notes.append(f"not possible: {', '.join(setting.given_up)} ({type(e).__name__}: {str(e)[:100]})")
        return self._possible[setting]

    def _best(self, setting: Setting) -> tuple[Setting, Choices] | None:
        """Return the cheapest choice that fits, with the outermost unit split or not, or None if none does."""
        found: tuple[Setting, Choices] | None = None
        least = math.inf
        for split in (False, True):
            each = dataclasses.replace(setting, split=split)
            if not self._is_possible(each) or (begins := self._sent_at_start(each)) >= least:
                continue
            if (choices := self._solve(each)) is not None:
                more = 0.0
                if choices != self.start:
                    costs, in_full = self.costs(each), self.timeline(each).nesting.in_full
                    more = costs.total(in_full(choices)) - costs.total(in_full(self.start))
                if begins + more < least:
                    least, found = begins + more, (each, choices)
        return found

    def _best_with_limit(self, kind: Setting) -> tuple[Setting, Choices] | None:
        """Return the cheapest choice with the highest prefetch limit that fits, or None if nothing fits without prefetch."""
        lowest = self._best(dataclasses.replace(kind, limit=0))
        if lowest is None:
            return None
        limits = [0, *self._sizes(kind)[:-1]]
        fits, over = 0, len(limits)
        while over - fits > 1:
            middle = (fits + over) // 2
            is_enough = self._least_fits(dataclasses.replace(kind, limit=limits[middle]))
            fits, over = (middle, over) if is_enough else (fits, middle)
        return self._best(dataclasses.replace(kind, limit=limits[fits])) or lowest

    def _least_fits(self, setting: Setting) -> bool:
        """Return whether a step fits if units give up all that they can, with the outermost one split or not."""
        settings = [dataclasses.replace(setting, split=split) for split in (False, True)]
        return any(self.peak(each, self.least) <= self.budget for each in settings if self._is_possible(each))

    def _best_on_host(self, kind: Setting) -> tuple[Setting, Choices] | None:
        """Return the cheapest choice with as few units on the host as fit, or None. [Note: Units on the host]"""
        limited = dataclasses.replace(kind, limit=0)
        if not self._least_fits(limited):
            return None
        few = dataclasses.replace(kind, offload=self._fewest_on_host(limited))
        return self._best(few) or self._best_with_limit(few)

    def _fewest_on_host(self, kind: Setting) -> tuple[str, ...]:
        """Return the fewest units on the host with which a step fits, or ``EVERYTHING``."""
        plan = self.plan(Setting(), self.least)

        def in_order(units: Sequence[str]) -> tuple[str, ...]:
            return tuple(sorted(units, key=self.names.index))

        def is_enough(units: Sequence[str]) -> bool:
            return self._least_fits(dataclasses.replace(kind, offload=in_order(units)))

        few = fewest_on_host(best_on_host(plan, self.names), is_enough)
        return EVERYTHING if few is None else in_order(few)

    def _sizes(self, kind: Setting) -> list[int]:
        """Return the sizes of the unsharded units that may be prefetched, in ascending order."""
        split = dataclasses.replace(kind, limit=0, split=True)
        plan = self.plan(split if self._is_possible(split) else dataclasses.replace(split, split=False), self.least)
        return sorted({unit.unsharded_nbytes for unit in plan.units if unit.fqn and unit.unsharded_nbytes})

    def _sent_at_start(self, setting: Setting) -> int:
        """Return how many more bytes a rank sends in a step because of ``setting``."""
        return self.plan(setting, self.start).sent_nbytes - self.plan(Setting(), self.start).sent_nbytes

    def least_peak(self, offloads: Sequence[Setting]) -> int:
        """Return the lowest peak over all settings of a step in which units give up all that they can."""
        return min(self.peak(setting, self.least) for setting in self._possible_settings(offloads))

    def peak(self, setting: Setting, choices: Choices) -> int:
        """Return the peak of a step in bytes."""
        return self.plan(setting, choices).total_peak.nbytes

    def _check_recompute(self) -> None:
        """Rule out recomputation if the model cannot run with it."""
        if self.recomputes and self.names:
            try:
                self.plan(Setting(), self.least)
            except Exception as e:
                self.recomputes = False
                self.notes.append(f"no unit can compute its forward again ({type(e).__name__}: {str(e)[:100]})")

    def _solve(self, setting: Setting) -> Choices | None:
        """Return the cheapest choice in ``setting`` that fits, or None if none does."""
        if self.peak(setting, self.start) <= self.budget:
            return self.start
        if not self.names or not self._may_fit(setting):
            return None
        timeline, costs = self.timeline(setting), self.costs(setting)
        best = self.least if self.peak(setting, self.least) <= self.budget else None
        for _ in range(TRIES):
            choices = cheapest(timeline, costs, self.budget, self.start, self.recomputes)
            if choices is None:
                break
            plan = self.plan(setting, choices)
            is_exact = plan.total_peak.nbytes == max(timeline.memory(choices))
            if plan.total_peak.nbytes <= self.budget:
                return choices if is_exact else self._refined(setting, choices, costs)
            timeline.learn(choices, plan)
        return None if best is None else self._refined(setting, best, costs)

    def _refined(self, setting: Setting, choices: Choices, costs: Costs) -> Choices:
        """Return ``choices`` without what the program itself shows to be unnecessary."""
        if len(choices) > REFINED:
            return choices
        dearest = sorted(range(len(choices)), key=lambda unit: costs.of(unit, choices[unit]), reverse=True)
        for unit in dearest:
            for keeps in sorted(options_of(self.start[unit], self.recomputes), key=lambda each: costs.of(unit, each)):
                if costs.of(unit, keeps) >= costs.of(unit, choices[unit]):
                    break
                changed = (*choices[:unit], keeps, *choices[unit + 1 :])
                if self.peak(setting, changed) <= self.budget:
                    choices = changed
                    break
        return choices

    def lowest(self, setting: Setting) -> Choices:
        """Return the choice with the lowest peak that is found in ``setting``."""
        if setting not in self._lowest:
            self._lowest[setting] = self._find_lowest(setting)
        return self._lowest[setting]

    def _find_lowest(self, setting: Setting) -> Choices:
        """Bisect the limit of memory to a thousandth of it."""
        best = self.least
        if not self.names:
            return best
        timeline, costs = self.timeline(setting), self.costs(setting)
        sums = Sums(timeline, self.start, self.recomputes)
        over, fits = self.budget, max(timeline.memory(best))
        while fits - over > max(1, fits // 1000):
            limit = (over + fits) // 2
            choices = sums.cheapest(costs, limit)
            over, fits = (limit, fits) if choices is None else (over, limit)
            best = best if choices is None else choices
        return min(best, self.least, key=lambda choices: self.peak(setting, choices))

    def timeline(self, setting: Setting) -> Timeline:
        """Return the timeline of ``setting``, from which the memory of each choice follows."""
        if setting not in self._timelines:
            self._timelines[setting] = self._learnt(setting)
        return self._timelines[setting]

    def _learnt(self, setting: Setting, *, roughly: bool = False) -> Timeline:
        """Return a timeline that has learned from plans.

        Args:
            roughly: whether it learns only from plans in which all units do the same.
        """
        learnt = [self.least, self.start]
        if self.recomputes:
            rows = patterns(self.names)
            learnt += [tuple(Keeps(UNTIL_FORWARD, again) for again in row) for row in (rows[:1] if roughly else rows)]
        plans = {choices: self.plan(setting, choices) for choices in learnt}
        timeline = Timeline(list(plans.values()), self.names, setting.limit)
        for choices, plan in plans.items():
            timeline.learn(choices, plan)
        return timeline

    def _may_fit(self, setting: Setting) -> bool:
        """Return whether some choice may fit, by a rough timeline that takes few plans and ``ROUGHLY`` times the budget.

        ``find`` searches a setting that this leaves out once more before nothing fits.
        """
        if not self.model.is_exact or setting in self._timelines:
            return True
        rough = self._learnt(setting, roughly=True)
        return (
            cheapest(rough, self.costs(setting, rough), ROUGHLY * self.budget, self.start, self.recomputes) is not None
        )

    def costs(self, setting: Setting, timeline: Timeline | None = None) -> Costs:
        """Return the costs of giving up in ``setting``, by ``timeline`` or by the one of the setting."""
        least = self.plan(setting, self.least)
        microbatches = self.model.step.options.microbatches
        sent = dict.fromkeys(self.names, 0)
        for collective in least.collectives:
            if collective.kind == "all-gather" and collective.unit in sent:
                sent[collective.unit] += collective.sent_nbytes
        return Costs(
            [sent[name] / (2 * microbatches) for name in self.names],
            (timeline or self.timeline(setting)).computed_again(),
            microbatches,
            self.flops_per_byte,
        )
