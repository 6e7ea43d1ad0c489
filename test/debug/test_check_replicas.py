"""``check_replicas``: replicated values are equal bit for bit, or all ranks raise an error that names the differences."""

import re
from typing import Any

import pytest
import torch
from on_ranks import ranks
from saving import make
from torch import nn

from flatshard import ShardingStrategy, fully_shard
from flatshard.debug import check_replicas


def shard(strategy: ShardingStrategy, **where: Any) -> nn.Module:
    return fully_shard(make(), policy={nn.Linear}, strategy=strategy, **where)


def message(model: nn.Module, **arguments: bool) -> str:
    try:
        check_replicas(model, **arguments)
    except RuntimeError as e:
        return str(e)
    return ""


@ranks(3)
def test_no_shard(ctx) -> None:
    model = shard(ShardingStrategy.NO_SHARD, process_group=ctx.group)
    assert message(model) == message(model, buffers=True) == ""
    if ctx.rank == 2:
        with torch.no_grad():
            model.short.view(torch.int16)[0] ^= 1  # one bit
    expected = r"replicas differ: 1 of 13 values: 'short' \(rank 2 against rank 0\)\. They must be equal"
    assert re.search(expected, message(model)), message(model)
    if ctx.rank == 0:
        model.norm.running_mean += 1
    found = message(model, buffers=True)
    assert re.search(r"2 of 18 values.*'norm.running_mean' \(ranks 1, 2 against rank 0\)", found), found


@ranks(4)
def test_shards(ctx) -> None:
    model = shard(ShardingStrategy.HYBRID_SHARD, device_mesh=ctx.device_mesh((2, 2), ("replicate", "shard")))
    assert message(model) == message(model, buffers=True) == ""
    if ctx.rank == 3:
        with torch.no_grad():
            model.up.bias.add_(1)
    here = r"1 of \d+ values: 'up\.bias' \(rank 3 against rank 1\)"
    elsewhere = "not on this rank, but on others in its shard group; see their messages"
    assert re.search(here if ctx.rank in (1, 3) else elsewhere, message(model)), message(model)
    model = shard(ShardingStrategy.FULL_SHARD, process_group=ctx.group)
    with pytest.raises(ValueError, match="each rank has a different shard of every parameter"):
        check_replicas(model)
    check_replicas(model, buffers=True)
    if ctx.rank == 1:
        model.norm.num_batches_tracked += 1
    assert "'norm.num_batches_tracked' (rank 1 against rank 0)" in message(model, buffers=True)
