"""A part of a tensor whose other parts are on other ranks: what each kind of operation does with it.

:class:`PartTensor` follows the table in ``operations.py``. A :class:`ShardedGradient` is one, and so is what is computed from
parts: ``p.grad.pow(2).sum()`` and ``p.abs().max()`` are numbers of the whole. Lists of tensors (``torch._foreach_mul``) are
an optimizer's: their results are plain tensors.

[Note: Parameters that are never cut]
The layout ``Whole`` is for optimizers that look at whole matrices, such as Muon. The owner of a matrix has all of it, others
have nothing, and each computes for itself, without communication: ``update.norm()`` is the owner's number. So what is
computed from such a parameter or its gradient is plain. Reductions of the gradient itself are those of the whole on all
ranks, for clipping.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Protocol

import torch

from flatshard._comm.rank_group import RankGroup
from flatshard._handle.tensors.aggregate import Aggregate, local_norms, plainly
from flatshard._handle.tensors.operations import OperationKind, is_in_place, is_of_many, kind_of
from flatshard._handle.tensors.partial import NORMS, UNSCALE, make_whole, norm_arguments, retype

Function = Callable[..., Any]
Handler = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]


class PartInfo(Protocol):
    """The parameter that a part belongs to (``ShardInfo``)."""

    @property
    def fqn(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...  # of the whole

    @property
    def full_shape(self) -> tuple[int, ...]: ...  # the same, of a tensor subclass as its user sees it

    @property
    def by_rows(self) -> bool: ...  # the parts are whole rows

    @property
    def never_cut(self) -> bool: ...  # [Note: Parameters that are never cut]

    @property
    def runtime(self) -> RankGroup | None: ...  # of the ranks that hold the parts; None: there are no others

    @property
    def elsewhere(self) -> tuple[tuple[int, int], ...]: ...  # ranges of elements that another rank counts in norms

    def describe(self) -> str: ...  # which elements of what this rank has


class PartTensor(torch.Tensor):
    """A part of a gradient, or of what is computed from sharded parameters or gradients.

    Reductions of it communicate: every rank must take them, and in the same order.
    """

    _flatshard_info: PartInfo
    _whose: ClassVar[str] = ""  # of what a number is, before the FQN

    is_sparse = False  # every optimizer reads this of each gradient: a constant avoids the dispatch

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS[func] if func in HANDLERS else _handler(func)
        if len(types) > 1 and func is not UNSCALE:  # that one leaves its flag partial
            make_whole(args, kwargs)
        if handler is not None:
            return handler(func, args, kwargs or {})
        try:
            with plainly():
                return func(*args, **kwargs) if kwargs else func(*args)
        except TypeError as e:
            if "Multiple dispatch failed" in str(e):  # torch 2.13
                raise RuntimeError(_IN_A_GRAPH) from e
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Returns a plain tensor: the copy belongs to no parameter."""
        result: torch.Tensor = memo.setdefault(id(self), self.clone())
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain tensor: process groups cannot be pickled."""
        with plainly():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


_IN_A_GRAPH = (
    "this torch cannot compile an optimizer's step of sharded parameters: call optimizer.step() without torch.compile. To "
    "make it one kernel per dtype, give the optimizer fused=True"
)


def mark_part(tensor: torch.Tensor, info: PartInfo) -> torch.Tensor:
    """Turn a plain ``tensor`` into a :class:`PartTensor`, in place."""
    retype([tensor], PartTensor, "_flatshard_info", [info])
    return tensor


# -- handlers ----------------------------------------------------------------------------------------------------------


def name_of(func: Function) -> str:
    """The name of a function, or of the attribute that it gets or sets."""
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__", "__delete__") else name  # type: ignore[attr-defined]


def _handler(func: Function) -> Handler | None:
    """What is called for ``func``. None: ``func`` itself, as for a plain tensor."""
    found = HANDLERS[func] = handler_of(name_of(func))
    return found


def handler_of(name: str) -> Handler | None:
    """The same for the function or attribute ``name``."""
    if is_of_many(name) or is_in_place(name):
        return None
    kind = kind_of(name)
    return REFUSED if kind is None else BY_KIND[kind]


def part_in(*arguments: Any) -> Any:
    """The first part in ``arguments``, which may be nested: a :class:`PartTensor`, or a sharded parameter."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            if hasattr(argument, "_flatshard_info"):
                return argument
        elif isinstance(argument, list | tuple | dict):
            found = part_in(*(argument.values() if isinstance(argument, dict) else argument))
            if found is not None:
                return found
    return None


