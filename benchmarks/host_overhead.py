"""Host time that sharding adds to a unit's forward and backward, with the fake process group (no communication).

    python benchmarks/host_overhead.py --world-size 64 --units 100

A unit has 12 small parameters (16 x 16), so the arithmetic is negligible and what is left is Python, dispatch and
autograd. All contenders run interleaved in one process; figures are medians over the rounds, from which the plain model's
median is subtracted. bf16: float32 parameters, bfloat16 compute, float32 reduction, over a plain bfloat16 model.
``FSDP1 flat, one call`` gathers as FSDP1 does on GPUs.

The floor: an eager flat design cannot do less per unit than two all-gathers, one reduce-scatter, four storage resizes,
two copies of the shard, and twelve gradient copies. Just those are timed, beside the others. ``bare units`` are the least
code that trains with them (``bare.py``, fp32): between the two lies what hooks and Python cost, and what flatshard takes
beyond them is what it knows and checks.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable

import bare
import torch
import torch.distributed as dist
from contenders import ONE_CALL, SHARDED, Setting, as_on_gpus, build
from suite import OURS, Benchmark, Figure, Table, by_column, fake_world, interleaved, progress, seconds, spread
from torch import nn
from units import PARAMS, WIDTH, Unit, Units, timed_step

TARGETS = {"fp32": 100.0, "bf16": 110.0}
BARE = "bare units"


def floor(world_size: int, units: int, dtype: torch.dtype) -> Callable[[], float]:
    """Seconds for the operations that no eager flat design can leave out, once for each unit."""
    from flatshard._comm.backends import FakeCollectives

    group = dist.group.WORLD
    assert group is not None
    collectives = FakeCollectives(group)
    numel = -(-PARAMS * WIDTH * WIDTH // world_size)
    shard, reduced = torch.empty(numel), torch.empty(numel)
    buffer, total = (torch.empty(numel * world_size, dtype=dtype) for _ in range(2))
    grads = [torch.empty(WIDTH, WIDTH, dtype=dtype) for _ in range(PARAMS)]
    slots = total[: PARAMS * WIDTH * WIDTH].view(PARAMS, WIDTH, WIDTH).unbind()
    own, storage, input = buffer[:numel], buffer.untyped_storage(), total.untyped_storage()
    nbytes, input_nbytes = storage.nbytes(), input.nbytes()

    def unit() -> None:
        for _ in range(2):
            storage.resize_(nbytes)
            own.copy_(shard)
            collectives.all_gather(buffer, own).wait()
            storage.resize_(0)
        input.resize_(input_nbytes)
        for slot, grad in zip(slots, grads, strict=True):
            slot.copy_(grad)
        collectives.reduce_scatter(reduced, total).wait()
        input.resize_(0)

    return lambda: seconds(lambda: [unit() for _ in range(units)])


def contender(name: str, units: int, bf16: bool) -> Callable[[], float]:
    """The timed step of a new model."""
    torch.manual_seed(0)
    model: nn.Module = Units(units)
    if name == BARE:
        bare.shard(list(model.units))
    else:
        model = build(name, model, Setting(Unit, bf16=bf16))
    step = timed_step(model, torch.bfloat16 if bf16 else torch.float32)

    def within() -> float:
        with as_on_gpus() if name == ONE_CALL else contextlib.nullcontext():
            return step()

    return within


def column(args: argparse.Namespace, bf16: bool) -> dict[str, Figure]:
    """Microseconds per unit over plain, of every contender and the floor."""
    names = ["plain", *args.only, *([] if bf16 else [BARE])]
    steps = {name: contender(name, args.units, bf16) for name in names}
    steps["floor"] = floor(args.world_size, args.units, torch.bfloat16 if bf16 else torch.float32)
    times = interleaved(steps, args.rounds)
    base = statistics.median(times["plain"])
    of_all = {"floor", "plain"}  # the others' are beyond plain
    return {
        "plain (in all)" if name == "plain" else name: spread(
            1e6 / args.units * (value - base * (name not in of_all)) for value in times[name]
        )
        for name in [*names[1:], "floor", "plain"]
    }


def measure(args: argparse.Namespace) -> list[Table]:
    columns: dict[str, dict[str, Figure]] = {}
    with fake_world(args.world_size):
        for name, bf16 in (("fp32", False), ("bf16", True)):
            progress(f"host time, {name}")
            columns[name] = column(args, bf16)
    return [
        Table(
            "host_overhead",
            "microseconds of host time of forward + backward over the plain model, per unit of 12 small parameters; "
            f"medians of {args.rounds} rounds (fake group of {args.world_size}, {args.units} units)",
            "what no eager flat design can leave out, timed alone in the same rounds",
            by_column(columns),
            {OURS: TARGETS},
            digits=0,
        )
    ]


BENCHMARK = Benchmark(
    measure, __doc__, rounds=(11, 41), sizes={"world_size": 64, "units": 100}, contenders=[*SHARDED, ONE_CALL]
)

if __name__ == "__main__":
    BENCHMARK.main()
