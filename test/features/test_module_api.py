"""What users do to a module between steps, on a sharded one: copy, convert, overwrite, look at it whole.

Orders of these verbs, and what they do to training: ``together/test_programs.py``.
"""

from __future__ import annotations

import copy
import dataclasses
import io
from typing import Any

import expecttest
import pytest
import torch
from models import Mlp
from on_ranks import ranks
from parity import adamw, check_same_gradients, check_same_params, mean_square, parts, step_all, twins
from torch import Tensor, nn

import flatshard
from flatshard import ShardingStrategy, fully_shard, summon_full_params
from flatshard.tensors import ShardedParameter

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
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


KINDS: tuple[tuple[ShardingStrategy, Any], ...] = (
    (FULL, {Block}),
    (GRAD_OP, None),
    (NO_SHARD, {Block, nn.GRU, nn.Linear}),
    (ShardingStrategy.SHARD_OPTIM, {Block}),
)


def vectors(step: int, n: int) -> Tensor:
    """The same for the same step, whoever asks."""
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(step)).double()


def each_kind(ctx: Any):
    """A plain model, and the same one sharded by some strategies, each with some policy."""
    for strategy, policy in KINDS:
        ctx.note(f"{strategy.name}, policy {policy}")
        yield strategy, *twins(ctx, Model, policy, strategy=strategy)


def train_both(ctx: Any, model: nn.Module, plain: nn.Module, optimizer: Any = None, steps: int = 2) -> None:
    """Two steps of both give the same parameters. The sharded model's own optimizer may be passed."""
    optimizers = [optimizer or adamw(model.parameters()), adamw(plain.parameters())]
    for step in range(steps):
        x = vectors(step, 2 * ctx.world_size)
        for m, part in zip((plain, model), parts(ctx, x), strict=True):
            mean_square(m(part), x).backward()
        step_all(optimizers)
    check_same_params(model, plain)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# -- copy.deepcopy -----------------------------------------------------------------------------------------------------


@ranks(1, 3)
def test_deepcopy(ctx):
    for _, plain, model in each_kind(ctx):
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
        train_both(ctx, copied, copy.deepcopy(plain), steps=1)
        assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())
        train_both(ctx, copy.deepcopy(copy.deepcopy(model)), plain, steps=1)


@ranks(2)
def test_deepcopy_of_more_and_of_less(ctx):
    plain, model = twins(ctx, Model, {Block})
    model.optimizer, plain.optimizer = adamw(model.parameters()), adamw(plain.parameters())
    train_both(ctx, model, plain, model.optimizer)
    copied = copy.deepcopy(model)
    held = [p for group in copied.optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, copied.parameters(), strict=True))
    assert set(copied.optimizer.state) == set(held)
    train_both(ctx, copied, copy.deepcopy(plain), steps=1, optimizer=adamw(copied.parameters()))
    part = copy.deepcopy(model.blocks[0])  # the root owns a parameter of it, so its copy has a copy of the root
    assert part.up.weight is not model.blocks[0].up.weight
    plain, model = twins(ctx, Block)
    train_both(ctx, copy.deepcopy(nn.ModuleList([model, nn.Tanh()]))[0], plain)
    one = copy.deepcopy(model.up.weight)  # a single parameter: this rank's part, as a plain one
    assert type(one) is nn.Parameter
    assert torch.equal(one, model.up.weight)
    seen: list[Tensor] = []
    plain, model = twins(ctx, lambda: nn.Sequential(Block()), Block)
    for each in (model, plain):
        each[0].down.register_forward_hook(lambda module, args, out: seen.append(out))
        each(vectors(0, 2))  # from here on flatshard has a hook there, too
    copied = copy.deepcopy(model)
    seen.clear()
    for each in (copied, plain):
        each(vectors(0, 2))
        seen.pop().sum().backward()  # what left the unit by the hook alone
    check_same_gradients(copied, plain)


