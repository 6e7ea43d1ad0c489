"""A rank of a replica group, for ``test_torchft``."""

import gc
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo

import flatshard
from flatshard.integrations.torchft import average_gradients, state_functions


def main(group: int, rank: int, size: int, port: int, lighthouse: str, folder: Path, last: Path) -> None:
    """Train, and print a line for each committed step: step, number of groups, and a sum over the group's parameters.

    Stop after the step whose number is in the file ``last``, as soon as that exists.
    """
    gc.freeze()  # a collection would copy all shared pages
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    for stream, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{kind}", os.O_WRONLY | os.O_CREAT), stream)
    store = dist.TCPStore("localhost", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("shards", store), rank=rank, world_size=size)
    torch.manual_seed(group)  # groups start with different values, and must adopt the first one's
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    flatshard.fully_shard(model, policy={nn.Linear}, sync_module_states=True)
    adamw = torch.optim.AdamW(flatshard.flat_parameters(model), lr=0.05)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        rank=rank,
        world_size=size,
        store_addr="localhost",
        store_port=port,
        hostname="localhost",
        lighthouse_addr=lighthouse,
        replica_id=f"group{group}",
        timeout=timedelta(seconds=20),
        use_async_quorum=False,
        **state_functions(model, adamw),
    )
    optimizer = Optimizer(manager, adamw)
    while not last.exists() or manager.current_step() <= int(last.read_text()):
        time.sleep(0.05)  # other groups join between steps
        optimizer.zero_grad()
        torch.manual_seed(1000 * manager.current_step() + 10 * (manager.participating_rank() or 0) + rank)
        x = torch.randn(16, 6)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        average_gradients(manager, flatshard.flat_parameters(model))
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            whole = flatshard.checkpoint.full_state_dict(model)
            values = sum(v.double().abs().sum().item() for v in whole.values())
            if rank == 0:
                print(f"{before} {manager.num_participants()} {values:.12f} {loss.item():.4f}", flush=True)
    manager.shutdown(wait=False)
    dist.destroy_process_group()
