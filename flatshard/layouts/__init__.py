"""Layouts for ``fully_shard(layout=...)``: the places where a parameter may be cut between ranks.

All shards of a flat parameter have the same size, so that a collective is one call on one buffer. If parameters cannot be cut
anywhere, there must be padding between them. It takes memory in the shards, and bytes in every collective. The limit
``max_padding`` is on the elements that a layout adds to the ``Elements`` layout of the same parameters, as a fraction of that
layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from flatshard._base.errors import name_list

__all__ = ["Blocks", "Elements", "Rows", "Whole"]


@dataclass(frozen=True, slots=True)
class Elements:
    """Cut between any two elements (the default), almost without padding. A rank's shard of a parameter is 1-D.

    Example::

        flatshard.fully_shard(model, policy={Block}, layout=flatshard.layouts.Elements())
    """

    def block(self, shape: Sequence[int]) -> int:
        """Internal: return the number of elements of a block, between which parameters are cut."""
        return 1


@dataclass(frozen=True, slots=True)
class Rows:
    """Cut between rows, the slices along dimension 0. A rank's shard has the shape ``(rows on this rank, *rest)``.

    Use it for rules by ``p.ndim``, row-wise quantisation, and statistics of rows. For stacked experts ``(E, m, n)`` it keeps
    each expert's matrix whole. A scalar is treated as by ``Elements``.

    Example::

        flatshard.fully_shard(model, policy={Block}, layout=flatshard.layouts.Rows(strict=True, max_padding=0.5))

    Raises:
        ValueError: ``multiple`` is less than 1, or ``max_padding`` is negative.
    """

    multiple: int = 1
    """Cut between groups of this many rows, counted from the first."""
    max_padding: float = 0.1
    """With more padding the flat parameter is cut as by ``Elements``, with a warning. It is a fraction of the elements:
    0.1 is a tenth."""
    strict: bool = False
    """Raise an error instead of this warning."""

    def __post_init__(self) -> None:
        _check(self, self.multiple)

    def block(self, shape: Sequence[int]) -> int:
        """Internal: return the number of elements of a block, between which parameters are cut."""
        return self.multiple * math.prod(shape[1:]) if shape else 1


@dataclass(frozen=True, slots=True)
class Blocks:
    """Cut between blocks of ``numel`` elements, counted in memory order from the parameter's start. A rank's shard is 1-D.

    Use it for optimizers and formats that quantise in blocks: each block, with its scale, is on one rank. For torchao's
    ``AdamW8bit`` these are of 256 elements.

    Example::

        flatshard.fully_shard(model, policy={Block}, layout=flatshard.layouts.Blocks(64))

    Raises:
        ValueError: ``numel`` is less than 1, or ``max_padding`` is negative.
    """

    numel: int
    """Elements of a block. A parameter's last block may be shorter."""
    max_padding: float = 0.1
    """As in :class:`Rows`."""
    strict: bool = False
    """As in :class:`Rows`."""

    def __post_init__(self) -> None:
        _check(self, self.numel)

    def block(self, shape: Sequence[int]) -> int:
        """Internal: return the number of elements of a block, between which parameters are cut."""
        return self.numel


@dataclass(frozen=True, slots=True)
class Whole:
    """Cut between parameters: each lies on one rank in its own shape. The shards of other ranks are empty: ``(0, *rest)``.

    All ranks have memory for as many elements as the fullest, so a unit of few matrices takes padding. If that is more than
    ``max_padding``, its parameters are cut as by ``Elements``, with a warning. ``max_padding=math.inf`` never cuts.

    Use it for optimizers that work on full matrices (Muon, Shampoo, Adafactor, LAMB). Each rank steps its own parameters,
    without communication: what is made of rows, columns or its state is the owner's. A number of it that leaves the matrix
    (``float(update.norm())``) is sent to all ranks, so all must ask for it. Ranks get about the same number of elements in
    each unit, and about the same work over all units. It takes little padding where units have several times more matrices
    than there are ranks (experts), or ranks are few.

    Example::

        flatshard.fully_shard(model, policy={Block}, layout=flatshard.layouts.Whole(max_padding=math.inf))

    Raises:
        ValueError: ``max_padding`` is negative.
    """

    max_padding: float = 0.5
    """As in :class:`Rows`: padding as a fraction of the unit's elements."""
    strict: bool = False
    """As in :class:`Rows`."""

    def __post_init__(self) -> None:
        _check(self, 1)

    def block(self, shape: Sequence[int]) -> int:
        """Internal: return the number of elements of a block, between which parameters are cut."""
        return max(1, math.prod(shape))


Layout = Elements | Rows | Blocks | Whole
"""One of the four layouts."""

LayoutChoice = Layout | Callable[[str, nn.Parameter], Layout | None] | None
"""A layout for all parameters, or a callable ``(fqn, parameter) -> layout`` (None: ``Elements``)."""


def layout_for(choice: LayoutChoice, fqn: str, param: nn.Parameter) -> Layout:
    """Return the layout of one parameter under the argument ``layout=choice``.

    Raises:
        TypeError: ``choice``, or its result, is no layout.
    """
    found = choice(fqn, param) if callable(choice) else choice
    if found is None:
        return Elements()
    if not isinstance(found, Layout):
        raise TypeError(
            f"layout of {fqn!r}: {found!r}. It must be flatshard.layouts.Elements(), Rows(), Blocks(n), Whole() or None, or "
            "a callable (fqn, parameter) that returns one of them"
        )
    return found


def work_of(shape: Sequence[int]) -> int:
    """Return the approximate work of an optimizer's step on a full matrix: its shorter side times its elements."""
    if len(shape) < 2:
        return math.prod(shape)
    return math.prod(shape) * min(shape[-1], math.prod(shape[:-1]))


def excess_padding(unit: str, fqns: Sequence[str], layouts: Sequence[Layout], padding: float) -> str | None:
    """Return a warning if ``padding`` is over the smallest limit of ``layouts``, else None.

    Raises:
        ValueError: it is over the limit, and one of the layouts is strict.
    """
    aligned = [each for each in layouts if not isinstance(each, Elements)]
    limit = min((each.max_padding for each in aligned), default=math.inf)
    if padding <= limit:
        return None
    kinds = ", ".join(sorted({type(each).__name__ for each in aligned}))
    cure = (
        f"allow it by max_padding={math.ceil(padding * 100) / 100:g}, make larger units (several layers each), or choose "
        "Elements() for some of the parameters by a callable layout"
    )
    if any(isinstance(each, Whole) for each in aligned):
        cure += "; flatshard.optim.WholeParameterOptimizer steps full matrices in any layout"
    message = (
        f"unit {unit or '<root>'!r}: the layout of {name_list(list(fqns), 3)} ({kinds}) would take {padding:.0%} padding, "
        f"over the limit of {limit:.0%}"
    )
    if any(each.strict for each in aligned):
        raise ValueError(f"{message}: {cure}")
    return f"{message}, so they are cut anywhere, as by Elements(). To keep the layout, {cure}"


def _check(layout: Rows | Blocks | Whole, count: int) -> None:
    if count < 1 or not layout.max_padding >= 0:
        raise ValueError(
            f"{layout}: cuts are between at least 1, and max_padding is a fraction of at least 0 (0.1: a tenth)"
        )
