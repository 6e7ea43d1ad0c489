"""Where parameters are registered. The only file that writes a module's parameters.

A *slot* is one registration of one parameter: a module and a name. A shared parameter has several. Outside a unit's
forward and backward a slot holds the user's (sharded) parameter; inside, the compute parameter of full shape.
"""

from __future__ import annotations

import copy
import enum
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from flatshard._handle.tensors.changes import changes
from flatshard._handle.tensors.guard import GuardedParameters, Parameters

_exhaust: Callable[[Iterable[Any]], None] = deque[Any](maxlen=0).extend


class Registered(enum.Enum):
    """Which of a unit's parameters its modules have."""

    SHARDED = enum.auto()  # the user's own
    UNSHARDED = enum.auto()  # the compute parameters


SHARDED, UNSHARDED = Registered.SHARDED, Registered.UNSHARDED

Shown = Registered | dict[int, nn.Parameter]
"""What modules show: these, or others, by ``id`` of the sharded ones."""


class Slots:
    """Every slot of one handle's parameters, and what is registered in them now."""

    __slots__ = (
        "_attributes",
        "_compute",
        "_dicts",
        "_entries",
        "_names",
        "_setattr_writes",
        "_sharded",
        "_shown_at",
        "shows",
    )

    def __init__(self) -> None:
        self._entries: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        # The same entries, split by how compute parameters are shown: in the module's own dict (as columns), or by setattr.
        self._dicts: list[Parameters] = []  # of the sharded parameters
        self._attributes: list[dict[str, Any]] = []  # [Note: Forwards outside of the unit's]
        self._names: list[str] = []
        self._sharded: list[nn.Parameter] = []
        self._compute: list[nn.Parameter] = []
        self._setattr_writes: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        self._shown_at = -1  # `changes.count` when the compute parameters were registered
        self.shows: Shown = SHARDED

    def add(self, module: nn.Module, name: str, sharded: nn.Parameter, compute: nn.Parameter) -> None:
        """Take over the slot ``module.name``."""
        self._note(module, module._parameters, name, sharded, compute)
        self._write(module, name, compute if self.shows is UNSHARDED else sharded)

    def add_copied(
        self, module: nn.Module, name: str, sharded: nn.Parameter, compute: nn.Parameter, memo: dict[int, Any]
    ) -> None:
        """Take over the slot in the deep copy of ``module``, where ``sharded``, a copy by the same memo, is already.

        The copy may be half made as yet, but its dict of parameters is what ``memo`` gives.
        """
        parameters = copy.deepcopy(module._parameters, memo)
        copied = copy.deepcopy(module, memo)
        if isinstance(parameters, GuardedParameters):
            parameters.attributes = copied.__dict__
        self._note(copied, parameters, name, sharded, compute)

    def _note(
        self,
        module: nn.Module,
        parameters: Parameters,
        name: str,
        sharded: nn.Parameter,
        compute: nn.Parameter,
    ) -> None:
        self._entries.append((module, name, sharded, compute))
        # Not where the class or the object has something else of that name, which then comes first.
        hidden = hasattr(type(module), name) or name in module.__dict__
        if type(module).__setattr__ is nn.Module.__setattr__ and not hidden:
            if not isinstance(parameters, GuardedParameters):
                parameters = module.__dict__["_parameters"] = GuardedParameters(parameters, module.__dict__)
            self._attributes.append(module.__dict__)
            self._dicts.append(parameters)
            self._names.append(name)
            self._sharded.append(sharded)
            self._compute.append(compute)
        else:
            # Or the class keeps more than the dict up to date: nn.RNN's __setattr__ refreshes its _flat_weights.
            self._setattr_writes.append((module, name, sharded, compute))

    @staticmethod
    def _write(module: nn.Module, name: str, param: nn.Parameter) -> None:
        if type(module).__setattr__ is nn.Module.__setattr__:
            module._parameters[name] = param
        else:
            setattr(module, name, param)

    @staticmethod
    def _show(module: nn.Module, name: str, param: nn.Parameter) -> None:
        """``_write`` in a slot that holds ``sharded`` or ``compute`` already: no change of the user's."""
        if type(module).__setattr__ is nn.Module.__setattr__:
            dict.__setitem__(module._parameters, name, param)
        else:
            setattr(module, name, param)

    @property
    def are_guarded(self) -> bool:
        """Whether all changes of what is registered are counted. [Note: Looking only after a change]"""
        return not self._setattr_writes

    def replaced(self) -> list[tuple[nn.Module, str, nn.Parameter, nn.Parameter | None]]:
        """(module, name, sharded parameter, what is there) of the slots in which the user has registered something else."""
        if self.shows is not SHARDED:
            return []
        # In C, as every forward asks.
        if not self._setattr_writes and all(map(operator.is_, map(dict.get, self._dicts, self._names), self._sharded)):
            return []
        return [
            (m, name, p, now)
            for m, name, p, _ in self._entries
            # TorchScript makes new ones each time.
            if isinstance(m._parameters, dict) and (now := m._parameters.get(name)) is not p
        ]

    def restore(self, module: nn.Module, name: str, sharded: nn.Parameter) -> None:
        """Register the sharded parameter again in one such slot."""
        self._write(module, name, sharded)

    def shown(self) -> list[tuple[nn.Parameter, nn.Parameter | None]]:
        """(sharded parameter, what is registered in its place now), once for each slot."""
        return [(sharded, module._parameters[name]) for module, name, sharded, _ in self._entries]

    @property
    def entries(self) -> Sequence[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]:
        """(module, name, sharded parameter, compute parameter)."""
        return self._entries

    def assigned(self) -> list[tuple[nn.Parameter, nn.Parameter, nn.Parameter | None]]:
        """(sharded parameter, what is shown in its place, what is registered instead) where the user has assigned another.

        While the user's own parameters are not shown; ``replaced`` tells of those.
        """
        if self.shows is SHARDED:
            return []
        found = []
        for module, name, sharded, compute in self._entries:
            shown = self.shows[id(sharded)] if isinstance(self.shows, dict) else compute
            if isinstance(module._parameters, dict):  # TorchScript makes new ones each time
                now = module._parameters.get(name)
                if now is not shown:
                    found.append((sharded, shown, now))
        return found

    def show(self, what: Shown) -> None:
        """Have the modules show ``what``. Idempotent."""
        before = self.shows
        if what is before:
            return
        if before is UNSHARDED:
            _exhaust(map(dict.pop, self._attributes, self._names, itertools.repeat(None)))
            if self._shown_at != changes.count:  # something may have been registered in between
                _exhaust(map(dict.__setitem__, self._dicts, self._names, self._sharded))
            for module, name, sharded, _ in self._setattr_writes:
                self._show(module, name, sharded)
        elif before is not SHARDED:
            for module, name, sharded, _ in self._entries:
                self._write(module, name, sharded)
        self.shows = SHARDED
        if what is UNSHARDED:
            _exhaust(map(dict.__setitem__, self._attributes, self._names, self._compute))
            for module, name, _, compute in self._setattr_writes:
                self._show(module, name, compute)
            self._shown_at = changes.count
        elif isinstance(what, dict):
            for module, name, sharded, _ in self._entries:
                self._write(module, name, what[id(sharded)])
        self.shows = what
