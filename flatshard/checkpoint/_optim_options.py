"""The options of an optimizer's parameter groups, and the state that a first step would make."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Group = dict[str, Any]


def options_of(given: Group) -> Group:
    """All that a group has besides parameters."""
    return {k: v for k, v in given.items() if k not in ("params", "param_names")}


def copy_options(given: Sequence[Group], groups: Sequence[Group]) -> None:
    """Give each of ``groups`` the options of one of ``given``, and no others."""
    for source, target in zip(given, groups, strict=True):
        for key in [k for k in options_of(target) if k not in source]:
            del target[key]
        target.update(options_of(source))


class SavedOptions:
    """Options as they were, also where a step changes them in place: a count of steps may be a tensor."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._saved = [{k: (v, _copy(v)) for k, v in options_of(group).items()} for group in groups]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what has happened to them since. What was changed in place stays the same object: others may hold it."""
        for group, saved in zip(self._groups, self._saved, strict=True):
            for value, was in saved.values():
                _put_back(value, was)
            copy_options([{key: value for key, (value, _) in saved.items()}], [group])


@torch.no_grad()
def first_state(optimizer: Optimizer, group: Group, zeros: torch.Tensor) -> dict[str, Any]:
    """The state that a first step would make for a parameter of ``group`` that lies as ``zeros`` does, which become it.

    Nothing of ``optimizer`` is stepped: a copy is, over this parameter alone and without hooks. It shares what the optimizer
    keeps besides state and options, as ``copy.copy`` does.
    """
    kind = type(optimizer)
    param = nn.Parameter(zeros)
    param.grad = torch.zeros_like(zeros)
    stand_in: Any = object.__new__(kind)
    vars(stand_in).update(vars(optimizer))
    vars(stand_in).pop("step", None)  # a scheduler's, which counts
    stand_in._optimizer_step_pre_hooks, stand_in._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = [{**{k: _copy(v) for k, v in options_of(group).items()}, "params": [param]}]
    step: Any = kind.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # without hooks that are on all optimizers
    step(stand_in)
    return dict(stand_in.state.get(param, {}))


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, list | dict | set) else value


def _put_back(value: Any, was: Any) -> None:
    if isinstance(value, torch.Tensor):
        value.copy_(was)
    elif isinstance(value, list):
        value[:] = copy.deepcopy(was)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(copy.deepcopy(was))
