"""Other methods of a unit that run like its forward: ``generate``, ``encode``, ``training_step``."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from flatshard._base import frames
from flatshard._base.errors import name_list
from flatshard._composable.find import unit_for, unwrapped
from flatshard._composable.hooks import UnitHooks
from flatshard._composable.state import Unit


class ForwardMethod:
    """A method of a unit that runs with the unit's forward hooks. It is in the ``__dict__`` of the module, where it hides
    the method of the class.
    """

    def __init__(self, hooks: UnitHooks, module: nn.Module, name: str) -> None:
        self.hooks = hooks
        self.module = module
        self.name = name
        self.hidden: Any = module.__dict__.get(name)  # an instance attribute of this name, if there was one
        functools.update_wrapper(self, self._method())

    def _method(self) -> Callable[..., Any]:
        if self.hidden is not None:
            return self.hidden  # type: ignore[no-any-return]
        found = inspect.getattr_static(type(self.module), self.name)
        bind = getattr(type(found), "__get__", None)
        return found if bind is None else bind(found, self.module, type(self.module))  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method between the hooks, as ``module.__call__`` calls forward. The post-forward hook always runs."""
        output = None
        try:
            changed = self.hooks.pre_forward(self.module, args, kwargs, frames.of_caller())
            args, kwargs = (args, kwargs) if changed is None else changed
            output = self._method()(*args, **kwargs)
        finally:
            cast = self.hooks.post_forward(self.module, args, kwargs, output)
        return output if cast is None else cast

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardMethod:
        """Return the method of the copied unit."""
        result = object.__new__(ForwardMethod)
        memo[id(self)] = result
        result.__dict__.update({k: v for k, v in self.__dict__.items() if k != "__wrapped__"})
        result.hooks = copy.deepcopy(self.hooks, memo)
        result.module = copy.deepcopy(self.module, memo)
        result.hidden = copy.deepcopy(self.hidden, memo)
        result.__dict__["__wrapped__"] = result._method()
        return result


def check_methods(module: nn.Module, names: str | Iterable[str]) -> list[str]:
    """Return ``names`` as a list. Raise if one of them is not a method that can be registered on ``module``."""
    names = [names] if isinstance(names, str) else list(names)
    kind = type(module).__name__
    for name in names:
        found = module.__dict__.get(name) or inspect.getattr_static(type(module), name, None)
        if found is None:
            similar = [n for n in dir(type(module)) if n not in dir(nn.Module) and not n.startswith("__")]
            raise ValueError(f"{kind} has no method {name!r}; it has {name_list(similar) or 'none of its own'}")
        if isinstance(found, ForwardMethod):
            continue
        if inspect.isdatadescriptor(found) or not callable(getattr(module, name)):
            raise ValueError(f"{kind}.{name} is not a method, and cannot be registered as one")
        if name in ("forward", "__call__") or name.startswith("__"):
            raise ValueError(f"{kind}.{name}: calls of the module gather already; register its other methods")
        method = getattr(module, name)
        is_async = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
        if is_async or inspect.isgeneratorfunction(method):
            raise NotImplementedError(
                f"{kind}.{name} is {'async' if is_async else 'a generator function'}, so other code may run between its "
                f"steps: register the methods that compute one step, and call them from {name}"
            )
    return names


def register_methods(unit: Unit, module: nn.Module, names: Iterable[str]) -> None:
    """Register the methods ``names`` of ``module`` as forwards of ``unit``. ``check_methods`` has checked the names."""
    for name in names:
        if not isinstance(module.__dict__.get(name), ForwardMethod):
            module.__dict__[name] = ForwardMethod(UnitHooks.of(unit), module, name)


def register_forward_method(module: nn.Module, method_name: str | Iterable[str]) -> None:
    """Gather the unit's parameters for calls of ``module.method_name(...)``, as for calls of ``module(...)``.

    The unit's parameters are gathered before the method and freed after it, and backward through its outputs gathers them
    again. Use this for methods that use parameters of ``module`` which no unit below it owns: ``generate``, ``encode``,
    ``training_step``. Methods that only call other units, or ``module(...)`` itself, do not need it. The module's forward
    hooks do not run. FSDP2 calls this ``register_fsdp_forward_method``.

    Example::

        class Encoder(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(64, 8)

            def encode(self, x):
                return self.layer(x)

            def forward(self, x):
                return self.encode(x).softmax(-1)

        encoder = flatshard.fully_shard(Encoder())
        flatshard.register_forward_method(encoder, "encode")
        encoder.encode(batch).sum().backward()

    Args:
        module: a unit.
        method_name: the name of the method, or several names. A method that is registered already stays registered.

    Raises:
        ValueError: ``module`` is not a unit, or has no such method. Nothing has been registered.
        NotImplementedError: the method is async, or a generator function.
    """
    unit = unit_for(module, "register_forward_method")
    inner = unwrapped(module)
    register_methods(unit, inner, check_methods(inner, method_name))
