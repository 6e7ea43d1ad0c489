"""Norms and flags of sharded gradients for torch's own functions, reduced over the ranks when they are used.

``torch._foreach_norm`` and ``GradScaler`` are called for many gradients, one after the other. An all-reduce for each would be
slow. So they get a :class:`PartialNorm` or a :class:`PartialFlag`, which hold this rank's number. Their first use that needs
the value combines the numbers of all ranks, as ``aggregate.py`` does it.
"""

from __future__ import annotations

import collections
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from flatshard._comm.rank_group import RankGroup
from flatshard._handle.tensors.aggregate import Aggregate, in_order, plainly, total_norm

consume = collections.deque[Any](maxlen=0).extend
"""Exhaust an iterator, in C."""


def retype(tensors: Sequence[torch.Tensor], kind: type[torch.Tensor], attribute: str, values: Iterable[Any]) -> None:
    """Turn plain ``tensors`` into instances of ``kind`` in place, each with its value of ``attribute``. Loops in C."""
    consume(map(setattr, tensors, itertools.repeat("__class__"), itertools.repeat(kind)))
    consume(map(setattr, tensors, itertools.repeat(attribute), values))


class _Origin(NamedTuple):
    """The origin of a partial norm: the ranks that hold the shards, the order of the norm, and its device."""

    runtime: RankGroup
    ord: float
    device: torch.device


