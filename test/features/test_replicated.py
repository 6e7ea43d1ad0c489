"""DistributedDataParallel around a model that has sharded units: tools put it there unasked."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import Block, Net
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatshard import fully_shard, summon_full_params


def train(model: nn.Module, steps: int, part: slice = slice(None)) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(x[part]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, Tensor]:
    with summon_full_params(model):
        return {n.removeprefix("module."): p.detach().clone() for n, p in model.named_parameters()}


class Around(nn.Module):
    """A module that ``fully_shard`` never sees, with layers and a buffer of its own."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net, self.out = net, nn.Linear(2, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.net(x)) * self.scale + self.shift


def plain_around() -> Around:
    torch.manual_seed(0)
    return Around(Net(2)).double()


def shard_inside(model: Around, **arguments: Any) -> Around:
    fully_shard(model.net, policy={Block}, **arguments)
    return model


def shard_but_some(model: Around, **arguments: Any) -> Around:
    return fully_shard(model, policy={Block}, ignored_states=[model.net.head, model.scale], **arguments)


def shard_blocks(model: Around, **arguments: Any) -> Around:
    for block in model.net.blocks:
        fully_shard(block, **arguments)
    return model


def shard_tied(model: Around, **arguments: Any) -> Around:
    """A sharded parameter under two names, and one of the root's own."""
    model.net.blocks[1].linear.weight = model.net.blocks[0].linear.weight
    return fully_shard(model, ignored_states=[model.out], **arguments)


def run_beside_units(ctx, shard) -> None:
    plain = plain_around()
    model = shard(copy.deepcopy(plain), process_group=ctx.group)
    if shard is shard_tied:
        plain.net.blocks[1].linear.weight = plain.net.blocks[0].linear.weight
    with torch.no_grad():  # what only DDP makes equal on all ranks
        model.out.weight.add_(ctx.rank if shard is shard_blocks else 0)
    around = DistributedDataParallel(model, process_group=ctx.group)
    rows = 6 // ctx.world_size
    train(around, 3, slice(rows * ctx.rank, rows * (ctx.rank + 1)))
    train(plain, 3)
    for name, value in whole(around).items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach(), rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("shard", [shard_inside, shard_but_some, shard_blocks, shard_tied])
def test_layers_beside_units_train_as_in_one_process(pool, shard):
    pool.run(run_beside_units, shard, world_size=2)


def run_nothing_left(ctx) -> None:
    model = fully_shard(Net(2), policy={Block}, process_group=ctx.group)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for around in (model, nn.Sequential(model)):
        with pytest.raises(RuntimeError, match=r"all trainable parameters of this .* are sharded.*'.*front.weight'"):
            DistributedDataParallel(around, process_group=ctx.group)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_around_nothing_but_units_it_raises(pool):
    pool.run(run_nothing_left, world_size=2)
