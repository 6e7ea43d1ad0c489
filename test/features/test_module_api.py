"""Changes of a sharded module between steps: copying, converting, overwriting, summoning.

``together/test_programs.py`` tests orders of these calls, and training after them.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Mlp
from on_ranks import ranks
from pairs import some
from parity import adamw, check_same_gradients, check_same_params, mean_square, parts, step_all, twins
from torch import Tensor, nn

import flatshard
from flatshard import ShardingStrategy, fully_shard, summon_full_params

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
WIDTH = 13


class Block(Mlp):
    def __init__(self) -> None:
        super().__init__(WIDTH, 29, bias=False)


class Model(nn.Module):
    """A root parameter, blocks, a recurrent layer, a tied layer, a buffer."""

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


def vectors(step: int, n: int) -> Tensor:
    """Return inputs that depend on the step only."""
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(step)).double()


def each_kind(ctx: Any):
    """Yield a plain model and its sharded twin for several strategies and policies."""
    for strategy, policy in (
        (FULL, {Block}),
        (GRAD_OP, None),
        (NO_SHARD, {Block, nn.GRU, nn.Linear}),
        (ShardingStrategy.SHARD_OPTIM, {Block}),
    ):
        ctx.note(f"{strategy.name}, policy {policy}")
        yield strategy, *twins(ctx, Model, policy, strategy=strategy)


def train_both(ctx: Any, model: nn.Module, plain: nn.Module, optimizer: Any = None, steps: int = 2) -> None:
    """Assert that steps of both models give equal parameters. ``optimizer`` belongs to the sharded model, if given."""
    optimizers = [optimizer or adamw(model.parameters()), adamw(plain.parameters())]
    for step in range(steps):
        x = vectors(step, 2 * ctx.world_size)
        for m, part in zip((plain, model), parts(ctx, x), strict=True):
            mean_square(m(part), x).backward()
        step_all(optimizers)
    check_same_params(model, plain)


@ranks(2)
def test_deepcopy_of_more_and_of_less(ctx):
    """``together/test_programs`` tests how a copy trains."""
    plain, model = twins(ctx, Model, {Block})
    model.optimizer = adamw(model.parameters())
    model.scale.lr_scale = 0.5
    train_both(ctx, model, plain, model.optimizer)
    copied = copy.deepcopy(model)
    assert copied.scale.lr_scale == 0.5
    assert copied.head.weight is copied.blocks[0].up.weight
    assert flatshard.describe(copied) == flatshard.describe(model)
    held = [p for group in copied.optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, copied.parameters(), strict=True))
    assert set(copied.optimizer.state) == set(held)
    part = copy.deepcopy(model.blocks[0])  # the root owns one of its parameters, so the root is copied for it
    assert part.up.weight is not model.blocks[0].up.weight
    plain, model = twins(ctx, Block)
    train_both(ctx, copy.deepcopy(nn.ModuleList([model, nn.Tanh()]))[0], plain)
    one = copy.deepcopy(model.up.weight)  # this rank's shard of a single parameter, as a plain one
    assert type(one) is nn.Parameter
    assert torch.equal(one, model.up.weight)
    seen: list[Tensor] = []
    plain, model = twins(ctx, lambda: nn.Sequential(Block()), Block)
    for each in (model, plain):
        each[0].down.register_forward_hook(lambda module, args, out: seen.append(out))
        each(vectors(0, 2)).sum().backward()  # installs flatshard's hook on that layer
        each.zero_grad()
    copied = copy.deepcopy(model)
    for each in (copied, plain):
        each(vectors(0, 2))
        seen.pop().sum().backward()  # this tensor left the unit by the hook only
    check_same_gradients(copied, plain)


class MakesTarget(nn.Module):
    """Copies its target from the network in the first forward, like BYOL."""

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
    with pytest.raises(RuntimeError, match=rf"Linear.forward would compute with .* shard of 'net.0.weight'.*{made}"):
        model(x)
    whole = flatshard.checkpoint.full_state_dict(model.net)
    for name, part in model.target.named_parameters():
        part.data = whole[name]
    made_apart = fully_shard(MakesTarget(), policy={nn.Linear}, process_group=ctx.group)
    made_apart(x).backward()
    made_apart.target[0].weight.data.zero_()
    with torch.no_grad():
        assert model(x) == 0.0
        assert made_apart(x) > 0


@ranks(1, 2)
def test_replacements_that_are_refused(ctx):
    _, model = twins(ctx, Block)
    for shape in ((3,), (40, 40), ()):
        kept = model.down.weight.data
        model.down.weight.data = torch.zeros(shape)
        with pytest.raises(RuntimeError, match=r"'down.weight' was replaced by a tensor of shape .* resize the module"):
            model(vectors(0, 2))
        model.down.weight.data = kept
        model(vectors(0, 2)).sum().backward()
    if ctx.world_size == 1:
        return
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # changes the classes of an optimizer's objects
    try:
        with pytest.raises(RuntimeError, match=r"Couldn't swap Linear\.weight"):
            model.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    model(vectors(0, 2)).sum().backward()


@ranks(2, 4)
def test_converting_a_part(ctx):
    """Ranks with empty shards raise the same error. A submodule that is a unit may be converted."""
    for strategy, name in ((FULL, "up"), (GRAD_OP, "down"), (NO_SHARD, "up")):
        plain, model = twins(ctx, Block, strategy=strategy)
        model.get_submodule(name).to(torch.bfloat16)
        with pytest.raises(RuntimeError, match=r"changed dtype or device, but others of the same unit did not.*bfloat"):
            model(vectors(0, 2))
        model.get_submodule(name).to(torch.float64)
        plain.get_submodule(name).to(torch.bfloat16).to(torch.float64)
        assert torch.equal(model(vectors(0, 2)), plain(vectors(0, 2)))
    _, model = twins(ctx, Model, {Block})
    model.blocks[1].to(torch.float32)
    model.blocks[1](vectors(0, 2).float()).sum().backward()
    assert model.blocks[1].up.weight.grad.dtype is torch.float32


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
        model.scale = nn.Parameter(params["scale"].detach() * 2)  # no other parameter
        plain.scale.data.mul_(2)
        train_both(ctx, model, plain, steps=1)
        assert all(p is params[n] for n, p in model.named_parameters())
        if ctx.world_size > 1 and strategy is not NO_SHARD:
            model.scale = nn.Parameter(torch.ones(WIDTH + 1))  # not the shape of any rank's shard
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


@ranks(1, 3)
def test_flat_parameters(ctx):
    """The fuzzer's optimizer ``"flat"`` tests training."""
    _, model = twins(ctx, Model, {Block})
    model.blocks[1].requires_grad_(False)  # one frozen unit
    flats = flatshard.flat_parameters(model)
    assert all(a is b for a, b in zip(flatshard.flat_parameters(model), flats, strict=True))
    assert sorted(n for f in flats for n in f.fqns) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    _, model = twins(ctx, Model)
    model.blocks[1].requires_grad_(False)
    with pytest.raises(ValueError, match=r"blocks.1.down.weight'\] were frozen after fully_shard"):
        flatshard.flat_parameters(model)


