"""Time to save and load a GPT with its AdamW state, compared with FSDP2 and FSDP1, over gloo on CPU, interleaved.

    python benchmarks/checkpoint.py

Every contender has the same model. It saves the model and optimizer state to files of its own, flushes them to disk, and
loads them. A round runs each contender once. Figures are medians over the rounds, with the fastest and the slowest, and
ratios to the floor: each rank writes its bytes to a file with a single call, flushes it, and reads it. In a second floor, the
disk starts on each 4 MiB as they are written, as in flatshard: no save is faster on this disk. All contenders read what they
wrote from the page cache. ``dcp`` is ``torch.distributed.checkpoint``, which needs numpy to send objects (``pip install -e
'.[bench]'``); ``--alone`` leaves out it and the contenders that use it.

CPU is rank 0's time, user and system, of all its threads. It is more reliable than seconds if others use the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contenders import Job, Setting, numel
from gpt import Block, GPTConfig
from suite import Benchmark, Figure, Table, over, progress, seconds_of_all, spread
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import flatshard
from flatshard.checkpoint._disk import NewFile

Way = dict[str, Callable[[Path], object]]
"""Functions that ``save`` to a path and ``load`` from it."""


def ours(job: Job) -> Way:
    state = {"model": job.model, "optimizer": job.optimizer}
    return {
        "save": lambda path: flatshard.save_checkpoint(path, state),
        "load": lambda path: flatshard.load_checkpoint(path, state),
    }


def ours_by_torch(job: Job) -> Way:
    """Save by torch's functions, with flatshard's state dicts, writer and reader."""

    def state(for_load: bool) -> dict[str, Any]:
        optimizer = flatshard.checkpoint.optim_state_dict(job.model, job.optimizer, for_load=for_load)
        return {"model": job.model.state_dict(), "optimizer": optimizer}

    def load(path: Path) -> None:
        loaded = state(for_load=True)
        dcp.load(loaded, storage_reader=flatshard.checkpoint.FileSystemReader(path))
        job.model.load_state_dict(loaded["model"])
        flatshard.checkpoint.load_optim_state_dict(job.model, job.optimizer, loaded["optimizer"])

    return {
        "save": lambda path: dcp.save(
            state(for_load=False), storage_writer=flatshard.checkpoint.FileSystemWriter(path)
        ),
        "load": load,
    }


def by_torch(job: Job) -> Way:
    def state() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(job.model, job.optimizer), strict=True))

    def load(path: Path) -> None:
        loaded = state()
        dcp.load(loaded, checkpoint_id=path)
        model, optimizer = loaded["model"], loaded["optimizer"]
        set_state_dict(job.model, job.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    return {"save": lambda path: dcp.save(state(), checkpoint_id=path), "load": load}


def floor(nbytes: int) -> Way:
    """Write and read one file per rank."""
    data = bytearray(nbytes)

    def save(path: Path) -> None:
        path.mkdir(exist_ok=True)
        with open(path / str(dist.get_rank()), "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())

    def load(path: Path) -> None:
        with open(path / str(dist.get_rank()), "rb", buffering=0) as stream:
            stream.readinto(data)

    return {"save": save, "load": load}


def floor_begun(nbytes: int) -> Way:
    """Write and read one file per rank, starting the disk on each chunk as it is written."""
    data = memoryview(bytearray(nbytes))

    def save(path: Path) -> None:
        path.mkdir(exist_ok=True)
        with NewFile(path / str(dist.get_rank())) as file:
            for at in range(0, nbytes, 4 * 2**20):
                file.write(data[at : at + 4 * 2**20])
            file.flush()

    return {"save": save}


CONTENDERS: dict[str, tuple[str, Callable[[Job], Way]]] = {
    "flatshard": ("flatshard", ours),
    "flatshard, dcp": ("flatshard", ours_by_torch),
    "FSDP2, dcp": ("FSDP2", by_torch),
    "FSDP1, dcp": ("FSDP1", by_torch),
}


def contender(name: str, config: GPTConfig) -> Way:
    kind, way = CONTENDERS[name]
    job = Job(kind, config, Setting(Block), torch.zeros(1, 64, dtype=torch.int64))
    job.step()
    return way(job)


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds until the slowest rank is done, and this rank's CPU seconds."""
    cpu = time.process_time()
    return seconds_of_all(run), time.process_time() - cpu


def shared_directory() -> Path:
    """Make a new directory, the same on every rank."""
    path = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    row = torch.zeros(1024, dtype=torch.uint8)  # broadcast_object_list would need numpy
    row[: len(path[0].encode())] = torch.tensor(list(path[0].encode()), dtype=torch.uint8)
    dist.broadcast(row, 0)
    return Path(bytes(row.tolist()).rstrip(b"\0").decode())


def measure(args: argparse.Namespace) -> list[Table]:
    names = [name for name in CONTENDERS if not (args.alone and "dcp" in name)]
    if not args.alone and importlib.util.find_spec("numpy") is None:
        raise SystemExit(
            "torch.distributed.checkpoint needs numpy: pip install -e '.[bench]', or --alone, without its users"
        )
    config = GPTConfig(256, 64, args.layers, args.width, heads=8)
    nbytes = 3 * 4 * numel(config) // dist.get_world_size()
    ways = {
        "floor": floor(nbytes),
        "floor, begun early": floor_begun(nbytes),
        **{name: contender(name, config) for name in names},
    }
    directory = shared_directory()
    spent: dict[tuple[str, str], list[tuple[float, float]]] = {}
    try:
        for number in range(args.rounds + 1):
            progress(f"checkpoints, round {number} of {args.rounds}")
            turn = number % len(ways)  # the first contender finds the disk busy with the last removal
            for name in [*ways][turn:] + [*ways][:turn]:
                path = directory / f"{name.replace(', ', '-')}-{number}"
                for verb, run in ways[name].items():
                    found = timed(partial(run, path))
                    if number:  # the first round warms up
                        spent.setdefault((name, verb), []).append(found)
                if dist.get_rank() == 0:
                    shutil.rmtree(path)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(directory)
    rows: dict[str, dict[str, Figure]] = {name: {} for name in ways}
    for (name, verb), times in spent.items():
        wall, cpu = zip(*times, strict=True)
        rows[name][f"{verb}, s"] = spread(wall)
        rows[name][f"{verb} over floor"] = over(wall, [seconds for seconds, _ in spent["floor", verb]])
        rows[name][f"{verb} CPU, s"] = spread(cpu)
    return [
        Table(
            "checkpoint",
            f"saving and loading {nbytes / 2**20:.0f} MiB a rank, parameters and AdamW's state, "
            f"{dist.get_world_size()} gloo ranks; medians of {args.rounds} rounds",
            "a single write, flush and read of the same bytes, one file a rank, in the same rounds; begun early: the disk is "
            "told of each 4 MiB as they are written",
            rows,
            digits=3,
        )
    ]


BENCHMARK = Benchmark(
    measure,
    __doc__,
    ranks=2,
    rounds=(5, 11),
    sizes={"layers": 8, "width": 512},
    flags={"alone": "without those that use torch.distributed.checkpoint"},
)

if __name__ == "__main__":
    BENCHMARK.main()
