"""Verbs on each kind of module that programs do not call on a part of a model: see ``test_programs.py``.

A unit may be the module, inside it, around it, or beside it (a tied parameter). One process says which values are right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import Block
from on_ranks import ranks
from parity import check_same_gradients, full_params
from torch import Tensor, nn

import flatshard
from flatshard import fully_shard

WIDTH = 5


class Net(nn.Module):
    """A unit around units, plain modules in both, a unit of two modules, and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(3, WIDTH)
        self.encoder = nn.Sequential(Block(WIDTH), nn.BatchNorm1d(WIDTH))
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.tail = nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "head": nn.Linear(WIDTH, 2)})
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.blocks[0].linear.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.front(x))
        for block in self.blocks:
            x = block(x)
        return self.tail["head"](self.tail["norm"](self.tied(x)))


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "the root": lambda m: m,
    "a unit": lambda m: m.blocks[0],
    "modules that are units": lambda m: m.blocks,
    "a unit, and a module of the unit around": lambda m: m.encoder,
    "in the root": lambda m: m.front,
    "in a unit": lambda m: m.blocks[1].linear,
    "of a unit of two": lambda m: m.tail["norm"],
    "both of a unit of two": lambda m: m.tail,
    "with a tied parameter": lambda m: m.tied,
}


def build(ctx, pick: Callable[[nn.Module], nn.Module], compiled: bool) -> tuple[nn.Module, nn.Module]:
    """What was sharded, and a module of it."""
    torch.manual_seed(0)
    model = Net()
    outermost = torch.compile(model, backend="eager") if compiled else model
    fully_shard([model.tail["norm"], model.tail["head"]], process_group=ctx.group)
    return fully_shard(outermost, policy={Block}, process_group=ctx.group), pick(model)


@ranks(3)
def test_a_job_of_a_part(ctx, tmp_path: Path):
    """A job whose model is a part of what was sharded is loaded into that part, and into nothing beside it."""
    for number, (kind, pick) in enumerate(KINDS.items()):
        ctx.note(kind)
        whole, module = build(ctx, pick, compiled=kind == "in the root")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(1)
        whole(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        stepped = full_params(whole)
        job = {"model": module, "optimizer": optimizer}
        flatshard.save_checkpoint(tmp_path / str(number), job, process_group=ctx.group)
        with torch.no_grad():
            for param in whole.parameters():
                param.zero_()
        flatshard.load_checkpoint(tmp_path / str(number), job, process_group=ctx.group)
        mine = {id(p) for p in module.parameters()}
        for (name, value), param in zip(full_params(whole).items(), whole.parameters(), strict=True):
            assert torch.equal(value, stepped[name] if id(param) in mine else torch.zeros_like(value)), name


# -- verbs on units ----------------------------------------------------------------------------------------------------


def test_verbs_on_units_name_the_unit(world):
    world(2)
    model = fully_shard(Net(), policy={Block})
    for verb in (
        lambda m: flatshard.configure(m, reshard_after_forward=True),
        lambda m: flatshard.comm.register_comm_hook(m, None, flatshard.comm.bf16_compress_hook),
        lambda m: flatshard.register_forward_method(m, "extra_repr"),
    ):
        message = r"this Linear is part of unit 'blocks\.1', and not a unit itself: pass that"
        with pytest.raises(ValueError, match=message):
            verb(model.blocks[1].linear)
        verb(model.blocks[1])  # as it says
    message = r"this Linear has a part of unit .<root>., whose flat parameter also has 'encoder\.1\.weight'"
    with pytest.raises(ValueError, match=message):
        flatshard.flat_parameters(model.front)
    flatshard.flat_parameters(model)  # a module that has all of the unit


class Mixture(nn.Module):
    """Two plain modules of one unit, of which each rank needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.skip: Callable[..., Tensor] = lambda expert, x: x

    def forward(self, x: Tensor, mine: int) -> Tensor:
        for number, expert in enumerate(self.experts):
            x = expert(x) if number == mine else self.skip(expert, x)
        return x


@ranks(2)
def test_skip_in_a_unit(ctx):
    """The unit's own forward takes part in its collectives."""
    torch.manual_seed(0)
    plain, x = Mixture(), torch.randn(2, 3)
    model = fully_shard(Mixture(), process_group=ctx.group)
    model.skip = flatshard.skip
    model.load_state_dict(plain.state_dict())
    model(x[ctx.rank : ctx.rank + 1], ctx.rank).square().sum().backward()
    (sum(plain(x[i : i + 1], i).square().sum() for i in range(2)) / 2).backward()
    check_same_gradients(model, plain, rtol=1e-5)
    with pytest.raises(ValueError, match=r"skip: this Linear is part of unit the root module, .* pass that unit"):
        flatshard.skip(model.experts[0], x)
    with torch.no_grad():
        assert torch.equal(flatshard.skip(model, x), x)  # as it says
