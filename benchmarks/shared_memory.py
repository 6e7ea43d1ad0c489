"""Memory of the ranks of one host in a training step: their tensors, and their shared-memory segments.

    python benchmarks/shared_memory.py

It starts two gloo ranks; for more: ``torchrun --standalone --nproc-per-node 4 benchmarks/shared_memory.py``. A GPT of 12
blocks runs forward, backward and a step of AdamW (foreach) three times; the last is counted. Bytes of tensors are as in
``memory.py``, without those in shared memory. A rank's segment counts with all pages that the system has allocated for it, in
use or not. Other ranks' mappings of it are the same memory. Both are counted after every operation, and the figure is the
maximum of their sum, on the rank that has the most. It varies a little with the ranks' relative progress.

The floor is the memory of the same ranks if all data is sent by gloo.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
from dataclasses import replace

import checkout  # noqa: F401
import torch
import torch.distributed as dist
from contenders import Job, Setting
from counting import LiveBytes
from gpt import Block, GPTConfig
from suite import OURS, Benchmark, Figure, Table, by_column, progress

from flatshard._base import environment
from flatshard._comm import backends
from flatshard._comm.shared_memory.segment import Mapping

COLUMNS = {
    "fp32": Setting(Block),
    "bf16": Setting(Block, bf16=True),
    "fp32, 4 x no_sync": Setting(Block, microbatches=4, reduced=False),
}
TENSORS = "flatshard, its tensors"


class WithSegments(LiveBytes):
    """Bytes of tensors outside of shared memory, and of the pages of this rank's segments."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = 0
        """Peak bytes of tensors alone."""

    def now(self) -> int:
        shakes = [memory.handshake for memory in backends._memories.values()]
        own = [each.own for each in shakes if each.own is not None]
        mapped: list[Mapping] = [segment.mapping for segment in own]
        mapped += [peer.mapping for each in shakes for peer in each.peers.values()]
        places = [(each.bytes.data_ptr(), each.bytes.data_ptr() + each.bytes.nbytes) for each in mapped]
        self._known = {
            key: reference
            for key, reference in self._known.items()
            if (storage := torch.UntypedStorage._new_with_weak_ptr(reference.cdata)) is None
            or not any(start <= storage.data_ptr() < stop for start, stop in places)
        }
        tensors = super().now()
        self.tensors = max(self.tensors, tensors)
        return tensors + sum(512 * os.fstat(segment._fd).st_blocks for segment in own)


def held(setting: Setting, config: GPTConfig, least: int) -> tuple[int, int]:
    """Return a rank's peak bytes, and those of tensors. ``least`` is the value of ``FLATSHARD_SHARED_MEMORY``."""
    before, environment.SHARED_MEMORY = environment.SHARED_MEMORY, least
    tokens = torch.zeros(4, config.context, dtype=torch.int64)
    # The group is new, as its segments are freed with it.
    group = dist.new_group(range(dist.get_world_size()))
    with WithSegments() as live:
        adamw = functools.partial(torch.optim.AdamW, foreach=True)
        options = {"process_group": group}
        job = Job(OURS, config, replace(setting, options=options), tokens, adamw)
        live.add(job.model.parameters())
        for _ in range(2):
            job.step()
        dist.barrier()
        live.tensors = 0
        with live.watch():
            job.step()
    most = torch.tensor([live.peak, live.tensors])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    environment.SHARED_MEMORY = before
    del job, live
    gc.collect()
    dist.destroy_process_group(group)
    peak, tensors = most.tolist()
    return peak, tensors


def measure(args: argparse.Namespace) -> list[Table]:
    config = GPTConfig(512, args.context, args.layers, args.width, heads=8)
    columns: dict[str, dict[str, Figure]] = {}
    floors = list[str]()
    for column, setting in COLUMNS.items():
        progress(f"shared memory, {column}")
        floor, _ = held(setting, config, 0)
        peak, tensors = held(setting, config, environment.SHARED_MEMORY)
        columns[column] = {OURS: Figure(peak / floor), TENSORS: Figure(tensors / floor)}
        floors.append(f"{column} {floor / 2**20:.1f}")
    what = f"GPT of {config.layers} blocks of width {config.width}, {dist.get_world_size()} ranks of one host"
    return [
        Table(
            "memory_of_one_host",
            f"the most that a rank holds in a training step over what it holds by gloo alone ({what})",
            f"by gloo alone, MiB: {', '.join(floors)}",
            by_column(columns),
            digits=3,
        )
    ]


BENCHMARK = Benchmark(measure, __doc__, ranks=2, sizes={"layers": 12, "width": 256, "context": 64})

if __name__ == "__main__":
    BENCHMARK.main()
