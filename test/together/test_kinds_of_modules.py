"""Verbs on each kind of module that programs do not call on a part of a model: see ``test_programs.py``.

A unit may be the module, inside it, around it, or beside it (a tied parameter). One process says which values are right.
"""

from collections.abc import Callable

import pytest
import torch
from models import Block
from on_ranks import ranks
from parity import full_params
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
    "a unit, and a module of the unit around": lambda m: m.encoder,
    "in the root": lambda m: m.front,
    "in a unit": lambda m: m.blocks[1].linear,
    "of a unit of two": lambda m: m.tail["norm"],
    "with a tied parameter": lambda m: m.tied,
}


@ranks(3)
def test_a_job_of_a_part(ctx, path: str):
    """A job whose model is a part of what was sharded is loaded into that part, and into nothing beside it."""
    for kind, pick in KINDS.items():
        ctx.note(kind)
        torch.manual_seed(0)
        model = Net()
        whole = torch.compile(model, backend="eager") if kind == "in the root" else model
        fully_shard([model.tail["norm"], model.tail["head"]], process_group=ctx.group)
        fully_shard(whole, policy={Block}, process_group=ctx.group)
        module = pick(model)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        whole(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        stepped = full_params(whole)
        job = {"model": module, "optimizer": optimizer}
        flatshard.save_checkpoint(f"{path} {kind}", job, process_group=ctx.group)
        with torch.no_grad():
            for param in whole.parameters():
                param.zero_()
        flatshard.load_checkpoint(f"{path} {kind}", job, process_group=ctx.group)
        mine = {id(p) for p in module.parameters()}
        for (name, value), param in zip(full_params(whole).items(), whole.parameters(), strict=True):
            assert torch.equal(value, stepped[name] if id(param) in mine else torch.zeros_like(value)), name


def test_verbs_on_units_name_the_unit(world):
    world(2)
    model = fully_shard(Net(), policy={Block})
    for verb in (
        lambda m: flatshard.configure(m, reshard_after_forward=True),
        lambda m: flatshard.comm.register_comm_hook(m, None, flatshard.comm.bf16_compress_hook),
        lambda m: flatshard.register_forward_method(m, "extra_repr"),
        lambda m: flatshard.skip(m, torch.ones(1, requires_grad=True)),
    ):
        message = r"this Linear is part of unit 'blocks\.1', and not a unit itself: pass that"
        with pytest.raises(ValueError, match=message):
            verb(model.blocks[1].linear)
        verb(model.blocks[1])  # as it says
    message = r"this Linear has a part of unit .<root>., whose flat parameter also has 'encoder\.1\.weight'"
    with pytest.raises(ValueError, match=message):
        flatshard.flat_parameters(model.front)
    flatshard.flat_parameters(model)  # a module that has all of the unit
    for verb in (flatshard.configure, flatshard.skip, flatshard.sync_buffers, flatshard.reduce_gradients):
        with pytest.raises(ValueError, match="nothing in this Linear is sharded; call fully_shard first"):
            verb(nn.Linear(2, 2))
