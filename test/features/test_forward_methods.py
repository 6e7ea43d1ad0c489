"""Methods besides ``forward``, registered by ``register_forward_method``: they compute, train and fail as forwards do."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from parity import adamw, check_parity, full_params
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, fully_shard, register_forward_method
from flatshard._composable.find import units_below
from flatshard._handle.registrations import SHARDED
from flatshard._trace import record_events
from flatshard.tensors import ShardedParameter

STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
    ShardingStrategy.SHARD_OPTIM,
)
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
        assert tuple(unit.claims) == unit.config.claims, unit
        assert unit.handle.registrations.shows is SHARDED
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
    fully_shard(model, process_group=ctx.group, mixed_precision=policy)
    register_forward_method(model, "decode")
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
    fully_shard(model, policy={Block}, process_group=ctx.group)
    register_forward_method(model, ["adapt"])
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
        ("forward", ValueError, "Model.forward: calls of the module gather already"),
        ("__call__", ValueError, "Model.__call__: calls of the module gather already"),
        ("width", ValueError, "Model.width is not a method"),
        ("later", NotImplementedError, "Model.later is async"),
        (["encode", "nothing"], ValueError, "Model has no method 'nothing'"),
    ],
)
def test_what_cannot_be_registered(fake_group, name, kind, message):
    model = Model()
    fully_shard(model, policy={Block})
    with pytest.raises(kind, match=message):
        register_forward_method(model, name)
    assert "encode" not in model.__dict__


def test_modules_that_are_no_units(fake_group):
    model = nn.Sequential(Model(), nn.Linear(2, 2), nn.Tanh())
    fully_shard(model[0], policy={Block})
    with pytest.raises(
        ValueError, match=r"this Linear is part of unit 'blocks\.0', and not a unit itself: pass that unit"
    ):
        register_forward_method(model[0].blocks[0].linear, "forward")
    with pytest.raises(ValueError, match=r"this Embedding is part of unit the root module, and not a unit itself"):
        register_forward_method(model[0].embed, "forward")
    with pytest.raises(
        ValueError, match=r"this Sequential is not a unit, but contains units: the root module, 'blocks\.0'"
    ):
        register_forward_method(model, "append")
    with pytest.raises(ValueError, match="nothing in this Linear is sharded; call fully_shard first"):
        register_forward_method(model[1], "forward")
    with pytest.raises(TypeError, match=r"register_forward_method takes an nn\.Module, got a str"):
        register_forward_method("generate", model)


# ---------------------------------------------------------------------------------------------------------------------
# Methods that were not registered
# ---------------------------------------------------------------------------------------------------------------------


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


def forgotten(ctx) -> None:
    model = Careless()
    fully_shard(model, policy={Block}, process_group=ctx.group)
    x = torch.ones(2, WIDTH)
    model(torch.arange(4)).sum().backward()
    for call, name, kind, method in (
        (lambda: model.generate(torch.arange(4), 1), "embed.weight", "Embedding", "Careless.generate"),
        (lambda: model.encode(torch.arange(4)), "embed.weight", "Embedding", "Careless.encode"),
        (lambda: model.through(x), "narrow.weight", "Linear", "Careless.project"),
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
        with pytest.raises(
            RuntimeError, match=r"'embed\.weight' is sharded.* But Linear\.forward .* call the module that is"
        ):
            direct()
    model.blocks[1].mix = lambda x: x
    with pytest.raises(RuntimeError, match=r"'blocks\.1\.gain' is sharded.* But Block\.forward was called outside"):
        model.blocks[1].forward(x)  # as a method, which no hook sees
    del model.blocks[1].mix
    model(torch.arange(4)).sum().backward()
    copied = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"parameter 'embed\.weight' is sharded"):
        copied.encode(torch.arange(4))
    with flatshard.summon_full_params(model):
        model.encode(torch.arange(4))
    flatshard.unshard(model)
    model.project(x)
    flatshard.reshard(model)
    register_forward_method(model, "project")
    assert model.through(x).shape == (2, 4)


def test_a_method_that_was_not_registered(pool):
    pool.run(forgotten)


def decorated(ctx) -> None:
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


def test_the_name_of_a_decorated_method(pool):
    pool.run(decorated)


class Prompted(nn.Module):
    """No unit: what its methods use is a unit's further out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2)

    def prefill(self, x: Tensor) -> Tensor:
        return self.embed(x)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompted, self.head = Prompted(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.prompted.prefill(x))

    def generate(self, x: Tensor) -> Tensor:
        return self.prompted.prefill(x)


class Server(nn.Module):
    """A unit of its own around a unit, which another one's methods do not gather."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.scale = Generator(), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.generator(x) * self.scale

    def encode(self, x: Tensor) -> Tensor:
        return self.generator.prompted.prefill(x)


def nested(ctx) -> None:
    """The method that the error names is one of the unit that owns the parameter; if there is none, something else helps."""
    model, x = fully_shard(Generator(), process_group=ctx.group), torch.ones(1, 2)
    with pytest.raises(
        RuntimeError, match=r"register_forward_method\(module, 'generate'\), Generator\.generate gathers"
    ):
        model.generate(x)
    register_forward_method(model, "generate")
    assert model.generate(x).shape == (1, 2)
    server = fully_shard(Server(), policy={Generator}, process_group=ctx.group)
    with pytest.raises(RuntimeError, match=r"run this inside `with flatshard\.summon_full_params\(module\):`"):
        server.encode(x)
    with flatshard.summon_full_params(server):
        assert server.encode(x).shape == (1, 2)


def test_methods_of_modules_that_are_no_units(pool):
    pool.run(nested)


def silent(ctx) -> None:
    """Without a guard this multiplies by a vector: a shape that fits, and a number that is wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 2, bias=False))
    plain = copy.deepcopy(model)
    fully_shard(model, process_group=ctx.group)
    x = torch.ones(3, 64)
    assert nn.functional.linear(x, model[0].weight).shape == (3,)
    with pytest.raises(
        RuntimeError, match=r"parameter '0\.weight' is sharded: this rank has elements .* of shape \(2, 64\)"
    ):
        model[0](x)
    assert torch.equal(model(x), plain(x))


def test_where_the_shapes_would_fit(pool):
    pool.run(silent)


def may_be_read(ctx) -> None:
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


def test_what_may_be_read(pool):
    pool.run(may_be_read)


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


def swap(ctx) -> None:
    torch.manual_seed(0)
    model = Swaps().double()
    plain = copy.deepcopy(model)
    fully_shard(model, process_group=ctx.group)
    x = torch.rand(2, WIDTH, dtype=torch.double)
    for how in ("functional_call", "assign", "items", "delete"):
        ctx.note(how)
        model.how = plain.how = how
        for _ in range(2):
            assert torch.equal(model(x), plain(x))
            model.zero_grad(), plain.zero_grad()
            for m in (model, plain):
                m(x).square().mean().backward()
            with flatshard.summon_full_params(model, writeback=False, with_grads=True):
                for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                    assert (p.grad is None) == (q.grad is None)
                    assert p.grad is None or torch.allclose(p.grad, q.grad)
        assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
    assert "weight" not in model.inner.__dict__


def test_parameters_written_during_forward(pool):
    pool.run(swap)
