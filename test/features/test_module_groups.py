"""Units of several modules: ``fully_shard([norm, head])``, or a tuple of modules in a policy.

The fuzzer's policies ``groups`` and ``lists`` and ``together/test_programs.py`` test their values and other calls on
them. ``test_split_root`` counts their gathers.
"""

import copy
from typing import Any

import pytest
import torch
from clean import check_clean
from models import Block
from on_ranks import ranks
from parity import check_same_gradients, parts
from torch import Tensor, nn

import flatshard
from flatshard import fully_shard
from flatshard._base.trace import record_events

WIDTH = 12


class Model(nn.Module):
    """A model whose norm and head can be one unit. The loss calls the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


@ranks(2)
def test_chunked_loss(ctx):
    """Calling the head per chunk after the forward costs one gather and one reduction, as migration.md promises."""
    torch.manual_seed(0)
    plain = Model().double()
    model = copy.deepcopy(plain)
    pair = [model.norm, model.head]
    assert fully_shard(pair, process_group=ctx.group) is pair
    fully_shard(model, policy={Block}, process_group=ctx.group)
    x = torch.randn(2 * ctx.world_size, WIDTH).double()
    mine = parts(ctx, x)[1]
    plain.head(plain(x)).square().mean().backward()
    for _ in range(2):
        model.zero_grad()
        with record_events() as events, flatshard.keep_unsharded(model.head):
            hidden = model(mine)
            cut = hidden.detach().requires_grad_()
            with flatshard.no_sync(model.head):
                for chunk in cut.chunk(2):
                    (model.head(chunk).square().mean() / 2).backward()
            hidden.backward(cut.grad)
        of_head = [e for e in events if e.endswith("norm, head") and "reshard" not in e]
        assert of_head == ["all-gather norm, head", "reduce-scatter norm, head"]
        check_same_gradients(model, plain)
        check_clean(model)


def test_members_are_freed_when_all_have_run(world):
    """If some do not run, the end of the pass frees all."""
    world(2)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    fully_shard([model[0], model[1]])
    fully_shard(model, policy={nn.Linear})
    with torch.no_grad(), record_events() as events:
        model(torch.ones(2, 4))
    assert events.index("reshard 0, 1") < events.index("reshard 2")
    model = Model()
    fully_shard(model, policy={Block, (model.norm, model.head)})
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()
        check_clean(model)


def test_names(world):
    world(2)
    model = Model()
    pair = fully_shard([model.norm, model.head])
    assert pair[0] is model.norm
    (unit,) = flatshard.describe(model).units
    assert [f for flat in unit.flats for f in flat.fqns] == ["0.weight", "0.bias", "1.weight"]
    for outer, inside in ((model, ""), (nn.Sequential(model, nn.Linear(2, 2)), "0.")):  # the second contains the group
        fully_shard(outer)
        unit = flatshard.describe(outer).units[-1]
        assert (unit.fqn, unit.module) == (f"{inside}norm, {inside}head", "LayerNorm, Linear")
        assert flatshard.tensors.shard_info(model.head.weight).fqn == f"{inside}head.weight"


def test_a_copy_that_was_refused_leaves_no_units(world):
    """The copy includes a group but not all of its modules."""
    world(2)
    model = Model()
    fully_shard([model.embed, model.blocks[0]])
    fully_shard([model.blocks[1], model.norm, model.head], policy={nn.Linear})
    inner = model.blocks[1].linear
    with flatshard.summon_full_params(inner), pytest.raises(RuntimeError, match="cannot copy unit") as refused:
        copy.deepcopy(model)
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()  # visits all units
    assert refused.tb is not None  # the traceback keeps the partial copy alive


def test_mistakes(world):
    world(2)
    model = Model()
    norm, head, block, inner = model.norm, model.head, model.blocks[0], model.blocks[0].linear

    def refused(message: str, modules: Any = None, policy: Any = None, **options: Any) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            fully_shard(model if modules is None else modules, policy=policy, **options)

    for modules, message in (
        ([norm, norm], "a LayerNorm is in it twice"),
        ([block, inner], "a Linear in it is inside a Block in it"),
        ([norm, model.blocks], "ModuleList has no forward"),
    ):
        refused(message, modules)
        refused(message, policy={Block, tuple(modules)})
    refused("it is empty", [])
    refused(r"takes an nn\.Module as an item of the list, got a str", [norm, "head"])
    refused("has a Linear, which is not a submodule of the Model", policy={(norm, nn.Linear(2, 2))})
    refused("'head', which is in ignored_states, too", policy={(norm, head)}, ignored_states=[head])
    refused("'head', which is in another tuple", policy=[(norm, head), (head, model.embed)])
    assert all(type(p) is nn.Parameter for p in model.parameters())
    fully_shard([norm, head])
    refused("this Linear is sharded already", [model.embed, head])
    refused("this LayerNorm is sharded already", policy={Block, (norm, model.embed)})
