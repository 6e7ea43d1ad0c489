"""Norms of gradients over all ranks: flatshard's own functions, torch's own tools on sharded gradients, GradScaler."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import ranks
from pairs import all_pairs
from parity import adamw, check_parity, full_params, in_texts, mean_square
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as stock_clip
from torch.nn.utils import get_total_norm as stock_norm

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard._handle.tensors.aggregate import checked_all_reduce
from flatshard._handle.tensors.part import PartTensor
from flatshard._runtime import Runtime
from flatshard.optim import gradient_statistics
from flatshard.tensors import ShardedGradient, ShardedParameter

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
ORDERS = (1, 2, 3, 0.5, math.inf)
WIDTH = 7
total_norm = flatshard.optim.get_total_norm


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 11)
        self.down = nn.Linear(11, WIDTH)
        self.gain = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Tied across units, a frozen parameter, 0-dim and empty ones, one that nobody uses; at most ranks parts are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 11)
        self.head.weight = self.blocks[0].up.weight
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0))
        self.unused = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x * self.scale + self.frozen)) + self.empty.sum()


class Mixed(Model):
    """Three dtypes and a complex parameter in a unit, beside what ``Model`` has. Trained in the dtypes as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.fp32 = nn.Parameter(torch.rand(5))
        self.bf16 = nn.Parameter(torch.rand(9).bfloat16())
        self.turn = nn.Parameter(torch.rand(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        factor = self.fp32.double().sum() * self.bf16.double().square().sum()
        return super().forward(x.double()) * factor + torch.view_as_real(self.turn * self.turn).sum()


def inputs(n: int) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(5)) * 3


def shard(model: nn.Module, group: Any, policy: Any = None, **arguments: Any) -> nn.Module:
    return fully_shard(model, policy=policy, process_group=group, **arguments)


def pair(ctx: Any, make: Callable[[], nn.Module], sharding: Callable[..., Any] = shard, **arguments: Any):
    """(plain, sharded): the same model, the second sharded."""
    torch.manual_seed(0)
    plain = make()
    return plain, sharding(copy.deepcopy(plain), ctx.group, **arguments)


def backward(ctx: Any, plain: nn.Module, sharded: nn.Module) -> None:
    """Gradients of the same loss, the plain model's of all slices of the batch."""
    x = inputs(2 * ctx.world_size).to(next(plain.parameters()).dtype)
    mean_square(plain(x), x).backward()
    mean_square(sharded(x[2 * ctx.rank :][:2]), x).backward()


def grads(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def plain_norm(module: nn.Module, order: float) -> Tensor:
    """In double: torch itself takes an empty gradient's inf-norm for an error, and rounds low precisions each."""
    return stock_norm(
        [g.to(torch.complex128) if g.is_complex() else g.double() for g in grads(module) if g.numel()], order
    )


def assert_norm(norm: Tensor, expected: Tensor, rtol: float = 1e-12) -> None:
    assert (type(norm), norm.shape, norm.requires_grad) == (Tensor, (), False)
    torch.testing.assert_close(norm.double(), expected.double(), rtol=rtol, atol=0.0)


def assert_norms(sharded: nn.Module, plain: nn.Module, found: list[Tensor] | None = None) -> None:
    """Of all orders, by ours and by torch's, as those of one process. ``found``: gradients for torch's, else the module's."""
    for order in ORDERS:
        expected = plain_norm(plain, order)
        assert_norm(total_norm(sharded, order), expected)
        for foreach in (None, True, False) if order in (2, math.inf) else (None,):
            assert_norm(stock_norm(grads(sharded) if found is None else found, order, foreach=foreach), expected)
    assert_norm(total_norm(sharded, 0), stock_norm(grads(plain), 0.0))


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """The all-reduces of the runtime inside. Nothing else communicates there."""
    found: list[str] = []
    original, whole = Runtime.all_reduce_now, dist.all_reduce

    def count(self: Runtime, tensor: Tensor, op: Any, question: str) -> None:
        found.append(f"{op} of {tensor.numel()}")
        original(self, tensor, op, question)

    Runtime.all_reduce_now = count  # type: ignore[method-assign]
    try:
        with flatshard._trace.record_events() as events:
            yield found
        assert not events
    finally:
        Runtime.all_reduce_now = original  # type: ignore[method-assign]
        assert dist.all_reduce is whole


# -- Norms ------------------------------------------------------------------------------------------------------------


@ranks(2, 4)
def test_norms_are_those_of_one_process(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    for strategy, policy in all_pairs((FULL, GRAD_OP, NO_SHARD), (None, {Block}, {Block, nn.Linear})):
        ctx.note(f"{strategy}, {policy}")
        plain, sharded = pair(ctx, Model, policy=policy, strategy=strategy)
        assert_norm(total_norm(sharded), torch.zeros(()))  # no gradients yet
        backward(ctx, plain, sharded)
        assert_norms(sharded, plain, [g for g in grads(sharded) if g.numel()] if strategy is NO_SHARD else None)
        # Of a part of the model, which is a part of a unit, or has units.
        part = plain_norm(plain.blocks[1], 2)
        assert_norm(total_norm(sharded.blocks[1]), part)
        assert_norm(stock_norm(grads(sharded.blocks[1])), part)


def whole_grads(sharded: nn.Module) -> list[Tensor | None]:
    with flatshard.summon_full_params(sharded, with_grads=True, writeback=False):
        return [None if p.grad is None else p.grad.clone() for p in sharded.parameters()]


@ranks(2, 3)
def test_clipping_mixed_dtypes(ctx) -> None:
    """Norms are of float32 at least; torch's are of the gradients' own dtype."""
    clips: tuple[Callable[[nn.Module, float, float], Tensor], ...] = (
        flatshard.clip_grad_norm_,
        lambda m, most, p: stock_clip(m.parameters(), most, p),
        lambda m, most, p: stock_clip(m.parameters(), most, p, foreach=False),
    )
    _, sharded = pair(ctx, Mixed, policy={Block})
    x = inputs(2)
    for most, p, clip in itertools.product((0.1, 1e9), (2, 3, math.inf), clips):
        sharded.zero_grad()
        mean_square(sharded(x * (ctx.rank + 1)), x).backward()
        plain = Mixed()  # only to hold the same gradients: these are right by other tests
        for mine, whole in zip(plain.parameters(), whole_grads(sharded), strict=True):
            mine.grad = whole
        expected = plain_norm(plain, p)
        rtol = 1e-6 if clip is flatshard.clip_grad_norm_ else 1e-2
        assert_norm(clip(sharded, most, p), expected, rtol)
        for before, after in zip(grads(plain), filter(torch.is_tensor, whole_grads(sharded)), strict=True):
            scaled = (before * (most / (expected + 1e-6)).clamp(max=1)).to(after.dtype)
            near = max(rtol, 1e-2 if before.dtype is torch.bfloat16 else 0)
            torch.testing.assert_close(after, scaled, rtol=near, atol=1e-30)
    sharded = shard(Model().bfloat16(), ctx.group)
    mean_square(sharded(x.bfloat16()), x).backward()
    assert (total_norm(sharded).dtype, stock_norm(grads(sharded)).dtype) == (torch.float32, torch.bfloat16)
    assert_norm(total_norm(sharded), stock_norm(grads(sharded)), rtol=1e-2)


@ranks(4)
def test_units_on_different_groups(ctx) -> None:
    """Blocks over pairs of ranks, one on every rank, the rest over all; every rank has the same batch."""
    torch.set_default_dtype(torch.float64)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def sharding(model: nn.Module, group: Any) -> nn.Module:
        shard(model.blocks[0], pairs[ctx.rank // 2])
        shard(model.blocks[1], group, strategy=NO_SHARD)
        return shard(model, group)

    plain, sharded = pair(ctx, Model, sharding)
    x = inputs(2).double()
    for model in (plain, sharded):
        mean_square(model(x), x).backward()
    assert_norms(sharded, plain)
    for norm in (total_norm, lambda m: stock_norm(grads(m))):
        with counted() as found:
            norm(sharded)
        assert len(found) == 2
    for name, stats in gradient_statistics(sharded).items():
        assert stats.norm == pytest.approx(plain.get_parameter(name).grad.norm().item(), rel=1e-12), name
    # An overflow in a part that one pair alone has, in one of its ranks.
    with counted() as found:
        step = scaler_of(sharded, adamw)
        if ctx.rank == 3 and sharded.blocks[0].down.bias.grad.numel():
            sharded.blocks[0].down.bias.grad.as_subclass(Tensor)[-1] = math.inf
        before = [p.detach().clone() for p in sharded.parameters()]
        step()
    assert len(found) == 2
    assert all(torch.equal(a, b) for a, b in zip(before, sharded.parameters(), strict=True))
    sharded.blocks[0].gain.grad = torch.zeros_like(sharded.blocks[0].gain)
    dist.destroy_process_group(pairs[ctx.rank // 2])
    pairs.clear()
    with pytest.raises(RuntimeError, match="process group that this module was sharded over has been destroyed"):
        sharded.blocks[0].gain.grad.norm()


@ranks(2, 3)
def test_ignored_parameters_count_once(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    plain, sharded = pair(ctx, Model, lambda m, g: shard(m, g, {Block}, ignored_states=[m.scale, m.blocks[0]]))
    backward(ctx, plain, sharded)
    norms = repr([total_norm(sharded, p) for p in ORDERS])
    assert set(in_texts(ctx, norms)) == {norms}, "equal, though ignored gradients differ by rank"
    for param in sharded.parameters():
        if not isinstance(param, ShardedParameter) and param.grad is not None:
            assert type(param.grad) is Tensor
            dist.all_reduce(param.grad, group=ctx.group)
            param.grad /= ctx.world_size
    assert_norms(sharded, plain)


@ranks(3)
def test_flat_parameters(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    for strategy in FULL, NO_SHARD:
        plain, sharded = pair(ctx, Model, policy={Block}, strategy=strategy)
        flats = flatshard.flat_parameters(sharded)
        backward(ctx, plain, sharded)
        assert_norms(sharded, plain, [f.grad for f in flats])
        assert_norm(total_norm(sharded.blocks[0]), plain_norm(plain.blocks[0], 2))
        stats = gradient_statistics(sharded)
        assert stats["blocks.0.down.weight"].norm == pytest.approx(plain.blocks[0].down.weight.grad.norm().item())
        assert_norm(flatshard.clip_grad_norm_(sharded, 0.5), plain_norm(plain, 2))
        assert_norm(stock_norm([f.grad for f in flats]), torch.tensor(0.5), rtol=1e-5)


@pytest.mark.parametrize(("which", "world_size"), all_pairs(["own", "foreach", "for-loop"], (2, 3, 4))[::2])
@ranks()
def test_training_with_clipping(ctx, which: str) -> None:
    def clip(model: nn.Module) -> Tensor:
        if which == "own" and any(isinstance(p, ShardedParameter) for p in model.parameters()):
            return flatshard.clip_grad_norm_(model, 0.05)
        norm = stock_clip(model.parameters(), 0.05, foreach=None if which == "foreach" else False)
        assert norm > 0.05, "clipping is active"
        return norm

    def batch(step: int, n: int) -> Tensor:
        return torch.randn(n, WIDTH)

    check_parity(ctx, Trained, batch, shard=lambda m, g: shard(m, g, {Block}), clip=clip, steps=5)


class Trained(Model):
    """Without the parameter of no elements: torch refuses its norm in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.rand(1))


@ranks(2)
def test_how_many_collectives(ctx) -> None:
    _, sharded = pair(ctx, Mixed, policy={Block})
    x = inputs(2)
    mean_square(sharded(x), x).backward()
    with counted() as found:
        flatshard.clip_grad_norm_(sharded, 1.0)
    assert found == ["sum of 4"]  # the norm, that of what is not sharded, and a fingerprint
    with counted() as found:
        total_norm(sharded, math.inf)
    assert found == ["max of 6"]
    with counted() as found:
        gradient_statistics(sharded)
    assert [each.split()[0] for each in found] == ["sum", "max"]
    real = [g for g in grads(sharded) if not g.is_complex()]
    assert len({g.dtype for g in real}) == 3
    with counted() as found:
        stock_norm(real)
    assert found == ["sum of 3"], "one, of any number of dtypes"
    with counted() as found:
        stock_norm(real, foreach=False)
    assert len(found) == len(real)
    single = [p for p in sharded.parameters() if p.dtype in (torch.float32, torch.float64)]
    with counted() as found:
        step_scaled(single)
    assert found == ["max of 4"]  # the flag, whether one is NaN, and a fingerprint


def step_scaled(params: list[nn.Parameter]) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.step(torch.optim.SGD(params, lr=0.1))
    scaler.update()


@ranks(3)
def test_what_is_not_finite(ctx) -> None:
    plain, sharded = pair(ctx, Trained, policy={Block})
    for value in math.inf, -math.inf, math.nan:
        for module in plain, sharded:
            module.zero_grad()
        backward(ctx, plain, sharded)
        plain.blocks[1].down.bias.grad[2] = value
        param = sharded.blocks[1].down.bias
        here = range(param._flatshard_info.start, param._flatshard_info.stop)
        if 2 in here:
            param.grad.as_subclass(Tensor)[here.index(2)] = value
        for order in (2, 3, math.inf):
            expected = plain_norm(plain, order).float()
            for norm in (
                total_norm(sharded, order),
                stock_norm(grads(sharded), order),
                torch.stack([g.norm(order) for g in grads(sharded)]).norm(order),
            ):
                torch.testing.assert_close(norm, expected, equal_nan=True)
                assert not norm.isfinite()
            before = [g.clone() for g in grads(sharded)]
            with pytest.raises(RuntimeError, match=r"norm of order .*gradient_statistics"):
                flatshard.clip_grad_norm_(sharded, 1.0, order, error_if_nonfinite=True)
            with pytest.raises(RuntimeError, match="non-finite"):
                stock_clip(sharded.parameters(), 1.0, order, error_if_nonfinite=True)
            for a, b in zip(before, grads(sharded), strict=True):
                torch.testing.assert_close(a, b, equal_nan=True, rtol=0, atol=0)
        stats = gradient_statistics(sharded)
        assert stats["blocks.1.down.bias"].nonfinite == 1
        assert math.isnan(value) == math.isnan(stats["blocks.1.down.bias"].max_abs)
        assert sum(s.nonfinite for s in stats.values()) == 1


# -- Ranks that differ in what they used ------------------------------------------------------------------------------


class Branches(nn.Module):
    """What each rank uses is its own affair. The small branch lies on one rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(1, 1)
        self.large = nn.Linear(WIDTH, 60)

    def forward(self, x: Tensor, use_small: bool) -> Tensor:
        y = self.large(x).mean()
        return y * self.small(x[:1, :1]).sum() if use_small else y


@ranks(3)
def test_ranks_that_use_different_parameters(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    plain, sharded = pair(ctx, Branches)
    x = inputs(ctx.world_size).double()
    sum(plain(x[r : r + 1], r == 0) / ctx.world_size for r in range(ctx.world_size)).backward()
    sharded(x[ctx.rank : ctx.rank + 1], ctx.rank == 0).backward()
    here = [p.grad is not None for p in sharded.parameters()]
    assert all(here), "ranks without a part of it have an empty gradient"
    for order in ORDERS:
        assert_norm(total_norm(sharded, order), plain_norm(plain, order))
        assert_norm(stock_norm(grads(sharded), order), plain_norm(plain, order))
    stats = gradient_statistics(sharded)
    assert list(stats) == [name for name, _ in plain.named_parameters()]
    assert stats["small.weight"].norm == pytest.approx(plain.small.weight.grad.norm().item())
    if ctx.rank:
        sharded.small.weight.grad = sharded.small.bias.grad = None
    with pytest.raises(
        RuntimeError, match=r"asked for the norm of order 2\.0 of the gradient of '.*gradient_statistics"
    ):
        one_by_one(sharded)


def one_by_one(module: nn.Module) -> None:
    """Ranks would take the norms of different gradients, if some have fewer."""
    for param in module.parameters():
        if param.grad is not None:
            param.grad.norm()


# -- GradScaler -------------------------------------------------------------------------------------------------------


def scaler_of(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[], float]:
    """One step of a GradScaler; returns the scale after it."""
    optimizer = make(list(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scaler.scale(torch.zeros(()))

    def step() -> float:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return scaler.get_scale()

    step.scaler, step.optimizer = scaler, optimizer  # type: ignore[attr-defined]
    return step


def put(param: nn.Parameter, index: int, value: float) -> None:
    """Set one element of a gradient, on the rank that has it."""
    info = flatshard._handle.tensors.sharded_parameter.shard_info(param)
    if info is None:
        param.grad.as_subclass(Tensor).view(-1)[index] = value
    elif info.start <= index < info.stop:
        param.grad.as_subclass(Tensor).view(-1)[index - info.start] = value


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "for-loop": adamw,
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}


@pytest.mark.parametrize(
    ("kind", "unscale", "world_size"), all_pairs(list(KINDS), (False, True), (2, 3, 4)), ids=lambda v: str(v)
)
@ranks()
def test_grad_scaler(ctx, kind: str, unscale: bool) -> None:
    """Six steps; in the third one element that lives on one rank overflows, in the fifth another, on another rank."""
    plain, sharded = (m.double() for m in pair(ctx, Trained, policy={Block}))
    steps = [scaler_of(m, KINDS[kind]) for m in (plain, sharded)]
    skipped = []
    for number in range(6):
        x = torch.randn(2 * ctx.world_size, WIDTH, generator=torch.Generator().manual_seed(number)).double()
        before = [p.detach().clone() for p in sharded.parameters()]
        scales = []
        for model, step, part in zip((plain, sharded), steps, (x, x[2 * ctx.rank :][:2]), strict=True):
            step.scaler.scale(mean_square(model(part), part)).backward()
            overflow = {2: ("blocks.0.gain", 0), 4: ("blocks.1.down.weight", 11 * WIDTH - 1)}.get(number)
            if overflow:
                put(model.get_parameter(overflow[0]), overflow[1], math.inf if number == 2 else math.nan)
            if unscale:
                step.scaler.unscale_(step.optimizer)
                assert overflow or stock_clip(model.parameters(), 0.1) > 0.1
            scales.append(step())
        assert scales[0] == scales[1], f"step {number}"
        skipped.append(all(torch.equal(a, b) for a, b in zip(before, sharded.parameters(), strict=True)))
    has_parts = any(p.numel() for p in sharded.parameters())
    assert not has_parts or skipped == [False, False, True, False, True, False]
    for name, value in full_params(sharded).items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach(), rtol=1e-6, atol=1e-9, msg=name)


@ranks(4)
def test_grad_scaler_where_ranks_have_nothing(ctx) -> None:
    """More ranks than elements: most ranks have empty parts only, and must skip the step too."""
    plain, sharded = pair(ctx, lambda: nn.Linear(1, 1))
    steps = [scaler_of(m, KINDS["foreach"]) for m in (plain, sharded)]
    for value in 1.0, math.inf, 1.0:
        for model, step in zip((plain, sharded), steps, strict=True):
            step.scaler.scale(model(torch.ones(1, 1)).sum()).backward()
            put(model.weight, 0, value)
        assert steps[0]() == steps[1]()
    states = [len(s.optimizer.state) for s in steps]
    assert states[0] == states[1]
    with flatshard.summon_full_params(sharded, writeback=False):
        torch.testing.assert_close(sharded.weight, plain.weight)


# -- What torch and users do with gradients ---------------------------------------------------------------------------


@ranks(3)
def test_idioms_for_norms(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    plain, sharded = pair(ctx, Model, policy={Block})
    backward(ctx, plain, sharded)
    found, expected = grads(sharded), plain_norm(plain, 2)
    norm, vector_norm, float64 = torch.linalg.norm, torch.linalg.vector_norm, torch.float64
    for idiom in (
        torch.norm(torch.stack([torch.norm(g.detach(), 2) for g in found]), 2),
        torch.tensor(sum(g.data.norm(2).item() ** 2 for g in found) ** 0.5),
        vector_norm(torch.stack([vector_norm(g.double(), 2) for g in found])),
        sum(torch.norm(g, dtype=float64) ** 2 for g in found) ** 0.5,
        sum(norm(g) ** 2 for g in found) ** 0.5,
        sum(norm(g, dtype=float64) ** 2 for g in found) ** 0.5,
    ):
        assert_norm(idiom, expected)
    assert_norm(torch.stack([g.norm(0) for g in found]).sum(), torch.stack([g.norm(0) for g in grads(plain)]).sum())
    # torch's norms of a list: each is the whole one in whatever it is used for.
    each = torch.stack([g.norm() for g in grads(plain)])
    for use in (
        lambda norms: (torch.stack(norms) + 0, each),
        lambda norms: (torch.stack([n * 1 for n in norms]), each),
        lambda norms: (torch.stack(norms).max(), each.max()),
        lambda norms: (torch.stack(norms).norm(1), each.norm(1)),
        lambda norms: (torch.tensor(norms[0].item()), each[0]),
    ):
        torch.testing.assert_close(*use(torch._foreach_norm(found, 2)))
    divided = torch._foreach_div(found, torch._foreach_norm(found, 2))
    assert all(type(d) is Tensor for d in divided)
    for d, g, e in zip(divided, found, each, strict=True):
        torch.testing.assert_close(d, g.clone() / e)
    norms = torch._foreach_norm(found, 2)
    stack = torch.stack(norms)
    assert norms[0].item() == pytest.approx(each[0].item())
    assert_norm(stack.norm(), expected)  # one of them is whole by now
    assert max(norms).item() == each.max().item()
    assert_norm(stack.norm(), expected)  # all of them
    stacked = torch.stack([*torch._foreach_norm(found[:2], 2), *torch._foreach_norm(found[2:], 3), torch.ones(())])
    assert stacked[0].item() == pytest.approx(each[0].item())
    # What torch cannot do with parts is refused.
    weight = sharded.blocks[0].down.weight.grad
    for refused in lambda: weight.norm(dim=0), lambda: norm(weight, 2), lambda: weight.norm("nuc"):
        with pytest.raises(NotImplementedError, match=r"blocks\.0\.down\.weight.*summon_full_params"):
            refused()
    with pytest.raises(NotImplementedError, match=r"flatshard\.optim\.get_total_norm\(model, 0\)"):
        stock_norm(found, 0.0)
    for foreach in None, True, False:
        for module in plain, sharded:
            torch.nn.utils.clip_grad_value_(module.parameters(), 1e-3, foreach=foreach)
        assert_norm(total_norm(sharded), plain_norm(plain, 2))
        total = stock_norm(grads(sharded))
        torch.nn.utils.clip_grads_with_norm_(sharded.parameters(), 1e-4, total, foreach=foreach)
        assert_norm(total_norm(sharded), torch.tensor(1e-4), rtol=1e-1)
        for module in plain, sharded:
            module.zero_grad()
        backward(ctx, plain, sharded)


@ranks(2, 4)
def test_gradients_that_users_change_stay_sharded(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    plain, sharded = pair(ctx, Model, policy={Block})

    def check(factor: float = 1.0) -> None:
        assert all(type(g) is ShardedGradient for g in grads(sharded))
        assert_norm(stock_norm(grads(sharded)), plain_norm(plain, 2) * factor)
        assert_norm(total_norm(sharded), plain_norm(plain, 2) * factor)

    backward(ctx, plain, sharded)
    check()
    backward(ctx, plain, sharded)  # accumulates
    check()
    for param in sharded.parameters():
        if param.grad is not None:
            held = param.grad
            param.grad.mul_(0.5)
            param.grad += param.grad
            param.grad[:] = param.grad * 2
            assert param.grad is held
            param.grad = param.grad.clone()  # a plain tensor, until it is in .grad
            param.grad = param.grad.to(torch.float64) / 2
    check()
    replaced = [g * 3 for g in grads(sharded)]
    assert all(type(g) is PartTensor for g in replaced)
    for param, new in zip([p for p in sharded.parameters() if p.grad is not None], replaced, strict=True):
        param.grad = new
        assert param.grad is new
    check(3.0)
    sharded.zero_grad(set_to_none=False)
    check(0.0)
    adamw(sharded.parameters()).zero_grad(set_to_none=False)
    check(0.0)
    del sharded.scale.grad
    assert sharded.scale.grad is None
    # A loss on the shards themselves: autograd makes these gradients.
    sharded.zero_grad()
    plain.zero_grad()
    sum(p.square().sum() for p in sharded.parameters()).backward()
    sum(p.square().sum() for p in plain.parameters()).backward()
    assert_norm(total_norm(sharded), plain_norm(plain, 2))
    backward(ctx, plain, sharded)
    assert all(type(p.grad) is ShardedGradient for p in sharded.blocks[0].parameters())
    assert_norm(total_norm(sharded), plain_norm(plain, 2))
    # Whole ones, written back.
    with flatshard.summon_full_params(sharded, with_grads=True):
        for param in grads(sharded):
            param.mul_(2)
    for param in grads(plain):
        param.mul_(2)
    assert_norm(total_norm(sharded), plain_norm(plain, 2))
    # Gradients that were there before sharding.
    late, model = copy.deepcopy(plain), copy.deepcopy(plain)
    for m in late, model:
        mean_square(m(inputs(2).double()), None).backward()
    shard(model, ctx.group, {Block})
    assert_norm(stock_norm(grads(model)), plain_norm(late, 2))
    # ... and when the dtype changes.
    assert_norm(stock_norm(grads(model.float())), plain_norm(late, 2), rtol=1e-5)


BOTH = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    *[(kind, {"foreach": foreach}) for kind in BOTH for foreach in (True, False)],
    *[(kind, {"fused": True}) for kind in ("Adagrad", "Adam", "AdamW", "SGD")],
    ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1, "foreach": False}),
    ("AdamW", {"amsgrad": True, "maximize": True, "foreach": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True, "foreach": False}),
]


def test_optimizers_do_to_sharded_gradients_what_they_do_to_plain_ones(fake_group):
    """Bit by bit, and their state is plain. (LBFGS and Adafactor compute from whole tensors: parts change their result.)"""
    for kind, options in OPTIMIZERS:
        model = shard(Model(), None, {Block})
        mine = [p for p in model.parameters() if p.requires_grad]
        plain = [nn.Parameter(p.detach().clone()) for p in mine]
        optimizers = [getattr(torch.optim, kind)(params, **options) for params in (mine, plain)]
        for _ in range(3):
            for a, b in zip(mine, plain, strict=True):
                b.grad = torch.randn_like(b)
                a.grad = b.grad.clone()
                assert type(a.grad) is ShardedGradient
            for optimizer in optimizers:
                optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True)), (kind, options)
        state = [v for s in optimizers[0].state.values() for v in s.values() if isinstance(v, Tensor)]
        assert {type(v) for v in state} <= {Tensor}


def test_a_sharded_gradient_is_a_plain_tensor_otherwise(fake_group):
    model = shard(nn.Linear(4, 4), None)
    model(torch.randn(2, 4)).sum().backward()
    grad = model.weight.grad
    assert type(grad) is ShardedGradient
    assert isinstance(grad, Tensor)
    assert not hasattr(grad, "_local_tensor")
    for made in grad.clone(), torch.zeros_like(grad), grad.sum(), *torch._foreach_mul([grad], 2):
        assert type(made) is Tensor
    for made in grad + 1, grad.abs(), grad.view(-1), grad[:], grad.isnan(), torch.where(grad > 0, grad, 0):
        assert type(made) is PartTensor
    for made in grad.detach(), grad.data, grad.float(), grad.double(), grad.to(torch.float64), grad.cpu():
        assert type(made) is ShardedGradient
    for copied in (copy.deepcopy(grad), copy.copy(grad), pickle.loads(pickle.dumps(grad)), saved(grad)):
        assert type(copied) is Tensor
        assert torch.equal(copied, grad)
    assert repr(grad).startswith("ShardedGradient([")
    twice = copy.deepcopy([grad, grad])
    assert twice[0] is twice[1]
    param = saved(model.weight)
    assert torch.equal(param, model.weight)
    acc = torch.zeros(grad.shape)
    acc += grad
    assert type(acc) is Tensor
    assert grad.is_sparse is False
    # The fake group's ranks all have this rank's values.
    assert grad.norm().item() == pytest.approx(grad.clone().norm().item() * 2**0.5)


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_what_is_not_sharded_stays_plain(world):
    world(1)
    model = shard(Model(), None, {Block})
    mean_square(model(inputs(2)), None).backward()
    assert all(type(g) is Tensor for g in grads(model))
    with counted() as found:
        assert_norm(total_norm(model), plain_norm(model, 2), rtol=1e-6)
        assert gradient_statistics(model)["scale"].numel == WIDTH
    assert not found
    plain = Model()
    mean_square(plain(inputs(2)), None).backward()
    assert_norm(total_norm(plain), plain_norm(plain, 2), rtol=1e-6)
    flatshard.clip_grad_norm_(plain, 0.1)
    assert_norm(total_norm(plain), torch.tensor(0.1), rtol=1e-4)
    assert total_norm(nn.Identity()).item() == 0


# -- gradient_statistics ----------------------------------------------------------------------------------------------


@ranks(2, 3)
def test_gradient_statistics(ctx) -> None:
    plain, sharded = pair(ctx, Mixed, lambda m, g: shard(m, g, {Block}, ignored_states=[m.scale]))
    backward(ctx, plain, sharded)
    if sharded.scale.grad is not None:
        dist.all_reduce(sharded.scale.grad, group=ctx.group)
        sharded.scale.grad /= ctx.world_size
    found = gradient_statistics(sharded)
    assert list(found) == [name for name, p in plain.named_parameters() if p.grad is not None]
    assert "frozen" not in found
    assert "unused" not in found
    assert "head.weight" not in found
    for name, stats in found.items():
        grad = plain.get_parameter(name).grad
        rel = 2e-2 if grad.dtype is torch.bfloat16 else 1e-5
        real = torch.view_as_real(grad) if grad.is_complex() else grad.double()
        assert stats.numel == grad.numel(), name
        assert stats.norm == pytest.approx(real.norm().item(), rel=rel), name
        assert stats.max_abs == pytest.approx(grad.abs().max().item() if grad.numel() else 0.0, rel=rel), name
        assert stats.mean == pytest.approx(real.mean().item(), rel=rel, abs=1e-9, nan_ok=True), name
        assert stats.nonfinite == 0, name
    assert set(in_texts(ctx, repr(found))) == {repr(found)}
    with pytest.raises(AttributeError):
        found["fp32"].norm = 0.0  # type: ignore[misc]


# -- Mistakes ---------------------------------------------------------------------------------------------------------

FUNCTIONS: tuple[Callable[[nn.Module], Any], ...] = (
    total_norm,
    lambda m: flatshard.clip_grad_norm_(m, 1.0),
    gradient_statistics,
)


def test_refusals(fake_group):
    """Of unsharded parameters, orders that are no norms, gradients of other classes."""
    model = shard(Model(), None, {Block}, ignored_states=[])
    mean_square(model(inputs(2)), None).backward()
    expected = total_norm(model)
    for function in FUNCTIONS:
        for options, match in (({}, r"unsharded.*outside of these"), ({"offload_to_cpu": True}, "unsharded")):
            with flatshard.summon_full_params(model, **options), pytest.raises(RuntimeError, match=match):
                function(model)
        flatshard.unshard(model.blocks[1])
        for module in (model, model.blocks[1].up):  # which is not a unit itself
            with pytest.raises(RuntimeError, match=r"'blocks\.1' are unsharded"):
                function(module)
        flatshard.reshard(model)
    assert torch.equal(total_norm(model), expected)
    for order in -1, -math.inf, math.nan:
        with pytest.raises(ValueError, match=r"norm_type=.*positive"):
            total_norm(model, order)

    class Special(Tensor):
        pass

    model = Model()
    shard(model, None, ignored_states=[model.scale])
    model.scale.grad = torch.ones(WIDTH).as_subclass(Special)
    for function in FUNCTIONS:
        with pytest.raises(NotImplementedError, match="'scale' is a Special"):
            function(model)


# -- Different questions, on an accelerator ---------------------------------------------------------------------------


class Answers:
    """Stands for the runtime of two ranks on an accelerator, where the other one says what ``other`` makes of this."""

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

    values = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert checked_all_reduce(values, "sum", Answers(lambda t: t), "what?").tolist() == [2.0, 4.0]
    assert checked_all_reduce(values, "sum", Answers(different), "what?").isnan().all()
    assert checked_all_reduce(values, "sum", Answers(lambda t: t * 0 + 7), "what?").isnan().all()
