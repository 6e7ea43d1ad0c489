"""Initialisation of sharded modules: the meta device, ``to_empty`` after it, ``sync_module_states``, meshes."""

import copy
import functools
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import saving
import torch
from models import NormBlock
from on_ranks import ranks
from parity import adamw, check_same_gradients, check_same_params, full_params, parts
from recording import same_everywhere
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, fully_shard, layouts
from flatshard.tensors import ShardedParameter, shard_info

WIDTH = 13


class Rotary(nn.Module):
    """A buffer outside the state dict, an integer buffer, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(WIDTH), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.calls.zero_()
        nn.init.constant_(self.scale, 0.75)
        self.inv_freq.copy_(torch.arange(1.0, WIDTH + 1).reciprocal())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inv_freq * self.scale


class Block(NormBlock):
    def __init__(self) -> None:
        super().__init__(WIDTH, 29, bias=False)

    def init_weights(self) -> None:
        self.norm.reset_parameters()
        self.up.reset_parameters()
        nn.init.trunc_normal_(self.down.weight, std=0.02)
        self.down.weight.data.mul_(0.5)


class Lm(nn.Module):
    """Embedding and head are tied. Like torchtitan's, ``init_weights`` visits the root before and after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Embedding(11, WIDTH, padding_idx=0), Rotary()
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def init_weights(self) -> None:
        self.rotary.reset_parameters()
        self.embed.reset_parameters()
        for block in self.blocks:
            block.init_weights()
        self.norm.reset_parameters()
        nn.init.orthogonal_(self.head.weight)
        with torch.no_grad():
            self.embed.weight.mul_(2.0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.rotary(self.embed(ids)))))


def on_meta(make: Callable[[], nn.Module] = Lm) -> nn.Module:
    with torch.device("meta"):
        return make()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return full parameters and buffers."""
    return {**full_params(model), **dict(model.named_buffers())}


def check_alike(ctx: Any, tensors: Iterable[Tensor]) -> None:
    """Assert that all ranks hold the same ``tensors``. Collective."""
    assert all(same_everywhere(ctx.group, t.detach().flatten()) for t in tensors)


def same_as(ctx: Any, model: nn.Module, expected: nn.Module) -> None:
    """Assert equal values, and equal gradients for a batch."""
    wanted = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    for name, value in tensors_of(model).items():
        assert torch.equal(value, wanted[name].detach()), name
    for each, ids in zip((expected, model), parts(ctx, torch.arange(2 * ctx.world_size) % 11), strict=True):
        each.zero_grad()
        each(ids).square().mean().backward()
    check_same_gradients(model, expected, rtol=1e-3)


# -- Initialised by fully_shard ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_values", [False, True])
@ranks(1, 3)
def test_materialises(ctx, own_values: bool):
    def init(module: nn.Module) -> None:
        """Initialise one module, with values other than its default's."""
        for param in module.parameters(recurse=False):
            nn.init.normal_(param, std=0.02)
        for buffer in module.buffers(recurse=False):
            buffer.fill_(1)

    one = Lm()
    for strategy, policy in (
        (ShardingStrategy.NO_SHARD, {Block, Rotary}),
        (ShardingStrategy.FULL_SHARD, {Block, nn.Embedding, nn.Linear}),
    ):
        torch.manual_seed(100 + ctx.rank)  # ranks with different generators still end with equal values
        model = on_meta()
        model.embed.weight.lr_scale = 0.5
        params = dict(model.named_parameters())
        optimizer = adamw(model.parameters())
        options = {"strategy": strategy, "param_init_fn": init if own_values else None, "device_id": "cpu"}
        fully_shard(model, policy=policy, process_group=ctx.group, **options)
        assert all(p is params[name] for name, p in model.named_parameters())
        assert model.head.weight is model.embed.weight
        assert model.embed.weight.lr_scale == 0.5
        whole = full_params(model)
        check_alike(ctx, tensors_of(model).values())
        shapes, expected = ([(n, p.shape, p.dtype) for n, p in d] for d in (whole.items(), one.named_parameters()))
        assert shapes == expected
        assert torch.equal(model.rotary.inv_freq, torch.ones(WIDTH) if own_values else one.rotary.inv_freq)
        assert bool(0 < whole["embed.weight"].std() < 0.04) is own_values
        assert not torch.equal(whole["blocks.0.up.weight"], whole["blocks.1.up.weight"])
        model(torch.arange(3)).square().mean().backward()
        optimizer.step()  # built before the parameters had values
        after = full_params(model)
        assert not any(torch.equal(after[name], whole[name]) for name in whole)


