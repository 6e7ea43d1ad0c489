"""Train a small sharded model, save it, and resume.

    python train.py                    # two ranks of this machine
    python train.py --steps 200        # resumes from the checkpoint of the first run
    torchrun --standalone --nproc-per-node 4 train.py --steps 300    # resumes on four ranks

Ranks are on GPUs if there are any.
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

import flatshard

STEPS_PER_LINE = 20
DEVICE = (
    torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def batch_of(step):
    """Return this rank's rows: inputs, and the place of the largest of their first ten numbers.

    They follow from step, rank and number of ranks, so a run that resumes sees the rows that it would have seen.
    """
    seed = step * dist.get_world_size() + dist.get_rank()
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return x, x[:, :10].argmax(1)


def main(folder="run", steps=100):
    torch.manual_seed(0)  # the same initial values on every rank
    model = nn.Sequential(*[Block(64) for _ in range(4)], nn.Linear(64, 10)).to(DEVICE)
    flatshard.fully_shard(model, policy={Block})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer, "step": 0}

    checkpoint = Path(folder) / "newest"
    if checkpoint.exists():
        state = flatshard.load_checkpoint(checkpoint, state)
        say(f"resumed after step {state['step']}")
    else:
        say(flatshard.describe(model))

    total = torch.zeros((), device=DEVICE)
    for step in range(state["step"] + 1, steps + 1):
        x, y = batch_of(step)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm of the full gradient
        optimizer.step()
        total += loss.detach()
        if step % STEPS_PER_LINE == 0:
            dist.all_reduce(total)  # each rank has the loss of its own rows
            say(f"step {step:>4}  loss {total.item() / STEPS_PER_LINE / dist.get_world_size():.3f}")
            total.zero_()
    if state["step"] < steps:
        flatshard.save_checkpoint(checkpoint, {**state, "step": steps}, overwrite=True)
        say(f"saved {checkpoint}")


def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small sharded model, save it, and resume.")
    parser.add_argument("--folder", default="run", help="where checkpoints are")
    parser.add_argument("--steps", type=int, default=100, help="the last step")
    options = parser.parse_args()
    if "RANK" in os.environ:  # torchrun has started this process
        if DEVICE.type == "cuda":
            torch.cuda.set_device(DEVICE)
        dist.init_process_group()
        main(options.folder, options.steps)
        dist.destroy_process_group()
    else:
        from torch.distributed.run import main as torchrun

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun(["--standalone", "--nproc-per-node", "2", *sys.argv])
