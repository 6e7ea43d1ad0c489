"""Values as JSON, for other ranks: nothing that is read is executed.

[Note: Nothing from another rank is executed]
Whoever reaches a store's port can write to the store. So all that ranks exchange is JSON, in which each value that JSON
lacks is an object with one key: its kind. A table gives the reader of each kind, and a kind outside of the table raises.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch


class PayloadKind(NamedTuple):
    """A class of values that JSON lacks."""

    cls: type
    write: Callable[[Any], Any]
    """Return the value as values of JSON and of other kinds."""
    read: Callable[[Any], Any]
    """Return the value that ``write`` was given."""


def torch_kind(cls: type) -> PayloadKind:
    """Return the kind of a class whose values are attributes of ``torch``, such as dtypes."""

    def read(name: str) -> Any:
        if not isinstance(found := vars(torch)[name], cls):
            raise ValueError(f"{name!r} is no {cls.__name__}")
        return found

    return PayloadKind(cls, lambda value: str(value).removeprefix("torch."), read)


class Payloads:
    """Writes and reads numbers, strings, None, bytes, dtypes, lists, tuples and dicts, and values of the kinds ``more``.

    Named tuples are read as tuples.
    """

    def __init__(self, more: Iterable[PayloadKind] = ()) -> None:
        kinds = [
            PayloadKind(tuple, list, tuple),
            PayloadKind(dict, lambda value: [list(item) for item in value.items()], dict),
            PayloadKind(bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
            torch_kind(torch.dtype),
            *more,
        ]
        self._kinds = {kind.cls: kind for kind in kinds}
        self._readers = {kind.cls.__name__: kind.read for kind in kinds}

    def encode(self, value: Any) -> str:
        """Return ``value`` as JSON.

        Raises:
            TypeError: some value is of no kind.
        """
        return json.dumps(self._written(value), separators=(",", ":"))

    def decode(self, data: bytes | str) -> Any:
        """Return the value that ``encode`` was given.

        Raises:
            ValueError: ``data`` is nothing that ``encode`` of this version wrote.
        """
        try:
            return json.loads(data, object_hook=self._read)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ValueError(
                f"the store, or another rank, holds data that this version did not write: {data[:50]!r}"
            ) from e

    def _written(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list):
            return [self._written(each) for each in value]
        kind = self._kinds.get(type(value))
        if kind is None:
            # Subclasses: named tuples, and classes of torch such as Size if they are no kind of their own.
            kind = next((kind for kind in self._kinds.values() if isinstance(value, kind.cls)), None)
        if kind is None:
            raise TypeError(f"values of type {type(value).__name__} cannot be sent to other ranks")
        return {kind.cls.__name__: self._written(kind.write(value))}

    def _read(self, found: dict[str, Any]) -> Any:
        ((kind, value),) = found.items()
        return self._readers[kind](value)


PLAIN = Payloads()
"""Values of Python and dtypes."""
