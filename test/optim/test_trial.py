"""Optimizers that would not train as in one process raise before the first step: those that are not elementwise, and groups
that depend on dimensions that shards don't have."""

import contextlib
import functools
import itertools
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Block, Net
from on_ranks import ranks
from parity import check_same_params, parts, twins
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard.layouts import Blocks, Rows, Whole
from flatshard.optim import WholeParameterOptimizer


class Own(Optimizer):
    """Gradient descent along ``direction`` of a gradient."""

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


KINDS: dict[str, Any] = {
    name: type(name, (Own,), {"direction": direction})
    for name, direction in {
        "Normed": lambda self, p, group: p.grad / (1e-6 + p.grad.norm()),
        "NormedByParameter": lambda self, p, group: p.grad * p.detach().norm(),
        "NormedIfDecayed": lambda self, p, group: p.grad * (p.detach().norm() if group["weight_decay"] else 1),
        "Centred": lambda self, p, group: p.grad - p.grad.mean(-1, keepdim=True) if p.ndim > 1 else p.grad,
        "ByRow": lambda self, p, group: p.grad / by_row(p.grad.square()) if p.ndim > 1 else p.grad,
        "Flagged": lambda self, p, group: p.grad * (p.grad.sum() if group["flag"] else 1),
        "Noisy": lambda self, p, group: p.grad + torch.randn_like(p) * random.random(),
    }.items()
}
NormedByParameter, Flagged, Noisy = KINDS["NormedByParameter"], KINDS["Flagged"], KINDS["Noisy"]


def by_row(t: Tensor) -> Tensor:
    return t.flatten(1).sum(1).reshape(-1, *[1] * (t.ndim - 1))


class Together(Own):
    """An optimizer with a single number for all parameters, like Prodigy."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        rate = 1 / torch.stack([p.grad.square().sum() for p in params]).sum().sqrt()
        for p in params:
            p.sub_(rate * p.grad)


class Other(Own):
    """An optimizer whose arguments differ from its options."""

    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params)


class OwnAdamW(torch.optim.AdamW):
    pass


class Permitted(NormedByParameter):
    works_on_shards = True


ELEMENTS = r"{} looks at more than single elements: .*'(front|blocks).*'.*WholeParameterOptimizer.*works_on_shards"
TOGETHER = r"{} steps a parameter differently if it has other parameters: .*one by one"


CASES: list[tuple[type[Optimizer], dict[str, Any], Any, str | None]] = [
    (Own, {"weight_decay": 0.1}, None, None),
    (OwnAdamW, {"fused": True}, None, None),
    (Permitted, {}, None, None),
    (Noisy, {}, None, None),
    (KINDS["Normed"], {}, None, ELEMENTS),
    (NormedByParameter, {}, None, ELEMENTS),
    (NormedByParameter, {"lr": 0.0}, None, ELEMENTS),  # the beginning of a warm-up
    (NormedByParameter, {}, Whole(), None),
    (KINDS["NormedIfDecayed"], {"weight_decay": 0.1}, None, ELEMENTS),
    (KINDS["Centred"], {}, None, ELEMENTS),
    (KINDS["Centred"], {}, Rows(), None),
    (KINDS["ByRow"], {}, None, ELEMENTS),
    (KINDS["ByRow"], {}, Rows(), None),
    (Flagged, {}, None, None),
    (Together, {}, None, TOGETHER),
    (Together, {}, Whole(), TOGETHER),
    (torch.optim.LBFGS, {}, None, TOGETHER),
]
"""Optimizer class, options, layout, and error."""


@ranks(2)
def test_unknown_optimizers(ctx) -> None:
    seen: list[Optimizer] = []
    hooks = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    handles = [register(lambda o, *_: seen.append(o)) for register in hooks]
    for kind, options, layout, match in CASES:
        ctx.note(f"{kind.__name__} {options} {layout}")
        model = fully_shard(Net(), policy={Block}, process_group=ctx.group, layout=layout)
        optimizer = kind(model.parameters(), **options)
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        before = [p.detach().clone() for p in model.parameters()]
        states = torch.get_rng_state(), random.getstate()
        seen.clear()
        step = functools.partial(optimizer.step, loss.detach if kind is torch.optim.LBFGS else None)
        with warnings.catch_warnings(action="error"):
            if match is None:
                step()
                assert seen == [optimizer] * 2
            for _ in range(2 if match else 0):
                with pytest.raises(RuntimeError, match=match.format(kind.__name__)):
                    step()
                assert all(map(torch.equal, before, model.parameters()))
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
    with pytest.warns(UserWarning, match=r"cannot tell whether Other may step shards .*'model'"):
        optimizer.step()
    with warnings.catch_warnings(action="error"):
        optimizer.step()
        flatshard.optim.WholeParameterOptimizer(model.parameters(), NormedByParameter).step()
        NormedByParameter([nn.Parameter(torch.ones(3))]).step()


class ByLength(Own):
    """An optimizer that quantises momentum whose length suffices for blocks of 256, like torchao's."""

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        dtype = torch.bfloat16 if p.numel() % 256 == 0 and p.numel() > 1000 else p.dtype
        held = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=dtype))
        return held.copy_(held * 0.9 + p.grad.as_subclass(Tensor)).to(p.dtype)