@ranks(2)
def test_deepcopy_inside_forward_is_refused(ctx):
    model = fully_shard(Model().double(), process_group=ctx.group)
    hook = model.blocks[0].register_forward_pre_hook(lambda *_: copy.deepcopy(model) and None)
    with pytest.raises(RuntimeError, match=r"cannot copy unit .* while its parameters are unsharded: copy outside"):
        model(vectors(0, 2))
    hook.remove()
    with summon_full_params(model), pytest.raises(RuntimeError, match="cannot copy unit"):
        copy.deepcopy(model)
    model(vectors(0, 2)).sum().backward()
    copy.deepcopy(model)


class MakesTarget(nn.Module):
    """BYOL's: the target is copied from the network in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4))
        self.target: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.target is None:
            self.target = copy.deepcopy(self.net).requires_grad_(False)
        return (self.net(x) - self.target(x)).square().mean()


@ranks(2)
def test_a_copy_of_a_module_without_its_unit_does_not_compute_with_parts(ctx):
    x, made = torch.randn(2, 4), r"Make the copy before fully_shard; or shard the module as a unit of its own"
    model = fully_shard(MakesTarget(), process_group=ctx.group)
    with pytest.raises(RuntimeError, match=rf"cannot copy the module of parameter 'net.0.weight'.*{made}"):
        model(x)
    model.target = copy.deepcopy(model.net)
    assert [p.shape for p in model.target.parameters()] == [p.shape for p in model.net.parameters()]
    with pytest.raises(RuntimeError, match=rf"Linear.forward would compute with .* part of 'net.0.weight'.*{made}"):
        model(x)
    for part, whole in zip(
        model.target.parameters(), flatshard.checkpoint.full_state_dict(model.net).values(), strict=True
    ):
        part.data = whole
    assert model(x) == 0.0
    made_apart = fully_shard(MakesTarget(), policy={nn.Linear}, process_group=ctx.group)
    made_apart(x).backward()
    made_apart.target[0].weight.data.zero_()
    assert made_apart(x) > 0


class NotCopied(nn.Module):
    """Copied last, it cannot be."""

    def __deepcopy__(self, memo: Any) -> NotCopied:
        raise ValueError("cannot be copied")


@ranks(2)
def test_a_copy_that_failed_leaves_nothing_behind(ctx):
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), process_group=ctx.group)
    model.append(NotCopied())
    with pytest.raises(
        ValueError, match="cannot be copied"
    ) as kept:  # with its frames, and so with all that was copied
        copy.deepcopy(model)
    del model[2]
    for each in (nn.Linear(4, 4), model):
        each(torch.ones(1, 4)).sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert kept.value
    torch.save(model[0].weight.detach(), io.BytesIO())  # a part is a tensor as any other


# -- Converting and overwriting ----------------------------------------------------------------------------------------


@ranks(2, 4)
def test_converting_a_part(ctx):
    for strategy, name in ((FULL, "up"), (GRAD_OP, "down"), (NO_SHARD, "up"), (FULL, "down")):
        # A rank that holds no element of the part says the same.
        plain, model = twins(ctx, Block, strategy=strategy)
        params = list(model.parameters())
        model.get_submodule(name).to(torch.bfloat16)
        message = r"changed dtype or device, but others of the same unit did not.*bfloat16"
        with pytest.raises(RuntimeError, match=message):
            model(vectors(0, 2))
        model.get_submodule(name).to(torch.float64)
        plain.get_submodule(name).to(torch.bfloat16).to(torch.float64)
        assert torch.equal(model(vectors(0, 2)), plain(vectors(0, 2)))
        for dtype in (torch.float16, torch.bfloat16):
            x = vectors(0, 2).to(dtype)
            assert torch.equal(model.to(dtype)(x), plain.to(dtype)(x))
        model(x).sum().backward()
        assert all(p is q and p.grad.dtype is dtype for p, q in zip(model.parameters(), params, strict=True))
    _, model = twins(ctx, Model, {Block})
    model.blocks[1].to(torch.float32)  # a unit of its own
    model.blocks[1](vectors(0, 2).float()).sum().backward()
    assert model.blocks[1].up.weight.grad.dtype is torch.float32


@ranks(1, 2)
def test_resizing_is_refused(ctx):
    _, model = twins(ctx, Block)
    for shape in ((3,), (40, 40), ()):
        kept = model.down.weight.data
        model.down.weight.data = torch.zeros(shape)
        with pytest.raises(RuntimeError, match=r"'down.weight' was replaced by a tensor of shape .* resize the module"):
            model(vectors(0, 2))
        model.down.weight.data = kept
        model(vectors(0, 2)).sum().backward()


@ranks(1, 3)
def test_parameters_registered_anew(ctx):
    for strategy, plain, model in each_kind(ctx):
        params = dict(model.named_parameters())
        optimizer = adamw(model.parameters())
        model.scale = nn.Parameter(params["scale"].detach() * 2)
        model.rnn.weight_ih_l0 = nn.Parameter(params["rnn.weight_ih_l0"].detach() * 3, requires_grad=False)
        plain.scale.data.mul_(2)
        plain.rnn.weight_ih_l0.data.mul_(3)
        plain.rnn.weight_ih_l0.requires_grad_(False)
        train_both(ctx, model, plain, optimizer)
        model.scale = nn.Parameter(params["scale"].detach() * 2)  # and nothing else
        plain.scale.data.mul_(2)
        train_both(ctx, model, plain)
        assert all(p is params[n] for n, p in model.named_parameters())
        if ctx.world_size > 1 and strategy is not NO_SHARD:
            model.scale = nn.Parameter(torch.ones(WIDTH + 1))  # never a rank's part
            with pytest.raises(RuntimeError, match="'scale' was replaced by a tensor of shape"):
                model(vectors(0, 2))
    _, model = twins(ctx, Model)
    own = model.scale
    flatshard.unshard(model)
    model.scale = nn.Parameter(torch.ones(WIDTH))
    flatshard.reshard(model)
    assert model.scale is own
    with pytest.raises(RuntimeError, match=r"up.weight' is sharded, .*'weight' would be taken out of its module"):
        del model.blocks[0].up.weight
    with pytest.raises(RuntimeError, match=r"functional_call would replace parameter 'scale', which is sharded"):
        torch.func.functional_call(model, {"scale": torch.ones(WIDTH)}, (vectors(0, 2),))


@ranks(2)
def test_conversion_by_swapping_is_refused(ctx):
    """It would give the objects that an optimizer holds other classes and values, unseen."""
    model = fully_shard(nn.Linear(4, 4), process_group=ctx.group)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(RuntimeError, match=r"Couldn't swap Linear\.weight"):
            model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert type(model.weight) is ShardedParameter
    model(torch.ones(2, 4)).sum().backward()


@ranks(2)
def test_a_bias_that_is_none(ctx):
    """It is found without a search, and can be registered or deleted as in any module."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 4, bias=False)), policy={nn.Linear}, process_group=ctx.group)
    for sharded in (model, copy.deepcopy(model)):
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
    assert list(model.state_dict()) == ["0.weight"]


