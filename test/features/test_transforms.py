"""``torch.func`` and higher derivatives: correct inside ``summon_full_params``, and a clear error outside."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from clean import check_clean
from on_ranks import ranks
from parity import check_same_gradients, twins
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import flatshard
from flatshard.tensors import ShardedParameter

WIDTH = 6


def make(ctx: Any, policy: Any = None, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return a sharded model and a plain one with equal values."""
    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
    return twins(ctx, lambda: nn.Sequential(*layers), policy, **options)[::-1]


def inputs() -> Tensor:
    return torch.randn(2, WIDTH, dtype=torch.double, generator=torch.Generator().manual_seed(1))


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def total(x: Tensor) -> Tensor:
    return x.square().sum()


def is_as_before(model: nn.Module, plain: nn.Module) -> None:
    """Assert that nothing changed: the model computes and trains as ``plain`` does."""
    assert all(type(p) is ShardedParameter for p in model.parameters())
    check_clean(model)
    x = inputs()
    torch.testing.assert_close(model(x), plain(x))
    for each in (model, plain):
        each.zero_grad()
        total(each(x)).backward()
    check_same_gradients(model, plain)


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda m, x: grad(lambda x: total(m(x)))(x),
    "vmap": lambda m, x: vmap(m)(x),
    "jvp": lambda m, x: jvp(m, (x,), (x.cos(),)),
    "jacrev": lambda m, x: jacrev(m)(x),
    "jacfwd": lambda m, x: jacfwd(m)(x),
    "hessian": lambda m, x: hessian(lambda x: total(m(x)))(x),
    "functional_call": lambda m, x: functional_call(m, {k: 2 * v for k, v in parameters(m).items()}, (x,)),
    "functional_call of one": lambda m, x: functional_call(m, {"2.bias": torch.ones(3).double()}, (x,)),
    "gradients of parameters": lambda m, x: grad(lambda p: total(functional_call(m, p, (x,))))(parameters(m)),
    "gradients of samples": lambda m, x: vmap(grad(lambda p, x: total(functional_call(m, p, (x,)))), (None, 0))(
        parameters(m), x
    ),
    "an ensemble": lambda m, x: vmap(lambda p: functional_call(m, p, (x,)))(
        {k: torch.stack([v, v.sin()]) for k, v in parameters(m).items()}
    ),
}


@ranks(1, 2)
def test_inside_summon_full_params(ctx):
    for policy, precision in (
        (None, None),
        ({nn.Linear}, None),
        ({nn.Linear}, flatshard.MixedPrecision(torch.float32)),
    ):
        model, plain = make(ctx, policy, mixed_precision=precision)
        for name, transform in TRANSFORMS.items():
            ctx.note(f"{name}, {policy}, {precision}")
            with torch.no_grad(), flatshard.summon_full_params(model, writeback=False):
                got = transform(model, inputs())
            torch.testing.assert_close(got, transform(plain, inputs()))
        if not precision:
            is_as_before(model, plain)


@ranks(2)
def test_outside_of_it(ctx):
    """The error names the unit and the cure, and nothing changes."""
    cure = r"`with (torch\.no_grad\(\), )?flatshard\.summon_full_params\(module\)"
    for policy in (None, {nn.Linear}):
        model, plain = make(ctx, policy)
        for name, transform in TRANSFORMS.items():
            ctx.note(f"{name}, {policy}")
            message = (
                rf"unit '(<root>|0)' cannot gather its parameters inside a transform.*{cure}|'stack' needs .*{cure}"
            )
            if name.startswith("functional_call"):
                message = r"functional_call would replace parameter '\d"
            elif name == "gradients of parameters" or "samples" in name:
                message += r"|functional_call would replace parameter '\d"
            with pytest.raises(RuntimeError, match=message):
                transform(model, inputs())
        is_as_before(model, plain)


@ranks(2)
def test_a_graph_that_outlives_the_transform(ctx):
    """The graph's backward would find freed parameters and no hook to gather them."""
    model, plain = make(ctx, {nn.Linear})
    error = r"unit '0' ran inside a transform .* recording .*`with torch\.no_grad\(\)"
    for name in ("vmap", "jvp"):  # the cure is in `test_forward_mode`, which trains
        told = pytest.raises(RuntimeError, match=rf"{error}.*forward_ad\.dual_level\(\)")
        with told, flatshard.summon_full_params(model):
            TRANSFORMS[name](model, inputs())
    is_as_before(model, plain)


@ranks(1, 3)
def test_forward_mode(ctx):
    model, plain = make(ctx, {nn.Linear})
    x = inputs()

    def tangent(m: nn.Module) -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(m(forward_ad.make_dual(x, x.cos()))).tangent

    for guard in (torch.enable_grad, torch.no_grad):
        with guard():
            torch.testing.assert_close(tangent(model), tangent(plain))
    for each in (model, plain):  # backward of a tangent
        each.zero_grad()
        total(tangent(each)).backward()
    check_same_gradients(model, plain)
    is_as_before(model, plain)


@ranks(1, 3)
def test_second_derivatives(ctx):
    model, plain = make(ctx, {nn.Linear})
    x, of = inputs(), torch.autograd.functional
    for vectorize in (False, True):
        torch.testing.assert_close(of.jacobian(model, x, vectorize=vectorize), of.jacobian(plain, x))
    got = of.hessian(lambda x: total(model(x)), x)  # backward runs through one graph 12 times
    torch.testing.assert_close(got, of.hessian(lambda x: total(plain(x)), x))
    for each in (model, plain):  # gradients of a penalty, twice
        (grad,) = torch.autograd.grad(total(each(x := inputs().requires_grad_())), x, create_graph=True)
        penalty = grad.square().sum()
        penalty.backward(retain_graph=True)
        penalty.backward()
    check_same_gradients(model, plain)
    is_as_before(model, plain)
