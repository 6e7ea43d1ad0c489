"""Who needs a unit's parameters, in the orders that exceptions, interrupts and nesting bring about."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatshard
from flatshard import MixedPrecision, fully_shard, summon_full_params
from flatshard._composable.find import units_below
from flatshard._handle.registrations import SHARDED

BF16 = MixedPrecision(param_dtype=torch.bfloat16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.scale = nn.Parameter(torch.full((3,), 2.0))
        self.last = nn.Linear(6, 3)
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.first(x)).tanh()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self.last(x) * self.scale


X = torch.linspace(-1, 1, 8).view(2, 4)


def gradients(model: nn.Module, sharded: bool) -> dict[str, Tensor | None]:
    for p in model.parameters():
        p.grad = None
    model(X).square().sum().backward()
    if not sharded:
        return {n: p.grad for n, p in model.named_parameters()}
    with summon_full_params(model, with_grads=True, writeback=False):
        return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def check(model: nn.Module, plain: nn.Module, exact: bool) -> None:
    """That the model is as between two steps, and trains like the plain one."""
    for found, expected in zip(gradients(model, True).values(), gradients(plain, False).values(), strict=True):
        assert found is not None
        if exact:
            torch.testing.assert_close(found, expected)
    for unit in units_below(model):
        assert not unit.claims
        assert unit.handle.registrations.shows is SHARDED


OPTIONS: list[dict[str, Any]] = [{}, {"mixed_precision": BF16}, {"static_buffers": True}]


def pair(ctx: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Net()
    return plain, fully_shard(copy.deepcopy(plain), policy={nn.Linear}, process_group=ctx.group, **options)


def interrupted(ctx: Any) -> None:
    for options in OPTIONS:
        for summon in ({}, {"offload_to_cpu": True}, {"writeback": False}):
            for error in (KeyboardInterrupt(), ValueError()):
                ctx.note(f"{options} {summon} {error!r}")
                plain, model = pair(ctx, **options)
                exact = "mixed_precision" not in options
                before = flatshard.checkpoint.full_state_dict(model)
                with torch.no_grad(), summon_full_params(model, **summon):
                    model.error = error
                    with pytest.raises(type(error)):
                        model(X)
                    assert model.scale.shape == (3,)
                    torch.testing.assert_close(model(X), plain(X))  # in full precision, as what is shown is
                    assert model.last.weight.shape == (3, 6)
                check(model, plain, exact)
                for name, value in flatshard.checkpoint.full_state_dict(model).items():
                    assert torch.equal(value, before[name]), name


def test_a_forward_that_dies_inside_summon_full_params(pool):
    pool.run(interrupted)


def died_around(ctx: Any) -> None:
    """The exception goes through the ``with`` block too."""
    plain, model = pair(ctx)
    model.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), torch.no_grad(), summon_full_params(model):
        model(X)
    check(model, plain, True)
    model.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model(X)
    with summon_full_params(model):
        assert model.scale.shape == (3,)
    check(model, plain, True)


def test_an_interrupt_that_ends_summon_full_params(pool):
    pool.run(died_around)


class Dies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("died in backward")


def backward_dies(ctx: Any) -> None:
    for options in OPTIONS:
        for summon in ({}, {"offload_to_cpu": True}):
            ctx.note(f"{options} {summon}")
            plain, model = pair(ctx, **options)
            hook = model.blocks.register_forward_pre_hook(lambda m, args: Dies.apply(args[0]))
            with pytest.raises(RuntimeError, match="died in backward"):
                model(X).sum().backward()
            hook.remove()
            with torch.no_grad(), summon_full_params(model, **summon):
                torch.testing.assert_close(model(X), plain(X))
            check(model, plain, "mixed_precision" not in options)


def test_an_evaluation_in_summon_full_params_after_a_backward_that_died(pool):
    pool.run(backward_dies)


class Tied(nn.Module):
    """The inner unit uses the outer one's weight, and runs with gradients inside an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.inner = nn.Linear(4, 4, bias=False)
        self.inner.weight = self.weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = self.inner(x.requires_grad_())
            (grad,) = torch.autograd.grad(y.sum(), x)
        return (x @ self.weight) + grad.to(x)


def full_precision(ctx: Any) -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16, full_precision_in_eval=True, cast_forward_inputs=True)
    model = fully_shard(Tied(), policy={nn.Linear}, process_group=ctx.group, mixed_precision=policy).eval()
    with torch.no_grad():
        assert torch.equal(model(X.clone()), X + 1)
        assert torch.equal(model(X.clone()), X + 1)
    for unit in units_below(model):
        assert not unit.claims
        assert unit.handle.registrations.shows is SHARDED


