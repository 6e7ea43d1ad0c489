"""Modules that are one unit together, and module trees that are one model."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


class ModuleTree:
    """The units of one module tree, and of those that a backward has reached together with it: a model. What it holds
    (``no_sync``) is reduced by a backward of its own, and not by that of another model, which may be gone on some ranks."""

    __slots__ = ("_with",)

    def __init__(self) -> None:
        self._with: ModuleTree | None = None  # another of the same model

    @property
    def model(self) -> ModuleTree:
        """The one tree that stands for all of the model."""
        tree = self
        while tree._with is not None:
            tree = tree._with
        return tree

    def join(self, other: ModuleTree) -> None:
        """Be of one model with ``other``."""
        mine, theirs = self.model, other.model
        if mine is not theirs:
            mine._with = theirs


class ModuleGroup(nn.ModuleList):
    """The modules that are one unit together. It is not in the user's module tree, and is never called."""


def called_modules(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules whose forwards are the unit's: ``module`` itself, or the modules of the group."""
    return tuple(module) if isinstance(module, ModuleGroup) else (module,)


def copy_with_attributes(module: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy, hooks included. Some classes would copy a few attributes only, such as ``torch.compile``'s."""
    memo[id(module)] = result = object.__new__(type(module))
    result.__setstate__(copy.deepcopy(module.__getstate__(), memo))
    return result
