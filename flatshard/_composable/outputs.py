"""Finds the tensors in a module's input and output."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten

# Values of these types can't hold an activation.
_PLAIN = (str, bytes, int, float, complex, bool, type, torch.dtype, torch.device, torch.Size, nn.Parameter, nn.Module)
_MAX_DEPTH = 6


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in any structure of containers, dataclasses, and objects with attributes."""
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
        for name in value.__dataclass_fields__:  # not `fields()`, which dynamo cannot follow in a generator
            yield from tensors_in(getattr(value, name, None), depth + 1)
    elif not callable(value):
        names = list(getattr(value, "__dict__", ()))
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            names.extend([slots] if isinstance(slots, str) else slots)
        for name in names:
            yield from tensors_in(getattr(value, name, None), depth + 1)


def is_opaque(output: Any) -> bool:
    """Whether ``output`` may contain tensors that ``tensors_in`` does not find."""
    return not (
        output is None
        or isinstance(output, (torch.Tensor, dict, list, tuple, set, frozenset, *_PLAIN))
        or dataclasses.is_dataclass(output)
        or hasattr(output, "__dict__")
    )
