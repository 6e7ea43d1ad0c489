"""Ranks that a notebook starts: its ``__main__`` has no file, as that of a script read from stdin has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TRAIN = """
import pathlib, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
import flatshard

def train(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = flatshard.fully_shard(nn.Linear(3, 3))
    model(torch.full((2, 3), float(rank))).sum().backward()
    total = flatshard.clip_grad_norm_(model, 1.0)
    if rank == 0:
        pathlib.Path(f"{store}.norm").write_text(f"{total.item():.4f}")
    dist.destroy_process_group()
"""
NOTEBOOK = """
nn.Linear(300, 300)(torch.ones(300, 300)).sum().backward()  # cells that compute before
mp.start_processes(train, (sys.argv[1],), nprocs=2, start_method="fork")
"""


def test_ranks_by_fork(tmp_path: Path):
    notebook = TRAIN + "vars(sys.modules['__main__']).pop('__file__', None)\n" + NOTEBOOK  # IPython's has none
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    store = tmp_path / "store"
    ran = subprocess.run(
        [sys.executable, "-", str(store)], input=notebook, text=True, capture_output=True, env=env, timeout=100
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    # Of bias: 2 per row and rank; of weight: 2 on rank 1 only. Averaged, the norm is sqrt(3 * 2**2 + 9 * 1**2).
    assert (tmp_path / "store.norm").read_text() == f"{21**0.5:.4f}"