def refuse(info: PartInfo, name: str) -> NoReturn:
    """Raise: ``name`` needs more than the elements that this rank has."""
    raise RuntimeError(
        f"{info.describe()}, and {_SYMBOLS.get(name, name)!r} needs the whole. It is whole inside `with "
        "flatshard.summon_full_params(module):` (a gradient, with with_grads=True) and in the forward of its module. If a "
        "method of yours computes with it, register the method by flatshard.register_forward_method"
    )


_SYMBOLS = {"__getitem__": "p[...]", "__setitem__": "p[...] = ...", "__matmul__": "@", "__rmatmul__": "@"}


def _plainly(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with plainly():
        return func(*args, **kwargs)


def _elementwise(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result is a part, too."""
    part = args[0] if args else None
    if not isinstance(part, PartTensor):
        part = part_in(args, kwargs)
    info = part._flatshard_info
    with plainly():
        result = func(*args, **kwargs)
        if (
            info.never_cut
            or type(result) is not torch.Tensor
            or "out" in kwargs
            or result is part
            or result.layout is not torch.strided
        ):
            return result
        if result.shape != part.shape:  # broadcast along rows or columns that this rank has not
            refuse(info, name_of(func))
    result.__class__ = PartTensor  # as `mark_part`, in fewer calls: optimizers come here
    result._flatshard_info = info  # type: ignore[attr-defined]
    return result


def _same(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result has the same elements: it is a part of the same class."""
    result = _plainly(func, args, kwargs)
    part = args[0]
    if isinstance(part, PartTensor) and type(result) is torch.Tensor:
        retype([result], type(part), "_flatshard_info", [part._flatshard_info])
    return result


def _dimensions(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    part = args[0]
    # What torch computes on the meta device is Python code, which takes the dimensions for those of the shape.
    return part.dim() if part.is_meta else len(part._flatshard_info.full_shape)


def _flat(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The part's own shape, or 1-D."""
    part = args[0]
    wanted = args[1:]
    if wanted and isinstance(wanted[0], torch.dtype):
        return _plainly(func, args, kwargs)
    if not hasattr(part, "_flatshard_info"):
        return _plainly(func, args, kwargs)
    try:
        result = _plainly(func, args, kwargs)
    except RuntimeError:  # the sizes don't fit
        _rows_only(part._flatshard_info, name_of(func))
        raise
    with plainly():
        if result.dim() != 1 and result.shape != part.shape:
            _rows_only(part._flatshard_info, name_of(func))
            return result
    return result if result is part or part._flatshard_info.never_cut else mark_part(result, part._flatshard_info)


def _select(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``[:]``, ``[...]``, and a mask of the same shape where elements are set."""
    part, index = args[0], args[1] if len(args) > 1 else None
    info = getattr(part, "_flatshard_info", None)
    if isinstance(index, torch.Tensor) or info is None:
        with plainly():
            if info is None or (len(args) > 2 and index.dtype is torch.bool and index.shape == part.shape):  # type: ignore[union-attr]
                return func(*args, **kwargs)
    elif index is Ellipsis or (isinstance(index, slice) and index == slice(None)):
        return _plainly(func, args, kwargs) if len(args) > 2 else _elementwise(func, args, kwargs)
    _rows_only(info, name_of(func))
    return _plainly(func, args, kwargs)


def _rows_only(info: PartInfo, name: str) -> None:
    """Raise, unless this rank has whole rows."""
    if not info.by_rows:
        refuse(info, name)


def _shape(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _rows_only(part_in(args, kwargs)._flatshard_info, name_of(func))
    return _plainly(func, args, kwargs)


def _transpose(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a vector it is the vector."""
    info = args[0]._flatshard_info
    if len(info.shape) < 2:
        return _same(func, args, kwargs)
    _rows_only(info, name_of(func))
    return _plainly(func, args, kwargs)


def _whole_shape(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    part = args[0]
    with plainly():
        if tuple(part.shape) != part._flatshard_info.shape:
            refuse(part._flatshard_info, name_of(func))
    return _plainly(func, args, kwargs)


def _refused(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    refuse(part_in(args, kwargs)._flatshard_info, name_of(func))


REFUSED: Handler = _refused


# -- reductions --------------------------------------------------------------------------------------------------------


def counted(part: torch.Tensor) -> list[torch.Tensor]:
    """The elements of ``part`` that this rank counts, in pieces. [Note: Norms over two meshes]"""
    elsewhere = part._flatshard_info.elsewhere  # type: ignore[attr-defined]
    if not elsewhere:
        return [part]
    edges = [0, *itertools.chain(*elsewhere), part.numel()]
    return [part[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def local_norm(part: torch.Tensor, ord: float, dtype: torch.dtype | None) -> torch.Tensor:
    """The norm of the elements of ``part`` that this rank counts."""
    pieces = counted(part)
    norms = local_norms(pieces, ord, dtype)
    if len(pieces) == 1:
        return norms[0]
    stacked = torch.stack(norms)
    return stacked.sum() if ord == 0 else torch.linalg.vector_norm(stacked, ord)


def _no_dims(info: PartInfo, name: str, rest: Any) -> NoReturn:
    raise NotImplementedError(
        f"{info.describe()}: {name} with {rest} is not supported. Without them it is that of the whole; or compute it inside "
        "`with flatshard.summon_full_params(module, with_grads=True):`, where changes of gradients in place are kept"
    )


def _of_rows(info: PartInfo, dims: Any) -> bool:
    """Whether ``dims`` are within rows, and this rank's are whole."""
    ndim = len(info.shape)
    dims = (dims,) if isinstance(dims, int) else dims
    return info.by_rows and bool(dims) and all(isinstance(d, int) and d % ndim for d in dims)


def norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of ``NORMS``: one all-reduce."""
    part: Any = args[0] if args else kwargs.get("input", kwargs.get("x", kwargs.get("A")))
    if not hasattr(part, "_flatshard_info"):
        return _plainly(func, args, kwargs)
    info = part._flatshard_info
    ord, rest = norm_arguments(func, args, kwargs)
    dtype = rest.pop("dtype", None)
    if _of_rows(info, rest.get("dim")):
        return _plainly(func, args, kwargs)
    # For a matrix torch.linalg.norm with an order is a matrix norm.
    of_matrix = func is torch.linalg.norm and len(info.shape) > 1 and (len(args) > 1 or kwargs.get("ord") is not None)
    if rest or of_matrix:
        _no_dims(info, "a norm", sorted(rest) or ["ord"])
    with plainly():
        own = local_norm(part, ord, dtype)
        whole = over_ranks(own, Aggregate("norm", ord), part, f"the norm of order {ord}")
        return _with_graph(part, own, whole, lambda a, b: torch.where(a == b, 1.0, (a / b) ** (ord - 1)).nan_to_num())


def over_ranks(own: torch.Tensor, aggregate: Aggregate, part: Any, what: str) -> torch.Tensor:
    """Combine this rank's number with those of the others: one all-reduce."""
    info, whose = part._flatshard_info, getattr(part, "_whose", "")
    assert info.runtime is not None
    result: torch.Tensor = aggregate.over_ranks(own, info.runtime, f"{what} of {whose}{info.fqn!r}").to(own.dtype)
    return result


def _with_graph(part: Any, own: torch.Tensor, whole: torch.Tensor, share: Callable[..., Any]) -> torch.Tensor:
    """``whole``, with the graph of this rank's number if it has one. ``share``: the derivative of the whole by it."""
    if not (part.requires_grad and torch.is_grad_enabled()):
        return whole
    local = own if own.requires_grad else part.sum().to(own.dtype)  # of an empty part
    result: torch.Tensor = whole + share(own.detach(), whole) * (local - local.detach())
    return result


def _reduce(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in NORMS:  # as a method of a sharded parameter
        return norm(func, args, kwargs)
    name = name_of(func)
    part: Any = args[0] if args else kwargs.get("input")
    rest = args[1:]
    if any(isinstance(each, torch.Tensor) for each in (*rest, kwargs.get("other"))) and name in ("max", "min"):
        return _elementwise(func, args, kwargs)
    if name in ("dot", "vdot"):
        product = _elementwise(torch.mul, (torch.conj(part) if name == "vdot" else part, *rest), kwargs)
        return _reduce(torch.sum, (product,), {})
    info = part._flatshard_info
    given = {k: v for k, v in kwargs.items() if k not in ("input", "dtype") and v is not None and v is not False}
    dims = rest[0] if rest else given.get("dim", given.get("axis"))
    if _of_rows(info, dims):
        return _plainly(func, args, kwargs)
    if dims is not None or given or len(rest) > 1:
        _no_dims(info, name, sorted(given) or ["dim"])
    if name == "item" or name.startswith("__"):
        if math.prod(info.shape) != 1:
            refuse(info, name)
        number = _reduce(torch.sum, (part,), {}) if part.dtype is not torch.bool else _reduce(torch.any, (part,), {})
        with plainly():
            return getattr(number, name)()
    reduced = _REDUCTIONS.get(name)
    if reduced is None or part.dtype.is_complex:
        refuse(info, name)
    with plainly():
        return reduced(part, info, kwargs.get("dtype"))


def _sum(part: torch.Tensor, info: PartInfo, dtype: torch.dtype | None, *, over: int = 1) -> torch.Tensor:
    dtype = dtype or (part.dtype if part.is_floating_point() else torch.int64)
    # Added up in double, because the parts of a bfloat16 sum would be rounded.
    own = torch.stack([piece.sum(dtype=torch.float64) for piece in counted(part)]).sum()
    return (_with_graph(part, own, over_ranks(own, Aggregate("sum"), part, "the sum"), lambda a, b: 1.0) / over).to(
        dtype
    )


def _mean(part: torch.Tensor, info: PartInfo, dtype: torch.dtype | None) -> torch.Tensor:
    if not (dtype or part.dtype).is_floating_point:
        raise RuntimeError(f"mean() of {info.fqn!r}: needs floating point, got {part.dtype}")
    if part.dim() != (len(info.shape) if info.by_rows else 1):  # view_as_real
        refuse(info, "mean")
    return _sum(part, info, dtype or part.dtype, over=math.prod(info.full_shape))


def _extreme(part: torch.Tensor, info: PartInfo, dtype: torch.dtype | None, *, op: Any) -> torch.Tensor:
    own = Aggregate(op)._of_part(part)
    whole = over_ranks(own, Aggregate(op), part, f"the {op}imum")
    return _with_graph(part, own, whole, lambda a, b: (a == b).double()).to(part.dtype)


def _any(part: torch.Tensor, info: PartInfo, dtype: torch.dtype | None) -> torch.Tensor:
    return over_ranks(part.any().double(), Aggregate("max"), part, "any").bool()


def _all(part: torch.Tensor, info: PartInfo, dtype: torch.dtype | None) -> torch.Tensor:
    return over_ranks(part.all().double(), Aggregate("min"), part, "all").bool()


def _count(part: torch.Tensor, info: PartInfo, dtype: torch.dtype | None) -> torch.Tensor:
    own = torch.stack([piece.count_nonzero() for piece in counted(part)]).sum()
    return over_ranks(own.double(), Aggregate("sum"), part, "the count of nonzero elements").long()


_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": _sum,
    "mean": _mean,
    **dict.fromkeys(("max", "amax"), functools.partial(_extreme, op="max")),
    **dict.fromkeys(("min", "amin"), functools.partial(_extreme, op="min")),
    "any": _any,
    "all": _all,
    "count_nonzero": _count,
}

BY_KIND: dict[OperationKind, Handler | None] = {
    OperationKind.ELEMENTWISE: _elementwise,
    OperationKind.REDUCTION: _reduce,
    OperationKind.ALIAS: _same,
    OperationKind.MEMORY: None,
    OperationKind.DIMENSIONS: _dimensions,
    OperationKind.FLAT: _flat,
    OperationKind.SELECT: _select,
    OperationKind.SHAPE: _shape,
    OperationKind.TRANSPOSE: _transpose,
    OperationKind.WHOLE_SHAPE: _whole_shape,
}

HANDLERS: dict[Function, Handler | None] = dict.fromkeys(NORMS, norm)
"""By function, filled as they are met. None: called as for a plain tensor."""
