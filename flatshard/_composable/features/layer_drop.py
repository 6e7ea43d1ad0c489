"""Models that leave out layers at random (LayerDrop), each rank other ones: a rank passes by the layers that it left out.

[Note: Layers that are dropped]
A dropped layer is never called, so nothing tells when. But the layers of a list run in its order. So a layer that has not run
when a later one of its list starts, or another unit behind the list, or when the module that holds the list ends, was left
out. It is passed by there (``skip``). A unit is behind the list if layers have run before it, and where all were left out, if
it is registered behind the list. Then every rank gathers and reduces the same layers in the same order, and the numbers are
the model's own.

This may happen inside the checkpoint of the later layer. Their backward belongs in front of that checkpoint, so they are
hidden from it: it does not recompute them. That does not work for a reentrant checkpoint, which has no graph, nor where a
layer has several units, which other ranks gather in another order as they recompute them. Both raise.

Only a model's own setting (``layerdrop``) tells that it drops layers. In another list a layer that does not run was not left
out: it may be one of several to choose from, such as an expert, and to pass by it would gather what nobody uses.

Some Hugging Face models (those for speech) check the attribute ``_is_fsdp_managed_module``, which FSDP sets. They then run a
dropped layer *and use its result*: they drop nothing. So flatshard does not set it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from flatshard._base.errors import name_list, warn_user
from flatshard._base.names import plain_name
from flatshard._composable.extensions import Extension
from flatshard._composable.features.skip import skip
from flatshard._composable.find import units_below
from flatshard._composable.outputs import tree_flatten, tree_unflatten
from flatshard._composable.state import Unit, current_graph_task, unit_of


class LayerDrop(Extension):
    """Makes models pass by the layers that they leave out, if these are units."""

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        world_size = max([unit.runtime.world_size for unit in made], default=1)
        if world_size > 1 and (told := join_dropped(module)) is not None:
            warn_user(told)


def join_dropped(root: nn.Module) -> str | None:
    """Make modules in ``root`` that drop layers pass by them. Return a warning about modules with several lists."""
    unclear = []
    for fqn, module in root.named_modules():
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList)] if _drops(module) else []
        stacks = [layers for layers in lists if _has_units(layers)]
        if len(stacks) > 1:
            unclear.append(plain_name(fqn))
        elif stacks:
            _DroppedLayers.install(module, stacks[0])
    if not unclear:
        return None
    return (
        f"{name_list(unclear)} may leave out layers at random (layerdrop), different ones on each rank, and has several "
        "lists of layers that are units, so flatshard cannot tell which were left out: ranks would end with an "
        "OutOfStepError. Set layerdrop to 0, or call flatshard.skip(layer, x) on a rank that leaves out a layer"
    )


class _DroppedLayers:
    """Hooks that pass by the layers of one list that a forward of their holder leaves out. [Note: Layers that are dropped]"""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers
        self.ran: int | None = None  # how many of them have run or were passed by. None: the holder does not run
        self.graph = False  # the holder runs with grad mode on

    @classmethod
    def install(cls, holder: nn.Module, stack: nn.ModuleList) -> None:
        if any(isinstance(getattr(hook, "__self__", None), cls) for hook in holder._forward_pre_hooks.values()):
            return  # by an earlier call
        self = cls([layer for layer in stack if _has_units(layer)])
        holder.register_forward_pre_hook(self.begin, prepend=True)
        holder.register_forward_hook(self.end, prepend=True, always_call=True)  # inside its unit
        for layer in self.layers:
            layer.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        inside, is_behind = set(stack.modules()), False
        for module in holder.modules():
            is_behind |= module is stack
            if module is not holder and module not in inside and unit_of(module) is not None:
                hook = functools.partial(self.before_other, is_behind)
                module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def before_other(self, is_behind: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass by layers before another unit of the holder starts. ``is_behind``: it is registered behind the list."""
        if not (self.ran or (self.ran == 0 and is_behind)):
            return None
        left, self.ran = self.layers[self.ran :], len(self.layers)
        return _pass_by(left, (args, kwargs), module)

    def begin(self, holder: nn.Module, args: Any) -> None:
        self.ran, self.graph = (0 if holder.training else None), torch.is_grad_enabled()

    def before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass by layers before this one that have not run, as this one starts."""
        if self.ran is None:
            if current_graph_task() == -1:
                return None
            if len(units_below(layer)) > 1:
                raise RuntimeError(
                    self._unfit(layer, "has several units inside one checkpoint", "Make the layer one unit")
                )
            return _pass_by([], (args, kwargs), layer)
        if self.graph and not torch.is_grad_enabled():
            raise RuntimeError(self._unfit(layer, "is in a reentrant checkpoint", "Use use_reentrant=False"))
        at = next(i for i, each in enumerate(self.layers) if each is layer)
        left = self.layers[self.ran : at]  # empty if it runs once more
        self.ran = max(self.ran, at + 1)
        return _pass_by(left, (args, kwargs), layer)

    @staticmethod
    def _unfit(layer: nn.Module, what: str, cure: str) -> str:
        names = name_list(unit.fqn for unit in units_below(layer))
        return (
            f"layers may be dropped at random (layerdrop), and the layer with {names} {what}: ranks that drop it cannot "
            f"take part in its backward in time. {cure}, or set layerdrop to 0"
        )

    def end(self, holder: nn.Module, args: Any, output: Any) -> Any:
        ran, self.ran = self.ran, None
        left = [] if ran is None or output is None else self.layers[ran:]
        return _pass_by(left, output) if left else None


def _pass_by(layers: Iterable[nn.Module], values: Any, then: nn.Module | None = None) -> Any:
    """Return ``values``, in which the first floating-point tensor leads backward to ``layers``.

    The layer ``then`` gets them. If it is trained, that tensor requires grad, whether there are ``layers`` or not: a
    checkpoint recomputes ``then`` without them, and must save the same tensors.
    """
    found, spec = tree_flatten(values)
    at = next((i for i, v in enumerate(found) if isinstance(v, torch.Tensor) and v.is_floating_point()), None)
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):  # hides it from a checkpoint
        for layer in layers:
            if at is None:
                skip(layer)
            else:
                found[at] = skip(layer, found[at])
    wanted = then is not None and torch.is_grad_enabled() and any(p.requires_grad for p in then.parameters())
    if at is not None and wanted and not found[at].requires_grad:
        found[at] = found[at].detach().requires_grad_()
    return tree_unflatten(found, spec)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _drops(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    kind = type(module).__name__.lower()
    places = [(module, "layerdrop"), (config, "layerdrop")]
    places += [(config, f"{part}_layerdrop") for part in ("encoder", "decoder") if part in kind]
    for place, name in places:
        rate = getattr(place, name, None)
        if isinstance(rate, int | float):  # the first one found is the one that the model uses
            return rate > 0
    return False


def _has_units(module: nn.Module) -> bool:
    return any(unit_of(m) is not None for m in module.modules())
