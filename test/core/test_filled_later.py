"""The order of FSDP2: shard on the meta device, then ``to_empty``, then initialise or load."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import NormBlock
from on_ranks import ranks
from parity import adamw, full_params
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import flatshard
from flatshard import CPUOffload, MixedPrecision, ShardingStrategy, fully_shard, layouts

WIDTH = 13


class Block(NormBlock):
    def __init__(self) -> None:
        super().__init__(WIDTH, 29, bias=False)

    def init_weights(self) -> None:
        self.norm.reset_parameters()
        self.up.reset_parameters()
        nn.init.trunc_normal_(self.down.weight, std=0.02)
        self.down.weight.data.mul_(0.5)


class Lm(nn.Module):
    """``init_weights`` comes to the outermost unit before and after the blocks, as torchtitan's does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, padding_idx=0)
        self.register_buffer("inv_freq", torch.ones(WIDTH), persistent=False)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def init_weights(self) -> None:
        self.inv_freq.copy_(torch.arange(1.0, WIDTH + 1).reciprocal())
        self.embed.reset_parameters()
        for block in self.blocks:
            block.init_weights()
        self.norm.reset_parameters()
        nn.init.orthogonal_(self.head.weight)
        nn.init.constant_(self.scale, 0.75)
        with torch.no_grad():  # a second visit, after the blocks
            self.embed.weight.mul_(2.0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(ids) * self.inv_freq * self.scale)))


def on_meta() -> Lm:
    with torch.device("meta"):
        return Lm()


def plain(seed: int = 3) -> Lm:
    model = Lm()
    torch.manual_seed(seed)
    model.init_weights()
    return model


def same_as(model: nn.Module, expected: nn.Module) -> None:
    wanted = dict(expected.named_parameters())
    for name, value in full_params(model).items():
        assert torch.equal(value, wanted[name].detach()), name
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def trains(ctx, model: nn.Module, expected: nn.Module) -> None:
    """One step of both, and the same after it."""
    optimizers = [adamw(m.parameters()) for m in (model, expected)]
    ids = torch.arange(2 * ctx.world_size) % 11
    mine = ids[2 * ctx.rank : 2 * ctx.rank + 2]
    for each, x, optimizer in ((model, mine, optimizers[0]), (expected, ids, optimizers[1])):
        each(x).square().mean().backward()
        optimizer.step()
    wanted = dict(expected.named_parameters())
    for name, value in full_params(model).items():
        torch.testing.assert_close(value, wanted[name].detach(), rtol=1e-3, atol=1e-5, msg=name)


CASES = {
    "default": {},
    "one unit": {"policy": None},
    "no shard": {"strategy": ShardingStrategy.NO_SHARD},
    "rows": {"layout": layouts.Rows()},
    "whole": {"layout": layouts.Whole()},
    "precision": {"mixed_precision": MixedPrecision(reduce_dtype=torch.float64)},
    "offload": {"cpu_offload": CPUOffload()},
    "static": {"static_buffers": True},
}


@ranks(1, 3)
def test_draws_over_all_parameters(ctx):
    """Code that goes over all parameters of the model draws the same numbers as in one process."""
    for case in ("default", "rows", "precision"):

        def draw(model: nn.Module) -> None:
            torch.manual_seed(5)
            for name, param in model.named_parameters():
                if name.endswith("bias"):
                    nn.init.uniform_(param)
                elif "norm" in name:
                    nn.init.trunc_normal_(param)
                else:
                    nn.init.normal_(param, std=0.02)

        expected = Lm()
        draw(expected)
        expected.inv_freq.copy_(torch.ones(WIDTH))
        model = fully_shard(on_meta(), process_group=ctx.group, **{"policy": {Block}} | CASES[case])
        model.to_empty(device="cpu")
        model.inv_freq.copy_(torch.ones(WIDTH))
        draw(model)
        same_as(model, expected)
        trains(ctx, model, expected)


@ranks(1, 3)
def test_initialises(ctx):
    for case in CASES:
        expected = plain()
        model = on_meta()
        params = dict(model.named_parameters())
        fully_shard(model, **({"policy": {Block}, "process_group": ctx.group} | CASES[case]))
        assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
        with pytest.raises(RuntimeError, match=r"'embed.weight'.*are on the meta device.*to_empty.*device_id"):
            model(torch.zeros(2, dtype=torch.int64))
        early = adamw(model.parameters())
        assert model.to_empty(device="cpu") is model
        assert all(p is params[name] and not p.is_meta for name, p in model.named_parameters())
        torch.manual_seed(3)
        model.init_weights()
        assert [p for g in early.param_groups for p in g["params"]] == list(model.parameters())
        same_as(model, expected)
        trains(ctx, model, expected)
        assert all(p.shape == flatshard.tensors.shard_info(p).part_shape for p in model.parameters())


