"""``measure_flops_per_byte``: what computing and sending cost on these ranks, for ``fit_to_memory``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from flatshard._base.config import ShardingStrategy
from flatshard._comm.process_groups import default_group
from flatshard._comm.progress import Label
from flatshard._comm.runtime import Runtime
from flatshard._composable.construct.groups import as_device, default_device, resolve_groups

_LONG_ENOUGH = 0.005  # seconds of a matrix product: short ones measure how it is launched
_LARGEST_MATRIX = 8192
_GATHERED = {"cpu": 8 * 2**20}  # bytes of an all-gather, by the type of the device
_GATHERED_BY_OTHERS = 64 * 2**20
_TIMES = 5
_LABEL = Label("measure_flops_per_byte")


def measure_flops_per_byte(
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | str | int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Return how many floating-point operations take as long as to send one byte, for :func:`fit_to_memory`.

    All ranks of the group must call it, while they do nothing else. It times matrix products and all-gathers, for about a
    second. Of each it takes the median of five, on the slowest rank, so all ranks return the same number. It is that of this
    machine: ``fit_to_memory`` itself needs no ranks, and may be called elsewhere with it.

    Example::

        speed = flatshard.planning.measure_flops_per_byte(dtype=torch.bfloat16)
        if dist.get_rank() == 0:
            print(f"fit_to_memory(..., flops_per_byte={speed:.0f})")

    Args:
        process_group: the ranks to shard over. None: all ranks.
        device: where to compute. None: the current accelerator, or the CPU if there is none.
        dtype: the dtype to compute in: ``param_dtype`` of :class:`~flatshard.MixedPrecision`, if you pass it.

    Raises:
        RuntimeError: no process group is initialised.
        ValueError: the group has one rank, which sends nothing, or this rank is none of its members.
    """
    if default_group() is None:
        raise RuntimeError(
            "measure_flops_per_byte needs a process group: call torch.distributed.init_process_group(...) first"
        )
    group, _ = resolve_groups(process_group, None, ShardingStrategy.FULL_SHARD)
    runtime = Runtime.of(group, as_device(device) or default_device())
    if runtime.world_size == 1:
        raise ValueError("measure_flops_per_byte: the process group has one rank, which sends nothing")
    seconds = torch.tensor(
        [_seconds_per_operation(runtime.device, dtype), _seconds_per_byte(runtime)], device=runtime.device
    )
    runtime.all_reduce_now(seconds, "max", "measure_flops_per_byte")
    operation, byte = seconds.tolist()
    return float(byte / operation)


def _seconds_per_operation(device: torch.device, dtype: torch.dtype) -> float:
    """Time products of square matrices, as large as take a few milliseconds."""
    size, seconds = 128, 0.0
    while seconds < _LONG_ENOUGH and size < _LARGEST_MATRIX:
        size *= 2
        # No random numbers are drawn: the user's generators stay as they are.
        matrix = torch.linspace(-1, 1, size * size, device=device).to(dtype).view(size, size)
        product = torch.empty_like(matrix)
        seconds = _median(lambda a=matrix, to=product: torch.mm(a, a, out=to), device)  # type: ignore[misc]
    return seconds / (2 * size**3)


def _seconds_per_byte(runtime: Runtime) -> float:
    """Time all-gathers of a unit's size. A byte is one that a rank sends by a ring, as in ``PlannedCollective``."""
    nbytes = -(-_GATHERED.get(runtime.device.type, _GATHERED_BY_OTHERS) // (16 * runtime.world_size)) * 16
    output = torch.zeros(nbytes * runtime.world_size, dtype=torch.uint8, device=runtime.device)
    shard = output[runtime.rank * nbytes :][:nbytes]
    seconds = _median(lambda: runtime.all_gather(output, shard, _LABEL).wait(), runtime.device)
    return seconds / (nbytes * (runtime.world_size - 1))


def _median(run: Callable[[], object], device: torch.device) -> float:
    """Return the median of the seconds that ``run`` takes on ``device``, after a first time."""
    found = []
    for _ in range(1 + _TIMES):
        begun = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        found.append(time.perf_counter() - begun)
    return statistics.median(found[1:])