@ranks(3)
def test_a_recurrent_module_filled_by_name(ctx):
    """Parameters of recurrent modules are full, listed by ``named_parameters(recurse=False)`` or read, until all are set."""
    plain = nn.GRU(2, 2)
    for read in (getattr, lambda module, name: dict(module.named_parameters(recurse=False))[name]):
        model = on_meta(lambda: nn.GRU(2, 2))
        fully_shard(model, process_group=ctx.group).to_empty(device="cpu")
        with torch.no_grad():
            for name, value in plain.named_parameters():
                read(model, name).copy_(value)
        whole = full_params(model)
        assert all(torch.equal(whole[name], value) for name, value in plain.named_parameters())


def test_what_is_no_initialiser(fake_group):
    """``test_errors`` covers modules that initialise only some of their parameters."""
    linear = functools.partial(nn.Linear, 3, 3)
    for bad in (42, nn.Linear, lambda: None):
        with pytest.raises(TypeError, match=r"param_init_fn=.*it must be None or a function that takes") as e:
            fully_shard(model := on_meta(linear), param_init_fn=bad)
        assert not hasattr(e.value, "__notes__")  # nothing was changed
        fully_shard(model)
    for init in (lambda module: None, lambda module: module.to_empty(device="cpu", recurse=False)):
        with pytest.raises(RuntimeError, match=r"'weight', 'bias' were .*param_init_fn was called"):
            fully_shard(on_meta(linear), param_init_fn=init)
    assert not torch.are_deterministic_algorithms_enabled()  # the mode is on during the call only
    lists = on_meta(lambda: nn.Sequential(nn.ParameterList([torch.ones(3)])))
    with pytest.raises(RuntimeError, match=r"'0.0' are on the meta device and their modules cannot") as e:
        fully_shard(lists, sync_module_states=True)
    assert not hasattr(e.value, "__notes__")