@ranks(2)
def test_apply(ctx):
    """``model.apply(init)``, with a second visit of the parents by ``named_parameters``, as GPT-2's does."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(std=0.02)
            if getattr(module, "bias", None) is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        for name, p in module.named_parameters():
            if name == "down.weight":
                p.data.normal_(std=0.01)

    expected, model = Lm(), on_meta()
    fully_shard(model, policy={Block}, process_group=ctx.group).to_empty(device="cpu")
    for each in (expected, model):
        torch.manual_seed(5)
        each.apply(init)
        nn.init.ones_(each.scale)
        each.inv_freq.fill_(1)
    same_as(model, expected)
    trains(ctx, model, expected)


@ranks(2)
def test_a_module_lists_its_own_parameters(ctx):
    """As torchtitan's modules: each lists its own parameters. Who lists those of a whole model finds parts."""
    expected, model = Lm(), on_meta()
    fully_shard(model, policy={Block}, process_group=ctx.group).to_empty(device="cpu")
    for each in (expected, model):
        torch.manual_seed(5)
        for module in each.modules():
            for _, p in module.named_parameters(recurse=False):
                nn.init.kaiming_uniform_(p) if p.ndim > 1 else nn.init.normal_(p)
        each.inv_freq.fill_(1)
    same_as(model, expected)
    for p in model.blocks.parameters():
        assert p.shape == flatshard.tensors.shard_info(p).part_shape
    trains(ctx, model, expected)


class Rnn(nn.Module):
    """An RNN has weak references to its parameters. It and ``Own`` have a ``__setattr__`` of their own."""

    class Own(nn.Linear):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 5, num_layers=2)
        self.head = Rnn.Own(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])

    def reset(self) -> None:
        torch.manual_seed(4)
        for each in (self.rnn, self.head):
            each.reset_parameters()


def part_of(p: Tensor, whole: Tensor) -> Tensor:
    info = flatshard.tensors.shard_info(p)
    return whole.reshape(-1)[info.start : info.stop]


@pytest.mark.parametrize("policy", [None, {nn.GRU, Rnn.Own}])
@ranks(1, 3)
def test_modules_that_set_attributes_their_own_way(ctx, policy: set[type] | None):
    expected = Rnn()
    expected.reset()

    def reset(model: nn.Module) -> None:
        if not policy:
            model.rnn.reset_parameters()
        with flatshard.summon_full_params(model):
            model.reset()

    def to_empty(model: nn.Module) -> nn.Module:
        return fully_shard(model, policy=policy, process_group=ctx.group).to_empty(device="cpu")

    def init(module: nn.Module) -> None:
        """Draws what ``expected`` has, whichever module comes first."""
        found = next(e for n, e in expected.named_modules() if type(e) is type(module))
        for name, p in module.named_parameters(recurse=False):
            nn.init.constant_(p, 0)
            p.data.copy_(found.get_parameter(name).detach())

    def by_function(model: nn.Module) -> nn.Module:
        return fully_shard(model, policy=policy, process_group=ctx.group, param_init_fn=init)

    for make, fill in (
        (to_empty, reset),
        (to_empty, lambda m: m.load_state_dict(expected.state_dict())),
        (by_function, lambda m: None),
    ):
        with torch.device("meta"):
            model = Rnn()
        params = list(model.parameters())
        model = make(model)
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        fill(model)
        same_as(model, expected)
        x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
        assert torch.equal(model(x), expected(x))
        plain = copy.deepcopy(expected)
        for each in (model, plain):
            each(x).square().sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, flatshard.tensors.shard_info(p).shaped(part_of(p, q.grad)))
        with pytest.raises(RuntimeError, match="has its values, which to_empty"):
            model.to_empty(device="cpu")
        model.to("cpu")  # the cure; torch's RNN needs it after an error in to_empty
        again = copy.deepcopy(model)
        assert torch.equal(again(x), expected(x))


