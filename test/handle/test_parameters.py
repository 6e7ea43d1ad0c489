"""Every kind of parameter, trained sharded and in one process: shared, frozen, odd in shape, dtype, stride or class.

Parameters of the usual kinds, frozen and thawed at any time, are the fuzzer's; see also ``together/test_programs``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import ranks
from pairs import some
from parity import adamw_float32, check_parity, check_same_gradients, full_params, mean_square, shard_with
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard._composable.find import units_below
from flatshard._composable.state import Context, owner_of, unit_of
from flatshard.tensors import ShardedParameter, num_parameters

STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
WIDTH = 13  # no world size divides it, and a (WIDTH, WIDTH) weight spans the shards of all four ranks


# -- Models: from (batch, WIDTH) or from token ids to anything --------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Lm(nn.Module):
    """Embedding and head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.body = Mlp()
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


class ParentAndChild(nn.Module):
    """A parameter of this module is the weight of its child too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.child = nn.Linear(WIDTH, WIDTH)
        self.child.weight = self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.child(torch.tanh(x @ self.weight))


class Apply(nn.Module):
    """Parameters given by name, and a function of (input, those parameters by name)."""

    def __init__(self, function: Callable[..., Tensor], **params: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in params.items():
            trainable = value.is_floating_point() or value.is_complex()
            param = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=trainable)
            self.register_parameter(name, param)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **self._parameters)


class TwoHalves(nn.Module):
    """Whose halves may be called on their own."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = Mlp(), Mlp()
        if tied:
            self.decoder.down.weight = self.encoder.down.weight
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x) * self.scale)


class MixedDtypes(nn.Module):
    """float32 and float64 train in one unit, beside frozen bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(WIDTH, WIDTH, dtype=torch.float32)
        self.high = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.tanh(self.low(x.float())) + self.frozen(x.bfloat16()).float()
        return self.high(low.double())


class Attention(nn.Module):
    """Without gradients and in eval, both of these go torch's fast path, past the forwards of the modules inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 10)
        self.attention = nn.MultiheadAttention(10, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(10, 2, 9, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).unflatten(1, (1, 10)).expand(-1, 3, -1).cumsum(1)
        return self.encoder(x + self.attention(x, x, x, need_weights=False)[0])


class Lstm(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(WIDTH, 5, batch_first=True, bidirectional=True, proj_size=3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.stack([x, x.flip(1)], 1))[0].sum(1)


def vectors(step: int, n: int) -> Tensor:
    return torch.randn(n, WIDTH)


def tokens(step: int, n: int) -> Tensor:
    return torch.randint(11, (n, 5))


def images(step: int, n: int) -> Tensor:
    return torch.randn(n, 3, 5, 5)


def two_names() -> nn.Module:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
    return nn.Sequential(Apply(lambda x, a, b: torch.tanh(x @ a) @ b, a=weight, b=weight), Mlp())


def few_elements() -> nn.Module:
    few = Apply(lambda x, a, b, c: x * a + b[0] * b[1] + c.sum(), a=torch.rand(1), b=torch.rand(2), c=torch.rand(3))
    return nn.Sequential(few, nn.LayerNorm(WIDTH))


def scalars() -> nn.Module:
    return Apply(lambda x, a, b, w: (x @ w) * a + b, a=torch.tensor(1.5), b=torch.tensor(0.5), w=torch.rand(WIDTH, 3))


def empties() -> nn.Module:
    empty = {"none": torch.empty(0), "flat": torch.empty(3, 0)}
    return Apply(lambda x, none, flat, w: x @ w + none.sum() + flat.sum(), **empty, w=torch.randn(WIDTH, WIDTH))


def only_empties() -> nn.Module:
    """The first unit holds no element at all."""
    first = Apply(lambda x, none: x + none.sum(), none=torch.empty(0))
    return nn.Sequential(first, nn.Linear(WIDTH, WIDTH))


def transposed() -> nn.Module:
    weights = torch.randn(7, WIDTH, 3)
    return Apply(lambda x, w, v: torch.tanh(x @ w) @ v.sum(1), w=torch.randn(7, WIDTH).t(), v=weights.permute(0, 2, 1))


def convolution() -> nn.Module:
    conv = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 5, 3))
    return conv.to(memory_format=torch.channels_last)


def integers() -> nn.Module:
    codes, mask = torch.randint(-(2**40), 2**40, (WIDTH,)) // 2**39, torch.rand(WIDTH) > 0.3
    return Apply(lambda x, codes, mask, w: (x * mask * codes) @ w, codes=codes, mask=mask, w=torch.randn(WIDTH, 3))


