"""The arguments of ``plan_step`` and ``fit_to_memory``: one table of checks, and what is read from them."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatshard._composable.outputs import tensors_in


def parse_bytes(value: float | str) -> int:
    """Return ``"40 GiB"`` as bytes.

    Raises:
        ValueError: ``value`` is no size.
    """
    if isinstance(value, str) and (found := re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)(i?)B?\s*", value, re.IGNORECASE)):
        power = " KMGT".index(found[2].upper() or " ")
        return int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return int(value)
    raise ValueError(f'fit_to_memory: bytes_per_rank={value!r} is no size: pass a number of bytes, or "40 GiB"')


def device_type(device: Any) -> str:
    """Return the type of ``device``, without its index.

    Raises:
        RuntimeError, TypeError: torch knows no such device.
    """
    return torch.device(str(device)).type


def _is_device(value: Any) -> bool:
    """Return whether ``value`` names a device with memory to train on: any that torch knows, except for meta."""
    try:
        return isinstance(value, str | torch.device) and device_type(value) != "meta"
    except RuntimeError:
        return False


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_world_size(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, tuple) and len(value) == 2 and all(map(_is_count, value)))


class _Row(NamedTuple):
    """A check of one argument."""

    is_right: Callable[[Any], bool]
    needed: str  # completes "must be"


_CHECKS = {
    "world_size": _Row(_is_world_size, "a number of ranks, or (replicas, ranks to shard over)"),
    "microbatches": _Row(_is_count, "a number from 1 on"),
    "ranks_per_node": _Row(_is_count, "a number from 1 on"),
    "flops_per_byte": _Row(
        lambda value: type(value) in (int, float) and 0 <= value < math.inf, "a finite number from 0 on"
    ),
    "device": _Row(_is_device, 'the name of a device, such as "cuda" or "cpu"'),
}


def check_arguments(function: str, given: Mapping[str, Any]) -> None:
    """Raise if an argument in ``given`` is wrong, of those that ``function`` uses as they are.

    Raises:
        ValueError: an argument is wrong.
    """
    for name, row in _CHECKS.items():
        if name in given and not row.is_right(given[name]):
            raise ValueError(f"{function}: {name} must be {row.needed}, got {given[name]!r}")


def repeated(inputs: Any, rows: int) -> Any:
    """Return ``inputs`` with ``rows`` rows in each tensor that has as many as the first.

    Raises:
        ValueError: no tensor has rows.
    """
    tensors = [t for t in tensors_in(inputs) if t.dim()]
    if not tensors:
        raise ValueError(
            "fit_to_memory: largest_batch=True needs example_inputs with a first dimension, that of the batch"
        )
    count = tensors[0].size(0)

    def grown(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.size(0) != count:
            return tensor
        if tensor.is_floating_point():
            return torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype, device="meta")
        return tensor[torch.arange(rows, device=tensor.device) % count]

    return copy.deepcopy(inputs, {id(t): grown(t) for t in tensors})


def largest(peak: Callable[[int], int], budget: int) -> int:
    """Return the most rows, at least 1, whose ``peak`` is within ``budget``. The peak grows with the rows."""
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
