"""Statistics of each gradient of a module by its name, over all ranks.

[Note: One row for each part]
What ranks say of their parts of a gradient is a row of four numbers: norm, largest magnitude, sum, and how many elements are
not finite. Each rank that holds a part has a row of its own in what is reduced, so that one sum brings maxima too, and
loses no NaN. Of tensor-parallel gradients the parts of this rank's local tensor are combined first, then those of the whole,
over the other mesh: there every rank has a row, as what each holds differs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from flatshard._handle.adapters.tensor_parallel import ManyRuntimes
from flatshard._handle.tensors.partial import plainly, reduce_sums
from flatshard._runtime import Runtime
from flatshard.optim._norm import Gradient, gradients_of, runtimes_of


@dataclass(frozen=True)
class GradientStatistics:
    """One parameter's gradient over all ranks."""

    norm: float
    """The 2-norm."""
    max_abs: float
    """The largest magnitude; NaN if there is a NaN."""
    mean: float
    """The mean; of a complex gradient, of real and imaginary parts."""
    nonfinite: int
    """How many elements are infinite or NaN."""
    numel: int
    """Elements of the whole parameter."""


def gradient_statistics(module: nn.Module) -> dict[str, GradientStatistics]:
    """Statistics of each gradient of ``module`` by the parameter's FQN, for logging and for finding what went wrong.

    Every rank must call it, and all get the same (of an ignored parameter, what its own gradient gives), by one all-reduce
    for each process group in ``module``, or two with tensor parallelism. A parameter that has a gradient on no rank is left
    out; a shared one has its first name. The host waits for an accelerator.

    Raises:
        RuntimeError, NotImplementedError: see :func:`get_total_norm`.
    """
    gradients = gradients_of(module, "gradient_statistics")
    found: dict[str, GradientStatistics] = {}
    with torch.no_grad(), plainly():
        for runtime in runtimes_of(gradients):
            of_runtime = [g for g in gradients if g.runtime is runtime]
            for over in (
                True,
                False,
            ):  # whether the shard group has several ranks; with tensor parallelism it may have one
                if of_kind := [g for g in of_runtime if (_shard_world_size(g) > 1) is over]:
                    found |= _sharded_statistics(of_kind, _groups(runtime), over)
        for g in gradients:
            if g.runtime is None and g.grad is not None:
                found[g.fqn] = _statistics(_row(g.grad), g)
    return {g.fqn: found[g.fqn] for g in gradients if g.fqn in found}


def _groups(runtime: Runtime) -> Sequence[Runtime]:
    return runtime.runtimes if isinstance(runtime, ManyRuntimes) else (runtime,)


def _shard_world_size(gradient: Gradient) -> int:
    assert gradient.place is not None
    return gradient.place[0].layout.world_size


def _sharded_statistics(
    gradients: list[Gradient], groups: Sequence[Runtime], over_shards: bool
) -> dict[str, GradientStatistics]:
    """Of gradients with parts on the ranks of ``groups``, the first of which is the shard group if ``over_shards``."""
    device = groups[0].device
    present = torch.tensor([float(g.grad is not None) for g in gradients], dtype=torch.float64, device=device)
    where = next((g.grad.device for g in gradients if g.grad is not None), device)  # the CPU, under offload
    nothing = torch.zeros(_COLUMNS, dtype=torch.float64, device=where)
    rows = torch.stack([nothing if g.grad is None else _row(g.grad) for g in gradients]).to(device)
    question = f"statistics of {len(gradients)} gradients, the first of which is {gradients[0].fqn!r}"
    for index, runtime in enumerate(groups):
        holders = [range(runtime.world_size)] * len(gradients)
        if over_shards and index == 0:
            holders = [flat.layout.holders(i) for flat, i in (g.place for g in gradients if g.place is not None)]
        present, rows = _combined(present, rows, holders, runtime, question)
    kept = zip(gradients, rows.cpu(), present.tolist(), strict=True)
    return {g.fqn: _statistics(row, g) for g, row, on in kept if on}


def _combined(
    present: torch.Tensor, rows: torch.Tensor, holders: list[range], runtime: Runtime, question: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each gradient, on how many ranks it is, and the row of the whole. [Note: One row for each part]"""
    first = list(itertools.accumulate(map(len, holders), initial=0))
    all_rows = torch.zeros(first[-1], _COLUMNS, dtype=torch.float64, device=rows.device)
    for row, ranks, start in zip(rows, holders, first, strict=False):
        if runtime.rank in ranks:
            all_rows[start + ranks.index(runtime.rank)] = row
    reduced = reduce_sums(torch.cat([present, all_rows.flatten()]), runtime, question)
    present, flat = reduced.split_with_sizes([len(present), all_rows.numel()])
    parts = flat.view(-1, _COLUMNS).split_with_sizes([len(ranks) for ranks in holders])
    return present, torch.stack([_combine(part) for part in parts])


_COLUMNS = 4


def _row(part: torch.Tensor) -> torch.Tensor:
    """Norm, largest magnitude, sum, and number of infinite or NaN elements. float64, 1-D."""
    if not part.numel():
        return torch.zeros(_COLUMNS, dtype=torch.float64, device=part.device)
    real = torch.view_as_real(part) if part.is_complex() else part
    columns = [
        torch.linalg.vector_norm(real, 2, dtype=torch.float64),
        torch.linalg.vector_norm(part, math.inf),
        real.sum(dtype=torch.float64),
        (~part.isfinite()).sum(),
    ]
    return torch.stack([column.double() for column in columns])


def _combine(rows: torch.Tensor) -> torch.Tensor:
    """The row of a whole, from those of its parts."""
    norms, largest, sums, nonfinite = rows.unbind(1)
    largest = largest.amax() if len(rows) else largest.sum()
    return torch.stack([torch.linalg.vector_norm(norms), largest, sums.sum(), nonfinite.sum()])


def _statistics(row: torch.Tensor, gradient: Gradient) -> GradientStatistics:
    norm, largest, total, nonfinite = row.tolist()
    terms = gradient.numel * (2 if gradient.param.dtype.is_complex else 1)
    return GradientStatistics(norm, largest, total / terms if terms else math.nan, int(nonfinite), gradient.numel)
