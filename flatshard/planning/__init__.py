"""``plan_step``: the units, collectives and memory of a step, without a process group or a GPU.

It shards a copy of the module on the meta device, and runs steps. It records their collectives, operations and memory.

>>> print(flatshard.plan_step(model, policy={Block}, world_size=64))

``fit_to_memory`` chooses what to give up, so that a step is within a budget. It chooses by the cost of computing and of
sending, which ``measure_flops_per_byte`` measures.
"""

from typing import TYPE_CHECKING

from flatshard._base import old_names
from flatshard.planning._fit import fit_to_memory
from flatshard.planning._fitted import Baseline as Baseline
from flatshard.planning._fitted import MemoryFit as MemoryFit
from flatshard.planning._fitted import Tradeoff as Tradeoff
from flatshard.planning._fitted import UnitFit as UnitFit
from flatshard.planning._measure import measure_flops_per_byte
from flatshard.planning._plan import plan_step
from flatshard.planning._records import Memory as Memory
from flatshard.planning._records import Peak as Peak
from flatshard.planning._records import PlannedCollective as PlannedCollective
from flatshard.planning._records import Ranks as Ranks
from flatshard.planning._records import Sample as Sample
from flatshard.planning._report import StepPlan as StepPlan
from flatshard.planning._report import UnitPlan as UnitPlan

if not TYPE_CHECKING:
    __getattr__ = old_names.attributes(
        __name__,
        old={
            "Collective": "PlannedCollective",
            "Fit": "MemoryFit",
            "GivenUp": "Tradeoff",
            "Plan": "StepPlan",
            "Unlimited": "Baseline",
            "fit": "fit_to_memory",
            "plan": "plan_step",
        },
    )

__all__ = ["fit_to_memory", "measure_flops_per_byte", "plan_step"]
