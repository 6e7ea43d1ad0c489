"""The optional abilities of collectives, read once per runtime: nobody else asks a class for its attributes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from flatshard._comm.collectives import Collectives
from flatshard._comm.progress import GATHER, REDUCE

Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]
"""Returns a 1-D tensor of so many elements."""

LendMemory = Callable[[int, torch.dtype, bool], torch.Tensor | None]
"""Returns memory for so many elements, or None if there is none to lend: see ``GlooCollectives._lend_memory``."""

EnsureMemory = Callable[[], object]
"""Allocates the memory of a tensor unless it has some."""

_Method = TypeVar("_Method", bound=Callable[..., object])


@dataclass(frozen=True)
class Capabilities:
    """Abilities of :class:`Collectives` beyond the three methods. The defaults are those of a class with nothing else."""

    out_of_place: bool = False
    """Whether ``all_gather`` also accepts a shard outside of ``output``, and copies it there: this saves a copy."""
    widens: bool = False
    """Whether ``reduce_scatter`` also accepts an input of a narrower dtype than the output's, and adds in the output's."""
    compared: tuple[int, ...] = (GATHER, REDUCE)
    """Kinds of collectives that all ranks issue in the same order: see ``OrderCheck``."""
    allocate: Allocate | None = None
    """Allocates all memory that the collectives read and write in training."""
    lend_memory: LendMemory | None = None
    """Lends memory for the input of a reduction."""
    gathers_late: bool = False
    """Whether ``all_gather`` has a fourth argument, ``ensure_output``: see :func:`gathers_late`."""
    regathers: bool = False
    """Whether inexact collectives also repeat gathers within the smaller groups of ``reshard_after_forward=int``."""


def gathers_late(all_gather: _Method) -> _Method:
    """Mark an ``all_gather`` with a fourth argument, ``ensure_output``, which allocates the memory of ``output``.

    With it, ``output`` has no memory before the call, and ``shard`` may have another dtype. The method is marked, not the
    class: a user's subclass may override it without the argument.
    """
    all_gather.__dict__["gathers_late"] = True
    return all_gather


def read_capabilities(collectives: Collectives) -> Capabilities:
    """Read the optional attributes of ``collectives``. :class:`Collectives` and ``builtin_collectives`` document them."""
    return Capabilities(
        out_of_place=getattr(collectives, "out_of_place", False),
        widens=getattr(collectives, "widens", False),
        compared=getattr(collectives, "compared", (GATHER, REDUCE)),
        allocate=getattr(collectives, "allocate", None),
        lend_memory=getattr(collectives, "_lend_memory", None),
        gathers_late=getattr(collectives.all_gather, "gathers_late", False),
        regathers=getattr(collectives, "regathers", False),
    )
