"""The ``.grad`` of a sharded parameter: this rank's shard. Norms that torch computes of it are those of the full gradient.

[Note: Right with torch's own tools]
If ``.grad`` were a plain tensor, ``torch.nn.utils.clip_grad_norm_`` would use the norm of this rank's shard, and
``torch.amp.GradScaler`` would only find infinities on this rank. So ``.grad`` is a :class:`ShardedGradient`: a plain tensor
whose ``__class__`` is set, like that of a :class:`ShardedParameter`. It has a ``__torch_function__``, and no
``__torch_dispatch__``. The table in ``operations.py`` decides by an operation's kind. Elementwise ones give a
:class:`ShardTensor`; reductions are over the full gradient, and communicate; others are refused. Two
functions of lists communicate, too, which torch's tools call: ``_foreach_norm``, and
``_amp_foreach_non_finite_check_and_unscale_`` of ``GradScaler``. Other functions of lists are an optimizer's, and give plain
tensors. The gradient of a parameter that is not sharded (``NO_SHARD``, a single rank) is plain.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.utils import _foreach_utils

from flatshard._comm.rank_group import RankGroup
from flatshard._handle.tensors.aggregate import local_norms, plainly
from flatshard._handle.tensors.local_numbers import UNSCALE, LocalNumber, retype
from flatshard._handle.tensors.shard import HANDLERS, ShardTensor, elsewhere_of, local_norm
from flatshard._handle.tensors.shard_info import ShardInfo


class ShardedGradient(ShardTensor):
    """This rank's shard of a gradient. Its norm is the norm over all ranks.

    ``p.grad.norm()`` communicates, so every rank must call it, in the same order. So do other reductions, such as
    ``p.grad.max()``, also those of results, such as ``p.grad.pow(2)``. :func:`flatshard.optim.gradient_statistics` needs one
    all-reduce for all gradients.

    Example::

        p = model[0].up.weight
        assert isinstance(p.grad, flatshard.tensors.ShardedGradient)
        norm = p.grad.norm()  # of the full gradient, on all ranks
    """

    _whose = "the gradient of "


# torch.nn.utils.clip_grad_norm_ uses its foreach path for these exact types; DTensor registers itself there, too. Without it,
# there would be an all-reduce per gradient.
_foreach_utils._foreach_supported_types.append(ShardedGradient)


# -- assigning ---------------------------------------------------------------------------------------------------------

plain_grad: Any = torch.Tensor.grad
"""The attribute of a plain parameter: a descriptor in C."""


def mark(grad: torch.Tensor, info: ShardInfo) -> None:
    """Turn ``grad`` into a sharded gradient in place, unless it is a subclass or sparse, or nothing of it is sharded.

    Ranks don't agree whether a parameter of no elements has a gradient, as nothing is reduced that could tell them. Its
    gradient is plain, so that no norm of it communicates.
    """
    is_sharded = info.runtime is not None and info.numel
    if is_sharded and type(grad) in (torch.Tensor, ShardTensor) and grad.layout is torch.strided:
        retype([grad], ShardedGradient, "_flatshard_info", [info])


# -- functions that need the other ranks -------------------------------------------------------------------------------


def _foreach_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Handle ``torch._foreach_norm``, called by ``torch.nn.utils``, without communication yet: see :class:`LocalNumber`."""
    given = dict(zip(("self", "ord", "dtype"), args, strict=False)) | kwargs
    grads: Sequence[torch.Tensor] = given["self"]
    ord, dtype = float(given.get("ord", 2)), given.get("dtype")
    if ord == 0:  # the total counts full gradients, and no rank has one
        raise NotImplementedError(
            "torch's total norm of order 0 counts the gradients that are not zero, but ranks have only shards of gradients: "
            "use flatshard.optim.get_total_norm(model, 0)"
        )
    with plainly():
        one_by_one = any(map(elsewhere_of, grads))
        norms = [local_norm(g, ord, dtype) for g in grads] if one_by_one else local_norms(grads, ord, dtype)
        device = norms[0].device
    for runtime, of_group in _by_runtime(grads, norms).items():
        LocalNumber.mark_norms(of_group, runtime, ord, device)
    return norms


_runtime = operator.attrgetter("_flatshard_info.runtime")


def _by_runtime(
    grads: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> dict[RankGroup, Sequence[torch.Tensor]]:
    """Select the ``values`` (one per gradient) that belong to sharded gradients, by the ranks that hold these."""
    if set(map(type, grads)) == {ShardedGradient}:
        runtimes = set(map(_runtime, grads))
        if len(runtimes) == 1:  # the usual case
            return {runtimes.pop(): values}
    found: dict[RankGroup, Sequence[torch.Tensor]] = {}
    for grad, value in zip(grads, values, strict=True):
        if isinstance(grad, ShardTensor):
            found.setdefault(_runtime(grad), []).append(value)  # type: ignore[attr-defined]
    return found


def _unscale(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Handle ``torch._amp_foreach_non_finite_check_and_unscale_``, called by ``GradScaler``: see :class:`LocalNumber`."""
    grads, found_inf, inv_scale = args
    with plainly():
        func(grads, found_inf, inv_scale, **kwargs)
    LocalNumber.mark_flag(found_inf, _by_runtime(grads, grads))


def _foreach_max(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise NotImplementedError(
        "torch._foreach_max of sharded gradients would be the maxima of this rank's shards: use "
        "flatshard.optim.gradient_statistics(model), or p.grad.max() for each"
    )


HANDLERS[torch._foreach_norm] = _foreach_norm
HANDLERS[UNSCALE] = _unscale
HANDLERS[torch._foreach_max] = _foreach_max
