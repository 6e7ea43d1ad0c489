"""Time to save and to load a GPT with its AdamW state, against FSDP2 and FSDP1, over gloo on CPU, interleaved.

    python benchmarks/checkpoint.py

Every contender holds the same model and saves it with its optimizer's state to files of its own, flushed to disk; then it
loads them back. A round does all of them once; figures are medians over the rounds, with the fastest and the slowest, and
ratios to the floor: each rank writes its bytes to one file with a single call, flushes it, and reads it back.
What was just written is read from the page cache, by all of them. Peers need numpy, to send objects.

CPU is what rank 0 spends, user and system, in all of its threads: it says more than seconds where others use the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contenders import Setting, build
from gpt import GPT, Block, GPTConfig
from suite import Benchmark, Figure, Table, over, progress, seconds_of_all, spread
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import flatshard


@dataclass
class Contender:
    """A trained model, and the ways to its files and back."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    save: Callable[[Contender, Path], object]
    load: Callable[[Contender, Path], object]


def save_ours(job: Contender, path: Path) -> None:
    flatshard.save_checkpoint(path, {"model": job.model, "optimizer": job.optimizer})


def load_ours(job: Contender, path: Path) -> None:
    flatshard.load_checkpoint(path, {"model": job.model, "optimizer": job.optimizer})


def save_ours_by_torch(job: Contender, path: Path) -> None:
    state = {
        "model": job.model.state_dict(),
        "optimizer": flatshard.checkpoint.optim_state_dict(job.model, job.optimizer),
    }
    dcp.save(state, storage_writer=flatshard.checkpoint.Writer(path))


def load_ours_by_torch(job: Contender, path: Path) -> None:
    optimizer = flatshard.checkpoint.optim_state_dict(job.model, job.optimizer, for_load=True)
    state = {"model": job.model.state_dict(), "optimizer": optimizer}
    dcp.load(state, storage_reader=flatshard.checkpoint.Reader(path))
    job.model.load_state_dict(state["model"])
    flatshard.checkpoint.load_optim_state_dict(job.model, job.optimizer, state["optimizer"])


def save_by_torch(job: Contender, path: Path) -> None:
    model, optimizer = get_state_dict(job.model, job.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def load_by_torch(job: Contender, path: Path) -> None:
    model, optimizer = get_state_dict(job.model, job.optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(job.model, job.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


CONTENDERS: dict[str, tuple[str, Any, Any]] = {
    "flatshard": ("flatshard", save_ours, load_ours),
    "flatshard, dcp": ("flatshard", save_ours_by_torch, load_ours_by_torch),
    "FSDP2, dcp": ("FSDP2", save_by_torch, load_by_torch),
    "FSDP1, dcp": ("FSDP1", save_by_torch, load_by_torch),
}


def measure(args: argparse.Namespace) -> list[Table]:
    names, notes = args.only, []
    if importlib.util.find_spec("numpy") is None:
        names = [name for name in names if "dcp" not in name]
        notes = [f"no numpy, so without {', '.join(n for n in args.only if n not in names)}"]
    contenders = {name: make(name, args.layers, args.width) for name in names}
    nbytes = sum(p.numel() * p.element_size() for p in contenders[names[0]].model.parameters()) * 3
    directory = Path(shared(tempfile.mkdtemp() if dist.get_rank() == 0 else ""))
    saves: dict[str, list[Spent]] = {name: [] for name in ["floor", *names]}
    loads: dict[str, list[Spent]] = {name: [] for name in saves}
    try:
        for round_ in range(args.rounds + 1):
            progress(f"checkpoints, round {round_} of {args.rounds}")
            turn = round_ % len(saves)  # who comes first finds the disk busy with what was removed last
            for name in [*saves][turn:] + [*saves][:turn]:
                path = directory / f"{name.replace(', ', '-')}-{round_}"
                saved, loaded = floor(path, nbytes) if name == "floor" else both(contenders[name], path)
                if round_:  # the first warms up
                    saves[name].append(saved)
                    loads[name].append(loaded)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(directory)
    rows: dict[str, dict[str, Figure]] = {name: {} for name in saves}
    for verb, times in (("save", saves), ("load", loads)):
        floors = [wall for wall, _ in times["floor"]]
        for name, spent in times.items():
            wall, cpu = zip(*spent, strict=True)
            rows[name][f"{verb}, s"] = spread(wall)
            rows[name][f"{verb} over floor"] = over(wall, floors)
            rows[name][f"{verb} CPU, s"] = spread(cpu)
    return [
        Table(
            "checkpoint",
            f"saving and loading {nbytes / 2**20:.0f} MiB a rank, parameters and AdamW's state, {dist.get_world_size()} gloo "
            f"ranks; medians of {args.rounds} rounds",
            "a single write, flush and read of the same bytes, in the same rounds",
            rows,
            notes=notes,
            digits=3,
        )
    ]


def make(name: str, layers: int, width: int) -> Contender:
    kind, save, load = CONTENDERS[name]
    torch.manual_seed(0)
    model = build(kind, GPT(GPTConfig(256, 64, layers, width, heads=8)), Setting(Block))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 64, dtype=torch.int64)).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return Contender(model, optimizer, save, load)


Spent = tuple[float, float]  # seconds, and seconds of CPU


def both(job: Contender, path: Path) -> tuple[Spent, Spent]:
    saved = timed(lambda: job.save(job, path))
    loaded = timed(lambda: job.load(job, path))
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    return saved, loaded


def floor(path: Path, nbytes: int) -> tuple[Spent, Spent]:
    data = bytearray(nbytes)
    file = path.with_suffix(f".{dist.get_rank()}")

    def write() -> None:
        with open(file, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())

    def read() -> None:
        with open(file, "rb", buffering=0) as stream:
            stream.readinto(data)

    spent = timed(write), timed(read)
    file.unlink()
    return spent


def timed(run: Callable[[], object]) -> Spent:
    """Until the slowest rank is done; CPU of this one."""
    cpu = time.process_time()
    wall = seconds_of_all(run)
    return wall, time.process_time() - cpu


def shared(text: str) -> str:
    """Rank 0's ``text`` on every rank."""
    row = torch.zeros(1024, dtype=torch.uint8)
    row[: len(text.encode())] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    dist.broadcast(row, 0)
    return bytes(row.tolist()).rstrip(b"\0").decode()


BENCHMARK = Benchmark(
    measure, __doc__, ranks=2, rounds=(5, 11), sizes={"layers": 8, "width": 512}, contenders=list(CONTENDERS)
)

if __name__ == "__main__":
    BENCHMARK.main()
