"""Finds the tensors in a module's input and output."""

from __future__ import annotations

import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten

# Values of these types can't hold an activation.
_PLAIN = (str, bytes, int, float, complex, bool, type, torch.dtype, torch.device, torch.Size, nn.Parameter, nn.Module)
_MAX_DEPTH = 6

next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Returns the number of autograd's next node on this thread. Private API, as there is no public way."""


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in any structure of containers, dataclasses, and objects with attributes."""
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


def with_new_nodes(output: Any) -> Any:
    """Return ``output`` with an alias in place of each tensor that autograd has made, where torch can rebuild it."""
    values, spec = tree_flatten(output)
    aliases = {
        id(v): torch.ops.aten.alias.default(v)
        for v in values
        if isinstance(v, torch.Tensor) and v.grad_fn is not None and v.layout is torch.strided
    }
    return tree_unflatten([aliases.get(id(v), v) for v in values], spec) if aliases else output


Copied = tuple[Any, Any, dict[Any, Any]]
"""A container or dataclass that a module was given, the copy that the module got, and the contents of that copy then."""


def _contents(value: Any) -> dict[Any, Any] | None:
    """Return the items or attributes of ``value`` by index, key or name, or None if it is no container."""
    if isinstance(value, dict):
        return {**value}
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = getattr(value, "__dict__", value.__dataclass_fields__)
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def copied_containers(given: Any, new: Any) -> Iterator[Copied]:
    """Yield the lists, deques, dicts and dataclasses in ``given`` that have copies in ``new``, of the same structure."""
    if given is new or type(given) is not type(new) or (before := _contents(given)) is None:
        return
    contents = _contents(new)
    assert contents is not None
    if not isinstance(given, tuple):
        yield given, new, contents
    for key, item in before.items():
        yield from copied_containers(item, contents.get(key))


def give_back(given: Any, copy: Any, was: dict[Any, Any]) -> None:
    """Make the changes to ``given`` that a forward has made to its ``copy``. See ``Copied``."""
    now, before = _contents(copy), _contents(given)
    assert now is not None
    assert before is not None
    if [*now] == [*was] and all(map(operator.is_, now.values(), was.values())):
        return
    originals = {id(item): before[key] for key, item in was.items() if key in before}
    now = {key: originals.get(id(item), item) for key, item in now.items()}
    if isinstance(given, dict):
        given.clear()
        given.update(now)
    elif isinstance(given, list | deque):
        given.clear()
        given.extend(now.values())
    else:
        for name in was.keys() - now.keys():
            delattr(given, name)
        for name, item in now.items():
            if item is not before.get(name, was):
                setattr(given, name, item)


def is_opaque(value: Any) -> bool:
    """Return whether ``value`` may hold tensors that ``tensors_in`` does not find: a closure, a generator, a module."""
    if isinstance(value, dict):
        return any(map(is_opaque, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(is_opaque, value))
    if isinstance(value, nn.Module):
        return True
    if value is None or isinstance(value, (torch.Tensor, *_PLAIN)) or dataclasses.is_dataclass(value):
        return False
    return callable(value) or not (hasattr(value, "__dict__") or hasattr(type(value), "__slots__"))