# -- flat_parameters, describe, repr -----------------------------------------------------------------------------------


@ranks(1, 3)
def test_flat_parameters(ctx):
    for strategy, plain, model in each_kind(ctx):
        for m in (model, plain):
            m.blocks[1].requires_grad_(False)
        if strategy is GRAD_OP:  # where this is no unit of its own
            with pytest.raises(ValueError, match=r"blocks.1.down.weight'\] were frozen after fully_shard"):
                flatshard.flat_parameters(model)
            continue
        flats = flatshard.flat_parameters(model)
        assert all(a is b for a, b in zip(flatshard.flat_parameters(model), flats, strict=True))
        assert sorted(n for f in flats for n in f.fqns) == sorted(
            n for n, p in model.named_parameters() if p.requires_grad
        )
        optimizers = [adamw(flats), adamw(plain.parameters())]
        for step in range(2):
            x = vectors(step, 2 * ctx.world_size)
            for m, mine in zip((plain, model), parts(ctx, x), strict=True):
                mean_square(m(mine), x).backward()
            assert all(p.grad is None for p in model.parameters())
            assert all(f.grad.shape == f.shape and f.dim() == 1 for f in flats)
            check_same_gradients(model, plain)
            step_all(optimizers)
        check_same_params(model, plain)
        copied = copy.deepcopy(model)
        copied(vectors(0, 2)).sum().backward()
        assert all(f.grad is not None for f in flatshard.flat_parameters(copied))
        assert all(p.grad is None for p in copied.parameters())
    for verb in (flatshard.flat_parameters, flatshard.describe):
        with pytest.raises(ValueError, match="nothing in this Block is sharded"):
            verb(Block())


