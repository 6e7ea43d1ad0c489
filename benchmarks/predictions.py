"""Peak of memory as ``plan`` and ``fit`` predict it, against the measured one, on one GPU.

``gpu.py`` runs this.

    python benchmarks/predictions.py
    python benchmarks/predictions.py --simulated

A GPT trains as rank 0 of the fake group of 8, with AdamW (fused). The prediction is made without the device, from the model
on meta. Columns: the predicted peak, the peak by ``max_memory_allocated`` minus what was allocated before the model was made,
and their ratio. Floor: 1. cuBLAS's workspaces are allocated before. The last row is of ``fit`` with a part of the first row's
peak as its budget; what it chose is in its name.

Without a GPU it says so, and prints no tables. On the simulated device, sizes are tiny, and blocks of an allocator count.
"""

from __future__ import annotations

import argparse
import functools
import gc
from collections.abc import Callable
from typing import Any

import checkout  # noqa: F401
import torch
from contenders import as_over_nccl, filling_nothing, mean_logit
from devices import Device, choose_device
from gpt import GPT, Block, GPTConfig
from suite import Benchmark, Figure, Table, check, fake_world, marked, progress
from torch import Tensor, nn

import flatshard
from flatshard import MixedPrecision

SIZES = {"layers": 12, "width": 1024, "context": 1024, "vocabulary": 8192, "batch": 4}
SIMULATED_SIZES = {"layers": 3, "width": 64, "context": 16, "vocabulary": 64, "batch": 2}
WORLD_SIZE = 8
RATIO = "predicted / measured"
OFF, SIMULATED_OFF = 0.1, 0.2
"""Maximum error of a prediction. In a tiny model, blocks of the allocator count."""
BF16 = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"mixed_precision": BF16},
    "fp32": {},
    "bf16, SHARD_GRAD_OP": {"mixed_precision": BF16, "strategy": flatshard.ShardingStrategy.SHARD_GRAD_OP},
    "bf16, recomputed": {"mixed_precision": BF16, "recompute": True},
    "bf16, parameters offloaded": {"mixed_precision": BF16, "cpu_offload": flatshard.CPUOffload()},
}


def on_meta(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def measured(
    device: Device,
    config: GPTConfig,
    tokens: Tensor,
    shard: Callable[[GPT], GPT],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> int:
    """Return the bytes that the third step needs beyond what was allocated before the model was made."""
    gc.collect()
    device.recover()
    before = device.allocated()
    torch.manual_seed(0)
    model = shard(GPT(config).to(device.device))
    optimizer = make_optimizer(list(model.parameters()))

    def step() -> None:
        mean_logit(model(tokens)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    return device.peak(step) - before


def row(predicted: int, found: int) -> dict[str, Figure]:
    return {
        "predicted, MiB": Figure(predicted / 2**20),
        "measured, MiB": Figure(found / 2**20),
        RATIO: Figure(predicted / found),
    }


def rows(args: argparse.Namespace, device: Device) -> dict[str, dict[str, Figure]]:
    config = GPTConfig(args.vocabulary, args.context, args.layers, args.width, heads=8)
    tokens = torch.zeros(args.batch, args.context, dtype=torch.int64)
    fused = device.device.type == "cuda"
    adamw = functools.partial(torch.optim.AdamW, lr=1e-4, **({"fused": True} if fused else {"foreach": False}))
    step = {"world_size": WORLD_SIZE, "optimizer": adamw, "example_inputs": (tokens,), "loss": mean_logit}
    found: dict[str, dict[str, Figure]] = {}
    here = tokens.to(device.device)
    for name, options in OPTIONS.items():
        progress(f"predictions, {name}")
        plan = flatshard.plan_step(on_meta(config), policy={Block}, compare=False, **step, **options)
        shard = functools.partial(flatshard.fully_shard, policy={Block}, collectives=as_over_nccl, **options)
        found[name] = row(plan.total_peak.nbytes, measured(device, config, here, shard, adamw))
    progress("predictions, fit")
    share = 0.9 if args.simulated else 0.7
    budget = int(share * found["bf16"]["predicted, MiB"].value * 2**20)  # type: ignore[operator]
    fit = flatshard.fit_to_memory(on_meta(config), bytes_per_rank=budget, policy={Block}, mixed_precision=BF16, **step)
    given_up = ", ".join(dict.fromkeys(each.what for each in fit.tradeoffs))
    shard = functools.partial(flatshard.fully_shard, **fit.arguments | {"collectives": as_over_nccl})
    found[f"fit to {share}: {given_up}"] = row(fit.peak.nbytes, measured(device, config, here, shard, fit.optimizer))
    return found


def notes(rows: dict[str, dict[str, Figure]], allowed: float) -> list[str]:
    ratios = {name: row[RATIO].value or 0.0 for name, row in rows.items()}
    return [
        check(f"{name}: the prediction over the measured peak is off by", abs(ratio - 1), allowed)
        for name, ratio in ratios.items()
    ]


def measure(args: argparse.Namespace) -> list[Table]:
    if (device := choose_device(args, SIMULATED_SIZES)) is None:
        return []
    with fake_world(WORLD_SIZE), filling_nothing():
        found = rows(args, device)
    table = Table(
        "predictions",
        f"peak of a step on rank 0 of {WORLD_SIZE}: GPT of {args.layers} blocks of width {args.width}",
        "1: the prediction is exact",
        found,
        notes=notes(found, SIMULATED_OFF if args.simulated else OFF),
    )
    return [marked(table) if args.simulated else table]


BENCHMARK = Benchmark(measure, __doc__, sizes=SIZES, flags={"simulated": "on the simulated device: no results"})

if __name__ == "__main__":
    BENCHMARK.main()
