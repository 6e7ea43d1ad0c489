"""Optional attributes of :class:`Collectives`, which a wrapper copies from the collectives that it wraps."""

from __future__ import annotations

from collections.abc import Iterable

EVERY = ("allocate", "compared", "out_of_place")
"""All that apply to a wrapper with unchanged all-gathers. (``widens`` is about the wrapper's own reductions.)"""


def hand_on(outer: object, inner: object, names: Iterable[str] = EVERY) -> None:
    """Copy the attributes ``names`` that ``inner`` has to ``outer``. See :class:`BuiltinCollectives` for what they mean."""
    vars(outer).update((name, getattr(inner, name)) for name in names if hasattr(inner, name))
