"""Numbers of this rank alone, for torch's own functions, which are reduced over the ranks when they are used.

``torch._foreach_norm`` and ``GradScaler`` are called for many gradients, one after the other. An all-reduce for each would be
slow. So they get a :class:`LocalNumber`, of this rank's shards. The first use that needs the value combines the numbers of
all ranks, as ``aggregate.py`` does it.
"""

from __future__ import annotations

import collections
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from flatshard._comm.rank_group import RankGroup
from flatshard._handle.tensors.aggregate import Aggregate, plainly, total_norm
from flatshard._handle.tensors.operations import tensors_in

consume = collections.deque[Any](maxlen=0).extend
"""Exhaust an iterator, in C."""


def retype(tensors: Sequence[torch.Tensor], kind: type[torch.Tensor], attribute: str, values: Iterable[Any]) -> None:
    """Turn plain ``tensors`` into instances of ``kind`` in place, each with its value of ``attribute``. Loops in C."""
    consume(map(setattr, tensors, itertools.repeat("__class__"), itertools.repeat(kind)))
    consume(map(setattr, tensors, itertools.repeat(attribute), values))


class _Origin(NamedTuple):
    """The origin of a local number: the ranks that hold the shards, how their numbers are combined, and its device."""

    runtime: RankGroup
    aggregate: Aggregate
    device: torch.device


class LocalNumber(torch.Tensor):
    """A number of this rank's shards (like DTensor's ``_NormPartial``): 0-dim.

    It is a norm of a gradient from ``torch._foreach_norm``, or the ``found_inf`` of a ``GradScaler``, over one process group
    or several. ``torch.stack`` gives :class:`LocalNorms`. Any other use first reduces it over the ranks, in place, so all
    ranks must do it.
    """

    _origins: tuple[_Origin, ...]

    @classmethod
    def mark_norms(cls, norms: Sequence[torch.Tensor], runtime: RankGroup, ord: float, device: torch.device) -> None:
        """Turn 0-dim plain ``norms`` on ``device`` into local ones, in place. The ranks of ``runtime`` hold the shards."""
        retype(norms, cls, "_origins", itertools.repeat((_Origin(runtime, Aggregate("norm", ord), device),)))

    @classmethod
    def mark_flag(cls, flag: torch.Tensor, runtimes: Iterable[RankGroup]) -> None:
        """Turn ``flag`` into a local one of ``runtimes``, in addition to those that it has already."""
        with plainly():
            new = [_Origin(runtime, Aggregate("max"), flag.device) for runtime in runtimes]
        retype([flag], cls, "_origins", [tuple(dict.fromkeys([*getattr(flag, "_origins", ()), *new]))])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.stack and len(args) == 1 and not kwargs:
            return LocalNorms.of(args[0])
        return _call_reduced(func, args, kwargs or {})

    def to(self, *args: Any, **kwargs: Any) -> Any:  # a method, because torch.nn.utils calls it for each of many norms
        """Return a local number on another device or of another dtype: see ``torch.Tensor.to``."""
        origins = self._origins
        if args == (origins[0].device,) and not kwargs:
            return self
        with plainly():
            result = super().to(*args, **kwargs)
            device = result.device
        if result is not self:
            retype([result], LocalNumber, "_origins", [tuple(origin._replace(device=device) for origin in origins)])
        return result


_origins = operator.attrgetter("_origins")


class LocalNorms(torch.Tensor):
    """A stack of norms, some of them local: 1-D.

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
            reduce_local(norms)
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
        return _call_reduced(func, args, kwargs)

    def _total(self, ord: float) -> torch.Tensor | None:
        """Compute the total norm of order ``ord``. Returns None if the ranks' own totals don't give it."""
        with plainly():
            by_origin = self._by_origin()
            if ord == 0 or any(o is not None and o.aggregate != Aggregate("norm", ord) for o in by_origin):
                return None
            norms = {origin: torch.linalg.vector_norm(values, ord) for origin, values in by_origin.items()}
            sharded = {origin.runtime: norm for origin, norm in norms.items() if origin is not None}
            return total_norm(sharded, norms.get(None), ord, f"the total norm of order {ord}")

    def _by_origin(self) -> dict[_Origin | None, torch.Tensor]:
        """Return the norms by origin. The origin of norms of full gradients is None."""
        if set(map(type, self._norms)) == {LocalNumber} and len(set(map(_origins, self._norms))) == 1:  # the usual case
            return {_origins(self._norms[0])[0]: self}
        found: dict[_Origin | None, list[torch.Tensor]] = {}
        for norm in self._norms:
            found.setdefault(_origins(norm)[0] if isinstance(norm, LocalNumber) else None, []).append(norm)
        return {origin: torch.stack(norms) for origin, norms in found.items()}

    def reduce(self) -> None:
        """Reduce the norms over the ranks. The stack becomes a plain tensor."""
        reduce_local(self._norms)
        with plainly():
            self.copy_(torch.stack(list(self._norms)))
        del self._norms
        self.__class__ = torch.Tensor  # type: ignore[assignment]


def _call_reduced(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func``, after local numbers were reduced if it needs their values."""
    if func in METADATA or func is UNSCALE:  # the latter, for gradients that are not sharded, only sets the flag
        with plainly():
            return func(*args, **kwargs)
    reduce_local(args, kwargs)
    return func(*args, **kwargs)


def reduce_local(*arguments: Any) -> None:
    """Reduce local numbers in ``arguments``, which may be nested, to plain tensors over all ranks. In place."""
    for stack in tensors_in(arguments):
        if isinstance(stack, LocalNorms):
            stack.reduce()
    by_origin: dict[_Origin, dict[int, Any]] = {}
    for found in tensors_in(arguments):
        for origin in found._origins if isinstance(found, LocalNumber) else ():
            by_origin.setdefault(origin, {})[id(found)] = found
    for origin in sorted(by_origin, key=lambda origin: origin.runtime.number):
        same, aggregate = [*by_origin[origin].values()], origin.aggregate
        is_norm = aggregate.op == "norm"
        question = f"{len(same)} norms of order {aggregate.ord}" if is_norm else "whether a gradient is infinite or NaN"
        with plainly():
            combined = aggregate.over_ranks(torch.stack(same), origin.runtime, question)
            for number, value in zip(same, combined.unbind(), strict=True):
                number.copy_(value)
                number._origins = tuple(each for each in number._origins if each != origin)
                if not number._origins:
                    del number._origins
                    number.__class__ = torch.Tensor


UNSCALE: Callable[..., Any] = torch._amp_foreach_non_finite_check_and_unscale_
"""The function that ``GradScaler`` calls with the gradients of one dtype."""

# Functions that do not need the value over all ranks.
_ATTRIBUTES: tuple[Any, ...] = torch.Tensor.device, torch.Tensor.dtype, torch.Tensor.shape
METADATA: frozenset[Callable[..., Any]] = frozenset(
    (*(each.__get__ for each in _ATTRIBUTES), torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel)
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
