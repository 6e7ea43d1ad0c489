"""``sync_buffers``: what each rank has written into its buffers becomes one value on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard.debug import check_replicas


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        self.head = nn.Linear(5, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("short", torch.zeros(3, dtype=torch.bfloat16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += int(x[0, 0] > 0) + 1
        self.phase += x.mean() * (1 + 2j)
        self.short += 1
        return self.head(self.front(x))


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def sync(ctx, **arguments: Any) -> None:
    ranks = ctx.world_size
    batches = torch.randn(ranks, 4, 3, generator=torch.Generator().manual_seed(1))
    plain, alone = build(), [build() for _ in range(ranks)]
    plain(batches.flatten(0, 1))
    for each, batch in zip(alone, batches, strict=True):
        each(batch)
    if not arguments:
        arguments = {"process_group": ctx.group}
    for pick in (lambda m: m, lambda m: m.front[1], lambda m: m.front):
        model = fully_shard(build(), policy={nn.Linear}, **arguments)
        model(batches[ctx.rank])
        with pytest.raises(RuntimeError, match=r"running_mean.*call flatshard.sync_buffers\(module\)"):
            check_replicas(pick(model), buffers=True)
        flatshard.sync_buffers(pick(model))  # as it says
        check_replicas(pick(model), buffers=True)
        own, expected = dict(model.named_buffers()), dict(plain.named_buffers())
        torch.testing.assert_close(own["front.1.running_mean"], expected["front.1.running_mean"])
        means = torch.stack([each.front[1].running_var for each in alone]).mean(0)
        torch.testing.assert_close(own["front.1.running_var"], means)
        assert own["front.1.num_batches_tracked"] == 1
    model = fully_shard(build(), policy={nn.Linear}, **arguments)
    model(batches[ctx.rank])
    flatshard.sync_buffers(model)
    torch.testing.assert_close(model.phase, torch.stack([each.phase for each in alone]).mean(0))
    assert model.seen == alone[0].seen
    assert model.short.tolist() == [1] * 3
    model(batches[ctx.rank])
    for each, batch in zip(alone, batches, strict=True):
        each(batch)
    if ctx.rank == 0:
        first = {n: b.clone() for n, b in model.named_buffers()}
    flatshard.sync_buffers(model, average=False)
    check_replicas(model, buffers=True)
    if ctx.rank == 0:
        assert all(torch.equal(b, first[n]) for n, b in model.named_buffers())


def hybrid(ctx) -> None:
    mesh = ctx.device_mesh((2, 2), ("replicas", "shards"))
    sync(ctx, device_mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD)


def test_ranks_have_the_same(pool):
    for world_size in (2, 3):
        pool.run(sync, world_size=world_size)
    pool.run(hybrid, world_size=4)


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        flatshard.sync_buffers(self)
        return self.linear(x)


def test_misuse(world):
    world(2)
    model = fully_shard(Inside())
    message = r"sync_buffers: called inside a forward or a backward\. Call it between steps"
    with pytest.raises(RuntimeError, match=message):
        model(torch.ones(1, 2))
    with pytest.raises(ValueError, match="sync_buffers: nothing in this Linear is sharded; call fully_shard first"):
        flatshard.sync_buffers(nn.Linear(1, 1))
    model.register_buffer("later", torch.ones(2, device="meta"))
    with pytest.raises(RuntimeError, match="sync_buffers: 'later' are on the meta device"):
        flatshard.sync_buffers(model)
