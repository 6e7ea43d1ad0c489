"""The step of one module for any choice: ``StepModel``, which plans it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatshard._base.config import ShardingStrategy
from flatshard._composable.construct.policy import SplitRoot
from flatshard.planning._choices import UNTIL_BACKWARD, UNTIL_CHANGE, UNTIL_FORWARD, Choices, Keeps
from flatshard.planning._records import Ranks
from flatshard.planning._report import StepPlan
from flatshard.planning._settings import EVERYTHING, Setting, Step, strategies_of


class StepModel:
    """The step of one module over ``ranks``, by setting and by what its units keep. Each is planned once.

    Args:
        step: the step.
        ranks: the ranks to shard over.
        names: of the units, without the outermost one.
    """

    is_exact = True  # whether all plans are those of the module itself

    def __init__(self, step: Step, ranks: Ranks, names: Sequence[str]) -> None:
        self.step, self.ranks, self.names = step, ranks, list(names)
        stays = UNTIL_CHANGE if step.options.microbatches > 1 else UNTIL_BACKWARD
        self.start: Choices = tuple(Keeps(stays, False) for _ in names)  # nothing is given up
        self._plans: dict[tuple[Setting, Choices], StepPlan] = {}

    def plan(self, setting: Setting, choices: Choices) -> StepPlan:
        """Return the plan of ``choices`` in ``setting``."""
        return self.plan_in_full(setting, choices)

    def plan_in_full(self, setting: Setting, choices: Choices) -> StepPlan:
        """Return the plan of the module itself."""
        key = setting, choices
        if key not in self._plans:
            self._plans[key] = self.step.plan(self.arguments(setting, choices), self.ranks, setting.states)
        return self._plans[key]

    def arguments(self, setting: Setting, choices: Choices) -> dict[str, Any]:
        """Return the arguments of ``fully_shard``."""
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