def parametrized(parametrize: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(parametrize(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), parametrize(nn.Linear(WIDTH, 7)))


def weight_norm(linear: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning, match="deprecated"):
        return nn.utils.weight_norm(linear)


# -- Parity -----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One model, trained under each of the policies. ``options``: further arguments of ``check_parity``."""

    model: Callable[[], nn.Module]
    policies: Sequence[Any] = (None, {nn.Linear})
    inputs: Callable[[int, int], Any] = vectors
    options: dict[str, Any] = {}  # noqa: RUF012


DTYPES = {"oracle": "slices", "optimizer": adamw_float32, "rtol": 1e-5}
CASES = {
    "tied embedding and head": Case(Lm, [None, {Mlp}, {nn.Embedding}, {nn.Embedding, nn.Linear}], tokens),
    "zeroed in place": Case(Lm, [{nn.Linear}], tokens, {"set_to_none": False}),
    "shared by parent and child": Case(ParentAndChild, [None, {ParentAndChild, nn.Linear}]),
    "one parameter, two names": Case(two_names, [None, {Apply}]),
    "several dtypes": Case(MixedDtypes, options=DTYPES),
    "0-dim": Case(scalars, [None]),
    "empty": Case(empties, [None]),
    "a unit of empty parameters": Case(only_empties, [None, {Apply}]),
    "transposed": Case(transposed, [None]),
    "channels last": Case(convolution, [None, {nn.Conv2d}], images),
    "fewer elements than ranks": Case(few_elements, [None, {Apply, nn.LayerNorm}]),
    "frozen int64 and bool": Case(lambda: nn.Sequential(integers(), nn.Linear(3, 3)), [None, {Apply}]),
    "LSTM": Case(Lstm, [None]),
    "weight_norm": Case(lambda: parametrized(parametrizations.weight_norm)),
    "spectral_norm": Case(lambda: parametrized(parametrizations.spectral_norm)),
    "orthogonal": Case(lambda: parametrized(parametrizations.orthogonal)),
    "old weight_norm": Case(lambda: parametrized(weight_norm)),
    "old spectral_norm": Case(lambda: parametrized(nn.utils.spectral_norm)),
    "attention": Case(Attention, [None, {nn.MultiheadAttention}, {nn.TransformerEncoderLayer}, {nn.Linear}]),
}


def check(ctx: Any, case: Case, shard: Callable[..., Any], **options: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    return check_parity(ctx, case.model, case.inputs, steps=2, dtype=None, shard=shard, **case.options, **options)


def strategies(ctx: Any) -> Sequence[ShardingStrategy]:
    """All of them at one world size; they differ in what is freed when, which the number of ranks has no part in."""
    return STRATEGIES if ctx.world_size == 2 else STRATEGIES[:1]


@pytest.mark.parametrize(
    ("name", "world_size"),
    [(name, 3) for name in CASES] + some([(name, (1, 2, 4)[k % 3]) for k, name in enumerate(CASES)], 8),
)
@ranks()
def test_trains_as_in_one_process(ctx, name: str) -> None:
    for strategy, policy in itertools.product(strategies(ctx), CASES[name].policies):
        ctx.note(f"{strategy.name}, policy {policy}")
        replicated = strategy is ShardingStrategy.NO_SHARD or ctx.world_size == 1
        check(ctx, CASES[name], functools.partial(shard_with, policy, strategy), replicated=replicated)


@ranks(2)
def test_fast_paths_of_attention(ctx):
    torch.manual_seed(0)
    plain = Attention().double().eval()
    x = torch.randn(2, WIDTH).double()
    paths = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")
    for policy in CASES["attention"].policies:
        model = fully_shard(copy.deepcopy(plain), policy=policy, process_group=ctx.group)
        assert unit_of(model.attention.out_proj) is None
        for guard in (torch.no_grad, torch.inference_mode):
            with guard(), contextlib.ExitStack() as stack:
                attend, layer = (
                    stack.enter_context(mock.patch.object(torch, p, wraps=getattr(torch, p))) for p in paths
                )
                expected = plain(x)
                assert (attend.call_count, layer.call_count) == (1, 1)
                torch.testing.assert_close(model(x), expected)
                # The layer looks for hooks on all its modules, ours included, and then calls its parts one by one.
                assert layer.call_count == 1 + (policy is None)
                assert attend.call_count > 1
    with pytest.raises(ValueError, match=r"out_proj of an nn\.MultiheadAttention.*Shard the MultiheadAttention"):
        fully_shard(plain.attention.out_proj, process_group=ctx.group)


@ranks(1, 3)
def test_a_tied_parameter_that_an_earlier_call_sharded(ctx) -> None:
    def shard(parts: tuple[str, ...], policy: Any, model: nn.Module, group: Any) -> None:
        for part in parts:
            fully_shard(model.get_submodule(part), policy=policy if not part else None, process_group=group)

    ways = [(("embed", "head", "body"), None), *[(("embed", ""), policy) for policy in (None, {nn.Linear}, {Mlp})]]
    for parts, policy in ways:
        ctx.note(f"{parts}, policy {policy}")
        model = check(ctx, Case(Lm, inputs=tokens), functools.partial(shard, parts, policy)).sharded
        assert owner_of(model.embed.weight) is unit_of(model.embed)
        assert model.head.weight is model.embed.weight


LOSSES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "one half": lambda model, x: mean_square(model.encoder(x), x),
    "both halves": lambda model, x: mean_square(model.decoder(torch.tanh(model.encoder(x))), x),
    "half and whole": lambda model, x: mean_square(model.decoder(x), x) + mean_square(model(x), x),
    "piece by piece": lambda model, ids: mean_square(model.head(model.body(model.embed(ids))), ids),
}


@ranks(1, 3)
def test_units_called_on_their_own(ctx) -> None:
    def train(loss_fn: Callable[..., Tensor], model: nn.Module, x: Tensor, scale: float) -> Tensor:
        loss = loss_fn(model, x)
        (loss * scale).backward()
        return loss.detach()

    # In the first two, embedding and head own no parameter.
    cases = [("piece by piece", Lm, policy) for policy in ({nn.Embedding, nn.Linear}, {nn.Embedding, Mlp, nn.Linear})]
    cases += [(name, functools.partial(TwoHalves, tied), {Mlp}) for tied in (False, True) for name in [*LOSSES][:3]]
    for (name, make, policy), strategy in itertools.product(cases, strategies(ctx)):
        ctx.note(f"{name}, {make}, {policy}, {strategy.name}")
        case = Case(make, inputs=tokens if make is Lm else vectors)
        step = functools.partial(train, LOSSES[name])
        check(ctx, case, functools.partial(shard_with, policy, strategy), train=step)


@ranks(1, 2, 4)
def test_expanded_and_sliced_parameters(ctx) -> None:
    def model(dense: bool) -> nn.Module:
        torch.manual_seed(3)
        params = {"w": torch.randn(1, WIDTH).expand(WIDTH, WIDTH), "v": torch.randn(WIDTH, 3 * WIDTH)[:, ::3]}
        if dense:
            params = {name: p.contiguous() for name, p in params.items()}
        return Apply(lambda x, w, v: torch.tanh(x @ (w * v)) @ v, **params)

    torch.set_default_dtype(torch.float64)
    models = iter([model(dense=True), model(dense=False)])  # a plain optimizer refuses an expanded parameter
    run = check(ctx, Case(lambda: next(models)), functools.partial(shard_with, None, STRATEGIES[0]))
    assert full_params(run.sharded)["w"].is_contiguous()


@ranks(1, 2)
def test_forward_sees_original_shapes_and_strides(ctx):
    model = nn.Sequential(convolution(), nn.Flatten())
    model.append(Apply(lambda x, w: x @ w, w=torch.randn(3, 5).t()))
    seen: dict[str, tuple[Any, ...]] = {}

    def look(module: nn.Module, *args: Any):
        for name, param in module.named_parameters(recurse=False):
            seen[f"{id(module)}.{name}"] = (tuple(param.shape), param.stride(), param.requires_grad, type(param))

    for module in model.modules():
        module.register_forward_pre_hook(look)
    model(images(0, 2))
    before = dict(seen)
    seen.clear()
    fully_shard(model, policy={nn.Conv2d}, process_group=ctx.group)
    model(images(0, 2)).sum().backward()
    assert len(seen) == 5
    assert seen == before


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 4)
        self.unused = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.fixed = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64), requires_grad=False)
        self.real = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.real(x).to(torch.complex128) @ self.weight * self.fixed.to(torch.complex128)).abs()


