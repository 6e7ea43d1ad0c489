"""Ranks gather, reduce and free alike, although each has facts of its own: its data, its references, its garbage."""

from typing import Any

import torch
from on_ranks import ranks
from parity import check_same_gradients, parts, twins
from torch import Tensor, nn

from flatshard import ShardingStrategy
from flatshard._composable.state import unit_of


class Shows(nn.Module):
    """A module that can return its parameter, and pass its input by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, shows: bool = False, passes: bool = False) -> Any:
        if passes:
            return x * 2
        return (x @ self.weight, self.weight) if shows else x @ self.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shows, self.head = Shows(), nn.Linear(4, 4)

    def forward(self, x: Tensor, shows: bool = False, first_passes: bool | None = None) -> Any:
        if shows:
            return self.shows(x, shows)
        if first_passes is not None:
            x = x + self.shows(x, passes=first_passes).detach()
        return self.head(self.shows(x))


def train(ctx: Any, plain: nn.Module, model: nn.Module, **arguments: bool) -> None:
    for _ in range(2):
        for m, x in zip(
            (plain, model), parts(ctx, torch.randn(2 * ctx.world_size, 4, dtype=torch.double)), strict=True
        ):
            m(x, **arguments).square().mean().backward()
    check_same_gradients(model, plain)


@ranks(2)
def test_one_rank_keeps_an_output_that_is_a_parameter(ctx):
    plain, model = twins(ctx, Model, {Shows})
    kept = model(torch.ones(1, 4, dtype=torch.double), shows=True)
    if ctx.rank == 1:
        del kept
    train(ctx, plain, model)
    with torch.no_grad():
        for param in (*plain.parameters(), *model.parameters()):
            param.mul_(0.5)
            param.grad = None
    output = model(torch.ones(1, 4, dtype=torch.double))
    assert unit_of(model.shows).handle.is_sharded  # the graph of what was kept is of no use now
    del output
    train(ctx, plain, model)


@ranks(2)
def test_an_output_requires_grad_on_one_rank(ctx):
    """The unit is used again in the same pass, where all ranks or none gather."""
    plain, model = twins(ctx, Model, {Shows}, strategy=ShardingStrategy.SHARD_GRAD_OP)
    for m, x in zip((plain, model), parts(ctx, torch.randn(2 * ctx.world_size, 4, dtype=torch.double)), strict=True):
        if m is model:
            m(x, first_passes=ctx.rank == 0).square().mean().backward()
        else:
            first, second = x.chunk(2)
            x = torch.cat([first * 3, second + m.shows(second).detach()])
            m(x).square().mean().backward()
    check_same_gradients(model, plain)
