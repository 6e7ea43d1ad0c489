"""A folder of Hugging Face, two ranks, a checkpoint, three ranks, and a folder again: time and memory of each step.

    python benchmarks/round_trip.py [--layers 8]

Needs transformers, and three times the model on the disk: 2.2 GB with 8 layers. Each step is timed until its slowest rank is
done. The peak is the resident memory of rank 0, minus what it had before the step, which includes its shards. The folders at
both ends must have the same bytes, and ``from_pretrained`` reads the last.
"""

from __future__ import annotations

import argparse
import filecmp
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
import torch.distributed as dist
from pretrained import on_meta, resident

import flatshard

FORK = multiprocessing.get_context("fork")
SIZES = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
FILE = 500 * 10**6  # bytes


def sharded(folder: Path) -> Any:
    from flatshard.integrations.state import policy_of

    model = on_meta(folder)
    flatshard.fully_shard(model, policy=policy_of(model))
    model.to_empty(device="cpu")
    model.state_dict()  # adopts the memory
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.02)
    return model


def timed(step: str, run: Callable[[], object]) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    dist.barrier()
    before, began = resident("VmRSS"), time.perf_counter()
    run()
    dist.barrier()
    if dist.get_rank() == 0:
        peak = (resident("VmHWM") - before) / 2**20
        print(f"| {step} on {dist.get_world_size()} | {time.perf_counter() - began:.2f} | {peak:.0f} |", flush=True)


def first_job(folder: Path) -> None:
    from flatshard.integrations.pretrained import load_pretrained

    begin, state = folder / "begin", {"model": sharded(folder)}
    timed("export", lambda: flatshard.checkpoint.export_safetensors(state["model"], begin, max_file_bytes=FILE))
    state = {"model": sharded(folder)}
    timed("load_pretrained", lambda: load_pretrained(state["model"], begin))
    timed("save_checkpoint", lambda: flatshard.save_checkpoint(folder / "checkpoint", state))


def second_job(folder: Path) -> None:
    state = {"model": sharded(folder)}
    timed("load_checkpoint", lambda: flatshard.load_checkpoint(folder / "checkpoint", state))
    timed(
        "export", lambda: flatshard.checkpoint.export_safetensors(state["model"], folder / "end", max_file_bytes=FILE)
    )


def run_rank(job: Callable[[Path], None], folder: Path, rank: int, size: int) -> None:
    store = f"file://{folder}/{job.__name__}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    torch.set_num_threads(1)
    job(folder)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    layers = parser.parse_args().layers
    from transformers import AutoModelForCausalLM, LlamaConfig

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = LlamaConfig(**SIZES, num_key_value_heads=16, num_hidden_layers=layers)
        config.save_pretrained(folder)
        print("| step | seconds | peak over the shards, MiB |\n|---|---|---|", flush=True)
        for job, size in ((first_job, 2), (second_job, 3)):
            ranks = [FORK.Process(target=run_rank, args=(job, folder, rank, size)) for rank in range(size)]
            for each in ranks:
                each.start()
            for each in ranks:
                each.join()
                assert each.exitcode == 0
        begin, end = folder / "begin", folder / "end"
        names = sorted(file.name for file in end.iterdir())
        assert names == sorted(file.name for file in begin.iterdir())
        assert all(filecmp.cmp(begin / file, end / file, shallow=False) for file in names)
        config.save_pretrained(end)
        model = AutoModelForCausalLM.from_pretrained(end)
        print(f"{sum(p.nbytes for p in model.parameters()) / 1e9:.2f} GB in {len(names)} files, the same at both ends")


if __name__ == "__main__":
    main()
