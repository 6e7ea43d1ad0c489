"""Time to move training to host memory and back on one GPU (``flatshard.optim.offload_training_state``).

``gpu.py`` runs this.

    python benchmarks/switch.py
    python benchmarks/switch.py --simulated

A GPT in float32 has trained for two steps with AdamW, as rank 0 of the fake group of 8. Parameters, gradients and optimizer
state move to the host and back, several times. Columns:

- out, back: seconds for each GiB that moves, by the wall clock: "first" includes allocating and pinning host memory, and
  later times have a median. Floor: one copy of as many bytes, between pinned memory and the device.
- copies: number of copies to the host; each costs a launch. Floor: 1.
- bytes copied: ratio to the bytes that move, out and back. Floor: 1.
- remain: bytes that PyTorch has on the device meanwhile, minus those before the model was made; and the part of them that
  ``device_nbytes`` reports. Floor: 0, as this GPT has no buffers, and no parameters outside of units; on CUDA cuBLAS keeps
  some.

Without a GPU it says so, and prints no tables. ``--simulated`` runs on the tests' simulated accelerator, as in
``one_gpu.py``. That has no clock: copies, bytes and remaining memory are counts, but seconds are no results.
"""

from __future__ import annotations

import argparse

import checkout  # noqa: F401
import torch
from contenders import Job, Setting
from counting import CopiedBytes
from devices import Device, choose_device
from gpt import Block, GPTConfig
from suite import Benchmark, Figure, Table, check, fake_world, marked, spread

import flatshard

SIZES = {"layers": 12, "width": 2048, "context": 512, "vocabulary": 8192, "rounds": 7}
SIMULATED_SIZES = {"layers": 2, "width": 64, "context": 4, "vocabulary": 8, "rounds": 2}
GIB = 2**30


def floor_row(device: Device, nbytes: int, rounds: int) -> dict[str, Figure]:
    """Time a single copy of as many bytes."""
    here = torch.empty(nbytes, dtype=torch.uint8, device=device.device)
    there = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    ways = {"out": (there, here), "back": (here, there)}
    return {
        f"{way}, s/GiB": spread(
            device.seconds(lambda to=to, source=source: to.copy_(source, non_blocking=True)) * GIB / nbytes  # type: ignore[misc]
            for _ in range(rounds)
        )
        for way, (to, source) in ways.items()
    }


def switched(device: Device, job: Job, rounds: int, base: int) -> tuple[dict[str, Figure], int]:
    """Return a row, and the number of bytes that move. ``base`` is the bytes on the device without the job."""
    seconds: dict[str, list[float]] = {"out": [], "back": []}
    for _ in range(1 + rounds):
        away = flatshard.optim.offload_training_state(job.model, job.optimizer)
        moved, left, told = away.host_nbytes, device.allocated() - base, away.device_nbytes
        seconds["out"].append(away.seconds)
        seconds["back"].append(device.seconds(away.back))
    row = {}
    for way, found in seconds.items():
        first, *later = (value * GIB / moved for value in found)
        row |= {f"{way}, s/GiB": spread(later), f"{way}, first": Figure(first)}
    copies = device.count(lambda: flatshard.optim.offload_training_state(job.model, job.optimizer).restore()).copies
    with CopiedBytes() as copied:
        flatshard.optim.offload_training_state(job.model, job.optimizer).restore()
    counted = copied.total / 4  # read and written, out and back
    row |= {"copies": Figure(copies // 2), "bytes copied": Figure(counted / moved)}
    return row | {"remain": Figure(left), "remain, told": Figure(told)}, moved


def training_state(job: Job) -> list[torch.Tensor]:
    """Return copies of parameters, gradients and optimizer state."""
    parameters = list(job.model.parameters())
    states = [value for state in job.optimizer.state.values() for value in state.values()]
    kept = [*parameters, *(p.grad for p in parameters if p.grad is not None), *states]
    return [value.detach().clone() for value in kept if isinstance(value, torch.Tensor)]


def measure(args: argparse.Namespace) -> list[Table]:
    if (device := choose_device(args, SIMULATED_SIZES)) is None:
        return []
    with fake_world(8):
        tokens = torch.zeros(1, args.context, dtype=torch.int64, device=device.device)
        base = device.allocated()
        config = GPTConfig(args.vocabulary, args.context, args.layers, args.width, heads=8)
        job = Job("flatshard", config, Setting(Block, device=device.device), tokens)
        for _ in range(2):
            job.step()
        device.finish()
        here = device.allocated()
        before = training_state(job)
        row, moved = switched(device, job, args.rounds, base + device.allocated() - here)
        differ = sum(not torch.equal(a, b) for a, b in zip(before, training_state(job), strict=True))
    rows = {"flatshard": row, "one copy": floor_row(device, moved, args.rounds)}
    sizes = f"a GPT of {args.layers} blocks of width {args.width}, rank 0 of 8: {moved:,} bytes"
    kept = (row["remain"].value or 0) - (row["remain, told"].value or 0)
    notes = [
        check("tensors that came back with other values", differ, 0),
        check("bytes that remain on the device, over those that move", kept / moved, 0.05),
    ]
    table = Table(
        "switch",
        f"training to the host and back, {sizes}",
        "one pinned copy of as many bytes; bytes copied: 1; remain: 0",
        rows,
        notes=notes,
        digits=3,
    )
    return [marked(table) if args.simulated else table]


BENCHMARK = Benchmark(
    measure, __doc__, sizes=SIZES, flags={"simulated": "on the simulated device: seconds are no results"}
)

if __name__ == "__main__":
    BENCHMARK.main()
