"""Time to save and to load a GPT with its AdamW state, against FSDP2 and FSDP1, over gloo on CPU, interleaved.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/checkpoint.py

Every contender holds the same model and saves it with its optimizer's state to files of its own, flushed to disk; then it
loads them back. A round does all of them once; figures are medians over the rounds, with the fastest and the slowest, and
ratios to the floor: each rank writes its bytes to one file with a single call, flushes it, and reads it back.
What was just written is read from the page cache, by all of them. Peers need numpy, to send objects.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, GPTConfig
from step_time import join, shard_flatshard, shard_fsdp1, shard_fsdp2
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
    state = {"model": job.model.state_dict(), "optimizer": flatshard.optim_state_dict(job.model, job.optimizer)}
    dcp.save(state, checkpoint_id=path)


def load_ours_by_torch(job: Contender, path: Path) -> None:
    optimizer = flatshard.optim_state_dict(job.model, job.optimizer, for_load=True)
    state = {"model": job.model.state_dict(), "optimizer": optimizer}
    dcp.load(state, checkpoint_id=path)
    job.model.load_state_dict(state["model"])
    flatshard.load_optim_state_dict(job.model, job.optimizer, state["optimizer"])


def save_by_torch(job: Contender, path: Path) -> None:
    model, optimizer = get_state_dict(job.model, job.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def load_by_torch(job: Contender, path: Path) -> None:
    model, optimizer = get_state_dict(job.model, job.optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(job.model, job.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


CONTENDERS: dict[str, tuple[Callable[[GPT], nn.Module], Any, Any]] = {
    "flatshard": (shard_flatshard, save_ours, load_ours),
    "flatshard, dcp": (shard_flatshard, save_ours_by_torch, load_ours_by_torch),
    "FSDP2, dcp": (shard_fsdp2, save_by_torch, load_by_torch),
    "FSDP1, dcp": (shard_fsdp1, save_by_torch, load_by_torch),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where to write (default: the temporary directory)")
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), default=list(CONTENDERS))
    args = parser.parse_args()
    join()
    names = args.only
    if importlib.util.find_spec("numpy") is None:
        names = [n for n in names if n == "flatshard"]
        say(f"no numpy, so without {', '.join(n for n in args.only if n not in names)}")

    contenders = {name: make(name, args.layers, args.width) for name in names}
    nbytes = sum(p.numel() * p.element_size() for p in contenders[names[0]].model.parameters()) * 3
    directory = Path(shared(tempfile.mkdtemp(dir=args.directory) if dist.get_rank() == 0 else ""))
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ["floor", *names]}
    try:
        for round_ in range(args.rounds + 1):
            for name, (saves, loads) in times.items():
                path = directory / f"{name.replace(', ', '-')}-{round_}"
                spent = floor(path, nbytes) if name == "floor" else both(contenders[name], path)
                if round_:  # the first warms up
                    saves.append(spent[0])
                    loads.append(spent[1])
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(directory)
    report(times, nbytes)
    dist.destroy_process_group()


def make(name: str, layers: int, width: int) -> Contender:
    shard, save, load = CONTENDERS[name]
    torch.manual_seed(0)
    model = shard(GPT(GPTConfig(256, 64, layers, width, heads=8)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 64, dtype=torch.int64)).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return Contender(model, optimizer, save, load)


def both(job: Contender, path: Path) -> tuple[float, float]:
    saved = timed(lambda: job.save(job, path))
    loaded = timed(lambda: job.load(job, path))
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    return saved, loaded


def floor(path: Path, nbytes: int) -> tuple[float, float]:
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


def timed(function: Callable[[], object]) -> float:
    """Seconds until the slowest rank is done."""
    dist.barrier()
    began = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - began


def shared(text: str) -> str:
    """Rank 0's ``text`` on every rank."""
    row = torch.zeros(1024, dtype=torch.uint8)
    row[: len(text.encode())] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    dist.broadcast(row, 0)
    return bytes(row.tolist()).rstrip(b"\0").decode()


def report(times: dict[str, tuple[list[float], list[float]]], nbytes: int) -> None:
    say(f"{dist.get_world_size()} ranks, {nbytes / 2**20:.0f} MiB a rank: parameters and AdamW's state; seconds")
    say(f"{'':<16}{'save':>8}{'(min-max)':>16}{'/ floor':>9}{'load':>10}{'(min-max)':>16}{'/ floor':>9}")
    floors = [statistics.median(values) for values in times["floor"]]
    for name, both_times in times.items():
        cells = ""
        for values, least in zip(both_times, floors, strict=True):
            median, spread = statistics.median(values), f"({min(values):.3f}-{max(values):.3f})"
            cells += f"{median:>8.3f}{spread:>16}{median / least:>9.2f}" + "  " * (values is both_times[0])
        say(f"{name:<16}{cells}")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
