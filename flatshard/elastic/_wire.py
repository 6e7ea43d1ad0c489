"""Values as bytes for other ranks, and back. Nothing in these bytes is executed.

[Note: What other ranks say]
What comes from a store or a rank may be anybody's who reaches the store's port. So it is JSON, in which tuples and a few
other kinds are named. What belongs to users and their optimizers goes as a checkpoint keeps it, read with
``torch.load(weights_only=True)``. The rank that has it tries that: what another one would refuse raises before it is needed.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Callable
from typing import Any

import torch


def _dtype(name: str) -> torch.dtype:
    found = vars(torch)[name]
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


_KINDS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "bytes": base64.b64decode,
    "dtype": _dtype,
}
"""Of what JSON has not: how it is made of what JSON has."""


def encoded(value: Any) -> str:
    """Write numbers, strings, bytes, dtypes, None, and lists, tuples and dicts of them."""
    return json.dumps(_named(value), separators=(",", ":"))


def decoded(data: bytes) -> Any:
    """Read what ``encoded`` was given, named tuples as tuples.

    Raises:
        ValueError: it was not.
    """
    try:
        return json.loads(data, object_hook=_made)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(
            f"what came from the store, or from another rank, is none of this version's: {data[:50]!r}"
        ) from e


def _made(found: dict[str, Any]) -> Any:
    ((kind, value),) = found.items()
    return _KINDS[kind](value)


def _named(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_named(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_named(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[_named(key), _named(each)] for key, each in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise TypeError(f"a {type(value).__name__} is not told to other ranks")


def saved(value: Any, what: str) -> bytes:
    """Write tensors and plain values of users. ``what``: they are, for the error.

    Raises:
        TypeError: other ranks would refuse it.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        loaded(stream.getvalue())
    except (pickle.PickleError, AttributeError, TypeError) as e:
        raise TypeError(
            f"{what} is not what a rank that joins would read, as it executes nothing: make it tensors, numbers, strings, or "
            f"lists and dicts of such; or name its classes to torch.serialization.add_safe_globals. {e}"
        ) from e
    return stream.getvalue()


def loaded(data: bytes) -> Any:
    """Read what ``saved`` was given.

    Raises:
        pickle.UnpicklingError: it would be executed.
    """
    return torch.load(io.BytesIO(data), weights_only=True)