@ranks(1, 3)
def test_complex_parameters(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        plain = Complex()
        model = shard_with(None, strategy, copy.deepcopy(plain), ctx.group)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
        for step in range(3):
            x = vectors(step, 2 * ctx.world_size)
            plain(x).square().mean().backward()
            model(x[2 * ctx.rank :][:2]).square().mean().backward()
            check_same_gradients(model, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, value in full_params(model).items():
            torch.testing.assert_close(value, plain.get_parameter(name).detach(), rtol=1e-9, atol=1e-12, msg=name)


# -- The Parameter objects --------------------------------------------------------------------------------------------


def registered(model: nn.Module) -> tuple[Any, ...]:
    """Names, their order, classes and objects."""
    params = [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)]
    modules = [(n, id(m), type(m)) for n, m in model.named_modules()]
    return params, modules, [(n, id(b)) for n, b in model.named_buffers()]


@ranks(4)
def test_names_order_classes_and_objects_survive(ctx):
    for strategy in STRATEGIES:
        ctx.note(strategy.name)
        model = nn.Sequential(Lm(), nn.Conv1d(3, 5, 2), nn.BatchNorm1d(5), empties(), scalars())
        before, params = registered(model), dict(model.named_parameters())
        values = {name: p.detach().clone() for name, p in params.items()}
        policy = {nn.Linear, nn.Conv1d}
        assert fully_shard(model, policy=policy, strategy=strategy, process_group=ctx.group) is model
        assert registered(model) == before
        for name, param in params.items():
            assert isinstance(param, ShardedParameter)
            assert param.is_leaf
            assert flatshard.full_shape(param) == values[name].shape
            assert type(flatshard.full_shape(param)) is torch.Size
            info = param._flatshard_info
            mine = values[name].reshape(-1)[info.start : info.stop]
            assert torch.equal(param.detach().reshape(-1), mine)
            assert param.shape == (values[name].shape if strategy is ShardingStrategy.NO_SHARD else mine.shape)
        if strategy is not ShardingStrategy.NO_SHARD:
            total = torch.tensor([p.numel() for p in params.values()])
            dist.all_reduce(total, group=ctx.group)
            assert total.tolist() == [v.numel() for v in values.values()]
    assert flatshard.full_shape(torch.zeros(2, 3)) == (2, 3)
    model = fully_shard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), process_group=ctx.group)
    model[0].weight.requires_grad_(False)
    assert num_parameters(model) == 15 + 5 + 10 + 2
    assert num_parameters(model, trainable_only=True) == 5 + 10 + 2
    with flatshard.summon_full_params(model):
        assert num_parameters(model) == 15 + 5 + 10 + 2


