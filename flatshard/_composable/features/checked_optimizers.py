"""Remembers which optimizers have been checked, so that each is checked once for the parameters it has."""

from __future__ import annotations

import weakref

from torch.optim import Optimizer


class CheckedOptimizers:
    """A set of optimizers. An optimizer that got more parameters since (``add_param_group``) is no longer in it."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def __contains__(self, optimizer: Optimizer) -> bool:
        return self._counts.get(optimizer) == _count(optimizer)

    def add(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` has been checked with the parameters that it has now."""
        self._counts[optimizer] = _count(optimizer)

    def clear(self) -> None:
        """Forget all optimizers, so that they are checked again."""
        self._counts.clear()


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