class PartialNorm(torch.Tensor):
    """The norm of this rank's shard of a gradient (like DTensor's ``_NormPartial``): 0-dim, made by ``torch._foreach_norm``.

    ``torch.stack`` gives a :class:`PartialNorms`. Any other use first reduces the norm over the ranks, in place, so all
    ranks must do it.
    """

    _origin: _Origin

    @classmethod
    def mark(cls, norms: Sequence[torch.Tensor], runtime: RankGroup, ord: float, device: torch.device) -> None:
        """Turn 0-dim plain ``norms`` on ``device`` into partial norms, in place. ``runtime``: its ranks hold the shards."""
        retype(norms, cls, "_origin", itertools.repeat(_Origin(runtime, ord, device)))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.stack and len(args) == 1 and not kwargs:
            return PartialNorms.of(args[0])
        return _call_when_whole(func, args, kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Any:  # a method, because torch.nn.utils calls it for each of many norms
        """Return a partial norm on another device or of another dtype: see ``torch.Tensor.to``."""
        origin = self._origin
        if args == (origin.device,) and not kwargs:
            return self
        with plainly():
            result = super().to(*args, **kwargs)
            device = result.device
        if result is not self:
            self.mark([result], origin.runtime, origin.ord, device)
        return result


_origin = operator.attrgetter("_origin")


class PartialNorms(torch.Tensor):
    """A stack of norms, some of them partial: 1-D.

    Its norm, if of the same order, is the total over all ranks, as a plain tensor. It takes one all-reduce of one number
    per process group, whichever gradients a rank has. Any other use first reduces the norms over the ranks.
    """

    _norms: Sequence[torch.Tensor]

    @classmethod
    def of(cls, norms: Sequence[torch.Tensor]) -> torch.Tensor:
        """Stack ``norms`` as ``torch.stack`` does."""
        with plainly():
            result = torch.stack(list(norms))
        if result.ndim > 1:
            reduce_partial(norms)
            return torch.stack(list(norms))
        retype([result], cls, "_norms", [norms])
        return result

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in NORMS and isinstance(args[0], cls):
            ord, rest = norm_arguments(func, args, kwargs)
            if not rest and (total := args[0]._total(ord)) is not None:
                return total
        return _call_when_whole(func, args, kwargs)

    def _total(self, ord: float) -> torch.Tensor | None:
        """Compute the total norm of order ``ord``. Returns None if the ranks' own totals don't give it."""
        with plainly():
            by_origin = self._by_origin()
            if ord == 0 or any(origin is not None and origin.ord != ord for origin in by_origin):
                return None
            norms = {origin: torch.linalg.vector_norm(values, ord) for origin, values in by_origin.items()}
            sharded = {origin.runtime: norm for origin, norm in norms.items() if origin is not None}
            return total_norm(sharded, norms.get(None), ord, f"the total norm of order {ord}")

    def _by_origin(self) -> dict[_Origin | None, torch.Tensor]:
        """Return the norms by origin. The origin of norms of full gradients is None."""
        if set(map(type, self._norms)) == {PartialNorm} and len(set(map(_origin, self._norms))) == 1:  # the usual case
            return {_origin(self._norms[0]): self}
        found: dict[_Origin | None, list[torch.Tensor]] = {}
        for norm in self._norms:
            found.setdefault(norm._origin if isinstance(norm, PartialNorm) else None, []).append(norm)
        return {origin: torch.stack(norms) for origin, norms in found.items()}

    def _reduce_partial(self) -> None:
        reduce_partial(self._norms)
        with plainly():
            self.copy_(torch.stack(list(self._norms)))
        del self._norms
        self.__class__ = torch.Tensor  # type: ignore[assignment]


class PartialFlag(torch.Tensor):
    """``found_inf`` of a ``GradScaler``, for this rank's shards: the flag of all ranks is set if it is set on any.

    At its first use it becomes a plain tensor, so all ranks must use it. This takes one all-reduce per process group, for
    gradients of all dtypes together.
    """

    _runtimes: frozenset[RankGroup]

    @classmethod
    def mark(cls, flag: torch.Tensor, runtimes: Iterable[RankGroup]) -> None:
        """Turn ``flag`` into a partial flag of ``runtimes``, in addition to those that it has already."""
        before = flag._runtimes if isinstance(flag, cls) else frozenset()
        retype([flag], cls, "_runtimes", [before.union(runtimes)])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is UNSCALE:  # for gradients that are not sharded: it only sets the flag
            with plainly():
                return func(*args, **(kwargs or {}))
        return _call_when_whole(func, args, kwargs or {})

    def _reduce_partial(self) -> None:
        with plainly():
            for runtime in in_order(self._runtimes):
                question = "whether a gradient is infinite or NaN"
                self.copy_(Aggregate("max").over_ranks(self, runtime, question))
        del self._runtimes
        self.__class__ = torch.Tensor  # type: ignore[assignment]


def _call_when_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in METADATA:
        with plainly():
            return func(*args, **kwargs)
    reduce_partial(args, kwargs)
    return func(*args, **kwargs)


def reduce_partial(*arguments: Any) -> None:
    """Reduce partial numbers in ``arguments``, which may be nested, to plain tensors over all ranks. In place."""
    norms: dict[_Origin, dict[int, PartialNorm]] = {}
    for found in _partial_in(arguments):
        if isinstance(found, PartialNorm):
            norms.setdefault(found._origin, {})[id(found)] = found
        else:
            found._reduce_partial()
    for origin in sorted(norms, key=lambda origin: origin.runtime.number):
        parts: list[Any] = list(norms[origin].values())
        with plainly():
            values = torch.stack(parts)
            question = f"{len(parts)} norms of order {origin.ord}"
            whole = Aggregate("norm", origin.ord).over_ranks(values, origin.runtime, question)
            for part, value in zip(parts, whole.unbind(), strict=True):
                part.copy_(value)
                del part._origin
                part.__class__ = torch.Tensor


def _partial_in(argument: Any) -> Iterator[PartialNorm | PartialNorms | PartialFlag]:
    if isinstance(argument, PartialNorm | PartialNorms | PartialFlag):
        yield argument
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _partial_in(item)
    elif isinstance(argument, dict):
        yield from _partial_in(list(argument.values()))


UNSCALE: Callable[..., Any] = torch._amp_foreach_non_finite_check_and_unscale_
"""The function that ``GradScaler`` calls with the gradients of one dtype."""

# Functions that do not need the value over all ranks.
METADATA: frozenset[Callable[..., Any]] = frozenset(
    (
        torch.Tensor.device.__get__,
        torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
        torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
    )
)

# The functions that compute a vector norm, with the names of the parameters after the tensor.
NORMS: dict[Callable[..., Any], tuple[str, ...]] = {
    torch.linalg.vector_norm: ("ord", "dim", "keepdim"),
    torch.linalg.norm: ("ord", "dim", "keepdim"),
    torch.norm: ("p", "dim", "keepdim", "out", "dtype"),
    torch.Tensor.norm: ("p", "dim", "keepdim", "dtype"),
}


def norm_arguments(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[float, dict[str, Any]]:
    """Return the order of the norm in a call of one of ``NORMS``, and further arguments that are not at their defaults."""
    given = dict(zip(NORMS[func], args[1:], strict=False)) | kwargs
    ord = given.pop("ord", given.pop("p", None))
    if ord is None or ord == "fro":
        ord = 2.0
    rest = {k: v for k, v in given.items() if v is not None and v is not False and k not in ("input", "x", "A", "self")}
    return (math.nan, rest | {"ord": ord}) if isinstance(ord, str) else (float(ord), rest)
