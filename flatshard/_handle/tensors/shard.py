"""Shards of tensors whose other shards are on other ranks, and operations on them, by their kinds.

:class:`ShardTensor` follows the table in ``operations.py``. A :class:`ShardedGradient` is one, and so is what is computed
from shards: ``p.grad.pow(2).sum()`` and ``p.abs().max()`` are numbers of the full tensor. Lists of tensors
(``torch._foreach_mul``) are an optimizer's: their results are plain tensors.

[Note: Parameters that are never cut]
The layout ``Whole`` is for optimizers that look at whole matrices, such as Muon. The owner of a matrix has all of it, and
others have nothing. The matrix itself, its gradient, and what is computed from their elements alone are shards as in other
layouts: their sums are those of the full tensor. What is made of rows and columns, or together with other tensors of
this rank (an optimizer's state), is an :class:`OwnedTensor`: each rank computes it for itself, without communication, and it
is right on the owner. A number (0-dim) stays the owner's while it is used on the same parameter, by an optimizer:
``update.div_(update.norm())`` sends nothing. In a loss, by ``float(n)``, or beside other tensors, all ranks get the owner's.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from flatshard._base.callers import Caller, cure_of_reading, refuse_other_sharding
from flatshard._handle.tensors.aggregate import Aggregate, device_for, local_norms, plainly
from flatshard._handle.tensors.local_numbers import METADATA, NORMS, UNSCALE, norm_arguments, reduce_local, retype
from flatshard._handle.tensors.operations import (
    OperationKind,
    first_by_place,
    is_in_place,
    is_of_many,
    kind_of,
    name_of,
    part_in,
    replaced,
    tensors_in,
)
from flatshard._handle.tensors.shard_info import DTENSOR_CURES, ShardInfo, attribute_of_dtensors

Function = Callable[..., Any]
Handler = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]


class ShardTensor(torch.Tensor):
    """A shard of a gradient, or of a tensor that is computed from sharded parameters or gradients.

    Reductions of it communicate: every rank must take them, and in the same order.
    """

    _flatshard_info: ShardInfo
    _whose: ClassVar[str] = ""  # words before the FQN, in the description of a number

    full_tensor, redistribute, to_local, placements, device_mesh = map(attribute_of_dtensors, DTENSOR_CURES)

    is_sparse = False  # every optimizer reads this of each gradient: a constant avoids the dispatch

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS[func] if func in HANDLERS else _handler(func)
        if len(types) > 1 and func is not UNSCALE:  # that one leaves its flag partial
            reduce_local(args, kwargs)
        if OwnedTensor in types and (settled := share_numbers(func, args, kwargs or {})) is not None:
            return func(*settled[0], **settled[1])
        if handler is not None:
            if torch.is_grad_enabled() or not args:
                args, kwargs = as_leaves(*first_by_place(args, kwargs or {}))
            return handler(func, args, kwargs or {})
        with plainly():
            try:  # free unless torch raises, and optimizers come here
                return func(*args, **kwargs) if kwargs else func(*args)
            except RuntimeError as error:
                refuse_full_shape(error, func, args, kwargs)
                raise

    def _become_parameter(self, _: bool) -> None:
        """Become a plain parameter of its own: ``nn.Parameter(part)`` sets ``_is_param`` of the tensor that it makes."""
        self.__class__ = nn.Parameter  # type: ignore[assignment]
        del self._flatshard_info

    _is_param = property(lambda _: False, _become_parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain tensor: the copy belongs to no parameter."""
        result: torch.Tensor = memo.setdefault(id(self), self.clone())
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor: process groups cannot be pickled."""
        with plainly():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class OwnedTensor(ShardTensor):
    """A result of rows and columns of a parameter that is never cut. Only its owner's values are right."""


# -- handlers ----------------------------------------------------------------------------------------------------------


def _handler(func: Function) -> Handler | None:
    """Return the handler of ``func``, or None if ``func`` itself is called, as for a plain tensor."""
    found = HANDLERS[func] = handler_of(name_of(func))
    return found


def handler_of(name: str) -> Handler | None:
    """Return the handler of the function or attribute ``name``, or None if it works as for a plain tensor."""
    if is_of_many(name) or is_in_place(name):
        return None
    kind = kind_of(name)
    return REFUSED if kind is None else BY_KIND[kind]


