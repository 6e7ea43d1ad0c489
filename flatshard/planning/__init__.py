"""``plan``: the units, collectives, memory and time of a step, without a process group or a GPU.

``_plan.py`` is the entry. ``_program.py`` shards a copy of the module on the meta device, and runs steps. ``_clock.py``
records the collectives, and ``_memory.py`` the memory. ``_hardware.py`` models times. ``_report.py`` shows the result.
"""

from flatshard.planning._hardware import Bandwidths, Collective, Span, Timeline
from flatshard.planning._memory import Memory, Peak, Sample
from flatshard.planning._plan import plan
from flatshard.planning._report import Plan, UnitPlan

__all__ = [
    "Bandwidths",
    "Collective",
    "Memory",
    "Peak",
    "Plan",
    "Sample",
    "Span",
    "Timeline",
    "UnitPlan",
    "plan",
]
