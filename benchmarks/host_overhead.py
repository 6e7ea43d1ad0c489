"""Host time that sharding adds to a unit's forward and backward, over the fake process group (no communication).

    python benchmarks/host_overhead.py --world-size 64 --units 100
    python benchmarks/host_overhead.py --gpu

A unit has 12 small parameters (16 x 16), so arithmetic is negligible: the rest is Python, dispatch and autograd. All
contenders run interleaved in one process. Figures are medians over the rounds, minus the plain model's median. bf16 means
float32 parameters, bfloat16 compute and float32 reduction, compared with a plain bfloat16 model.

The fake group imitates the data of other ranks, for which the host of a real group runs nothing. This is left out for all
contenders (``filling_nothing``): each calls what it calls over NCCL, which makes one call into the group.

The floor: for a unit, an eager flat design needs at least two all-gathers, one reduce-scatter, four storage resizes, two
copies of the shard, and one operation that copies twelve gradients. These alone are timed beside the others. Its collectives
are calls into the group, without torch's functions.

``test/core/test_counts.py`` counts that the host's work per unit grows neither with ranks nor with units.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable

import checkout  # noqa: F401
import torch
import torch.distributed as dist
from contenders import SHARDED, Setting, build, drop_gradients, filling_nothing
from devices import Device, choose_device
from suite import (
    OURS,
    Benchmark,
    Figure,
    Table,
    by_column,
    check,
    fake_world,
    interleaved,
    marked,
    progress,
    seconds,
    spread,
)
from torch import Tensor, nn

PARAMS, WIDTH = 12, 16
TARGETS = {"fp32": 100.0, "bf16": 110.0}


class Unit(nn.Sequential):
    """Twelve bias-free linears in a row: (batch, 16) -> (batch, 16)."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(PARAMS)))


def units(count: int) -> nn.Sequential:
    """Make a model whose time is the host's alone."""
    return nn.Sequential(*(Unit() for _ in range(count)))


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(2, WIDTH, dtype=dtype)


def contender(name: str, count: int, bf16: bool, device: Device) -> Callable[[], float]:
    """Return a function that times a forward and a backward of a new model, without the drop of gradients.

    On a GPU it is the time until the host has issued them, which begins when the device is idle.
    """
    torch.manual_seed(0)
    setting = Setting(Unit, bf16=bf16, device=device.device)
    model = build(name, units(count).to(device.device), setting)
    x = batch(torch.bfloat16 if bf16 else torch.float32).to(device.device)

    def step() -> float:
        device.finish()
        elapsed = seconds(lambda: model(x).sum().backward())
        drop_gradients(model)
        return elapsed

    return step


def floor(world_size: int, count: int, bf16: bool) -> Callable[[], float]:
    """Return a function that times the operations that every eager flat design needs, for each unit."""
    group = dist.group.WORLD
    assert group is not None
    numel, dtype = -(-PARAMS * WIDTH * WIDTH // world_size), torch.bfloat16 if bf16 else torch.float32
    shard, reduced = torch.empty(numel), torch.empty(numel)
    buffer, total = (torch.empty(numel * world_size, dtype=dtype) for _ in range(2))
    grads = [torch.empty(WIDTH, WIDTH, dtype=dtype) for _ in range(PARAMS)]
    slots = [*total[: PARAMS * WIDTH * WIDTH].view(PARAMS, WIDTH, WIDTH).unbind()]
    own, storage, input, nbytes = buffer[:numel], buffer.untyped_storage(), total.untyped_storage(), buffer.nbytes

    def unit() -> None:
        for _ in range(2):
            storage.resize_(nbytes)
            own.copy_(shard)
            group.broadcast(buffer, 0).wait()
            storage.resize_(0)
        input.resize_(nbytes)
        torch._foreach_copy_(slots, grads)
        group.broadcast(reduced, 0).wait()
        input.resize_(0)

    return lambda: seconds(lambda: [unit() for _ in range(count)])


SIMULATED_SIZES = {"units": 2, "world_size": 8, "rounds": 2}


def waits(args: argparse.Namespace, device: Device) -> str:
    """Return a note: how often the host waits for the device in a forward and a backward, which would hide its own time."""
    model = build(OURS, units(args.units).to(device.device), Setting(Unit))
    x = batch().to(device.device)
    for _ in range(device.warm_up):
        model(x).sum().backward()
    return check("waits of the host in flatshard's step", device.count(lambda: model(x).sum().backward()).waits, 0)


def column(args: argparse.Namespace, bf16: bool, device: Device) -> dict[str, Figure]:
    """Return microseconds per unit: every contender's minus the plain model's, and those of the floor and the plain model."""
    make = functools.partial(contender, count=args.units, bf16=bf16, device=device)
    with filling_nothing():
        steps = {name: make(name) for name in (*SHARDED, "plain")}
        steps["plain (in all)"] = steps.pop("plain")
        if device.device.type == "cpu":
            steps["floor"] = floor(args.world_size, args.units, bf16)
        times = interleaved(steps, args.rounds)
    plain = statistics.median(times["plain (in all)"])
    return {
        name: spread(1e6 / args.units * (value - plain * (name in SHARDED)) for value in series)
        for name, series in times.items()
    }


def measure(args: argparse.Namespace) -> list[Table]:
    if (device := choose_device(args, SIMULATED_SIZES) if args.gpu else Device()) is None:
        return []
    columns: dict[str, dict[str, Figure]] = {}
    with fake_world(args.world_size):
        for name, bf16 in (("fp32", False), ("bf16", True)):
            progress(f"host time, {name}")
            columns[name] = column(args, bf16, device)
        with filling_nothing():
            notes = [waits(args, device)] if args.gpu else []
    tables = [
        Table(
            "host_overhead",
            "microseconds of host time of forward + backward over the plain model, per unit of 12 small parameters; "
            f"medians of {args.rounds} rounds (fake group of {args.world_size}, {args.units} units)",
            "what no eager flat design can leave out, timed alone in the same rounds",
            by_column(columns),
            {} if args.gpu else {OURS: TARGETS},
            notes,
            digits=0,
        )
    ]
    return [marked(table) for table in tables] if args.simulated else tables


BENCHMARK = Benchmark(
    measure,
    __doc__,
    rounds=(11, 41),
    sizes={"world_size": 64, "units": 100},
    flags={
        "gpu": "on a GPU: the time until the host has issued all, without a floor",
        "simulated": "with --gpu, on the simulated device: no results",
    },
)

if __name__ == "__main__":
    BENCHMARK.main()
