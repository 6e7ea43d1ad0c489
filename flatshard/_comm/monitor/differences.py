"""For errors about ranks out of step: finds out whether the ranks have built different models, and how these differ.

Each rank describes the unit that it communicates for. The descriptions are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from flatshard._base import environment
from flatshard._base.errors import name_list
from flatshard._comm.progress import Issued

Flats = list[tuple[str, int, list[tuple[str, list[int]]]]]
"""A unit's flat parameters, as JSON: for each its dtype, the elements of a shard, and the parameters' FQNs and shapes."""

Described = dict[str, Any]
"""A unit, as JSON: ``unit``: its FQN; ``tag``; ``flats``: see ``Flats``; ``units``: all units of the process, [tag, FQN];
``settings``: see ``settings``."""

_CURE = "Build the same model on all ranks, from the same arguments, and shard it by the same calls"
_PARAMETERS, _UNITS = 500, 1000  # maximum numbers in a description


def settings() -> dict[str, int]:
    """Return the environment's settings, by variable, that must be the same on all ranks."""
    return {"FLATSHARD_SHARED_MEMORY": environment.SHARED_MEMORY}


def described(issued: Issued) -> Described:
    """Describe the unit of a collective."""
    flats: Flats = [
        (
            flat.dtype,
            flat.shard_numel,
            [(fqn, list(shape)) for fqn, shape in itertools.islice(flat.params, _PARAMETERS)],
        )
        for flat in issued.label.describe_flats()
    ]
    units = list(issued.progress.units().items())[:_UNITS]
    return {
        "unit": issued.label.unit, "tag": issued.label.tag, "flats": flats, "units": units, "settings": settings()
    }  # fmt: skip


def difference(units: Mapping[int, Described]) -> tuple[str, str] | None:
    """Return how settings or units of these ranks differ, and the cure; or None if they are equal, or other units."""
    first, *others = sorted(units) or [0]
    for other in others:
        mine, theirs = units[first], units[other]
        for name, value in mine["settings"].items():
            if value != (other_value := theirs["settings"][name]):
                text = f"{name} is {value} on rank {first}, and {other_value} on rank {other}"
                return text, f"Give {name} the same value on all ranks"
        if mine["flats"] and theirs["flats"] and (found := _between(mine, theirs, first, other)):
            return found, _CURE
    return None


def _between(mine: Described, theirs: Described, rank: int, other: int) -> str:
    tags, their_tags = ({tag for tag, _ in d["units"]} for d in (mine, theirs))
    names, their_names = ({name for _, name in d["units"]} for d in (mine, theirs))
    if mine["tag"] == theirs["tag"] or not (
        mine["tag"] in their_tags or theirs["tag"] in tags or max(len(tags), len(their_tags)) == _UNITS
    ):
        if mine["unit"] == theirs["unit"]:
            return _in_flats(mine, theirs, rank, other)
        if mine["unit"] not in their_names and theirs["unit"] not in names:
            return (
                f"their units have different names: rank {rank} has {mine['unit'] or '<root>'!r} where rank {other} has "
                f"{theirs['unit'] or '<root>'!r}"
            )
    return ""  # two different units, which both ranks have


def _in_flats(mine: Described, theirs: Described, rank: int, other: int) -> str:
    start = f"unit {mine['unit'] or '<root>'!r} is not the same on all ranks: "
    own, their = ([(n, tuple(s)) for _, _, params in d["flats"] for n, s in params] for d in (mine, theirs))
    if len(own) != len(their):
        here, there = ({n for n, _ in params} for params in (own, their))
        only = [(r, sorted(found)) for r, found in ((rank, here - there), (other, there - here)) if found]
        told = "".join(f"; only rank {r} has {name_list(found, 3)}" for r, found in only)
        return f"{start}it has {len(own)} parameters on rank {rank}, and {len(their)} on rank {other}{told}"
    for (name, shape), (their_name, their_shape) in zip(own, their, strict=True):
        if (name, shape) != (their_name, their_shape):
            found, their_found = f"{name!r} of shape {shape}", f"{their_name!r} of shape {their_shape}"
            return f"{start}rank {rank} has {found} where rank {other} has {their_found}"
    for flat, their_flat in itertools.zip_longest(mine["flats"], theirs["flats"]):
        if flat is None or their_flat is None or list(flat[:2]) != list(their_flat[:2]):
            mine_is, theirs_is = (
                "nothing" if f is None else f"{f[1]} elements of {f[0]} a rank" for f in (flat, their_flat)
            )
            return f"{start}its parameters are laid out as {mine_is} on rank {rank}, and as {theirs_is} on rank {other}"
    return ""
