"""Counts changes that users make to sharded parameters, so that a unit need not look for changes while the count is the same.

[Note: Looking only after a change]
A unit must notice ``p.data = ...``, ``p.requires_grad_()``, ``module.to()`` and ``module.weight = ...``. To check each
parameter in each forward takes 25 microseconds for 12 small ones, mostly for cache misses. All of these changes go through
Python attributes of :class:`ShardedParameter` or through :class:`GuardedParameters`, which count them here. A unit checks
its parameters only if the count has changed since its last check. There is one count per process, because changes are rare.
``torch.utils.swap_tensors`` would not be counted; but it refuses tensors with weak references, so each parameter has one.

Changes of values are not counted here: autograd's version counters show them (``FlatParamHandle.version``).
"""

from __future__ import annotations


class Changes:
    """The count of changes in this process."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def note(self) -> None:
        """Count a change of a sharded parameter, or of its registration, by the user."""
        self.count += 1


changes = Changes()
