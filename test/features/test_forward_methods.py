"""Methods besides ``forward``, registered by ``register_forward_method``: they compute, train and fail as forwards do."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from clean import check_clean
from on_ranks import ranks
from pairs import some
from parity import check_parity, check_same_gradients, full_params, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import ShardingStrategy, fully_shard, register_forward_method
from flatshard._trace import record_events

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

    def parts(self, ids: Tensor) -> Iterator[Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) * self.norm.weight
            yield self.head(x).square().mean()

    async def later(self) -> None: ...

    @property
    def width(self) -> int:
        return WIDTH

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x + 1


METHODS = ["encode", "decode", "loss", "generate", "stream", "parts"]


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


# -- They compute ------------------------------------------------------------------------------------------------------


@ranks(1, 3)
def test_without_gradients(ctx):
    plain = make()
    ids = torch.arange(4)
    for strategy in STRATEGIES if ctx.world_size > 1 else STRATEGIES[:1]:
        model = shard(make(), ctx.group, strategy)
        for guard in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with guard():
                assert torch.equal(model.generate(ids, 5), plain.generate(ids, steps=5))
                assert torch.equal(model.decode(model.encode(ids)), plain(ids))
                assert torch.equal(torch.stack([*model.stream(ids, 4)]), torch.stack([*plain.stream(ids, 4)]))
        flatshard.recover(model)  # the last had gradients, and no backward
        check_clean(model)


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
    loss = sum(model.parts(ids))
    (loss * scale).backward()
    return loss.detach()


def by_checkpoint(model: nn.Module, ids: Tensor, scale: float) -> Tensor:
    x = model.encode(ids)
    loss = checkpoint(model.decode, x, use_reentrant=False).square().mean()
    loss = loss + checkpoint(model.decode, x, use_reentrant=True).square().mean()
    (loss * scale).backward()
    return loss.detach()


@ranks(2, 3)
def test_training(ctx):
    for strategy in some(STRATEGIES, 2, turn=1) if ctx.world_size == 2 else STRATEGIES[:1]:
        for train in (by_loss, by_parts, by_checkpoint, by_stream):
            ctx.note(f"{strategy.name}, {train.__name__}")
            check_parity(ctx, Model, batch, steps=2, train=train, shard=functools.partial(shard, strategy=strategy))


@ranks(2)
def test_the_unit_is_gathered_once_around_a_nested_forward(ctx):
    model = shard(make(), ctx.group)
    model.loss(torch.arange(4)).backward()
    with record_events() as events:
        model.loss(torch.arange(4)).backward()
    for event, count in (("all-gather <root>", 1), ("reduce-scatter <root>", 1), ("all-gather blocks.1", 2)):
        assert events.count(event) == count, event


# -- Generators --------------------------------------------------------------------------------------------------------


@ranks(2)
def test_generator_methods(ctx):
    ids = torch.arange(4)
    model, plain = shard(make(), ctx.group), make()
    assert inspect.isgenerator(model.stream(ids, 3))
    results = []
    with torch.no_grad():
        for m in (model, plain):
            stream = m.stream(ids, 4)
            items = [next(stream), next(stream)]
            if m is model:  # between two items the caller may do anything
                check_clean(model)
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
        check_clean(model)
    assert torch.equal(*results)


# -- Copies ------------------------------------------------------------------------------------------------------------


@ranks(2)
def test_deepcopy(ctx):
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
        for p in (*copied.parameters(), *plain.parameters()):
            p.mul_(0.5)
    assert torch.equal(copied.generate(ids, 3), plain.generate(ids, 3))
    assert torch.equal(copied.blocks[0].mix(copied.encode(ids)), plain.blocks[0].mix(plain.encode(ids)))
    assert torch.equal(twice.generate(ids, 3), make().generate(ids, 3))
    copied.loss(ids).backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in copied.parameters())
    flatshard.recover(copied)
    check_clean(copied)


# -- Registering -------------------------------------------------------------------------------------------------------


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


def test_what_cannot_be_registered(fake_group):
    model = nn.Sequential(Model(), nn.Linear(2, 2), nn.Tanh())
    inner = fully_shard(model[0], policy={Block})
    for module, name, message in (
        (inner, "generat", "Model has no method 'generat'; it has "),
        (inner, "embed", "Model has no method 'embed'"),
        (inner, "forward", "Model.forward: calls of the module gather already"),
        (inner, "__call__", "Model.__call__: calls of the module gather already"),
        (inner, "width", "Model.width is not a method"),
        (inner, "later", "Model.later is async"),
        (inner, ["encode", "nothing"], "Model has no method 'nothing'"),
        (
            inner.blocks[0].linear,
            "forward",
            r"this Linear is part of unit 'blocks\.0', and not a unit itself: pass that",
        ),
        (inner.embed, "forward", r"this Embedding is part of unit the root module, and not a unit itself"),
        (model, "append", r"this Sequential is not a unit, but contains units: the root module, 'blocks\.0'"),
        (model[1], "forward", "nothing in this Linear is sharded; call fully_shard first"),
        ("generate", model, r"register_forward_method takes an nn\.Module, got a str"),
    ):
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
            register_forward_method(module, name)
        assert "encode" not in inner.__dict__


# -- Methods that were not registered ----------------------------------------------------------------------------------


def checking(method: Any) -> Any:
    """A decorator whose inner function does some of the work."""

    def wrapper(self: Any, x: Tensor) -> Tensor:
        return method(self, self.head(x))

    return wrapper


def checking_by_name(method: Any) -> Any:
    @functools.wraps(method)
    def wrapper(self: Any, x: Tensor) -> Tensor:
        return method(self, x)

    return wrapper


def _predict(self: Any, x: Tensor) -> Tensor:
    return self.head(x)


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    forward = _predict
    predict = _predict

    @checking
    def score(self, x: Tensor) -> Tensor:
        return x

    @checking_by_name
    def rank(self, x: Tensor) -> Tensor:
        def inner(self: Any) -> Tensor:
            return self.head(x)

        return inner(self)

    @torch.no_grad()
    def sample(self, x: Tensor) -> Tensor:
        return self.head(x)

    @property
    def weights(self) -> Tensor:
        return self.head(torch.ones(1, 2))

    def ask(self) -> Tensor:
        return self.weights


class Careless(Model):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, 4, bias=False)  # of which a rank's part has the 2 * WIDTH elements of two rows

    def project(self, x: Tensor) -> Tensor:
        return torch.stack([self.narrow(row) for row in x])

    def through(self, x: Tensor) -> Tensor:
        return self.project(x)

    def prepare(self, x: Tensor) -> Tensor:
        return self._prepare(x)

    def _prepare(self, x: Tensor) -> Tensor:
        return self.narrow(x)


@ranks(2)
def test_a_method_that_was_not_registered(ctx):
    model = Careless()
    fully_shard(model, policy={Block}, process_group=ctx.group)
    x, ids = torch.ones(2, WIDTH), torch.arange(4)
    model(ids).sum().backward()
    for call, name, kind, method in (
        (lambda: model.encode(ids), "embed.weight", "Embedding", "Careless.encode"),
        (lambda: model.through(x), "narrow.weight", "Linear", "Careless.project"),  # whose shapes would fit
        (lambda: model.prepare(x), "narrow.weight", "Linear", "Careless.prepare"),
        (lambda: model.blocks[0].mix(x), "blocks.0.linear.weight", "Linear", "Block.mix"),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        short = method.partition(".")[2]
        text = str(caught.value)
        assert text.startswith(f"parameter {name!r} is sharded: this rank has elements "), text
        assert f"But {kind}.forward was called outside of its unit's forward: after " in text
        assert f"after flatshard.register_forward_method(module, {short!r}), {method} gathers what it uses" in text
    for direct in (lambda: model.head(x), lambda: nn.Sequential(model.head)(x)):
        message = r"'embed\.weight' is sharded.* But Linear\.forward .* call the module that is"
        with pytest.raises(RuntimeError, match=message):
            direct()
    model.blocks[1].mix = lambda x: x
    with pytest.raises(RuntimeError, match=r"'blocks\.1\.gain' is sharded.* But Block\.forward was called outside"):
        model.blocks[1].forward(x)  # as a method, which no hook sees
    del model.blocks[1].mix
    with pytest.raises(RuntimeError, match=r"parameter 'embed\.weight' is sharded"):
        copy.deepcopy(model).encode(ids)
    with flatshard.summon_full_params(model):
        model.encode(ids)
    flatshard.unshard(model)
    model.project(x)
    flatshard.reshard(model)
    register_forward_method(model, "project")
    assert model.through(x).shape == (2, 4)


@ranks(2)
def test_the_name_of_a_decorated_method(ctx):
    """The name that the error tells is one that can be registered, and helps."""
    x = torch.ones(1, 2)
    for called, named in (("predict", ""), ("score", "score"), ("rank", "rank"), ("sample", "sample"), ("ask", "ask")):
        model = fully_shard(Decorated(), process_group=ctx.group)
        arguments = () if called == "ask" else (x,)
        with pytest.raises(RuntimeError, match="is sharded") as caught:
            getattr(model, called)(*arguments)
        if not named:  # which is the forward, too
            assert "call the module that is the unit" in str(caught.value)
            continue
        assert f"register_forward_method(module, {named!r}), Decorated.{named} gathers" in str(caught.value)
        register_forward_method(model, named)
        getattr(model, called)(*arguments)


class Generator(nn.Module):
    """What its method uses is a unit's further out: the module inside is none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Decorated(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner.predict(x))

    def generate(self, x: Tensor) -> Tensor:
        return self.inner.predict(x)


