"""Tensors that leave a unit: by its output, or past it.

Backward comes back to a unit through the tensors that its forward handed out; that is where the unit must be gathered
again. Most leave in the output. Some leave past it: stashed in a module attribute (``self.aux_loss = ...``), or caught
by a forward hook that somebody put on an inner module. Both are looked for here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

# What nn.Module itself keeps in __dict__, and values of these types, can't hold an activation.
_MODULE_KEYS = frozenset(nn.Module().__dict__)
_PLAIN = (str, bytes, int, float, complex, bool, type, torch.dtype, torch.device, torch.Size, nn.Parameter, nn.Module)
_NUMBERS_AND_SUCH = frozenset((str, bytes, int, float, bool))
_MAX_DEPTH = 6


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in an arbitrary structure: containers, dataclasses, objects with attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif value is None or isinstance(value, _PLAIN) or depth > _MAX_DEPTH:
        return
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth + 1)
    elif not callable(value):
        names = list(getattr(value, "__dict__", ()))
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            names.extend([slots] if isinstance(slots, str) else slots)
        for name in names:
            yield from tensors_in(getattr(value, name, None), depth + 1)


def is_opaque(output: Any) -> bool:
    """Whether a module's output is of a kind that may hide tensors from ``tensors_in``."""
    return not (
        output is None
        or isinstance(output, (torch.Tensor, dict, list, tuple, set, frozenset, *_PLAIN))
        or dataclasses.is_dataclass(output)
        or hasattr(output, "__dict__")
    )


class EscapeWatch:
    """Looks for tensors that leave one unit past its output. ``modules``: those that are in this unit and no other."""

    def __init__(self, unit_module: nn.Module, modules: Iterable[nn.Module]) -> None:
        self.unit_module = unit_module
        self.modules = list(modules)
        # The modules' attributes and buffers; how many each had when last looked at; and those that could hold an
        # activation. Found out by the first forward: at construction the modules may be copies that are not complete.
        self._looked_at: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._hooks: list[dict[int, Any]] = []
        self._newest: dict[int, tuple[int, int]] = {}  # of each module's hooks, when last looked at
        self._watched: set[int] = set()  # modules with a hook of ours, as somebody else's hook was seen there
        self._caught: list[torch.Tensor] = []

    def before_forward(self, install: Callable[[nn.Module, Callable[..., None]], object], forget: bool) -> None:
        """Where somebody hooked an inner module, hook it too (by ``install``), to see what they may have caught.

        ``forget``: what a forward caught that never ended, but not what one around this one has caught so far.
        """
        if forget:
            self._caught.clear()
        if not self._looked_at:
            self._looked_at = [d for m in self.modules for d in (m.__dict__, m._buffers)]
            inner = [m for m in self.modules if m is not self.unit_module]
            self._hooks = [hooks for m in inner for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        if not any(self._hooks):
            return
        for module in self.modules:
            after, before = module._forward_hooks, module._forward_pre_hooks
            newest = next(reversed(after), -1), next(reversed(before), -1)  # their numbers only grow
            if newest == self._newest.get(id(module), (-1, -1)):
                continue
            self._newest[id(module)] = newest
            hooks = itertools.chain(after.values(), before.values())
            if id(module) not in self._watched and not all(map(_is_of_tensor_parallelism, hooks)):
                self._watched.add(id(module))
                if module is not self.unit_module:
                    install(module, self._catch)

    def _catch(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._caught.extend(t for t in tensors_in((args, output)) if t.requires_grad)

    def after_forward(self) -> list[torch.Tensor]:
        """Tensors with a graph that were stashed or caught in the forward that just ended."""
        if list(map(len, self._looked_at)) != self._sizes:
            self._find_places()
        found, self._caught = self._caught, []
        for attributes, name in self._places:
            value = attributes.get(name)
            if value is not None:
                found.extend(t for t in tensors_in(value) if t.grad_fn is not None)
        return found

    def _find_places(self) -> None:
        self._sizes = [len(d) for d in self._looked_at]
        self._places = [
            (d, name)
            for d in self._looked_at
            for name, value in d.items()
            if name not in _MODULE_KEYS and name not in d.get("_parameters", ()) and _may_hold(value)
        ]


def _is_of_tensor_parallelism(hook: Any) -> bool:
    """Whether ``parallelize_module`` made this hook. It keeps nothing, and a hook of ours would break compiled graphs."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    if not getattr(hook, "__module__", "").startswith("torch.distributed.tensor"):
        return False
    inner = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return all(_is_of_tensor_parallelism(each) for each in inner if callable(each))


def _may_hold(value: Any) -> bool:
    """Whether an attribute is, or could come to be, a place where a forward stashes tensors."""
    if type(value) in _NUMBERS_AND_SUCH or isinstance(value, nn.Parameter | type):
        return False
    return value is None or isinstance(value, torch.Tensor | list | tuple | dict) or dataclasses.is_dataclass(value)
