"""Norms of all gradients of a module, over all ranks: one collective for each process group in it.

torch's own ``clip_grad_norm_`` gives the same numbers (``_handle/sharded_gradient.py``). These need no list of parameters, as
they know every one of the module, and work where a rank has no gradient at all.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from flatshard._composable.state import owner_of, units_below
from flatshard._errors import name_list
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.slots import SHARDED
from flatshard._handle.tensors.partial import norm_of_nothing, plainly, reduce_norms
from flatshard._handle.tensors.sharded_gradient import ShardedGradient
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, full_shape, shard_info
from flatshard._names import plain_name
from flatshard._runtime import Runtime


def get_total_norm(module: nn.Module, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
    """The norm of all gradients of ``module``, as if they were one vector over all ranks.

    Every rank must call it, between a backward and the optimizer's step. The same number on every rank:
    ``torch.nn.utils.get_total_norm`` of the whole gradients in one process. Parameters without a gradient count nothing,
    shared ones once, and those of ``NO_SHARD`` units and ignored ones once. (Of gradients of ignored parameters, which are
    the caller's affair, the ranks' average is taken, so that ranks agree even where those gradients do not.)

    Args:
        module: sharded, or with sharded modules in it, over any number of process groups; or a part of such a unit.
        norm_type: p of the p-norm: > 0, ``inf`` included; or 0, by which torch counts the parameters whose gradient has an
            element that is not zero.
        error_if_nonfinite: raise if the norm is infinite or NaN. It makes the host wait for an accelerator.

    Returns:
        0-dim, float32, or float64 if a parameter is. What is below float32 is summed up in float32.

    Raises:
        ValueError: ``norm_type`` is negative or NaN.
        RuntimeError: parameters are shown whole (in forward, ``unshard`` or ``summon_full_params``); or the norm is not
            finite and ``error_if_nonfinite``.
        NotImplementedError: an ignored parameter's gradient is a tensor subclass, such as a DTensor.
    """
    return _total_norm(gradients_of(module, "get_total_norm"), norm_type, error_if_nonfinite)


def clip_grad_norm_(
    module: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients of ``module`` in place, so that their norm over all ranks is at most ``max_norm``.

    What ``torch.nn.utils.clip_grad_norm_`` does in one process: gradients are multiplied by
    ``min(1, max_norm / (norm + 1e-6))``. The host does not wait for an accelerator unless ``error_if_nonfinite``.

    Args, Raises: see :func:`get_total_norm`. If it raises, no gradient has changed.

    Returns:
        The norm before clipping; see :func:`get_total_norm`.
    """
    gradients = gradients_of(module, "clip_grad_norm_")
    total = _total_norm(gradients, norm_type, error_if_nonfinite)
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    with torch.no_grad(), plainly():
        for (device, dtype), grads in _by_kind([g.grad for g in gradients if g.grad is not None]).items():
            torch._foreach_mul_(grads, factor.to(device, dtype.to_real()))
    return total


# -- finding gradients ------------------------------------------------------------------------------------------------


class Gradient(NamedTuple):
    """One parameter of the module, and what this rank holds of its gradient."""

    fqn: str  # as seen from the module
    param: nn.Parameter
    grad: torch.Tensor | None
    runtime: Runtime | None  # of the ranks that hold the parts; None: each rank has the whole
    place: tuple[FlatParam, int] | None  # the flat parameter that it is in, and its index there

    @property
    def numel(self) -> int:
        """Of the whole."""
        return full_shape(self.param).numel()


def gradients_of(module: nn.Module, verb: str) -> list[Gradient]:
    """One entry for each parameter of ``module``, in the same order on all ranks."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{verb} takes the module, got a {type(module).__name__}: pass the model, or pass its parameters to torch's own, "
            f"torch.nn.utils.{verb}"
        )
    for below in units_below(module):
        if below.handle.slots.shows is not SHARDED:
            raise _shown_whole(below.fqn, verb)
    places: dict[int, tuple[torch.Tensor | None, tuple[FlatParam, int]]] = {}
    found = []
    for name, param in module.named_parameters():
        fqn = plain_name(name)
        info = shard_info(param)
        if info is None:
            if type(param.grad) not in _PLAIN:
                raise NotImplementedError(
                    f"{verb}: the gradient of {fqn!r} is a {type(param.grad).__name__}, which this cannot take a norm of. "
                    "Call it on modules without that parameter, and treat it apart"
                )
            found.append(Gradient(fqn, param, param.grad, None, None))
            continue
        if id(param) not in places:
            unit = owner_of(param)
            if unit is None or not isinstance(param, ShardedParameter):  # else a compute parameter
                raise _shown_whole(fqn, verb)
            for flat in unit.handle.flats:
                of_unit = zip(flat.params, flat.gradients.local(), strict=True)
                places.update((id(p), (grad, (flat, i))) for i, (p, grad) in enumerate(of_unit))
        grad, place = places[id(param)]
        found.append(Gradient(fqn, param, grad, info.runtime, place))
    return found


_PLAIN = (type(None), torch.Tensor, ShardedGradient, nn.Parameter)


def _shown_whole(what: str, verb: str) -> RuntimeError:
    return RuntimeError(
        f"{verb}: the parameters of {name_list([what])} are shown whole, in a forward, by unshard() or by "
        "summon_full_params(). Call it between backward and the optimizer's step, outside of those"
    )


def runtimes_of(gradients: list[Gradient]) -> list[Runtime]:
    """The process groups, in one order on all ranks. Also those of which this rank has no gradient: others may."""
    return sorted({g.runtime for g in gradients if g.runtime is not None}, key=lambda r: r.number)


def _by_kind(grads: list[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """What is not empty, by device and dtype: as foreach functions want it."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        if grad.numel():
            kinds.setdefault((grad.device, grad.dtype), []).append(grad)
    return kinds


