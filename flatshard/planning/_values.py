"""Values of small integers and booleans on the meta device, for models whose forward asks for them.

[Note: Values on meta]
Some models look at their data: whether a mask is all ones, whether positions begin anew. Tensors on meta have no values. So
what follows from the example inputs' integers and booleans alone is computed beside, on the CPU: an operation of which every
tensor has values gives values. What depends on parameters or on floating-point inputs has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

LARGEST = 2**20
"""Elements of a tensor that has values."""


class Values:
    """The values of some tensors on meta. [Note: Values on meta]"""

    def __init__(self) -> None:
        self._of = WeakIdKeyDictionary()

    def give(self, tensor: Tensor, like: Tensor) -> None:
        """``tensor``, an input on meta, has the values of ``like``."""
        if _is_whole(like) and like.device.type != "meta" and like.numel() <= LARGEST:
            self._of[tensor] = like.detach().cpu().clone()

    def call(self, func: Any, args: Any, kwargs: dict[str, Any], compute: Callable[[], Any]) -> Any:
        """What ``func`` returns on meta, where ``compute`` does it, with values if they are known."""
        given = list(_tensors(args, kwargs))
        known = all(t in self._of for t in given) and torch.Tag.nondeterministic_seeded not in func.tags
        if known and given and torch.Tag.data_dependent_output in func.tags:
            return self._on_cpu(func, args, kwargs)
        if known and given and torch.Tag.dynamic_output_shape in func.tags:
            values = self._on_cpu(func, args, kwargs)
            result = _mapped(lambda tensor: torch.empty_like(tensor, device="meta"), values)
            self._note(result, values)
            return result
        result = compute()
        made = list(_tensors(result))
        if not made or not (known and all(t.numel() <= LARGEST for t in made)):
            for tensor in made:  # what it has written to
                if tensor in self._of:
                    del self._of[tensor]
        elif given or (all(map(_is_whole, made)) and "empty" not in func._schema.name):
            self._note(result, self._on_cpu(func, args, kwargs))
        return result

    def _on_cpu(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        options = kwargs | {"device": torch.device("cpu")} if "device" in kwargs else kwargs
        return func(*_mapped(self._of.__getitem__, args), **_mapped(self._of.__getitem__, options))

    def _note(self, result: Any, values: Any) -> None:
        for tensor, value in zip(_tensors(result), _tensors(values), strict=True):
            self._of[tensor] = value


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _tensors(*values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(*value)
        elif isinstance(value, dict):
            yield from _tensors(*value.values())


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)([_mapped(function, each) for each in value])
    if isinstance(value, dict):
        return {key: _mapped(function, each) for key, each in value.items()}
    return value
