"""Statistics of each gradient of a module by its name, over all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from flatshard._handle.tensors.aggregate import Aggregate, plainly
from flatshard.optim._norm import Gradient, device_of, first_name, gradients_of, parts_of


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
    """Statistics of each gradient of ``module`` by the parameter's FQN: for logging, and for finding what went wrong.

    Every rank must call it, and all ranks get the same statistics, except for ignored parameters, whose gradients may
    differ. It takes two all-reduces for each process group in ``module``, and twice as many with tensor parallelism. The
    host waits for an accelerator. A shared parameter has its first name. A parameter that has a gradient on no rank is left
    out.

    Raises:
        RuntimeError, NotImplementedError: see :func:`get_total_norm`.
    """
    gradients = gradients_of(module, "gradient_statistics")
    found = {}
    with torch.no_grad(), plainly():
        for g, (squares, total, nonfinite, present, largest) in zip(gradients, _numbers(gradients), strict=True):
            if present:
                terms = g.numel * (2 if g.param.dtype.is_complex else 1)
                mean = total / terms if terms else math.nan
                found[g.fqn] = GradientStatistics(math.sqrt(squares), largest, mean, int(nonfinite), g.numel)
    return found


def _numbers(gradients: list[Gradient]) -> list[list[float]]:
    """For each gradient: sum of squares, sum, nonfinite elements, number of ranks that have it, and largest magnitude."""
    if not gradients:
        return []
    device, runtimes = device_of(gradients), [g.runtime for g in gradients]
    parts = parts_of(gradients, device)
    norm, total, largest = Aggregate("norm"), Aggregate("sum"), Aggregate("norm", math.inf)
    sums = [
        norm.local(parts, device).square(),
        total.local([torch.view_as_real(part) if part.is_complex() else part for part in parts], device),
        total.local([~part.isfinite() for part in parts], device),
        torch.tensor([float(g.grad is not None) for g in gradients], dtype=torch.float64, device=device),
    ]
    question = f"statistics of {len(gradients)} gradients, the first of which is {first_name(gradients)}"
    summed = total.over_groups(torch.stack(sums, 1), runtimes, question)
    most = largest.over_groups(largest.local(parts, device), runtimes, question)
    numbers: list[list[float]] = torch.cat([summed, most.unsqueeze(1)], 1).tolist()
    return numbers
