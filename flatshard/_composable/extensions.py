"""The seams of the core: what features plug into, without the core knowing them by name.

[Note: Features]
An :class:`Extension` takes part in ``fully_shard``. For each unit it may return a :class:`ForwardFeature`, which takes part
in the unit's forwards from then on. They are fixed when the unit is made: a feature that does not concern a unit costs it
nothing. ``flatshard/_extensions.py`` says which there are.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from flatshard._composable.forward import Forward
from flatshard._composable.state import Unit


class ForwardFeature:
    """What one feature does around the forwards of one unit. A subclass overrides the methods that it needs.

    A deep copy of the module makes one of the feature: see ``UnitHooks.__deepcopy__``.
    """

    def passes(self) -> bool:
        """Before a forward: whether the unit's hooks are to leave it alone."""
        return False

    def passed(self, output: Any) -> None:
        """After a forward that was left alone: the module has returned ``output``."""

    def enter(self, forward: Forward) -> None:
        """Before the unit is gathered. May show the parameters in another way, and set ``forward.gathers`` to False."""

    def before(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """When the parameters are there. Returns the arguments to use instead, or None."""

    def after(self, forward: Forward, output: Any) -> Any:
        """When the module has returned ``output``. Returns what to return instead, or None."""

    def leaving(self, outputs: list[torch.Tensor]) -> Iterable[torch.Tensor]:
        """Of a forward with gradients: tensors besides ``outputs`` through which backward may come back to the unit."""
        return ()

    def reduced(self) -> None:
        """The unit's gradients have come into ``.grad``."""


F = TypeVar("F", bound=ForwardFeature)


class Link(Generic[F]):
    """A unit's feature, for hooks on modules inside the unit: they are copied with their modules.

    A copy leads to no feature until the unit is copied, which must begin with its module; nor where an inner module is
    copied alone.
    """

    def __init__(self, feature: F | None) -> None:
        self._ref = None if feature is None else weakref.ref(feature)

    @property
    def feature(self) -> F | None:
        return None if self._ref is None else self._ref()

    def __deepcopy__(self, memo: dict[int, Any]) -> Link[F]:
        return Link(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Link, (self.feature,)  # whose unit refuses, and says what to do

    def give_to_copy(self, feature: F, memo: dict[int, Any]) -> Link[F]:
        """The copy by ``memo``, which leads to ``feature`` from now on."""
        result = copy.deepcopy(self, memo)
        result._ref = weakref.ref(feature)
        return result


class Extension:
    """What one feature does in a call of ``fully_shard``. A subclass overrides the methods that it needs."""

    def prepare(self, module: nn.Module) -> None:
        """Before anything is changed."""

    def attach(self, unit: Unit, modules: list[nn.Module]) -> ForwardFeature | None:
        """``unit`` is made; ``modules`` are its module and the submodules that belong to no other unit."""

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        """All units are ``made``."""


_extensions: list[Extension] = []


def use(*extensions: Extension) -> None:
    """Have every later ``fully_shard`` use ``extensions``, in this order, after those of earlier calls."""
    _extensions.extend(extensions)


def extensions() -> tuple[Extension, ...]:
    """The extensions in use, in order."""
    return tuple(_extensions)
