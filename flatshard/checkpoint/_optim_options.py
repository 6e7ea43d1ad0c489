"""The options of an optimizer's parameter groups: of several steps that are one, and of steps that are to be undone."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

Group = dict[str, Any]


def options_of(given: Group) -> Iterator[tuple[str, Any]]:
    """All that a group has besides parameters."""
    return ((k, v) for k, v in given.items() if k not in ("params", "param_names"))


def copy_options(given: Sequence[Group], groups: Sequence[Group]) -> None:
    """Give each of ``groups`` the options of one of ``given``, and no others."""
    for source, target in zip(given, groups, strict=True):
        for key in [k for k, _ in options_of(target) if k not in source]:
            del target[key]
        target.update(options_of(source))


class SavedOptions:
    """Options as they were, also where a step changes them in place: a count of steps may be a tensor."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._saved = [{k: (v, _copy(v)) for k, v in options_of(group)} for group in groups]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what has happened to them since. What was changed in place stays the same object: others may hold it."""
        for group, saved in zip(self._groups, self._saved, strict=True):
            for value, was in saved.values():
                _put_back(value, was)
            copy_options([{key: value for key, (value, _) in saved.items()}], [group])


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
