"""Step time of a GPT against FSDP2, FSDP1 and DDP, over gloo on CPU, all in one process group, interleaved.

    python benchmarks/step_time.py

It starts two ranks; for more: ``torchrun --standalone --nproc-per-node 4 benchmarks/step_time.py``. Every contender trains
the same 25 M parameter model on the same batch: forward, backward and an AdamW step. A round runs each once; figures are
medians over the rounds, as ratios to FSDP2's median. ``4 x``: four microbatches, of which the last reduces; ``flatshard, each
reduced`` is its default accumulation instead. bf16: float32 parameters, bfloat16 compute, float32 reduction.

The floor is the plain model's step without any communication, on each rank's own batch (bf16: all of it in bfloat16).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from contenders import SHARDED, Setting, Unavailable, build, unsynchronised
from gpt import GPT, Block, GPTConfig
from suite import OURS, Figure, Table, arguments, interleaved, main, over, progress
from torch import nn

COLUMNS = {"fp32": (False, 1), "fp32, 4 x": (False, 4), "bf16": (True, 1)}
"""(bf16, microbatches)"""
TARGETS = {"fp32": 0.60, "fp32, 4 x": 0.60, "bf16": 0.70}
MILLISECONDS = "FSDP2, ms"
EACH = "flatshard, each reduced"
NAMES = ["plain", *SHARDED, "DDP"]


def config(args: argparse.Namespace) -> GPTConfig:
    return GPTConfig(256, args.context, args.layers, args.width, heads=8)


def trainer(name: str, args: argparse.Namespace, bf16: bool, microbatches: int) -> Callable[[], float]:
    """Seconds of a step, until the slowest rank is done.

    Raises:
        Unavailable: the contender has no such setting.
    """
    torch.manual_seed(0)
    kind = "flatshard" if name == EACH else name
    model = build(kind, GPT(config(args)), Setting(Block, bf16=bf16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 256, (args.batch, args.context + 1))

    def step() -> float:
        dist.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        for number in range(microbatches):
            held = name != EACH and number < microbatches - 1
            with unsynchronised(kind, model) if held else contextlib.nullcontext():
                logits = model(tokens[:, :-1]).float()
                nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        dist.barrier()
        return time.perf_counter() - began

    return step


def column(args: argparse.Namespace, bf16: bool, microbatches: int, rounds: int) -> dict[str, Figure]:
    """Every contender's ratio to FSDP2."""
    steps: dict[str, Callable[[], float]] = {}
    result: dict[str, Figure] = {}
    for name in [*args.only, *([EACH] if microbatches > 1 and "flatshard" in args.only else [])]:
        try:
            steps[name] = trainer(name, args, bf16, microbatches)
        except Unavailable as e:
            result[name] = Figure(None, note=str(e))
    times = interleaved(steps, rounds, warm_up=1)
    base = statistics.median(times["FSDP2"]) if "FSDP2" in times else float("nan")
    result |= {"floor: plain" if name == "plain" else name: over(series, base) for name, series in times.items()}
    if "FSDP2" in times:
        result[MILLISECONDS] = over(times["FSDP2"], 1.0, 1e3)
    return result


def measure(args: argparse.Namespace) -> list[Table]:
    rounds = args.rounds or (9 if args.full else 3)
    columns = {}
    for name, (bf16, microbatches) in COLUMNS.items():
        progress(f"step time, {name}")
        columns[name] = column(
            args, bf16, microbatches, rounds if microbatches == 1 or args.full else max(1, rounds - 1)
        )
        gc.collect()
    base = {name: found.pop(MILLISECONDS).text(0) for name, found in columns.items() if MILLISECONDS in found}
    names = list(dict.fromkeys(name for found in columns.values() for name in found))
    last = [name for name in ("floor: plain",) if name in names]
    rows = {
        name: {c: found[name] for c, found in columns.items() if name in found} for name in names if name not in last
    }
    rows |= {name: {c: found[name] for c, found in columns.items() if name in found} for name in last}
    with torch.device("meta"):
        numel = sum(p.numel() for p in GPT(config(args)).parameters())
    return [
        Table(
            "step_time",
            f"step time over FSDP2's, GPT of {numel / 1e6:.1f} M parameters, {dist.get_world_size()} gloo ranks; medians of "
            f"{rounds} rounds (of 4 x, one less in the quick set)",
            "the plain model's step without communication, on each rank's own batch, in the same rounds",
            rows,
            {OURS: TARGETS} if OURS in rows else {},
            [f"FSDP2's milliseconds: {'; '.join(f'{name} {text}' for name, text in base.items())}"] if base else [],
        )
    ]


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--width", type=int, default=512)
    made.add_argument("--context", type=int, default=64)
    made.add_argument("--batch", type=int, default=4, help="sequences per rank")
    made.add_argument("--rounds", type=int, default=0, help="default: 3, with --full 9")
    made.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    return made


if __name__ == "__main__":
    main(measure, parser(), ranks=2)
