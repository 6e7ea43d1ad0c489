"""Several sharded models in one process: GANs, RLHF, towers. The fuzzer has what two models do one after the other.

They share the process group, so their collectives interleave in one order; there is no root to be found first, and no phase
that all of them must be in. The oracle is the same code on plain models with the whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from clean import check_clean
from models import Block
from on_ranks import ranks
from pairs import some
from parity import adamw, check_same_params
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import ShardingStrategy, configure, fully_shard, keep_unsharded, register_forward_method
from flatshard._trace import record_events
from flatshard.tensors import ShardedParameter

STRATEGIES = tuple(strategy for strategy in ShardingStrategy if not strategy.is_hybrid)
WIDTH, TOKENS, PER_RANK = 6, 7, 2

Models = dict[str, nn.Module]


class Net(models.Net):
    def __init__(self, out: int = WIDTH) -> None:
        super().__init__(blocks=2, width=WIDTH, inputs=WIDTH, outputs=out)


class Trunk(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(TOKENS, WIDTH), Block(WIDTH), Block(WIDTH))


class Language(nn.Module):
    """ids (batch, time) -> (batch, time, out); what comes before a position counts."""

    def __init__(self, trunk: nn.Module | None = None, out: int = TOKENS) -> None:
        super().__init__()
        self.trunk = trunk or Trunk()
        self.head = nn.Linear(WIDTH, out)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.trunk(ids).cumsum(1))

    def generate(self, ids: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids

    def log_probs(self, ids: Tensor) -> Tensor:
        """(batch,): of all tokens but the first."""
        return self(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((1, 2))


class World:
    """The plain models with the whole batch, or the sharded ones with this rank's part of it."""

    def __init__(self, ctx: Any, models: Models, is_sharded: bool) -> None:
        self.models = models
        self.size = ctx.world_size
        self.part = slice(ctx.rank * PER_RANK, (ctx.rank + 1) * PER_RANK) if is_sharded else slice(None)
        self.optimizers = {name: adamw(model.parameters()) for name, model in models.items()}

    def __getattr__(self, name: str) -> Any:
        return self.models[name]

    def vectors(self, step: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + seed)
        return torch.randn(PER_RANK * self.size, WIDTH, generator=generator)[self.part]

    def ids(self, step: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + seed)
        return torch.randint(TOKENS, (PER_RANK * self.size, 4), generator=generator)[self.part]

    def step(self, *names: str) -> None:
        for name in names:
            self.optimizers[name].step()
            self.optimizers[name].zero_grad()


def shard_each(models: Models, group: Any, strategy: ShardingStrategy) -> None:
    for model in models.values():
        fully_shard(model, policy={Block}, strategy=strategy, process_group=group)
        if isinstance(model, Language):
            register_forward_method(model, "generate")


def check(
    ctx: Any,
    make: Callable[[], Models],
    train: Callable[[World, int], None],
    shard: Callable[[Models, Any, ShardingStrategy], None],
    strategies: Sequence[ShardingStrategy],
) -> None:
    """``train(world, step)`` does to sharded models what it does to plain ones."""
    torch.set_default_dtype(torch.float64)
    for strategy in strategies:
        ctx.note(f"{train.__name__}, {strategy.name}")
        worlds = []
        for is_sharded in (True, False):
            torch.manual_seed(0)
            models = make()
            if is_sharded:
                shard(models, ctx.group, strategy)
            worlds.append(World(ctx, models, is_sharded))
        for step in range(3):
            for world in worlds:
                train(world, step)
        mine, plain = worlds
        for name, model in mine.models.items():
            assert all(isinstance(p, ShardedParameter) for p in model.parameters())
            check_same_params(model, plain.models[name])
        for model in mine.models.values():
            flatshard.recover(model)
        for model in mine.models.values():
            check_clean(model)


# -- GANs --------------------------------------------------------------------------------------------------------------


def gan_models() -> Models:
    return {"generator": Net(), "critic": Net(1)}


