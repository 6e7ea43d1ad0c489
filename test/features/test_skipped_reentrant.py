"""Ranks that use different units or parameters, beside reentrant checkpoints, which hide gradients from backward."""

from __future__ import annotations

import torch
from on_ranks import ranks
from parity import check_same_gradients, check_same_params, step_all, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard import BackwardPrefetch, ShardingStrategy, skip

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
    """The rank that skips it last waits for what the checkpoint of the first has."""
    for runs in ((True, False), (False, True), (True, True)):
        ctx.note(str(runs))
        front = nn.Linear(WIDTH, WIDTH).double()
        plain, model = twins(ctx, Block)
        for net, of in ((plain, range(2)), (model, [ctx.rank])):
            losses = []
            for rank in of:
                x = front(torch.full((2, WIDTH), 1.0 + rank, dtype=torch.double))
                for run in runs if rank == 0 else reversed(runs):
                    losses.append((net(x) if run else x if net is plain else skip(net, x)).square().mean())
            (sum(losses) / len(of)).backward()
        check_same_gradients(model, plain)
