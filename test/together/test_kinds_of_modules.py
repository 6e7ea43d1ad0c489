"""Verbs on each kind of module that programs do not call on a part of a model: see ``test_programs.py``.

A unit may be the module, inside it, around it, or beside it (a tied parameter). One process says which values are right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import Block
from on_ranks import ranks
from parity import check_same_gradients, full_params
from torch import Tensor, nn

import flatshard
from flatshard import checkpoint, fully_shard
from flatshard.optim import gradient_statistics

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


def build(ctx, compiled: bool) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The same model in one process; the sharded one; and what was sharded."""
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    model = Net()
    outermost = torch.compile(model, backend="eager") if compiled else model
    fully_shard([model.tail["norm"], model.tail["head"]], process_group=ctx.group)
    fully_shard(outermost, policy={Block}, process_group=ctx.group)
    return plain, model, outermost


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 3)


# -- verbs that read and write values ----------------------------------------------------------------------------------


# -- verbs on gradients ------------------------------------------------------------------------------------------------


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


def parameters(module: nn.Module, duplicates: bool = False) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in module.named_parameters(remove_duplicate=not duplicates)}


def filled(module: nn.Module, value: float) -> dict[str, Tensor]:
    return {n: torch.full_like(v, value) for n, v in module.state_dict().items()}


def saves(path: Path, ctx, plain: nn.Module, module: nn.Module, whole: nn.Module) -> None:
    others = full_params(whole)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    whole(batch()).sum().backward()
    optimizer.step()
    stepped = full_params(whole)
    local = checkpoint.local_state_dict(module)
    local["flats"] = [{**f, "shard": f["shard"].clone()} for f in local["flats"]]
    local["rest"] = {n: v.clone() for n, v in local["rest"].items()}
    job = {"model": module, "optimizer": optimizer}
    flatshard.save_checkpoint(path / "saved", job, process_group=ctx.group)
    mine = {id(p) for p in module.parameters()}
    for load in (
        lambda: flatshard.load_checkpoint(path / "saved", job, process_group=ctx.group),
        lambda: checkpoint.load_local_state_dict(module, local),
    ):
        with torch.no_grad():
            for param in whole.parameters():
                param.zero_()
        load()
        for (name, value), param in zip(full_params(whole).items(), whole.parameters(), strict=True):
            assert torch.equal(value, stepped[name] if id(param) in mine else torch.zeros_like(value)), name
    assert any(not torch.equal(stepped[n], others[n]) for n in others)
    module.load_state_dict(filled(plain, 3.0))
    same(checkpoint.full_state_dict(module), filled(plain, 3.0))


def sends(path: Path, ctx, plain: nn.Module, module: nn.Module, whole: nn.Module) -> None:
    since = checkpoint.SentParams(module)
    with torch.no_grad():
        for param in whole.parameters():
            param.add_(1)
    received = {n: torch.zeros_like(p) for n, p in parameters(plain).items()}
    for changed in checkpoint.iter_changed_params(since):
        checkpoint.apply_changed_params(received, since.plan, changed)
    for value in received.values():
        dist.all_reduce(value, group=ctx.group)
    same(received, {n: p + 1 for n, p in parameters(plain).items()})


def statistics(path: Path, ctx, plain: nn.Module, module: nn.Module, whole: nn.Module) -> None:
    whole(batch()).square().sum().backward()
    expected = {n: p.grad for n, p in plain.named_parameters()}
    found = gradient_statistics(module)
    assert list(found) == list(expected)
    norms = torch.stack([grad.norm() for grad in expected.values()])
    torch.testing.assert_close(torch.tensor([s.norm for s in found.values()]), norms)
    described = {fqn for u in flatshard.describe(module).units for f in u.flats for fqn in f.fqns}
    assert {flatshard.tensors.shard_info(p).fqn for p in module.parameters()} <= described


@pytest.mark.parametrize("verb", [saves, sends, statistics], ids=lambda verb: verb.__name__)
@ranks(3)
def test_verbs(ctx, verb, tmp_path):
    for number, (kind, pick) in enumerate(KINDS.items()):
        ctx.note(f"{verb.__name__} on {kind}")
        plain, model, outermost = build(ctx, compiled=verb is sends and kind == "in the root")
        plain(batch()).square().sum().backward()
        for buffers in (plain, model):  # as before that forward
            buffers.encoder[1].reset_running_stats()
        verb(tmp_path / str(number), ctx, pick(plain), pick(model), outermost)


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