@ranks(2)
def test_partly_on_meta(ctx):
    """Initialise only meta parameters, one unit at a time; initialised and already sharded ones stay."""
    model = nn.Sequential(Block(), on_meta(Block), Block(), on_meta(Block))
    model[2].up.weight = nn.Parameter(torch.empty_like(model[2].up.weight, device="meta"))
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.is_meta}
    fully_shard(model[3], process_group=ctx.group, device_id="cpu")
    calls, waiting = [], [p for p in model.parameters() if p.is_meta]
    one_block = sum(p.nbytes for p in model[0].parameters())

    def init(module: nn.Module) -> None:
        whole = [p for p in waiting if not p.is_meta and shard_info(p) is None]
        assert 0 < sum(p.untyped_storage().nbytes() for p in whole) <= one_block
        calls.append(next(n for n, m in model.named_modules() if m is module))
        if module is model[2].up:  # one of two parameters: the other one's value must stay
            nn.init.zeros_(module.weight)
        else:
            module.reset_parameters()

    fully_shard(model, policy={Block}, process_group=ctx.group, param_init_fn=init)
    assert calls == ["1.norm", "1.up", "1.down", "2.up"]
    after = full_params(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(after["2.up.weight"], torch.zeros(29, WIDTH))
    check_alike(ctx, (after[name] for name in after if name not in before))


# -- Values of rank 0 --------------------------------------------------------------------------------------------------


@ranks(1, 3)
def test_sync_module_states(ctx):
    """Other ranks may be on meta, as when FSDP1 loads a large model once per node. Sent tensors need no initialiser."""

    def make(seed: int) -> nn.Module:
        """Return a model with parameters and buffers of many dtypes, shapes and strides."""
        model = saving.make(seed)
        model.flags = nn.Parameter(torch.rand(9) > 0.5, requires_grad=False)
        model.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        for i, buffer in enumerate((torch.rand(()) > 0.5, torch.randn(4, 3).t().half(), torch.randn(9)[::2])):
            model.register_buffer(f"b{i}", buffer, persistent=i > 0)
        model.register_buffer("again", model.b1)
        return model

    reference = make(5)
    expected = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
    for strategy, policy, device in (
        ("FULL_SHARD", {nn.Conv2d}, "cpu"),
        ("NO_SHARD", None, "cpu"),
        ("FULL_SHARD", None, "meta"),
    ):
        with torch.device(device if ctx.rank else "cpu"):
            model = make(5 + ctx.rank)
        buffers = [(n, id(b)) for n, b in model.named_buffers(remove_duplicate=False) if not b.is_meta]
        fully_shard(model, policy=policy, process_group=ctx.group, strategy=strategy, sync_module_states=True)
        assert device == "meta" or [(n, id(b)) for n, b in model.named_buffers(remove_duplicate=False)] == buffers
        for name, value in tensors_of(model).items():
            assert torch.equal(value, expected[name]), name
            assert value.stride() == expected[name].stride(), name


@ranks(4)
def test_device_meshes(ctx):
    """Each group starts from its first rank's values and has its own gradients, so mixed-up groups would show."""
    two, transposed = (ctx.device_mesh((2, 2), names) for names in (("tp", "dp"), ("dp", "tp")))
    meshes: list[tuple[DeviceMesh, list[int]]] = [
        (two["dp"], [0, 1] if ctx.rank < 2 else [2, 3]),
        (transposed["dp"], [ctx.rank % 2, ctx.rank % 2 + 2]),
        (ctx.mesh, [0, 1, 2, 3]),
    ]
    for mesh, members in meshes:
        models = []
        for rank in (ctx.rank, members[0]):
            torch.manual_seed(rank)
            models.append(nn.Sequential(Block(), Block()).double())
        model, plain = models
        fully_shard(model, policy={Block}, device_mesh=mesh, sync_module_states=True)
        assert flatshard.describe(model).world_size == len(members)
        torch.manual_seed(10 * members[0])
        x = torch.randn(2 * len(members), WIDTH, dtype=torch.float64)
        model(x.chunk(len(members))[members.index(ctx.rank)]).square().mean().backward()
        plain(x).square().mean().backward()
        check_same_gradients(model, plain)
        model = on_meta(lambda: nn.Linear(WIDTH, WIDTH))
        init = lambda m: [nn.init.constant_(p, ctx.rank) for p in m.parameters()]  # noqa: E731
        fully_shard(model, device_mesh=mesh, param_init_fn=init)
        assert all((p == members[0]).all() for p in full_params(model).values())


# -- Initialised later, in FSDP2's order -------------------------------------------------------------------------------


def sharded_on_meta(ctx: Any, **options: Any) -> nn.Module:
    return fully_shard(on_meta(), **{"policy": {Block}, "process_group": ctx.group} | options)


def plain(seed: int = 3) -> Lm:
    model = Lm()
    torch.manual_seed(seed)
    model.init_weights()
    return model


def apply(model: nn.Module) -> None:
    """Call ``model.apply(init)``, and visit parents a second time by ``named_parameters`` as GPT-2 does."""

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

    model.apply(init)
    nn.init.ones_(model.rotary.scale)


def each_its_own(model: nn.Module) -> None:
    """Initialise each module's own parameters, like torchtitan. Listing a full model's parameters returns shards."""
    for module in model.modules():
        for _, p in module.named_parameters(recurse=False):
            nn.init.kaiming_uniform_(p) if p.ndim > 1 else nn.init.normal_(p)
    assert all((info := shard_info(p)) is None or p.shape == info.part_shape for p in model.blocks.parameters())


@pytest.mark.parametrize("fill", [apply, each_its_own], ids=lambda f: f.__name__)
@ranks(1, 3)
def test_other_ways_to_initialise(ctx, fill: Callable[[nn.Module], None]):
    float64 = torch.float64
    for options, dtype in (
        ({}, torch.float32),
        ({"layout": layouts.Rows()}, float64),  # converted before initialisation
        ({"mixed_precision": MixedPrecision(reduce_dtype=float64)}, torch.float32),
    ):
        expected, model = Lm().to(dtype), sharded_on_meta(ctx, **options).to(dtype).to_empty(device="cpu")
        for each in (expected, model):
            torch.manual_seed(5)
            each.rotary.reset_parameters()
            fill(each)
        same_as(ctx, model, expected)


class Tied(nn.Module):
    """Tied heads with biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.heads = nn.Embedding(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        for head in self.heads:
            head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.heads(self.embed(ids))


@ranks(3)
def test_own_parameters_of_two_units(ctx):
    """A module that owns parameters of two units lists both of them unsharded."""
    expected, model = Tied(), on_meta(Tied)
    fully_shard(model, policy={nn.Embedding, nn.Linear}, process_group=ctx.group).to_empty(device="cpu")
    for each in (model, expected):
        torch.manual_seed(5)
        for module in each.modules():
            for _, p in module.named_parameters(recurse=False):
                nn.init.kaiming_uniform_(p) if p.ndim > 1 else nn.init.normal_(p)
    check_same_params(model, expected)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@ranks(2)
def test_a_transposed_parameter_read_again(ctx):
    expected = Transposed()
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = fully_shard(on_meta(Transposed), process_group=ctx.group, strategy=strategy).to_empty(device="cpu")
        for each in (model, expected):
            torch.manual_seed(5)
            nn.init.normal_(each.weight)
            list(each.parameters())
            with torch.no_grad():
                each.weight.mul_(2.0)
        check_same_params(model, expected)


LOOKS: dict[str, Callable[[nn.Module, list[nn.Parameter]], object]] = {
    "listed": lambda model, params: next(model.parameters()),
    "the dict's values": lambda model, params: model.norm._parameters.values(),
    "built": lambda model, params: torch.optim.Adagrad(params),
    "stepped": lambda model, params: torch.optim.AdamW(params).step(),
    "a gradient": lambda model, params: params[0].grad,
    "describe": lambda model, params: flatshard.describe(model),
    "reshard": lambda model, params: flatshard.reshard(model),
    "configure": lambda model, params: flatshard.configure(model.blocks, gradient_sync=True),
    "state_dict": lambda model, params: model.blocks.state_dict(),
    "whole": lambda model, params: flatshard.checkpoint.full_state_dict(model),
    "torch's": lambda model, params: get_state_dict(model, torch.optim.AdamW(params)),  # steps with zeros
}


@ranks(3)
def test_whoever_is_no_initialiser_finds_parts(ctx):
    """Other readers see shards, even before any forward and through references from before initialisation."""
    for name, look in LOOKS.items():
        ctx.note(name)
        model, expected = sharded_on_meta(ctx), plain()
        params = list(model.parameters())
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        model.init_weights()
        assert any(p.shape != shard_info(p).part_shape for p in params)
        look(model, params)
        assert all(p.shape == shard_info(p).part_shape for p in params)
        assert type(ShardedParameter.__dict__["grad"].fget).__name__ == "method-wrapper"  # in C again, for speed
        same_as(ctx, model, expected)


class Rnn(nn.Module):
    """An RNN, which keeps weak references to its parameters and overrides ``__setattr__``."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 5, num_layers=2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("policy", [None, {nn.GRU}])
@ranks(1, 3)
def test_modules_that_set_attributes_their_own_way(ctx, policy: set[type] | None):
    expected, model, x = Rnn(), on_meta(Rnn), torch.randn(4, 2, 3)
    params = list(model.parameters())
    fully_shard(model, policy=policy, process_group=ctx.group)
    model.to_empty(device="cpu").load_state_dict(expected.state_dict())
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert torch.equal(model(x), expected(x))
    for each in (model, expected):
        each(x).square().sum().backward()
    check_same_gradients(model, expected, rtol=1e-5)
    with pytest.raises(RuntimeError, match="has its values, which to_empty"):
        model.to_empty(device="cpu")
    model.to("cpu")  # the cure; torch's RNN needs it after an error in to_empty
    assert torch.equal(copy.deepcopy(model)(x), expected(x))


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
        model.rotary.calls.zero_()
        for p in model.parameters():
            info = shard_info(p)
            p.data.copy_(info.shaped(whole[info.fqn].reshape(-1)[info.start : info.stop]))

    def inside_summon(model: nn.Module) -> None:
        torch.manual_seed(3)
        with flatshard.summon_full_params(model):
            model.init_weights()

    for fill in (by_checkpoint, by_torch, by_hand, inside_summon):
        for reads in (False, True):
            ctx.note(f"{fill.__name__}, {reads}")
            model = sharded_on_meta(ctx).to_empty(device="cpu")
            if reads and fill is not by_hand:  # showing full parameters does not prevent initialisation
                assert model.norm.weight.shape == (WIDTH,)
            fill(model)
            model.rotary.inv_freq.copy_(expected.rotary.inv_freq)
            for name, value in expected.named_parameters():  # reading an initialised parameter returns a shard
                module, _, attribute = name.rpartition(".")
                param = getattr(model.get_submodule(module), attribute)
                assert param.shape == shard_info(param).part_shape, name
                torch.testing.assert_close(param.norm(), value.norm())
            same_as(ctx, model, expected)
    model = sharded_on_meta(ctx)
    model.load_state_dict(whole, assign=True)  # without to_empty
    with pytest.raises(RuntimeError, match=r"'rotary.inv_freq' are on the meta device"):
        model(torch.zeros(2, dtype=torch.int64))
    model.rotary.inv_freq = expected.rotary.inv_freq.clone()
    same_as(ctx, model, expected)


@ranks(4)
def test_what_needs_values_says_so(ctx, tmp_path: Path):
    model, x = sharded_on_meta(ctx), torch.zeros(2, dtype=torch.int64)
    for verb in (
        lambda m: m(x),
        flatshard.unshard,
        lambda m: flatshard.summon_full_params(m).__enter__(),
        flatshard.flat_parameters,
        lambda m: flatshard.save_checkpoint(tmp_path / "saved", {"model": m}),
    ):
        with pytest.raises(RuntimeError, match=r"'embed.weight'.*on the meta device.*to_empty"):
            verb(model)
    assert model.state_dict()["norm.weight"].is_meta
    flatshard.describe(model)
    model.to_empty(device="cpu")
    model.embed.reset_parameters()
    model.blocks[0].init_weights()
    message = r"'rotary.scale', 'norm.weight', .*'blocks.1.norm.weight'.*nothing has filled"
    with pytest.raises(RuntimeError, match=message) as e:
        model(x)
    assert "embed" not in str(e.value)
    assert "blocks.0" not in str(e.value)
    model.init_weights()
    model(x).sum().backward()


def test_a_plan_while_another_model_waits_for_values(fake_group):
    with torch.device("meta"):
        waiting = nn.Linear(3, 3)
    fully_shard(waiting)
    assert flatshard.plan_step(nn.Linear(4, 4), world_size=2).collectives
    with pytest.raises(RuntimeError, match="are on the meta device"):
        waiting(torch.ones(3))


@ranks(2)
def test_ranks_that_start_from_different_values_are_told(ctx: Any) -> None:
    """Ranks warn once, and the cures work. Values assigned after ``fully_shard`` are shards, so they are not compared."""

    def first_step(model: nn.Module, **options: Any) -> nn.Module:
        fully_shard(model, policy={nn.Linear}, process_group=ctx.group, **options)
        model(torch.ones(2, 4)).sum().backward()
        return model

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))

    pretrained = make(0)
    if ctx.rank == 0:  # on one rank only
        pretrained[2].load_state_dict(make(1)[2].state_dict())
    for model in (make(ctx.rank), pretrained):
        with pytest.warns(UserWarning, match="ranks had different values of the same parameters"):
            first_step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first_step(make(0))
        first_step(make(ctx.rank), sync_module_states=True)
        loaded = fully_shard(make(ctx.rank), policy={nn.Linear}, process_group=ctx.group)
        loaded.load_state_dict(flatshard.checkpoint.full_state_dict(first_step(make(0))))
        loaded(torch.ones(2, 4)).sum().backward()