@ranks(1, 2)
def test_attributes_are_seen_on_both_views(ctx):
    model = Mlp()
    model.up.weight.lr_scale = 0.5
    model.down.weight.tags = ["decay"]
    fully_shard(model, process_group=ctx.group)
    model.up.weight.group = "first"  # set on the sharded view
    seen = {}

    def look(module: nn.Module, *args: Any):
        seen.update({name: dict(vars(p)) for name, p in module.named_parameters()})
        module.up.weight.noted = True  # set on the whole view

    model.register_forward_pre_hook(look)
    model(vectors(0, 2))
    assert seen["up.weight"]["lr_scale"] == 0.5
    assert seen["up.weight"]["group"] == "first"
    assert seen["down.weight"]["tags"] is model.down.weight.tags
    assert model.up.weight.lr_scale == 0.5
    assert model.up.weight.noted is True
    del model.up.weight.lr_scale
    with flatshard.summon_full_params(model):
        assert not hasattr(model.up.weight, "lr_scale")
        assert model.down.weight.tags == ["decay"]


@ranks(1, 3)
def test_gradients_from_before_sharding_are_kept(ctx):
    torch.set_default_dtype(torch.float64)
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        plain, x = transposed(), vectors(0, 2)
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


@ranks(1, 3)
def test_ignored_states_stay_whole_with_local_gradients(ctx):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    whole = nn.Sequential(Mlp(), Mlp(), Mlp())
    model, local = copy.deepcopy(whole), copy.deepcopy(whole)
    ignored = [*model[1].parameters(), model[0].up.weight]
    before = [(p, p.data_ptr(), p.shape) for p in ignored]
    fully_shard(model, policy={Mlp}, process_group=ctx.group, ignored_states=[model[1], model[0].up.weight])
    assert [(p, p.data_ptr(), p.shape) for p in ignored] == before
    assert all(type(p) is nn.Parameter for p in ignored)
    assert len(units_below(model)) == 3  # the root and two of the blocks
    x = vectors(0, ctx.world_size)
    mine = x[ctx.rank : ctx.rank + 1]
    for other, part in ((local, mine), (whole, x), (model, mine)):
        mean_square(other(part), part).backward()
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        if type(p) is nn.Parameter:
            q.grad = local.get_parameter(name).grad
    check_same_gradients(model, whole)


