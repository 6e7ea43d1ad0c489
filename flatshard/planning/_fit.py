"""``fit``: what to give up so that a step is within a budget of memory.

[Note: What is given up]
Within one *setting* each unit gives up what it has to: gathered parameters, for bytes sent; activations, for operations.
Whether the outermost unit is split costs bytes, too: of both settings the one is taken whose choice costs less in all. What
units may be gathered ahead, whether a hybrid strategy's parts are over all ranks, and whether parts are on the host: bytes do
not say what these cost. So such settings are tried in a fixed order, the next one only if nothing fits in those before it.
Of limits for what is gathered ahead the highest is taken that fits. ``_timeline.py`` finds a choice; each choice that is
returned has been planned itself, so that its peak is that of the program.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from flatshard._composable.construct.policy import Policy, SplitRoot
from flatshard._composable.find import units_of_parameters
from flatshard._config import MixedPrecision, ShardingStrategy
from flatshard.planning._arguments import check_arguments, default_loss, device_type, largest, parse_bytes, repeated
from flatshard.planning._choices import (
    UNTIL_BACKWARD,
    UNTIL_CHANGE,
    UNTIL_FORWARD,
    Choices,
    Costs,
    Keeps,
    options_of,
    patterns,
    steps_between,
)
from flatshard.planning._chooser import Sums, cheapest, peaks_along
from flatshard.planning._fitted import Fit, GivenUp, UnitFit, Unlimited, in_words, names_in_short
from flatshard.planning._on_host import best_on_host, cheaper_on_host, copied_for, copied_nbytes, fewest_on_host
from flatshard.planning._optimizer import OptimizerChoice
from flatshard.planning._picture import in_bytes
from flatshard.planning._program import StepOptions
from flatshard.planning._records import Ranks
from flatshard.planning._report import Plan
from flatshard.planning._settings import EVERYTHING, Setting, Step, steps_to, strategies_of
from flatshard.planning._shorter import shortened
from flatshard.planning._stand_in import StandIn
from flatshard.planning._stitched import Stitched, runs_of_blocks
from flatshard.planning._timeline import Timeline

REFINED = 16
"""Units, up to which each thing given up is tried once more with the program itself, where the timeline is not exact."""


def fit(
    module: nn.Module,
    *,
    bytes_per_rank: float | str,
    world_size: int | tuple[int, int],
    optimizer: OptimizerChoice,
    example_inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    policy: Policy = None,
    mixed_precision: MixedPrecision | Any = None,
    ignored_states: Iterable[nn.Module | nn.Parameter] | None = None,
    microbatches: int = 1,
    largest_batch: bool = False,
    recompute: bool = True,
    cpu_offload: bool = False,
    offload_optimizer: bool = False,
    flops_per_byte: float = 8000.0,
    device: str = "cuda",
) -> Fit:
    """Choose what to give up so that a training step takes at most ``bytes_per_rank``, at the least cost. Needs no ranks.

    It decides for each unit whether its parameters stay gathered from forward to backward, and whether it computes its
    forward again in backward in place of keeping activations. If that is not enough: whether embeddings, final norm and
    head are units of their own (:class:`~flatshard.policies.SplitRoot`), which units are too large to be gathered ahead, with
    ``offload_optimizer`` whether optimizer state is on the host, and with ``cpu_offload`` which units have all that is theirs
    there: as few as are enough. The peak that it predicts is that of :func:`plan`, which runs the program on the meta device.

    Example::

        fit = flatshard.fit(
            model, bytes_per_rank="2 MiB", world_size=4, optimizer=torch.optim.AdamW, example_inputs=(batch,), device="cpu"
        )
        print(fit)  # fit.plot("step.svg") draws the memory over the step, with the budget

    A step is: forward, backward from ``loss``, ``optimizer.step()``, ``zero_grad()``, while the batch is kept. What the model
    returned is not kept beyond the loss. See :func:`plan` for what is counted. Leave room for what is not: buffers of
    communicators, fragmentation, what kernels allocate themselves, and the device's own context.

    Args:
        module: the whole module, not sharded, on any device; on meta it takes no memory. It is copied, and not changed.
        bytes_per_rank: the budget: bytes, or a text such as ``"40 GiB"``.
        world_size: the number of ranks to shard over. (replicas, ranks to shard over): hybrid strategies. Then pass
            ``device_mesh=`` to ``Fit.apply``, or ``process_group=``.
        optimizer, ignored_states, mixed_precision, microbatches, device: as for :func:`plan`.
        example_inputs: as for :func:`plan`: one microbatch of one rank. Shapes matter, and values of integers.
        loss: a function of what ``module`` returns. None: its ``loss``, if it has one, or else the sum of all tensors.
        policy: the units, as for :func:`fully_shard`, without arguments that it overrides. None: the blocks that the module
            repeats, as :func:`~flatshard.policies.find_blocks` finds them.
        largest_batch: True: find the largest microbatch with which a step fits, whatever is given up for it: ``Fit.batch``.
            ``example_inputs`` are repeated along the first dimension of those tensors that have as many rows as the first.
        recompute: False: no unit computes its forward again.
        cpu_offload: True: units may be on the host, or all of the model, if nothing else is enough.
        offload_optimizer: True: optimizer state may be on the host, and come to the device unit by unit. Then train with
            ``fit.optimizer(model.parameters())``. ``optimizer`` must be a class or a function.
        flops_per_byte: how many floating-point operations take as long as to send one byte: what is dear on your machine. It
            decides between gathering again and computing again.

    Raises:
        ValueError: nothing fits; the message has the least possible peak, and the number of ranks with which it would fit. Or
            an argument is wrong.
        NotImplementedError: the policy makes one unit of several modules, or overrides arguments.
    """
    check_arguments("fit", locals())
    budget = parse_bytes(bytes_per_rank)
    if not isinstance(module, nn.Module):
        raise TypeError(f"fit takes an nn.Module, got a {type(module).__name__}")
    ranks = Ranks(*world_size) if isinstance(world_size, tuple) else Ranks(1, world_size)
    if example_inputs is None:
        raise ValueError("fit: example_inputs must be the inputs of one microbatch, got None")
    if units_of_parameters(module):
        raise ValueError("fit: the module is sharded already: build it again, on meta it takes no memory")
    options = StepOptions(
        optimizer=optimizer,
        microbatches=microbatches,
        no_sync=microbatches > 1,
        activations=0,
        example_inputs=example_inputs,
        device=device_type(device),
        widens=None,
        loss=loss or default_loss,
        keeps_inputs=True,
        receives=True,
    )
    others = {"mixed_precision": mixed_precision, "ignored_states": ignored_states}
    if offload_optimizer and not callable(optimizer):
        raise ValueError("fit: with offload_optimizer, optimizer must be a class or a function that makes one")
    offloads = [Setting(states=True)] if offload_optimizer else []
    offloads += [Setting(states=offload_optimizer, offload=EVERYTHING)] if cpu_offload else []
    offloads = [] if options.device == "cpu" else offloads

    def search_of(inputs: Any) -> _Search:
        step = Step(module, dataclasses.replace(options, example_inputs=inputs), others)
        search = _Search(step, ranks, step.units(policy, ranks), budget, flops_per_byte, recompute)
        search.shorten()
        return search

    size, inputs = None, example_inputs
    if largest_batch:
        size = largest(lambda rows: search_of(repeated(example_inputs, rows)).least_peak(offloads), budget)
        inputs = repeated(example_inputs, size)
    fitted = search_of(inputs).run(offloads, "auto" if policy is None else "given")
    return dataclasses.replace(fitted, batch=size)


class _Search:
    """Finds the cheapest choice within ``budget``. [Note: What is given up]"""

    def __init__(
        self, step: Step, ranks: Ranks, names: list[str], budget: int, flops_per_byte: float, recompute: bool
    ) -> None:
        self.step, self.ranks, self.names, self.budget = step, ranks, names, budget
        self.flops_per_byte, self.recomputes = flops_per_byte, recompute
        self.notes: list[str] = []
        stays = UNTIL_CHANGE if step.options.microbatches > 1 else UNTIL_BACKWARD
        self.start: Choices = tuple(Keeps(stays, False) for _ in names)
        self.plans: dict[tuple[Setting, Choices], Plan] = {}
        self.timelines: dict[Setting, Timeline] = {}
        self.lowest: dict[Setting, Choices] = {}  # the choice of the lowest peak
        self.possible: dict[Setting, bool] = {}  # whether a step can run
        self.short: StandIn | None = None  # for a long model
        self.stitched: Stitched | None = None  # the same

    def shorten(self) -> None:
        """Search on a shorter model, if this one is long. [Note: Long models]"""
        made = shortened(self.step.module, self.names) if self._stitch() else None
        if made is not None:
            self.short = StandIn(self, made)

    def _stitch(self) -> bool:
        """Plan shorter models, if this one is long. [Note: Blocks with units inside]"""
        if self.step.others["ignored_states"] is not None:
            return False
        if runs := runs_of_blocks(self.step.module, self.names):
            self.stitched = Stitched(self, runs)
        return True

    def arguments(self, setting: Setting, choices: Choices) -> dict[str, Any]:
        """For ``fully_shard``."""
        policy: Any = {}
        for name, choice in zip(self.names, choices, strict=True):
            stays: dict[str, Any] = (
                {} if choice.stays == UNTIL_FORWARD else {"strategy": strategies_of(self.ranks)[choice.stays]}
            )
            if setting.joined and stays:
                stays = {"reshard_after_forward": False}
            policy[name] = stays | ({"recompute": True} if choice.recomputes else {})
            policy[name] |= {"cpu_offload": True} if name in setting.offload else {}
        given: dict[str, Any] = {"policy": SplitRoot(policy) if setting.split else policy}
        if self.ranks.replicas > 1:
            given["strategy"] = (
                ShardingStrategy.HYBRID_FULL_SHARD if setting.joined else strategies_of(self.ranks)[UNTIL_FORWARD]
            )
        if setting.limit is not None:
            none = {"backward_prefetch": None, "forward_prefetch": False}
            given |= {"prefetch_limit_bytes": setting.limit} if setting.limit else none
        given |= {"cpu_offload": True} if setting.offload == EVERYTHING else {}
        return given

    def plan(self, setting: Setting, choices: Choices) -> Plan:
        """The step of these choices."""
        key = setting, choices
        if key not in self.plans:
            made = None if self.stitched is None else self.stitched.plan(setting, choices)
            self.plans[key] = made or self._planned(setting, choices)
        return self.plans[key]

    def _planned(self, setting: Setting, choices: Choices) -> Plan:
        return self.step.plan(self.arguments(setting, choices), self.ranks, setting.states)

    @property
    def least(self) -> Choices:
        """Everything is given up."""
        return tuple(Keeps(UNTIL_FORWARD, self.recomputes) for _ in self.names)

    def run(self, offloads: Sequence[Setting], policy: str) -> Fit:
        """Try the settings in order. [Note: What is given up]

        Raises:
            ValueError: nothing fits.
        """
        if (found := self._first_that_fits(offloads)) is None:
            failed = [(self.peak(each, self._lowest(each)), each) for each in self._possible(offloads)]
            peak, setting = min(failed, key=lambda each: each[0])
            if peak > self.budget:
                raise ValueError(self._nothing_fits(peak, setting))
            # A rough timeline had left it out. By now each setting has learned from all of its plans.
            found = self._first_that_fits(offloads) or (setting, self._lowest(setting))
        return self._fitted(*found, offloads, policy)

    def _first_that_fits(self, offloads: Sequence[Setting]) -> tuple[Setting, Choices] | None:
        """The cheapest choice of the first kind of setting in which there is one."""
        for kind in self._kinds(offloads):
            found = self._best_on_host(kind) if kind.offload else self._best(kind) or self._best_with_limit(kind)
            if found is not None:
                return found
        return None

    def _kinds(self, offloads: Sequence[Setting]) -> list[Setting]:
        """The settings without what bytes say, and without limits, in order."""
        self.peak(Setting(), self.start)
        self._check_recompute()
        joins = self.ranks.replicas > 1 and self.step.options.microbatches == 1
        return [Setting(), *([Setting(joined=True)] if joins else []), *offloads]

    def _possible(self, offloads: Sequence[Setting]) -> Iterator[Setting]:
        """The settings in which a step can run, in order, without those that limit what is gathered ahead."""
        for kind in self._kinds(offloads):
            for limit, split in itertools.product((None, 0), (False, True)):
                setting = dataclasses.replace(kind, limit=limit, split=split)
                if self._is_possible(setting):
                    yield setting

    def _is_possible(self, setting: Setting) -> bool:
        if setting not in self.possible:
            try:
                self.peak(setting, self.least)
                self.possible[setting] = True
            except Exception as e:
                if setting == Setting():
                    raise
                self.possible[setting] = False
                self.notes.append(f"not possible: {', '.join(setting.given_up)} ({type(e).__name__}: {str(e)[:100]})")
        return self.possible[setting]

    def _best(self, setting: Setting) -> tuple[Setting, Choices] | None:
        """The cheapest choice that fits, whether the outermost unit is split or not. None: there is none."""
        found: tuple[Setting, Choices] | None = None
        least = math.inf
        for split in (False, True):
            each = dataclasses.replace(setting, split=split)
            if not self._is_possible(each) or (begins := self._sent_at_start(each)) >= least:
                continue
            if (choices := self._solve(each)) is not None:
                more = 0.0
                if choices != self.start:
                    costs, in_full = self._costs(each), self._timeline(each).nesting.in_full
                    more = costs.total(in_full(choices)) - costs.total(in_full(self.start))
                if begins + more < least:
                    least, found = begins + more, (each, choices)
        return found

    def _best_with_limit(self, kind: Setting) -> tuple[Setting, Choices] | None:
        """The same with the highest limit that fits for what is gathered ahead. None: nothing fits without it, either."""
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
        """Whether it fits if everything is given up that units have."""
        return self._least_over(setting) <= 0

    def _least_over(self, setting: Setting) -> float:
        """By how many bytes it is over the budget then. Infinite: ``setting`` is not possible."""
        settings = [dataclasses.replace(setting, split=split) for split in (False, True)]
        peaks = [self.peak(each, self.least) for each in settings if self._is_possible(each)]
        return min(peaks, default=math.inf) - self.budget

    def _best_on_host(self, kind: Setting) -> tuple[Setting, Choices] | None:
        """The cheapest choice with as few units on the host as fit. None: nothing fits. [Note: Units on the host]"""
        limited = dataclasses.replace(kind, limit=0)
        if not self._least_fits(limited):
            return None
        few = dataclasses.replace(kind, offload=self._fewest_on_host(limited))
        return self._best(few) or self._best_with_limit(few)

    def _fewest_on_host(self, kind: Setting) -> tuple[str, ...]:
        """The fewest units with which it fits, or ``EVERYTHING``."""
        search, setting = self._alike(Setting())
        like = range(len(self.names)) if self.short is None else self.short.made.like
        plan = search.plan(setting, search.least)

        def with_these(row: Sequence[bool]) -> Setting:
            return dataclasses.replace(kind, offload=tuple(itertools.compress(self.names, row)))

        def over(row: Sequence[bool]) -> float:
            return self._least_over(with_these(row))

        can_have = None if self.short is None else self.short.can_have
        few = fewest_on_host(best_on_host(plan, search.names, like), can_have, lambda row: over(row) <= 0)
        if few is not None and self.short is None:
            few = cheaper_on_host(few, plan, self.names, over([False] * len(few)), over)
        return EVERYTHING if few is None else with_these(few).offload

    def _alike(self, setting: Setting) -> tuple[_Search, Setting]:
        """The search whose plans say what is the same for the whole model, and ``setting`` there."""
        return (self, setting) if self.short is None else (self.short.search, self.short.setting(setting))

    def _sizes(self, kind: Setting) -> list[int]:
        """The sizes that units have which may be gathered ahead, the smallest first."""
        search, kind = self._alike(kind)
        split = dataclasses.replace(kind, limit=0, split=True)
        plan = search.plan(
            split if search._is_possible(split) else dataclasses.replace(split, split=False), search.least
        )
        return sorted({unit.unsharded_nbytes for unit in plan.units if unit.fqn and unit.unsharded_nbytes})

    def _sent_at_start(self, setting: Setting) -> int:
        """The bytes that a rank sends more in a step because of ``setting``."""
        search, setting = self._alike(setting)
        return search.plan(setting, search.start).sent_nbytes - search.plan(Setting(), search.start).sent_nbytes

    def least_peak(self, offloads: Sequence[Setting]) -> int:
        """That of a step in which everything is given up, in the setting in which it is lowest."""
        return min(self.peak(setting, self.least) for setting in self._possible(offloads))

    def peak(self, setting: Setting, choices: Choices) -> int:
        """The most bytes that a step takes."""
        if self.short is not None:
            return max(self._timeline(setting).memory(choices))
        return self.plan(setting, choices).total_peak.nbytes

    def _check_recompute(self) -> None:
        """Leave recomputation out, if the model cannot be computed again."""
        if self.short is not None:
            self.recomputes = self.short.search.recomputes
            self.notes += self.short.search.notes
        elif self.recomputes and self.names:
            try:
                self.plan(Setting(), self.least)
            except Exception as e:
                self.recomputes = False
                self.notes.append(f"no unit can compute its forward again ({type(e).__name__}: {str(e)[:100]})")

    def _solve(self, setting: Setting) -> Choices | None:
        """The cheapest choice in ``setting`` that fits. None: there is none."""
        if self.peak(setting, self.start) <= self.budget:
            return self.start
        if not self.names or not self._may_fit(setting):
            return None
        timeline, costs = self._timeline(setting), self._costs(setting)
        best = self.least if self.peak(setting, self.least) <= self.budget else None
        for _ in range(TRIES):
            choices = cheapest(timeline, costs, self.budget, self.start, self.recomputes)
            if self.short is not None:
                return choices
            if choices is None:
                break
            plan = self.plan(setting, choices)
            is_exact = plan.total_peak.nbytes == max(timeline.memory(choices))
            if plan.total_peak.nbytes <= self.budget:
                return choices if is_exact else self._refined(setting, choices, costs)
            timeline.learn(choices, plan)
        return None if best is None else self._refined(setting, best, costs)

    def _refined(self, setting: Setting, choices: Choices, costs: Costs) -> Choices:
        """``choices`` without what the program does not need."""
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

    def _lowest(self, setting: Setting) -> Choices:
        """The choice of the lowest peak that is found."""
        if setting not in self.lowest:
            self.lowest[setting] = self._find_lowest(setting)
        return self.lowest[setting]

    def _find_lowest(self, setting: Setting) -> Choices:
        best = self.least
        if not self.names:
            return best
        timeline, costs = self._timeline(setting), self._costs(setting)
        sums = Sums(timeline, self.start, self.recomputes)
        over, fits = self.budget, max(timeline.memory(best))
        while fits - over > max(1, fits // 1000):
            limit = (over + fits) // 2
            choices = sums.cheapest(costs, limit)
            over, fits = (limit, fits) if choices is None else (over, limit)
            best = best if choices is None else choices
        return min(best, self.least, key=lambda choices: self.peak(setting, choices))

    def _timeline(self, setting: Setting) -> Timeline:
        if setting not in self.timelines:
            self.timelines[setting] = self._learnt(setting) if self.short is None else self.short.timeline(setting)
        return self.timelines[setting]

    def _learnt(self, setting: Setting, *, roughly: bool = False) -> Timeline:
        """A timeline that has learned from plans. ``roughly``: from those alone in which all units do the same."""
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
        """Whether some choice may fit: by a rough timeline, within ``ROUGHLY`` times the budget. It takes fewer plans than to
        find the cheapest choice. What it leaves out is looked at again before ``run`` says that nothing fits."""
        if self.short is not None or self.stitched is not None or setting in self.timelines:
            return True
        rough = self._learnt(setting, roughly=True)
        return (
            cheapest(rough, self._costs(setting, rough), ROUGHLY * self.budget, self.start, self.recomputes) is not None
        )

    def _costs(self, setting: Setting, timeline: Timeline | None = None) -> Costs:
        """``timeline``: a rough one. None: that of ``setting``."""
        if self.short is not None:
            return self.short.costs(setting)
        least = self.plan(setting, self.least)
        microbatches = self.step.options.microbatches
        sent = dict.fromkeys(self.names, 0)
        for collective in least.collectives:
            if collective.kind == "all-gather" and collective.unit in sent:
                sent[collective.unit] += collective.sent_nbytes
        return Costs(
            [sent[name] / (2 * microbatches) for name in self.names],
            (timeline or self._timeline(setting)).computed_again(),
            microbatches,
            self.flops_per_byte,
        )

    def _fitted(self, setting: Setting, choices: Choices, offloads: Sequence[Setting], policy: str) -> Fit:
        if self.short is not None or self.stitched is not None:
            peak, plan = self.peak(setting, choices), self._planned(setting, choices)
            self.plans[setting, choices] = plan
            if plan.total_peak.nbytes != peak:  # its blocks are not as alike as they look
                self.short = self.stitched = None
                self.plans, self.timelines, self.lowest, self.possible = {}, {}, {}, {}
                return self.run(offloads, policy)
        plan = self.plan(setting, choices)
        strategies = dict(strategies_of(self.ranks))
        if setting.joined:
            strategies[UNTIL_FORWARD] = ShardingStrategy.HYBRID_FULL_SHARD
        units = [
            UnitFit(name, strategies[choice.stays].name, choice.recomputes, setting.is_on_host(name))
            for name, choice in zip(self.names, choices, strict=True)
        ]
        others = {name: value for name, value in self.step.others.items() if value is not None}
        given = self._given_up(setting, choices)
        return Fit(
            budget=self.budget,
            plan=plan,
            unlimited=self._unlimited(plan, given),
            units=tuple(units),
            given_up=tuple(given),
            arguments=self.arguments(setting, choices) | others,
            found="blocks that are repeated" if policy == "auto" else "the units of the policy",
            notes=tuple(self.notes),
            makes_optimizer=self.step.options.optimizer,
            offloads_optimizer=setting.states,
        )

    def _unlimited(self, plan: Plan, given: list[GivenUp]) -> Unlimited:
        if self.short is None:
            first = self.plan(Setting(), self.start)
            return Unlimited(first.total_peak.nbytes, first.sent_nbytes, first.flops or 0)
        sent = plan.sent_nbytes - sum(each.sent_nbytes for each in given)
        return Unlimited(self.peak(Setting(), self.start), sent, (plan.flops or 0) - sum(each.flops for each in given))

    def _given_up(self, setting: Setting, choices: Choices) -> list[GivenUp]:
        """In order, each with what is in memory after it: of settings by the program, of units by the timeline."""
        by_units = [] if choices == self.start else self._given_up_by_units(setting, choices)
        found, plan, before = [], self.plan(setting, choices), Setting()
        for text, changed in zip(setting.given_up, steps_to(setting), strict=True):
            (search, now), (_, then) = self._alike(changed), self._alike(before)
            sent = search.plan(now, search.start).sent_nbytes - search.plan(then, search.start).sent_nbytes
            of, copied = "", 0
            if changed.offload:
                hosts = None if changed.offload == EVERYTHING else changed.offload
                of = names_in_short(hosts, self.names) if hosts else ""
                copied = copied_nbytes(plan, hosts) - sum(each.copied_nbytes for each in by_units)
            elif changed.states and not before.states:
                stay = [each.optimizer_nbytes for each in plan.units if setting.is_on_host(each.fqn)]
                copied = 2 * (plan.host.optimizer - sum(stay))
            found.append(GivenUp(of, text, self.peak(changed, self.start), sent, copied, 0))
            before = changed
        return found + by_units

    def _given_up_by_units(self, setting: Setting, choices: Choices) -> list[GivenUp]:
        found = []
        timeline, costs = self._timeline(setting), self._costs(setting)
        steps = list(steps_between(self.start, choices, timeline.order))
        plans = {unit.fqn: unit for unit in self.plan(setting, choices).units}
        done = list(self.start)
        for (unit, keeps), peak in zip(steps, peaks_along(timeline, self.start, steps, self.recomputes), strict=True):
            beside = timeline.nesting.beside[unit]
            before = sum(costs.computed_again(each, timeline.nesting.state(each, done).keeps) for each in beside)
            what = in_words(keeps, done[unit])
            more = costs.sent(unit, keeps) - costs.sent(unit, done[unit])
            done[unit] = keeps
            again = (
                sum(costs.computed_again(each, timeline.nesting.state(each, done).keeps) for each in beside) - before
            )
            name = self.names[unit]
            gathered = more * self.ranks.shards / max(1, self.ranks.shards - 1)
            copied = round(copied_for(plans[name], gathered)) if setting.is_on_host(name) else 0
            found.append(GivenUp(name, what, peak, round(more), copied, round(again)))
        return [*found[:-1], found[-1]._replace(peak=self.peak(setting, choices))]

    def _nothing_fits(self, peak: int, setting: Setting) -> str:
        who = type(self.step.module).__name__
        said = (
            f"fit: {who} does not fit into {in_bytes(self.budget)} on {self.ranks}. The least possible peak is "
            f"{peak:,} bytes ({in_bytes(peak)})"
        )
        said += f", when {' and '.join(setting.given_up)}. " if setting.given_up else ". "
        if (ranks := self._ranks_that_fit(peak, setting)) is not None:
            return said + f"It would fit on {ranks}"
        at = self.plan(setting, self._lowest(setting)).total_peak
        return said + (
            f"More ranks are not enough: at the peak, in {at.phase} at unit {at.unit or '<root>'!r}, there are "
            f"{in_bytes(at.memory.activations)} of activations and {in_bytes(at.memory.unsharded)} of gathered parameters. "
            "Take smaller batches, or smaller units (policy=...)"
        )

    def _ranks_that_fit(self, peak: int, setting: Setting) -> Ranks | None:
        """The least number of ranks that is found, of multiples of 8 beyond 8."""
        lowest = self._lowest(setting)
        memory = self.plan(setting, lowest).total_peak.memory
        sharded = memory.shards + memory.gradients + memory.optimizer
        room = self.budget - (peak - sharded)
        for more in (1.0, 1.05, 1.2, 2.0, 8.0):
            if room <= 0:
                return None
            shards = max(self.ranks.shards + 1, int(more * self.ranks.shards * sharded / room))
            ranks = Ranks(self.ranks.replicas, shards if shards <= 8 else -(-shards // 8) * 8)
            other = _Search(self.step, ranks, self.names, self.budget, self.flops_per_byte, self.recomputes)
            other._stitch()
            if other.plan(setting, lowest).total_peak.nbytes <= self.budget:
                return ranks
        return None


ROUGHLY = 1.1
"""So many times the budget a choice may take by a rough timeline, for the search in its setting to go on."""
TRIES = 8
"""How often a search is corrected by what the program says."""
