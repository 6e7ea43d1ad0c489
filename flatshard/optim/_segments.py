"""Reductions over each parameter, computed from the shards of all ranks. Layer-wise optimizers scale their steps by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from flatshard._handle.tensors.aggregate import Aggregate, plainly
from flatshard._handle.tensors.shard_info import ShardInfo
from flatshard._handle.tensors.sharded_parameter import full_shape, shard_info

Op = Literal["norm", "sum", "mean", "max", "min"]


def segment_reduce(
    tensors: Sequence[torch.Tensor], params: Sequence[torch.Tensor], op: Op = "norm", *, ord: float = 2.0
) -> torch.Tensor:
    """Reduce each of ``tensors`` over all elements of the full parameter, in any layout.

    This takes one all-reduce for each process group of ``params``, for any number of parameters, and none if each rank has
    all parameters in full. Every rank must call it, for the same parameters in the same order.

    The trust ratios of LAMB and LARS::

        params = [p for p in model.parameters() if p.grad is not None]
        updates = [0.01 * p.grad for p in params]
        norms = flatshard.optim.segment_reduce([*params, *updates], [*params, *params])
        ratios = norms[: len(params)] / norms[len(params) :]

    Args:
        tensors: ``tensors[i]`` has the shape of ``params[i]`` and an entry for each of its elements: the parameter itself,
            its ``.grad``, an update, or an optimizer's average.
        params: sharded parameters, or plain ones, which every rank has in full.
        op: ``"norm"`` of order ``ord``, ``"sum"``, ``"mean"`` over all elements, ``"max"`` or ``"min"``.
        ord: the order of the norm.

    Returns:
        A tensor of shape ``(len(tensors),)``, the same on all ranks, without a graph: float64 if a tensor is, else float32.
        For a parameter without elements: 0 (norm, sum), NaN (mean), -inf (max) or inf (min).

    Raises:
        ValueError: the two lists differ in length, the shape of a tensor differs from its parameter's, or ``op`` is unknown.
        RuntimeError: over gloo, if ranks ask for different things.
    """
    if op not in get_args(Op):
        raise ValueError(f"segment_reduce: op={op!r} must be one of {', '.join(map(repr, get_args(Op)))}")
    if len(tensors) != len(params):
        raise ValueError(f"segment_reduce: {len(tensors)} tensors for {len(params)} parameters")
    infos = [shard_info(p) for p in params]
    for tensor, param, info in zip(tensors, params, infos, strict=True):
        if tensor.shape != param.shape:
            raise ValueError(
                f"segment_reduce: a tensor of shape {tuple(tensor.shape)} for {_name(info)}, of which this rank has a "
                f"part of shape {tuple(param.shape)}: each tensor must have the shape of its parameter's part"
            )
    wide = any(t.dtype in (torch.float64, torch.complex128) for t in tensors)
    if not tensors:
        return torch.zeros(0, device="cpu")
    aggregate = Aggregate("sum" if op == "mean" else op, ord)
    runtimes = [None if info is None else info.runtime for info in infos]
    with torch.no_grad(), plainly():
        question = f"the {op} of {len(tensors)} parameters, the first of which is {_name(infos[0])}"
        values = aggregate.of(tensors, runtimes, question)
        if op == "mean":
            values /= torch.tensor([full_shape(p).numel() for p in params], dtype=torch.float64, device=values.device)
    return values if wide else values.float()


def _name(info: ShardInfo | None) -> str:
    return "a plain parameter" if info is None else repr(info.fqn)
