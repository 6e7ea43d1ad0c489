"""One number for each parameter, from the parts that ranks hold of it: what layer-wise optimizers scale their steps by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from flatshard._handle.tensors.partial import plainly, reduce_norms, reduce_sums
from flatshard._handle.tensors.sharded_parameter import ShardInfo, full_shape, shard_info
from flatshard._runtime import Runtime

Op = Literal["norm", "sum", "mean", "max", "min"]


def segment_reduce(
    tensors: Sequence[torch.Tensor], params: Sequence[torch.Tensor], op: Op = "norm", *, ord: float = 2.0
) -> torch.Tensor:
    """Reduce each of ``tensors`` over all elements of the whole parameter, in any layout.

    One all-reduce for each process group among ``params``, however many there are; none where every parameter is whole on
    every rank. Every rank must call it for the same parameters in the same order. The host waits over gloo only.

    Example, the trust ratios of LAMB and LARS::

        norms = flatshard.optim.segment_reduce([*params, *updates], [*params, *params])
        ratios = norms[: len(params)] / norms[len(params) :]

    Args:
        tensors: each lies as the parameter at the same place of ``params`` does, with this rank's part of its elements: the
            parameter itself, its ``.grad``, an update, an optimizer's average.
        params: the sharded parameters; plain ones, too, which are whole.
        op: ``"norm"`` of order ``ord``, ``"sum"``, ``"mean"`` over all elements, ``"max"`` or ``"min"``.
        ord: of the norm.

    Returns:
        1-D, ``(len(tensors),)``, the same on all ranks, without a graph; float64 if a tensor is, else float32. Of a parameter
        without elements: 0, NaN (mean), -inf (max) and inf (min).

    Raises:
        ValueError: the two lists differ in length, a tensor does not lie as its parameter does, or ``op`` is none of these.
        RuntimeError: over gloo, ranks asked for different things.
    """
    if op not in _LOCAL:
        raise ValueError(f"segment_reduce: op={op!r} must be one of {', '.join(map(repr, _LOCAL))}")
    if len(tensors) != len(params):
        raise ValueError(f"segment_reduce: {len(tensors)} tensors for {len(params)} parameters")
    infos = [shard_info(p) for p in params]
    for tensor, param, info in zip(tensors, params, infos, strict=True):
        if tensor.shape != param.shape:
            raise ValueError(
                f"segment_reduce: a tensor of shape {tuple(tensor.shape)} for {_name(info)}, of which this rank has "
                f"{tuple(param.shape)}: give tensors that lie as their parameters do"
            )
    wide = any(t.dtype in (torch.float64, torch.complex128) for t in tensors)
    if not tensors:
        return torch.zeros(0)
    with torch.no_grad(), plainly():
        device = next((i.runtime.device for i in infos if i is not None and i.runtime is not None), tensors[0].device)
        where = tensors[0].device  # the CPU, under offload: the values travel together
        values = torch.stack([_LOCAL[op](t.detach(), ord).to(where, torch.float64) for t in tensors]).to(device)
        for runtime in _runtimes(infos):
            indices = [i for i, info in enumerate(infos) if info is not None and info.runtime is runtime]
            question = f"the {op} of {len(indices)} parameters, the first of which is {_name(infos[indices[0]])}"
            values[indices] = _over_ranks(values[indices], op, ord, runtime, question)
        if op == "mean":
            values /= torch.tensor([full_shape(p).numel() for p in params], dtype=torch.float64).to(device)
    return values if wide else values.float()


def _over_ranks(values: torch.Tensor, op: Op, ord: float, runtime: Runtime, question: str) -> torch.Tensor:
    if op in ("sum", "mean"):
        return reduce_sums(values, runtime, question)
    return reduce_norms(values, {"norm": ord, "max": math.inf, "min": -math.inf}[op], runtime, question)


def _runtimes(infos: Sequence[ShardInfo | None]) -> list[Runtime]:
    """In one order on all ranks."""
    return sorted({i.runtime for i in infos if i is not None and i.runtime is not None}, key=lambda r: r.number)


def _name(info: ShardInfo | None) -> str:
    return "a plain parameter" if info is None else repr(info.fqn)


def _norm(tensor: torch.Tensor, ord: float) -> torch.Tensor:
    if not tensor.numel():
        return torch.full((), math.inf if ord < 0 else 0.0, device=tensor.device)
    real = torch.promote_types(tensor.dtype, torch.float32).to_real()
    result: torch.Tensor = torch.linalg.vector_norm(tensor, ord, dtype=None if tensor.is_complex() else real)
    return result


def _sum(tensor: torch.Tensor, ord: float) -> torch.Tensor:
    return tensor.sum(dtype=torch.float64)


def _most(
    empty: float, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor, float], torch.Tensor]:
    return lambda tensor, ord: reduce(tensor) if tensor.numel() else torch.full((), empty, device=tensor.device)


_LOCAL: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "norm": _norm,
    "sum": _sum,
    "mean": _sum,
    "max": _most(-math.inf, torch.amax),
    "min": _most(math.inf, torch.amin),
}
