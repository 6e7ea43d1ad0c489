"""Norms, clipping and statistics of a module's gradients over all ranks, by one or two all-reduces per process group.

``torch.nn.utils.clip_grad_norm_`` returns the same numbers (``_handle/tensors/sharded_gradient.py``). The functions here take
the module instead of a list of parameters, so they also work on a rank that has no gradient at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from flatshard._base.errors import name_list
from flatshard._base.names import plain_name
from flatshard._comm.rank_group import RankGroup
from flatshard._composable.features.grad_sync import check_reduced
from flatshard._composable.find import units_of_parameters
from flatshard._composable.state import owner_of
from flatshard._handle.registrations import SHARDED_PARAMS
from flatshard._handle.tensors.aggregate import Aggregate, device_for, in_order, plainly, total_norm
from flatshard._handle.tensors.sharded_gradient import ShardedGradient
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, full_shape, shard_info
from flatshard.optim._in_backward import check_kept


def get_total_norm(module: nn.Module, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
    """Return the norm of all gradients of ``module`` over all ranks, as of one vector.

    Every rank must call it, after backward and before the optimizer's step. All ranks get the number that
    ``torch.nn.utils.get_total_norm`` returns for the full gradients in one process. A shared parameter counts once, and so
    do parameters of ``NO_SHARD`` units and ignored ones. Parameters without a gradient do not count. Gradients of ignored
    parameters may differ between ranks, so their norms are averaged over the ranks.

    Example::

        norm = flatshard.optim.get_total_norm(model)
        if norm.isfinite():  # the same on all ranks
            optimizer.step()

    Args:
        module: a sharded module, a module that contains sharded ones (on any number of process groups), or a submodule of a
            sharded one.
        norm_type: the order p of the p-norm: positive, ``math.inf``, or 0, which counts the parameters whose gradient has a
            nonzero element, as torch does.
        error_if_nonfinite: raise if the norm is infinite or NaN. Then the host waits for the accelerator.

    Returns:
        A 0-dim tensor: float64 if a parameter is, else float32. Gradients in lower precision are summed in float32.

    Raises:
        ValueError: ``norm_type`` is negative or NaN.
        RuntimeError: parameters are unsharded (in forward, ``unshard`` or ``summon_full_params``); gradients are held
            (``no_sync``); or the norm is not finite and ``error_if_nonfinite`` is set.
        NotImplementedError: the gradient of an ignored parameter is a tensor subclass, such as a DTensor.
    """
    return _total_norm(_gradients_of(module, "get_total_norm"), norm_type, error_if_nonfinite)


def clip_grad_norm_(
    module: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients of ``module`` in place, so that their norm over all ranks is at most ``max_norm``.

    Like ``torch.nn.utils.clip_grad_norm_``, it multiplies gradients by ``min(1, max_norm / (norm + 1e-6))``. The host does
    not wait for an accelerator unless ``error_if_nonfinite`` is set. Every rank must call it.

    Example::

        norm = flatshard.clip_grad_norm_(model, max_norm=1.0)
        optimizer.step()

    Args:
        module: see :func:`flatshard.optim.get_total_norm`, for the other arguments, too.
        max_norm: the largest norm afterwards.
        norm_type: the order of the norm.
        error_if_nonfinite: raise if the norm is infinite or NaN.

    Returns:
        The norm before clipping: a 0-dim tensor, the same on all ranks.

    Raises:
        ValueError, RuntimeError, NotImplementedError: see :func:`flatshard.optim.get_total_norm`. No gradient has changed.
    """
    gradients = _gradients_of(module, "clip_grad_norm_")
    total = _total_norm(gradients, norm_type, error_if_nonfinite)
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    with torch.no_grad(), plainly():
        for (device, dtype), grads in _by_kind([g.grad for g in gradients if g.grad is not None]).items():
            torch._foreach_mul_(grads, factor.to(device, dtype.to_real()))
    return total


@dataclass(frozen=True)
class GradientStatistics:
    """Statistics of a parameter's gradient over all ranks.

    Example::

        found = flatshard.optim.gradient_statistics(model)["0.up.weight"]
        assert found.numel == 256 * 64 and found.max_abs <= found.norm
    """

    norm: float
    """The 2-norm."""
    max_abs: float
    """The largest magnitude, or NaN if there is a NaN."""
    mean: float
    """The mean, of a complex gradient that of real and imaginary parts."""
    nonfinite: int
    """The number of elements that are infinite or NaN."""
    numel: int
    """The number of elements of the full parameter."""


def gradient_statistics(module: nn.Module) -> dict[str, GradientStatistics]:
    """Return statistics of each gradient of ``module`` by the parameter's FQN, for logging and debugging.

    Every rank must call it. All ranks get the same statistics, except for ignored parameters, whose gradients may differ. It
    takes two all-reduces for each process group in ``module``, twice as many with tensor parallelism, and the host waits for
    the accelerator. A shared parameter has its first name. Parameters without a gradient on any rank are left out.

    Example::

        for fqn, found in flatshard.optim.gradient_statistics(model).items():
            if found.nonfinite:
                print(f"{fqn}: {found.nonfinite} of {found.numel} elements are infinite or NaN")

    Raises:
        RuntimeError, NotImplementedError: see :func:`get_total_norm`.
    """
    gradients = _gradients_of(module, "gradient_statistics")
    found = {}
    with torch.no_grad(), plainly():
        for g, (squares, total, nonfinite, present, largest) in zip(gradients, _numbers(gradients), strict=True):
            if present:
                numel = full_shape(g.param).numel()
                terms = numel * (2 if g.param.dtype.is_complex else 1)
                mean = total / terms if terms else math.nan
                found[g.fqn] = GradientStatistics(math.sqrt(squares), largest, mean, int(nonfinite), numel)
    return found


