"""What users do to sharded parameters behind our back is counted, so that nobody need look while the count stands still.

[Note: Looking only after a change]
A unit must follow ``p.data = ...``, ``p.requires_grad_()``, ``module.to()``, ``module.weight = ...``. To look at each
parameter in each forward costs 25 microseconds for 12 small ones, most of it in cache misses. All of these go through
Python attributes of :class:`ShardedParameter` or through :class:`GuardedParameters`, which count them here; who is to
follow looks when the count is not the one that he saw last. One count for the process: changes are rare.
``torch.utils.swap_tensors`` would go past it, and refuses tensors with weak references: so each parameter has one.

Changes of values are not counted here: autograd's version counters tell them (``FlatParamHandle.version``).
"""

from __future__ import annotations


class Changes:
    """The count."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


changes = Changes()
