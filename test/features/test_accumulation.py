"""Gradient accumulation: by default into ``.grad``, under ``no_sync`` on each rank; against one process."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
from clean import storage_nbytes
from models import Mlp
from pairs import all_pairs
from torch import nn

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, fully_shard
from flatshard._composable.find import units_below
from flatshard._trace import record_events

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD


class Block(Mlp):
    def __init__(self, width: int) -> None:
        super().__init__(width, width + 3)


class Net(nn.Module):
    """``width`` 200: flat parameters too large for their gradients to be copied together. ``skip``: leaves a block out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 2)
        self.sometimes = nn.Linear(width, 2)
        self.never = nn.Linear(width, 2)
        self.head.bias.requires_grad_(False)
        self.skip = -1
        self.use_sometimes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            if i != self.skip:
                x = block(x)
        return self.head(x) + (self.sometimes(x) if self.use_sometimes else 0)


def check_gradients(model: nn.Module, reference: nn.Module, rtol: float = 1e-9) -> None:
    with flatshard.summon_full_params(model, writeback=False, with_grads=True):
        for (name, p), q in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            assert (p.grad is None) == (q[1].grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(
                    p.grad, q[1].grad, rtol=rtol, atol=rtol * 1e-2, msg=lambda m, n=name: f"{n}: {m}"
                )


SYNCS = [(True, True, True), (False, False, True), (False, True, False, True), (True, False, True)]


def accumulate(ctx, strategy: ShardingStrategy, width: int, cases: list[tuple[bool, Any, bool]]) -> None:
    """Microbatches with and without synchronisation, units and parameters used in all of them or in some only."""
    for blocks, syncs, varying in cases:
        units = {Block} if blocks else None
        ctx.note(f"{units}, {syncs}, {'varying' if varying else 'fixed'}")
        torch.manual_seed(0)
        reference = Net(width).double()
        model = copy.deepcopy(reference)
        fully_shard(model, policy=units, process_group=ctx.group, strategy=strategy)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (reference, model)]
        for _ in range(2):
            for i, sync in enumerate(syncs):
                if varying:
                    for m in (reference, model):
                        m.skip = 1 if i == len(syncs) - 1 else -1  # the reduction comes in a backward without it
                        m.use_sometimes = i == 0
                x = torch.randn(2 * ctx.world_size, width).double()
                reference(x).square().mean().backward()
                flatshard.configure(model, gradient_sync=sync)
                model(x.chunk(ctx.world_size)[ctx.rank]).square().mean().backward()
            check_gradients(model, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for unit in units_below(model):
            assert not unit.handle.gradients.is_held
            assert all(storage_nbytes(f.gradients.input) == 0 for f in unit.handle.flats)


# Every two choices come together: 24 cases of 96.
WHERE = [
    (FULL, 5, 1),
    (FULL, 5, 3),
    (FULL, 200, 1),
    (FULL, 200, 3),
    (GRAD_OP, 5, 2),
    (NO_SHARD, 5, 2),
    (NO_SHARD, 200, 2),
    (ShardingStrategy.SHARD_OPTIM, 5, 3),
    (ShardingStrategy.SHARD_OPTIM, 200, 2),
]
CASES = all_pairs(WHERE, (True, False), SYNCS, (False, True))


@pytest.mark.parametrize(("strategy", "width", "world_size"), WHERE, ids=str)
def test_accumulation(pool, strategy: ShardingStrategy, width: int, world_size: int):
    cases = [case[1:] for case in CASES if case[0] == (strategy, width, world_size)]
    pool.run(accumulate, strategy, width, cases, world_size=world_size)


def mixed(ctx) -> None:
    """Under no_sync gradients add up in the reduce dtype: many small ones are not lost in bf16."""
    for width in (6, 200):
        policy = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
        model = nn.Linear(width, 1, bias=False)
        fully_shard(model, process_group=ctx.group, mixed_precision=policy)
        x = torch.ones(1, width)
        with flatshard.no_sync(model):
            model(x).sum().backward()
            for _ in range(300):
                (model(x) * 2**-9).sum().backward()
            assert model.weight.grad is None
        (model(x) * 0).sum().backward()
        expected = 1 + 300 * 2**-9  # in bf16 it would still be 1
        assert model.weight.grad is not None
        assert model.weight.grad.dtype is torch.float32
        torch.testing.assert_close(model.weight.grad, torch.full_like(model.weight.grad, expected), rtol=1e-6, atol=0)


def test_accumulation_in_the_reduce_dtype(pool):
    pool.run(mixed)


def collectives(ctx) -> list[str]:
    torch.manual_seed(0)
    model = fully_shard(Net(4), policy={Block}, process_group=ctx.group, strategy=GRAD_OP)
    x = torch.randn(2, 4)
    model(x).sum().backward()
    model.zero_grad()
    with record_events() as events:
        with flatshard.no_sync(model):
            assert not any(u.handle.gradients.reduces for u in units_below(model))
            model(x).sum().backward()
        assert all(u.handle.gradients.reduces for u in units_below(model))
        assert [e for e in events if e.startswith("reduce-")] == []
        assert all(p.grad is None for p in model.parameters())
        model(x).sum().backward()
    return [e for e in events if e.startswith("reduce-")]


def test_no_sync_communicates_no_gradient(pool):
    expected = [
        "reduce-scatter blocks.2",
        "reduce-scatter blocks.1",
        "reduce-scatter blocks.0",
        "reduce-scatter <root>",
    ]
    assert pool.run(collectives) == [expected] * 2


def partly(ctx) -> None:
    """no_sync on a part of the model, and recurse=False."""
    torch.manual_seed(0)
    reference = Net(4).double()
    model = fully_shard(copy.deepcopy(reference), policy={Block}, process_group=ctx.group)
    for i in range(2):
        x = torch.randn(2 * ctx.world_size, 4).double()
        reference(x).square().mean().backward()
        flatshard.configure(model, gradient_sync=i == 1, recurse=False)
        flatshard.configure(model.blocks[0], gradient_sync=i == 1)
        model(x.chunk(ctx.world_size)[ctx.rank]).square().mean().backward()
        if i == 0:
            assert model.head.weight.grad is None
            assert model.blocks[0].up.weight.grad is None
            assert model.blocks[1].up.weight.grad is not None
    check_gradients(model, reference)


def test_a_part_of_the_model(pool):
    pool.run(partly)


def failing(ctx) -> None:
    """An exception in a backward drops what was held, as parts of it are mixed with the failed microbatch's."""
    for width in (4, 200):
        torch.manual_seed(0)
        reference = Net(width).double()
        model = fully_shard(copy.deepcopy(reference), policy={Block}, process_group=ctx.group)
        x = torch.randn(2 * ctx.world_size, width).double()
        mine = x.chunk(ctx.world_size)[ctx.rank]
        with flatshard.no_sync(model):
            model(mine).square().mean().backward()
            handle = model.blocks[1].register_forward_hook(lambda *a: 1 / 0)
            with pytest.raises(ZeroDivisionError):  # in forward: what is held stays
                model(mine)
            handle.remove()
            model(mine).square().mean().backward()
        model(mine).square().mean().backward()
        for _ in range(3):
            reference(x).square().mean().backward()
        check_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()
        with flatshard.no_sync(model):
            model(mine).square().mean().backward()
            out = model(mine)
            out.register_hook(lambda g: g)
            middle = model.blocks[1](mine)
            middle.register_hook(lambda g: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                (out.square().mean() + model.blocks[0](middle).sum()).backward()
        model(mine).square().mean().backward()
        reference(x).square().mean().backward()
        check_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()
        with flatshard.no_sync(model):
            model(mine).square().mean().backward()
        flatshard.recover(model)  # as no_sync says: this drops it
        model(mine).square().mean().backward()
        reference(x).square().mean().backward()
        check_gradients(model, reference)


def test_exceptions(pool):
    pool.run(failing)


def factor(ctx) -> None:
    for strategy, width in itertools.product((FULL, NO_SHARD), (4, 200)):
        for group, world in ((ctx.group, ctx.world_size), (ctx.alone, 1)):
            torch.manual_seed(0)
            reference = Net(width).double()
            model = fully_shard(copy.deepcopy(reference), policy={Block}, process_group=group, strategy=strategy)
            for divisor in (1.0, 10, None):
                reference.zero_grad()
                model.zero_grad()
                x = torch.randn(2 * world, width).double()
                scale = 1.0 if divisor is None else world / divisor
                (reference(x).square().mean() * scale).backward()
                flatshard.configure(model, divide_factor=divisor)
                model(x.chunk(world)[ctx.rank % world]).square().mean().backward()
                check_gradients(model, reference)
    with pytest.raises(ValueError, match="factor must be positive or None, got 0"):
        flatshard.configure(model, divide_factor=0)


def test_gradient_divide_factor(pool):
    pool.run(factor)


def test_misuse():
    plain = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="no_sync: nothing in this Linear is sharded; call"), flatshard.no_sync(plain):
        pass
    with pytest.raises(ValueError, match="configure: nothing in this Linear is sharded"):
        flatshard.configure(plain, gradient_sync=True, recurse=False)


def held_and_converted(ctx) -> None:
    """What is held follows the parameters to another dtype."""
    for strategy in (FULL, GRAD_OP, NO_SHARD):
        for mixed in (None, MixedPrecision(reduce_dtype=torch.float32)):
            for flat in (False, True):
                torch.manual_seed(0)
                reference = Net(5)
                model = copy.deepcopy(reference)
                options = {"strategy": strategy, "mixed_precision": mixed, "process_group": ctx.group}
                fully_shard(model, policy={Block}, **options)
                if flat:
                    for m in (model, reference):
                        m.head.bias.requires_grad_(True)
                        m.use_sometimes = True
                    model = fully_shard(copy.deepcopy(reference), policy={Block}, **options)
                    flats = flatshard.flat_parameters(model)
                x = torch.randn(2, 5)
                with flatshard.no_sync(model):
                    model(x).square().mean().backward()
                model.double()
                model(x.double()).square().mean().backward()
                reference(x).square().mean().backward()
                reference.double()
                reference(x.double()).square().mean().backward()
                if flat:
                    assert {p.grad.dtype for p in flats} == {torch.float64}
                    reference.never.weight.grad = torch.zeros_like(reference.never.weight)
                    reference.never.bias.grad = torch.zeros_like(reference.never.bias)
                check_gradients(model, reference, rtol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_module_converted_while_gradients_are_held(pool, world_size):
    pool.run(held_and_converted, world_size=world_size)


def copied_inside(ctx) -> None:
    torch.manual_seed(0)
    reference = Net(5)
    model = fully_shard(copy.deepcopy(reference), policy={Block}, process_group=ctx.group)
    with flatshard.no_sync(model):
        with flatshard.no_sync(model.blocks[0]):
            copied = copy.deepcopy(model)
        assert not any(u.handle.gradients.reduces for u in units_below(model))  # the outer one goes on
    flatshard.configure(model, gradient_sync=False)
    held = copy.deepcopy(model)
    assert not any(u.handle.gradients.reduces for u in units_below(held))
    x = torch.randn(2, 5)
    copied(x).square().mean().backward()
    reference(x).square().mean().backward()
    check_gradients(copied, reference, rtol=1e-5)


def test_a_copy_made_inside_no_sync_is_outside(pool):
    pool.run(copied_inside)


def frozen_while_held(ctx) -> None:
    """A unit that is frozen when gradients are reduced drops what it holds, like one parameter does."""
    torch.manual_seed(0)
    reference = Net(5)
    model = fully_shard(copy.deepcopy(reference), policy={Block}, process_group=ctx.group)
    x = torch.randn(2, 5)
    with flatshard.no_sync(model):
        model(x).square().mean().backward()
    model.blocks[1].requires_grad_(False)
    model(x).square().mean().backward()
    assert all(p.grad is None for p in model.blocks[1].parameters())
    model.zero_grad()
    model.blocks[1].requires_grad_(True)
    model(x).square().mean().backward()
    reference(x).square().mean().backward()
    check_gradients(model, reference, rtol=1e-5)


def held_through_grad(ctx) -> None:
    """``torch.autograd.grad`` with respect to the input comes to all units, and adds to none of them."""
    torch.manual_seed(0)
    reference = Net(5)
    model = fully_shard(copy.deepcopy(reference), policy={Block}, process_group=ctx.group)
    x = torch.randn(2, 5, requires_grad=True)
    with flatshard.no_sync(model):
        model(x).square().mean().backward()
    torch.autograd.grad(model(x).sum(), x)
    for m in (reference, model):
        m.skip = 1
        if m is reference:
            m.skip = -1
            m(x).square().mean().backward()
            m.skip = 1
        m(x).square().mean().backward()
    check_gradients(model, reference, rtol=1e-5)


@pytest.mark.parametrize("body", [frozen_while_held, held_through_grad])
def test_what_is_held_comes_into_this_step_or_none(pool, body):
    pool.run(body)


# -- reducing what is held, without another backward -------------------------------------------------------------------


def reduce_held(ctx, strategy: ShardingStrategy, width: int) -> None:
    torch.manual_seed(0)
    reference = Net(width).double()
    model = copy.deepcopy(reference)
    fully_shard(model, policy={Block}, process_group=ctx.group, strategy=strategy)
    for step in range(3):
        xs = torch.randn(2, ctx.world_size, 2, width, dtype=torch.double)
        for number, micro in enumerate(xs):
            reference.skip = model.skip = number if step == 1 else -1
            for x in micro:
                (reference(x).square().mean() / ctx.world_size).backward()
            with flatshard.no_sync(model):
                model(micro[ctx.rank]).square().mean().backward()
        assert ctx.world_size == 1 or step or all(p.grad is None for p in model.parameters())
        with record_events() as events:
            flatshard.reduce_gradients(model)
            flatshard.reduce_gradients(model)  # nothing is left to reduce
        reductions = [e for e in events if e.startswith(("reduce-scatter", "all-reduce"))]
        assert len(reductions) == 4, reductions
        check_gradients(model, reference)
    # The next backward reduces its own gradients only.
    x = torch.randn(2, width, dtype=torch.double)
    for m in (reference, model):
        m.zero_grad()
        m(x).square().mean().backward()
    check_gradients(model, reference)


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NO_SHARD])
def test_reduce_gradients(pool, strategy: ShardingStrategy):
    for world_size, width in ((2, 5), (3, 200), (1, 5)):
        pool.run(reduce_held, strategy, width, world_size=world_size)