# -- finding gradients ------------------------------------------------------------------------------------------------


class Gradient(NamedTuple):
    """A parameter of the module, and this rank's shard of its gradient."""

    fqn: str  # relative to the module
    param: nn.Parameter
    grad: torch.Tensor | None
    runtime: RankGroup | None  # of the ranks with the shards, or None if each rank has the full gradient

    @property
    def part(self) -> torch.Tensor:
        """This rank's shard, which is empty if the gradient is None."""
        return torch.empty(0, device=self.param.device) if self.grad is None else self.grad


def _gradients_of(module: nn.Module, verb: str) -> list[Gradient]:
    """Return an entry for each parameter of ``module``, in the same order on all ranks."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{verb} takes the module, got a {type(module).__name__}: pass the model, or pass its parameters to torch's own, "
            f"torch.nn.utils.{verb}"
        )
    owners = units_of_parameters(module)
    for owner in owners:
        if owner.handle.registrations.shows is not SHARDED_PARAMS:
            raise _unsharded(owner.fqn, verb)
    check_reduced(owners, verb)
    check_kept(owners, verb)
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
            found.append(Gradient(fqn, param, param.grad, None))
            continue
        if owner_of(param) is None or not isinstance(param, ShardedParameter):
            raise _unsharded(fqn, verb)
        # With flat_parameters, `.grad` is a slice of the flat gradient.
        found.append(Gradient(fqn, param, param.grad, info.runtime))
    return found


_PLAIN = (type(None), torch.Tensor, ShardedGradient, nn.Parameter)


def _unsharded(what: str, verb: str) -> RuntimeError:
    return RuntimeError(
        f"{verb}: the parameters of {name_list([what])} are unsharded, by a forward, unshard() or summon_full_params(). Call "
        "it between backward and the optimizer's step, outside of these"
    )


def _by_kind(grads: list[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Return gradients with elements by device and dtype: foreach functions are fast for tensors of one kind."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        if grad.numel():
            kinds.setdefault((grad.device, grad.dtype), []).append(grad)
    return kinds


# -- numbers over all ranks --------------------------------------------------------------------------------------------


def _total_norm(gradients: list[Gradient], norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    p = float(norm_type)
    if not p >= 0:
        raise ValueError(f"norm_type={norm_type}: the order of a norm is positive, math.inf or 0")
    with torch.no_grad(), plainly():
        total = _norm(gradients, p)
    if not any(g.param.dtype in (torch.float64, torch.complex128) for g in gradients):
        total = total.float()
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the norm of order {p} of all gradients is {total.item()}, so they cannot be clipped. "
            "flatshard.optim.gradient_statistics(module) tells which are not finite; error_if_nonfinite=False "
            "continues regardless"
        )
    return total


def _norm(gradients: list[Gradient], p: float) -> torch.Tensor:
    """Return the total norm: float64, 0-dim. Order 0 counts the gradients with a nonzero element, as in torch."""
    aggregate, parts, runtimes = Aggregate("norm", p), [g.part for g in gradients], [g.runtime for g in gradients]
    question = f"the norm of order {p} of {_these(gradients)}"
    if p == 0:
        counted: torch.Tensor = torch.linalg.vector_norm(aggregate.of(parts, runtimes, question), 0)
        return counted
    device = device_for(parts, runtimes)
    local: dict[RankGroup | None, torch.Tensor] = {}
    for runtime in [None, *in_order(runtimes)]:  # also process groups of which this rank has no gradient
        own = [g.part for g in gradients if g.runtime == runtime] or [torch.empty(0, device=device)]
        local[runtime] = torch.linalg.vector_norm(aggregate.local(own, device), p)
    whole = local.pop(None)
    # Full gradients of ignored parameters are averaged, so that the total is the same on all ranks.
    return total_norm({r: n for r, n in local.items() if r is not None}, whole, p, question, average_full=True)


def _numbers(gradients: list[Gradient]) -> list[list[float]]:
    """Return for each gradient: sum of squares, sum, nonfinite elements, number of ranks that have it, largest magnitude."""
    if not gradients:
        return []
    parts, runtimes = [g.part for g in gradients], [g.runtime for g in gradients]
    device, total = device_for(parts, runtimes), Aggregate("sum")
    sums = [
        Aggregate("norm").local(parts, device).square(),
        total.local([torch.view_as_real(part) if part.is_complex() else part for part in parts], device),
        total.local([~part.isfinite() for part in parts], device),
        torch.tensor([float(g.grad is not None) for g in gradients], dtype=torch.float64, device=device),
    ]
    question = f"statistics of {_these(gradients)}"
    summed = total.over_groups(torch.stack(sums, 1), runtimes, question)
    largest = Aggregate("norm", math.inf).of(parts, runtimes, question)
    numbers: list[list[float]] = torch.cat([summed, largest.unsqueeze(1)], 1).tolist()
    return numbers


def _these(gradients: list[Gradient]) -> str:
    """Describe gradients in the label of a reduction."""
    return f"{len(gradients)} gradients, the first of which is {repr(gradients[0].fqn) if gradients else 'none'}"
