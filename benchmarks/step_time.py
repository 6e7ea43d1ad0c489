"""Step time of a GPT against FSDP2, FSDP1 and DDP, over gloo on CPU, all in one process group, interleaved.

    python benchmarks/step_time.py

It starts two ranks; for more: ``torchrun --standalone --nproc-per-node 4 benchmarks/step_time.py``. Every contender trains
the same 25 M parameter model on the same batch: forward, backward and an AdamW step. A round runs each once; figures are
medians over the rounds, as ratios to FSDP2's median. ``4 x``: four microbatches, of which the last reduces; ``flatshard, each
reduced`` is its default accumulation instead. bf16: float32 parameters, bfloat16 compute, float32 reduction; DDP: under
autocast. ``flatshard, gloo alone`` shares no memory between ranks. ``--full`` adds flatshard with all communication left out
(``no_communication.py``).

CPU is what rank 0 spends in a step, user and system, in all of its threads: the load of the machine changes it less.

The floor is the plain model's step without any communication, on each rank's own batch (bf16: all of it in bfloat16).
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from contenders import SHARDED, Job, Setting, numel
from gpt import Block, GPTConfig
from no_communication import NoCommunication
from suite import OURS, Benchmark, Figure, Table, by_column, interleaved, over, progress, seconds_of_all, spread
from torch import Tensor, nn

from flatshard import _config

COLUMNS = {
    "fp32": Setting(Block),
    "fp32, 4 x": Setting(Block, microbatches=4, reduced=False),
    "bf16": Setting(Block, bf16=True),
}
TARGETS = {"fp32": 0.60, "fp32, 4 x": 0.60, "bf16": 0.70}
EACH, ALONE, FLOOR = "flatshard, each reduced", "flatshard, no communication", "floor: plain"
GLOO = "flatshard, gloo alone"


def config(args: argparse.Namespace) -> GPTConfig:
    return GPTConfig(256, args.context, args.layers, args.width, heads=8)


def contender(name: str, args: argparse.Namespace, setting: Setting, cpu: list[float]) -> Callable[[], float]:
    """Seconds of a step, until the slowest rank is done. ``cpu``: gets the seconds of CPU of this one."""
    if name == EACH:
        setting = replace(setting, reduced=True)
    elif name == ALONE:
        setting = replace(setting, collectives=NoCommunication())
    windows = torch.randint(0, 256, (args.batch, args.context + 1), generator=torch.Generator().manual_seed(0))

    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    kind = {EACH: OURS, ALONE: OURS, GLOO: OURS, FLOOR: "plain"}.get(name, name)
    job = Job(kind, config(args), setting, windows[:, :-1], loss=loss)
    shared = 0 if name == GLOO else _config.SHARED_MEMORY

    def step() -> None:
        before, _config.SHARED_MEMORY = _config.SHARED_MEMORY, shared
        began = time.process_time()
        job.step()
        cpu.append(time.process_time() - began)
        _config.SHARED_MEMORY = before

    return lambda: seconds_of_all(step)


def column(args: argparse.Namespace, setting: Setting) -> tuple[dict[str, Figure], dict[str, Figure], Figure]:
    """Every contender's ratio to FSDP2, that of its CPU, and FSDP2's milliseconds."""
    more = {EACH: setting.microbatches > 1, ALONE: args.full}
    names = [*SHARDED, GLOO, "DDP", *(name for name, is_there in more.items() if is_there), FLOOR]
    cpu: dict[str, list[float]] = {name: [] for name in names}
    times = interleaved({name: contender(name, args, setting, cpu[name]) for name in names}, args.rounds, warm_up=1)
    base, base_cpu = times["FSDP2"], cpu["FSDP2"][1:]
    found = ({n: over(series, base) for n, series in times.items()}, {n: over(cpu[n][1:], base_cpu) for n in names})
    return *found, spread(1e3 * value for value in base)


def measure(args: argparse.Namespace) -> list[Table]:
    columns: dict[str, dict[str, Figure]] = {}
    cpu: dict[str, dict[str, Figure]] = {}
    base = []
    for name, setting in COLUMNS.items():
        progress(f"step time, {name}")
        columns[name], cpu[name], milliseconds = column(args, setting)
        base.append(f"{name} {milliseconds.text(0)}")
        gc.collect()
    tables = []
    floor = "the plain model's step without communication, on each rank's own batch, in the same rounds"
    what = (
        f"over FSDP2's, GPT of {numel(config(args)) / 1e6:.1f} M parameters, {dist.get_world_size()} gloo ranks; "
        f"medians of {args.rounds} rounds"
    )
    for name, title, found in (("step_time", "step time", columns), ("step_cpu", "CPU of a step", cpu)):
        rows = by_column(found)
        rows[FLOOR] = rows.pop(FLOOR)  # the last row
        tables.append(Table(name, f"{title} {what}", floor, rows))
    targets, notes = {OURS: TARGETS}, [f"FSDP2's milliseconds: {'; '.join(base)}"]
    return [replace(tables[0], targets=targets, notes=notes), tables[1]]


BENCHMARK = Benchmark(
    measure,
    __doc__,
    ranks=2,
    rounds=(3, 9),
    sizes={"layers": 8, "width": 512, "context": 64, "batch": 4},
)

if __name__ == "__main__":
    BENCHMARK.main()