def describe_model(ctx) -> list[str]:
    model = nn.Sequential(Block(), nn.Tanh(), Block(), nn.Linear(WIDTH, 3))
    model[2].up.requires_grad_(False)
    model[3].weight.data = model[3].weight.data.bfloat16()
    policy = flatshard.CustomPolicy(lambda m: {"strategy": NO_SHARD} if m is model[2] else isinstance(m, Block))
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
        text, *printed = self.pool.run(describe_model, world_size=2)[1]
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
        self.assertExpectedInline(
            "\n".join(printed),
            """\
ShardedParameter('0.down.weight', shape=(13, 29), dtype=torch.float32, device=cpu, requires_grad=True, elements 4:377 here)
ShardedParameter('2.up.weight', shape=(29, 13), dtype=torch.float32, device=cpu, requires_grad=False, elements 0:377 here)""",
        )


# -- unshard and reshard -----------------------------------------------------------------------------------------------


def states(model: nn.Module) -> list[str]:
    return [u.state for u in flatshard.describe(model).units]


@ranks(2, 3)
def test_unshard_and_reshard(ctx):
    plain, model = twins(ctx, Model, {Block})
    params = list(model.parameters())
    sharded, gathered, whole = ["sharded"] * 3, ["unsharding", *["sharded"] * 2], ["unsharded", *["sharded"] * 2]
    for _ in range(2):
        assert flatshard.unshard(model) is None
        assert states(model) == whole
        assert type(model.scale) is nn.Parameter
        assert torch.equal(model.scale, plain.scale)
    for _ in range(2):
        flatshard.reshard(model)
        assert states(model) == sharded
    handle = flatshard.unshard(model, async_op=True)
    assert states(model) == gathered
    assert isinstance(model.scale, ShardedParameter)
    for _ in range(2):
        handle.wait()
        assert states(model) == whole
        assert torch.equal(model.scale, plain.scale)
    flatshard.reshard(model)
    flatshard.unshard(model, async_op=True)
    flatshard.reshard(model)  # never waited for
    assert states(model) == sharded
    flatshard.unshard(model)
    flatshard.reshard(model, recurse=False)
    assert states(model) == sharded
    handle = flatshard.unshard(model, recurse=True, async_op=True)  # ahead of forward, and waited for by nobody
    train_both(ctx, model, plain, adamw(params))
    assert states(model) == sharded
    handle.wait()  # too late: there is nothing to show
    assert states(model) == sharded
    assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
    flatshard.unshard(model.head)  # not a unit: the one that owns its parameters is gathered
    assert states(model) == whole
    flatshard.reshard(model.head)
    assert states(model) == sharded
    with pytest.raises(ValueError, match="nothing in this Tanh is sharded"):
        flatshard.unshard(nn.Tanh())


