"""On a real accelerator: streams, copies between devices, the allocator. Skipped without one.

One GPU is enough. NCCL has no two ranks on it, so ranks that exchange values do so over gloo, through the host
(:class:`StagedCollectives`, which the tests here run on CPU too); what needs no values runs over the fake group.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp
from pairs import some
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, fully_shard
from flatshard._comm.backends import FakeCollectives, builtin_collectives
from flatshard._comm.collectives import Done

WIDTH = 24
GRAD_OP, NO_SHARD = ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD


class StagedCollectives:
    """Gloo's collectives on copies of the tensors in the host's memory. Synchronous."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.host = builtin_collectives(group, torch.device("cpu"))

    exact = True

    def all_gather(self, output: Tensor, shard: Tensor) -> Done:
        whole = torch.empty(output.shape, dtype=output.dtype)
        part = whole.view(self.host.size, -1)[self.host.rank]
        part.copy_(shard)
        self.host.all_gather(whole, part).wait()
        output.copy_(whole)
        return Done()

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Done:
        part = torch.empty(output.shape, dtype=output.dtype)
        self.host.reduce_scatter(part, input.cpu()).wait()
        output.copy_(part)
        return Done()

    def all_reduce(self, tensor: Tensor) -> Done:
        whole = tensor.cpu()
        self.host.all_reduce(whole).wait()
        tensor.copy_(whole)
        return Done()


class Block(Mlp):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width, 2 * width + 1)


class Net(nn.Module):
    def __init__(self, blocks: int = 4, width: int = WIDTH, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


# -- numbers -----------------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "full shard": {},
    "grad op": {"strategy": GRAD_OP},
    "no shard": {"strategy": NO_SHARD},
    "no prefetch": {"backward_prefetch": None, "forward_prefetch": False},
    "backward post": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "offload": {"cpu_offload": CPUOffload()},
    "offload, no pinned memory": {"cpu_offload": CPUOffload(pin_memory=False)},
    "offload, grad op": {"cpu_offload": CPUOffload(), "strategy": GRAD_OP},
    "reduced in fp64": {"mixed_precision": MixedPrecision(reduce_dtype=torch.float64)},
    "checkpointed": {"checkpointed": True},
    "accumulated": {"accumulated": True},
    "accumulated, offload": {"accumulated": True, "cpu_offload": CPUOffload()},
}


def train_both(ctx, device: str, checkpointed: bool = False, accumulated: bool = False, **options: Any) -> None:
    """Adam steps, sharded and in one process on the same device."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net(checkpointed=checkpointed).double().to(device))
    plain, model = models
    fully_shard(model, policy={Block}, process_group=ctx.group, collectives=StagedCollectives, **options)
    assert {p.device.type for p in model.parameters()} == {"cpu" if "cpu_offload" in options else device}
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in models]
    for number in range(4):
        torch.manual_seed(number)
        batches = torch.randn(2, ctx.world_size, 5, WIDTH, dtype=torch.double)
        for x in batches:
            plain(x.to(device)).square().mean().backward()
        with flatshard.no_sync(model) if accumulated else torch.enable_grad():
            model(batches[0, ctx.rank].to(device)).square().mean().backward()
        model(batches[1, ctx.rank].to(device)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with flatshard.summon_full_params(model, writeback=False):
        for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(
                b.detach().cpu(), a.detach().cpu(), rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(
    ("device", "case"),
    [("cpu", case) for case in some(CASES, 4)] + [pytest.param("cuda", case, marks=pytest.mark.gpu) for case in CASES],
)
def test_parity(pool, device: str, case: str):
    for world_size in (2, 3):
        pool.run(train_both, device, world_size=world_size, **CASES[case])


# -- memory and time ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"strategy": GRAD_OP}, {"cpu_offload": CPUOffload()}])
def test_memory_is_the_same_in_every_step(world, options):
    """Without record_stream the allocator sees one order of events, whatever the device's timing."""
    world(8)
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
    if not options:  # the unit in work, one ahead, reductions under way; the head; activations
        assert peak - between < 6 * block
        assert between < 2 * blocks * block / 8 + block


class SlowCollectives(FakeCollectives):
    """All-gathers and reductions that keep the device busy for some 0.4 ms, on the stream that they run on."""

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
    """How much of the collectives' time the device computed in meanwhile, in one step, as a profile shows it."""
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