def test_a_forward_with_gradients_inside_one_in_full_precision(pool):
    pool.run(full_precision)


def in_threads(ctx: Any) -> None:
    plain, model = pair(ctx)
    _, other = pair(ctx)
    other.first.register_forward_pre_hook(lambda m, args: None)
    started, go_on, found = threading.Event(), threading.Event(), []

    def stop(module: nn.Module, args: Any) -> None:
        started.set()
        assert go_on.wait(30)

    hook = model.last.register_forward_pre_hook(stop)

    def run() -> None:
        found.append(model(X))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(30)
        for each in (model, other):
            with pytest.raises(RuntimeError, match=r"unit 'last' is in a forward on another thread"):
                each(X)
    finally:
        go_on.set()
        thread.join(30)
    hook.remove()
    torch.testing.assert_close(found[0], plain(X))
    check(model, plain, True)
    check(other, plain, True)


def test_two_threads(pool):
    pool.run(in_threads)


def nested(ctx: Any) -> None:
    """An inner ``summon_full_params`` shows what the outer one shows, changed in it. It takes the same arguments."""
    for options in OPTIONS:
        for arguments in ({}, {"offload_to_cpu": True}, {"writeback": False}):
            for assigns in (False, True):
                ctx.note(f"{options} {arguments} {assigns}")
                _, model = pair(ctx, **options)
                keeps = "writeback" not in arguments
                with torch.no_grad(), summon_full_params(model, **arguments):
                    if assigns:
                        model.last.weight.data = torch.full((3, 6), 3.0)
                    else:
                        model.last.weight.fill_(3.0)
                    with summon_full_params(model, recurse=assigns, **arguments):
                        assert model.last.weight.eq(3.0).all()
                    with summon_full_params(model.last, **arguments):
                        model.last.weight.add_(1.0)
                    assert model.last.weight.eq(4.0 if keeps else 3.0).all()
                    other = {**arguments, "with_grads": True}
                    with (
                        pytest.raises(
                            RuntimeError, match=r"with_grads=True\) of unit 'last' inside .*the same arguments"
                        ),
                        summon_full_params(model.last, **other),
                    ):
                        pass
                with summon_full_params(model):
                    assert model.last.weight.eq(4.0).all() == keeps


def test_summon_inside_summon(pool):
    pool.run(nested)


def summoned_in_a_step(ctx: Any) -> None:
    """It is refused in forward and in backward, and nothing has happened. The cure reads another layer in a forward."""
    plain, model = pair(ctx)
    seen: list[Tensor] = []

    def refused(*_: Any) -> None:
        with (
            pytest.raises(RuntimeError, match="of unit 'last' inside a forward, a backward"),
            summon_full_params(model.last),
        ):
            pass

    def cured(*_: Any) -> None:
        flatshard.unshard(model.last)
        seen.append(model.last.weight.detach().clone())
        flatshard.reshard(model.last)

    hooks = [model.blocks.register_forward_pre_hook(hook) for hook in (refused, cured)]
    hooks.append(model.first.register_full_backward_hook(refused))
    model(X).sum().backward()
    assert torch.equal(seen[0], plain.last.weight)
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    check(model, plain, True)


def test_summon_inside_a_step(pool):
    pool.run(summoned_in_a_step)


def written_by_the_inner_one(ctx: Any) -> None:
    """What an inner ``summon_full_params`` has written back stays, however the outer one ends, and is noticed."""
    for options in OPTIONS:
        for arguments in ({}, {"offload_to_cpu": True}):
            ctx.note(f"{options} {arguments}")
            _, model = pair(ctx, **options)
            with flatshard.keep_unsharded(model), torch.no_grad():
                model(X)
                with contextlib.suppress(ValueError), summon_full_params(model, **arguments):
                    model.last.weight.fill_(3.0)
                    with summon_full_params(model, **arguments):
                        model.last.bias.fill_(2.0)
                    model.last.bias.fill_(9.0)
                    raise ValueError
                assert model(X).isfinite().all()
                with summon_full_params(model):
                    assert model.last.weight.eq(3.0).all()
                    assert model.last.bias.eq(2.0).all()


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_an_inner_summon_has_written_back_stays(pool, world_size):
    pool.run(written_by_the_inner_one, world_size=world_size)