@ranks(2)
def test_reshard_of_a_busy_unit(ctx):
    model = fully_shard(nn.Sequential(Block(), Block()), policy={Block}, process_group=ctx.group)
    x = vectors(0, 2).float()
    hook = model[0].up.register_forward_pre_hook(lambda *_: flatshard.reshard(model))
    with pytest.raises(RuntimeError, match=r"reshard: \['<root>', '0'\] are in use"):
        model(x)
    hook.remove()
    with summon_full_params(model[1]), pytest.raises(RuntimeError, match=r"reshard: \['1'\] are in use"):
        flatshard.reshard(model)
    loss = model(x).sum()
    flatshard.reshard(model)  # between forward and backward it is allowed
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


# -- summon_full_params ------------------------------------------------------------------------------------------------


@ranks(1, 3)
def test_summon_shows_whole_parameters(ctx):
    for _, plain, model in each_kind(ctx):
        expected, outside = values(plain), dict(model.named_parameters())
        for offload in (False, True):
            for rank0_only in (False, True):
                with summon_full_params(model, writeback=False, rank0_only=rank0_only, offload_to_cpu=offload):
                    shown = dict(model.named_parameters())
                    if rank0_only and ctx.rank:
                        assert shown == outside
                    else:
                        assert list(shown) == list(expected)
                        for name, param in shown.items():
                            assert type(param) is nn.Parameter
                            assert param.requires_grad
                            assert torch.equal(param, expected[name])
                        assert model.head.weight is model.blocks[0].up.weight
                assert dict(model.named_parameters()) == outside
                assert set(states(model)) == {"sharded"}
        with pytest.raises(ValueError, match="needs writeback=False"), summon_full_params(model, rank0_only=True):
            pass


@ranks(1, 3)
def test_summon_takes_new_gradients(ctx):
    """And gradients that are taken away."""
    for (_, plain, model), offload in zip(each_kind(ctx), (False, True, True, False), strict=True):
        x = vectors(0, ctx.world_size)
        for m, part in zip((plain, model), parts(ctx, x), strict=True):
            m(part)[:, 3:].square().mean().backward()
            m.scale.grad = None
        with summon_full_params(model, with_grads=True, offload_to_cpu=offload):
            for m in (model, plain):
                m.blocks[1].down.weight.grad.mul_(3)
                m.head.bias.grad = None
                m.scale.grad = torch.ones_like(m.scale)
        assert all(p.grad is None or p.grad.shape == p.shape for p in model.parameters())
        check_same_gradients(model, plain)


@ranks(2, 3)
def test_summon_of_a_part_and_of_a_parent(ctx):
    plain, model = twins(ctx, Model, {Block, nn.GRU})
    with summon_full_params(model.blocks[0], recurse=False):  # and the owner of its tied parameter
        assert model.blocks[0].up.weight.shape == (29, WIDTH)
        assert isinstance(model.blocks[1].up.weight, ShardedParameter)
    with summon_full_params(model.rnn):  # one that caches its weights elsewhere
        assert all(p.dim() == q.dim() for p, q in zip(model.rnn._flat_weights, plain.rnn._flat_weights, strict=True))
    assert all(isinstance(p, ShardedParameter) for p in model.rnn._flat_weights)
    parent = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))  # not sharded itself
    whole = values(parent)
    fully_shard(parent[0], process_group=ctx.group)
    fully_shard(parent[1], process_group=ctx.group, strategy=NO_SHARD)
    for offload in (False, True):
        with summon_full_params(parent, offload_to_cpu=offload):
            assert all(type(p) is nn.Parameter for p in parent.parameters())
            assert all(torch.equal(p, whole[n]) for n, p in parent.named_parameters())
    with pytest.raises(ValueError, match="nothing in this Linear is sharded"), summon_full_params(parent[2]):
        pass


@ranks(1, 2)
def test_a_frozen_parameter_keeps_its_gradient(ctx):
    """Frozen alone in its unit after a backward: its gradient is shown, and survives the write-back."""
    for flat in (False, True):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        fully_shard(model, policy={nn.Linear}, process_group=ctx.group)
        params = flatshard.flat_parameters(model) if flat else list(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        before = [p.grad.clone() for p in params]
        model[0].requires_grad_(False)
        with summon_full_params(model, with_grads=True):
            assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
        assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))
