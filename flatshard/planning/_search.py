"""The search for what a step gives up, so that it is within a budget. [Note: What is given up]

[Note: What is given up]
A *change* gives up one thing: a unit's gathered parameters, its activations, or an option of all units. With microbatches
the search begins with units that stay gathered until the shards change, and gradients that are reduced once. Changes are in
*levels*. The first level has those whose cost is known, bytes sent or operations computed again, in the order of cost for
each byte that they free. Bytes do not tell the cost of the others: less prefetch, shards of a hybrid strategy over all ranks,
and at last optimizer state and units on the host.

As few changes as possible are made of the last level, with all of those before it. Then as few as possible of the level
before, and so on. So nothing goes to the host if anything else is enough, and with units on the host as little else as
possible is given up. The program itself says whether a step fits: each configuration that is tried is planned.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from flatshard.planning._picture import in_bytes
from flatshard.planning._records import Ranks
from flatshard.planning._report import StepPlan
from flatshard.planning._step import UNTIL_BACKWARD, UNTIL_CHANGE, UNTIL_FORWARD, Configuration, Step, UnitChoice

FEW = 24
"""Most changes of the first level that are tried one by one, whether the step fits without them. Of more, only those of all
units are."""


class Change(NamedTuple):
    """A change of a configuration that gives up one thing."""

    what: str  # in words
    fields: dict[str, Any]  # of the fields of a ``UnitChoice``, or of a ``Configuration``
    unit: int | None = None  # its number, or None: all of the step
    cost: float = 0.0  # in bytes sent
    freed: float = 1.0  # bytes, as far as known

    @property
    def kind(self) -> tuple[Any, ...]:
        """A key that is equal for changes of one kind."""
        return self.unit is None, *self.fields, self.fields.get("stays")


class Search:
    """The search for one step over ``ranks``. [Note: What is given up]

    Args:
        step: the step.
        ranks: the ranks.
        names: the units, without the outermost one.
        budget: bytes on a rank.
        flops_per_byte: the operations that are worth one byte sent.
        recomputes: whether units may compute their forward again.
        hosts: whether optimizer state, and whether units may be on the host.
    """

    def __init__(
        self,
        step: Step,
        ranks: Ranks,
        names: Sequence[str],
        *,
        budget: int,
        flops_per_byte: float,
        recomputes: bool,
        hosts: tuple[bool, bool],
    ) -> None:
        self.step, self.ranks, self.budget, self._rate = step, ranks, budget, flops_per_byte
        self.notes: list[str] = []  # what is not possible
        self._accumulates = step.options.microbatches > 1
        stays = UNTIL_CHANGE if self._accumulates else UNTIL_BACKWARD
        self.start = Configuration(  # nothing is given up
            tuple(UnitChoice(name, stays) for name in names),
            outermost=UNTIL_CHANGE if self._accumulates else UNTIL_FORWARD,  # it stays until its backward anyway
            no_sync=self._accumulates,
        )
        self.first = step.plan(self.start, ranks)
        self._tried = [self.start]
        self._levels = self._all_levels(recomputes, *hosts)

    # -- changes -------------------------------------------------------------------------------------------------------

    def _all_levels(self, recomputes: bool, states: bool, units: bool) -> list[list[Change]]:
        names = [unit.fqn for unit in self.start.units]
        split = self._possible([Change("the outermost unit is split", {"split": True, "outermost": UNTIL_FORWARD})])
        first = self._unit_changes(recomputes)
        accumulation = [
            Change("gradients are reduced in each microbatch, without no_sync", {"no_sync": False}),
            Change("the outermost unit is freed after each backward", {"outermost": UNTIL_FORWARD}),
        ]
        for each in split + accumulation * self._accumulates:
            plan = self.plan([each])
            freed, sent = (
                self.first.total_peak.nbytes - plan.total_peak.nbytes,
                plan.sent_nbytes - self.first.sent_nbytes,
            )
            first.append(each._replace(cost=sent, freed=freed))
        first.sort(key=lambda change: change.cost / change.freed if change.freed > 0 else math.inf)
        sizes = sorted({u.unsharded_nbytes for u in self.plan(split).units if u.fqn and u.unsharded_nbytes})
        limits = [
            Change(f"units of more than {in_bytes(size)} are not gathered ahead", {"limit": size})
            for size in sizes[-2::-1]
        ]
        limits.append(Change("units are not gathered ahead", {"limit": 0}))
        joined = "gradients and optimizer state are over all ranks, and parameters come across groups once"
        is_joined = self.ranks.replicas > 1 and self.step.options.microbatches == 1
        on_host = "parameters, gradients and optimizer state are on the host"
        # The last units first: they reduce their gradients first, and forward begins with units that need no copy.
        hosts = [Change(on_host, {"on_host": True}, unit) for unit in reversed(range(len(names)))]
        hosts.append(Change(on_host, {"on_host": True}))
        return [
            first,
            limits,
            self._possible([Change(joined, {"joined": True})] if is_joined else []),
            self._possible(
                [Change("optimizer state is on the host, and comes unit by unit", {"states": True})] if states else []
            ),
            self._possible(hosts if units else []),
        ]

    def _unit_changes(self, recomputes: bool) -> list[Change]:
        """Return the changes of single units, in the order in which they are registered."""
        units, start = self.start.units, self.start.units[0].stays if self.start.units else UNTIL_FORWARD
        again = [Change("computes its forward again", {"recomputes": True}, number) for number in range(len(units))]
        again = self._possible(again) if recomputes else []
        freed = [Change("is freed after forward", {"stays": UNTIL_FORWARD}, number) for number in range(len(units))]
        least = self.plan([*again, *freed])
        by_name = {unit.fqn: unit for unit in least.units}
        sent: Counter[str] = Counter()
        for each in least.collectives:
            sent[each.unit] += each.sent_nbytes if each.kind == "all-gather" else 0
        flops = {unit.fqn: unit.flops for unit in self.first.units}
        saved, saved_again = _saved(self.first), _saved(least)
        count = self.step.options.microbatches
        found = []
        for number, unit in enumerate(units):
            gather, size = sent[unit.fqn] / (2 * count), by_name[unit.fqn].unsharded_nbytes
            if start == UNTIL_CHANGE:
                fields = {"stays": UNTIL_BACKWARD}
                found.append(Change("is freed after each backward", fields, number, (count - 1) * gather, size))
            found.append(freed[number]._replace(cost=count * gather, freed=size))
            if again:
                cost = (by_name[unit.fqn].flops - flops[unit.fqn]) / self._rate
                found.append(again[number]._replace(cost=cost, freed=saved[unit.fqn] - saved_again[unit.fqn]))
        return found

    def _possible(self, changes: list[Change]) -> list[Change]:
        """Return ``changes``, or none if the step cannot run with them. Then ``notes`` says why."""
        try:
            self.plan(changes)
        except Exception as e:
            self.notes.append(f"not possible: {changes[0].what} ({type(e).__name__}: {str(e)[:100]})")
            return []
        return changes

    def after(self, changes: Iterable[Change]) -> Configuration:
        """Return the configuration after ``changes``."""
        units, options = list(self.start.units), dict[str, Any]()
        for change in changes:
            if change.unit is None:
                options |= change.fields
            else:
                units[change.unit] = units[change.unit]._replace(**change.fields)
        return dataclasses.replace(self.start, units=tuple(units), **options)

    def plan(self, changes: Iterable[Change]) -> StepPlan:
        """Return the plan after ``changes``."""
        configuration = self.after(changes)
        plan = self.step.plan(configuration, self.ranks)
        self._tried.append(configuration)
        return plan

    # -- the search ----------------------------------------------------------------------------------------------------

    def find(self) -> list[Change]:
        """Return the changes with which the step fits, or all changes if it fits with none."""
        chosen: list[Change] = []
        for at, level in reversed([*enumerate(self._levels)]):
            before = [*itertools.chain(*self._levels[:at])]

            def fits(count: int) -> bool:
                return self._fits([*before, *level[:count], *chosen])  # noqa: B023  (called at once)

            count = 0 if fits(0) else bisect.bisect_left(range(len(level)), True, lo=min(1, len(level)), key=fits)
            chosen = [*level[:count], *chosen]
        few = [change for change in chosen if change in self._levels[0]]
        few = few if len(few) <= FEW else [change for change in few if change.unit is None]
        for change in sorted(few, key=lambda change: change.cost, reverse=True):
            less = [each for each in chosen if each is not change]
            chosen = less if self._fits(less) else chosen
        return chosen

    def _fits(self, changes: Sequence[Change]) -> bool:
        return self.plan(changes).total_peak.nbytes <= self.budget

    def lowest(self) -> Configuration:
        """Return the configuration with the lowest peak, of those that were tried and of those in which all is given up."""
        for count in range(1, len(self._levels) + 1):
            self.plan(itertools.chain(*self._levels[:count]))
        return min(self._tried, key=lambda each: self.step.plan(each, self.ranks).total_peak.nbytes)

    def copied_nbytes(self, changes: Iterable[Change]) -> int:
        """Return the bytes copied between a rank's host and device in a step after ``changes``."""
        configuration = self.after(changes)
        hosts, plan = configuration.hosts(), self.step.plan(configuration, self.ranks)
        stay = sum(unit.optimizer_nbytes for unit in plan.units if unit.fqn in hosts)
        states = plan.host.optimizer - stay if configuration.states else 0  # comes and goes
        return copied_nbytes(plan, hosts) + 2 * states


def copied_nbytes(plan: StepPlan, hosts: Collection[str]) -> int:
    """Return the bytes copied between host and device in a step, as the units ``hosts`` are on the host.

    These are shards to gather, and gradients, which are reduced once. A shard is copied in the dtype that it is kept in, then
    cast.
    """
    gathered: Counter[str] = Counter()
    for each in plan.collectives:
        gathered[each.unit] += each.nbytes * (each.kind == "all-gather")
    there = [unit for unit in plan.units if unit.fqn in hosts]
    return round(sum(u.shard_nbytes * gathered[u.fqn] / max(1, u.unsharded_nbytes) + u.gradient_nbytes for u in there))


def _saved(plan: StepPlan) -> Counter[str]:
    """Return the bytes of activations that are saved while each unit runs forward."""
    found: Counter[str] = Counter()
    for before, sample in itertools.pairwise(plan.samples):
        if sample.phase == "forward" and before.phase == "forward":
            found[sample.unit] += sample.device.activations - before.device.activations
    return found