def gan(w: World, step: int) -> None:
    """Two forwards of the critic for one backward; then through the frozen critic into the generator."""
    fake = w.generator(w.vectors(step))
    loss = softplus(-w.critic(w.vectors(step, 1))).mean() + softplus(w.critic(fake.detach())).mean()
    loss.backward()
    w.step("critic")
    w.critic.requires_grad_(False)
    softplus(-w.critic(fake)).mean().backward()  # of the generator's forward from before the critic's step
    w.critic.requires_grad_(True)
    w.step("generator")


def gan_with_penalty(w: World, step: int) -> None:
    """WGAN-GP: backward of a backward through the critic, with the generator's graph open."""
    fake = w.generator(w.vectors(step))
    mixed = (0.5 * (fake + w.vectors(step, 1))).detach().requires_grad_()
    (grad,) = torch.autograd.grad(w.critic(mixed).sum(), mixed, create_graph=True)
    penalty = (grad.norm(dim=1) - 1).square().mean()
    (w.critic(fake.detach()).mean() - w.critic(w.vectors(step, 1)).mean() + penalty).backward()
    w.step("critic")
    w.critic.zero_grad()
    (-w.critic(fake).mean()).backward()
    w.critic.zero_grad()
    w.step("generator")


def cycle(w: World, step: int) -> None:
    """Each one's output feeds the other, twice: A(B(A(x)))."""
    x = w.vectors(step)
    there = w.generator(x)
    back = w.other(there)
    again = checkpoint(w.generator, back, use_reentrant=step % 2 == 1)
    ((back - x).square().mean() + (again - there).square().mean()).backward()
    w.step("generator", "other")


def cycle_models() -> Models:
    return {"generator": Net(), "other": Net()}


# -- Interleaving ------------------------------------------------------------------------------------------------------


def three() -> Models:
    return {"a": Net(), "b": Net(), "c": Net()}


def half_used(w: World, step: int) -> None:
    """Forwards without backwards, backwards that reach only some of the models, and partial ones."""
    x = w.vectors(step)
    w.b(x)
    a, c = w.a(x), w.c(x)
    (a if step % 2 else c).square().mean().backward()
    w.a(w.c(x).detach()).square().mean().backward()
    inputs = x.clone().requires_grad_()
    out = w.b(w.a(inputs))
    torch.autograd.grad(out.sum(), inputs)  # brings no parameter a gradient
    w.c(w.b(x)).square().mean().backward()
    w.step("a", "b", "c")


