"""Values as JSON, for other ranks: nothing that is read is executed.

[Note: Nothing from another rank is executed]
Whoever reaches a store's port can write to the store. So all that ranks exchange is JSON, in which each value that JSON
lacks is an object with one key: its kind. A table gives the reader of each kind, and a kind outside of the table raises.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import torch


def _dtype(name: str) -> torch.dtype:
    if not isinstance(found := vars(torch)[name], torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


# For each class that JSON lacks: how a value is written as values of JSON and of other classes, and how it is read.
_KINDS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: (list, tuple),
    dict: (lambda value: [list(item) for item in value.items()], dict),
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode),
    torch.dtype: (lambda value: str(value).removeprefix("torch."), _dtype),
}
_READERS = {cls.__name__: read for cls, (_, read) in _KINDS.items()}


def encode(value: Any) -> str:
    """Return ``value`` as JSON: numbers, strings, None, bytes, dtypes, lists, tuples and dicts.

    Named tuples and sizes are read as tuples.

    Raises:
        TypeError: some value is of another class.
    """
    return json.dumps(_written(value), separators=(",", ":"))


def decode(data: bytes | str) -> Any:
    """Return the value that ``encode`` was given.

    Raises:
        ValueError: ``data`` is nothing that ``encode`` of this version wrote.
    """
    try:
        return json.loads(data, object_hook=_read)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(
            f"the store, or another rank, holds data that this version did not write: {data[:50]!r}"
        ) from e


def _written(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_written(each) for each in value]
    cls = next((cls for cls in _KINDS if isinstance(value, cls)), None)
    if cls is None:
        raise TypeError(f"values of type {type(value).__name__} cannot be sent to other ranks")
    return {cls.__name__: _written(_KINDS[cls][0](value))}


def _read(found: dict[str, Any]) -> Any:
    ((kind, value),) = found.items()
    return _READERS[kind](value)
