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
from suite import OURS, Figure, Table, arguments, beyond, fake_world, interleaved, main, progress, seconds
from torch import nn
from units import PARAMS, WIDTH, Unit, Units, timed_step

TARGETS = {"fp32": 100.0, "bf16": 110.0}
NAMES = [*SHARDED, ONE_CALL]
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


def contender(name: str, units: int, bf16: bool) -> tuple[nn.Module, Callable[[], float]]:
    """The model and its timed step."""
    torch.manual_seed(0)
    model = build(name, Units(units), Setting(Unit, bf16=bf16))
    step = timed_step(model, torch.bfloat16 if bf16 else torch.float32)

    def within() -> float:
        with as_on_gpus() if name == ONE_CALL else contextlib.nullcontext():
            return step()

    return model, within


def bare_units(units: int) -> Callable[[], float]:
    """The timed step of the same model with no more than the least code."""
    model = Units(units)
    bare.shard(list(model.units))
    return timed_step(model)


def column(args: argparse.Namespace, bf16: bool, rounds: int) -> dict[str, Figure]:
    """Microseconds per unit over plain, of every contender and the floor."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    models = {name: contender(name, args.units, bf16) for name in dict.fromkeys(["plain", *args.only])}
    steps = {name: step for name, (_, step) in models.items()} | {"floor": floor(args.world_size, args.units, dtype)}
    if not bf16:
        steps[BARE] = bare_units(args.units)
    times = interleaved(steps, rounds)
    base = statistics.median(times["plain"])
    result = {name: beyond(times[name], base, 1e6 / args.units) for name in [*args.only, BARE] if name in times}
    result["floor"] = beyond(times["floor"], 0.0, 1e6 / args.units)
    result["plain (in all)"] = beyond(times["plain"], 0.0, 1e6 / args.units)
    return result


def measure(args: argparse.Namespace) -> list[Table]:
    rounds = args.rounds or (41 if args.full else 11)
    columns: dict[str, dict[str, Figure]] = {}
    with fake_world(args.world_size):
        for name, bf16 in (("fp32", False), ("bf16", True)):
            progress(f"host time, {name}")
            columns[name] = column(args, bf16, rounds)
    return [
        Table(
            "host_overhead",
            "microseconds of host time of forward + backward over the plain model, per unit of 12 small parameters; "
            f"medians of {rounds} rounds (fake group of {args.world_size}, {args.units} units)",
            "what no eager flat design can leave out, timed alone in the same rounds",
            {name: {c: column[name] for c, column in columns.items() if name in column} for name in columns["fp32"]},
            {OURS: TARGETS} if OURS in args.only else {},
            digits=0,
        )
    ]


def profile(units: int, world_size: int) -> None:
    """Prints where flatshard's step spends its time."""
    import cProfile
    import pstats

    with fake_world(world_size):
        _, step = contender("flatshard", units, bf16=False)
        for _ in range(3):
            step()
        with cProfile.Profile() as found:
            for _ in range(10):
                step()
        pstats.Stats(found).sort_stats("tottime").print_stats(30)


def measure_or_profile(args: argparse.Namespace) -> list[Table]:
    if args.profile:
        profile(args.units, args.world_size)
        return []
    return measure(args)


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--world-size", type=int, default=64)
    made.add_argument("--units", type=int, default=100)
    made.add_argument("--rounds", type=int, default=0, help="default: 11, with --full 41")
    made.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    made.add_argument("--profile", action="store_true", help="cProfile of flatshard's steps instead of timings")
    return made


if __name__ == "__main__":
    main(measure_or_profile, parser())
