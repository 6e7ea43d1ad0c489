"""What collectives that wrap others tell of these: attributes that :class:`Collectives` need not have."""

from __future__ import annotations

from collections.abc import Iterable

EVERY = ("allocate", "compared", "out_of_place")
"""Those that hold for a wrapper that hands all-gathers on as they are. (``widens`` is about its own reductions.)"""


def hand_on(outer: object, inner: object, names: Iterable[str] = EVERY) -> None:
    """Give ``outer`` the attributes of ``inner`` among ``names``. See :class:`BuiltinCollectives` for what they mean."""
    vars(outer).update((name, getattr(inner, name)) for name in names if hasattr(inner, name))
