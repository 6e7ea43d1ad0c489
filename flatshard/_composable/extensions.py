"""The seams of the core: features plug in here, so that the core need not know them.

[Note: Features]
A feature plugs in by two classes, and takes part

- in ``fully_shard``, by an :class:`Extension`. It names the fact of a unit without which it does nothing (``concerns``),
  and is called only for units that have it. ``flatshard/_extensions.py`` lists the extensions;
- in the forwards of one unit, by a :class:`ForwardFeature`, which the extension returns for the unit (``attach``). A unit's
  features are fixed when it is created.

So a feature that a model does not use costs nothing, neither in ``fully_shard`` nor in a step. Two more seams are for single
cases. A function in ``Context.checks`` may refuse a pass before it begins. ``UnitHooks.replace_by`` replaces a unit's hooks
where forwards run on several threads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from flatshard._composable.state import Forward, Unit
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

        On a rank that skips the unit, ``before`` gets empty arguments, and ``after`` does not run. Recomputations in backward
        call all of them: see ``forward.in_backward``.
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


class Unrecorded(Protocol):
    """The hooks of a unit that replace its own inside ``keep_unsharded(threads=True)``: nothing is gathered or freed."""

    def check(self) -> Callable[[Any], object]:
        """Raise before a forward that needs a record. The result has no meaning."""

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Begin a forward of ``module``. Return new arguments, or None."""

    def end(self, module: nn.Module, output: Any) -> Any:
        """End a forward of ``module``, which has raised if ``output`` is None. Return a new output, or None."""


class Extension:
    """The part of one feature in a call of ``fully_shard``. A subclass overrides the methods that it needs."""

    concerns: ClassVar[operator.attrgetter[Any]] = operator.attrgetter("handle")
    """Get the fact of a unit without which the feature does nothing. By default one that all units have."""

    def set_up(self) -> None:
        """Called once, before the first ``fully_shard`` of the process changes anything."""

    def attach(self, unit: Unit, modules: list[nn.Module]) -> ForwardFeature | None:
        """Called for each new unit that it concerns, with its module and the submodules that belong to no other unit."""

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        """Called when all units have been ``made``, if it concerns one of them or one of an earlier call in ``module``."""


_extensions: list[Extension] = []
_not_set_up: list[Extension] = []


def use(*extensions: Extension) -> None:
    """Make every later ``fully_shard`` use ``extensions``, in this order, after those of earlier calls."""
    _extensions.extend(extensions)
    _not_set_up.extend(overriding(extensions, "set_up"))


def extensions() -> tuple[Extension, ...]:
    """Return the extensions in use, in order."""
    return tuple(_extensions)


def set_up() -> None:
    """Set up the extensions for which this has not been done yet."""
    while _not_set_up:
        _not_set_up.pop(0).set_up()


def overriding(extensions: Iterable[Extension], method: str) -> list[Extension]:
    """Return those of ``extensions`` that override this method of ``Extension``."""
    return [each for each in extensions if getattr(type(each), method) is not getattr(Extension, method)]
