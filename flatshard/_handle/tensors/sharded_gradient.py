"""The ``.grad`` of a sharded parameter: this rank's part. Norms that torch computes of it are those of the whole gradient.

[Note: Right with torch's own tools]
If ``.grad`` were a plain tensor, ``torch.nn.utils.clip_grad_norm_`` would use the norm of this rank's part, and
``torch.amp.GradScaler`` would only find infinities on this rank. So ``.grad`` is a :class:`ShardedGradient`: a plain tensor
whose ``__class__`` is set, like that of a :class:`ShardedParameter`. It has a ``__torch_function__``, and no
``__torch_dispatch__``. It treats these functions differently:

- Norms of a gradient, and ``_amp_foreach_non_finite_check_and_unscale_``, which ``GradScaler`` calls, communicate.
- ``detach``, ``.data`` and casts return a sharded gradient again, as in ``p.grad.detach().float().norm()``.

All other functions treat it as a plain tensor, and return plain tensors. So ``p.grad.sum()``, ``p.grad.max()`` and
``p.grad.isnan().any()`` are about this rank's part, and so are norms of tensors computed from it, such as
``(p.grad / 2).norm()``. The gradient of a parameter that is not sharded (``NO_SHARD``, a single rank) is plain.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _foreach_utils

from flatshard._handle.tensors.aggregate import Aggregate, local_norms, plainly
from flatshard._handle.tensors.partial import (
    NORMS,
    UNSCALE,
    PartialFlag,
    PartialNorm,
    consume,
    make_whole,
    norm_arguments,
    retype,
)
from flatshard._runtime import Runtime


class GradientInfo(Protocol):
    """The parameter that a gradient belongs to (``ShardInfo``)."""

    @property
    def fqn(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...  # of the whole gradient

    @property
    def runtime(self) -> Runtime | None: ...  # of the ranks that hold the parts; None: the gradient is not sharded

    @property
    def elsewhere(self) -> tuple[tuple[int, int], ...]: ...  # ranges of elements that another rank counts in norms


class ShardedGradient(torch.Tensor):
    """This rank's part of a gradient: 1-D. It acts as a plain tensor, but its norm is the norm over all ranks.

    ``p.grad.norm()`` communicates: every rank must take it, and in the same order.
    Other reductions, such as ``p.grad.max()``, are about this rank's part: see :func:`flatshard.optim.gradient_statistics`.

    Example::

        p = model[0].up.weight
        assert isinstance(p.grad, flatshard.tensors.ShardedGradient)
        norm = p.grad.norm()  # of the whole gradient, on all ranks
    """

    _flatshard_info: GradientInfo

    is_sparse = False  # every optimizer reads this of each gradient: a constant avoids the dispatch

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        if len(types) > 1:
            make_whole(args, kwargs)
        with plainly():
            return func(*args, **kwargs) if kwargs else func(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Returns a plain tensor: the copy belongs to no parameter."""
        result: torch.Tensor = memo.setdefault(id(self), self.clone())
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain tensor: process groups cannot be pickled."""
        with plainly():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


# torch.nn.utils.clip_grad_norm_ uses its foreach path for these exact types; DTensor registers itself there, too. Without it,
# there would be an all-reduce per gradient.
_foreach_utils._foreach_supported_types.append(ShardedGradient)


# -- assigning ---------------------------------------------------------------------------------------------------------

plain_grad: Any = torch.Tensor.grad
"""The attribute of a plain parameter: a descriptor in C."""


def set_gradients_as_they_are(params: Iterable[nn.Parameter], grads: Iterable[torch.Tensor | None]) -> None:
    """``param.grad = grad`` in a loop in C. The caller has already turned ``grads`` into sharded gradients, if needed."""
    consume(map(plain_grad.__set__, params, grads))


def mark(grad: torch.Tensor, info: GradientInfo) -> None:
    """Turn ``grad`` into a sharded gradient in place, unless it is a subclass or sparse."""
    if type(grad) is torch.Tensor and grad.layout is torch.strided:
        mark_all([grad], [info])


def mark_all(grads: Iterable[torch.Tensor], infos: Iterable[GradientInfo]) -> None:
    """The same for plain dense gradients, with loops in C."""
    retype(list(grads), ShardedGradient, "_flatshard_info", infos)


# -- functions that need the other ranks -------------------------------------------------------------------------------


def _norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A function of ``NORMS`` for one gradient: one all-reduce."""
    make_whole(args[1:], kwargs)
    grad = args[0] if args else kwargs.get("input", kwargs.get("x", kwargs.get("A")))
    if not isinstance(grad, ShardedGradient):
        with plainly():
            plain: torch.Tensor = func(*args, **kwargs)
            return plain
    info = grad._flatshard_info
    ord, rest = norm_arguments(func, args, kwargs)
    dtype = rest.pop("dtype", None)
    # For a matrix torch.linalg.norm with an order is a matrix norm.
    of_matrix = func is torch.linalg.norm and len(info.shape) > 1 and (len(args) > 1 or kwargs.get("ord") is not None)
    if rest or of_matrix:
        raise NotImplementedError(
            f"a norm of the sharded gradient of {info.fqn!r} with {sorted(rest) or ['ord']} is not supported: this rank has "
            f"a 1-D part of a gradient of shape {info.shape}. Use p.grad.norm(p), or compute it from the whole gradient "
            "inside `with flatshard.summon_full_params(module, with_grads=True):`"
        )
    assert info.runtime is not None
    with plainly():
        norm = _local_norm(grad, ord, dtype)
        question = f"the norm of order {ord} of the gradient of {info.fqn!r}"
        return Aggregate("norm", ord).over_ranks(norm, info.runtime, question).to(norm.dtype)