def refuse_to_reduce(ctx) -> None:
    model = fully_shard(Block(4), process_group=ctx.group)
    model.up.register_forward_hook(lambda *_: flatshard.reduce_gradients(model))
    with pytest.raises(RuntimeError, match="reduce_gradients: called inside a forward or a backward"):
        model(torch.ones(2, 4))
    with pytest.raises(ValueError, match="reduce_gradients: nothing in this Linear is sharded"):
        flatshard.reduce_gradients(nn.Linear(2, 2))


def test_reduce_gradients_inside_a_forward(pool):
    pool.run(refuse_to_reduce)


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.inner = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        x = self.front(x)
        return x if skips else self.inner(torch.tanh(x))


def hold_on_another_group(ctx) -> None:
    """The last microbatch leaves out the unit on the other process group, of which gradients are held."""
    torch.manual_seed(0)
    plain = Skipping().double()
    model = copy.deepcopy(plain)
    fully_shard(model.inner, process_group=ctx.group, strategy=NO_SHARD)
    mesh = ctx.device_mesh((2, 2), ("replicate", "shard"))
    fully_shard(model, device_mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD)
    for _ in range(2):
        for skips in (False, True):
            x = torch.randn(2 * ctx.world_size, 5).double()
            plain(x, skips).square().mean().backward()
            with contextlib.nullcontext() if skips else flatshard.no_sync(model):
                model(x.chunk(ctx.world_size)[ctx.rank], skips).square().mean().backward()
        assert not any(unit.handle.gradients.is_held for unit in units_below(model))
        check_gradients(model, plain)
        plain.zero_grad()
        model.zero_grad()


def test_gradients_held_on_another_group(pool):
    pool.run(hold_on_another_group, world_size=4)
