"""Finds tensors that leave a unit's forward by another way than its output.

Backward reaches a unit through the tensors that its forward produced, and must gather the unit there. Most of them are in the
output. Others are stored in a module attribute (``self.aux_loss = ...``), or seen by a forward hook that the user registered
on an inner module. Tangents of forward-mode autograd hang on the outputs. This file finds all of them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from flatshard._base.names import DDP_IGNORES
from flatshard._composable.extensions import Extension, ForwardFeature
from flatshard._composable.find import FeatureLink
from flatshard._composable.module_tree import called_modules
from flatshard._composable.outputs import tensors_in
from flatshard._composable.state import Forward, Unit

# nn.Module's own attributes. They cannot hold an activation.
_MODULE_KEYS = frozenset(nn.Module().__dict__) | {DDP_IGNORES}
_NUMBERS = frozenset((int, float, bool))


class Escapes(Extension):
    """Attaches an :class:`EscapeWatch` to every unit."""

    def attach(self, unit: Unit, modules: list[nn.Module]) -> EscapeWatch:
        return EscapeWatch(unit, modules)


class EscapeWatch(ForwardFeature):
    """Finds tensors of one unit that are not in its output. ``modules`` are in this unit, and in no unit below it."""

    def __init__(self, unit: Unit, modules: Iterable[nn.Module]) -> None:
        self.unit = unit
        self.modules = list(modules)
        self._link = FeatureLink(self)
        self._caught: list[torch.Tensor] = []  # seen by hooks in the current forward
        # The modules' attributes and buffers; their numbers at the last search; and the places that could hold an
        # activation. The first forward finds them: at construction the modules may be incomplete copies.
        self._looked_at: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._hooks: list[dict[int, Any]] = []
        self._newest: dict[int, tuple[int, int]] = {}  # the ids of each module's newest hooks at the last search

    def __deepcopy__(self, memo: dict[int, Any]) -> EscapeWatch:
        """Return the watch of the copied unit. The hooks on inner modules are copied with the modules."""
        result = EscapeWatch(copy.deepcopy(self.unit, memo), [copy.deepcopy(m, memo) for m in self.modules])
        result._link = self._link.give_to_copy(result, memo)
        return result

    def before(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Register a hook of our own on inner modules that have the user's hooks, to see the same tensors."""
        if forward.in_backward or not torch.is_grad_enabled():
            return
        if self._caught and self.unit.claims.is_only_use(forward.claim):  # else one of this unit around it found them
            self._caught.clear()
        if not self._looked_at:
            self._looked_at = [d for m in self.modules for d in (m.__dict__, m._buffers)]
            inner = [m for m in self.modules if m not in called_modules(self.unit.module)]
            self._hooks = [hooks for m in inner for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        if any(self._hooks):
            self._hook_hooked()

    def _hook_hooked(self) -> None:
        for module in self.modules:
            after, before = module._forward_hooks, module._forward_pre_hooks
            newest = next(reversed(after), -1), next(reversed(before), -1)  # ids of hooks only grow
            if newest == self._newest.get(id(module), (-1, -1)):
                continue
            self._newest[id(module)] = newest
            hooks = [*after.values(), *before.values()]
            is_watched = module in called_modules(self.unit.module) or any(map(_is_ours, hooks))
            if not is_watched and not all(map(_stores_nothing, hooks)):
                module.register_forward_hook(functools.partial(_catch, self._link))

    def leaving(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors with a graph that the forward which just ended stored in attributes, or that hooks saw.

        And tangents of ``outputs`` in forward-mode autograd, which have graphs of their own.
        """
        if list(map(len, self._looked_at)) != self._sizes:
            self._find_places()
        found, self._caught = self._caught, []
        for attributes, name in self._places:
            value = attributes.get(name)
            if value is not None and type(value) not in _NUMBERS:
                found.extend(t for t in tensors_in(value) if t.grad_fn is not None)
        if forward_ad._current_level >= 0:
            tangents = [forward_ad.unpack_dual(t).tangent for t in outputs]  # type: ignore[no-untyped-call]
            found.extend(t for t in tangents if t is not None)
        return found

    def catch(self, value: Any) -> None:
        """Record tensors in ``value``, which a hook on an inner module saw. Outside a forward (a recomputation) ignore it."""
        if self.unit.claims.in_use and torch.is_grad_enabled():
            self._caught.extend(t for t in tensors_in(value) if t.requires_grad)

    def _find_places(self) -> None:
        self._sizes = [len(d) for d in self._looked_at]
        # In torch's own modules numbers stay numbers. In others they may be replaced by tensors (``self.aux_loss = 0.0``).
        kinds = [type(m).__module__.startswith("torch.nn.") for m in self.modules for _ in range(2)]
        self._places = [
            (d, name)
            for d, is_torchs in zip(self._looked_at, kinds, strict=True)
            for name, value in d.items()
            if name not in _MODULE_KEYS and name not in d.get("_parameters", ()) and _may_hold(value, is_torchs)
        ]


def _catch(link: FeatureLink[EscapeWatch], module: nn.Module, args: Any, output: Any) -> None:
    """Report ``output`` to the watch; the forward hook of inner modules."""
    if (watch := link.feature) is not None:
        watch.catch((args, output))


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "func", None) is _catch


def _stores_nothing(hook: Any) -> bool:
    """Return whether flatshard or ``parallelize_module`` made this hook. Such hooks store no tensors, and ``_catch``
    beside them would break compiled graphs.
    """
    while isinstance(hook, functools.partial):
        hook = hook.func
    if not getattr(hook, "__module__", "").startswith(("flatshard.", "torch.distributed.tensor")):
        return False
    inner = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return all(_stores_nothing(each) for each in inner if callable(each))


def _may_hold(value: Any, is_torchs: bool) -> bool:
    """Return whether a forward may store tensors in an attribute that now has ``value``.

    ``is_torchs`` is True for an attribute of a module in ``torch.nn``.
    """
    if type(value) in _NUMBERS:
        return not is_torchs
    if isinstance(value, str | bytes | nn.Parameter | type):
        return False
    return value is None or isinstance(value, torch.Tensor | list | tuple | dict) or dataclasses.is_dataclass(value)
