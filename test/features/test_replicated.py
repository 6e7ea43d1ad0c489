"""DistributedDataParallel around a model with sharded units, as some tools add it unasked."""

import copy
from typing import Any

import pytest
import torch
from models import Block, Net
from on_ranks import ranks
from parity import adamw, check_same_params, full_params, parts, step_all
from torch import Tensor, nn
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel

from flatshard import fully_shard


class Around(nn.Module):
    """A module outside ``fully_shard``, with its own layers and buffer."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net, self.out = net, nn.Linear(2, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.net(x)) * self.scale + self.shift


def plain_around(tied: bool = False) -> Around:
    torch.manual_seed(0)
    net = Net(2)
    if tied:
        net.blocks[1].linear.weight = net.blocks[0].linear.weight
    return Around(net).double()


def shard_but_some(model: Around, **arguments: Any) -> Around:
    return fully_shard(model, policy={Block}, ignored_states=[model.net.head, model.scale], **arguments)


def shard_blocks(model: Around, **arguments: Any) -> Around:
    for block in model.net.blocks:
        fully_shard(block, **arguments)
    return model


def shard_all_but_one(model: Around, **arguments: Any) -> Around:
    """Shard all parameters except one layer's, the root's own included."""
    return fully_shard(model, ignored_states=[model.out], **arguments)


def shard_before_one_is_added(model: Around, **arguments: Any) -> Around:
    out, model.out = model.out, nn.Identity()
    fully_shard(model, **arguments).out = out
    return model


def train(ctx, plain: nn.Module, model: nn.Module) -> None:
    optimizers = [adamw(m.parameters()) for m in (plain, model)]
    for _ in range(2):
        for m, part in zip((plain, model), parts(ctx, torch.randn(6, 4, dtype=torch.float64)), strict=True):
            m(part).square().mean().backward()
        step_all(optimizers)


@pytest.mark.parametrize("shard", [shard_but_some, shard_blocks, shard_all_but_one, shard_before_one_is_added])
@ranks(2)
def test_layers_beside_units_train_as_in_one_process(ctx, shard):
    plain = plain_around(tied=shard is shard_all_but_one)
    model = shard(copy.deepcopy(plain), process_group=ctx.group)
    with torch.no_grad():  # only DDP makes them equal on all ranks
        model.out.weight.add_(ctx.rank if shard is shard_blocks else 0)
    around = DistributedDataParallel(model, process_group=ctx.group)
    train(ctx, plain, around)
    check_same_params(model, plain)


@ranks(2)
def test_around_an_ignored_part(ctx):
    """DDP averages gradients of modules that ``fully_shard`` ignores, whichever wraps first."""
    for ddp_first in (False, True):
        plain = plain_around()
        model = copy.deepcopy(plain)
        if ddp_first:
            model.out = DistributedDataParallel(model.out, process_group=ctx.group)
        fully_shard(model, policy={Block}, ignored_states=[model.out], process_group=ctx.group)
        if not ddp_first:
            model.out = DistributedDataParallel(model.out, process_group=ctx.group)
        train(ctx, plain, model)
        model.out = model.out.module  # restores the names of one process
        check_same_params(model, plain)


@ranks(2)
def test_around_nothing_but_units_it_raises(ctx):
    model = fully_shard(Net(2), policy={Block}, process_group=ctx.group)
    theirs = "DistributedDataParallel is not needed"  # torch's error, as the module lists ignored tensors
    ours = r"all trainable parameters of this .* are sharded.*'.*front.weight'"
    for around, message in ((model, theirs), (nn.Sequential(model), ours)):
        with pytest.raises(RuntimeError, match=message):
            DistributedDataParallel(around, process_group=ctx.group)


@ranks(2)
def test_a_broadcast_of_states_leaves_the_parts(ctx):
    """Lightning's "ddp" broadcasts before validation: shards stay, and unsharded tensors get rank 0's values."""
    model = plain_around()
    shard_but_some(model, process_group=ctx.group)
    before = full_params(model)
    with torch.no_grad():
        model.net.head.weight.add_(ctx.rank)
    model.shift.add_(ctx.rank)
    with pytest.raises(RuntimeError, match=r"'net\.front\.weight'.* would overwrite it with another rank's shard"):
        _sync_module_states(model, ctx.group, 2**20, src=0, params_and_buffers_to_ignore=())
    ignored = set(model._ddp_params_and_buffers_to_ignore)
    _sync_module_states(model, ctx.group, 2**20, src=0, params_and_buffers_to_ignore=ignored)
    assert all(torch.equal(value, before[name]) for name, value in full_params(model).items())
    assert not model.shift.any()
