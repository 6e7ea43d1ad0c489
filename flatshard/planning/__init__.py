"""What would be built, and what a step would take, before there is a process group or a GPU.

``_plan.py`` is the entry; ``_program.py`` shards and steps a copy on the meta device; ``_clock.py`` and ``_memory.py`` record
what it issues and holds; ``_hardware.py`` models times; ``_report.py`` and ``_trace.py`` show it.
"""

from flatshard.planning._hardware import Bandwidths, Collective, Span, Timeline
from flatshard.planning._memory import Memory, Peak
from flatshard.planning._plan import plan
from flatshard.planning._report import Plan, StrategyPlan, UnitPlan

__all__ = [
    "Bandwidths",
    "Collective",
    "Memory",
    "Peak",
    "Plan",
    "Span",
    "StrategyPlan",
    "Timeline",
    "UnitPlan",
    "plan",
]
