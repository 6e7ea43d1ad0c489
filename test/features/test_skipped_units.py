"""``flatshard.skip``: what it takes and returns, and units on other process groups inside.

Ranks that run different units: the fuzzer's, under every option, and ``test_layer_drop``.
"""

import copy
import functools

import pytest
import torch
from models import Block, Net
from on_ranks import ranks
from parity import check_same_gradients, twins
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatshard import describe, fully_shard, skip
from flatshard._trace import record_events

WIDTH = 4


@ranks(2)
def test_the_call(ctx):
    plain, model = twins(ctx, Net, {Block})
    block, x = model.blocks[0], torch.ones(2, WIDTH).double()
    both = skip(block, x, torch.tensor([3]))
    assert torch.equal(both[0], x)
    assert both[0].requires_grad
    assert both[1].tolist() == [3]
    both[0].sum().backward()
    assert all(p.grad is None for p in block.parameters())  # nobody ran it
    (block(x) if ctx.rank else skip(block, x)).sum().backward()  # of an input that requires no gradient
    (plain.blocks[0](x).sum() / 2).backward()
    check_same_gradients(model, plain)
    with torch.no_grad():
        assert not skip(block, x).requires_grad
        assert skip(block) == ()
    with pytest.raises(ValueError, match=r"backward must reach unit 'blocks\.0', so pass a floating-point tensor"):
        skip(block, torch.tensor([3]))
    # The last rank has run out of data.
    model.zero_grad()
    plain.zero_grad()
    (plain(x).square().mean() / 2).backward()
    (model(x).square().mean() if ctx.rank == 0 else skip(model, torch.zeros(()))).backward()
    check_same_gradients(model, plain)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x)) if ctx.rank == 0 else skip(model) == ()
    assert {u.state for u in describe(model).units} == {"sharded"}


def test_a_checkpoint_recomputes_it(world):
    """So units inside are gathered in the order of a forward, as on ranks that run them."""
    world(2)
    model = fully_shard(nn.Sequential(*(Block() for _ in range(3))), policy={Block}, backward_prefetch=None)
    steps = []
    for call in (model, functools.partial(skip, model)):
        with record_events() as events:
            checkpoint(call, torch.ones(2, WIDTH, requires_grad=True), use_reentrant=False).sum().backward()
        steps.append([event for event in events if event.startswith("all-gather")])
    assert steps[0] == steps[1]


@ranks(4)
def test_units_on_other_process_groups_inside(ctx):
    """They are skipped with the unit around them, whether the rank has run it before or not."""
    elsewhere = torch.distributed.new_group()
    for before in (0, 2):  # steps in which it has
        torch.manual_seed(0)
        plain = nn.Sequential(Block(), nn.Sequential(Block(), Block()), Block()).double()
        model = copy.deepcopy(plain)
        first, inner, _ = model
        for module in (inner[1], inner, first, model):
            fully_shard(module, process_group=elsewhere if module is inner else ctx.group)
        x = torch.randn(4, 3, WIDTH, dtype=torch.double)
        for step in range(before + 2):
            running = [rank for rank in range(4) if step < before or rank != 1]
            for rank in running:
                (plain(x[rank]).square().mean() / 4).backward()
            mine = x[ctx.rank]
            (model(mine) if ctx.rank in running else skip(model, mine)).square().mean().backward()
        check_same_gradients(model, plain)
