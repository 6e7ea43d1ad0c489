"""Gradient accumulation, into ``.grad`` by default and per rank under ``no_sync``, against one process."""

import contextlib
import copy
import itertools

import pytest
import torch
from clean import check_clean
from models import Block, Net
from on_ranks import ranks
from parity import check_same_gradients, parts, twins
from torch import Tensor, nn

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, fully_shard


def leave_out(block: int | None, *nets: nn.Module) -> None:
    for net in nets:
        net.order = [i for i in range(3) if i != block]


@ranks(2)
def test_accumulation_in_the_reduce_dtype(ctx):
    """Under no_sync, gradients add up in the reduce dtype, so many small ones are not lost in bf16."""
    for width in (6, 200):
        policy = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
        model = fully_shard(nn.Linear(width, 1, bias=False), process_group=ctx.group, mixed_precision=policy)
        x = torch.ones(1, width)
        with flatshard.no_sync(model):
            model(x).sum().backward()
            for _ in range(100):
                (model(x) * 2**-9).sum().backward()
            assert model.weight.grad is None
        (model(x) * 0).sum().backward()
        expected = torch.full_like(model.weight.grad, 1 + 100 * 2**-9)  # in bf16 it would still be 1
        torch.testing.assert_close(model.weight.grad, expected, rtol=1e-6, atol=0)
        model.zero_grad()
        with flatshard.no_sync(model):  # held gradients after a reduction in it, from one rank only
            (model(x) * 0).sum().backward()
            flatshard.reduce_gradients(model)
            loss = model(x).sum()
            if ctx.rank:
                loss.backward()
        (model(x) * 0).sum().backward()
        assert torch.equal(model.weight.grad, torch.full_like(model.weight.grad, 0.5))


@ranks(2)
def test_converted_while_flat_gradients_are_held(ctx):
    """Held gradients follow the parameters to another dtype, with flat parameters too."""
    for mixed in (None, MixedPrecision(reduce_dtype=torch.float32)):
        plain, model = twins(ctx, Net, {Block}, torch.float32, mixed_precision=mixed)
        flats, x = flatshard.flat_parameters(model), torch.randn(2, 4)
        with flatshard.no_sync(model):
            model(x).square().mean().backward()
        plain(x).square().mean().backward()
        for m in (model.double(), plain.double()):
            m(x.double()).square().mean().backward()
        assert {p.grad.dtype for p in flats} == {torch.float64}
        check_same_gradients(model, plain, rtol=1e-5)


@ranks(2)
def test_a_copy_made_inside_no_sync_is_outside(ctx):
    plain, model = twins(ctx, lambda: Net(width=5, inputs=5), {Block}, torch.float32)
    x = torch.randn(2, 5)
    with flatshard.no_sync(model):
        with flatshard.no_sync(model.blocks[0]):
            copied = copy.deepcopy(model)
        model(x).sum().backward()
        assert all(p.grad is None for p in model.parameters())  # the outer no_sync remains in effect
    flatshard.recover(model)
    flatshard.configure(model, gradient_sync=False)
    held = copy.deepcopy(model)
    held(x).sum().backward()
    assert all(p.grad is None for p in held.parameters())
    for m in (copied, plain):
        m(x).square().mean().backward()
    check_same_gradients(copied, plain, rtol=1e-5)


@ranks(2)
def test_autograd_grad_adds_nothing_to_what_is_held(ctx):
    """A gradient with respect to the input passes all units and adds to no unit's gradients."""
    plain, model = twins(ctx, lambda: Net(width=5, inputs=5), {Block})
    x = torch.randn(2, 5, dtype=torch.double, requires_grad=True)
    with flatshard.no_sync(model):
        model(x).square().mean().backward()
    torch.autograd.grad(model(x).sum(), x)
    plain(x).square().mean().backward()
    leave_out(1, plain, model)
    for m in (plain, model):
        m(x).square().mean().backward()
    check_same_gradients(model, plain)


