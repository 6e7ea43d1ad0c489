"""Several sharded models in one process: towers and shared trunks. The fuzzer uses models one after the other.

The models' collectives interleave in one order. The reference is the same code on plain models with the full batch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from clean import check_clean
from models import Block, Net
from on_ranks import ranks
from pairs import some
from parity import adamw, check_same_params, parts, step_all
from torch import Tensor, nn

import flatshard
from flatshard import ShardingStrategy, fully_shard

STRATEGIES = tuple(strategy for strategy in ShardingStrategy if not strategy.is_hybrid)
WIDTH = 6

Models = dict[str, nn.Module]
Optimizers = dict[str, torch.optim.Optimizer]


def net() -> nn.Module:
    return Net(2, WIDTH, WIDTH, WIDTH)


def three() -> Models:
    return {"a": net(), "b": net(), "c": net()}


def shard_each(models: Models, group: Any, strategy: ShardingStrategy) -> None:
    for model in models.values():
        fully_shard(model, policy={Block}, strategy=strategy, process_group=group)


def inside_others(models: Models, optimizers: Optimizers, x: Tensor) -> None:
    """Run a model inside the forward, and inside the backward, of a model that does not contain it."""
    a, b, c = models.values()

    def in_forward(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + b(args[0]) * 0.5

    def in_backward(grad: Tensor) -> None:
        with torch.no_grad():
            seen.append(c(grad).sum())

    seen: list[Tensor] = []
    with a.blocks[0].linear.register_forward_hook(in_forward):
        out = a(x)
        out.register_hook(in_backward)
        out.square().mean().backward()
    assert len(seen) == 1
    c(x).square().mean().backward()
    step_all(optimizers.values())


def two_heads() -> Models:
    trunk = nn.Sequential(Block(WIDTH), Block(WIDTH))
    return {name: nn.Sequential(trunk, nn.Linear(WIDTH, 1)) for name in ("policy", "value")}


def shard_trunk_first(models: Models, group: Any, strategy: ShardingStrategy) -> None:
    fully_shard(models["policy"][0], policy={Block}, strategy=strategy, process_group=group)
    shard_each(models, group, strategy)


def share_a_trunk(models: Models, optimizers: Optimizers, x: Tensor) -> None:
    """Train two models with shared units: one backward through both, one through each, and one after the other's step."""
    policy, value = models.values()
    (policy(x).square().mean() + value(x).mean()).backward()
    value(x + 1).square().mean().backward()
    optimizers["value"].step()
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    policy(x).square().mean().backward()
    step_all([optimizers["policy"]])


SCRIPTS = [(three, shard_each, inside_others), (two_heads, shard_trunk_first, share_a_trunk)]


@pytest.mark.parametrize(("make", "shard", "train"), SCRIPTS)
@ranks(4)
def test_script(ctx, make: Callable[..., Models], shard: Callable[..., None], train: Callable[..., None]) -> None:
    torch.set_default_dtype(torch.float64)
    for strategy in some(STRATEGIES, 2, turn=make is three):
        of: list[Models] = []
        for is_sharded in (False, True):
            torch.manual_seed(0)
            of.append(models := make())
            if is_sharded:
                shard(models, ctx.group, strategy)
            optimizers = {name: adamw(model.parameters()) for name, model in models.items()}
            for step in range(2):
                torch.manual_seed(step)
                train(models, optimizers, parts(ctx, torch.randn(2 * ctx.world_size, WIDTH))[is_sharded])
        for name, model in models.items():
            check_same_params(model, of[0][name])
            flatshard.recover(model)
        for model in models.values():
            check_clean(model)
