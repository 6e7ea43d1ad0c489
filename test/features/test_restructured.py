"""Modules that are parametrized, pruned or normalised after ``fully_shard``: one error on every rank. Compiled optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import ranks
from pairs import some
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

import flatshard
from flatshard import fully_shard

CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "parametrize": lambda m: register_parametrization(m, "weight", nn.Identity()),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "hook for weight_norm": weight_norm,
    "hook for spectral_norm": spectral_norm,
    "prune": lambda m: prune.l1_unstructured(m, "weight", amount=0.3),
    "prune rows": lambda m: prune.ln_structured(m, "weight", amount=1, n=2, dim=0),
    "prune by a mask": lambda m: prune.custom_from_mask(m, "weight", torch.ones(5, 6)),
    "prune all": lambda m: prune.global_unstructured([(m, "weight")], pruning_method=prune.L1Unstructured, amount=0.2),
}


def by_hand(module: nn.Module, renamed_first: bool) -> None:
    """As libraries that torch does not know."""
    weight = module.weight
    if renamed_first:
        module.original = weight
        del module.weight
    else:
        del module.weight
        module.original = weight
    module.register_forward_pre_hook(lambda m, _: setattr(m, "weight", 2 * m.original))


CHANGES["renamed"] = functools.partial(by_hand, renamed_first=True)
CHANGES["taken away"] = functools.partial(by_hand, renamed_first=False)
CHANGES["other memory"] = torch.no_grad()(lambda m: m.weight.set_(torch.ones(5, 6)))


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))


def train(model: nn.Module) -> torch.Tensor:
    loss = model(torch.ones(2, 6)).square().sum()
    loss.backward()
    return loss.detach()


@ranks(1, 3)
def test_what_changes_the_structure_comes_before(ctx):
    model = fully_shard(make(), policy={nn.Linear}, process_group=ctx.group)
    names = [name for name, _ in model.named_parameters()]
    before = type(model[0]), list(model[0]._forward_pre_hooks.values())
    for name, change in CHANGES.items():
        ctx.note(name)
        with pytest.raises(RuntimeError, match=r"'0.weight' is sharded, and .* before fully_shard\. .*"):
            change(model[0])
        assert [name for name, _ in model.named_parameters()] == names
        assert (type(model[0]), list(model[0]._forward_pre_hooks.values())) == before
    expected = train(make())
    assert torch.allclose(train(model), expected)
    for name, change in CHANGES.items():  # as the message says
        ctx.note(f"again: {name}")
        again = make()
        again.load_state_dict(flatshard.checkpoint.full_state_dict(model))
        plain = make()
        for each in (again, plain):
            torch.manual_seed(1)
            change(each[0])
        fully_shard(again, policy={nn.Linear}, process_group=ctx.group)
        assert torch.allclose(train(again), train(plain)), name


@pytest.mark.slow
@pytest.mark.parametrize("option", some(("foreach", "fused", "neither"), 2))
@ranks(2)
def test_a_compiled_step_of_an_optimizer(ctx, option: str):
    for options in [{"foreach": False} if option == "neither" else {option: True}]:
        sharding = {"policy": {nn.Linear}, "process_group": ctx.group, "strategy": "shard_optim"}
        models = [fully_shard(make(), **sharding) for _ in range(2)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, **options) for model in models]
        for model in models:
            train(model)
        torch._dynamo.reset()
        step = torch.compile(optimizers[0].step, backend="aot_eager")
        try:
            step()
        except TypeError as e:  # torch 2.13 compiles the fused step only
            assert "Multiple dispatch failed" in str(e)  # noqa: PT017
            assert "fused" not in options
            continue
        optimizers[1].step()
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(*map(train, models), rtol=1e-4, atol=1e-5)  # which have gathered what changed
