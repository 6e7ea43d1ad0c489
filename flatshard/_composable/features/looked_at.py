"""Which optimizers have been looked at: again when they have other parameters."""

from __future__ import annotations

import weakref

from torch.optim import Optimizer


class LookedAt:
    """Optimizers, each with the number of parameters that it had then: ``add_param_group`` adds some."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def __contains__(self, optimizer: Optimizer) -> bool:
        return self._counts.get(optimizer) == _count(optimizer)

    def add(self, optimizer: Optimizer) -> None:
        """It has been looked at as it is now."""
        self._counts[optimizer] = _count(optimizer)

    def clear(self) -> None:
        """Look at all of them again."""
        self._counts.clear()


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
