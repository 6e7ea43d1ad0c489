"""Ranks that use different units or parameters, beside reentrant checkpoints, which hide gradients from backward."""

from __future__ import annotations

import pytest
import torch
from on_ranks import ranks
from parity import check_same_params, step_all, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard import BackwardPrefetch, ShardingStrategy, fully_shard, skip

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.compute, x, use_reentrant=True)

    def compute(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.block = Block()
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        x = self.block(self.front(x))
        return self.head(self.extra(x) if extra else x)


@ranks(2)
def test_parameters_that_one_rank_leaves_out(ctx):
    """One rank does not use some of the root's parameters, in the first step only."""
    for prefetch in (None, *BackwardPrefetch):
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            ctx.note(f"{prefetch} {strategy.name}")
            options = {"strategy": strategy, "backward_prefetch": prefetch, "reshard_after_forward": False}
            plain, model = twins(ctx, Net, {Block}, **options)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
            for step in range(2):
                xs = torch.randn(ctx.world_size, 2, WIDTH, generator=torch.Generator().manual_seed(step)).double()
                for rank, x in enumerate(xs):
                    (plain(x, step > 0 or rank > 0).square().mean() / ctx.world_size).backward()
                model(xs[ctx.rank], step > 0 or ctx.rank > 0).square().mean().backward()
                step_all(optimizers)
            check_same_params(model, plain)


@ranks(2)
def test_a_unit_skipped_in_one_of_two_forwards_of_a_backward(ctx):
    """The rank that skips it cannot see that there is more to come."""
    front, block = nn.Linear(WIDTH, WIDTH), Block()
    fully_shard(block, process_group=ctx.group)
    x = torch.randn(2, WIDTH)
    losses = [block(front(x)).sum(), skip(block, front(x)).sum()]
    with pytest.raises(RuntimeError, match=r"'up.weight' is sharded.*skipped the unit.*Use use_reentrant=False"):
        torch.stack(losses).sum().backward()
