"""The options that ``fit_to_memory`` chooses (``Configuration``), and the step that is planned with them (``Step``)."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from flatshard._base.config import ShardingStrategy
from flatshard._composable.construct.policy import Policy, SplitRoot, check_module
from flatshard._composable.fully_shard import Choice, choose
from flatshard._composable.module_tree import ModuleGroup
from flatshard._composable.unit_config import unit_config
from flatshard.optim._offload import OffloadedOptimizer
from flatshard.planning import _plan
from flatshard.planning._program import Program, StepOptions
from flatshard.planning._recording import MadeOnce
from flatshard.planning._records import Ranks
from flatshard.planning._report import StepPlan

UNTIL_CHANGE, UNTIL_BACKWARD, UNTIL_FORWARD = range(3)
"""How long a unit's parameters stay unsharded: until the shards change, until its backward ends, until its forward ends."""

_STRATEGIES = {
    UNTIL_CHANGE: (ShardingStrategy.SHARD_OPTIM, ShardingStrategy.HYBRID_SHARD_OPTIM),
    UNTIL_BACKWARD: (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD_ZERO2),
    UNTIL_FORWARD: (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD),
}


class UnitChoice(NamedTuple):
    """The choice for one unit."""

    fqn: str
    stays: int  # UNTIL_CHANGE, UNTIL_BACKWARD or UNTIL_FORWARD
    recomputes: bool = False
    on_host: bool = False


@dataclass(frozen=True)
class Configuration:
    """The options of a step."""

    units: tuple[UnitChoice, ...]  # without the outermost one, in module order
    outermost: int = UNTIL_FORWARD  # how long the outermost unit stays, and units that are split from it
    no_sync: bool = False  # only the last microbatch reduces gradients
    split: bool = False  # the outermost unit is split: by ``SplitRoot``
    limit: int | None = None  # for the units that are prefetched: ``prefetch_limit_bytes``. 0: none is
    joined: bool = False  # a hybrid strategy shards over all ranks
    states: bool = False  # optimizer state is on the host: by an ``OffloadedOptimizer``
    on_host: bool = False  # all of the model is

    def strategy_of(self, stays: int, ranks: Ranks) -> ShardingStrategy:
        """Return the strategy of units whose parameters stay unsharded so long."""
        if self.joined and stays == UNTIL_FORWARD:
            return ShardingStrategy.HYBRID_FULL_SHARD
        return _STRATEGIES[stays][ranks.replicas > 1]

    def hosts(self) -> set[str]:
        """Return the units whose parameters, gradients and optimizer state are on the host."""
        return {unit.fqn for unit in self.units if unit.on_host or self.on_host} | ({""} if self.on_host else set())

    def arguments(self, ranks: Ranks) -> dict[str, Any]:
        """Return the arguments of ``fully_shard``."""
        policy: Any = {}
        for unit in self.units:
            own = policy[unit.fqn] = dict[str, Any]()
            if unit.stays != self.outermost:
                kept = {"strategy": self.strategy_of(unit.stays, ranks)}
                own |= {"reshard_after_forward": False} if self.joined else kept
            own |= {"recompute": True} if unit.recomputes else {}
            own |= {"cpu_offload": True} if unit.on_host else {}
        given: dict[str, Any] = {"policy": SplitRoot(policy) if self.split else policy}
        strategy = self.strategy_of(self.outermost, ranks)
        given |= {"strategy": strategy} if strategy is not ShardingStrategy.FULL_SHARD else {}
        if self.limit is not None:
            none = {"backward_prefetch": None, "forward_prefetch": False}
            given |= {"prefetch_limit_bytes": self.limit} if self.limit else none
        return given | ({"cpu_offload": True} if self.on_host else {})


class Step:
    """The step of one module. ``others``: arguments of ``fully_shard`` that each configuration has."""

    def __init__(self, module: nn.Module, options: StepOptions, others: Mapping[str, Any]) -> None:
        self.module, self.options, self.others = module, options, others
        self._made = MadeOnce(options.device)
        self._plans: dict[tuple[Configuration, Ranks], StepPlan] = {}
        check_module(module)

    def units(self, policy: Policy, ranks: Ranks) -> list[str]:
        """Return the names of the units, without the outermost one.

        Raises:
            NotImplementedError: a unit is several modules, or the policy overrides arguments.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planned = self._choice({"policy": "auto" if policy is None else policy}, ranks).planned
        for unit in planned:
            if unit.config != planned[0].config or isinstance(unit.module, ModuleGroup):
                what = "is several modules" if isinstance(unit.module, ModuleGroup) else "has arguments of its own"
                raise NotImplementedError(
                    f"fit_to_memory: by this policy unit {unit.fqn or '<root>'!r} {what}: pass classes, a function or names"
                )
        return [unit.fqn for unit in planned if unit.fqn]

    def _choice(self, arguments: Mapping[str, Any], ranks: Ranks) -> Choice:
        defaults: dict[str, Any] = {
            "strategy": ShardingStrategy.FULL_SHARD,
            "backward_prefetch": "backward_pre",
            "forward_prefetch": True,
            "cpu_offload": None,
        }
        given: dict[str, Any] = defaults | {**self.others, **arguments}
        policy, ignored = given.pop("policy"), given.pop("ignored_states")
        return choose(self.module, policy, unit_config(**given), ignored, ranks.shards)

    def plan(self, configuration: Configuration, ranks: Ranks) -> StepPlan:
        """Return the plan of the step. Each is made once."""
        key = configuration, ranks
        if key not in self._plans:
            options = dataclasses.replace(self.options, no_sync=configuration.no_sync)
            if configuration.states:
                make: Any = options.optimizer
                offloaded = functools.partial(OffloadedOptimizer, optimizer_class=make)
                options = dataclasses.replace(options, optimizer=offloaded)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                choice = self._choice(configuration.arguments(ranks), ranks)
                _plan.check(choice, 0)
                self._plans[key] = _plan.plan_of(
                    Program(self.module, _plan.changed(choice), ranks, options, self._made)
                )
        return self._plans[key]