def as_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace sharded parameters in the arguments by leaves, for autograd to record. [Note: What bypasses the table]"""
    params: list[Any] = [t for t in tensors_in((args, kwargs)) if hasattr(type(t), "_as_leaf") and t.requires_grad]
    by = {id(param): param._as_leaf() for param in params}
    return (replaced(args, by), replaced(kwargs, by)) if by else (args, kwargs)


def refuse(info: ShardInfo, name: str) -> NoReturn:
    """Raise, as ``name`` needs more than the elements that this rank has."""
    refuse_other_sharding(info.fqn)
    raise RuntimeError(
        f"{info.describe()}, and {_SYMBOLS.get(name, name)!r} needs the full tensor. It is full inside `with "
        "flatshard.summon_full_params(module):` (a gradient, with with_grads=True) and in the forward of its module. "
        f"{cure_of_reading()}"
    )


def refuse_full_shape(error: RuntimeError, func: Function, *arguments: Any) -> None:
    """Raise if ``func`` was given a shard together with a tensor of its full shape, so that torch raised ``error``."""
    with plainly():
        tensors = list(tensors_in(arguments))
        shapes = {tuple(t.shape) for t in tensors}
    for info in (t._flatshard_info for t in tensors if hasattr(t, "_flatshard_info")):
        if info.full_shape in shapes and not info.is_full:
            name = name_of(func)
            raise RuntimeError(info.explain_full_shape(_SYMBOLS.get(name, name))) from error


_SYMBOLS = {"__getitem__": "p[...]", "__setitem__": "p[...] = ...", "__matmul__": "@", "__rmatmul__": "@"}


def _plainly(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with plainly():
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            refuse_full_shape(error, func, args, kwargs)
            raise


def _marked(result: torch.Tensor, kind: type[ShardTensor], info: ShardInfo) -> torch.Tensor:
    """Return ``result``, plain, as a shard of class ``kind``."""
    retype([result], kind, "_flatshard_info", [info])
    return result


def _by_rows(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result for this rank's rows: plain, or for a parameter that is never cut an ``OwnedTensor``."""
    info = part_in(args, kwargs)._flatshard_info
    if not info.by_rows:
        refuse(info, name_of(func))
    if not info.never_cut:
        return _plainly(func, args, kwargs)
    if any(getattr(t, "_flatshard_info", info) is not info for t in tensors_in((args, kwargs))):
        refuse(info, name_of(func))
    result = _plainly(func, args, kwargs)
    for made in tensors_in(result):
        if type(made) is torch.Tensor:
            _marked(made, OwnedTensor, info)
    return result


