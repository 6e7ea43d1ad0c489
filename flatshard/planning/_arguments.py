"""What ``fit`` is given, read and checked: sizes, ranks, the loss, inputs of another size, and the largest that fit."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatshard._composable.outputs import tensors_in
from flatshard.planning._program import sum_of
from flatshard.planning._records import Ranks


def parse_bytes(value: float | str) -> int:
    """``"40 GiB"`` as bytes.

    Raises:
        ValueError: it is no size.
    """
    if isinstance(value, str) and (found := re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)(i?)B?\s*", value, re.IGNORECASE)):
        power = " KMGT".index(found[2].upper() or " ")
        return int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return int(value)
    raise ValueError(f'fit: bytes_per_rank={value!r} is no size: pass a number of bytes, or "40 GiB"')


def check_fit(example_inputs: Any, microbatches: Any, flops_per_byte: Any, device: Any) -> None:
    """Check the arguments of ``fit`` that are used as they are.

    Raises:
        ValueError: an argument is wrong.
    """
    for name, value, right, needed in (
        ("example_inputs", example_inputs, example_inputs is not None, "the inputs of one microbatch"),
        ("microbatches", microbatches, type(microbatches) is int and microbatches >= 1, "a number from 1 on"),
        (
            "flops_per_byte",
            flops_per_byte,
            type(flops_per_byte) in (int, float) and 0 <= flops_per_byte < math.inf,
            "a finite number from 0 on",
        ),
        (
            "device",
            device,
            str(device).partition(":")[0] in ("cpu", "cuda"),
            'the name of a device, "cuda" or "cpu"',
        ),
    ):
        if not right:
            raise ValueError(f"fit: {name} must be {needed}, got {value!r}")


def ranks_of(world_size: Any) -> Ranks:
    """The argument ``world_size``.

    Raises:
        ValueError: it is no number of ranks.
    """
    sizes = world_size if isinstance(world_size, tuple) else (1, world_size)
    if len(sizes) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise ValueError(
            f"fit: world_size must be a number of ranks, or (replicas, ranks to shard over), got {world_size!r}"
        )
    return Ranks(*sizes)


def default_loss(output: Any) -> Any:
    """``output.loss`` or ``output["loss"]``, or else the sum of its tensors."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return found if isinstance(found, Tensor) else sum_of(output)


def repeated(inputs: Any, rows: int) -> Any:
    """``inputs`` with so many rows, where they have as many as their first tensor.

    Raises:
        ValueError: there is none.
    """
    tensors = [t for t in tensors_in(inputs) if t.dim()]
    if not tensors:
        raise ValueError("fit: largest_batch=True needs example_inputs with a first dimension, that of the batch")
    count = tensors[0].size(0)

    def grown(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.size(0) != count:
            return tensor
        if tensor.is_floating_point():
            return torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype, device="meta")
        return tensor[torch.arange(rows, device=tensor.device) % count]

    return copy.deepcopy(inputs, {id(t): grown(t) for t in tensors})


def largest(peak: Callable[[int], int], budget: int) -> int:
    """The most rows with which ``peak`` is within ``budget``, at least 1; it grows with them."""
    peaks = {rows: peak(rows) for rows in (1, 2)}
    fits, over = (2 if peaks[2] <= budget else 1), (None if peaks[2] <= budget else 2)
    while over is None or over - fits > 1:
        low, high = sorted(peaks)[-2:] if over is None else (fits, over)
        slope = max(1.0, (peaks[high] - peaks[low]) / (high - low))
        guess = int(low + (budget - peaks[low]) / slope)
        rows = max(fits + 1, min(guess, 2 * fits * 8 if over is None else over - 1))
        peaks[rows] = peak(rows)
        fits, over = (rows, over) if peaks[rows] <= budget else (fits, rows)
        if fits >= MOST_ROWS:
            break
    return fits


MOST_ROWS = 2**20