@ranks(1, 2)
def test_sparse_gradients_are_refused(ctx):
    for world_policy in (None, {nn.Embedding}):
        model = nn.Sequential(nn.Embedding(11, WIDTH, sparse=True), nn.Linear(WIDTH, 3))
        fully_shard(model, policy=world_policy, process_group=ctx.group)
        with pytest.raises(RuntimeError, match=r"gradient of '0.weight' is sparse.*sparse=False"):
            model(torch.tensor([1, 2])).sum().backward()
        model[0].sparse = False
        model.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@ranks(2)
def test_a_parameter_tied_after_sharding(ctx):
    for policy in (None, {nn.Linear}):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        plain = copy.deepcopy(model)
        fully_shard(model, policy=policy, process_group=ctx.group)
        own = model[1].weight
        model[1].weight = model[0].weight
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"'weight' of a Linear in unit .* replaced by '(0\.)?weight', which is s"
            ):
                model(torch.ones(1, 4))
        model[1].weight = own
        assert torch.equal(model(torch.ones(1, 4)), plain(torch.ones(1, 4)))


class Scaled(nn.Module):
    """Multiplies by a parameter of another module, once it has been given one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.scale is None else x * self.scale.sum()


@ranks(2)
def test_a_parameter_tied_to_a_new_name_after_sharding(ctx):
    x = torch.ones(1, 4)
    for policy, strategy in itertools.product((None, {nn.Linear}), STRATEGIES):
        ctx.note(f"{policy} {strategy.name}")
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Scaled()))
        expected = copy.deepcopy(model)(x)
        fully_shard(model, policy=policy, process_group=ctx.group, strategy=strategy)
        own = model[0].weight
        outside = nn.ParameterList([own, model[1][0].bias])  # as of an optimizer, or an average of the weights
        other = fully_shard(nn.Linear(4, 4), process_group=ctx.group)
        assert torch.equal(model(x), expected)
        assert not Context.checks
        for name in ("scale", "new"):
            model[1][1].register_parameter(name, own)
            other(x)
            for _ in range(2):
                with pytest.raises(
                    RuntimeError,
                    match=rf"'1\.1\.{name}' was registered after .* is the sharded parameter '0\.weight': .*before fully_s",
                ):
                    model(x)
            setattr(model[1][1], name, None)
            assert torch.equal(model(x), expected)
            assert not Context.checks
        model[0].weight = own  # where it was
        assert torch.equal(model(x), expected)
        assert not Context.checks
        assert outside[0] is own


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    model(torch.full((1, 4), 1.0 + rank)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@ranks(2)
def test_parameters_added_after_sharding(ctx):
    """What came after fully_shard is told when an optimizer steps it, and by check_replicas; what was ignored is not."""
    torch.manual_seed(0)
    for copied in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].register_parameter("own", nn.Parameter(torch.ones(4)))
        ignored = [model[0].own, model[1]]
        fully_shard(model, policy={nn.Linear}, process_group=ctx.group, ignored_states=ignored)
        if copied:
            model = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with pytest.raises(ValueError, match="nothing to compare"):
                flatshard.debug.check_replicas(model)
            train(model, optimizer, ctx.rank)
        model[2].add_module("adapter", nn.Linear(4, 4))
        model[2].register_forward_hook(lambda module, args, output: module.adapter(output))
        flatshard.debug.check_replicas(model)  # equal as yet
        optimizer.add_param_group({"params": model[2].adapter.parameters()})
        before = [p.detach().clone() for p in model.parameters()]
        adapter = "'2.adapter.weight', '2.adapter.bias'"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"SGD steps {adapter}, registered .* after"):
                train(model, optimizer, ctx.rank)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        with torch.no_grad():
            model[2].adapter.weight.add_(ctx.rank)
        message = r"1 of 2 values: '2.adapter.weight' .* averages the gradients of '2.adap"
        with pytest.raises(RuntimeError, match=message):
            flatshard.debug.check_replicas(model)


class Adapter(nn.Module):
    """Takes the place of a layer, as peft's do."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


@ranks(2)
def test_adapters_added_after_sharding(ctx):
    """Around units, in a root unit that has no parameter of its own; an optimizer of nothing else."""
    for cure in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
        fully_shard(model, policy={nn.Linear}, process_group=ctx.group).requires_grad_(False)
        model[1][0] = adapter = Adapter(model[1][0])
        for each in (adapter.a, adapter.b) if cure else ():
            fully_shard(each, process_group=ctx.group)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        message = r"SGD steps '1.0.[ab].weight', '1.0.[ab].weight', registered .* fully_shard"
        with contextlib.nullcontext() if cure else pytest.raises(RuntimeError, match=message):
            train(model, optimizer, ctx.rank)
