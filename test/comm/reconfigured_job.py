"""A job of three ranks that loses one: the group is reconfigured, and what the error says is done. Run by test_collectives.

``python reconfigured_job.py RANK FOLDER``: ranks meet in FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from restarts import in_one_process, network, train

import flatshard

RANK, FOLDER = int(sys.argv[1]), Path(sys.argv[2])


class Place:
    """What ``train`` asks of a test's context."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()


def adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


def reconfigure(store: dist.Store, number: int, size: int) -> None:
    store.set(f"{number}/{RANK}", dist._get_reconfigure_handle())
    handles = [store.get(f"{number}/{rank}").decode() for rank in range(size)]
    dist._reconfigure(uuid=number, handles=handles).wait()


def shard():
    model = flatshard.fully_shard(network(1), policy={torch.nn.Linear})
    return model, adamw(model.parameters())


store = dist.FileStore(str(FOLDER / "store"), 3)
dist.init_process_group("gloo", store=store, rank=RANK, world_size=3, enable_reconfigure=True)
reconfigure(store, 0, 3)
model, optimizer = shard()
model.load_state_dict(network(0).state_dict())
train(model, optimizer, 0, Place())
flatshard.save_checkpoint(FOLDER / "checkpoint", {"model": model, "optimizer": optimizer})
if RANK < 2:
    reconfigure(store, 1, 2)
    try:
        model(torch.zeros(1, 5, dtype=torch.float64))
    except flatshard.CollectiveError as e:
        print(e)
    # What it says:
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(str(FOLDER / "again"), 2), rank=RANK, world_size=2)
    model, optimizer = shard()
    flatshard.load_checkpoint(FOLDER / "checkpoint", {"model": model, "optimizer": optimizer})
    train(model, optimizer, 2, Place())
    for name, value in flatshard.checkpoint.full_state_dict(model).items():
        torch.testing.assert_close(value, in_one_process(adamw, 4)[name])
    print("goes on")
