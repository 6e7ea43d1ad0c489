"""Old public names: each works for one release, with a warning that names the new one.

A module declares its old attributes, a function its old arguments, and a class its old members. ``docs/changelog.md`` lists
all of them, and a test tries each one of :data:`ATTRIBUTES`, :data:`GONE`, :data:`ARGUMENTS` and
:data:`MEMBERS`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

REMOVED_IN = "0.3"
"""The release without the names that are old now."""

ATTRIBUTES: dict[str, Mapping[str, str]] = {}
"""By module: its old attributes, and the new ones."""
GONE: dict[str, Mapping[str, tuple[str, str]]] = {}
"""By module: old attributes without a new one: the module that has them for now, and what does their work."""
ARGUMENTS: list[OldArguments] = []
MEMBERS: list[OldMember] = []


def _warn(old: str, new: str) -> None:
    """Warn where the user wrote ``old``: two calls outside of the one that calls this."""
    warnings.warn(f"{old} is now {new}; flatshard {REMOVED_IN} removes the old name", DeprecationWarning, stacklevel=3)


def attributes(
    module: str,
    *,
    old: Mapping[str, str] | None = None,
    gone: Mapping[str, tuple[str, str]] | None = None,
    on_first_use: Mapping[str, str] | None = None,
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module.

    Args:
        module: its ``__name__``.
        old: the new name of each old one.
        gone: see :data:`GONE`.
        on_first_use: by name, the module inside this one that has it, or that it is: imported when the name is first used.
    """
    later = on_first_use or {}
    renamed = ATTRIBUTES[module] = old or {}
    homes = GONE[module] = gone or {}

    def __getattr__(name: str) -> Any:
        if name in later:
            inner = importlib.import_module(f"{module}.{later[name]}")
            found = inner if name == later[name] else getattr(inner, name)
            if isinstance(found, types.FunctionType):
                found.__module__ = module  # for its help
            vars(sys.modules[module])[name] = found
            return found
        if name in renamed:
            found = getattr(sys.modules[module], renamed[name])
            _warn(f"{module}.{name}", f"{module}.{renamed[name]}")  # last: an import may forget which lines have warned
            return found
        if name in homes:
            home, instead = homes[name]
            found = getattr(importlib.import_module(home), name)
            _warn(f"{module}.{name}", instead)
            return found
        raise AttributeError(f"module {module!r} has no attribute {name!r}{_where_it_is(name)}")

    return __getattr__


def _where_it_is(name: str) -> str:
    """Return the end of an error about a missing ``name``: the public module that has it. Nothing is imported for it."""
    for module, found in sorted(sys.modules.items()):
        if re.fullmatch(r"flatshard(\.[a-z]\w*)?", module) and name in getattr(found, "__all__", ()):
            return f": it is {module}.{name}"
    if hasattr(sys.modules.get("torch.distributed.fsdp"), name) and not name.startswith("_"):
        return (
            ": flatshard.fsdp2 has FSDP2's functions, and flatshard/docs/migration.md has what replaces others of FSDP"
        )
    return ""


class OldArguments:
    """The old arguments of one function."""

    def __init__(
        self,
        function: Callable[..., Any],
        renamed: Mapping[str, str],
        converted: Mapping[str, Callable[[Any], Any]],
        positional: Sequence[str],
    ) -> None:
        self.function, self.renamed, self.converted, self.positional = function, renamed, converted, positional
        self.name = function.__qualname__.removesuffix(".__init__")
        parameters = inspect.signature(function).parameters.values()
        self.positional_count = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
        ARGUMENTS.append(self)

    def translate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments under their new names, with one warning about the old ones.

        Raises:
            TypeError: an argument was given twice.
        """
        unnamed = dict(zip(self.positional, args[self.positional_count :], strict=False))
        new: dict[str, Any] = {}
        told: list[str] = []
        for name, value in [*unnamed.items(), *kwargs.items()]:
            target = self.renamed.get(name, name)
            if target in new or (target != name and target in kwargs):
                raise TypeError(f"{self.name}() got multiple values for argument {target!r}")
            new[target] = self.converted[name](value) if name in self.converted else value
            shown = repr(new[target]) if name in self.converted else ""
            if name in unnamed:
                told.append(f"an argument without a name is now {target}={shown}")
            elif target != name:
                told.append(f"argument {name}= is now {target}={shown}")
        if told:
            text = f"{self.name}: {', '.join(told)}; flatshard {REMOVED_IN} removes the old form"
            warnings.warn(text, DeprecationWarning, stacklevel=3)
        return args[: self.positional_count] + args[self.positional_count + len(unnamed) :], new


def old_arguments(
    *,
    positional: Sequence[str] = (),
    converted: Mapping[str, Callable[[Any], Any]] | None = None,
    **renamed: str,
) -> Callable[[F], F]:
    """Return a decorator for a function whose arguments have other names now.

    Args:
        positional: old names of arguments that were positional and need a name now, in their order.
        converted: by old name, a function from the old value to the new one.
        renamed: the new name of each old one.
    """

    def decorate(function: F) -> F:
        old = OldArguments(function, renamed, converted or {}, positional)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > old.positional_count or not renamed.keys().isdisjoint(kwargs):
                args, kwargs = old.translate(args, kwargs)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


class OldMember:
    """An old method or attribute of a class: ``back = OldMember("restore")``."""

    def __init__(self, new: str) -> None:
        self.new = new
        MEMBERS.append(self)

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __get__(self, instance: object, owner: type) -> Any:
        _warn(f"{self.owner.__name__}.{self.name}", f"{self.owner.__name__}.{self.new}")
        return getattr(owner if instance is None else instance, self.new)
