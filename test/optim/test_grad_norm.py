"""Norms of gradients over all ranks, by flatshard's functions, by torch's tools on sharded gradients, and in GradScaler."""

import copy
import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp
from on_ranks import ranks
from pairs import all_pairs, some
from parity import adamw, everybody, mean_square, whole_gradients
from saving import CommunicationWatch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as stock_clip
from torch.nn.utils import get_total_norm as stock_norm

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard._handle.tensors.aggregate import checked_all_reduce
from flatshard._handle.tensors.shard import ShardTensor
from flatshard.optim import gradient_statistics
from flatshard.tensors import ShardedGradient, ShardedParameter, shard_info

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
ORDERS = (1, 2, 3, 0.5, math.inf)
WIDTH = 7
total_norm = flatshard.optim.get_total_norm


class Model(nn.Module):
    """A float64 model with a weight tied across units, and frozen, 0-dim, empty and unused parameters."""

    def __init__(self, empty: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.gain = nn.Parameter(torch.rand(()))
        self.blocks = nn.Sequential(Mlp(WIDTH, 11), Mlp(WIDTH, 11))
        self.head = nn.Linear(WIDTH, 11)
        self.head.weight = self.blocks[0].up.weight
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.empty = nn.Parameter(torch.rand(empty))
        self.unused = nn.Parameter(torch.rand(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x * self.gain * self.scale + self.frozen)) + self.empty.sum()


class Mixed(Model):
    """A model with three dtypes and a complex parameter in a unit."""

    def __init__(self) -> None:
        super().__init__(1)
        self.fp32 = nn.Parameter(torch.rand(5))
        self.bf16 = nn.Parameter(torch.rand(9).bfloat16())
        self.turn = nn.Parameter(torch.rand(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        factor = self.fp32.double().sum() * self.bf16.double().square().sum()
        return super().forward(x) * factor + torch.view_as_real(self.turn * self.turn).sum()


Trained = functools.partial(Model, 1)
"""Model without an empty parameter, whose norm torch refuses in one process."""


def inputs(n: int) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(5)).double() * 3


def shard(model: nn.Module, group: Any, policy: Any = None, **arguments: Any) -> nn.Module:
    return fully_shard(model, policy=policy, process_group=group, **arguments)


def pair(ctx: Any, make: Callable[[], nn.Module] = Model, sharding: Callable[..., Any] = shard, **arguments: Any):
    """Return a model and its sharded copy."""
    torch.manual_seed(0)
    plain = make()
    return plain, sharding(copy.deepcopy(plain), ctx.group, **arguments)


def backward(ctx: Any, plain: nn.Module, sharded: nn.Module) -> None:
    """Backpropagate the same loss; the plain model's is over all slices of the batch."""
    x = inputs(2 * ctx.world_size)
    mean_square(plain(x), x).backward()
    mean_square(sharded(x[2 * ctx.rank :][:2]), x).backward()


def grads(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def plain_norm(module: nn.Module, order: float = 2) -> Tensor:
    """Return the norm in float64: torch refuses an empty gradient's inf-norm, and rounds each low-precision norm."""
    return stock_norm(
        [g.to(torch.complex128) if g.is_complex() else g.double() for g in grads(module) if g.numel()], order
    )


def check_norm(norm: Tensor, expected: Tensor, rtol: float = 1e-12) -> None:
    assert (type(norm), norm.shape, norm.requires_grad) == (Tensor, (), False)
    torch.testing.assert_close(norm.double(), expected.double(), rtol=rtol, atol=0.0)


def check_norms(sharded: nn.Module, plain: nn.Module, found: list[Tensor] | None = None) -> None:
    """Compare norms of all orders, by flatshard and by torch, with one process. ``found`` are gradients for torch's
    function."""
    # An empty parameter has a plain gradient, whose inf-norm torch refuses.
    found = [g for g in found or grads(sharded) if type(g) is not Tensor or g.numel()]
    for order in ORDERS:
        expected = plain_norm(plain, order)
        check_norm(total_norm(sharded, order), expected)
        for foreach in (None, True, False) if order in (2, math.inf) else (None,):
            check_norm(stock_norm(found, order, foreach=foreach), expected)
    check_norm(total_norm(sharded, 0), stock_norm(grads(plain), 0.0))


def check_statistics(ctx: Any, sharded: nn.Module, plain: nn.Module) -> None:
    found = gradient_statistics(sharded)
    assert list(found) == [name for name, p in plain.named_parameters() if p.grad is not None]
    assert not found.keys() & {"frozen", "unused", "head.weight"}
    for name, stats in found.items():
        grad = plain.get_parameter(name).grad
        rel = 2e-2 if grad.dtype is torch.bfloat16 else 1e-5
        real = torch.view_as_real(grad) if grad.is_complex() else grad.double()
        assert stats.norm == pytest.approx(real.norm().item(), rel=rel), name
        assert stats.max_abs == pytest.approx(grad.abs().max().item() if grad.numel() else 0.0, rel=rel), name
        assert stats.mean == pytest.approx(real.mean().item(), rel=rel, abs=1e-9, nan_ok=True), name
        assert (stats.numel, stats.nonfinite) == (grad.numel(), 0), name
    assert set(everybody(ctx, repr(found))) == {repr(found)}


def put(param: nn.Parameter, index: int, value: float) -> None:
    """Set one element of a gradient, on the rank that has it."""
    info = shard_info(param)
    here = range(param.numel()) if info is None else range(info.start, info.stop)
    if index in here:
        param.grad.as_subclass(Tensor).view(-1)[here.index(index)] = value


# -- Norms ------------------------------------------------------------------------------------------------------------


@ranks(4)
def test_norms_are_those_of_one_process(ctx) -> None:
    """Norms agree for flat parameters, and for a submodule that is a part of a unit or has units."""
    policies = (None, {Mlp}, {Mlp, nn.Linear})
    for strategy, policy, flat in some(all_pairs((FULL, GRAD_OP, NO_SHARD), policies, (False, True)), 6):
        ctx.note(f"{strategy}, {policy}, {flat}")
        plain, sharded = pair(ctx, policy=policy, strategy=strategy)
        flats = flatshard.flat_parameters(sharded) if flat else []
        check_norm(total_norm(sharded), torch.zeros(()))  # no gradients yet
        backward(ctx, plain, sharded)
        found = [p.grad for p in flats or sharded.parameters() if p.grad is not None]
        check_norms(sharded, plain, found)
        check_norm(total_norm(sharded.blocks[1]), plain_norm(plain.blocks[1]))
        if flat:
            name = "blocks.0.down.weight"
            expected = plain.get_parameter(name).grad.norm().item()
            assert gradient_statistics(sharded)[name].norm == pytest.approx(expected)
        else:
            check_norm(stock_norm(grads(sharded.blocks[1])), plain_norm(plain.blocks[1]))
        check_norm(flatshard.clip_grad_norm_(sharded, 0.5), plain_norm(plain))
        check_norm(stock_norm(found), torch.tensor(0.5), rtol=1e-5)


CLIPS: tuple[Callable[..., Tensor], ...] = (
    flatshard.clip_grad_norm_,
    lambda m, *how: stock_clip(m.parameters(), *how),
    lambda m, *how: stock_clip(m.parameters(), *how, foreach=False),
)


@ranks(3)
def test_clipping_mixed_dtypes(ctx) -> None:
    """flatshard's norms are at least float32; torch's have the gradients' dtype."""
    plain, sharded = pair(ctx, Mixed, policy={Mlp})
    backward(ctx, plain, sharded)
    check_statistics(ctx, sharded, plain)
    for most, p, clip in all_pairs((0.1, 1e9), (2, 3, math.inf), CLIPS):
        sharded.zero_grad()
        mean_square(sharded(inputs(2) * (ctx.rank + 1)), None).backward()
        for name, whole in whole_gradients(sharded).items():  # which other tests check
            plain.get_parameter(name).grad = whole
        expected, rtol = plain_norm(plain, p), 1e-6 if clip is flatshard.clip_grad_norm_ else 1e-2
        check_norm(clip(sharded, most, p), expected, rtol)
        for name, after in whole_gradients(sharded).items():
            if after is not None:
                scaled = (plain.get_parameter(name).grad * (most / (expected + 1e-6)).clamp(max=1)).to(after.dtype)
                near = max(rtol, 1e-2 if after.dtype is torch.bfloat16 else 0)
                torch.testing.assert_close(after, scaled, rtol=near, atol=1e-30)
    real = [g for g in grads(sharded) if not g.is_complex()]
    for norm in (lambda: total_norm(sharded), lambda: stock_norm(real)):
        with CommunicationWatch() as watch:
            norm()
        assert len(watch.seen) == 1, "of all dtypes"
    sharded = shard(Model().bfloat16(), ctx.group)
    mean_square(sharded(inputs(2).bfloat16()), None).backward()
    assert (total_norm(sharded).dtype, stock_norm(grads(sharded)).dtype) == (torch.float32, torch.bfloat16)
    check_norm(total_norm(sharded), stock_norm(grads(sharded)), rtol=1e-2)


@ranks(4)
def test_units_on_different_groups(ctx) -> None:
    """Blocks are sharded over pairs of ranks, one is on each rank, and the rest over all; all ranks have the same batch."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def sharding(model: nn.Module, group: Any) -> nn.Module:
        shard(model.blocks[0], pairs[ctx.rank // 2])
        shard(model.blocks[1], group, strategy=NO_SHARD)
        return shard(model, group)

    plain, sharded = pair(ctx, Model, sharding)
    for model in (plain, sharded):
        mean_square(model(inputs(2)), None).backward()
    check_norms(sharded, plain)
    check_statistics(ctx, sharded, plain)
    for norm in (total_norm, lambda m: stock_norm(grads(m))):
        with CommunicationWatch() as watch:
            norm(sharded)
        assert len(watch.seen) == 2
    # An overflow on one rank, in a shard that only its pair has.
    with CommunicationWatch() as watch:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.zeros(()))
        if ctx.rank == 3 and sharded.blocks[0].down.bias.grad.numel():
            sharded.blocks[0].down.bias.grad.as_subclass(Tensor)[-1] = math.inf
        before = [p.detach().clone() for p in sharded.parameters()]
        scaler.step(adamw(list(sharded.parameters())))
    assert len(watch.seen) == 2
    assert all(map(torch.equal, before, sharded.parameters()))
    dist.destroy_process_group(pairs[ctx.rank // 2])
    pairs.clear()
    with pytest.raises(RuntimeError, match="process group that this module was sharded over has been destroyed"):
        sharded.blocks[0].up.bias.grad.norm()


@ranks(3)
def test_ignored_parameters_count_once(ctx) -> None:
    plain, sharded = pair(ctx, Model, lambda m, g: shard(m, g, {Mlp}, ignored_states=[m.scale, m.blocks[0]]))
    backward(ctx, plain, sharded)
    norms = repr([total_norm(sharded, p) for p in ORDERS])
    assert set(everybody(ctx, norms)) == {norms}, "equal, though ignored gradients differ by rank"
    for param in sharded.parameters():
        if not isinstance(param, ShardedParameter) and param.grad is not None:
            assert type(param.grad) is Tensor
            dist.all_reduce(param.grad, group=ctx.group)
            param.grad /= ctx.world_size
    check_norms(sharded, plain)
    check_statistics(ctx, sharded, plain)


@ranks(3)
def test_what_is_not_finite(ctx) -> None:
    plain, sharded = pair(ctx, Trained, policy={Mlp})
    for value in math.inf, -math.inf, math.nan:
        for module in plain, sharded:
            module.zero_grad()
        backward(ctx, plain, sharded)
        for module in plain, sharded:
            put(module.blocks[1].down.bias, 2, value)
        for order in (2, 3, math.inf):
            for norm in (
                total_norm(sharded, order),
                stock_norm(grads(sharded), order),
                torch.stack([g.norm(order) for g in grads(sharded)]).norm(order),
            ):
                torch.testing.assert_close(norm, plain_norm(plain, order), equal_nan=True)
                assert not norm.isfinite()
            before = [g.clone() for g in grads(sharded)]
            for clip, match in zip(CLIPS, (r"norm of order .*gradient_statistics", *["non-finite"] * 2), strict=True):
                with pytest.raises(RuntimeError, match=match):
                    clip(sharded, 1.0, order, True)
            torch.testing.assert_close([g.clone() for g in grads(sharded)], before, equal_nan=True, rtol=0, atol=0)
        stats = gradient_statistics(sharded)
        assert stats["blocks.1.down.bias"].nonfinite == sum(s.nonfinite for s in stats.values()) == 1
        assert math.isnan(value) == math.isnan(stats["blocks.1.down.bias"].max_abs)


class Branches(nn.Module):
    """A module of which each rank uses other branches. The small branch lies on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(1, 1)
        self.large = nn.Linear(WIDTH, 60)
        self.double()

    def forward(self, x: Tensor, use_small: bool) -> Tensor:
        y = self.large(x).mean()
        return y * self.small(x[:1, :1]).sum() if use_small else y


@ranks(3)
def test_ranks_that_use_different_parameters(ctx) -> None:
    plain, sharded = pair(ctx, Branches)
    x = inputs(ctx.world_size)
    sum(plain(x[r : r + 1], r == 0) / ctx.world_size for r in range(ctx.world_size)).backward()
    sharded(x[ctx.rank : ctx.rank + 1], ctx.rank == 0).backward()
    assert len(grads(sharded)) == 4, "ranks without a part of it have an empty gradient"
    check_norms(sharded, plain)
    check_statistics(ctx, sharded, plain)
    if ctx.rank:
        sharded.small.weight.grad = sharded.small.bias.grad = None
    check_statistics(ctx, sharded, plain)
    with pytest.raises(RuntimeError, match=r"the norm of order 2\.0 of the gradient of '.*gradient_statistics"):
        [g.norm() for g in grads(sharded)]  # ranks have different gradients


# -- Use of gradients by torch and users ------------------------------------------------------------------------------


@ranks(3)
def test_idioms_for_norms(ctx) -> None:
    plain, sharded = pair(ctx, policy={Mlp})
    backward(ctx, plain, sharded)
    found, expected = grads(sharded), plain_norm(plain)
    norm, float64 = torch.linalg.norm, torch.float64
    for idiom in (
        torch.norm(torch.stack([torch.norm(g.detach(), 2) for g in found]), 2),
        torch.tensor(sum(g.data.norm(2).item() ** 2 for g in found) ** 0.5).double(),
        sum(torch.norm(g, dtype=float64) ** 2 for g in found) ** 0.5,
        sum(norm(g, dtype=float64) ** 2 for g in found) ** 0.5,
    ):
        check_norm(idiom, expected, rtol=1e-6)
    # torch's norms of a list behave like full norms in every use.
    each = torch.stack([g.norm() for g in grads(plain)])
    for use in (
        lambda norms: (torch.stack(norms) + 0, each),
        lambda norms: (torch.stack(norms).max(), each.max()),
        lambda norms: (torch.stack(norms).norm(1), each.norm(1)),
        lambda norms: (
            torch.stack([*norms[:2], *torch._foreach_norm(found[2:], 3), torch.ones(())])[1].clone(),
            each[1],
        ),
        lambda norms: ((norms[0].item(), torch.stack(norms).norm())[1], expected),  # one of them is global already
    ):
        torch.testing.assert_close(*use(torch._foreach_norm(found, 2)), check_dtype=False)
    # Torch's functions that are wrong on shards raise.
    weight = sharded.blocks[0].down.weight.grad
    for refused in lambda: norm(weight, 2), lambda: weight.norm("nuc"):
        with pytest.raises(NotImplementedError, match=r"blocks\.0\.down\.weight.*summon_full_params"):
            refused()
    with pytest.raises(NotImplementedError, match=r"flatshard\.optim\.get_total_norm\(model, 0\)"):
        stock_norm(found, 0.0)


@ranks(3)
def test_gradients_that_users_change_stay_sharded(ctx) -> None:
    plain, sharded = pair(ctx, Trained, policy={Mlp})

    def check(factor: float = 1.0) -> None:
        assert all(type(g) is ShardedGradient for g in grads(sharded))
        for norm in (total_norm(sharded), stock_norm(grads(sharded))):
            check_norm(norm, plain_norm(plain) * factor)

    for _ in range(2):  # the second one accumulates
        backward(ctx, plain, sharded)
        check()
    for param in (p for p in sharded.parameters() if p.grad is not None):
        held = param.grad
        param.grad.mul_(0.5)
        param.grad += param.grad
        assert param.grad is held
        param.grad = param.grad.clone()  # a plain tensor until it is assigned to .grad
        new = param.grad * 3
        assert type(new) is ShardTensor
        param.grad = new
        assert param.grad is new
    check(3.0)
    # Gradients of a loss on the shards, which autograd makes.
    for model in sharded, plain:
        model.zero_grad()
        sum(p.square().sum() for p in model.parameters()).backward()
    check_norm(total_norm(sharded), plain_norm(plain))
    backward(ctx, plain, sharded)
    assert all(type(p.grad) is ShardedGradient for p in sharded.blocks[0].parameters())
    check_norm(total_norm(sharded), plain_norm(plain))
    # Full gradients, written back.
    with flatshard.summon_full_params(sharded, with_grads=True):
        for grad in grads(sharded):
            grad.mul_(2)
    check_norm(total_norm(sharded), 2 * plain_norm(plain))
    # Gradients from before sharding.
    model = copy.deepcopy(plain)
    expected = plain_norm(model)
    check_norm(stock_norm(grads(shard(model, ctx.group, {Mlp}))), expected)


# -- Mistakes ---------------------------------------------------------------------------------------------------------


class Special(Tensor):
    pass


def test_refusals(fake_group):
    """Unsharded parameters, invalid orders, and gradients of other classes raise."""
    functions = total_norm, functools.partial(flatshard.clip_grad_norm_, max_norm=1.0), gradient_statistics
    model = shard(Model(), None, {Mlp})
    mean_square(model(inputs(2)), None).backward()
    for function in functions:
        with flatshard.summon_full_params(model), pytest.raises(RuntimeError, match=r"unsharded.*outside of these"):
            function(model)
        flatshard.unshard(model.blocks[1])
        for module in (model, model.blocks[1].up):  # the latter is not a unit
            with pytest.raises(RuntimeError, match=r"'blocks\.1' are unsharded"):
                function(module)
        flatshard.reshard(model)
    for order in -1, -math.inf, math.nan:
        with pytest.raises(ValueError, match=r"norm_type=.*positive"):
            total_norm(model, order)
    model = Model().float()
    shard(model, None, ignored_states=[model.scale])
    model.scale.grad = torch.ones(WIDTH).as_subclass(Special)
    for function in functions:
        with pytest.raises(NotImplementedError, match="'scale' is a Special"):
            function(model)


class Answers:
    """A fake runtime of two ranks on an accelerator. ``other`` makes the other rank's tensor from this rank's."""

    device = SimpleNamespace(type="xpu")
    world_size, rank = 2, 0

    def __init__(self, other: Callable[[Tensor], Tensor]) -> None:
        self.other = other

    def all_reduce_now(self, tensor: Tensor, op: str, question: str) -> None:
        other = self.other(tensor.clone())
        tensor.copy_(tensor + other if op == "sum" else torch.maximum(tensor, other))


def test_a_different_question_gives_nan_where_the_host_does_not_wait():
    def different(tensor: Tensor) -> Tensor:
        tensor[-2:] += torch.tensor([1.0, -1.0])
        return tensor

    def with_same_sum(tensor: Tensor) -> Tensor:
        """Return a tensor whose tags have the same sum."""
        tensor[-1] += 1.0
        return tensor

    values = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert checked_all_reduce(values, "sum", Answers(lambda t: t), "what?").tolist() == [2.0, 4.0]
    for other in (different, with_same_sum, lambda t: t * 0 + 7):
        assert checked_all_reduce(values, "sum", Answers(other), "what?").isnan().all()
