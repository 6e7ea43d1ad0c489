"""``plan``: the units, collectives and memory of a step, without a process group or a GPU.

It shards a copy of the module on the meta device, and runs steps. It records their collectives, operations and memory.

>>> print(flatshard.plan(model, policy={Block}, world_size=64))

``fit`` chooses what to give up, so that a step is within a budget.
"""

from flatshard.planning._fit import fit
from flatshard.planning._fitted import Fit, GivenUp, UnitFit, Unlimited
from flatshard.planning._plan import plan
from flatshard.planning._records import Collective, Memory, Peak, Sample
from flatshard.planning._report import Plan, UnitPlan

__all__ = [
    "Collective",
    "Fit",
    "GivenUp",
    "Memory",
    "Peak",
    "Plan",
    "Sample",
    "UnitFit",
    "UnitPlan",
    "Unlimited",
    "fit",
    "plan",
]
