"""Methods registered by ``register_forward_method`` compute, train and fail like ``forward``."""

import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from on_ranks import ranks
from pairs import some
from parity import check_parity, check_same_gradients, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import ShardingStrategy, fully_shard, register_forward_method
from flatshard._base.trace import record_events

STRATEGIES = tuple(strategy for strategy in ShardingStrategy if not strategy.is_hybrid)
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
    """A language model with one vector per sequence: ids (batch,) in, logits (batch, TOKENS) out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.decode(self.encode(ids))

    def encode(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks[:2]:
            x = block(x)
        return x

    def decode(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks[2](x)))

    def loss(self, ids: Tensor, *, weight: float = 1.0) -> Tensor:
        """Call the module itself and use its parameters as well."""
        return weight * nn.functional.cross_entropy(self(ids), (ids + 1) % TOKENS) + self.norm.weight.square().sum()

    def generate(self, ids: Tensor, steps: int) -> Tensor:
        """Generate greedily. A parameter of the root scales the embeddings."""
        out = [ids]
        for _ in range(steps):
            x = self.embed(out[-1]) * self.norm.weight
            for block in self.blocks:
                x = block(x)
            out.append(self.head(x).argmax(-1))
        return torch.stack(out)

    def stream(self) -> Iterator[None]:
        yield

    async def later(self) -> None: ...


def shard(model: nn.Module, group: Any, strategy: ShardingStrategy = STRATEGIES[0], **options: Any) -> nn.Module:
    fully_shard(model, policy={Block}, strategy=strategy, process_group=group, **options)
    register_forward_method(model, ["encode", "decode", "loss", "generate"])
    register_forward_method(model.blocks[0], "mix")
    return model


def make() -> Model:
    torch.manual_seed(0)
    return Model().double()


def train(model: nn.Module, ids: Tensor, scale: float) -> Tensor:
    """Train by a method that calls the module, several with a graph each, and an inner unit's."""
    x = model.blocks[0].mix(model.encode(ids))
    outputs = [model.decode(x), *(checkpoint(model.decode, x, use_reentrant=each) for each in (False, True))]
    loss = model.loss(ids, weight=0.5) + sum(output.square().mean() for output in outputs)
    (loss * scale).backward()
    return loss.detach()


@ranks(2, 3)
def test_training(ctx):
    for strategy in some(STRATEGIES, 2, turn=1) if ctx.world_size == 2 else STRATEGIES[:1]:
        ctx.note(strategy.name)
        how = functools.partial(shard, strategy=strategy)
        check_parity(ctx, Model, lambda step, n: torch.randint(TOKENS, (n,)), steps=2, train=train, shard=how)


@ranks(2)
def test_the_unit_is_gathered_once_around_a_nested_forward(ctx):
    model = shard(make(), ctx.group)
    model.loss(torch.arange(4)).backward()
    with record_events() as events:
        model.loss(torch.arange(4)).backward()
    for event, count in (("all-gather <root>", 1), ("reduce-scatter <root>", 1), ("all-gather blocks.1", 2)):
        assert events.count(event) == count, event


@ranks(2)
def test_deepcopy(ctx):
    """Copy instance attributes that are methods, too."""
    ids = torch.arange(4)
    model, plain = shard(make(), ctx.group), make()
    model.generate = functools.partial(model.generate, steps=3)  # hides a registered method
    model.encode = Model.encode.__get__(model)
    register_forward_method(model, ["generate", "encode"])
    assert torch.equal(model.generate(ids), plain.generate(ids, 3))
    copied = copy.deepcopy(copy.deepcopy(model))
    with torch.no_grad():
        for p in (*copied.parameters(), *plain.parameters()):
            p.mul_(0.5)
    assert torch.equal(copied.blocks[0].mix(copied.encode(ids)), plain.blocks[0].mix(plain.encode(ids)))
    copied.loss(ids).backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in copied.parameters())


