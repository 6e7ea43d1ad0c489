"""Values of small tensors on the meta device, for models whose forward asks for them.

[Note: Values on meta]
Some models read their data: whether a mask is all ones, whether positions begin anew. Tensors on meta have no values. So the
results of constants and of integer and boolean example inputs are also computed on the CPU: if all tensors of an operation
have values, so does its result. Tensors that depend on parameters, floating-point inputs or random numbers have none. If an
operation writes unknown values, its tensor and all tensors that share the memory lose theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
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
        self._memory: set[int] = set()  # ids of the storages behind them, and of some that are gone

    def give(self, tensor: Tensor, like: Tensor) -> None:
        """Give ``tensor``, an input on meta, the values of ``like``, unless these are floating-point numbers."""
        if _is_whole(like) and like.device.type != "meta" and like.numel() <= LARGEST:
            self._note(tensor, like.detach().cpu().clone())

    def call(self, func: Any, args: Any, kwargs: dict[str, Any], compute: Callable[[], Any]) -> Any:
        """Return the result of ``func`` on meta, made by ``compute``, and keep its values if they are known."""
        is_known = self._are_known(args) and self._are_known(kwargs.values()) and not _is_random(func)
        given = is_known and any(True for _ in _tensors(args, kwargs))
        if given and torch.Tag.data_dependent_output in func.tags:
            return self._on_cpu(func, args, kwargs)
        if given and torch.Tag.dynamic_output_shape in func.tags:
            values = self._on_cpu(func, args, kwargs)
            result = _mapped(lambda tensor: torch.empty_like(tensor, device="meta"), values)
            self._note(result, values)
            return result
        result = compute()
        if is_known and (given or "empty" not in func._schema.name) and _is_small(list(_tensors(result))):
            self._note(result, self._on_cpu(func, args, kwargs))
        elif self._memory and (writes := _writes(func)):
            self._forget(_written(writes, args, kwargs))
        return result

    def _are_known(self, values: Iterable[Any]) -> bool:
        """Return whether all tensors in ``values`` have values. Most operations have one without, which comes first."""
        for value in values:
            if isinstance(value, Tensor):
                if value.is_meta and (id(value.untyped_storage()) not in self._memory or value not in self._of):
                    return False
            elif isinstance(value, list | tuple) and not self._are_known(value):
                return False
        return True

    def _forget(self, tensors: list[Tensor]) -> None:
        """Drop the values of ``tensors``, which were written to, and of all tensors that share their memory."""
        written = {id(t.untyped_storage()) for t in tensors if t.is_meta}
        if written & self._memory:  # else nothing is looked through
            self._memory -= written
            for known in [t for t in self._of if id(t.untyped_storage()) in written]:
                del self._of[known]

    def _value(self, tensor: Tensor) -> Tensor:
        return self._of[tensor] if tensor.is_meta else tensor

    def _on_cpu(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        options = {name: value for name, value in kwargs.items() if name != "pin_memory"}  # needs an accelerator
        options |= {"device": torch.device("cpu")} if "device" in kwargs else {}
        return func(*_mapped(self._value, args), **_mapped(self._value, options))

    def _note(self, result: Any, values: Any) -> None:
        for tensor, value in zip(_tensors(result), _tensors(values), strict=True):
            if tensor.is_meta:
                self._of[tensor] = value
                self._memory.add(id(tensor.untyped_storage()))


@functools.cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@functools.cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the places and names of the arguments that ``func`` writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple((at, a.name) for at, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _written(writes: Iterable[tuple[int, str]], args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments at these places and of these names."""
    return list(_tensors([args[at] if at < len(args) else kwargs.get(name) for at, name in writes]))


def _is_small(made: list[Tensor]) -> bool:
    return all(t.numel() <= LARGEST for t in made) and any(t.is_meta for t in made)


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
