"""Kinds of parameters that the fuzzer does not draw, compared with one process; and attributes of Parameter objects."""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import models
import pytest
import torch
from on_ranks import ranks
from pairs import all_pairs, some
from parity import adamw_float32, check_parity, check_same_gradients, mean_square, shard_with
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import flatshard
from flatshard import ShardingStrategy, fully_shard

STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
WIDTH = 13  # no world size divides it, and a (WIDTH, WIDTH) weight spans the shards of all four ranks


# -- Models: from (batch, WIDTH) or from token ids to anything --------------------------------------------------------


Mlp = functools.partial(models.Mlp, WIDTH, 7)


class Lm(nn.Module):
    """A language model whose embedding and head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.body = Mlp()
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


class Apply(nn.Module):
    """A module with named parameters, and a function of the input and these parameters."""

    def __init__(self, function: Callable[..., Tensor], **params: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=name != "fixed"))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **self._parameters)


class MixedDtypes(nn.Module):
    """A unit with float32 and float64 trainable parameters, and frozen bfloat16 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = (nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in (torch.float32, torch.float64))
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.tanh(self.low(x.float())) + self.frozen(x.bfloat16()).float()
        return self.high(low.double())


class Attention(nn.Module):
    """In eval mode without gradients, both take torch's fast path, which bypasses the forwards of inner modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 10)
        self.attention = nn.MultiheadAttention(10, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(10, 2, 9, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).unflatten(1, (1, 10)).expand(-1, 3, -1).cumsum(1)
        return self.encoder(x + self.attention(x, x, x, need_weights=False)[0])


def vectors(step: int, n: int) -> Tensor:
    return torch.randn(n, WIDTH)


def tokens(step: int, n: int) -> Tensor:
    return torch.randint(11, (n, 5))


def complex_numbers() -> nn.Module:
    w, fixed = torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 4, torch.randn(WIDTH, dtype=torch.complex64)
    product = Apply(lambda x, w, fixed, unused: (x * (1 + 0j) @ w * fixed).abs(), w=w, fixed=fixed, unused=w[0].clone())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), product)


def parametrized(parametrize: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(parametrize(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), parametrize(nn.Linear(WIDTH, 7)))


# -- Parity -----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A model, and policies that it is trained under. ``options`` are further arguments of ``check_parity``."""

    model: Callable[[], nn.Module]
    policies: Sequence[Any] = (None, {nn.Linear})
    inputs: Callable[[int, int], Any] = vectors
    options: dict[str, Any] = {}  # noqa: RUF012


DTYPES = {"oracle": "slices", "optimizer": adamw_float32, "rtol": 1e-5}
CASES = {
    "several dtypes": Case(MixedDtypes, options=DTYPES),
    "complex": Case(complex_numbers, [None, {Apply}]),
    "weight_norm": Case(lambda: parametrized(parametrizations.weight_norm)),
    "orthogonal": Case(lambda: parametrized(parametrizations.orthogonal)),
    "attention": Case(Attention, [None, {nn.MultiheadAttention}, {nn.TransformerEncoderLayer}, {nn.Linear}]),
}


def check(ctx: Any, case: Case, shard: Callable[..., Any], **options: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    return check_parity(ctx, case.model, case.inputs, steps=2, dtype=None, shard=shard, **case.options, **options)


def strategies(ctx: Any) -> Sequence[ShardingStrategy]:
    """Return all strategies for one world size. They differ in when memory is freed, whatever the number of ranks."""
    return STRATEGIES if ctx.world_size == 2 else STRATEGIES[:1]


@pytest.mark.parametrize(
    ("name", "world_size"),
    [(name, 3) for name in CASES] + some([(name, (1, 2, 4)[k % 3]) for k, name in enumerate(CASES)], 4),
)
@ranks()
def test_trains_as_in_one_process(ctx, name: str) -> None:
    for strategy, policy in itertools.product(strategies(ctx), CASES[name].policies):
        ctx.note(f"{strategy.name}, policy {policy}")
        replicated = strategy is ShardingStrategy.NO_SHARD or ctx.world_size == 1
        check(ctx, CASES[name], functools.partial(shard_with, policy, strategy), replicated=replicated)


@ranks(2)
def test_fast_paths_of_attention(ctx):
    plain, x = Attention().double().eval(), torch.randn(2, WIDTH).double()
    for policy in CASES["attention"].policies:
        model = fully_shard(copy.deepcopy(plain), policy=policy, process_group=ctx.group)
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))
    with pytest.raises(ValueError, match=r"out_proj of an nn\.MultiheadAttention.*Shard the MultiheadAttention"):
        fully_shard(plain.attention.out_proj, process_group=ctx.group)


@ranks(1, 3)
def test_a_tied_parameter_that_an_earlier_call_sharded(ctx) -> None:
    def shard(parts: tuple[str, ...], policy: Any, model: nn.Module, group: Any) -> None:
        for part in parts:
            fully_shard(model.get_submodule(part), policy=policy if not part else None, process_group=group)

    for parts, policy in ((("embed", "head", "body"), None), (("embed", ""), None), (("embed", ""), {nn.Linear})):
        ctx.note(f"{parts}, policy {policy}")
        model = check(ctx, Case(Lm, inputs=tokens), functools.partial(shard, parts, policy)).sharded
        assert flatshard.describe(model.embed).numel == math.prod(flatshard.full_shape(model.embed.weight))
        assert model.head.weight is model.embed.weight


