"""Who needs a unit's parameters, in the orders that exceptions, interrupts and nesting bring about."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from models import Net
from on_ranks import ranks
from parity import check_same_gradients, twins
from torch import Tensor, nn

import flatshard
from flatshard import MixedPrecision, fully_shard, summon_full_params
from flatshard._composable.find import units_below
from flatshard._handle.registrations import SHARDED

X = torch.linspace(-1, 1, 8, dtype=torch.double).view(2, 4)


def check(model: nn.Module, plain: nn.Module) -> None:
    """That the model is as between two steps, and trains like the plain one."""
    for m in (model, plain):
        m.zero_grad()
        m(X).square().sum().backward()
    check_same_gradients(model, plain)
    for unit in units_below(model):
        assert not unit.claims
        assert unit.handle.registrations.shows is SHARDED


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


@ranks(2)
def test_a_forward_with_gradients_inside_one_in_full_precision(ctx):
    policy = MixedPrecision(param_dtype=torch.bfloat16, full_precision_in_eval=True, cast_forward_inputs=True)
    model = fully_shard(Tied(), policy={nn.Linear}, process_group=ctx.group, mixed_precision=policy).eval()
    with torch.no_grad():
        assert torch.equal(model(X.float()), X.float() + 1)
        assert torch.equal(model(X.float()), X.float() + 1)
    for unit in units_below(model):
        assert not unit.claims
        assert unit.handle.registrations.shows is SHARDED


@ranks(2)
def test_two_threads(ctx):
    plain, model = twins(ctx, Net, {nn.Linear})
    _, other = twins(ctx, Net, {nn.Linear})
    started, go_on, found = threading.Event(), threading.Event(), []

    def stop(module: nn.Module, args: Any) -> None:
        started.set()
        assert go_on.wait(30)

    hook = model.head.register_forward_pre_hook(stop)
    thread = threading.Thread(target=lambda: found.append(model(X)))
    thread.start()
    try:
        assert started.wait(30)
        for each in (model, other):
            with pytest.raises(RuntimeError, match=r"unit 'head' is in a forward on another thread"):
                each(X)
    finally:
        go_on.set()
        thread.join(30)
    hook.remove()
    torch.testing.assert_close(found[0], plain(X))
    check(model, plain)
    check(other, plain)


@ranks(2)
def test_summon_inside_a_step(ctx):
    """It is refused in forward and in backward, and nothing has happened. The cure reads another layer in a forward."""
    plain, model = twins(ctx, Net, {nn.Linear})
    seen: list[Tensor] = []

    def refused(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="of unit 'head' inside a forward, a backward"):
            summon_full_params(model.head).__enter__()

    def cured(*_: Any) -> None:
        flatshard.unshard(model.head)
        seen.append(model.head.weight.detach().clone())
        flatshard.reshard(model.head)

    hooks = [model.blocks[0].register_forward_pre_hook(hook) for hook in (refused, cured)]
    hooks.append(model.front.register_full_backward_hook(refused))
    model(X).sum().backward()
    assert torch.equal(seen[0], plain.head.weight)
    for hook in hooks:
        hook.remove()
    check(model, plain)
