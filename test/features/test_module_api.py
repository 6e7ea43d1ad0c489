"""What users do to a module between steps, on a sharded one: copy, convert, overwrite, save, look at it whole."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
from models import Mlp
from parity import adamw, check_parity, full_params, mean_square, shard_with
from torch import Tensor, nn

import flatshard
from flatshard import ShardingStrategy, fully_shard, summon_full_params
from flatshard.tensors import ShardedParameter

STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
    ShardingStrategy.SHARD_OPTIM,
)
WIDTH = 13


class Block(Mlp):
    def __init__(self) -> None:
        super().__init__(WIDTH, 29, bias=False)


class Model(nn.Module):
    """A root parameter, blocks, a recurrent layer, a tied one, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.rnn = nn.GRU(WIDTH, 5, batch_first=True)
        self.head = nn.Linear(WIDTH, 29)
        self.head.weight = self.blocks[0].up.weight
        self.register_buffer("offset", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x * self.scale + self.offset)
        return torch.cat([self.head(x), self.rnn(x.unsqueeze(1))[0].squeeze(1)], -1)


POLICIES: tuple[Any, ...] = (None, {Block}, {Block, nn.GRU, nn.Linear})


def vectors(step: int, n: int) -> Tensor:
    """The same for the same step, whoever asks."""
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(step))


def sharded_and_plain(
    ctx: Any, make: Callable[[], nn.Module] = Model, policy: Any = None, strategy: ShardingStrategy = STRATEGIES[0]
) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = make()
    model = make()
    model.load_state_dict(plain.state_dict())
    return shard_with(policy, strategy, model, ctx.group), plain


def each_kind(ctx: Any):
    """Every strategy with every policy."""
    for strategy in STRATEGIES if ctx.world_size == 2 else STRATEGIES[:1]:
        for policy in POLICIES:
            ctx.note(f"{strategy.name}, policy {policy}")
            yield strategy, policy


def train_both(ctx: Any, model: nn.Module, plain: nn.Module, optimizer: Any = None, steps: int = 2) -> None:
    """Two steps of both give the same parameters. The sharded model's own optimizer may be passed."""
    optimizers = [optimizer or adamw(model.parameters()), adamw(plain.parameters())]
    for step in range(steps):
        x = vectors(step, 2 * ctx.world_size).to(next(plain.parameters()).dtype)
        mean_square(model(x[2 * ctx.rank :][:2]), x).backward()
        mean_square(plain(x), x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, plain)


