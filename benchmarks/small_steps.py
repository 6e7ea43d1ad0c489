"""Time of a small model's step, in which each collective costs more than it sends, over gloo on CPU, interleaved.

    python benchmarks/small_steps.py

It starts two ranks. Every contender trains the same GPT of 4 blocks, 64 wide, on 16 tokens: forward, backward and an AdamW
step, as in ``step_time.py``, which explains the columns. flatshard issues 9 all-gathers and 5 reduce-scatters in a step.
``flatshard, gloo alone`` shares no memory between ranks, and ``flatshard, no communication`` leaves its collectives out
(``no_communication.py``).

The floor is the plain model's step without any communication.
"""

from __future__ import annotations

import argparse

import checkout  # noqa: F401
import torch.distributed as dist
from contenders import SHARDED, Setting, numel
from gpt import Block
from step_time import ALONE, FLOOR, GLOO, column, config
from suite import OURS, Benchmark, Table, by_column, progress

TARGETS = {"time": 0.30}


def measure(args: argparse.Namespace) -> list[Table]:
    progress("small steps")
    found, milliseconds = column([*SHARDED, GLOO, ALONE, "DDP", FLOOR], args, Setting(Block), warm_up=5)
    columns = dict(zip(("time", "CPU"), found, strict=False))
    return [
        Table(
            "small_steps",
            f"a step over FSDP2's, GPT of {numel(config(args)) / 1e6:.1f} M parameters, {dist.get_world_size()} gloo ranks; "
            f"medians of {args.rounds} rounds",
            "the plain model's step without communication, in the same rounds",
            by_column(columns),
            {OURS: TARGETS},
            notes=[f"FSDP2's milliseconds: {milliseconds.text(0)}"],
        )
    ]


BENCHMARK = Benchmark(
    measure,
    __doc__,
    ranks=2,
    rounds=(51, 201),
    sizes={"layers": 4, "width": 64, "context": 16, "batch": 1},
)

if __name__ == "__main__":
    BENCHMARK.main()