def _local_norm(grad: torch.Tensor, ord: float, dtype: torch.dtype | None) -> torch.Tensor:
    """The norm of the elements of this rank's part that count. [Note: Norms over two meshes]"""
    elsewhere = _elsewhere(grad)
    if not elsewhere:
        return local_norms([grad], ord, dtype)[0]
    edges = [0, *itertools.chain(*elsewhere), grad.numel()]
    counted = [grad[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    norms = torch.stack(local_norms(counted, ord, dtype))
    return norms.sum() if ord == 0 else torch.linalg.vector_norm(norms, ord)


def _foreach_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """``torch._foreach_norm``, called by ``torch.nn.utils``: no communication yet, see :class:`PartialNorm`."""
    given = dict(zip(("self", "ord", "dtype"), args, strict=False)) | kwargs
    grads: Sequence[torch.Tensor] = given["self"]
    ord, dtype = float(given.get("ord", 2)), given.get("dtype")
    if ord == 0:  # the total counts whole gradients, and no rank has one
        raise NotImplementedError(
            "torch's total norm of order 0 counts the gradients that are not zero, but ranks have only parts of gradients: "
            "use flatshard.optim.get_total_norm(model, 0)"
        )
    with plainly():
        one_by_one = any(map(_elsewhere, grads))
        norms = [_local_norm(g, ord, dtype) for g in grads] if one_by_one else local_norms(grads, ord, dtype)
        device = norms[0].device
    for runtime, of_group in _by_runtime(grads, norms).items():
        PartialNorm.mark(of_group, runtime, ord, device)
    return norms


_runtime = operator.attrgetter("_flatshard_info.runtime")


def _elsewhere(grad: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Ranges of this rank's part that another rank counts in norms. [Note: Norms over two meshes]"""
    return grad._flatshard_info.elsewhere if isinstance(grad, ShardedGradient) else ()


def _by_runtime(grads: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> dict[Runtime, Sequence[torch.Tensor]]:
    """Select the ``values`` (one per gradient) that belong to sharded gradients, by the ranks that hold these."""
    if set(map(type, grads)) == {ShardedGradient}:
        runtimes = set(map(_runtime, grads))
        if len(runtimes) == 1:  # the usual case
            return {runtimes.pop(): values}
    found: dict[Runtime, Sequence[torch.Tensor]] = {}
    for grad, value in zip(grads, values, strict=True):
        if isinstance(grad, ShardedGradient):
            found.setdefault(_runtime(grad), []).append(value)  # type: ignore[attr-defined]
    return found


def _unscale(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``torch._amp_foreach_non_finite_check_and_unscale_``, called by ``GradScaler``: see :class:`PartialFlag`."""
    grads, found_inf, inv_scale = args
    with plainly():
        func(grads, found_inf, inv_scale, **kwargs)
    PartialFlag.mark(found_inf, _by_runtime(grads, grads))


def _same(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``detach``, ``.data`` and casts: the result is the gradient of the same parameter."""
    make_whole(args[1:], kwargs)
    with plainly():
        result = func(*args, **kwargs)
    if isinstance(args[0], ShardedGradient) and result is not args[0]:
        mark(result, args[0]._flatshard_info)
    return result


_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys(NORMS, _norm),
    torch._foreach_norm: _foreach_norm,
    UNSCALE: _unscale,
    **dict.fromkeys(
        (
            torch.Tensor.detach,
            torch.Tensor.data.__get__,  # type: ignore[attr-defined]
            torch.Tensor.to,
            torch.Tensor.float,
            torch.Tensor.double,
            torch.Tensor.half,
            torch.Tensor.bfloat16,
            torch.Tensor.cpu,
        ),
        _same,
    ),
}
