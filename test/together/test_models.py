"""Several sharded models in one process: towers, trunks in common. The fuzzer has what they do one after the other.

Their collectives interleave in one order. The oracle is the same code on plain models with the whole batch.
"""

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from clean import check_clean
from models import Block
from on_ranks import ranks
from pairs import some
from parity import adamw, check_same_params, step_all
from torch import Tensor, nn

import flatshard
from flatshard import ShardingStrategy, configure, fully_shard
from flatshard._trace import record_events
from flatshard.tensors import ShardedParameter

STRATEGIES = tuple(strategy for strategy in ShardingStrategy if not strategy.is_hybrid)
WIDTH, PER_RANK = 6, 2

Models = dict[str, nn.Module]


class Net(models.Net):
    def __init__(self, out: int = WIDTH) -> None:
        super().__init__(blocks=2, width=WIDTH, inputs=WIDTH, outputs=out)


class World:
    """The plain models with the whole batch, or the sharded ones with this rank's part of it."""

    def __init__(self, ctx: Any, models: Models, is_sharded: bool) -> None:
        self.models, self.size = models, ctx.world_size
        self.part = slice(ctx.rank * PER_RANK, (ctx.rank + 1) * PER_RANK) if is_sharded else slice(None)
        self.optimizers = {name: adamw(model.parameters()) for name, model in models.items()}

    def __getattr__(self, name: str) -> Any:
        return self.models[name]

    def vectors(self, step: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + seed)
        return torch.randn(PER_RANK * self.size, WIDTH, generator=generator)[self.part]

    def step(self, *names: str) -> None:
        step_all(self.optimizers[name] for name in names)


def shard_each(models: Models, group: Any, strategy: ShardingStrategy) -> None:
    for model in models.values():
        fully_shard(model, policy={Block}, strategy=strategy, process_group=group)


def check(ctx: Any, make: Any, train: Callable[[World, int], None], shard: Any, strategy: ShardingStrategy) -> None:
    """``train(world, step)`` does to sharded models what it does to plain ones."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    plain = World(ctx, make(), False)
    torch.manual_seed(0)
    models = make()
    shard(models, ctx.group, strategy)
    mine = World(ctx, models, True)
    for step in range(3):
        train(mine, step)
        train(plain, step)
    for name, model in models.items():
        assert all(isinstance(p, ShardedParameter) for p in model.parameters())
        check_same_params(model, plain.models[name])
        flatshard.recover(model)
    for model in models.values():
        check_clean(model)


def three() -> Models:
    return {"a": Net(), "b": Net(), "c": Net()}


def inside_others(w: World, step: int) -> None:
    """A model that runs inside the forward, and inside the backward, of another one that does not hold it."""
    x = w.vectors(step)

    def in_forward(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + w.b(args[0]) * 0.5

    def in_backward(grad: Tensor) -> None:
        with torch.no_grad():
            seen.append(w.c(grad).sum())

    seen: list[Tensor] = []
    with w.a.blocks[0].linear.register_forward_hook(in_forward):
        out = w.a(x)
        out.register_hook(in_backward)
        out.square().mean().backward()
    assert len(seen) == 1
    w.c(x).square().mean().backward()
    w.step("a", "b", "c")


class Headed(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


@ranks(2)
def test_prefetching(ctx):
    """Each model keeps the order of its own passes, whatever runs in between: both are gathered one unit ahead."""
    a, b = (fully_shard(Net(), policy={Block}, process_group=ctx.group) for _ in range(2))
    x = torch.ones(2, WIDTH)
    for _ in range(2):
        with record_events() as events:
            out = a(x)
            events.append("-- b")
            other = b(out.detach())
            events.append("-- backward of a")
            out.sum().backward()
            events.append("-- backward of b")
            other.sum().backward()
    forward = ["all-gather <root>", "all-gather blocks.0", "all-gather blocks.1"]
    backward = ["all-gather blocks.1", "all-gather blocks.0"]
    expected = [*forward, "-- b", *forward, "-- backward of a", *backward, "-- backward of b", *backward]
    assert [e for e in events if e.startswith(("all-gather", "--"))] == expected


def two_heads() -> Models:
    trunk = nn.Sequential(Block(WIDTH), Block(WIDTH))
    return {"policy": Headed(trunk), "value": Headed(trunk)}


def shard_trunk_first(models: Models, group: Any, strategy: ShardingStrategy) -> None:
    fully_shard(models["policy"].trunk, policy={Block}, strategy=strategy, process_group=group)
    shard_each(models, group, strategy)


def share_a_trunk(w: World, step: int) -> None:
    """Two models with units in common: one backward through both, one each, and one after the other's step."""
    x = w.vectors(step)
    (w.policy(x).square().mean() + w.value(x).mean()).backward()
    w.value(x + 1).square().mean().backward()
    w.optimizers["value"].step()
    for optimizer in w.optimizers.values():
        optimizer.zero_grad()
    w.policy(x).square().mean().backward()
    w.step("policy")


def shard_differently(models: Models, group: Any, strategy: ShardingStrategy) -> None:
    """Another strategy and prefetching for each; one on a process group of its own, with streams and orders of its own."""
    others = [s for s in STRATEGIES if s is not strategy]
    fully_shard(models["a"], policy={Block}, strategy=strategy, process_group=group, forward_prefetch=False)
    fully_shard(models["b"], policy={Block}, strategy=others[0], process_group=group, backward_prefetch=None)
    own = dist.new_group()  # all of the pool's ranks must call this
    fully_shard(models["c"], policy={Block}, strategy=others[1], process_group=own)
    configure(models["a"], forward_prefetch=[models["b"], models["a"].blocks[1]])


def chained(w: World, step: int) -> None:
    x = w.vectors(step)
    w.a(w.c(w.b(w.a(x)))).square().mean().backward()
    w.step("a", "b", "c")


SCRIPTS: dict[Callable[[World, int], None], tuple[Callable[[], Models], Any]] = {
    inside_others: (three, shard_each),
    share_a_trunk: (two_heads, shard_trunk_first),
    chained: (three, shard_differently),
}


@pytest.mark.parametrize("train", SCRIPTS, ids=lambda train: train.__name__)
def test_script(pool, train):
    make, shard = SCRIPTS[train]
    for strategy in some(STRATEGIES, 2, turn=[*SCRIPTS].index(train)):
        pool.run(check, make, train, shard, strategy, world_size=4)
