"""``sync_buffers`` makes buffers that ranks have written equal on all ranks."""

from typing import Any

import pytest
import torch
from on_ranks import ranks
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


@ranks(3, 4)
def test_ranks_have_the_same(ctx):
    where: dict[str, Any] = {"process_group": ctx.group}
    if ctx.world_size == 4:
        mesh = ctx.device_mesh((2, 2), ("replicas", "shards"))
        where = {"device_mesh": mesh, "strategy": ShardingStrategy.HYBRID_SHARD}
    batches = torch.randn(ctx.world_size, 4, 3, generator=torch.Generator().manual_seed(1))
    plain, alone = build(), [build() for _ in batches]
    plain(batches.flatten(0, 1))
    for each, batch in zip(alone, batches, strict=True):
        each(batch)
    for pick in (lambda m: m.front[1], lambda m: m.front, lambda m: m):
        model = fully_shard(build(), policy={nn.Linear}, **where)
        model(batches[ctx.rank])
        with pytest.raises(RuntimeError, match=r"running_mean.*call flatshard.sync_buffers\(module\)"):
            check_replicas(pick(model), buffers=True)
        flatshard.sync_buffers(pick(model))  # the cure in the message
        check_replicas(pick(model), buffers=True)
        norm = model.front[1]
        torch.testing.assert_close(norm.running_mean, plain.front[1].running_mean)
        torch.testing.assert_close(norm.running_var, torch.stack([each.front[1].running_var for each in alone]).mean(0))
        assert norm.num_batches_tracked == 1
    torch.testing.assert_close(model.phase, torch.stack([each.phase for each in alone]).mean(0))
    assert model.seen == alone[0].seen
    assert model.short.tolist() == [1] * 3
    model(batches[ctx.rank])
    first = {n: b.clone() for n, b in model.named_buffers()}
    flatshard.sync_buffers(model, average=False)
    check_replicas(model, buffers=True)
    assert ctx.rank or all(torch.equal(b, first[n]) for n, b in model.named_buffers())


def test_misuse(world):
    world(2)
    model = fully_shard(build())
    model.register_buffer("later", torch.ones(2, device="meta"))
    with pytest.raises(RuntimeError, match="sync_buffers: 'later' are on the meta device"):
        flatshard.sync_buffers(model)
