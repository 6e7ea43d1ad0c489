"""The norm of all gradients of a module over all ranks, and clipping by it: one all-reduce for each process group.

``torch.nn.utils.clip_grad_norm_`` gives the same numbers (``_handle/tensors/sharded_gradient.py``). The functions here take
the module instead of a list of parameters, so they also work on a rank that has no gradient at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from flatshard._composable.state import owner_of, units_below
from flatshard._errors import name_list
from flatshard._handle.slots import SHARDED
from flatshard._handle.tensors.aggregate import Aggregate, in_order, plainly, total_norm
from flatshard._handle.tensors.sharded_gradient import ShardedGradient
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, full_shape, shard_info
from flatshard._names import plain_name
from flatshard._runtime import Runtime


def get_total_norm(module: nn.Module, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
    """The norm of all gradients of ``module`` as if they were one vector, over all ranks.

    Every rank must call it, after backward and before the optimizer's step. All ranks get the same number: what
    ``torch.nn.utils.get_total_norm`` gives for the whole gradients in one process. A shared parameter counts once, and so
    do parameters of ``NO_SHARD`` units and ignored ones. Parameters without a gradient do not count. The gradients of
    ignored parameters may differ between ranks; their norms are averaged over the ranks.

    Args:
        module: a sharded module, a module that contains sharded ones (on any number of process groups), or a submodule of a
            sharded one.
        norm_type: the order p of the p-norm: positive, or ``math.inf``, or 0. With 0 torch counts the parameters whose
            gradient has a nonzero element.
        error_if_nonfinite: raise if the norm is infinite or NaN. This makes the host wait for an accelerator.

    Returns:
        A 0-dim tensor: float64 if a parameter is, else float32. Gradients in lower precision are summed in float32.

    Raises:
        ValueError: ``norm_type`` is negative or NaN.
        RuntimeError: parameters are unsharded (in forward, ``unshard`` or ``summon_full_params``); or the norm is not
            finite and ``error_if_nonfinite`` is set.
        NotImplementedError: the gradient of an ignored parameter is a tensor subclass, such as a DTensor.
    """
    return _total_norm(gradients_of(module, "get_total_norm"), norm_type, error_if_nonfinite)


def clip_grad_norm_(
    module: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients of ``module`` in place, so that their norm over all ranks is at most ``max_norm``.

    Like ``torch.nn.utils.clip_grad_norm_``, it multiplies gradients by ``min(1, max_norm / (norm + 1e-6))``. The host does
    not wait for an accelerator unless ``error_if_nonfinite`` is set.

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
    """One parameter of the module, and this rank's part of its gradient."""

    fqn: str  # relative to the module
    param: nn.Parameter
    grad: torch.Tensor | None
    runtime: Runtime | None  # of the ranks that hold the parts; None: each rank has the whole gradient

    @property
    def numel(self) -> int:
        """Elements of the whole gradient."""
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
            raise _unsharded(below.fqn, verb)
    grads: dict[int, torch.Tensor | None] = {}  # of sharded parameters, by the parameter's id
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
        if id(param) not in grads:
            unit = owner_of(param)
            if unit is None or not isinstance(param, ShardedParameter):  # else a compute parameter
                raise _unsharded(fqn, verb)
            for flat in unit.handle.flats:  # with `flat_parameters` the single parameters have no `.grad`
                grads.update(zip(map(id, flat.params), flat.gradients.local(), strict=True))
        found.append(Gradient(fqn, param, grads[id(param)], info.runtime))
    return found


_PLAIN = (type(None), torch.Tensor, ShardedGradient, nn.Parameter)


def _unsharded(what: str, verb: str) -> RuntimeError:
    return RuntimeError(
        f"{verb}: the parameters of {name_list([what])} are unsharded, by a forward, unshard() or summon_full_params(). Call "
        "it between backward and the optimizer's step, outside of these"
    )


def _by_kind(grads: list[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Those that are not empty, by device and dtype, because foreach functions are fast for tensors of one kind."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        if grad.numel():
            kinds.setdefault((grad.device, grad.dtype), []).append(grad)
    return kinds


# -- norms -------------------------------------------------------------------------------------------------------------


def _total_norm(gradients: list[Gradient], norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    p = float(norm_type)
    if not p >= 0:
        raise ValueError(f"norm_type={norm_type}: the order of a norm is positive, math.inf or 0")
    with torch.no_grad(), plainly():
        total = _count(gradients) if p == 0 else _norm(gradients, p)
    if not any(g.param.dtype in (torch.float64, torch.complex128) for g in gradients):
        total = total.float()
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the norm of order {p} of all gradients is {total.item()}, so they cannot be clipped. "
            "flatshard.optim.gradient_statistics(module) tells which are not finite; error_if_nonfinite=False goes on "
            "regardless"
        )
    return total


def _norm(gradients: list[Gradient], p: float) -> torch.Tensor:
    """The total norm of an order that is not 0: float64, 0-dim."""
    runtimes, device = in_order([g.runtime for g in gradients]), device_of(gradients)
    local: dict[Runtime | None, torch.Tensor] = {}
    nothing = torch.empty(0, device=device)
    for runtime in [None, *runtimes]:  # also of those process groups of which this rank has no gradient: others may
        parts = [g.grad for g in gradients if g.runtime == runtime and g.grad is not None] or [nothing]
        local[runtime] = torch.linalg.vector_norm(Aggregate("norm", p).local(parts, device), p)
    question = f"the norm of order {p} of {len(gradients)} gradients, the first of which is {first_name(gradients)}"
    # Whole gradients are averaged, so that the total is the same on all ranks.
    return total_norm({r: local[r] for r in runtimes}, local[None], p, question, average_whole=True)


def _count(gradients: list[Gradient]) -> torch.Tensor:
    """How many gradients have a nonzero element, which torch calls the total norm of order 0: float64, 0-dim."""
    device, nonzero = device_of(gradients), Aggregate("norm", 0)
    counts = nonzero.local(parts_of(gradients, device), device)
    question = f"which of {len(gradients)} gradients are not zero"
    counts = nonzero.over_groups(counts, [g.runtime for g in gradients], question)
    total: torch.Tensor = torch.linalg.vector_norm(counts, 0)
    return total


def parts_of(gradients: Sequence[Gradient], device: torch.device) -> list[torch.Tensor]:
    """This rank's parts. A gradient that is None counts as an empty part."""
    return [torch.empty(0, device=device) if g.grad is None else g.grad for g in gradients]


def first_name(gradients: Sequence[Gradient]) -> str:
    """For the description of a reduction."""
    return repr(gradients[0].fqn) if gradients else "none"


def device_of(gradients: Sequence[Gradient]) -> torch.device:
    """Where numbers are computed: where the ranks communicate."""
    runtimes = in_order([g.runtime for g in gradients])
    if runtimes:
        return runtimes[0].device
    return next((g.grad.device for g in gradients if g.grad is not None), torch.device("cpu"))