def assert_same(model: nn.Module, plain: nn.Module, rtol: float = 1e-9) -> None:
    whole = full_params(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(whole[name], param.detach(), rtol=rtol, atol=1e-12, msg=name)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ---------------------------------------------------------------------------------------------------------------------
# copy.deepcopy and pickle
# ---------------------------------------------------------------------------------------------------------------------


def copy_and_train(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    for strategy, policy in each_kind(ctx):
        model, plain = sharded_and_plain(ctx, policy=policy, strategy=strategy)
        model.scale.lr_scale = 0.5
        model(vectors(0, 2))  # forward without backward
        before = values(model)
        copied = copy.deepcopy(model)
        assert type(copied) is Model
        assert list(values(copied)) == list(before)
        assert copied.head.weight is copied.blocks[0].up.weight
        assert copied.scale.lr_scale == 0.5
        units = [dataclasses.replace(u, state="sharded") for u in flatshard.describe(model).units]
        assert list(flatshard.describe(copied).units) == units
        for name, param in copied.named_parameters():
            assert isinstance(param, ShardedParameter)
            assert torch.equal(param, before[name])
            assert param.data_ptr() != model.get_parameter(name).data_ptr() or not param.numel()
            assert flatshard.full_shape(param) == flatshard.full_shape(model.get_parameter(name))
        train_both(ctx, copied, copy.deepcopy(plain))
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        assert all(p.grad is None for p in model.parameters())
        train_both(ctx, model, copy.deepcopy(plain))
        train_both(ctx, copy.deepcopy(copy.deepcopy(model)), _trained(plain, model))


def _trained(plain: nn.Module, model: nn.Module) -> nn.Module:
    result = copy.deepcopy(plain)
    for name, value in full_params(model).items():
        result.get_parameter(name).data = value
    return result


@pytest.mark.parametrize("world_size", [1, 3])
def test_deepcopy(pool, world_size):
    pool.run(copy_and_train, world_size=world_size)


def copy_parts(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    model, plain = sharded_and_plain(ctx, policy={Block})
    model.optimizer, plain.optimizer = adamw(model.parameters()), adamw(plain.parameters())
    train_both(ctx, model, plain, model.optimizer)
    copied = copy.deepcopy(model)
    held = [p for group in copied.optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, copied.parameters(), strict=True))
    assert set(copied.optimizer.state) == set(held)
    train_both(ctx, copied, copy.deepcopy(plain), steps=1, optimizer=adamw(copied.parameters()))
    model, plain = sharded_and_plain(ctx, policy={Block})
    part = copy.deepcopy(model.blocks[0])  # the root owns a parameter of it, so its copy has a copy of the root
    assert part.up.weight is not model.blocks[0].up.weight
    train_both(ctx, model, plain)
    model, plain = sharded_and_plain(ctx, Block)
    alone = copy.deepcopy(nn.ModuleList([model, nn.Tanh()]))[0]
    train_both(ctx, alone, plain)
    seen: list[Tensor] = []
    model, plain = sharded_and_plain(ctx, lambda: nn.Sequential(Block()), Block)
    for each in (model, plain):
        each[0].down.register_forward_hook(lambda module, args, out: seen.append(out))
        each(torch.ones(2, WIDTH))  # from here on flatshard has a hook there, too
    copied = copy.deepcopy(model)
    seen.clear()
    for each in (copied, plain):
        each(torch.ones(2, WIDTH))
        seen.pop().sum().backward()  # what left the unit by the hook alone
    with summon_full_params(copied, with_grads=True):
        for p, q in zip(copied.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    model, plain = sharded_and_plain(ctx, Block)
    one = copy.deepcopy(model.up.weight)  # a single parameter: this rank's part, as a plain one
    assert type(one) is nn.Parameter
    assert torch.equal(one, model.up.weight)


def test_deepcopy_of_more_and_of_less(pool):
    pool.run(copy_parts, world_size=2)


class Decays(nn.Module):
    """Its forward changes its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        return self.linear(x)


def copy_what_changes_itself(ctx) -> None:
    model, plain = sharded_and_plain(ctx, Decays)
    for _ in range(3):
        model(vectors(0, 2)), plain(vectors(0, 2))
        model, plain = copy.deepcopy(model), copy.deepcopy(plain)
        model(vectors(0, 2)), plain(vectors(0, 2))
        assert_same(model, plain)


def test_a_copy_keeps_what_its_forward_changes(pool):
    pool.run(copy_what_changes_itself)


class CopiesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.teacher = None
        copy.deepcopy(self)
        return self.linear(x)


def refuse_to_copy(ctx) -> None:
    model = fully_shard(CopiesItself(), process_group=ctx.group)
    with pytest.raises(RuntimeError, match=r"cannot copy unit .* while its parameters are unsharded: copy outside"):
        model(vectors(0, 2))
    model, _ = sharded_and_plain(ctx)
    with summon_full_params(model), pytest.raises(RuntimeError, match="cannot copy unit"):
        copy.deepcopy(model)
    model(vectors(0, 2)).sum().backward()
    copy.deepcopy(model)


def test_deepcopy_inside_forward_is_refused(pool):
    pool.run(refuse_to_copy, world_size=2)


def refuse_to_pickle(ctx) -> None:
    model, _ = sharded_and_plain(ctx)
    for save in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(TypeError, match=r"cannot be pickled.*state_dict"):
            save(model)
        with pytest.raises(TypeError, match="cannot be pickled"):
            save(model.blocks.append(fully_shard(Block(), process_group=ctx.group)))
    buffer = io.BytesIO()
    torch.save(model.scale.detach(), buffer)


def test_pickling_is_refused(pool):
    pool.run(refuse_to_pickle, world_size=2)


# ---------------------------------------------------------------------------------------------------------------------
# Converting and overwriting
# ---------------------------------------------------------------------------------------------------------------------


def convert(ctx) -> None:
    for strategy, policy in each_kind(ctx):
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.float32):
            model, plain = sharded_and_plain(ctx, policy=policy, strategy=strategy)
            params = list(model.parameters())
            model(vectors(0, 2)).sum().backward()
            model.zero_grad()
            for m in (model, plain):
                assert m.to(dtype) is m
            assert all(p is q and p.dtype == dtype for p, q in zip(model.parameters(), params, strict=True))
            x = vectors(0, 2).to(dtype)
            assert torch.equal(model(x), plain(x))  # bitwise: the same operations on the same whole parameters
            model(x).sum().backward()
            assert all(p.grad is None or p.grad.dtype == dtype for p in model.parameters())
            assert all(torch.equal(p, plain.get_parameter(n)) for n, p in full_params(model).items())
            if dtype is torch.float64:
                model.zero_grad()
                train_both(ctx, model, plain)
                model.float(), plain.float()
                assert_same(model, plain, rtol=1e-6)


@pytest.mark.parametrize("world_size", [1, 3])
def test_converting_the_whole_module(pool, world_size):
    pool.run(convert, world_size=world_size)


def convert_and_train(ctx) -> None:
    """With gradients and an optimizer of the time before."""

    def shard(model: nn.Module, group: Any) -> None:
        fully_shard(model.float(), policy={Block}, process_group=group)
        model(torch.randn(2, WIDTH)).sum().backward()
        model.double()
        assert all(p.grad is None or p.grad.dtype == torch.float64 for p in model.parameters())

    for optimizer_first in (True, False):
        check_parity(ctx, Model, vectors, steps=3, shard=shard, optimizer_first=optimizer_first)


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_goes_on_after_double(pool, world_size):
    pool.run(convert_and_train, world_size=world_size)


def convert_parts(ctx) -> None:
    for strategy in STRATEGIES:
        for name in ("up", "down"):  # a rank that holds no element of the part says the same
            model, plain = sharded_and_plain(ctx, Block, strategy=strategy)
            model.get_submodule(name).to(torch.bfloat16)
            with pytest.raises(
                RuntimeError, match=r"changed dtype or device, but others of the same unit did not.*bfloat16"
            ):
                model(vectors(0, 2))
            model.get_submodule(name).to(torch.float32)
            plain.get_submodule(name).to(torch.bfloat16).to(torch.float32)
            assert torch.equal(model(vectors(0, 2)), plain(vectors(0, 2)))
    model, _ = sharded_and_plain(ctx, policy={Block})
    model.blocks[1].to(torch.float64)  # a unit of its own
    model.blocks[1](vectors(0, 2).double()).sum().backward()
    assert model.blocks[1].up.weight.grad.dtype == torch.float64


@pytest.mark.parametrize("world_size", [2, 4])
def test_converting_a_part(pool, world_size):
    pool.run(convert_parts, world_size=world_size)


def overwrite(ctx) -> None:
    torch.set_default_dtype(torch.float64)

    def replace(p: nn.Parameter) -> None:
        p.data = p.data * 0.5 + 0.25

    def copy_in(p: nn.Parameter) -> None:
        p.data.copy_(p.data * 0.5 + 0.25)

    def in_place(p: nn.Parameter) -> None:
        with torch.no_grad():
            p.mul_(0.5).add_(0.25)

    def by_detach(p: nn.Parameter) -> None:
        p.detach().mul_(0.5).add_(0.25)

    for strategy, policy in each_kind(ctx):
        for change in (replace, copy_in, in_place, by_detach):
            model, plain = sharded_and_plain(ctx, policy=policy, strategy=strategy)
            optimizer = adamw(model.parameters())
            x = vectors(0, 2)
            model(x).sum().backward()
            optimizer.zero_grad()
            for m in (model, plain):
                m(x)  # the outermost unit may stay whole after this
                for p in m.parameters():
                    change(p)
            assert torch.equal(model(x), plain(x)), change.__name__
            train_both(ctx, model, plain, optimizer)


@pytest.mark.parametrize("world_size", [1, 3])
def test_values_changed_between_steps(pool, world_size):
    pool.run(overwrite, world_size=world_size)


def refuse_resize(ctx) -> None:
    model, _ = sharded_and_plain(ctx, Block)
    for shape in ((3,), (40, 40), ()):
        kept = model.down.weight.data
        model.down.weight.data = torch.zeros(shape)
        with pytest.raises(RuntimeError, match=r"'down.weight' was replaced by a tensor of shape .* resize the module"):
            model(vectors(0, 2))
        model.down.weight.data = kept
        model(vectors(0, 2)).sum().backward()


@pytest.mark.parametrize("world_size", [1, 2])
def test_resizing_is_refused(pool, world_size):
    pool.run(refuse_resize, world_size=world_size)


def load_local(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    for strategy, policy in each_kind(ctx):
        for assign in (False, True):
            ctx.note(f"assign={assign}, {strategy.name}, policy {policy}")
            model, plain = sharded_and_plain(ctx, policy=policy, strategy=strategy)
            other = fully_shard(Model(), policy=policy, strategy=strategy, process_group=ctx.group)
            params = dict(other.named_parameters())
            other(vectors(0, 2))
            local = {n: v.clone() for n, v in model.state_dict().items()}
            assert not any(other.load_state_dict(local, assign=assign))
            assert torch.equal(other(vectors(0, 2)), model(vectors(0, 2)))
            train_both(ctx, other, plain)
            assert all(p is params[n] for n, p in other.named_parameters())


@pytest.mark.parametrize("world_size", [1, 2])
def test_load_state_dict_of_local_shards(pool, world_size):
    pool.run(load_local, world_size=world_size)


def replace_registrations(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    for strategy, policy in each_kind(ctx):
        model, plain = sharded_and_plain(ctx, policy=policy, strategy=strategy)
        params = dict(model.named_parameters())
        optimizer = adamw(model.parameters())
        model.scale = nn.Parameter(params["scale"].detach() * 2)
        model.rnn.weight_ih_l0 = nn.Parameter(params["rnn.weight_ih_l0"].detach() * 3, requires_grad=False)
        plain.scale.data.mul_(2)
        plain.rnn.weight_ih_l0.data.mul_(3)
        plain.rnn.weight_ih_l0.requires_grad_(False)
        train_both(ctx, model, plain, optimizer)
        assert all(p is params[n] for n, p in model.named_parameters())
        if ctx.world_size > 1 and strategy is not ShardingStrategy.NO_SHARD:
            model.scale = nn.Parameter(torch.ones(WIDTH + 1))  # never a rank's part
            with pytest.raises(RuntimeError, match="'scale' was replaced by a tensor of shape"):
                model(vectors(0, 2))
    model, _ = sharded_and_plain(ctx)
    with pytest.raises(RuntimeError, match=r"up.weight' is sharded, .*'weight' would be taken out of its module"):
        del model.blocks[0].up.weight
    with pytest.raises(RuntimeError, match=r"functional_call would replace parameter 'scale', which is sharded"):
        torch.func.functional_call(model, {"scale": torch.ones(WIDTH)}, (vectors(0, 2),))


@pytest.mark.parametrize("world_size", [1, 3])
def test_parameters_registered_anew(pool, world_size):
    pool.run(replace_registrations, world_size=world_size)


def convert_by_swapping(ctx) -> None:
    model = fully_shard(nn.Linear(4, 4), process_group=ctx.group)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(RuntimeError, match=r"Couldn't swap Linear\.weight"):
            model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert type(model.weight) is flatshard.tensors.ShardedParameter
    model(torch.ones(2, 4)).sum().backward()


def test_conversion_by_swapping_is_refused(pool):
    """It would give the objects that an optimizer holds other classes and values, unseen."""
    pool.run(convert_by_swapping)


def fill_none(ctx) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    plain = copy.deepcopy(model)
    fully_shard(model, policy={nn.Linear}, process_group=ctx.group)
    copied = copy.deepcopy(model)
    for sharded in (model, copied):
        linear = sharded[0]
        assert linear.bias is None
        assert list(linear._parameters) == ["weight", "bias"]
        linear.bias = nn.Parameter(torch.full((4,), 2.0))
        assert isinstance(linear.bias, nn.Parameter)
        with torch.no_grad():
            assert torch.allclose(linear(torch.zeros(1, 4)), torch.full((1, 4), 2.0))
        linear.bias = None
        assert linear.bias is None
        del linear.bias
        with pytest.raises(AttributeError, match="bias"):
            _ = linear.bias
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_a_bias_that_is_none(pool):
    """It is found without a search, and can be registered or deleted as in any module."""
    pool.run(fill_none)


class Clamped(nn.Module):
    """Changes its own weights in place in forward, as some GAN critics and normalised layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.linear.weight.clamp_(-0.1, 0.1)
                self.linear.bias.data.fill_(0.5)
        return self.linear(x)


def clamp(ctx) -> None:
    for strategy in STRATEGIES:
        for policy in (None, {Clamped}):
            ctx.note(f"{strategy.name}, policy {policy}")
            check_parity(
                ctx,
                lambda: nn.Sequential(Clamped(), nn.Tanh(), Clamped()),
                vectors,
                steps=3,
                shard=functools.partial(shard_with, policy, strategy),
            )


@pytest.mark.parametrize("world_size", [1, 3])
def test_weights_changed_inside_forward_are_kept(pool, world_size):
    pool.run(clamp, world_size=world_size)


# ---------------------------------------------------------------------------------------------------------------------
# flat_parameters, describe, repr
# ---------------------------------------------------------------------------------------------------------------------


def train_flat(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    for strategy, policy in each_kind(ctx):
        model, plain = sharded_and_plain(ctx, policy=policy, strategy=strategy)
        flats = flatshard.flat_parameters(model)
        assert flatshard.flat_parameters(model) == flats or all(
            a is b for a, b in zip(flatshard.flat_parameters(model), flats, strict=True)
        )
        assert sorted(n for f in flats for n in f.fqns) == sorted(n for n, _ in model.named_parameters())
        assert all(f.dim() == 1 and f.requires_grad for f in flats)
        optimizers = [adamw(flats), adamw(plain.parameters())]
        for step in range(3):
            x = vectors(step, 4 * ctx.world_size)
            for part in (0, 2):  # two backwards a step
                start = 4 * ctx.rank + part
                mean_square(model(x[start : start + 2]), x).backward()
                whole = torch.cat([x[4 * r + part :][:2] for r in range(ctx.world_size)])
                mean_square(plain(whole), x).backward()
            assert all(p.grad is None for p in model.parameters())
            assert all(f.grad.shape == f.shape for f in flats)
            with summon_full_params(model, with_grads=True, writeback=False):
                for name, p in plain.named_parameters():
                    torch.testing.assert_close(model.get_parameter(name).grad, p.grad, rtol=1e-9, atol=1e-12)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
        assert_same(model, plain)
        copied = copy.deepcopy(model)
        flats = flatshard.flat_parameters(copied)
        copied(vectors(0, 2)).sum().backward()
        assert all(f.grad is not None for f in flats)
        assert all(p.grad is None for p in copied.parameters())


@pytest.mark.parametrize("world_size", [1, 3])
def test_flat_parameters_train_alike(pool, world_size):
    pool.run(train_flat, world_size=world_size)


def flat_and_frozen(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    model, plain = (nn.Sequential(Block(), Block()) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    for m in (model, plain):
        m[0].up.weight.requires_grad_(False)
    fully_shard(model, policy={Block}, process_group=ctx.group)
    flats = flatshard.flat_parameters(model)
    assert not any("0.up.weight" in f.fqns for f in flats)
    train_both(ctx, model, plain, adamw(flats))
    model = fully_shard(nn.Sequential(Block(), Block()), process_group=ctx.group)
    model[1].down.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"\['1.down.weight'\] were frozen after fully_shard"):
        flatshard.flat_parameters(model)
    with pytest.raises(ValueError, match="nothing in this Block is sharded"):
        flatshard.flat_parameters(Block())
    with pytest.raises(ValueError, match="nothing in this Block is sharded"):
        flatshard.describe(Block())


def test_flat_parameters_and_frozen_ones(pool):
    pool.run(flat_and_frozen, world_size=2)


def describe_model(ctx) -> list[str]:
    model = nn.Sequential(Block(), nn.Tanh(), Block(), nn.Linear(WIDTH, 3))
    model[2].up.requires_grad_(False)
    model[3].weight.data = model[3].weight.data.bfloat16()
    policy = flatshard.CustomPolicy(lambda m: {"strategy": STRATEGIES[2]} if m is model[2] else isinstance(m, Block))
    fully_shard(model, policy=policy, process_group=ctx.group)
    flatshard.unshard(model[0])
    text = str(flatshard.describe(model))
    flatshard.reshard(model[0])
    return [text, *(repr(p) for p in [model[0].down.weight, model[2].up.weight])]


class Printed(expecttest.TestCase):
    @pytest.fixture(autouse=True)
    def _take(self, pool) -> None:
        self.pool = pool

    def test_describe(self) -> None:
        text = self.pool.run(describe_model, world_size=2)[1][0]
        self.assertExpectedInline(
            text,
            """\
unit    module      strategy    state      dtype     trainable  params  numel  padding  shard here
------  ----------  ----------  ---------  --------  ---------  ------  -----  -------  ----------
<root>  Sequential  FULL_SHARD  sharded    bfloat16  yes             1     39        9          24
                                           float32   yes             1      3        5           4
0       Block       FULL_SHARD  unsharded  float32   yes             3    783       49         416
2       Block       NO_SHARD    sharded    float32   no              2    406       10         416
                                           float32   yes             1    377        7         384
3 units, 5 flat parameters, 1,608 elements over 2 ranks on cpu; 4,928 bytes of parameters here between steps""",
        )

    def test_repr(self) -> None:
        printed = self.pool.run(describe_model, world_size=2)[1][1:]
        self.assertExpectedInline(
            "\n".join(printed),
            """\
ShardedParameter('0.down.weight', shape=(13, 29), dtype=torch.float32, device=cpu, requires_grad=True, elements 4:377 here)
ShardedParameter('2.up.weight', shape=(29, 13), dtype=torch.float32, device=cpu, requires_grad=False, elements 0:377 here)""",
        )


# ---------------------------------------------------------------------------------------------------------------------
# unshard and reshard
# ---------------------------------------------------------------------------------------------------------------------


def states(model: nn.Module) -> list[str]:
    return [u.state for u in flatshard.describe(model).units]


def unshard_and_reshard(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    model, plain = sharded_and_plain(ctx, policy={Block})
    params = list(model.parameters())
    sharded, gathered, whole = ["sharded"] * 3, ["unsharding", *["sharded"] * 2], ["unsharded", *["sharded"] * 2]
    assert flatshard.unshard(model) is None
    assert states(model) == whole
    assert model.scale.shape == (WIDTH,)
    assert torch.equal(model.scale, plain.scale)
    assert not isinstance(model.scale, ShardedParameter)
    flatshard.unshard(model)
    assert states(model) == whole
    flatshard.reshard(model)
    assert states(model) == sharded
    assert isinstance(model.scale, ShardedParameter)
    flatshard.reshard(model)

    handle = flatshard.unshard(model, async_op=True)
    assert states(model) == gathered
    assert isinstance(model.scale, ShardedParameter)
    handle.wait()
    handle.wait()
    assert states(model) == whole
    assert torch.equal(model.scale, plain.scale)
    flatshard.reshard(model)

    flatshard.unshard(model, async_op=True)
    flatshard.reshard(model)  # never waited for
    assert states(model) == sharded

    flatshard.unshard(model, recurse=True)
    for name, param in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), param)
    assert torch.equal(model(vectors(0, 2)), plain(vectors(0, 2)))
    assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
    flatshard.reshard(model)
    flatshard.unshard(model)
    flatshard.reshard(model, recurse=False)
    assert states(model) == sharded

    handle = flatshard.unshard(model, recurse=True, async_op=True)  # ahead of forward, and waited for by nobody
    train_both(ctx, model, plain, adamw(params))
    assert states(model) == sharded
    handle.wait()  # too late: there is nothing to show
    assert states(model) == sharded
    assert all(p is q for p, q in zip(model.parameters(), params, strict=True))

    flatshard.unshard(model, recurse=True)  # then the shards change
    with torch.no_grad():
        for p in [*params, *plain.parameters()]:
            p.add_(1)
    torch.testing.assert_close(model(vectors(0, 2)), plain(vectors(0, 2)))
    flatshard.reshard(model)
    flatshard.unshard(model.head)  # not a unit: the one that owns its parameters is gathered
    assert states(model) == ["unsharded", *sharded[1:]]
    flatshard.reshard(model.head)
    assert states(model) == sharded
    with pytest.raises(ValueError, match="nothing in this Tanh is sharded"):
        flatshard.unshard(nn.Tanh())


def test_unshard_and_reshard(pool):
    pool.run(unshard_and_reshard, world_size=2)
    pool.run(unshard_and_reshard, world_size=3)


class ReshardsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.root: list[nn.Module] = [self]

    def forward(self, x: Tensor) -> Tensor:
        flatshard.reshard(self.root[0])
        return self.linear(x)


def refuse_busy(ctx) -> None:
    model = nn.Sequential(ReshardsItself(), Block())
    model[0].root[0] = model
    fully_shard(model, policy={ReshardsItself}, process_group=ctx.group)
    with pytest.raises(RuntimeError, match=r"reshard: \['<root>', '0'\] are in use"):
        model(vectors(0, 2))
    with summon_full_params(model[0]), pytest.raises(RuntimeError, match=r"reshard: \['0'\] are in use"):
        flatshard.reshard(model)
    flatshard.reshard(model)
    model, _ = sharded_and_plain(ctx, policy={Block})  # between forward and backward it is allowed
    loss = model(vectors(0, 2)).sum()
    flatshard.reshard(model)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_reshard_of_a_busy_unit(pool):
    pool.run(refuse_busy, world_size=2)


# ---------------------------------------------------------------------------------------------------------------------
# summon_full_params
# ---------------------------------------------------------------------------------------------------------------------


def summon_values(ctx) -> None:
    for strategy, policy in each_kind(ctx):
        model, plain = sharded_and_plain(ctx, policy=policy, strategy=strategy)
        expected = values(plain)
        outside = dict(model.named_parameters())
        for offload in (False, True):
            for rank0_only in (False, True):
                with summon_full_params(model, writeback=False, rank0_only=rank0_only, offload_to_cpu=offload):
                    if rank0_only and ctx.rank:
                        assert dict(model.named_parameters()) == outside  # F3
                    else:
                        assert list(dict(model.named_parameters())) == list(expected)
                        for name, param in model.named_parameters():  # F1, F2
                            assert type(param) is nn.Parameter
                            assert param.requires_grad
                            assert torch.equal(param, expected[name])
                            assert param.device.type == "cpu"
                        assert model.head.weight is model.blocks[0].up.weight
                assert dict(model.named_parameters()) == outside
                assert set(states(model)) == {"sharded"}
        with pytest.raises(ValueError, match="needs writeback=False"), summon_full_params(model, rank0_only=True):
            pass


@pytest.mark.parametrize("world_size", [1, 3])
def test_summon_shows_whole_parameters(pool, world_size):
    pool.run(summon_values, world_size=world_size)


def double_and_raise(model: nn.Module, offload: bool) -> None:
    with summon_full_params(model, offload_to_cpu=offload):
        for p in model.parameters():
            p.data.mul_(2)
        raise ZeroDivisionError


def summon_and_write(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    for strategy, policy in each_kind(ctx):
        for offload in (False, True):
            model, plain = sharded_and_plain(ctx, policy=policy, strategy=strategy)
            before = values(model)
            model(vectors(0, 2))
            with summon_full_params(model, writeback=False, offload_to_cpu=offload):
                for p in model.parameters():
                    p.data.fill_(7)
            assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
            assert torch.equal(model(vectors(0, 2)), plain(vectors(0, 2)))
            with pytest.raises(ZeroDivisionError):
                double_and_raise(model, offload)
            assert dict(model.named_parameters()).keys() == before.keys()
            assert all(isinstance(p, ShardedParameter) for p in model.parameters())
            assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
            with summon_full_params(model, writeback=True, offload_to_cpu=offload):
                for p in model.parameters():
                    p.data.mul_(2)
                with torch.no_grad():
                    model.head.bias.add_(1)
            for p in plain.parameters():
                p.data.mul_(2)
            plain.head.bias.data.add_(1)
            assert torch.equal(model(vectors(0, 2)), plain(vectors(0, 2)))
            train_both(ctx, model, plain)


@pytest.mark.parametrize("world_size", [1, 3])
def test_summon_writes_back_or_not(pool, world_size):
    pool.run(summon_and_write, world_size=world_size)


def summon_grads(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    for strategy, policy in each_kind(ctx):
        for offload in (False, True):
            model, plain = sharded_and_plain(ctx, policy=policy, strategy=strategy)
            x = vectors(0, ctx.world_size)
            model(x[ctx.rank : ctx.rank + 1])[:, 3:].square().mean().backward()
            plain(x)[:, 3:].square().mean().backward()
            for m in (model, plain):
                m.scale.grad = None
            with summon_full_params(model, writeback=False, with_grads=True, offload_to_cpu=offload):
                for name, p in plain.named_parameters():
                    got = model.get_parameter(name).grad
                    assert (got is None) == (p.grad is None)
                    if got is not None:
                        torch.testing.assert_close(got, p.grad, rtol=1e-9, atol=1e-12, msg=name)
                        got.zero_()
                model.head.bias.grad = None
            assert model.scale.grad is None
            with summon_full_params(model, with_grads=True, offload_to_cpu=offload):  # the edits above are gone
                for name, p in plain.named_parameters():
                    if p.grad is not None:
                        torch.testing.assert_close(model.get_parameter(name).grad, p.grad, rtol=1e-9, atol=1e-12)
                for m in (model, plain):
                    m.blocks[1].down.weight.grad.mul_(3)
                    m.head.bias.grad = None
                    m.scale.grad = torch.ones_like(m.scale)
            assert all((p.grad is None) == (n == "head.bias") for n, p in model.named_parameters())
            assert all(p.grad is None or p.grad.shape == p.shape for p in model.parameters())
            optimizers = [adamw(m.parameters()) for m in (model, plain)]
            for optimizer in optimizers:
                optimizer.step()
            assert_same(model, plain)


@pytest.mark.parametrize("world_size", [1, 3])
def test_summon_shows_gradients(pool, world_size):
    pool.run(summon_grads, world_size=world_size)


def summon_grads_twice(ctx) -> None:
    """An outer context shows the gradients that an inner one has changed, and does not undo the change."""
    bf16 = torch.bfloat16
    for precision in (
        None,
        flatshard.MixedPrecision(bf16),
        flatshard.MixedPrecision(bf16, bf16, keep_low_precision_grads=True),
    ):
        for offload in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
            fully_shard(model, process_group=ctx.group, mixed_precision=precision)
            model(torch.ones(1, 4)).sum().backward()
            arguments = {"with_grads": True, "offload_to_cpu": offload}
            with contextlib.suppress(ValueError), flatshard.summon_full_params(model, **arguments):
                expected = model[0].weight.grad / 2
                with flatshard.summon_full_params(model, **arguments):
                    model[0].weight.grad.mul_(0.5)
                assert torch.equal(model[0].weight.grad, expected)
                raise ValueError
            with flatshard.summon_full_params(model, with_grads=True):
                assert torch.equal(model[0].weight.grad, expected)


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_inner_summon_changes_gradients(pool, world_size):
    pool.run(summon_grads_twice, world_size=world_size)


def summon_and_run(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    for strategy, policy in each_kind(ctx):
        model, plain = sharded_and_plain(ctx, policy=policy, strategy=strategy)
        x = vectors(0, ctx.world_size)
        mine = x[ctx.rank : ctx.rank + 1]
        with summon_full_params(model):
            with torch.no_grad():
                assert torch.equal(model(mine), plain(mine))
            for inner in (model, model.blocks[0] if policy else model):  # nested
                with summon_full_params(inner):
                    model.blocks[0].up.weight.data.add_(1)
                plain.blocks[0].up.weight.data.add_(1)
                assert torch.equal(model.blocks[0].up.weight, plain.blocks[0].up.weight)
            model.scale.data.mul_(2)
        plain.scale.data.mul_(2)
        assert_same(model, plain)
        with summon_full_params(model, writeback=False):
            mean_square(model(mine), mine).backward()
            with torch.no_grad():
                model(mine)
        mean_square(plain(x), x).backward()
        assert set(states(model)) == {"sharded"}
        with summon_full_params(model, writeback=False):
            loss = mean_square(model(mine), mine)
        loss.backward()  # outside, of a forward inside
        mean_square(plain(x), x).backward()
        with summon_full_params(model, writeback=False, with_grads=True):
            for name, p in plain.named_parameters():
                torch.testing.assert_close(model.get_parameter(name).grad, p.grad, rtol=1e-9, atol=1e-12, msg=name)
            with torch.no_grad():
                model(mine)
            with pytest.raises(RuntimeError, match=r"inside summon_full_params\(with_grads=True\)"):
                model(mine)
        with summon_full_params(model, writeback=False, offload_to_cpu=True):
            with torch.no_grad():
                model(mine)
            with pytest.raises(RuntimeError, match=r"inside summon_full_params\(offload_to_cpu=True\)"):
                model(mine)
        optimizers = [adamw(m.parameters()) for m in (model, plain)]
        for optimizer in optimizers:
            optimizer.step()
        assert_same(model, plain)


@pytest.mark.parametrize("world_size", [1, 3])
def test_forwards_inside_summon(pool, world_size):
    pool.run(summon_and_run, world_size=world_size)


def summon_some(ctx) -> None:
    model, plain = sharded_and_plain(ctx, policy={Block, nn.GRU})
    with summon_full_params(model, recurse=False):
        assert states(model) == ["unsharded", "sharded", "sharded", "sharded"]
        assert torch.equal(model.scale, plain.scale)
        assert isinstance(model.blocks[1].up.weight, ShardedParameter)
    with summon_full_params(model.blocks[0], recurse=False):  # and the owner of its tied parameter
        assert model.blocks[0].up.weight.shape == (29, WIDTH)
        assert isinstance(model.blocks[1].up.weight, ShardedParameter)
    with summon_full_params(model.rnn):  # one that caches its weights elsewhere
        assert all(p.dim() == q.dim() for p, q in zip(model.rnn._flat_weights, plain.rnn._flat_weights, strict=True))
    assert all(isinstance(p, ShardedParameter) for p in model.rnn._flat_weights)

    parent = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))  # not sharded itself
    whole = values(parent)
    fully_shard(parent[0], process_group=ctx.group)
    fully_shard(parent[1], process_group=ctx.group, strategy=ShardingStrategy.NO_SHARD)
    for offload in (False, True):
        with summon_full_params(parent, offload_to_cpu=offload):  # F1, F2
            assert all(type(p) is nn.Parameter for p in parent.parameters())
            assert all(torch.equal(p, whole[n]) for n, p in parent.named_parameters())
    with summon_full_params(parent[0].up):  # not a unit: the one that owns its parameters is gathered
        assert torch.equal(parent[0].up.weight, whole["0.up.weight"])
    with pytest.raises(ValueError, match="nothing in this Linear is sharded"), summon_full_params(parent[2]):
        pass
    assert dist.get_world_size(ctx.group) == ctx.world_size


def test_summon_of_a_part_and_of_a_parent(pool):
    pool.run(summon_some, world_size=2)
    pool.run(summon_some, world_size=3)


def frozen_with_gradient(ctx) -> None:
    """Frozen alone in its unit after a backward: its gradient is shown, and survives the write-back."""
    for flat in (False, True):
        model = fully_shard(
            nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), policy={nn.Linear}, process_group=ctx.group
        )
        params = flatshard.flat_parameters(model) if flat else list(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        before = [p.grad.clone() for p in params]
        model[0].requires_grad_(False)
        with summon_full_params(model, with_grads=True):
            assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
        assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_frozen_parameter_keeps_its_gradient(pool, world_size):
    pool.run(frozen_with_gradient, world_size=world_size)


class NotCopied(nn.Module):
    """Copied last, it cannot be."""

    def __deepcopy__(self, memo: Any) -> NotCopied:
        raise ValueError("cannot be copied")


def step_after_a_copy_that_failed(ctx) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), process_group=ctx.group)
    model.append(NotCopied())
    kept = []
    try:
        copy.deepcopy(model)
    except ValueError as e:
        kept.append(e)  # with its frames, and so with all that was copied
    plain = nn.Linear(4, 4)
    plain(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert len(kept) == 1
    del model[2]
    model(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_copy_that_failed_leaves_nothing_behind(pool):
    pool.run(step_after_a_copy_that_failed)
