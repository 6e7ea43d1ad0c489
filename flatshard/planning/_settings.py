"""The options of all units of a step (``Setting``), and the step that is planned with them."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from dataclasses import dataclass
from typing import Any

from torch import nn

from flatshard._base.config import ShardingStrategy
from flatshard._composable.construct.policy import Policy, check_module
from flatshard._composable.fully_shard import choose
from flatshard._composable.module_tree import ModuleGroup
from flatshard._composable.unit_config import unit_config
from flatshard.optim._offload import OffloadedOptimizer
from flatshard.planning import _plan
from flatshard.planning._choices import UNTIL_BACKWARD, UNTIL_CHANGE, UNTIL_FORWARD
from flatshard.planning._picture import in_bytes
from flatshard.planning._program import Learnt, Program, StepOptions
from flatshard.planning._records import Ranks
from flatshard.planning._report import StepPlan

EVERYTHING = ("",)
"""The value of ``Setting.offload`` for all of the model, with the outermost unit."""

_STRATEGIES = {
    UNTIL_CHANGE: ShardingStrategy.SHARD_OPTIM,
    UNTIL_BACKWARD: ShardingStrategy.SHARD_GRAD_OP,
    UNTIL_FORWARD: ShardingStrategy.FULL_SHARD,
}
_HYBRID_STRATEGIES = {
    UNTIL_CHANGE: ShardingStrategy.HYBRID_SHARD_OPTIM,
    UNTIL_BACKWARD: ShardingStrategy.HYBRID_SHARD_ZERO2,
    UNTIL_FORWARD: ShardingStrategy.HYBRID_SHARD,
}


def strategies_of(ranks: Ranks) -> dict[int, ShardingStrategy]:
    """Return strategies by how long a unit's parameters stay unsharded."""
    return _STRATEGIES if ranks.replicas == 1 else _HYBRID_STRATEGIES


@dataclass(frozen=True)
class Setting:
    """The options that hold for all units. [Note: What is given up]"""

    split: bool = False
    limit: int | None = None  # for what is gathered ahead: ``prefetch_limit_bytes``. 0: nothing is
    joined: bool = False  # of a hybrid strategy: the parts are over all ranks
    states: bool = False  # optimizer state is on the host: by an ``OffloadedOptimizer``
    offload: tuple[str, ...] = ()  # the units that are on the host. ``EVERYTHING``: all of the model is

    def is_on_host(self, unit: str) -> bool:
        return self.offload == EVERYTHING or unit in self.offload

    @property
    def given_up(self) -> list[str]:
        """The changes from the default setting, in words."""
        larger = f"units of more than {in_bytes(self.limit)} are not gathered ahead" if self.limit else ""
        texts = {
            "the outermost unit is split": self.split,
            larger or "units are not gathered ahead": self.limit is not None,
            "gradients and optimizer state are over all ranks, and parameters come across groups once": self.joined,
            "optimizer state is on the host, and comes unit by unit": self.states,
            "parameters, gradients and optimizer state are on the host": bool(self.offload),
        }
        return [text for text, holds in texts.items() if holds]


class Step:
    """The step to plan, of one module."""

    def __init__(self, module: nn.Module, options: StepOptions, others: dict[str, Any]) -> None:
        self.module, self.options, self.others = module, options, others
        self.learnt = {states: Learnt(options.device) for states in (False, True)}
        self.learnt[True].operations = self.learnt[False].operations
        check_module(module)

    def units(self, policy: Policy, ranks: Ranks) -> list[str]:
        """Return the names of the units, without the outermost one."""
        arguments = {"policy": "auto" if policy is None else policy}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            choice = self._choice(arguments, ranks)
        names = []
        for unit in choice.planned:
            if unit.config != choice.planned[0].config or isinstance(unit.module, ModuleGroup):
                what = "is several modules" if isinstance(unit.module, ModuleGroup) else "has arguments of its own"
                raise NotImplementedError(
                    f"fit_to_memory: by this policy unit {unit.fqn or '<root>'!r} {what}: pass classes, a function or names"
                )
            names += [unit.fqn] if unit.fqn else []
        return names

    def _choice(self, arguments: dict[str, Any], ranks: Ranks) -> Any:
        defaults: dict[str, Any] = {
            "strategy": ShardingStrategy.FULL_SHARD,
            "backward_prefetch": "backward_pre",
            "forward_prefetch": True,
            "cpu_offload": None,
        }
        given: dict[str, Any] = defaults | self.others | arguments
        policy, ignored = given.pop("policy"), given.pop("ignored_states")
        return choose(self.module, policy, unit_config(**given), ignored, ranks.shards)

    def plan(self, arguments: dict[str, Any], ranks: Ranks, states: bool = False) -> StepPlan:
        """Plan the step with these arguments of ``fully_shard``. ``states`` is the field of ``Setting``."""
        options = self.options
        if states:
            make: Any = options.optimizer
            options = dataclasses.replace(
                options, optimizer=functools.partial(OffloadedOptimizer, optimizer_class=make)
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            choice = self._choice(arguments, ranks)
            _plan.check(choice, 0)
            return _plan.plan_of(Program(self.module, _plan.changed(choice), ranks, options, self.learnt[states]))


def steps_to(setting: Setting) -> list[Setting]:
    """Return the settings that lead to ``setting``, one change after the other."""
    changes = vars(setting)
    found = [Setting()]
    for name, value in changes.items():
        changed = dataclasses.replace(found[-1], **{name: value})
        found += [changed] if changed != found[-1] else []
    return found[1:]