def _vector_norm(norms: torch.Tensor, p: float) -> torch.Tensor:
    result: torch.Tensor = torch.linalg.vector_norm(norms, p)
    return result


# -- norms -------------------------------------------------------------------------------------------------------------


def _total_norm(gradients: list[Gradient], norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    p = float(norm_type)
    if not p >= 0:
        raise ValueError(f"norm_type={norm_type}: the order of a norm is positive, math.inf or 0")
    with torch.no_grad(), plainly():
        total = _count(gradients) if p == 0 else _reduced_norm(gradients, p)
    if not any(g.param.dtype in (torch.float64, torch.complex128) for g in gradients):
        total = total.float()
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the norm of order {p} of all gradients is {total.item()}, so they cannot be clipped. "
            "flatshard.optim.gradient_statistics(module) tells which are not finite; error_if_nonfinite=False goes on "
            "regardless"
        )
    return total


def _reduced_norm(gradients: list[Gradient], p: float) -> torch.Tensor:
    """float64, 0-dim."""
    runtimes = runtimes_of(gradients)
    device = _device_of(gradients, runtimes)
    whole = _local_norm([g.grad for g in gradients if g.runtime is None and g.grad is not None], p, device)
    totals = [whole]
    for runtime in runtimes:
        sharded = _local_norm([g.grad for g in gradients if g.runtime is runtime and g.grad is not None], p, device)
        question = f"the norm of order {p} of {len(gradients)} gradients, the first of which is {gradients[0].fqn!r}"
        norm, of_copies = reduce_norms(torch.stack([sharded, whole]), p, runtime, question).unbind()
        totals.append(norm)
        if runtime is runtimes[0]:  # The ranks' average of what should be the same everywhere, so that the total is.
            totals[0] = of_copies if math.isinf(p) else of_copies / runtime.world_size ** (1 / p)
    return _vector_norm(torch.stack(totals), p)


def _local_norm(grads: list[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """The norm of what is on this rank: float64, 0-dim, on ``device``."""
    norms: list[torch.Tensor] = []  # of each kind; one copy to the device for each, where gradients are offloaded
    for (_, dtype), of_kind in _by_kind(grads).items():
        if dtype.is_complex:
            found = torch._foreach_norm(of_kind, p)
        else:
            found = torch._foreach_norm(of_kind, p, dtype=torch.promote_types(dtype, torch.float32))
        norms.append(_vector_norm(torch.stack(list(found)).double(), p).to(device))
    if not norms:
        return torch.full((), norm_of_nothing(p), dtype=torch.float64, device=device)
    return _vector_norm(torch.stack(norms), p)


def _count(gradients: list[Gradient]) -> torch.Tensor:
    """How many gradients have an element that is not zero: torch's total norm of order 0. float64, 0-dim."""
    runtimes = runtimes_of(gradients)
    device = _device_of(gradients, runtimes)
    counts = []
    for runtime in [*runtimes, None]:
        here = [
            torch.zeros((), dtype=torch.float64, device=device)
            if g.grad is None
            else torch.linalg.vector_norm(g.grad, 0).to(device, torch.float64)
            for g in gradients
            if g.runtime is runtime
        ]
        if here:
            norms = torch.stack(here)
            question = f"which of {len(here)} gradients are not zero"
            counts.append(norms if runtime is None else reduce_norms(norms, 0, runtime, question))
    if not counts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return _vector_norm(torch.cat(counts), 0)


def _device_of(gradients: list[Gradient], runtimes: list[Runtime]) -> torch.device:
    if runtimes:
        return runtimes[0].device
    return next((g.grad.device for g in gradients if g.grad is not None), torch.device("cpu"))