@ranks(2, 3)
def test_state_that_depends_on_the_length(ctx) -> None:
    """It is detected, and the error's cure trains as in one process."""

    def trained(model: nn.Module, make: Callable[[Any], Optimizer], x: Tensor) -> nn.Module:
        optimizer = make(model.parameters())
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    def linear(*sizes: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise((64, *sizes))))

    both = (192, 35)  # the second has another form, which no cut keeps
    text = (
        r"'momentum' of '0.weight' \(12288 elements\) would be a Tensor of torch.bfloat16, .*layouts.Blocks\({}\); or"
    )
    by_whole = functools.partial(WholeParameterOptimizer, optimizer_class=ByLength)
    for sizes, layout, make, match in (
        ((192,), None, ByLength, text.format(256)),
        ((192,), Blocks(256, max_padding=1), ByLength, None),
        (both, None, ByLength, text.format(8192)),
        (both, Blocks(8192, math.inf), ByLength, None),
        (both, None, by_whole, None),
    ):
        ctx.note(f"{sizes} {layout} {make}")
        plain, model = twins(ctx, functools.partial(linear, *sizes), {nn.Linear}, layout=layout)
        x, own = parts(ctx, torch.rand(6, 64, dtype=torch.float64))
        assert flatshard.optim.works_on_shards(make(model.parameters())) is (match is None)
        with contextlib.nullcontext() if match is None else pytest.raises(RuntimeError, match=match):
            check_same_params(trained(model, make, own), trained(plain, ByLength, x), rtol=1e-6)
    _, model = twins(ctx, functools.partial(linear, *both))
    optimizer = ByLength(flatshard.flat_parameters(model))
    with pytest.raises(RuntimeError, match=r"of several parameters: build it on model.parameters\(\)"):
        optimizer.step()


# -- groups made by the dimensions of parameters: after sharding, parts of matrices are 1-D -----------------------------


def groups(model: nn.Module, decays: Callable[[torch.Tensor], bool]) -> list[dict[str, Any]]:
    no_decay = [p for p in model.parameters() if not decays(p)]
    decay = [p for p in model.parameters() if decays(p)]
    return [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": 0.1}]


RULES: dict[str, Callable[[nn.Module], Any]] = {
    "ndim": lambda model: groups(model, lambda p: p.ndim > 1),  # as in timm's param_groups_weight_decay
    "shape": lambda model: groups(model, lambda p: len(p.shape) > 1),
    "dim": lambda model: groups(model, lambda p: p.dim() > 1)[::-1],  # as in nanoGPT, which has the reverse order
    "no empty groups": lambda model: [each for each in RULES["shape"](model) if each["params"]],
    "full_shape": lambda model: groups(model, lambda p: len(flatshard.full_shape(p)) > 1),
    "one group": lambda model: model.parameters(),
}


@ranks(2)
def test_rules_by_dimension(ctx) -> None:
    """A rule that asks the shape of a shard takes matrices for vectors, and a warning says so."""
    for rule, layout, strategy, made_before, told in (
        ("ndim", None, "FULL_SHARD", False, None),
        ("shape", None, "FULL_SHARD", False, UserWarning),
        ("dim", None, "SHARD_GRAD_OP", False, None),
        ("no empty groups", None, "FULL_SHARD", False, UserWarning),
        ("full_shape", None, "FULL_SHARD", False, None),
        ("one group", None, "FULL_SHARD", False, None),
        ("shape", Rows(max_padding=1.0), "FULL_SHARD", False, None),
        ("shape", None, "NO_SHARD", False, None),
        ("shape", None, "FULL_SHARD", True, None),
    ):
        ctx.note(f"{rule} {layout} {strategy} {made_before}")
        model = Net()
        made = RULES[rule](model) if made_before else None  # before sharding, every rule sees full shapes
        where = {"process_group": ctx.group, "layout": layout, "strategy": ShardingStrategy[strategy]}
        fully_shard(model, policy={Block}, **where)
        optimizer = torch.optim.AdamW(made or RULES[rule](model))
        model(torch.ones(2, 4)).sum().backward()
        if rule in ("ndim", "dim"):
            dims = [{len(flatshard.full_shape(p)) for p in group["params"]} for group in optimizer.param_groups]
            assert dims == ([{1}, {2}] if rule == "ndim" else [{2}, {1}])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                optimizer.step()
        found = [str(w.message) for w in caught if "full_shape" in str(w.message)]
        assert len(found) == (told is UserWarning), found
        if found:
            assert "in one group, with weight_decay=0.0: matrices such as 'front.weight', " in found[0]
            assert caught[0].filename == __file__
