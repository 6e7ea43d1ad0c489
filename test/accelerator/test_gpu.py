"""Memory and overlap of collectives with compute on a real accelerator. Skipped without one.

No check needs values, so one GPU and the fake group are enough. ``benchmarks/gpu.py`` checks numbers on all GPUs.
"""

from typing import Any

import devices
import pytest
import torch
import torch.distributed as dist
from models import Mlp
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from flatshard import CPUOffload, ShardingStrategy, fully_shard
from flatshard._comm.fake_group import FakeCollectives


class Block(Mlp):
    def __init__(self, width: int) -> None:
        super().__init__(width, 2 * width + 1)


class Net(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"strategy": ShardingStrategy.SHARD_GRAD_OP}, {"cpu_offload": CPUOffload()}])
def test_memory_is_the_same_in_every_step(world, options):
    """Without record_stream, the allocator sees one order of events, whatever the device's timing."""
    world(8)
    devices.Cuda()  # allocates cuBLAS's workspaces, 32 MiB on Hopper, which are nobody's here
    width, blocks = 512, 6
    model = fully_shard(Net(blocks, width).cuda(), policy={Block}, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x = torch.randn(4, width, device="cuda")
    seen = []
    for _ in range(50):
        torch.cuda.reset_peak_memory_stats()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()))
    assert len(set(seen[3:])) == 1, seen
    block = sum(p.numel() for p in Block(width).parameters()) * 4
    between, peak, _ = seen[-1]
    if not options:  # the current unit, a prefetched one, reductions in flight; the head; activations
        assert peak - between < 6 * block
        assert between < 2 * blocks * block / 8 + block


class SlowCollectives(FakeCollectives):
    """All-gathers and reductions that keep the device busy for about 0.4 ms on their stream."""

    CYCLES = 800_000

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)

    def all_gather(self, output: Tensor, shard: Tensor) -> Any:
        torch.cuda._sleep(self.CYCLES)  # type: ignore[no-untyped-call]
        return super().all_gather(output, shard)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Any:
        torch.cuda._sleep(self.CYCLES)  # type: ignore[no-untyped-call]
        return super().reduce_scatter(output, input)


def hidden(model: nn.Module, x: Tensor) -> float:
    """Return the fraction of the collectives' time in which the device computed, according to a profile of one step."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        model(x).square().mean().backward()
        torch.cuda.synchronize()
    kernels = [e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    slow = [e.time_range for e in kernels if "spin" in e.name]
    busy = [e.time_range for e in kernels if "spin" not in e.name and "Mem" not in e.name]
    assert slow
    assert busy
    overlap = sum(max(0, min(s.end, b.end) - max(s.start, b.start)) for s in slow for b in busy)
    return overlap / sum(s.end - s.start for s in slow)


@pytest.mark.gpu
def test_collectives_run_under_compute(world):
    world(8)
    width, x = 2048, torch.randn(4096, 2048, device="cuda")
    shares = []
    for options in ({}, {"backward_prefetch": None, "forward_prefetch": False}):
        torch.manual_seed(0)
        model = fully_shard(Net(8, width).cuda(), policy={Block}, collectives=SlowCollectives, **options)
        for _ in range(2):
            model(x).square().mean().backward()
        shares.append(hidden(model, x))
    prefetched, waited = shares
    assert prefetched > 0.6
    assert prefetched > waited + 0.2
