"""Checks the collectives that a user passes to ``fully_shard``: what makes them, and what it has made."""

from __future__ import annotations

import inspect
from typing import Any

from flatshard._comm.collectives import Collectives

_METHODS = {
    "all_gather": ("output", "shard"),
    "reduce_scatter": ("output", "input"),
    "all_reduce": ("tensor",),
}


def check_factory(factory: Any, gathers: bool) -> None:
    """Check that ``factory`` is callable and hashable. ``gathers``: whether the unit has all-gathers (not under NO_SHARD).

    Raises:
        TypeError: it is not.
        ValueError: it is one of flatshard's own factories and would have no effect.
    """
    if not isinstance(factory, type) and all(callable(getattr(factory, m, None)) for m in _METHODS):
        raise TypeError(
            f"collectives={factory!r} are collectives, made for one process group: pass what makes them, such as their "
            "class or another callable (group, device) -> Collectives"
        )
    if not callable(factory):
        raise TypeError(f"collectives={factory!r} is not a callable (group, device) -> Collectives")
    try:
        hash(factory)
    except TypeError:
        raise TypeError(
            f"collectives={factory!r} must be hashable, because its result is cached for the next call with the same "
            "factory: pass a function, a class or a frozen dataclass"
        ) from None
    if not gathers and getattr(factory, "reduce", None) is False:
        raise ValueError(
            f"collectives={factory!r} would do nothing for a unit under NO_SHARD, which gathers no parameters: pass "
            "reduce=True, or omit `collectives`"
        )


def check_made(made: Collectives, factory: Any) -> None:
    """Check what ``factory`` has made.

    Raises:
        TypeError: the result is not usable. The message says what is missing.
    """
    who = f"collectives: {_name(factory)} made a {type(made).__name__}"
    if isinstance(made, type):
        raise TypeError(
            f"collectives: {_name(factory)} returned the class {made.__name__} instead of an instance of it"
        )
    for method, arguments in _METHODS.items():
        call = getattr(made, method, None)
        if not callable(call):
            raise TypeError(f"{who}, which has no {method}({', '.join(arguments)}): see flatshard.comm.Collectives")
        try:
            inspect.signature(call).bind(*arguments)
        except TypeError as e:
            raise TypeError(f"{who}, whose {method} cannot be called with ({', '.join(arguments)}): {e}") from None
        except ValueError:  # a callable without a signature, such as one written in C
            continue
    exact = getattr(made, "exact", None)
    if not isinstance(exact, bool):
        raise TypeError(
            f"{who} with exact={exact!r}: `exact` must be True or False, and says whether all_gather delivers every shard "
            "bit for bit. Set it in the class"
        )


def _name(factory: Any) -> str:
    return getattr(factory, "__qualname__", None) or repr(factory)
