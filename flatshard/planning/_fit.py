"""``fit``: what to give up so that a step is within a budget of memory.

[Note: What is given up]
Within one *setting* (whether the outermost unit is split, whether units are gathered ahead, whether parts are on the host)
each unit gives up what it has to: gathered parameters, for bytes sent; activations, for operations. Settings are tried in
a fixed order, the next one only if nothing fits in those before it, as bytes do not say what they cost. ``_timeline.py``
finds a choice; each choice that is returned has been planned itself, so that its peak is that of the program.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from flatshard._composable.construct import validate
from flatshard._composable.construct.options import unit_config
from flatshard._composable.construct.policy import Policy, SplitRoot
from flatshard._composable.find import units_of_parameters
from flatshard._composable.fully_shard import choose
from flatshard._composable.state import ModuleGroup
from flatshard._config import MixedPrecision, ShardingStrategy
from flatshard.planning import _plan
from flatshard.planning._fitted import Fit, GivenUp, UnitFit
from flatshard.planning._optimizer import OptimizerChoice
from flatshard.planning._program import Program, StepOptions, sum_of
from flatshard.planning._records import Ranks
from flatshard.planning._report import Plan, in_bytes
from flatshard.planning._timeline import (
    UNTIL_BACKWARD,
    UNTIL_CHANGE,
    UNTIL_FORWARD,
    Choices,
    Costs,
    Give,
    Keeps,
    Timeline,
    after,
    all_gives,
    is_possible,
)

EXACT = 3
"""Units, up to which choices are planned in the order of their costs, until one fits."""
REFINED = 16
"""Units, up to which each thing given up is tried once more with the program itself, where the timeline is not exact."""


def fit(
    module: nn.Module,
    *,
    bytes_per_rank: float | str,
    world_size: int,
    optimizer: OptimizerChoice,
    example_inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    policy: Policy = None,
    mixed_precision: MixedPrecision | Any = None,
    ignored_states: Iterable[nn.Module | nn.Parameter] | None = None,
    microbatches: int = 1,
    recompute: bool = True,
    cpu_offload: bool = False,
    flops_per_byte: float = 8000.0,
    device: str = "cuda",
) -> Fit:
    """Choose what to give up so that a training step takes at most ``bytes_per_rank``, at the least cost. Needs no ranks.

    It decides for each unit whether its parameters stay gathered from forward to backward, and whether it computes its
    forward again in backward in place of keeping activations. If that is not enough: whether embeddings, final norm and
    head are units of their own (:class:`~flatshard.policies.SplitRoot`), whether units are gathered ahead, and, with
    ``cpu_offload``, whether parameters, gradients and optimizer state are on the host. The peak that it predicts is that of
    :func:`plan`, which runs the program on the meta device.

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
        world_size: the number of ranks to shard over.
        optimizer, ignored_states, mixed_precision, microbatches, device: as for :func:`plan`.
        example_inputs: as for :func:`plan`: one microbatch of one rank. Shapes matter, and values of integers.
        loss: a function of what ``module`` returns. None: its ``loss``, if it has one, or else the sum of all tensors.
        policy: the units, as for :func:`fully_shard`, without arguments that it overrides. None: the blocks that the module
            repeats, as :func:`~flatshard.policies.find_blocks` finds them.
        recompute: False: no unit computes its forward again.
        cpu_offload: True: parts may be on the host, if nothing else is enough.
        flops_per_byte: how many floating-point operations take as long as to send one byte: what is dear on your machine. It
            decides between gathering again and computing again.

    Raises:
        ValueError: nothing fits; the message has the least possible peak, and the number of ranks with which it would fit. Or
            an argument is wrong.
        NotImplementedError: the policy makes one unit of several modules, or overrides arguments.
    """
    budget = parse_bytes(bytes_per_rank)
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(
            f"fit: world_size must be a number of ranks, got {world_size!r}: hybrid strategies are not fitted"
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"fit takes an nn.Module, got a {type(module).__name__}")
    if example_inputs is None:
        raise ValueError("fit: example_inputs are needed: without them nothing is known of activations")
    if units_of_parameters(module):
        raise ValueError(
            f"fit: this {type(module).__name__} is sharded already: build it again, on meta it takes no memory"
        )
    options = StepOptions(
        optimizer=optimizer,
        microbatches=microbatches,
        no_sync=microbatches > 1,
        activations=0,
        example_inputs=example_inputs,
        device=device,
        widens=None,
        loss=loss or default_loss,
        keeps_inputs=True,
        receives=True,
    )
    step = _Step(module, options, {"mixed_precision": mixed_precision, "ignored_states": ignored_states})
    names = step.units(policy, world_size)
    search = _Search(step, world_size, names, budget, flops_per_byte, recompute)
    return search.run(cpu_offload and device.partition(":")[0] != "cpu", "auto" if policy is None else "given")


def default_loss(output: Any) -> Any:
    """``output.loss`` or ``output["loss"]``, or else the sum of its tensors."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return found if isinstance(found, Tensor) else sum_of(output)


