"""Methods besides ``forward``, registered by ``register_forward_method``: they compute, train and fail as forwards do."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg as fake_pg
from parity import adamw, check_parity, full_params
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import MixedPrecision, ShardedParameter, ShardingStrategy, fully_shard, register_forward_method
from flatshard._composable.state import units_below
from flatshard._trace import record_events

STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
TOKENS, WIDTH = 11, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) * self.gain

    def mix(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """A language model on a vector a sequence: ids (batch,) in, logits (batch, TOKENS) out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.head.weight = self.embed.weight
        self.middle: Any = lambda x: x

    def forward(self, ids: Tensor) -> Tensor:
        return self.decode(self.encode(ids))

    def encode(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks[:2]:
            x = block(x)
        return self.middle(x)

    def decode(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks[2](x)))

    def loss(self, ids: Tensor, *, weight: float = 1.0) -> Tensor:
        """Calls the module itself, and uses its parameters as well."""
        return weight * nn.functional.cross_entropy(self(ids), (ids + 1) % TOKENS) + self.norm.weight.square().sum()

    def generate(self, ids: Tensor, steps: int) -> Tensor:
        """Greedy; the embedding of what is chosen is scaled by a parameter of the root's own."""
        out = [ids]
        for _ in range(steps):
            x = self.embed(out[-1]) * self.norm.weight
            for block in self.blocks:
                x = block(x)
            out.append(self.head(x).argmax(-1))
        return torch.stack(out)

    def stream(self, ids: Tensor, steps: int) -> Iterator[Tensor]:
        for _ in range(steps):
            try:
                told = yield ids
            except ValueError:
                told = torch.zeros_like(ids)
            ids = (self(ids) * self.head.bias).argmax(-1) if told is None else told
        return "done"

    async def later(self) -> None: ...

    @property
    def width(self) -> int:
        return WIDTH

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x + 1


METHODS = ["encode", "decode", "loss", "generate", "stream"]


def batch(step: int, n: int) -> Tensor:
    return torch.randint(TOKENS, (n,))


def shard(model: nn.Module, group: Any, strategy: ShardingStrategy = STRATEGIES[0], **options: Any) -> nn.Module:
    fully_shard(model, policy={Block}, strategy=strategy, process_group=group, **options)
    register_forward_method(model, METHODS)
    register_forward_method(model.blocks[0], "mix")
    return model


