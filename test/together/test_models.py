"""Several sharded models in one process: towers, trunks in common. The fuzzer has what they do one after the other.

Their collectives interleave in one order. The oracle is the same code on plain models with the whole batch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clean import check_clean
from models import Block, Net
from on_ranks import ranks
from parity import adamw, check_same_params, parts, step_all
from torch import Tensor, nn

import flatshard
from flatshard import ShardingStrategy, configure, fully_shard

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
    """A model that runs inside the forward, and inside the backward, of another one that does not hold it."""
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
    """Two models with units in common: one backward through both, one each, and one after the other's step."""
    policy, value = models.values()
    (policy(x).square().mean() + value(x).mean()).backward()
    value(x + 1).square().mean().backward()
    optimizers["value"].step()
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    policy(x).square().mean().backward()
    step_all([optimizers["policy"]])


def shard_differently(models: Models, group: Any, strategy: ShardingStrategy) -> None:
    """Another strategy and prefetching for each; one on a process group of its own, with streams and orders of its own."""
    others = [s for s in STRATEGIES if s is not strategy]
    fully_shard(models["a"], policy={Block}, strategy=strategy, process_group=group, forward_prefetch=False)
    fully_shard(models["b"], policy={Block}, strategy=others[0], process_group=group, backward_prefetch=None)
    own = dist.new_group()  # all of the pool's ranks must call this
    fully_shard(models["c"], policy={Block}, strategy=others[1], process_group=own)
    configure(models["a"], forward_prefetch=[models["b"], models["a"].blocks[1]])


def chained(models: Models, optimizers: Optimizers, x: Tensor) -> None:
    a, b, c = models.values()
    a(c(b(a(x)))).square().mean().backward()
    step_all(optimizers.values())


@pytest.mark.parametrize(
    ("make", "shard", "train"),
    [
        (three, shard_each, inside_others),
        (two_heads, shard_trunk_first, share_a_trunk),
        (three, shard_differently, chained),
    ],
)
@ranks(4)
def test_script(ctx, make: Callable[..., Models], shard: Callable[..., None], train: Callable[..., None]) -> None:
    torch.set_default_dtype(torch.float64)
    for strategy in STRATEGIES:
        of: list[Models] = []
        for is_sharded in (False, True):
            torch.manual_seed(0)
            of.append(models := make())
            if is_sharded:
                shard(models, ctx.group, strategy)
            optimizers = {name: adamw(model.parameters()) for name, model in models.items()}
            for step in range(3):
                torch.manual_seed(step)
                train(models, optimizers, parts(ctx, torch.randn(2 * ctx.world_size, WIDTH))[is_sharded])
        for name, model in models.items():
            check_same_params(model, of[0][name])
            flatshard.recover(model)
        for model in models.values():
            check_clean(model)