def parse_bytes(value: float | str) -> int:
    """``"40 GiB"`` as bytes.

    Raises:
        ValueError: it is no size.
    """
    if isinstance(value, str) and (found := re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)(i?)B?\s*", value, re.IGNORECASE)):
        power = " KMGT".index(found[2].upper() or " ")
        return int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return int(value)
    raise ValueError(f'fit: bytes_per_rank={value!r} is no size: pass a number of bytes, or "40 GiB"')


@dataclass(frozen=True)
class Setting:
    """What holds for all units. [Note: What is given up]"""

    split: bool = False
    prefetch: bool = True
    offload: bool = False

    @property
    def given_up(self) -> list[str]:
        """In words."""
        texts = {
            "the outermost unit is split": self.split,
            "units are not gathered ahead": not self.prefetch,
            "parameters, gradients and optimizer state are on the host": self.offload,
        }
        return [text for text, holds in texts.items() if holds]


class _Step:
    """The step to plan, of one module."""

    def __init__(self, module: nn.Module, options: StepOptions, others: dict[str, Any]) -> None:
        self.module, self.options, self.others = module, options, others
        validate.check_module(module)

    def units(self, policy: Policy, world_size: int) -> list[str]:
        """The names of the units, without the outermost one."""
        arguments = {"policy": "auto" if policy is None else policy}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            choice = self._choice(arguments, world_size)
        names = []
        for unit in choice.planned:
            if unit.config != choice.planned[0].config or isinstance(unit.module, ModuleGroup):
                what = "is several modules" if isinstance(unit.module, ModuleGroup) else "has arguments of its own"
                raise NotImplementedError(
                    f"fit: by this policy unit {unit.fqn or '<root>'!r} {what}: pass classes, a function or names"
                )
            names += [unit.fqn] if unit.fqn else []
        return names

    def _choice(self, arguments: dict[str, Any], world_size: int) -> Any:
        defaults: dict[str, Any] = {
            "strategy": ShardingStrategy.FULL_SHARD,
            "backward_prefetch": "backward_pre",
            "forward_prefetch": True,
            "cpu_offload": None,
        }
        given: dict[str, Any] = defaults | self.others | arguments
        policy, ignored = given.pop("policy"), given.pop("ignored_states")
        return choose(self.module, policy, unit_config(**given), ignored, world_size)

    def plan(self, arguments: dict[str, Any], world_size: int) -> Plan:
        """The step, if the module is sharded with these arguments of ``fully_shard``."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            choice = self._choice(arguments, world_size)
            _plan.check(choice, 0)
            return _plan.plan_of(Program(self.module, _plan.changed(choice), Ranks(1, world_size), self.options))


class _Search:
    """Finds the cheapest choice within ``budget``. [Note: What is given up]"""

    def __init__(
        self, step: _Step, world_size: int, names: list[str], budget: int, flops_per_byte: float, recompute: bool
    ) -> None:
        self.step, self.world_size, self.names, self.budget = step, world_size, names, budget
        self.flops_per_byte, self.recomputes = flops_per_byte, recompute
        self.notes: list[str] = []
        stays = UNTIL_CHANGE if step.options.microbatches > 1 else UNTIL_BACKWARD
        self.start: Choices = tuple(Keeps(stays, False) for _ in names)
        self.plans: dict[tuple[Setting, Choices, int], Plan] = {}

    def arguments(self, setting: Setting, choices: Choices) -> dict[str, Any]:
        """For ``fully_shard``."""
        policy: Any = {}
        for name, choice in zip(self.names, choices, strict=True):
            policy[name] = {
                **({} if choice.stays == UNTIL_FORWARD else {"strategy": _STRATEGIES[choice.stays]}),
                **({"recompute": True} if choice.recomputes else {}),
            }
        given: dict[str, Any] = {"policy": SplitRoot(policy) if setting.split else policy}
        given |= {} if setting.prefetch else {"backward_prefetch": None, "forward_prefetch": False}
        given |= {"cpu_offload": True} if setting.offload else {}
        return given

    def plan(self, setting: Setting, choices: Choices, world_size: int | None = None) -> Plan:
        """The step of these choices."""
        key = setting, choices, world_size or self.world_size
        if key not in self.plans:
            self.plans[key] = self.step.plan(self.arguments(setting, choices), key[2])
        return self.plans[key]

    @property
    def least(self) -> Choices:
        """Everything is given up."""
        return tuple(Keeps(UNTIL_FORWARD, self.recomputes) for _ in self.names)

    def run(self, offload: bool, policy: str) -> Fit:
        """Try the settings in order.

        Raises:
            ValueError: nothing fits.
        """
        settings = [Setting(), Setting(split=True), Setting(prefetch=False), Setting(split=True, prefetch=False)]
        settings += [Setting(offload=True), Setting(True, False, True)] if offload else []
        first = self.plan(Setting(), self.start)
        self._check_recompute()
        failed: list[tuple[int, Setting]] = []
        for setting in settings:
            try:
                peak = self._peak(setting, self.least)
            except Exception as e:
                if setting == Setting():
                    raise
                self.notes.append(f"not possible: {', '.join(setting.given_up)} ({type(e).__name__}: {str(e)[:100]})")
                continue
            if self._peak(setting, self.start) <= self.budget:
                return self._fitted(setting, [], first, policy)
            if peak <= self.budget:
                return self._fitted(setting, self._solve(setting), first, policy)
            failed.append((peak, setting))
        raise ValueError(self._nothing_fits(*min(failed, key=lambda each: each[0])))

    def _peak(self, setting: Setting, choices: Choices) -> int:
        return self.plan(setting, choices).total_peak.nbytes

    def _check_recompute(self) -> None:
        """Leave recomputation out, if the model cannot be computed again."""
        if self.recomputes and self.names:
            try:
                self.plan(Setting(), self.least)
            except Exception as e:
                self.recomputes = False
                self.notes.append(f"no unit can compute its forward again ({type(e).__name__}: {str(e)[:100]})")

    def _solve(self, setting: Setting) -> list[Give]:
        """What to give up in ``setting``, in which the least choice fits."""
        timeline = self._timeline(setting)
        allowance, is_exact = 0, False
        best: list[Give] | None = None
        for _ in range(TRIES):
            gives = timeline.search(self.budget - allowance, self.start, self.recomputes)
            if gives is None:
                break
            choices = after(self.start, *gives)
            peak = self._peak(setting, choices)
            if peak <= self.budget and (best is None or timeline.costs.total(gives) < timeline.costs.total(best)):
                best = gives
            wrong = peak - max(timeline.memory(choices))
            is_exact = wrong == 0
            if (peak <= self.budget and wrong >= 0) or wrong == allowance:
                break
            allowance = wrong
        if best is None:
            best = list(all_gives(self.start, self.recomputes))
        if len(self.names) <= EXACT:
            for gives in timeline.in_order(self.start, self.recomputes):
                if gives == best or self._peak(setting, after(self.start, *gives)) <= self.budget:
                    return gives
        tries_all = not is_exact and len(self.names) <= REFINED
        return self._refined(setting, best, timeline.costs) if tries_all else best

    def _refined(self, setting: Setting, gives: list[Give], costs: Costs) -> list[Give]:
        """``gives`` without what the program does not need."""
        for give in sorted(gives, key=costs.of, reverse=True):
            rest = [each for each in gives if each != give]
            if is_possible(rest, self.start) and self._peak(setting, after(self.start, *rest)) <= self.budget:
                gives = rest
        return gives

    def _timeline(self, setting: Setting) -> Timeline:
        kept, least = self.plan(setting, self.start), self.plan(setting, self.least)
        return Timeline(kept, least, self.names, self._costs(kept, least))

    def _costs(self, kept: Plan, least: Plan) -> Costs:
        microbatches = self.step.options.microbatches
        sent = dict.fromkeys(self.names, 0)
        for collective in least.collectives:
            if collective.kind == "all-gather" and collective.unit in sent:
                sent[collective.unit] += collective.sent_nbytes
        before, now = ({unit.fqn: unit.flops for unit in plan.units} for plan in (kept, least))
        return Costs(
            [sent[name] / (2 * microbatches) for name in self.names],
            [float(now[name] - before[name]) for name in self.names],
            microbatches,
            self.flops_per_byte,
        )

    def _fitted(self, setting: Setting, gives: list[Give], first: Plan, policy: str) -> Fit:
        choices = after(self.start, *gives)
        plan = self.plan(setting, choices)
        units = [
            UnitFit(name, _STRATEGIES[choice.stays].name, choice.recomputes)
            for name, choice in zip(self.names, choices, strict=True)
        ]
        others = {name: value for name, value in self.step.others.items() if value is not None}
        return Fit(
            budget=self.budget,
            plan=plan,
            unlimited=first,
            units=tuple(units),
            given_up=tuple(self._given_up(setting, gives, first)),
            arguments=self.arguments(setting, choices) | others,
            found="blocks that are repeated" if policy == "auto" else "the units of the policy",
            notes=tuple(self.notes),
        )

    def _given_up(self, setting: Setting, gives: list[Give], first: Plan) -> list[GivenUp]:
        """In order, each with what is in memory after it: of settings by the program, of units by the timeline."""
        found = []
        now = first
        for text, changed in zip(setting.given_up, _steps_to(setting), strict=True):
            after_it = self.plan(changed, self.start)
            found.append(GivenUp("", text, after_it.total_peak.nbytes, after_it.sent_nbytes - now.sent_nbytes, 0))
            now = after_it
        if not gives:
            return found
        timeline = self._timeline(setting)
        done: list[Give] = []
        for give in gives:
            done.append(give)
            is_last = len(done) == len(gives)
            choices = after(self.start, *done)
            peak = self._peak(setting, choices) if is_last else max(timeline.memory(choices))
            is_sent = give.what != "activations"
            sent, flops = (timeline.costs.of(give), 0.0) if is_sent else (0.0, timeline.costs.flops[give.unit])
            found.append(GivenUp(self.names[give.unit], _GIVES[give.what], peak, round(sent), round(flops)))
        return found

    def _nothing_fits(self, peak: int, setting: Setting) -> str:
        who = type(self.step.module).__name__
        said = (
            f"fit: {who} does not fit into {in_bytes(self.budget)} on {self.world_size} ranks. The least possible peak is "
            f"{peak:,} bytes ({in_bytes(peak)})"
        )
        said += f", when {' and '.join(setting.given_up)}. " if setting.given_up else ". "
        if (ranks := self._ranks_that_fit(peak, setting)) is not None:
            return said + f"It would fit on {ranks:,} ranks"
        at = self.plan(setting, self.least).total_peak
        return said + (
            f"More ranks are not enough: at the peak, in {at.phase} at unit {at.unit or '<root>'!r}, there are "
            f"{in_bytes(at.memory.activations)} of activations and {in_bytes(at.memory.unsharded)} of gathered parameters. "
            "Take smaller batches, or smaller units (policy=...)"
        )

    def _ranks_that_fit(self, peak: int, setting: Setting) -> int | None:
        """The least number of ranks that is found, of multiples of 8 beyond 8."""
        memory = self.plan(setting, self.least).total_peak.memory
        sharded = memory.shards + memory.gradients + memory.optimizer
        room = self.budget - (peak - sharded)
        for more in (1.0, 1.05, 1.2, 2.0, 8.0):
            if room <= 0:
                return None
            ranks = max(self.world_size + 1, int(more * self.world_size * sharded / room))
            ranks = ranks if ranks <= 8 else -(-ranks // 8) * 8
            if self.plan(setting, self.least, ranks).total_peak.nbytes <= self.budget:
                return ranks
        return None


TRIES = 6
"""How often a search is corrected by what the program says."""

_STRATEGIES = {
    UNTIL_CHANGE: ShardingStrategy.SHARD_OPTIM,
    UNTIL_BACKWARD: ShardingStrategy.SHARD_GRAD_OP,
    UNTIL_FORWARD: ShardingStrategy.FULL_SHARD,
}
_GIVES = {
    "step": "is freed after each backward",
    "backward": "is freed after forward",
    "activations": "computes its forward again",
}


def _steps_to(setting: Setting) -> list[Setting]:
    """The settings that lead to ``setting``, one change after the other."""
    changes = {"split": setting.split, "prefetch": setting.prefetch, "offload": setting.offload}
    found = [Setting()]
    for name, value in changes.items():
        changed = dataclasses.replace(found[-1], **{name: value})
        found += [changed] if changed != found[-1] else []
    return found[1:]
