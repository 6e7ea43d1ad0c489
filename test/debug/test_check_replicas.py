"""``check_replicas``: what must be equal on several ranks is, bit for bit, or all ranks hear what is not."""

import re

import pytest
import torch
from on_ranks import ranks
from torch import Tensor, nn

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
    where = {"process_group": ctx.group}
    if strategy.is_hybrid:
        where = {"device_mesh": ctx.device_mesh((2, 2), ("replicate", "shard"))}
    return fully_shard(Net(), policy={nn.Linear}, strategy=strategy, **where)


def message(model: nn.Module, **arguments: bool) -> str:
    try:
        check_replicas(model, **arguments)
    except RuntimeError as e:
        return str(e)
    return ""


@ranks(3)
def test_no_shard(ctx) -> None:
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
    assert re.search(r"2 of 9 values.*'norm.running_mean' \(ranks 1, 2 against rank 0\)", found), found


@ranks(4)
def test_hybrid(ctx) -> None:
    model = shard(ctx, ShardingStrategy.HYBRID_SHARD)
    assert message(model) == message(model, buffers=True) == ""
    if ctx.rank == 3:
        with torch.no_grad():
            model.first.bias.add_(1)
    here = r"1 of 6 values: 'first\.bias' \(rank 3 against rank 1\)"
    elsewhere = "not on this rank, but on others in its shard group; see their messages"
    assert re.search(here if ctx.rank in (1, 3) else elsewhere, message(model)), message(model)


@ranks(2)
def test_what_is_sharded_has_no_replicas(ctx) -> None:
    model = shard(ctx, ShardingStrategy.FULL_SHARD)
    with pytest.raises(ValueError, match="each rank has a different part of every parameter"):
        check_replicas(model)
    check_replicas(model, buffers=True)
    if ctx.rank == 1:
        model.norm.num_batches_tracked += 1
    assert "'norm.num_batches_tracked' (rank 1 against rank 0)" in message(model, buffers=True)