def make(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def assert_sharded(model: nn.Module) -> None:
    for unit in units_below(model):
        assert (unit.users, unit.holds) == (0, 0), unit
        assert not unit.handle.slots.unsharded
    assert all(isinstance(p, ShardedParameter) for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# They compute
# ---------------------------------------------------------------------------------------------------------------------


def generate(ctx) -> None:
    plain = make()
    ids = torch.arange(4)
    for strategy in STRATEGIES:
        model = shard(make(), ctx.group, strategy)
        for guard in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with guard():
                assert torch.equal(model.generate(ids, 5), plain.generate(ids, steps=5))
                assert torch.equal(model.decode(model.encode(ids)), plain(ids))
                assert torch.equal(torch.stack([*model.stream(ids, 4)]), torch.stack([*plain.stream(ids, 4)]))
        assert_sharded(model)
        if strategy is ShardingStrategy.FULL_SHARD:
            assert all(u.handle.is_sharded for u in units_below(model))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_without_gradients(pool, world_size):
    pool.run(generate, world_size=world_size)


def by_loss(model: nn.Module, ids: Tensor, scale: float) -> Tensor:
    loss = model.loss(ids, weight=0.5)
    (loss * scale).backward()
    return loss.detach()


def by_parts(model: nn.Module, ids: Tensor, scale: float) -> Tensor:
    """Two methods, each with a graph of its own; a tensor between them; a method of an inner unit."""
    loss = model.decode(model.blocks[0].mix(model.encode(ids))).square().mean()
    (loss * scale).backward()
    return loss.detach()


def by_stream(model: nn.Module, ids: Tensor, scale: float) -> Tensor:
    """Gradients through what a generator kept from an earlier item: here everything is in the graph of the last."""

    loss = sum(part for part in model.parts(ids))
    (loss * scale).backward()
    return loss.detach()


def by_checkpoint(model: nn.Module, ids: Tensor, scale: float) -> Tensor:
    x = model.encode(ids)
    loss = checkpoint(model.decode, x, use_reentrant=False).square().mean()
    loss = loss + checkpoint(model.decode, x, use_reentrant=True).square().mean()
    (loss * scale).backward()
    return loss.detach()


class Streaming(Model):
    def parts(self, ids: Tensor) -> Iterator[Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) * self.norm.weight
            yield self.head(x).square().mean()


def train_alike(ctx) -> None:
    for strategy in STRATEGIES if ctx.world_size == 2 else STRATEGIES[:1]:
        for train in (by_loss, by_parts, by_checkpoint):
            ctx.note(f"{strategy.name}, {train.__name__}")
            check_parity(ctx, Model, batch, steps=4, train=train, shard=functools.partial(shard, strategy=strategy))

        def stream(model: nn.Module, group: Any, strategy: ShardingStrategy = strategy) -> nn.Module:
            fully_shard(model, policy={Block}, strategy=strategy, process_group=group)
            register_forward_method(model, "parts")
            return model

        ctx.note(f"{strategy.name}, stream")
        check_parity(ctx, Streaming, batch, steps=4, train=by_stream, shard=stream)


@pytest.mark.parametrize("world_size", [2, 3])
def test_training(pool, world_size):
    pool.run(train_alike, world_size=world_size)


def collectives(ctx) -> list[str]:
    model = shard(make(), ctx.group)
    model.loss(torch.arange(4)).backward()
    with record_events() as events:
        model.loss(torch.arange(4)).backward()
    return [e for e in events if not e.startswith("reshard")]


def test_the_unit_is_gathered_once_around_a_nested_forward(pool):
    first, second = pool.run(collectives)
    assert first == second
    assert first.count("all-gather <root>") == 1
    assert first.count("reduce-scatter <root>") == 1
    assert first.count("all-gather blocks.1") == 2


def cast(ctx) -> None:
    """Mixed precision treats arguments and results of a method as those of a forward."""
    model = make(torch.float32)
    policy = MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    fully_shard(model, process_group=ctx.group, mixed_precision=policy, forward_methods="decode")
    seen = []
    model.norm.register_forward_hook(lambda module, args, output: seen.append(args[0].dtype))
    out = model.decode(torch.rand(2, WIDTH))
    assert seen == [torch.bfloat16]
    assert out.dtype is torch.float64
    out.sum().backward()


def test_mixed_precision(pool):
    pool.run(cast)


# ---------------------------------------------------------------------------------------------------------------------
# Generators
# ---------------------------------------------------------------------------------------------------------------------


def generators(ctx) -> None:
    ids = torch.arange(4)
    model, plain = shard(make(), ctx.group), make()
    assert inspect.isgenerator(model.stream(ids, 3))
    results = []
    with torch.no_grad():
        for m in (model, plain):
            stream = m.stream(ids, 4)
            items = [next(stream), next(stream)]
            if m is model:  # between two items the caller may do anything
                assert_sharded(model)
                assert torch.equal(model(ids), plain(ids))
                assert torch.equal(model.generate(ids, 2), plain.generate(ids, 2))
            items += [stream.send(items[0] + 1), stream.throw(ValueError())]
            with pytest.raises(StopIteration, match="done"):
                next(stream)
            results.append(torch.stack(items))
            unfinished = m.stream(ids, 4)
            next(unfinished)
            with record_events() as events:
                unfinished.close()
            assert not events  # the garbage collector may do this
            assert not [*m.stream(ids, 0)]
        failing = model.stream(ids, 4)
        next(failing)
        with pytest.raises(KeyError):
            failing.throw(KeyError())
        assert_sharded(model)
    assert torch.equal(*results)


def test_generator_methods(pool):
    pool.run(generators)


# ---------------------------------------------------------------------------------------------------------------------
# They fail
# ---------------------------------------------------------------------------------------------------------------------


def fail(x: Tensor, error: BaseException) -> Tensor:
    raise error


def failing(ctx) -> None:
    ids = torch.arange(4)
    for strategy in STRATEGIES:
        for error in (ValueError("on purpose"), KeyboardInterrupt("on purpose")):
            model, plain = shard(make(), ctx.group, strategy), make()
            optimizers = [adamw(model.parameters()), adamw(plain.parameters())]
            for call in (model.encode, model.loss, functools.partial(model.generate, steps=2), model):
                model.middle = functools.partial(fail, error=error)
                model.blocks[1].register_forward_pre_hook(lambda m, a, model=model: model.middle(None))
                with pytest.raises(type(error), match="on purpose"):
                    call(ids)
                model.blocks[1]._forward_pre_hooks.popitem()
                del model.middle
                model.middle = plain.middle
                if isinstance(error, Exception):
                    assert all(isinstance(p, ShardedParameter) for p in model.parameters())
                # What is left of an interrupt belongs to no call around this one.
                with torch.no_grad():
                    assert torch.equal(model.decode(model.encode(ids)), plain(ids))
                for m, optimizer in zip((model, plain), optimizers, strict=True):
                    m.loss(ids).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                with torch.no_grad():
                    plain_out = plain(ids)
                    torch.testing.assert_close(model(ids), plain_out, rtol=1e-9, atol=1e-12)
            assert_sharded(model)
            if strategy is ShardingStrategy.FULL_SHARD:
                assert all(u.handle.is_sharded for u in units_below(model))


def test_exceptions(pool):
    pool.run(failing)


class Adapting(Model):
    """Test-time training inside of a method."""

    def adapt(self, ids: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
        self(ids).square().mean().backward()
        optimizer.step()
        return self(ids)


def step_inside(ctx) -> None:
    model = Adapting()
    fully_shard(model, policy={Block}, process_group=ctx.group, forward_methods=["adapt"])
    with pytest.raises(
        RuntimeError, match=r"'<root>' were changed in place .* inside its forward, a registered method"
    ):
        model.adapt(torch.arange(4), torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.arange(4)).sum().backward()


def test_a_step_inside_a_method_of_the_unit(pool):
    pool.run(step_inside)


# ---------------------------------------------------------------------------------------------------------------------
# Copies
# ---------------------------------------------------------------------------------------------------------------------


def copies(ctx) -> None:
    ids = torch.arange(4)
    model, plain = shard(make(), ctx.group), make()
    model.generate = functools.partial(model.generate, steps=3)  # over a registered one
    register_forward_method(model, "generate")
    assert torch.equal(model.generate(ids), plain.generate(ids, 3))
    model.generate = Model.generate.__get__(model)  # an instance attribute that is a bound method
    register_forward_method(model, "generate")
    copied = copy.deepcopy(model)
    twice = copy.deepcopy(copied)
    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(0.5)
        for p in plain.parameters():
            p.mul_(0.5)
    for name in METHODS:
        assert getattr(copied, name).hooks.unit.module is copied
    assert torch.equal(copied.generate(ids, 3), plain.generate(ids, 3))
    assert torch.equal(copied.encode(ids), plain.encode(ids))
    assert copied.blocks[0].mix.hooks.unit.module is copied.blocks[0]
    assert torch.equal(twice.generate(ids, 3), make().generate(ids, 3))
    copied.loss(ids).backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in copied.parameters())
    flatshard.recover(copied)
    assert_sharded(copied)


def test_deepcopy(pool):
    pool.run(copies)


# ---------------------------------------------------------------------------------------------------------------------
# Registering
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_what_it_looks_like(fake_group):
    model = shard(Model(), None)
    assert model.loss.__name__ == "loss"
    assert model.loss.__doc__ == Model.loss.__doc__
    assert str(inspect.signature(model.loss)) == "(ids: 'Tensor', *, weight: 'float' = 1.0) -> 'Tensor'"
    before = model.loss
    register_forward_method(model, "loss")
    assert model.loss is before
    register_forward_method(model, "static")
    assert model.static(torch.ones(1)) == 2
    assert list(full_params(model)) == list(dict(Model().named_parameters()))


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("generat", ValueError, "Model has no method 'generat'; it has "),
        ("embed", ValueError, "Model has no method 'embed'"),
        ("forward", ValueError, "Model.forward: calls of the module are forwards already"),
        ("__call__", ValueError, "Model.__call__: calls of the module are forwards already"),
        ("width", ValueError, "Model.width is not a method"),
        ("later", NotImplementedError, "Model.later is async"),
        (["encode", "nothing"], ValueError, "Model has no method 'nothing'"),
        ([1], TypeError, "a forward method is given by its name, got 1"),
    ],
)
def test_what_cannot_be_registered(fake_group, name, kind, message):
    model = Model()
    with pytest.raises(kind, match=message):
        fully_shard(model, forward_methods=name)
    assert not units_below(model)
    fully_shard(model, policy={Block})
    with pytest.raises(kind, match=message):
        register_forward_method(model, name)
    assert "encode" not in model.__dict__


def test_modules_that_are_no_units(fake_group):
    model = nn.Sequential(Model(), nn.Linear(2, 2), nn.Tanh())
    fully_shard(model[0], policy={Block})
    with pytest.raises(
        ValueError, match=r"this Linear is part of unit 'blocks\.0', and is none itself: name that unit"
    ):
        register_forward_method(model[0].blocks[0].linear, "forward")
    with pytest.raises(ValueError, match=r"this Embedding is part of unit the root module, and is none itself"):
        register_forward_method(model[0].embed, "forward")
    with pytest.raises(
        ValueError, match=r"this Sequential is not a unit, but units lie in it: the root module, 'blocks\.0'"
    ):
        register_forward_method(model, "append")
    with pytest.raises(ValueError, match="this Linear is not sharded; call fully_shard first"):
        register_forward_method(model[1], "forward")
    with pytest.raises(TypeError, match=r"register_forward_method takes an nn\.Module, got a str"):
        register_forward_method("generate", model)