@ranks(4)
def test_gradients_held_on_another_group(ctx):
    """The last microbatch leaves out a unit on another process group that holds gradients."""
    torch.manual_seed(0)
    plain = Net(width=5, inputs=5).double()
    model = copy.deepcopy(plain)
    fully_shard(model.blocks[1], process_group=ctx.group, strategy=ShardingStrategy.NO_SHARD)
    mesh = ctx.device_mesh((2, 2), ("replicate", "shard"))
    fully_shard(model, device_mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD)
    for skips in (False, True):
        leave_out(1 if skips else None, plain, model)
        x = torch.randn(2 * ctx.world_size, 5).double()
        with contextlib.nullcontext() if skips else flatshard.no_sync(model):
            for m, part in zip((plain, model), parts(ctx, x), strict=True):
                m(part).square().mean().backward()
    check_clean(model)
    check_same_gradients(model, plain)


@ranks(2)
def test_which_modules_a_backward_reduces_too(ctx):
    """A backward also reduces modules of the same fully_shard call, and those that an earlier one reached with its own."""
    tree = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), policy={nn.Linear}, process_group=ctx.group)
    trunk, first, second, other = modules = [fully_shard(nn.Linear(3, 3), process_group=ctx.group) for _ in range(4)]
    x = torch.ones(2, 3)
    for is_last in (False, True):
        for module in (tree, *modules):
            flatshard.configure(module, gradient_sync=is_last)
        tree[is_last](x).sum().backward()
        (second if is_last else first)(trunk(x)).sum().backward()
        if not is_last:
            other(x).sum().backward()

    def reduced(module: nn.Module) -> list[bool]:
        return [p.grad is not None for p in module.parameters() if p.numel()]

    assert all(all(reduced(module)) for module in (tree, trunk, first, second))
    assert not any(reduced(other))
    flatshard.reduce_gradients(other)
    assert all(reduced(other))


class Shared(nn.Module):
    """Two parameters whose gradients are views of one tensor: autograd gives both the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.kind = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.position.unsqueeze(0) + self.kind.unsqueeze(0))


def train(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


@ranks(2)
def test_held_gradients_are_apart_from_autograds_and_the_users(ctx):
    """They share no memory. No ``zero_grad`` or clipping finds them, and a parameter may be frozen for one microbatch."""
    plain, model = twins(ctx, Shared)
    losses = []
    for number in range(3):
        for each in (plain, model):
            each.kind.requires_grad_(number != 1)
        x, own = parts(ctx, torch.randn(2, 3, 4).double())
        losses.append(plain(x).square().mean())
        with flatshard.no_sync(model) if number < 2 else contextlib.nullcontext():
            train(model, own)
        if number == 0:
            with flatshard.summon_full_params(model):
                model.zero_grad()
            flatshard.unshard(model)
            assert nn.utils.clip_grad_norm_(model.parameters(), 1e-3) == 0
            flatshard.reshard(model)
    sum(losses).backward()  # one backward: several would add to the memory that both gradients share
    check_same_gradients(model, plain)


@ranks(2)
def test_held_gradients_of_a_parameter_that_is_frozen_are_dropped_with_a_warning(ctx):
    """The call that the warning names keeps them, in inference mode too. They are frozen before a forward or after it."""
    for keeps, frozen in itertools.product((False, True), (["kind"], ["kind", "position"])):
        plain, model = twins(ctx, lambda: nn.Sequential(nn.Linear(4, 4), Shared()), {Shared, nn.Linear})
        x, own = parts(ctx, torch.randn(2, 3, 4).double())
        with flatshard.no_sync(model):
            train(model, own)
        train(plain, x)
        if keeps:
            with torch.inference_mode():
                flatshard.reduce_gradients(model)

        def freeze(plain: nn.Module = plain, model: nn.Module = model, frozen: list[str] = frozen) -> None:
            for each, name in itertools.product((plain, model), frozen):
                each[1].get_parameter(name).requires_grad_(False)

        # Frozen after its forward, a unit comes to the end of a backward that holds.
        is_after = len(frozen) > 1
        if not is_after:
            freeze()
        losses = [plain(x).square().mean(), model(own).square().mean()]
        if is_after:
            freeze()
        warns = pytest.warns(UserWarning, match=r"reduce_gradients\(module\) before")
        with (
            contextlib.nullcontext() if keeps else warns,
            flatshard.no_sync(model) if is_after else contextlib.nullcontext(),
        ):
            losses[1].backward()
        flatshard.reduce_gradients(model)
        losses[0].backward()
        for name in () if keeps else frozen:
            plain[1].get_parameter(name).grad = None
        check_same_gradients(model, plain)
