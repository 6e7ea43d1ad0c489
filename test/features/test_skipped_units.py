"""``flatshard.skip``: ranks that run different units, against one process in which every slice of the batch runs its own.

The fuzzer skips, too: tied and frozen units, in some of several backwards, under every option.
"""

import copy
import functools
import random
from typing import Any

import pytest
import torch
from checkpointed import CALLS
from models import Block, Net
from on_ranks import ranks
from parity import check_same_gradients, check_same_params, everybody, step_all, twins
from torch import Tensor, nn

from flatshard import BackwardPrefetch, describe, fully_shard, skip
from flatshard._trace import record_events

WIDTH = 4


class Tower(nn.Sequential):
    """A unit with units inside, whose own parameters come after them."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(3)), nn.Linear(WIDTH, WIDTH))


class Chosen(nn.Module):
    """Leaves and towers, of which the data choose. Without ``sharded``, what is not chosen is left out."""

    sharded, kind = False, "none"  # how the modules are called

    def __init__(self) -> None:
        super().__init__()
        self.front, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.chosen = nn.ModuleList([*(Block() for _ in range(6)), Tower(), Tower(), Block()])

    def forward(self, x: Tensor, choices: list[bool]) -> Tensor:
        x = self.front(x)
        for module, runs in zip(self.chosen, choices, strict=True):
            if runs or self.sharded:
                x = CALLS[self.kind](module if runs else functools.partial(skip, module), x)
        return self.head(x)


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("none", {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}),
    ("none", {"backward_prefetch": None, "forward_prefetch": False}),
    *(("none", {"strategy": strategy}) for strategy in ("shard_grad_op", "no_shard", "shard_optim", "hybrid_shard")),
    ("non-reentrant", {"backward_prefetch": None}),
    ("reentrant", {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}),
]


@pytest.mark.parametrize(("way", "world_size"), [(way, 4 if way in (0, 6, 7) else 2) for way in range(len(WAYS))])
@ranks()  # of four where hybrid sharding needs them
def test_each_rank_chooses(ctx, way: int):
    """As in one process, and all ranks issue the same gathers, and the same reductions, in the same order."""
    kind, options = WAYS[way]
    if options.get("strategy") == "hybrid_shard":
        options = options | {"device_mesh": ctx.device_mesh((2, 2), ("replicate", "shard"))}
    plain, model = twins(ctx, Chosen, {Block, Tower}, **options)
    model.sharded, model.kind = True, kind
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (plain, model)]
    rng = random.Random(way)
    for step in range(3):
        xs = torch.randn(ctx.world_size, 2, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        choices = [[step == way % 2 or rng.random() < 0.4 for _ in model.chosen] for _ in xs]
        for x, chosen in zip(xs, choices, strict=True):
            (plain(x, chosen).square().mean() / ctx.world_size).backward()
        with record_events() as events:
            model(xs[ctx.rank], choices[ctx.rank]).square().mean().backward()
        for verb in ("all-gather", "reduce-scatter", "all-reduce"):
            first, *others = everybody(ctx, [event for event in events if event.startswith(verb)])
            assert all(each == first for each in others), verb
        check_same_gradients(model, plain)
        step_all(optimizers)
    check_same_params(model, plain)


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
