"""Optimizers of unknown classes: those that look at more than single elements are found out before their first step."""

from __future__ import annotations

import copy
import math
import random
import re
import warnings
from typing import Any

import pytest
import torch
from models import Block, Net
from on_ranks import ranks
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import flatshard
from flatshard import fully_shard
from flatshard.layouts import Rows, Whole


class Own(Optimizer):
    """Gradient descent by whatever ``direction`` makes of a gradient."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0, flag: bool = False) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "flag": flag})

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad.sign() + group["weight_decay"] * p

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.direction(p, group), alpha=-group["lr"])


class Normed(Own):
    """By the norm of a gradient, which is that of the whole one here."""

    def direction(self, p, group):
        return p.grad / (1e-6 + p.grad.norm())


class NormedByParameter(Own):
    def direction(self, p, group):
        return p.grad * p.detach().norm()


class NormedIfDecayed(Own):
    def direction(self, p, group):
        return p.grad * (p.detach().norm() if group["weight_decay"] else 1)


class Centred(Own):
    def direction(self, p, group):
        return p.grad - p.grad.mean(-1, keepdim=True) if p.ndim > 1 else p.grad


class ByRow(Own):
    def direction(self, p, group):
        return p.grad / p.grad.flatten(1).square().sum(1).reshape(-1, *[1] * (p.ndim - 1)) if p.ndim > 1 else p.grad


class Flagged(Own):
    def direction(self, p, group):
        return p.grad * (p.grad.sum() if group["flag"] else 1)


class Together(Own):
    """As Prodigy: one number for all parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        rate = 1 / torch.stack([p.grad.square().sum() for p in params]).sum().sqrt()
        for p in params:
            p.sub_(rate * p.grad)


class Noisy(Own):
    def direction(self, p, group):
        return p.grad + torch.randn_like(p) * random.random()


class Other(Own):
    """Takes other arguments than its options."""

    def __init__(self, params: Any, model: torch.nn.Module) -> None:
        super().__init__(params)


class OwnAdamW(torch.optim.AdamW):
    pass


class Permitted(NormedByParameter):
    works_on_shards = True


ELEMENTS = r"{} looks at more than single elements: .*'(front|blocks).*'.*WholeParameterOptimizer.*works_on_shards"
TOGETHER = r"{} steps a parameter differently if it has other parameters: .*one by one"


def cases() -> list[tuple[type[Optimizer], dict[str, Any], Any, str | None]]:
    """The class, its options, the layout, and the error."""
    return [
        (Own, {"weight_decay": 0.1}, None, None),
        (OwnAdamW, {"fused": True}, None, None),
        (Permitted, {}, None, None),
        (Noisy, {}, None, None),
        (Normed, {}, None, None),
        (NormedByParameter, {}, None, ELEMENTS),
        (NormedByParameter, {"lr": 0.0}, None, ELEMENTS),  # at the beginning of a warm-up
        (NormedByParameter, {}, Rows(), ELEMENTS),
        (NormedByParameter, {}, Whole(), None),
        (NormedIfDecayed, {}, None, None),
        (NormedIfDecayed, {"weight_decay": 0.1}, None, ELEMENTS),
        (Centred, {}, None, ELEMENTS),
        (Centred, {}, Rows(), None),
        (ByRow, {}, None, ELEMENTS),
        (ByRow, {}, Rows(), None),
        (Flagged, {}, None, None),
        (Together, {}, None, TOGETHER),
        (Together, {}, Whole(), TOGETHER),
        (torch.optim.LBFGS, {}, None, TOGETHER),
    ]


@ranks(2)
def test_unknown_optimizers(ctx) -> None:
    seen: list[Optimizer] = []
    handles = [register_optimizer_step_pre_hook(lambda o, *_: seen.append(o))]
    handles.append(register_optimizer_step_post_hook(lambda o, *_: seen.append(o)))
    x = torch.ones(2, 4)
    for kind, options, layout, match in cases():
        ctx.note(f"{kind.__name__} {options} {layout}")
        model = fully_shard(Net(), policy={Block}, process_group=ctx.group, layout=layout)
        optimizer = kind(model.parameters(), **options)
        loss = model(x).sum()
        loss.backward()
        before = [p.detach().clone() for p in model.parameters()]
        states = torch.get_rng_state(), random.getstate()
        seen.clear()
        closure = loss.detach if kind is torch.optim.LBFGS else None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if match is None:
                optimizer.step(closure)
                assert seen == [optimizer] * 2
            else:
                for _ in range(2):
                    with pytest.raises(RuntimeError, match=match.format(kind.__name__)):
                        optimizer.step(closure)
                assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
                assert not optimizer.state
        if kind is not Noisy:
            assert torch.equal(torch.get_rng_state(), states[0])
            assert random.getstate() == states[1]
    for handle in handles:
        handle.remove()


@ranks(2)
def test_several_groups_and_what_cannot_be_tried(ctx) -> None:
    model = fully_shard(Net(), policy={Block}, process_group=ctx.group)
    model(torch.ones(2, 4)).sum().backward()
    groups = [{"params": model.front.parameters()}, {"params": model.blocks.parameters(), "flag": True}]
    with pytest.raises(RuntimeError, match=r"Flagged looks at more than single elements: .*'blocks.0.linear"):
        Flagged(groups).step()  # one of several groups
    optimizer = Other(model.parameters(), model)
    with pytest.warns(UserWarning, match=r"cannot tell whether Other may step parts .*'front.weight', .*'model'"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        flatshard.optim.WholeParameterOptimizer(model.parameters(), NormedByParameter).step()
        NormedByParameter([torch.nn.Parameter(torch.ones(3))]).step()


@ranks(2)
def test_following_the_cures(ctx) -> None:
    """The message names two ways out; with each, a small model trains as in one process."""
    plain = Net()
    start = copy.deepcopy(plain)

    def trained(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        for step in (1.0, 2.0):
            optimizer.zero_grad()
            model(torch.full((2, 4), step)).sum().backward()
            optimizer.step()
        return flatshard.checkpoint.full_state_dict(model) if model is not plain else model.state_dict()

    def sharded(**options: Any) -> torch.nn.Module:
        return fully_shard(copy.deepcopy(start), policy={Block}, process_group=ctx.group, **options)

    expected = trained(plain, NormedByParameter(plain.parameters()))
    cut = sharded()
    with pytest.raises(RuntimeError) as raised:
        trained(cut, NormedByParameter(cut.parameters()))
    (layout,) = re.findall(r"layout=flatshard\.(layouts\.\w+\(.*?\))", str(raised.value))
    (cure,) = re.findall(r"flatshard\.optim\.\w+\(params, \w+, \.\.\.\)", str(raised.value))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = sharded(layout=eval(layout, {"layouts": flatshard.layouts, "math": math}))
        found = [trained(whole, NormedByParameter(whole.parameters()))]
        names = {"flatshard": flatshard, "params": cut.parameters(), "NormedByParameter": NormedByParameter}
        found.append(trained(cut, eval(cure.replace(", ...", ""), names)))
    for state in found:
        torch.testing.assert_close(state, expected)
