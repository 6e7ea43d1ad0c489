"""Time and memory to bring a folder of Hugging Face into shards, on two ranks over gloo on CPU.

    python benchmarks/pretrained.py

Needs transformers and safetensors. Every load runs in new processes, as a peak is that of a process: the most resident memory
until the last rank has its shards, minus the memory before. The time is that of the slowest rank. Rounds are interleaved. The
floor: each rank reads its share of the bytes into memory of its own. Files are read from the page cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
import torch.distributed as dist

import flatshard

RANKS = 2
FORK = multiprocessing.get_context("fork")
SIZES = {"vocab_size": 16000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12}


def on_meta(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def sharded(folder: Path) -> Any:
    from flatshard.integrations.state import policy_of

    model = on_meta(folder)
    flatshard.fully_shard(model, policy=policy_of(model))
    return model.to_empty(device="cpu")


def ours(folder: Path) -> object:
    model = sharded(folder)
    flatshard.checkpoint.load_safetensors(model, folder)
    return model


def ours_as_transformers(folder: Path) -> object:
    from flatshard.integrations.pretrained import load_pretrained

    model = sharded(folder)
    load_pretrained(model, folder)
    return model


def loaded_by_all(folder: Path) -> object:
    from transformers import AutoModelForCausalLM

    from flatshard.integrations.state import policy_of

    model = AutoModelForCausalLM.from_pretrained(folder)
    return flatshard.fully_shard(model, policy=policy_of(model))


def loaded_by_rank_0(folder: Path) -> object:
    from transformers import AutoModelForCausalLM

    from flatshard.integrations.state import policy_of

    model = AutoModelForCausalLM.from_pretrained(folder) if dist.get_rank() == 0 else on_meta(folder)
    return flatshard.fully_shard(model, policy=policy_of(model), sync_module_states=True)


def fsdp2(folder: Path) -> object:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    model = on_meta(folder)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    state = model.state_dict()
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    return model


def floor(folder: Path) -> object:
    files = sorted(folder.glob("*.safetensors"))
    found = []
    for file in files:
        size = file.stat().st_size // RANKS
        data = bytearray(size)
        with file.open("rb", buffering=0) as stream:
            stream.seek(dist.get_rank() * size)
            stream.readinto(data)
        found.append(data)
    return found


LOADS: dict[str, Callable[[Path], object]] = {
    "load_safetensors": ours,
    "load_pretrained": ours_as_transformers,
    "from_pretrained on all ranks, fully_shard": loaded_by_all,
    "from_pretrained on rank 0, fully_shard(sync_module_states=True)": loaded_by_rank_0,
    "FSDP2, torch's HuggingFaceStorageReader": fsdp2,
    "one read of the rank's bytes": floor,
}


def resident(field: str) -> int:
    """Return this process's resident memory: now (``VmRSS``) or at its peak (``VmHWM``)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def run_rank(name: str, folder: Path, rank: int, store: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    dist.all_reduce(torch.ones(1))
    before, began = resident("VmRSS"), time.perf_counter()
    model = LOADS[name](folder)
    dist.barrier()
    results.put((time.perf_counter() - began, resident("VmHWM") - before))
    dist.barrier()
    del model
    dist.destroy_process_group()


def in_processes(*calls: tuple[Any, ...]) -> None:
    """Run each call in a process that begins with the modules of this one, and as little memory."""
    processes = [FORK.Process(target=call[0], args=call[1:]) for call in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def run(name: str, folder: Path) -> tuple[float, int]:
    """Return the seconds and the bytes of the rank with the most."""
    results = FORK.SimpleQueue()
    with tempfile.TemporaryDirectory() as store:
        in_processes(*((run_rank, name, folder, rank, f"{store}/store", results) for rank in range(RANKS)))
    seconds, nbytes = zip(*(results.get() for _ in range(RANKS)), strict=True)
    return max(seconds), max(nbytes)


def save(folder: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder, max_shard_size="50MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    import torch.distributed.checkpoint
    import transformers.models.llama.modeling_llama

    import flatshard.integrations.pretrained  # noqa: F401

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        in_processes((save, folder))
        nbytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in LOADS}
        for _ in range(options.rounds):
            for name in LOADS:
                found[name].append(run(name, Path(folder)))
    print(f"{nbytes / 1e6:.0f} MB of parameters on {RANKS} ranks, torch {torch.__version__}, {options.rounds} rounds")
    print("| load | seconds (fewest, most) | peak memory of a rank, over its shards |\n|---|---|---|")
    for name, each in found.items():
        seconds = [s for s, _ in each]
        peak = statistics.median(n for _, n in each) * RANKS / nbytes
        print(f"| {name} | {statistics.median(seconds):.2f} ({min(seconds):.2f}, {max(seconds):.2f}) | {peak:.2f} |")


if __name__ == "__main__":
    main()
