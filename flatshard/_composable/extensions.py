"""The seams of the core: features plug in here, so that the core need not know them.

[Note: Features]
An :class:`Extension` takes part in ``fully_shard``. For each unit it may return a :class:`ForwardFeature`, which takes part
in the unit's forwards from then on. A unit's features are fixed when it is created, so a feature that does not concern a unit
costs it nothing. ``flatshard/_extensions.py`` lists the extensions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from flatshard._comm.runtime import Runtime
from flatshard._composable.state import Forward, Unit
from flatshard._composable.unit_config import UnitConfig
from flatshard._handle.unit_gradients import WithGradients


def _always() -> bool:
    return True


class ForwardFeature:
    """The part of one feature in the forwards of one unit. A subclass overrides the methods that it needs.

    A deep copy of the module copies the feature, too: see ``UnitHooks.__deepcopy__``.
    """

    wants_instead: Callable[[], object] = staticmethod(_always)
    """Whether ``instead`` is to be called before a forward: a function that costs little."""

    def instead(self) -> Callable[[Any], object] | None:
        """Called before a forward. Returns a function of its output if the unit's hooks should do nothing in it, or None."""

    def enter(self, forward: Forward) -> None:
        """Called before the unit is gathered. May show other parameters, and set ``forward.gathers`` to False.

        If a rank passes the unit by (``skip``), this and ``before`` are called without arguments, and ``after`` is not.
        """

    def before(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Called when the parameters are unsharded. Returns new arguments, or None."""

    def after(self, forward: Forward, output: Any) -> Any:
        """Called when the module has returned ``output``. Returns a new output, or None.

        It is also called if the module raised. Then ``output`` is None, and ``sys.exc_info()`` has the exception.
        """

    def before_unrecorded(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], outermost: bool
    ) -> tuple[Any, Any] | None:
        """Called instead of ``before`` in a forward without a record, perhaps on several threads at the same time."""

    def after_unrecorded(self, output: Any) -> Any:
        """Called instead of ``after`` in a forward without a record."""

    def leaving(self, outputs: list[torch.Tensor]) -> Iterable[torch.Tensor]:
        """Called with grad mode on. Returns tensors besides ``outputs`` through which backward may reach the unit."""
        return ()

    def reduced(self, given: WithGradients) -> None:
        """Called when the unit's reduced gradients have been set in ``.grad``, of the parameters ``given``."""


class Extension:
    """The part of one feature in a call of ``fully_shard``. A subclass overrides the methods that it needs."""

    def prepare(self, module: nn.Module, configs: Collection[UnitConfig], runtime: Runtime) -> None:
        """Called when the units of ``module`` and their ``configs`` are known, before anything is changed.

        ``runtime`` is that of the ranks to shard over, which all call it.
        """

    def attach(self, unit: Unit, modules: list[nn.Module]) -> ForwardFeature | None:
        """Called for each new unit, with its module and the submodules that belong to no other unit."""

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        """Called when all units have been ``made``."""


_extensions: list[Extension] = []


def use(*extensions: Extension) -> None:
    """Make every later ``fully_shard`` use ``extensions``, in this order, after those of earlier calls."""
    _extensions.extend(extensions)


def extensions() -> tuple[Extension, ...]:
    """Return the extensions in use, in order."""
    return tuple(_extensions)


def overriding(extensions: Iterable[Extension], method: str) -> list[Extension]:
    """Return those of ``extensions`` that override this method of ``Extension``."""
    return [each for each in extensions if getattr(type(each), method) is not getattr(Extension, method)]