def inside_others(w: World, step: int) -> None:
    """A model that runs inside the forward, and inside the backward, of another one that does not hold it."""
    x = w.vectors(step)

    def in_forward(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + w.b(args[0]) * 0.5

    def in_backward(grad: Tensor) -> None:
        with torch.no_grad():
            seen.append(w.c(grad).sum())

    seen: list[Tensor] = []
    handle = w.a.blocks[0].linear.register_forward_hook(in_forward)
    out = w.a(x)
    out.register_hook(in_backward)
    out.square().mean().backward()
    handle.remove()
    assert len(seen) == 1
    w.step("a", "b")
    w.c(x).square().mean().backward()
    w.step("c")


def orders(ctx) -> list[str]:
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
    return [e for e in events if e.startswith(("all-gather", "--"))]


def test_prefetching(pool):
    first, second = pool.run(orders)
    assert first == second
    forward = ["all-gather <root>", "all-gather blocks.0", "all-gather blocks.1"]
    backward = ["all-gather blocks.1", "all-gather blocks.0"]
    assert first == [*forward, "-- b", *forward, "-- backward of a", *backward, "-- backward of b", *backward]


# -- Language models ---------------------------------------------------------------------------------------------------


def actor_and_critic() -> Models:
    policy = Language()
    return {
        "policy": policy,
        "reference": copy.deepcopy(policy).requires_grad_(False),
        "reward": Language(out=1).requires_grad_(False),
        "value": Language(out=1),
    }


def reinforce(w: World, step: int) -> None:
    """PPO in short: generate, score by three models, then two epochs of policy and value."""
    prompts = w.ids(step)
    with torch.no_grad():
        context = keep_unsharded(w.policy) if isinstance(w.policy.head.weight, ShardedParameter) else torch.no_grad()
        with context:
            tokens = w.policy.generate(prompts, 3)
            old = w.policy.log_probs(tokens)
        scores = w.reward(tokens)[:, -1, 0] - 0.1 * (old - w.reference.log_probs(tokens))
        advantages = scores - w.value(tokens)[:, -1, 0]
    for _ in range(2):
        ratio = (w.policy.log_probs(tokens) - old).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        value_loss = (w.value(tokens)[:, -1, 0] - scores).square().mean()
        (value_loss - surrogate.mean()).backward()
        w.step("value", "policy")


def two_heads() -> Models:
    trunk = Trunk()
    return {"policy": Language(trunk), "value": Language(trunk, 1)}


def shard_trunk_first(models: Models, group: Any, strategy: ShardingStrategy) -> None:
    fully_shard(models["policy"].trunk, policy={Block}, strategy=strategy, process_group=group)
    shard_each(models, group, strategy)


def share_a_trunk(w: World, step: int) -> None:
    """Two models with units in common: one backward through both, one each, and one after the other's step."""
    ids = w.ids(step)
    logits, value = w.policy(ids), w.value(ids)
    (cross_entropy(logits.flatten(0, 1), ids.flatten()) + value.square().mean()).backward()
    w.value(ids + 0).square().mean().backward()
    w.optimizers["value"].step()
    for optimizer in w.optimizers.values():
        optimizer.zero_grad()
    cross_entropy(w.policy(ids).flatten(0, 1), ids.flatten()).backward()
    w.step("policy")


# -- Models that are not sharded alike, and models that fail -----------------------------------------------------------


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


def failing(w: World, step: int) -> None:
    """One of them raises, in forward or in backward, while the others have something open."""
    x = w.vectors(step)

    def stop(*ignored: Any) -> None:
        raise (ValueError, KeyboardInterrupt, ZeroDivisionError)[step]("on purpose")

    kept = w.c(x)
    for module in (w.b.blocks[1], w.a.front):
        handle = module.register_forward_pre_hook(stop)
        with pytest.raises(BaseException, match="on purpose"):
            w.b(w.a(x))
        handle.remove()
    kept.square().mean().backward()  # as if nothing had happened
    out = w.b(w.a(x))
    out.register_hook(stop)
    with pytest.raises(BaseException, match="on purpose"):
        out.sum().backward()
    for name in ("a", "b"):
        w.optimizers[name].zero_grad()
    (w.a(x) * w.b(x)).square().mean().backward()
    w.step("a", "b", "c")


SCRIPTS: list[tuple[Callable[[], Models], Callable[[World, int], None], Any]] = [
    *((gan_models, train, shard_each) for train in (gan, gan_with_penalty)),
    *((three, train, shard_each) for train in (half_used, inside_others, failing)),
    (cycle_models, cycle, shard_each),
    (actor_and_critic, reinforce, shard_each),
    (two_heads, share_a_trunk, shard_trunk_first),
]


@pytest.mark.parametrize(("make", "train", "shard"), SCRIPTS, ids=lambda each: each.__name__)
def test_script(pool, make, train, shard):
    turn = [script[1] for script in SCRIPTS].index(train)
    pool.run(check, make, train, shard, some(STRATEGIES, 2, turn))
    pool.run(check, make, train, shard, STRATEGIES[:1], world_size=3)


@pytest.mark.parametrize("train", [half_used, chained])
def test_sharded_differently(pool, train):
    pool.run(check, three, train, shard_differently, some(STRATEGIES, 1, train is chained), world_size=4)


@ranks(2)
def test_dropped(ctx):
    """A model that is dropped, between its forward and its backward, leaves nothing to the others."""
    torch.set_default_dtype(torch.float64)
    x = torch.ones(2, WIDTH)
    model, other = (fully_shard(Net(), policy={Block}, process_group=ctx.group) for _ in range(2))
    out = other(model(x))
    out.sum().backward()
    loss = other(x)
    del other, loss
    model(x).sum().backward()
    flatshard.recover(model)
    check_clean(model)
