"""Rare habits of modules and users that once failed, or were refused without need."""

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from checkpointed import WIDTH, Block, make
from clean import units
from on_ranks import ranks
from parity import check_same_gradients, full_params, parts, twins
from torch import Tensor, nn

import flatshard
from flatshard import ShardingStrategy, fully_shard

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD


def each(ctx: Any, plain: nn.Module, model: nn.Module, seed: int = 0) -> Iterator[tuple[nn.Module, Tensor]]:
    """Yield the plain model with a full batch, and the sharded one with this rank's slice."""
    torch.manual_seed(seed)
    return zip((plain, model), parts(ctx, torch.randn(3 * ctx.world_size, WIDTH, dtype=torch.double)), strict=True)


class Shows(nn.Module):
    """A module that gives others its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor, gives: bool = True) -> tuple[Tensor, Tensor | None]:
        return x @ self.weight, self.weight if gives else None


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shows, self.last = Shows(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, weight = self.shows(x)
        again, _ = self.shows(x.detach(), gives=False)  # does not end what the first one handed out
        return self.last((y @ weight).tanh() @ weight.T) + again


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
        assert not any(unit.history.leaks for unit in units(model))


class Aux(nn.Module):
    """A module whose auxiliary loss leaves it by an attribute that was a number before."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.aux = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH), 0.0

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


@ranks(2)
def test_a_hook_inside_a_checkpoint_keeps_nothing_alive(ctx):
    plain, model = twins(ctx, lambda: make("non-reentrant"), {Block})
    seen: list[Any] = []
    for m in (plain, model):
        for block in m.blocks:
            block.inner.up.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    for step in range(3):
        model = copy.deepcopy(model) if step == 2 else model
        for m, x in each(ctx, plain, model, step):
            m.zero_grad()
            m(x).square().mean().backward()
        assert not any(ref() is not None for ref in seen)
        check_same_gradients(model, plain)


@ranks(3)
def test_a_job_of_a_part(ctx, path: str):
    """A job with a submodule of the saved model loads into that submodule, and changes nothing beside it."""
    for number, name in enumerate(("front", "blocks.0", "blocks.1.linear")):
        torch.manual_seed(0)
        model = fully_shard(models.Net(), policy={models.Block}, process_group=ctx.group)
        part = model.get_submodule(name)
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
        stepped = full_params(model)
        job = {"model": part, "optimizer": optimizer}
        flatshard.save_checkpoint(f"{path}{number}", job, process_group=ctx.group)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        flatshard.load_checkpoint(f"{path}{number}", job, process_group=ctx.group)
        mine = {id(p) for p in part.parameters()}
        for (fqn, value), param in zip(full_params(model).items(), model.parameters(), strict=True):
            assert torch.equal(value, stepped[fqn] if id(param) in mine else torch.zeros_like(value)), fqn
    with pytest.raises(
        ValueError, match=r"this Linear has a part of unit .<root>., whose flat parameter also has 'head\."
    ):
        flatshard.flat_parameters(model.front)
