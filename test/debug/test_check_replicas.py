"""``check_replicas``: what must be equal on several ranks is, bit for bit, or all ranks hear what is not."""

from __future__ import annotations

import re

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from flatshard import ShardingStrategy, fully_shard
from flatshard.debug import check_replicas


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(50, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 2, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).bfloat16())


def shard(ctx, strategy: ShardingStrategy) -> nn.Module:
    torch.manual_seed(0)
    hybrid = {"device_mesh": init_device_mesh("cpu", (2, 2))} if strategy.is_hybrid else {"process_group": ctx.group}
    return fully_shard(Net(), policy={nn.Linear}, strategy=strategy, **hybrid)


def message(model: nn.Module, **arguments: bool) -> str:
    try:
        check_replicas(model, **arguments)
    except RuntimeError as e:
        return str(e)
    return ""


def no_shard(ctx) -> None:
    model = shard(ctx, ShardingStrategy.NO_SHARD)
    assert message(model) == message(model, buffers=True) == ""
    if ctx.rank == 2:
        with torch.no_grad():
            model.last.weight.view(torch.int16)[0] ^= 1  # one bit
    expected = r"replicas differ: 1 of 6 values: 'last\.weight' \(rank 2 against rank 0\)\. They must be equal"
    assert re.search(expected, message(model)), message(model)
    if ctx.rank == 0:
        model.norm.running_mean += 1
    found = message(model, buffers=True)
    assert re.search(r"2 of 9 values", found), found
    assert "'norm.running_mean' (ranks 1, 2 against rank 0)" in found


def test_no_shard(pool: Pool):
    pool.run(no_shard, world_size=3)


def hybrid(ctx) -> None:
    model = shard(ctx, ShardingStrategy.HYBRID_SHARD)
    assert message(model) == message(model, buffers=True) == ""
    if ctx.rank == 3:
        with torch.no_grad():
            model.first.bias.add_(1)
    found = message(model)
    if ctx.rank in (1, 3):
        assert re.search(r"1 of 6 values: 'first\.bias' \(rank 3 against rank 1\)", found), found
    else:
        assert "not on this rank, but on others in its shard group; see their messages" in found


def test_hybrid(pool: Pool):
    pool.run(hybrid, world_size=4)


def nothing_to_compare(ctx) -> None:
    model = shard(ctx, ShardingStrategy.FULL_SHARD)
    with pytest.raises(ValueError, match="each rank has a different part of every parameter"):
        check_replicas(model)
    check_replicas(model, buffers=True)
    if ctx.rank == 1:
        model.norm.num_batches_tracked += 1
    assert "'norm.num_batches_tracked' (rank 1 against rank 0)" in message(model, buffers=True)
    with pytest.raises(ValueError, match="nothing in this Linear is sharded; call fully_shard first"):
        check_replicas(nn.Linear(1, 1))


def test_what_is_sharded_has_no_replicas(pool: Pool):
    pool.run(nothing_to_compare)