def _elementwise(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result for this rank's elements: a shard, too."""
    part: Any = args[0] if args and isinstance(args[0], ShardTensor) else part_in(args, kwargs)
    info = part._flatshard_info
    with plainly():
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            refuse_full_shape(error, func, args, kwargs)
            raise
        if type(result) is not torch.Tensor or "out" in kwargs or result is part or result.layout is not torch.strided:
            return result
        owned = info.never_cut and not _are_parts(args, kwargs)
        if result.shape != part.shape and not owned:  # broadcast along rows or columns that this rank has not
            refuse(info, name_of(func))
    result.__class__ = OwnedTensor if owned else ShardTensor  # not by `retype`, which calls more: optimizers come here
    result._flatshard_info = info  # type: ignore[attr-defined]
    return result


def _are_parts(*arguments: Any) -> bool:
    """Return whether all tensors in ``arguments`` are shards or numbers, and none is the owner's alone."""
    return all(
        type(t) is not OwnedTensor and (hasattr(t, "_flatshard_info") or not t.dim()) for t in tensors_in(arguments)
    )


def _same(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a shard of the same class, with the same elements."""
    if kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
        warn_of_memory_format(args[0]._flatshard_info.fqn)
        kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
    result = _plainly(func, args, kwargs)
    part = args[0]
    if hasattr(part, "_flatshard_info") and type(result) is torch.Tensor:
        return _marked(result, type(part) if isinstance(part, ShardTensor) else ShardTensor, part._flatshard_info)
    return result


def warn_of_memory_format(fqn: str) -> None:
    """Warn that a sharded parameter keeps its memory format."""
    warnings.warn(
        f"parameter {fqn!r} keeps the memory format that it had in fully_shard: call module.to(memory_format=...) before "
        "fully_shard",
        stacklevel=2,
    )


def _dimensions(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of dimensions of the full tensor, adjusted by those that a view adds or removes."""
    part, info, caller = args[0], args[0]._flatshard_info, Caller(1)
    refuse_initialiser(info, caller)
    with plainly():
        own: int = part.dim()
        # On the meta device torch computes by Python code, which takes the dimensions for those of the shape. So does
        # torch's private code, as dynamo, which looks at memory.
        return own if part.is_meta or caller.is_private_torch else own + len(info.full_shape) - len(info.part_shape)


def _shape(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Size:
    shape: torch.Size = _plainly(func, args, kwargs)
    if 0 in shape:  # initialisers leave it alone, where those of other ranks go on
        refuse_initialiser(args[0]._flatshard_info, Caller(1))
    return shape


def refuse_initialiser(info: ShardInfo, caller: Caller) -> None:
    """Raise if one of torch's initialisers asks for the shape of a shard, as it computes with the full shape."""
    name = caller.initialiser
    if name is not None and (info.is_cut or info.wrapping is not None or len(info.shape) < 2):
        refuse(info, name)


def _size(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return _plainly(func, args, kwargs)
    except IndexError:
        refuse(args[0]._flatshard_info, name_of(func))


def _flat(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a view of the shard in its own shape, or 1-D."""
    part, info = args[0], getattr(args[0], "_flatshard_info", None)
    if info is None or isinstance(args[1] if len(args) > 1 else None, torch.dtype):
        return _plainly(func, args, kwargs)
    try:
        result = _plainly(func, args, kwargs)
    except (RuntimeError, IndexError):  # the sizes don't fit
        if not info.by_rows:
            refuse(info, name_of(func))
        raise
    with plainly():
        if result.dim() != 1 and result.shape != part.shape:
            return _by_rows(func, args, kwargs)
    if result is part:
        return result
    return _marked(result, OwnedTensor if type(part) is OwnedTensor else ShardTensor, info)


def _select(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Index by ``[:]``, ``[...]``, or a mask of the same shape where elements are set."""
    part, index = args[0], args[1] if len(args) > 1 else None
    info = getattr(part, "_flatshard_info", None)
    if isinstance(index, torch.Tensor) or info is None:
        with plainly():
            if info is None or (len(args) > 2 and index.dtype is torch.bool and index.shape == part.shape):  # type: ignore[union-attr]
                return func(*args, **kwargs)
    elif index is Ellipsis or (isinstance(index, slice) and index == slice(None)):
        return _plainly(func, args, kwargs) if len(args) > 2 else _elementwise(func, args, kwargs)
    return _by_rows(func, args, kwargs)


def _transpose(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Transpose rows and columns. A vector stays as it is."""
    info = args[0]._flatshard_info
    return _same(func, args, kwargs) if len(info.shape) < 2 else _by_rows(func, args, kwargs)


def _refused(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that is not in the table on the owner, and refuse it elsewhere, and for lists of parameters."""
    info = part_in(args, kwargs)._flatshard_info
    if not info.never_cut or (args and isinstance(args[0], list | tuple)):
        refuse(info, name_of(func))
    return _by_rows(func, args, kwargs)


REFUSED: Handler = _refused


# -- reductions --------------------------------------------------------------------------------------------------------


def elsewhere_of(part: Any) -> tuple[tuple[int, int], ...]:
    """Ranges of this rank's shard that another rank counts in norms; none for a full tensor."""
    return part._flatshard_info.elsewhere if hasattr(part, "_flatshard_info") else ()


def counted(part: torch.Tensor) -> list[torch.Tensor]:
    """Return the elements of ``part`` that this rank counts, in pieces. tensor_parallel.py, [Note: Norms over two meshes]"""
    elsewhere = elsewhere_of(part)
    if not elsewhere:
        return [part]
    edges = [0, *itertools.chain(*elsewhere), part.numel()]
    return [part[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def local_norm(part: torch.Tensor, ord: float, dtype: torch.dtype | None) -> torch.Tensor:
    """Compute the norm of the elements of ``part`` that this rank counts."""
    norms = local_norms(counted(part), ord, dtype)
    if len(norms) == 1:
        return norms[0]
    stacked = torch.stack(norms)
    return stacked.sum() if ord == 0 else torch.linalg.vector_norm(stacked, ord)


def _no_dims(info: ShardInfo, name: str, rest: Any) -> NoReturn:
    raise NotImplementedError(
        f"{info.describe()}: {name} with {rest} is not supported. Without them it is that of the full tensor; or compute it "
        "inside `with flatshard.summon_full_params(module, with_grads=True):`, where changes of gradients in place are kept"
    )


def _of_rows(info: ShardInfo, dims: Any) -> bool:
    """Return whether ``dims`` are within rows, and this rank's are whole."""
    ndim = len(info.shape)
    dims = (dims,) if isinstance(dims, int) else dims
    return info.by_rows and bool(dims) and (info.never_cut or all(isinstance(d, int) and d % ndim for d in dims))


def _of_owner(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reduce a tensor that only the owner has. Other ranks return any number: it is not used."""
    part: Any = part_in(args, kwargs)
    info, name = part._flatshard_info, name_of(func)
    if name == "item" or name.startswith("__"):
        refuse(info, name)
    if part.numel() or info.start < info.stop or name in ("dot", "vdot") or len(args) != 1 or kwargs:
        return _by_rows(func, args, kwargs)
    with plainly():
        number = func(part.new_ones([1] * part.dim()))
        if part.requires_grad:
            number = number + 0 * part.sum()
    return _marked(number, OwnedTensor, info)


def share_numbers(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace the owners' numbers in the arguments by those of all ranks, or return None if the owners' will do.

    Ranks need them beside other parameters, and in terms of a loss, for which each rank may have its own coefficient.
    An optimizer's numbers, of one parameter alone, stay the owner's.
    """
    with plainly():
        tensors = list(tensors_in((args, kwargs)))
        numbers = {id(t): t for t in tensors if type(t) is OwnedTensor and not t.dim()}
        if not numbers or _is_metadata(func):
            return None
        of = {id(getattr(t, "_flatshard_info", None)) for t in tensors}
        is_term = len(args) + len(kwargs) > 1 and any(t.requires_grad for t in numbers.values())
        if len(of) == 1 and not is_term and kind_of(name_of(func)) in (OperationKind.ELEMENTWISE, OperationKind.ALIAS):
            return None
        found = dict(zip(numbers, _of_owners([*numbers.values()], name_of(func)), strict=True))
    return replaced(args, found), replaced(kwargs, found)


def _of_owners(numbers: list[Any], name: str) -> list[torch.Tensor]:
    """Return the owners' ``numbers`` on all ranks, plain: one all-reduce for each process group."""
    infos = [number._flatshard_info for number in numbers]
    if complex_of := [i for number, i in zip(numbers, infos, strict=True) if number.is_complex()]:
        refuse(complex_of[0], name)
    runtimes = [info.runtime for info in infos]
    own = [n.detach().to(device_for(numbers, runtimes), torch.float64) * 1 for n in numbers]
    mine = [n if info.start < info.stop else torch.zeros_like(n) for n, info in zip(own, infos, strict=True)]
    question = f"the owners' numbers of {', '.join(repr(info.fqn) for info in infos)}"
    full = Aggregate("sum").over_groups(torch.stack(mine), runtimes, question)
    return [
        _with_graph(n, n, f.to(n.device, n.dtype), lambda a, b: 1.0, f"a number of {n._flatshard_info.fqn!r}")
        for n, f in zip(numbers, full.unbind(), strict=True)
    ]


def _is_metadata(func: Function) -> bool:
    """Return whether ``func`` asks for something that a number has on every rank, such as its dtype."""
    name = name_of(func)
    is_property = getattr(func, "__name__", "") == "__get__" and kind_of(name) is OperationKind.MEMORY
    return is_property or func in METADATA or name in ("__hash__", "requires_grad_") or name.startswith("is_")


def norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a norm by a function of ``NORMS``: one all-reduce."""
    part: Any = args[0]
    if not hasattr(part, "_flatshard_info"):
        return _plainly(func, args, kwargs)
    if isinstance(part, OwnedTensor):
        return _of_owner(func, args, kwargs)
    info = part._flatshard_info
    ord, rest = norm_arguments(func, args, kwargs)
    dtype = rest.pop("dtype", None)
    if _of_rows(info, rest.get("dim")):
        return _by_rows(func, args, kwargs)
    # For a matrix torch.linalg.norm with an order is a matrix norm.
    of_matrix = func is torch.linalg.norm and len(info.shape) > 1 and (len(args) > 1 or kwargs.get("ord") is not None)
    if info.never_cut and (rest or of_matrix):
        return _of_owner(func, args, kwargs)
    if rest or of_matrix:
        _no_dims(info, "a norm", sorted(rest) or ["ord"])
    with plainly():
        own, aggregate = local_norm(part, ord, dtype), Aggregate("norm", ord)
        return _combine(part, own, aggregate, f"the norm of order {ord}", functools.partial(_share_of_norm, ord))


def _share_of_norm(ord: float, own: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    return torch.where(own == full, 1.0, (own / full) ** (ord - 1)).nan_to_num()


def over_ranks(own: torch.Tensor, aggregate: Aggregate, part: Any, what: str) -> torch.Tensor:
    """Combine this rank's number with those of the others: one all-reduce."""
    runtime = part._flatshard_info.runtime
    assert runtime is not None
    result: torch.Tensor = aggregate.over_ranks(own, runtime, _question(what, part)).to(own.dtype)
    return result


def _question(what: str, part: Any) -> str:
    return f"{what} of {getattr(part, '_whose', '')}{part._flatshard_info.fqn!r}"


def _combine(part: Any, own: torch.Tensor, aggregate: Aggregate, what: str, share: Any) -> torch.Tensor:
    """Combine this rank's number as ``over_ranks`` does, with its graph."""
    return _with_graph(part, own, over_ranks(own, aggregate, part, what), share, what)


def _with_graph(part: Any, own: torch.Tensor, full: torch.Tensor, share: Callable[..., Any], what: str) -> torch.Tensor:
    """Return ``full`` with the graph of this rank's number, if any. ``share``: the derivative of the full number by it."""
    if not (part.requires_grad and torch.is_grad_enabled()):
        return full
    local = own if own.requires_grad else part.sum().to(own.dtype)  # of an empty shard
    number = full + share(own.detach(), full) * (local - local.detach())
    return _InLosses.apply(number, part._flatshard_info, _question(what, part))  # type: ignore[no-any-return]


class _InLosses(torch.autograd.Function):
    """A number of the full tensor in the ranks' losses: its gradient is averaged over them, as those of units are."""

    @staticmethod
    def forward(ctx: Any, number: torch.Tensor, info: ShardInfo, question: str) -> torch.Tensor:
        ctx.info, ctx.question = info, question
        return number.view_as(number)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        own = grad.reshape(1).to(ctx.info.runtime.device, torch.float64)
        return ctx.info.average(own, f"the gradient of {ctx.question}").to(grad).reshape(grad.shape), None, None


def _reduce(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in NORMS:  # as a method of a sharded parameter
        return norm(func, args, kwargs)
    name = name_of(func)
    part: Any = args[0]
    rest = args[1:]
    if any(isinstance(each, torch.Tensor) for each in (*rest, kwargs.get("other"))) and name in ("max", "min"):
        return _elementwise(func, args, kwargs)
    if isinstance(part, OwnedTensor):
        return _of_owner(func, args, kwargs)
    if name in ("dot", "vdot"):
        product = _elementwise(torch.mul, (torch.conj(part) if name == "vdot" else part, *rest), kwargs)
        return _reduce(torch.sum, (product,), {})
    info = part._flatshard_info
    given = {k: v for k, v in kwargs.items() if k != "dtype" and v is not None and v is not False}
    dims = rest[0] if rest else given.get("dim", given.get("axis"))
    if _of_rows(info, dims):
        return _by_rows(func, args, kwargs)
    if dims is not None or given or len(rest) > 1:
        _no_dims(info, name, sorted(given) or ["dim"])
    if name == "item" or name.startswith("__"):
        if math.prod(info.shape) != 1:
            refuse(info, name)
        number = _reduce(torch.sum, (part,), {}) if part.dtype is not torch.bool else _reduce(torch.any, (part,), {})
        with plainly():
            return getattr(number, name)()
    reduction, dtype = _REDUCTIONS.get(name), kwargs.get("dtype")
    if reduction is None or part.dtype.is_complex:
        refuse(info, name)
    with plainly():
        if name != "mean":
            return reduction.of(part, dtype)
        if not (dtype or part.dtype).is_floating_point:
            raise RuntimeError(f"mean() of {info.fqn!r}: needs floating point, got {part.dtype}")
        if part.dim() != (len(info.shape) if info.by_rows else 1):  # view_as_real
            refuse(info, name)
        return reduction.of(part, dtype, math.prod(info.full_shape))


class _Reduction(NamedTuple):
    """A reduction to a number of the full tensor: an aggregate of the elements, or of whether each is nonzero."""

    aggregate: Aggregate
    what: str
    share: Callable[..., Any] | None = None  # the derivative of the full number by this rank's
    of_nonzero: torch.dtype | None = None  # the result's, of a reduction of whether elements are nonzero

    def of(self, part: torch.Tensor, dtype: torch.dtype | None, divisor: int = 1) -> torch.Tensor:
        """Reduce ``part`` over the ranks: one all-reduce. Sums are in double: those of bfloat16 would be rounded."""
        pieces = counted(part) if self.of_nonzero is None else [piece != 0 for piece in counted(part)]
        own = self.aggregate.of_pieces(pieces)
        if self.of_nonzero is not None:
            return over_ranks(own, self.aggregate, part, self.what).clamp(min=0).to(self.of_nonzero)
        if self.aggregate.op == "sum" and dtype is None:
            dtype = part.dtype if part.is_floating_point() else torch.int64
        return (_combine(part, own, self.aggregate, self.what, self.share) / divisor).to(dtype or part.dtype)


def _is_extreme(own: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    return (own == full).double()


_SUM = _Reduction(Aggregate("sum"), "the sum", lambda own, full: 1.0)
_MAX = _Reduction(Aggregate("max"), "the maximum", _is_extreme)
_MIN = _Reduction(Aggregate("min"), "the minimum", _is_extreme)
_REDUCTIONS = {
    "sum": _SUM,
    "mean": _SUM,
    "max": _MAX,
    "amax": _MAX,
    "min": _MIN,
    "amin": _MIN,
    "any": _Reduction(Aggregate("max"), "any", of_nonzero=torch.bool),
    "all": _Reduction(Aggregate("min"), "all", of_nonzero=torch.bool),
    "count_nonzero": _Reduction(Aggregate("sum"), "the count of nonzero elements", of_nonzero=torch.int64),
}


def draw(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw random numbers for the full tensor, as one process does, and return this rank's shard of them."""
    part, name = args[0], name_of(func)
    info = part._flatshard_info
    with plainly():
        if part.numel() != info.stop - info.start or not name.endswith(("_", "_like")):
            refuse(info, name)
        full = torch.empty_strided(info.shape, info.stride, dtype=part.dtype, device=part.device)
        drawn = func(full, *args[1:], **kwargs).as_strided((full.numel(),), (1,))[info.start : info.stop]
        drawn = drawn.as_strided(part.shape, part.stride())
        return drawn.clone() if name.endswith("_like") else part.copy_(drawn)


BY_KIND: dict[OperationKind, Handler | None] = {
    OperationKind.ELEMENTWISE: _elementwise,
    OperationKind.RANDOM: draw,
    OperationKind.REDUCTION: _reduce,
    OperationKind.ALIAS: _same,
    OperationKind.MEMORY: None,
    OperationKind.DIMENSIONS: _dimensions,
    OperationKind.SIZE: _size,
    OperationKind.FLAT: _flat,
    OperationKind.SELECT: _select,
    OperationKind.SHAPE: _by_rows,
    OperationKind.TRANSPOSE: _transpose,
}

_SHAPE: Function = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
HANDLERS: dict[Function, Handler | None] = {_SHAPE: _shape, **dict.fromkeys(NORMS, norm)}
"""The handler of each function that was met so far, or None to call it as for a plain tensor."""
