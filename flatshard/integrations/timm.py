"""timm: ``create_optimizer``, which groups parameters by their shapes, and optimizers of whole matrices.

``ModelEmaV2`` and ``ModelEmaV3`` need no adapter: each rank averages its own part. Build them after ``fully_shard``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import timm.optim
import torch
from torch import nn
from torch.optim import Optimizer

import flatshard

__all__ = ["create_optimizer"]


def create_optimizer(model: nn.Module, opt: str = "sgd", *, whole: bool = False, **settings: Any) -> Optimizer:
    """Call ``timm.optim.create_optimizer_v2`` for a sharded model, with the groups that the plain model would get.

    timm leaves 1-D parameters out of weight decay, and a part of a matrix is 1-D. Here it is shown the whole shapes.

    Args:
        model: sharded or not.
        opt: as of timm.
        whole: for an optimizer that looks at rows, columns or norms of matrices (LAMB, Adafactor, Muon): each parameter is
            stepped whole, by one rank; see :class:`flatshard.optim.WholeParameterOptimizer`. Without it such an optimizer
            raises at its first step. LAMB also needs ``max_grad_norm=None``: clip before the step.
        settings: as of timm.
    """
    shown = _Whole(model)
    groups = timm.optim.create_optimizer_v2(shown, opt, **settings).param_groups
    real = {id(p): shown.parts[p] for group in groups for p in group["params"]}
    groups = [{**group, "params": [real[id(p)] for p in group["params"]]} for group in groups]
    settings.pop("param_group_fn", None)  # it has done its work

    def make(params: Any) -> Optimizer:
        return timm.optim.create_optimizer_v2(params, opt, **settings)  # type: ignore[no-any-return]

    return flatshard.optim.WholeParameterOptimizer(groups, make) if whole else make(groups)


class _Whole(nn.Module):
    """A stand-in for rules for groups: the model's methods, and its parameters in their full shapes, without memory."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["model"] = model
        named = dict(model.named_parameters())
        self._named = {
            name: nn.Parameter(torch.empty(flatshard.full_shape(p), dtype=p.dtype, device="meta"), p.requires_grad)
            for name, p in named.items()
        }
        self.parts = {whole: named[name] for name, whole in self._named.items()}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._named.items())

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(self._named.values())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)
