"""``plan``: the units, collectives and memory of a step, without a process group or a GPU.

``_plan.py`` is the entry. ``_program.py`` shards a copy of the module on the meta device, and runs steps. ``_recording.py``
records their collectives, operations and memory. ``_report.py`` shows the result.
"""

from flatshard.planning._plan import plan
from flatshard.planning._records import Collective, Memory, Peak, Sample
from flatshard.planning._report import Plan, UnitPlan

__all__ = ["Collective", "Memory", "Peak", "Plan", "Sample", "UnitPlan", "plan"]