class Server(nn.Module):
    """A unit of its own around a unit, which another one's methods do not gather."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.scale = Generator(), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.generator(x) * self.scale

    def encode(self, x: Tensor) -> Tensor:
        return self.generator.inner.predict(x)


@ranks(2)
def test_methods_of_modules_that_are_no_units(ctx):
    """The method that the error names is one of the unit that owns the parameter; if there is none, something else helps."""
    model, x = fully_shard(Generator(), process_group=ctx.group), torch.ones(1, 2)
    message = r"register_forward_method\(module, 'generate'\), Generator\.generate gathers"
    with pytest.raises(RuntimeError, match=message):
        model.generate(x)
    register_forward_method(model, "generate")
    assert model.generate(x).shape == (1, 2)
    server = fully_shard(Server(), policy={Generator}, process_group=ctx.group)
    with pytest.raises(RuntimeError, match=r"run this inside `with flatshard\.summon_full_params\(module\):`"):
        server.encode(x)
    with flatshard.summon_full_params(server):
        assert server.encode(x).shape == (1, 2)


@ranks(2)
def test_what_may_be_read(ctx):
    """Reading a sharded parameter is no mistake; nor are hooks that do, or a world of one rank."""
    model = Careless()
    seen = []
    fully_shard(model, policy={Block}, process_group=ctx.group)
    model.register_forward_hook(lambda module, args, output: seen.append(module.norm.weight.numel()))
    model.head.register_forward_hook(lambda module, args, output: seen.append(module.weight.shape))
    model(torch.arange(4))
    assert seen[0] == (TOKENS, WIDTH)
    assert seen[1] == model.norm.weight.numel()
    assert model.head.weight is model.embed.weight
    assert model.head._parameters["weight"] is model.head.weight
    assert model.head._parameters.get("bias") is model.head.bias
    whole = fully_shard(Careless(), strategy=ShardingStrategy.NO_SHARD, process_group=ctx.group)
    assert whole.project(torch.ones(2, WIDTH)).shape == (2, 4)


class Swaps(nn.Module):
    """Writes parameters of its own while it runs, in all the ways there are."""

    shadowed = None  # comes first, in plain torch too

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self._parameters["shadowed"] = nn.Parameter(torch.rand(WIDTH))
        self.how = "functional_call"

    def forward(self, x: Tensor) -> Tensor:
        assert self.shadowed is None
        before = self.inner(x)
        fast = {n: 2 * p for n, p in self.inner.named_parameters()}
        if self.how == "functional_call":
            swapped = torch.func.functional_call(self.inner, fast, x)
        elif self.how == "assign":
            kept = self.inner.weight
            self.inner.weight = self.other.weight
            swapped = self.inner(x)
            self.inner.weight = kept
        elif self.how == "items":
            kept = self.inner._parameters.pop("bias")
            assert not hasattr(self.inner, "bias")
            self.inner._parameters.update(bias=None)
            swapped = self.inner(x)
            self.inner._parameters |= {"bias": kept}
        else:
            kept = self.inner.bias
            del self.inner.bias
            self.inner.register_parameter("bias", None)
            swapped = self.inner(x)
            self.inner.bias = kept
        return before + 3 * swapped + 5 * self.inner(x)


@ranks(2)
def test_parameters_written_during_forward(ctx):
    plain, model = twins(ctx, Swaps)
    x = torch.rand(2, WIDTH, dtype=torch.double)
    for how in ("functional_call", "assign", "items", "delete"):
        ctx.note(how)
        model.how = plain.how = how
        for _ in range(2):
            assert torch.equal(model(x), plain(x))
            for m in (model, plain):
                m.zero_grad()
                m(x).square().mean().backward()
            check_same_gradients(model, plain)
        assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
    assert "weight" not in model.inner.__dict__
