"""``fully_shard(recompute=True)``: units that keep no activations, and compute their forward again in backward.

[Note: Recomputation]
It is torch's ``checkpoint`` (not the reentrant one) around the forward of a unit's module, inside the unit's hooks. Backward
has gathered the unit when it reaches the checkpoint, so nothing is gathered for it. The module's class and names stay as they
are: its ``forward`` is an attribute of the instance, which is copied and pickled with it. What the first run wrote to buffers
(statistics of BatchNorm) the second would write again: these buffers are put back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatshard._composable.extensions import Extension
from flatshard._composable.find import units_below
from flatshard._composable.module_tree import called_modules
from flatshard._composable.state import Unit, current_graph_task


class Recompute(Extension):
    """Puts a checkpoint into each unit whose configuration says so, but not around other units of the call."""

    concerns = operator.attrgetter("config.recompute")

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        for unit in made:
            around_others = unit.module is module and len(units_below(module)) > 1
            if unit.config.recompute and not around_others:
                for called in called_modules(unit.module):
                    called.forward = Recomputed(called.forward, called.modules())


_UNSEEN = ("running_mean", "running_var")
"""Buffers that torch writes to without a new version."""


class Recomputed:
    """A forward that keeps only its arguments for backward. [Note: Recomputation]"""

    def __init__(self, forward: Callable[..., Any], modules: Iterable[nn.Module]) -> None:
        self.forward = forward
        self.holders = [module for module in modules if module._buffers]
        self.written: list[torch.Tensor] = []  # the buffers that the last forward wrote to

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self._run, args, kwargs, use_reentrant=False)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if current_graph_task() != -1:
            return self._run_again(args, kwargs)
        buffers = {b: name for m in self.holders for name, b in m._buffers.items() if b is not None}
        versions = [b._version for b in buffers]
        result = self.forward(*args, **kwargs)
        changes = zip(buffers.items(), versions, strict=True)
        self.written = [b for (b, name), before in changes if b._version != before or name in _UNSEEN]
        return result

    def _run_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = [b.detach().clone() for b in self.written]
        try:
            return self.forward(*args, **kwargs)
        finally:  # also when the checkpoint has all that it needs, and ends this early
            for b, value in zip(self.written, before, strict=True):
                b.data.copy_(value)  # without a new version: autograd may have saved it
