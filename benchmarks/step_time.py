"""Step time of a GPT against FSDP2, FSDP1 and DDP, over gloo on CPU, all in one process group, interleaved.

    python benchmarks/step_time.py

It starts two ranks; for more: ``torchrun --standalone --nproc-per-node 4 benchmarks/step_time.py``. Every contender trains
the same 25 M parameter model on the same batch: forward, backward and an AdamW step. A round runs each once; figures are
medians over the rounds, as ratios to FSDP2's median. ``4 x``: four microbatches, of which the last reduces; ``flatshard, each
reduced`` is its default accumulation instead. bf16: float32 parameters, bfloat16 compute, float32 reduction; DDP: under
autocast. ``--full`` adds flatshard with all communication left out (``no_communication.py``).

The floor is the plain model's step without any communication, on each rank's own batch (bf16: all of it in bfloat16).
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from contenders import SHARDED, Job, Setting, numel
from gpt import Block, GPTConfig
from no_communication import NoCommunication
from suite import OURS, Benchmark, Figure, Table, by_column, interleaved, over, progress, seconds_of_all, spread
from torch import Tensor, nn

COLUMNS = {
    "fp32": Setting(Block),
    "fp32, 4 x": Setting(Block, microbatches=4, reduced=False),
    "bf16": Setting(Block, bf16=True),
}
TARGETS = {"fp32": 0.60, "fp32, 4 x": 0.60, "bf16": 0.70}
EACH, ALONE, FLOOR = "flatshard, each reduced", "flatshard, no communication", "floor: plain"


def config(args: argparse.Namespace) -> GPTConfig:
    return GPTConfig(256, args.context, args.layers, args.width, heads=8)


def contender(name: str, args: argparse.Namespace, setting: Setting) -> Callable[[], float]:
    """Seconds of a step, until the slowest rank is done."""
    if name == EACH:
        setting = replace(setting, reduced=True)
    elif name == ALONE:
        setting = replace(setting, collectives=NoCommunication())
    windows = torch.randint(0, 256, (args.batch, args.context + 1), generator=torch.Generator().manual_seed(0))

    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    kind = {EACH: OURS, ALONE: OURS, FLOOR: "plain"}.get(name, name)
    job = Job(kind, config(args), setting, windows[:, :-1], loss=loss)
    return lambda: seconds_of_all(job.step)


def column(args: argparse.Namespace, setting: Setting) -> tuple[dict[str, Figure], Figure]:
    """Every contender's ratio to FSDP2, and FSDP2's milliseconds."""
    more = {EACH: setting.microbatches > 1, ALONE: args.full}
    names = [*SHARDED, "DDP", *(name for name, is_there in more.items() if is_there), FLOOR]
    times = interleaved({name: contender(name, args, setting) for name in names}, args.rounds, warm_up=1)
    base = times["FSDP2"]
    return {name: over(series, base) for name, series in times.items()}, spread(1e3 * value for value in base)


def measure(args: argparse.Namespace) -> list[Table]:
    columns: dict[str, dict[str, Figure]] = {}
    base = []
    for name, setting in COLUMNS.items():
        progress(f"step time, {name}")
        columns[name], milliseconds = column(args, setting)
        base.append(f"{name} {milliseconds.text(0)}")
        gc.collect()
    rows = by_column(columns)
    rows[FLOOR] = rows.pop(FLOOR)  # the last row
    return [
        Table(
            "step_time",
            f"step time over FSDP2's, GPT of {numel(config(args)) / 1e6:.1f} M parameters, {dist.get_world_size()} gloo "
            f"ranks; medians of {args.rounds} rounds",
            "the plain model's step without communication, on each rank's own batch, in the same rounds",
            rows,
            {OURS: TARGETS},
            [f"FSDP2's milliseconds: {'; '.join(base)}"],
        )
    ]


BENCHMARK = Benchmark(
    measure,
    __doc__,
    ranks=2,
    rounds=(3, 9),
    sizes={"layers": 8, "width": 512, "context": 64, "batch": 4},
)

if __name__ == "__main__":
    BENCHMARK.main()
