"""What modules and users do rarely: each once went wrong, or was refused without need."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from on_ranks import ranks
from parity import check_same_gradients, parts, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard import ShardingStrategy
from flatshard._composable.features.escapes import EscapeWatch
from flatshard._composable.find import units_below

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))


def each(ctx: Any, plain: nn.Module, model: nn.Module, seed: int = 0) -> Iterator[tuple[nn.Module, Tensor]]:
    """The plain model with a whole batch, and the sharded one with this rank's part of it."""
    torch.manual_seed(seed)
    return zip((plain, model), parts(ctx, torch.randn(3 * ctx.world_size, 4, dtype=torch.double)), strict=True)


class Shows(nn.Module):
    """Hands out its own parameter, which others then use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.weight


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shows, self.last = Shows(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, weight = self.shows(x)
        return self.last((y @ weight).tanh() @ weight.T)


@ranks(1, 2, 3)
def test_a_parameter_that_is_handed_out_lives_as_long_as_its_graphs(ctx):
    for strategy in (FULL, GRAD_OP, NO_SHARD):
        plain, model = twins(ctx, Uses, {nn.Linear, Shows}, strategy=strategy)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
        for step in range(3):
            for m, x in each(ctx, plain, model, step):
                first, second = m(x).square().mean(), m(2 * x).mean()
                first.backward(retain_graph=step == 1)
                second.backward()
                if step == 1:
                    first.backward()
            check_same_gradients(model, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert not any(unit.leaks for unit in units_below(model))


class Aux(nn.Module):
    """Its loss leaves past its output, in what was a number before."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.aux = nn.Linear(4, 6), nn.Linear(6, 4), 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.down(self.up(x).tanh()).square().mean()
        return x.detach()


@ranks(2)
def test_an_attribute_that_is_a_number_first_and_a_loss_later(ctx):
    plain, model = twins(ctx, lambda: nn.Sequential(Aux(), Aux()), {Aux})
    for step in range(3):
        for m, x in each(ctx, plain, model, step):
            m(x.requires_grad_())
            sum(block.aux for block in m).backward()
            for block in m:
                block.aux = 0.0
        check_same_gradients(model, plain)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


def caught_in(model: nn.Module) -> list[torch.Tensor]:
    """What the units' watches hold of inner modules' outputs."""
    watches = [watch for unit in units_below(model) if (watch := unit.feature(EscapeWatch)) is not None]
    assert watches
    return [tensor for watch in watches for tensor in watch._caught]


@ranks(2)
def test_a_hook_inside_a_checkpoint_keeps_nothing_alive(ctx):
    plain, model = twins(ctx, lambda: nn.Sequential(Checkpointed(), Checkpointed()), {Checkpointed})
    seen: list[Any] = []
    for m in (plain, model):
        for block in m:
            block.inner[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    for step in range(3):
        model = copy.deepcopy(model) if step == 2 else model
        for m, x in each(ctx, plain, model, step):
            if step == 2:
                m.zero_grad()
            m(x).square().mean().backward()
        assert not caught_in(model)
        check_same_gradients(model, plain)