@ranks(1, 3)
def test_units_called_on_their_own(ctx) -> None:
    def train(forward: Callable[..., Tensor], model: nn.Module, x: Tensor, scale: float) -> Tensor:
        loss = mean_square(forward(model, x), x)
        (loss * scale).backward()
        return loss.detach()

    def tied() -> nn.Module:
        model = net()
        model.blocks[1].linear.weight = model.blocks[0].linear.weight
        return model

    net = functools.partial(models.Net, 2, WIDTH, WIDTH, WIDTH)
    for make, policy, forward in (  # embedding and head own no parameter with the first
        (Lm, {nn.Embedding, nn.Linear}, lambda model, ids: model.head(model.body(model.embed(ids)))),
        (net, {models.Block}, lambda model, x: model.blocks[0](x)),
        (tied, {models.Block}, lambda model, x: model.blocks[1](x) + model(x)),
    ):
        for strategy in strategies(ctx):
            case = Case(make, inputs=tokens if make is Lm else vectors)
            step = functools.partial(train, forward)
            check(ctx, case, functools.partial(shard_with, policy, strategy), train=step)


# -- The Parameter objects --------------------------------------------------------------------------------------------


@ranks(1, 2)
def test_attributes_are_seen_on_both_views(ctx):
    model = Mlp()
    model.up.weight.lr_scale = 0.5
    model.down.weight.tags = ["decay"]
    fully_shard(model, process_group=ctx.group)
    model.up.weight.group = "first"  # set on the sharded view

    def look(model: nn.Module, *args: Any) -> None:
        assert (model.up.weight.lr_scale, model.up.weight.group) == (0.5, "first")
        assert model.down.weight.tags == ["decay"]
        model.up.weight.noted = True  # set on the unsharded view

    model.register_forward_pre_hook(look)
    model(vectors(0, 2))
    assert (model.up.weight.lr_scale, model.up.weight.noted) == (0.5, True)
    del model.up.weight.lr_scale
    with flatshard.summon_full_params(model):
        assert not hasattr(model.up.weight, "lr_scale")


@ranks(1, 3)
def test_gradients_from_before_sharding_are_kept(ctx):
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        x, weights = vectors(0, 2).double(), {"w": torch.randn(7, WIDTH).double().t(), "v": torch.randn(7).double()}
        plain = Apply(lambda x, w, v: (x @ w) @ v, **weights)
        model = copy.deepcopy(plain)
        for each in (plain, model):
            each(x).sum().backward()
            each.v.grad = None
        shard_with(None, strategy, model, ctx.group)
        assert model.v.grad is None
        assert model.w.grad.shape == model.w.shape
        for each in (plain, model):
            each(x).square().sum().backward()
        check_same_gradients(model, plain)


@ranks(2)
def test_sparse_gradients_are_refused(ctx):
    model = nn.Sequential(nn.Embedding(11, WIDTH, sparse=True), nn.Linear(WIDTH, 3))
    with pytest.raises(
        ValueError, match=r"'0.weight' is that of an Embedding with sparse=True.*sparse = False.*ignored_states"
    ):
        fully_shard(model, policy={nn.Linear}, process_group=ctx.group)
    other = copy.deepcopy(model)
    fully_shard(other, policy={nn.Linear}, process_group=ctx.group, ignored_states=[other[0].weight])
    other(torch.tensor([1, 2])).sum().backward()
    model[0].sparse = False
    fully_shard(model, policy={nn.Embedding}, process_group=ctx.group)
    model[0].sparse = True  # too late, like a function's argument
    with pytest.raises(RuntimeError, match=r"gradient of '0.weight' is sparse.*sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()
    model[0].sparse = False
    model.zero_grad()
    model(torch.tensor([1, 2])).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@ranks(2)
def test_a_parameter_tied_after_sharding(ctx):
    """A tied parameter may replace another parameter or None, or have a new name."""
    x = torch.ones(1, 4)
    for policy, strategy in all_pairs((None, {nn.Linear}), STRATEGIES):
        ctx.note(f"{policy} {strategy.name}")
        norm = nn.LayerNorm(4, elementwise_affine=False)  # its weight is registered as None
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), norm))
        expected = model(x).detach()
        fully_shard(model, policy=policy, process_group=ctx.group, strategy=strategy)
        own = model[0].weight
        outside = nn.ParameterList([own, model[1][0].bias])  # like those of an optimizer or an average of the weights
        for module, name, why in (
            (model[1][0], "weight", r"'weight' of a Linear in unit .* replaced by '(0\.)?weight'"),
            (norm, "weight", r"'1\.1\.weight' was registered after .* is the sharded .* '0\.weight': .*before fully"),
            (norm, "new", r"'1\.1\.new' was registered after .* is the sharded .* '0\.weight': .*before fully"),
        ):
            before = getattr(module, name, None)
            setattr(module, name, own)
            for _ in range(2):
                with pytest.raises(RuntimeError, match=why):
                    model(x)
            setattr(module, name, before)
            assert torch.equal(model(x), expected)
        assert outside[0] is own


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    model(torch.full((1, 4), 1.0 + rank)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@ranks(2)
def test_parameters_added_after_sharding(ctx):
    """An optimizer's step and check_replicas report parameters added after fully_shard, unless they are ignored."""
    for copied in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model, policy={nn.Linear}, process_group=ctx.group, ignored_states=[model[1]])
        model = copy.deepcopy(model) if copied else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, ctx.rank)
        model[2].add_module("adapter", nn.Linear(4, 4))
        model[2].register_forward_hook(lambda module, args, output: module.adapter(output))
        flatshard.debug.check_replicas(model)  # equal so far
        optimizer.add_param_group({"params": model[2].adapter.parameters()})
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"SGD steps '2.adapter.weight', '2.adapter.bias', registered"):
                train(model, optimizer, ctx.rank)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        with torch.no_grad():
            model[2].adapter.weight.add_(ctx.rank)
        with pytest.raises(RuntimeError, match=r"1 of 2 values: '2.adapter.weight' .* averages the gradients of"):
            flatshard.debug.check_replicas(model)
