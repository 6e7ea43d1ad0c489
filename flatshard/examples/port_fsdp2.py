"""A script for FSDP2, before and after it was ported: one import differs.

    python port_fsdp2.py before --steps 40         # trains with FSDP2 on two ranks, and saves
    python port_fsdp2.py after --steps 80          # resumes with flatshard, also on another number of ranks:
    torchrun --standalone --nproc-per-node 4 port_fsdp2.py after --steps 120

The file is written by torch's functions, in both cases as one process would write it, and either resumes from the other's.
``p.full_tensor()`` and ``p.placements`` have no counterpart here: flatshard.summon_full_params shows full parameters.
"""

import argparse
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch needs none here

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

ROWS, MICROBATCHES, STEPS_PER_LINE = 48, 2, 10
DEVICE = (
    torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
)


def names_of(version):
    """Return the names that the script takes from FSDP2, or from flatshard. This is all that changes."""
    if version == "before":
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    else:
        from flatshard.fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
    return FSDPModule, MixedPrecisionPolicy, fully_shard


def main(version, folder="run", steps=40):
    FSDPModule, MixedPrecisionPolicy, fully_shard = names_of(version)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(3)])
    model.to(DEVICE)
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = load(folder, model, optimizer)

    total = torch.zeros((), device=DEVICE)
    for step in range(done + 1, steps + 1):
        x = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(step))  # of all ranks
        own = x.chunk(dist.get_world_size())[dist.get_rank()].to(DEVICE)
        optimizer.zero_grad()
        for number, rows in enumerate(own.chunk(MICROBATCHES), 1):
            if isinstance(model, FSDPModule):  # a plain model has no such method
                model.set_requires_gradient_sync(number == MICROBATCHES)
            loss = (model(rows) - rows.sin()).square().mean() / MICROBATCHES
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % STEPS_PER_LINE == 0:
            dist.all_reduce(total)
            say(f"step {step:>4}  loss {total.item() / STEPS_PER_LINE / dist.get_world_size():.4f}")
            total.zero_()
    save(folder, model, optimizer, steps)


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(folder, model, optimizer, step):
    values, state = get_state_dict(model, optimizer, options=FULL)  # all ranks call it, and rank 0 has the result
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save({"model": values, "optimizer": state, "step": step}, Path(folder) / "newest.pt")
    dist.barrier()


def load(folder, model, optimizer):
    """Return the number of steps that are done. Each rank takes its shards from the file."""
    path = Path(folder) / "newest.pt"
    if not path.exists():
        return 0
    saved = torch.load(path, mmap=True, map_location="cpu")
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=FULL)
    say(f"resumed after step {saved['step']}, on {dist.get_world_size()} ranks")
    return saved["step"]


def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A script for FSDP2, before and after it was ported.")
    parser.add_argument("version", choices=["before", "after"])
    parser.add_argument("--folder", default="run", help="where the file is")
    parser.add_argument("--steps", type=int, default=40, help="the last step")
    options = parser.parse_args()
    if "RANK" in os.environ:  # torchrun has started this process
        if DEVICE.type == "cuda":
            torch.cuda.set_device(DEVICE)
        dist.init_process_group()
        main(options.version, options.folder, options.steps)
        dist.destroy_process_group()
    else:
        from torch.distributed.run import main as torchrun

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun(["--standalone", "--nproc-per-node", "2", *sys.argv])