def set_each(model: nn.Module, grad: Any) -> None:
    for p in model.parameters():
        p.grad = grad(p)


CLEARS: dict[str, Callable[[nn.Module], Any]] = {
    "zero_grad": lambda model: model.zero_grad(),
    "with zeros": lambda model: model.zero_grad(set_to_none=False),
    "each": lambda model: set_each(model, lambda p: None),
    "from outside": lambda model: nn.ModuleList([model]).zero_grad(),
    "part by part": lambda model: [part.zero_grad() for part in (*model.children(), model)],
}


@ranks(1, 3)
def test_gradients_of_flat_parameters_are_seen_through_single_ones(ctx):
    """Modules clear these gradients as in one process, and torch clips them."""
    for (_, plain, model), (way, clear) in zip(
        (*each_kind(ctx), *each_kind(ctx)), some(CLEARS.items(), 8), strict=False
    ):
        ctx.note(way)
        both = [(plain, plain.parameters()), (model, flatshard.flat_parameters(model))]
        optimizers = [torch.optim.SGD(params, 0.1, 0.9, weight_decay=0.1) for _, params in both]
        x = vectors(0, 2 * ctx.world_size)
        for _ in range(3):
            for (m, _), part, optimizer in zip(both, parts(ctx, x), optimizers, strict=True):
                mean_square(m(part), x).backward()
                assert all((p.grad.shape, p.grad.dtype) == (p.shape, p.dtype) for p in m.parameters())
                torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3)
                optimizer.step()
            check_same_params(model, plain)
            clear(plain)
            clear(model)
            for optimizer in optimizers:
                optimizer.step()
            check_same_params(model, plain)
        mean_square(model(x), x).backward()
        model.head.zero_grad()
        norms = [flatshard.optim.get_total_norm(part) for part in (model.head, model.rnn)]
        assert norms[0] == 0 < norms[1]
        set_each(model, torch.ones_like)
        norm = flatshard.optim.get_total_norm(model)
        assert norm.item() ** 2 == pytest.approx(sum(p.numel() for p in plain.parameters()))
        with pytest.raises(RuntimeError, match=r"a gradient of shape \(3, 5, 2\) for 'scale', of which this rank has"):
            model.scale.grad = torch.ones(3, 5, 2)


@ranks(2)
def test_flat_parameters_keep_gradients_that_were_there(ctx):
    plain, model = twins(ctx, Model, {Block})
    optimizers = [torch.optim.SGD(plain.parameters(), 0.1)]
    x = vectors(0, 2 * ctx.world_size)
    for m, part in zip((plain, model), parts(ctx, x), strict=True):
        mean_square(m(part), x).backward()
    optimizers.append(torch.optim.SGD(flatshard.flat_parameters(model), 0.1))
    step_all(optimizers)
    check_same_params(model, plain)


@ranks(1, 3)
def test_summon_takes_new_gradients(ctx):
    """Gradients may also be removed inside."""
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


@ranks(2)
def test_gradients_that_summon_shows_outlive_an_interrupt(ctx):
    """A forward after one that was interrupted drops gradients of failed backwards, and no others."""
    plain, model = twins(ctx, Model, {Block})
    x = vectors(0, ctx.world_size)
    for m, part in zip((plain, model), parts(ctx, x), strict=True):
        mean_square(m(part), x).backward()
    mine = x[:1]
    later = model(mine)  # its backward may come

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with summon_full_params(model, with_grads=True), torch.no_grad():
        hook = model.head.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(mine)
        hook.remove()
        model(mine)
    check_same_gradients(model, plain)
    del later


@ranks(1, 2)
def test_the_memory_format_is_chosen_before(ctx):
    """A later change warns, and the warning's cure works."""
    x = torch.randn(2, 3, 6, 6)
    for before in (True, False):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3))
        model = copy.deepcopy(plain)
        if before:
            model.to(memory_format=torch.channels_last)
        fully_shard(model, process_group=ctx.group)
        if not before:
            with pytest.warns(UserWarning, match=r"'0.weight' keeps the memory format .* before fully_shard"):
                model.to(memory_format=torch.channels_last)(x)
        for each in (model, plain):
            each(x).sum().backward()
        check_same_gradients(model, plain, 1e-5)
        with flatshard.summon_full_params(model):
            assert model[0].weight.is_contiguous(memory_format=torch.channels_last) == before
