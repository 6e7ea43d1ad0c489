"""``plan``: the units, collectives, memory and time of a step, without a process group or a GPU.

``_plan.py`` is the entry. ``_program.py`` shards a copy of the module on the meta device, and runs steps. ``_recording.py``
records their collectives and memory, and ``_hardware.py`` models times. ``_report.py`` shows the result.
"""

from flatshard.planning._hardware import Bandwidths
from flatshard.planning._plan import plan
from flatshard.planning._records import Collective, Memory, Peak, Sample, Span, Timeline
from flatshard.planning._report import Plan, UnitPlan

__all__ = ["Bandwidths", "Collective", "Memory", "Peak", "Plan", "Sample", "Span", "Timeline", "UnitPlan", "plan"]
