"""Registers parameters in modules. Only this file writes a module's parameters.

A *registration* is a module and a name under which it has a parameter. A shared parameter has several. During its unit's
forward and backward it shows the unsharded parameter, of full shape; at other times the user's (sharded) parameter.
"""

from __future__ import annotations

import copy
import enum
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from flatshard._handle.tensors.changes import changes
from flatshard._handle.tensors.guard import GuardedParameters, Parameters, WatchedParameters

_exhaust: Callable[[Iterable[Any]], None] = deque[Any](maxlen=0).extend
_NONE = itertools.repeat(None)


class Registered(enum.Enum):
    """The parameters of a unit that are registered in its modules."""

    SHARDED_PARAMS = enum.auto()  # the user's own
    UNSHARDED_PARAMS = enum.auto()  # the unsharded parameters


SHARDED_PARAMS, UNSHARDED_PARAMS = Registered

Shown = Registered | dict[int, nn.Parameter]
"""The parameters that modules show: one of the two, or others, by ``id`` of the sharded ones."""


class Registrations:
    """All registrations of one handle's parameters, and the parameters that they show now."""

    __slots__ = (
        "_attributes",
        "_compute",
        "_dicts",
        "_names",
        "_sharded",
        "_shown_at",
        "entries",
        "shows",
        "unguarded",
    )

    def __init__(self) -> None:
        self.entries: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []  # module, name, sharded, compute
        # An unsharded parameter is shown in its module's `__dict__`, or by setattr if its entry is in `unguarded`. The next
        # five lists are the columns of the former.
        self._dicts: list[Parameters] = []  # that the sharded parameters are in
        self._attributes: list[dict[str, Any]] = []  # the modules' `__dict__`: [Note: Forwards outside of the unit's]
        self._names: list[str] = []
        self._sharded: list[nn.Parameter] = []
        self._compute: list[nn.Parameter] = []
        self.unguarded: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        self._shown_at = -1  # `changes.count` when the unsharded parameters were registered
        self.shows: Shown = SHARDED_PARAMS

    def add(self, module: nn.Module, name: str, sharded: nn.Parameter, compute: nn.Parameter) -> None:
        """Add the registration ``module.name``, and show the right parameter in it."""
        parameters = module._parameters
        held = dict.get(parameters, name) if isinstance(parameters, dict) else None  # TorchScript's is none
        self._record(module, parameters, name, sharded, compute)
        wanted = compute if self.shows is UNSHARDED_PARAMS else sharded
        if held is not wanted:
            self.write(module, name, wanted)

    def add_copied(
        self, module: nn.Module, name: str, sharded: nn.Parameter, compute: nn.Parameter, memo: dict[int, Any]
    ) -> None:
        """Add it in the deep copy of ``module``, which contains ``sharded`` already (both are copied with ``memo``).

        The copy of the module may be incomplete so far, but its dict of parameters is the one in ``memo``.
        """
        parameters = copy.deepcopy(module._parameters, memo)
        copied = copy.deepcopy(module, memo)
        if isinstance(parameters, GuardedParameters):
            parameters.adopt(copied.__dict__)
        self._record(copied, parameters, name, sharded, compute)

    def _record(
        self, module: nn.Module, parameters: Parameters, name: str, sharded: nn.Parameter, compute: nn.Parameter
    ) -> None:
        self.entries.append((module, name, sharded, compute))
        # `__dict__` cannot be used if the class or the object has another attribute of this name, which takes precedence.
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
            # `__dict__` cannot be used either if the class has its own __setattr__: nn.RNN's refreshes its _flat_weights.
            if type(parameters) is dict:  # TorchScript's is none
                module.__dict__["_parameters"] = WatchedParameters(parameters)
            self.unguarded.append((module, name, sharded, compute))

    @staticmethod
    def write(module: nn.Module, name: str, param: nn.Parameter, is_change: bool = True) -> None:
        """Register ``param`` as ``module.name``. ``is_change``: False if it is the unit's own, which counts as no change."""
        if type(module).__setattr__ is not nn.Module.__setattr__:
            setattr(module, name, param)
        elif is_change:
            module._parameters[name] = param
        else:
            dict.__setitem__(module._parameters, name, param)

    def replaced(self) -> list[tuple[nn.Module, str, nn.Parameter, nn.Parameter | None]]:
        """Return (module, name, sharded parameter, new parameter) of each registration that the user changed."""
        if self.shows is not SHARDED_PARAMS:
            return []
        # In C, because every forward calls this.
        if not self.unguarded and all(map(operator.is_, map(dict.get, self._dicts, self._names), self._sharded)):
            return []
        return [
            (m, name, p, now)
            for m, name, p, _ in self.entries
            # TorchScript creates new parameters each time, so its modules are not checked.
            if isinstance(m._parameters, dict) and (now := m._parameters.get(name)) is not p
        ]

    def fqns(self, names: Mapping[nn.Module, str]) -> dict[int, str]:
        """Return the FQN of each parameter's first registration in one of the modules in ``names``, by the parameter's id."""
        found: dict[int, str] = {}
        for module, name, sharded, _ in self.entries:
            if module in names:
                found.setdefault(id(sharded), f"{names[module]}.{name}" if names[module] else name)
        return found

    def show(self, what: Shown) -> None:
        """Make the modules show ``what``. Idempotent."""
        before = self.shows
        if what is before:
            return
        if before is UNSHARDED_PARAMS:
            _exhaust(map(dict.pop, self._attributes, self._names, _NONE))
            if self._shown_at != changes.count:  # the user may have registered something in between
                _exhaust(map(dict.__setitem__, self._dicts, self._names, self._sharded))
            for module, name, sharded, _ in self.unguarded:
                self.write(module, name, sharded, is_change=False)
        elif before is not SHARDED_PARAMS:
            for module, name, sharded, _ in self.entries:
                self.write(module, name, sharded)
        self.shows = SHARDED_PARAMS
        if what is UNSHARDED_PARAMS:
            _exhaust(map(operator.setitem, self._attributes, self._names, self._compute))
            for module, name, _, compute in self.unguarded:
                self.write(module, name, compute, is_change=False)
            self._shown_at = changes.count
        elif isinstance(what, dict):
            for module, name, sharded, _ in self.entries:
                self.write(module, name, what[id(sharded)])
        self.shows = what