def test_registering(fake_group):
    model = shard(Model(), None)
    before = model.loss
    assert before.__doc__ == Model.loss.__doc__
    assert str(inspect.signature(before)) == "(ids: torch.Tensor, *, weight: float = 1.0) -> torch.Tensor"
    register_forward_method(model, "loss")
    assert model.loss is before
    inner = fully_shard(Model(), policy={Block})
    for name, message in (
        ("generat", "Model has no method 'generat'; it has "),
        ("embed", "Model has no method 'embed'"),
        ("__call__", "Model.__call__: calls of the module gather already"),
        ("later", "Model.later is async"),
        ("stream", "Model.stream is a generator function"),
        (["encode", "nothing"], "Model has no method 'nothing'"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=message):
            register_forward_method(inner, name)
        assert "encode" not in inner.__dict__
    with pytest.raises(TypeError, match=r"takes an nn\.Module, got a str"):
        register_forward_method("generate", model)


class Careless(Model):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, 4, bias=False)  # a rank's shard has as many elements as two rows: 2 * WIDTH

    def through(self, x: Tensor) -> Tensor:
        return self.project(x)

    @torch.no_grad()
    def project(self, x: Tensor) -> Tensor:
        return self._project(x)

    def _project(self, x: Tensor) -> Tensor:
        return self.narrow(x)

    @property
    def weights(self) -> Tensor:
        return self.narrow(torch.ones(2, WIDTH))

    def ask(self, x: Tensor) -> Tensor:
        return self.weights


@ranks(2)
def test_a_method_that_was_not_registered(ctx):
    """The error names a method that can be registered, and registering it helps."""
    model, x, ids = Careless(), torch.ones(2, WIDTH), torch.arange(4)
    fully_shard(model, policy={Block}, process_group=ctx.group)
    model(ids).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter 'embed\.weight' is sharded"):
        copy.deepcopy(model).encode(ids)
    for called, named in (("through", "project"), ("ask", "ask")):
        ctx.note(called)
        with pytest.raises(RuntimeError) as caught:  # the shard's shape would fit
            getattr(model, called)(x)
        text = str(caught.value)
        assert text.startswith("parameter 'narrow.weight' is sharded: this rank has elements "), text
        assert "But Linear.forward was called outside of its unit's forward: after " in text
        assert f"register_forward_method(module, {named!r}), Careless.{named} gathers what it uses" in text
        register_forward_method(model, named)
        assert getattr(model, called)(x).shape == (2, 4)
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.linear\.weight' .*module, 'mix'\), Block\.mix gathers"):
        model.blocks[0].mix(x)
    model.blocks[1].mix = lambda x: x
    with pytest.raises(RuntimeError, match=r"'blocks\.1\.gain' is sharded.* But Block\.forward was called outside"):
        model.blocks[1].forward(x)  # called directly, so hooks miss it
    for direct, outermost in ((lambda: model.head(x), "Linear"), (lambda: nn.Sequential(model.head)(x), "Sequential")):
        message = rf"'embed\.weight' is sharded.* But Linear.* call the module that is .*make the {outermost} a unit"
        with pytest.raises(RuntimeError, match=message):
            direct()
    around = fully_shard(nn.Sequential(model), process_group=ctx.group)
    around.extra = lambda x: model.norm(x)
    with pytest.raises(RuntimeError, match=r"run this inside `with flatshard\.summon_full_params\(module\):`"):
        around.extra(x)
    with flatshard.summon_full_params(around):
        around.extra(x)


class Swaps(nn.Module):
    """Writes its own parameters while it runs."""

    shadowed = None  # takes precedence, in plain torch too

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._parameters["shadowed"] = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        assert self.shadowed is None
        doubled = {n: 2 * p for n, p in self.other.named_parameters()}
        x = torch.func.functional_call(self.other, doubled, self.inner(x))
        weight, bias = self.inner.weight, self.inner.bias
        self.inner.weight = self.other.weight
        del self.inner.bias
        self.inner.register_parameter("bias", None)
        x = self.inner(x)
        self.inner.weight, self.inner.bias = weight, bias
        return self.inner(x)


@ranks(2)
def test_parameters_written_during_forward(ctx):
    plain, model = twins(ctx, Swaps)
    x = torch.rand(2, WIDTH, dtype=torch.double)
    for _ in range(2):
        assert torch.equal(model(x), plain(x))
        for m in (model, plain):
            m.zero_grad()
            m(x).square().mean().backward()
        check_same_gradients(model, plain)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
