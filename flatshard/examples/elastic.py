"""Kill a rank, and see training go on: on the ranks that are left, and then with a new one.

    python elastic.py        # two processes of this machine; a third takes the place of the one that dies

The script's first process keeps the store in which ranks meet. The others train, and one of them kills itself. In a real job,
the store is on a machine that lives as long as the job, and a launcher starts processes in place of those that die.
"""

import multiprocessing
import os
import signal
import time
import warnings

warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch needs none here

import torch
import torch.distributed as dist
from torch import nn

import flatshard

RANKS, STEPS, ROWS, DIES_IN = 2, 60, 32, 20


def train_process(port, dies):
    """Train as one rank. A process that comes later joins between two steps."""
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, is_master=False)
    world = flatshard.elastic.World(store, world_size=RANKS)  # in place of init_process_group()
    with torch.device("meta" if world.joins else "cpu"):  # a rank that joins gets its values from the others
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    flatshard.fully_shard(model, policy={nn.Linear})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job = flatshard.elastic.Job(world, model, optimizer, copies=1, log=say)  # copies=2: two may die at once

    for step in job.steps(range(STEPS)):  # a step that a death has ended is yielded again
        if dies and step == DIES_IN:
            say(f"step {step:>3}  rank {job.rank} kills itself")
            os.kill(os.getpid(), signal.SIGKILL)
        with job.attempt():
            loss = train_step(model, optimizer, step, job.rank, job.world_size)
            if step % 10 == 9 and job.rank == 0:
                say(f"step {step + 1:>3}  loss {loss:.4f}  {job.world_size} rank{'s' * (job.world_size > 1)}")
            if job.world_size < RANKS:
                time.sleep(0.2)  # these steps take no time, and the new process shall find some to take part in


def train_step(model, optimizer, step, rank, size):
    """Train on this rank's rows of the step's batch, which is the same for any number of ranks."""
    x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
    loss = (model(x) - x.sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach() / size
    dist.all_reduce(mean)
    return mean.item()


def say(text):
    print(text, flush=True)


def main():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ["PYTHONWARNINGS"] = (
        "ignore:Failed to initialize NumPy"  # for the process that imports torch for all ranks
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "flatshard.elastic"])

    def start(dies):
        process = context.Process(target=train_process, args=(store.port, dies))
        process.start()
        return process

    processes = [start(dies=number == 1) for number in range(RANKS)]
    processes[1].join()
    say("starting another process")
    processes[1] = start(dies=False)
    for process in processes:
        process.join()
    return max(process.exitcode for process in processes)


if __name__ == "__main__":
    raise SystemExit(main())
