"""Step time of a GPT, compared with FSDP2, FSDP1 and DDP, over gloo on CPU, in one process group, interleaved.

    python benchmarks/step_time.py

It starts two ranks; for more: ``torchrun --standalone --nproc-per-node 4 benchmarks/step_time.py``. Every contender trains
the same 25 M parameter model on the same batch: forward, backward and an AdamW step. A round runs each once; figures are
medians over the rounds, as ratios to FSDP2's median. ``4 x`` is four microbatches, of which the last reduces; ``flatshard,
each reduced`` is flatshard's default accumulation. Under ``flatshard, SHARD_OPTIM`` each rank has full parameters, as under
DDP and ``ZeRO-1``, which is DDP with ``ZeroRedundancyOptimizer``. bf16 means float32 parameters, bfloat16 compute and float32
reduction, and for DDP autocast. ``flatshard, gloo alone`` shares no memory between ranks. ``--full`` adds flatshard without
communication (``no_communication.py``).

CPU is rank 0's time in a step, user and system, of all its threads: the load of the machine changes it less. Page faults are
rank 0's minor ones in a step, for memory that is new to the process, which the system zeroes. They are a count. All
contenders share one process and its heap.

The floor is the plain model's step without any communication, on each rank's own batch (for bf16 all in bfloat16).
"""

from __future__ import annotations

import argparse
import functools
import gc
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import checkout  # noqa: F401
import torch
import torch.distributed as dist
from contenders import SHARDED, Job, Setting, numel
from gpt import Block, GPTConfig
from no_communication import NoCommunication
from suite import OURS, Benchmark, Figure, Table, by_column, interleaved, over, progress, seconds_of_all, spread
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from flatshard import ShardingStrategy
from flatshard._base import environment

COLUMNS = {
    "fp32": Setting(Block),
    "fp32, 4 x": Setting(Block, microbatches=4, reduced=False),
    "bf16": Setting(Block, bf16=True),
}
TARGETS = {"fp32": 0.60, "fp32, 4 x": 0.60, "bf16": 0.70}
EACH, ALONE, FLOOR = "flatshard, each reduced", "flatshard, no communication", "floor: plain"
GLOO = "flatshard, gloo alone"
OPTIM, ZERO = "flatshard, SHARD_OPTIM", "ZeRO-1"


def config(args: argparse.Namespace) -> GPTConfig:
    return GPTConfig(256, args.context, args.layers, args.width, heads=8)


@dataclass
class Used:
    """Resources of this rank used by a contender's steps."""

    cpu: list[float] = field(default_factory=list)
    """Seconds, user and system."""
    faults: list[int] = field(default_factory=list)


def contender(name: str, args: argparse.Namespace, setting: Setting, used: Used) -> Callable[[], float]:
    """Return a function that times a step until the slowest rank is done, and adds its resources to ``used``."""
    if name == EACH:
        setting = replace(setting, reduced=True)
    elif name == ALONE:
        setting = replace(setting, collectives=NoCommunication())
    elif name == OPTIM:
        setting = replace(setting, options={"strategy": ShardingStrategy.SHARD_OPTIM})
    windows = torch.randint(0, 256, (args.batch, args.context + 1), generator=torch.Generator().manual_seed(0))

    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    kind = {EACH: OURS, ALONE: OURS, GLOO: OURS, OPTIM: OURS, ZERO: "DDP", FLOOR: "plain"}.get(name, name)
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    if name == ZERO:  # each rank steps some of the parameters, and sends them to the others
        optimizer = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
    job = Job(kind, config(args), setting, windows[:, :-1], optimizer, loss)
    shared = 0 if name == GLOO else environment.SHARED_MEMORY

    def step() -> None:
        before, environment.SHARED_MEMORY = environment.SHARED_MEMORY, shared
        began, faults = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        job.step()
        used.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
        used.cpu.append(time.process_time() - began)
        environment.SHARED_MEMORY = before

    return lambda: seconds_of_all(step)


def column(
    names: Sequence[str], args: argparse.Namespace, setting: Setting, warm_up: int
) -> tuple[list[dict[str, Figure]], Figure]:
    """Return every contender's ratio to FSDP2 in time and CPU, its page faults, and FSDP2's milliseconds."""
    used = {name: Used() for name in names}
    steps = {name: contender(name, args, setting, used[name]) for name in names}
    times = interleaved(steps, args.rounds, warm_up)
    base, base_cpu = times["FSDP2"], used["FSDP2"].cpu[warm_up:]
    found = [
        {n: over(series, base) for n, series in times.items()},
        {n: over(each.cpu[warm_up:], base_cpu) for n, each in used.items()},
        {n: spread(each.faults[warm_up:]) for n, each in used.items()},
    ]
    return found, spread(1e3 * value for value in base)


def measure(args: argparse.Namespace) -> list[Table]:
    kinds: list[dict[str, dict[str, Figure]]] = [{}, {}, {}]
    base = []
    for name in args.columns:
        setting = COLUMNS[name]
        progress(f"step time, {name}")
        more = {**dict.fromkeys((EACH, OPTIM, ZERO), setting.microbatches > 1), ALONE: args.full}
        names = [*SHARDED, GLOO, "DDP", *(name for name, is_there in more.items() if is_there), FLOOR]
        found, milliseconds = column(names, args, setting, warm_up=1)
        for columns, figures in zip(kinds, found, strict=True):
            columns[name] = figures
        base.append(f"{name} {milliseconds.text(0)}")
        gc.collect()
    tables = []
    floor = "the plain model's step without communication, on each rank's own batch, in the same rounds"
    what = (
        f"GPT of {numel(config(args)) / 1e6:.1f} M parameters, {dist.get_world_size()} gloo ranks; "
        f"medians of {args.rounds} rounds"
    )
    titles = (
        ("step_time", "step time over FSDP2's"),
        ("step_cpu", "CPU of a step over FSDP2's"),
        ("step_faults", "page faults of a step"),
    )
    for (name, title), columns in zip(titles, kinds, strict=True):
        rows = by_column(columns)
        rows[FLOOR] = rows.pop(FLOOR)  # the last row
        tables.append(Table(name, f"{title}, {what}", floor, rows, digits=0 if name == "step_faults" else 2))
    targets, notes = (
        {OURS: {name: TARGETS[name] for name in args.columns}},
        [f"FSDP2's milliseconds: {'; '.join(base)}"],
    )
    return [replace(tables[0], targets=targets, notes=notes), *tables[1:]]


BENCHMARK = Benchmark(
    measure,
    __doc__,
    ranks=2,
    rounds=(3, 9),
    sizes={"layers": 8, "width": 512, "context": 64, "batch": 4},
    names={"columns": tuple(COLUMNS)},
)

if __name__ == "__main__":
    BENCHMARK.main()