@ranks(4)
def test_loads(ctx, tmp_path: Path):
    expected = plain()
    saved = fully_shard(copy.deepcopy(expected), process_group=ctx.group)
    flatshard.save_checkpoint(tmp_path / "saved", {"model": saved})
    whole = expected.state_dict()

    def by_checkpoint(model: nn.Module) -> None:
        flatshard.load_checkpoint(tmp_path / "saved", {"model": model})

    def by_torch(model: nn.Module) -> None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, whole if ctx.rank == 0 else {}, options=options)

    def by_hand(model: nn.Module) -> None:
        for p in model.parameters():
            info = flatshard.tensors.shard_info(p)
            p.data.copy_(info.shaped(whole[info.fqn].reshape(-1)[info.start : info.stop]))

    def inside_summon(model: nn.Module) -> None:
        torch.manual_seed(3)
        with flatshard.summon_full_params(model):
            model.init_weights()

    with pytest.raises(RuntimeError, match=r"'embed.weight'.*on the meta device.*to_empty"):
        by_checkpoint(fully_shard(on_meta(), policy={Block}))

    for fill in (by_checkpoint, lambda m: m.load_state_dict(whole), by_torch, by_hand, inside_summon):
        for reads in (False, True) if fill is by_torch else (True,):
            ctx.note(f"{fill}, {reads}")
            model = fully_shard(on_meta(), policy={Block}, process_group=ctx.group).to_empty(device="cpu")
            if reads and fill is not by_hand:  # what shows whole parameters is no obstacle
                assert model.head.weight.shape == (11, WIDTH)
            fill(model)
            model.inv_freq.copy_(expected.inv_freq)
            for name, value in whole.items():  # who reads a parameter that has its values finds a part
                module, _, attribute = name.rpartition(".")
                param = getattr(model.get_submodule(module), attribute)
                assert (info := flatshard.tensors.shard_info(param)) is None or param.shape == info.part_shape, name
                torch.testing.assert_close(param.norm(), value.norm())
            same_as(model, expected)
            trains(ctx, model, plain())


@ranks(2)
def test_assign(ctx):
    expected = plain()
    model = fully_shard(on_meta(), policy={Block}, process_group=ctx.group)
    model.load_state_dict(expected.state_dict(), assign=True)  # without to_empty
    model.inv_freq = expected.inv_freq.clone()
    same_as(model, expected)
    trains(ctx, model, expected)


@ranks(4)
def test_verbs_on_meta(ctx, tmp_path: Path):
    """What needs values says so."""
    model = fully_shard(on_meta(), policy={Block}, process_group=ctx.group)
    for verb in (
        flatshard.unshard,
        lambda m: flatshard.summon_full_params(m).__enter__(),
        flatshard.flat_parameters,
        flatshard.checkpoint.full_state_dict,
        lambda m: flatshard.save_checkpoint(tmp_path / "saved", {"model": m}),
    ):
        with pytest.raises(RuntimeError, match=r"'embed.weight'.*on the meta device.*to_empty"):
            verb(model)
    assert model.state_dict()["head.weight"].is_meta
    flatshard.describe(model)


@ranks(2)
def test_what_was_not_filled_is_named(ctx):
    model = fully_shard(on_meta(), policy={Block}, process_group=ctx.group)
    x = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"'blocks.1.norm.weight'.*are on the meta device"):
        model.blocks[1](torch.zeros(2, WIDTH))
    model.to_empty(device="cpu")
    model.embed.reset_parameters()
    model.blocks[0].init_weights()
    message = r"'scale', 'norm.weight', .*'blocks.1.norm.weight'.*nothing has filled"
    with pytest.raises(RuntimeError, match=message) as e:
        model(x)
    assert "embed" not in str(e.value)
    assert "blocks.0" not in str(e.value)
    torch.manual_seed(3)
    model.init_weights()
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="has its values, which to_empty"):
        model.to_empty(device="cpu")
    # A buffer that nothing has moved.
    model = fully_shard(on_meta(), process_group=ctx.group)
    model.load_state_dict(plain().state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="'inv_freq' are on the meta device"):
        model(x)


@ranks(4)
def test_replicas(ctx):
    """Replicas end equal, whatever their random generators do."""
    mesh = ctx.device_mesh((2, 2), ("replicate", "shard"))
    model = fully_shard(on_meta(), policy={Block}, device_mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD)
    model.to_empty(device="cpu")
    torch.manual_seed(ctx.rank)
    model.init_weights()
    model(torch.zeros(2, dtype=torch.int64))
    parts = torch.cat([p.detach().clone().reshape(-1) for p in model.parameters()])
    others = [torch.empty_like(parts) for _ in range(2)]
    dist.all_gather(others, parts, group=mesh.get_group("replicate"))
    assert torch.equal(*others)


@pytest.mark.parametrize("size", [1, 2])
def test_converted_on_meta(world, size):
    """``module.half()`` between ``fully_shard`` and ``to_empty``: as in one process, the values come in the new dtype."""
    world(size)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2))
    fully_shard(model, policy={nn.Linear}).bfloat16()
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} == {p.grad.dtype for p in model.parameters()}
