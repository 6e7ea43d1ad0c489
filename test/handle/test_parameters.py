"""Every kind of parameter, trained sharded and in one process: shared, frozen, odd in shape, dtype, stride or class."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clean import storage_nbytes
from pairs import some
from parity import adamw, adamw_float32, check_parity, full_params, mean_square, sgd, shard_with
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard._composable.find import units_below
from flatshard._composable.state import Context, unit_of
from flatshard.tensors import ShardedParameter

STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
WIDTH = 13  # no world size divides it, and a (WIDTH, WIDTH) weight spans the shards of all four ranks


# ---------------------------------------------------------------------------------------------------------------------
# Models: from (batch, WIDTH) or from token ids to anything
# ---------------------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

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
        self.encoder = Mlp()
        self.decoder = Mlp()
        if tied:
            self.decoder.down.weight = self.encoder.down.weight
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x) * self.scale)


class Recurrent(nn.Module):
    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(torch.stack([x, x.flip(1)], 1))[0].sum(1)


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


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.first.bias.requires_grad_(False)
        self.second.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def vectors(step: int, n: int) -> Tensor:
    return torch.randn(n, WIDTH)


def tokens(step: int, n: int) -> Tensor:
    return torch.randint(11, (n, 5))


def images(step: int, n: int) -> Tensor:
    return torch.randn(n, 3, 5, 5)


def shared_within() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    return model


def two_names() -> nn.Module:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
    return Apply(lambda x, a, b: torch.tanh(x @ a) @ b, a=weight, b=weight)


def few_elements() -> nn.Module:
    return nn.Sequential(
        Apply(lambda x, a, b, c: x * a + b[0] * b[1] + c.sum(), a=torch.rand(1), b=torch.rand(2), c=torch.rand(3)),
        nn.LayerNorm(WIDTH),
    )


def scalars() -> nn.Module:
    return Apply(lambda x, a, b, w: (x @ w) * a + b, a=torch.tensor(1.5), b=torch.tensor(0.5), w=torch.rand(WIDTH, 3))


def empties() -> nn.Module:
    return Apply(
        lambda x, none, flat, w: x @ w + none.sum() + flat.sum(),
        none=torch.empty(0),
        flat=torch.empty(3, 0),
        w=torch.randn(WIDTH, WIDTH),
    )


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
    return Apply(
        lambda x, codes, mask, w: (x * mask * codes) @ w,
        codes=torch.randint(-(2**40), 2**40, (WIDTH,)) // 2**39,
        mask=torch.rand(WIDTH) > 0.3,
        w=torch.randn(WIDTH, WIDTH),
    )


def parametrized(parametrize: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(parametrize(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), parametrize(nn.Linear(WIDTH, 7)))


def weight_norm(linear: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning, match="deprecated"):
        return nn.utils.weight_norm(linear)


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


def rnn(kind: type[nn.RNNBase], **options: Any) -> Callable[[], nn.Module]:
    return lambda: Recurrent(kind(WIDTH, 5, batch_first=True, **options))


# ---------------------------------------------------------------------------------------------------------------------
# Parity
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, trained under each of the policies."""

    model: Callable[[], nn.Module]
    policies: Sequence[Any] = (None,)
    inputs: Callable[[int, int], Any] = vectors
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of ``check_parity``."""


CASES = {
    "shared within a unit": Case(shared_within),
    "shared by siblings": Case(shared_within, [{nn.Linear}]),
    "tied embedding and head": Case(Lm, [None, {Mlp}, {nn.Embedding}, {nn.Embedding, nn.Linear}], tokens),
    "shared by parent and child": Case(
        lambda: nn.Sequential(ParentAndChild(), nn.Linear(WIDTH, 5)), [{ParentAndChild}, {ParentAndChild, nn.Linear}]
    ),
    "one parameter, two names": Case(lambda: nn.Sequential(two_names(), Mlp()), [None, {Apply}]),
    "several dtypes": Case(
        MixedDtypes, [None, {nn.Linear}], options={"oracle": "slices", "optimizer": adamw_float32, "rtol": 1e-5}
    ),
    "partly frozen": Case(lambda: nn.Sequential(PartlyFrozen(), PartlyFrozen()), [None, {PartlyFrozen}, {nn.Linear}]),
    "0-dim": Case(scalars),
    "empty": Case(empties),
    "a unit of empty parameters": Case(only_empties, [None, {Apply}]),
    "transposed": Case(transposed),
    "channels last": Case(convolution, [None, {nn.Conv2d}], images),
    "fewer elements than ranks": Case(few_elements, [None, {Apply, nn.LayerNorm}]),
    "frozen int64 and bool": Case(lambda: nn.Sequential(integers(), nn.Linear(WIDTH, 3)), [None, {Apply}]),
    "RNN": Case(rnn(nn.RNN, num_layers=2), [None, {nn.RNN}]),
    "LSTM": Case(rnn(nn.LSTM, bidirectional=True, proj_size=3), [None, {nn.LSTM}]),
    "GRU": Case(rnn(nn.GRU, bias=False), [None, {nn.GRU}]),
    "weight_norm": Case(lambda: parametrized(parametrizations.weight_norm), [None, {nn.Linear}]),
    "spectral_norm": Case(lambda: parametrized(parametrizations.spectral_norm), [None, {nn.Linear}]),
    "orthogonal": Case(lambda: parametrized(parametrizations.orthogonal), [None, {nn.Linear}]),
    "old weight_norm": Case(lambda: parametrized(weight_norm), [None, {nn.Linear}]),
    "old spectral_norm": Case(lambda: parametrized(nn.utils.spectral_norm), [None, {nn.Linear}]),
    "attention": Case(Attention, [None, {nn.MultiheadAttention}, {nn.TransformerEncoderLayer}, {nn.Linear}]),
}


def strategies(ctx: Any) -> Sequence[ShardingStrategy]:
    """All of them at one world size; they differ in what is freed when, which the number of ranks has no part in."""
    return STRATEGIES if ctx.world_size == 2 else STRATEGIES[:1]


def train_case(ctx, name: str) -> None:
    torch.set_default_dtype(torch.float64)
    case = CASES[name]
    for strategy in strategies(ctx):
        for policy in case.policies:
            ctx.note(f"{strategy.name}, policy {policy}")
            check_parity(
                ctx,
                case.model,
                case.inputs,
                steps=2,
                dtype=None,
                shard=functools.partial(shard_with, policy, strategy),
                replicated=strategy is ShardingStrategy.NO_SHARD or ctx.world_size == 1,
                **case.options,
            )


@pytest.mark.parametrize(
    ("name", "world_size"),
    [(name, 3) for name in CASES] + some([(name, (1, 2, 4)[k % 3]) for k, name in enumerate(CASES)], 10),
)
def test_trains_as_in_one_process(pool, name, world_size):
    pool.run(train_case, name, world_size=world_size)


SINGLE_PRECISION: dict[str, dict[str, Any]] = {
    # Each forward moves the power iteration on: the reference must run as many as a rank does.
    "spectral_norm": {"oracle": "batch"},
    "old spectral_norm": {"oracle": "batch"},
    # Behind a LayerNorm: the gradients of the mean square of its output cancel.
    "attention": {"rtol": 1e-5},
    # Normalising over three elements amplifies rounding beyond the tolerance; in float64 it holds 1e-9 as all others do.
    "fewer elements than ranks": {"rtol": 5e-5},
}


def attend_fast(ctx) -> None:
    torch.manual_seed(0)
    plain = Attention().double().eval()
    x = torch.randn(2, WIDTH).double()
    for policy in CASES["attention"].policies:
        model = fully_shard(copy.deepcopy(plain), policy=policy, process_group=ctx.group)
        assert unit_of(model.attention.out_proj) is None
        for guard in (torch.no_grad, torch.inference_mode):
            with guard(), contextlib.ExitStack() as stack:
                calls: list[Any] = []
                stack.enter_context(counted(torch, "_native_multi_head_attention", calls))
                stack.enter_context(counted(torch, "_transformer_encoder_layer_fwd", calls))
                expected = plain(x)
                assert calls == ["_native_multi_head_attention", "_transformer_encoder_layer_fwd"]
                torch.testing.assert_close(model(x), expected)
                # The layer looks for hooks on all its modules, ours included, and then calls its parts one by one.
                assert calls[2:].count("_transformer_encoder_layer_fwd") == (policy is None)
                assert "_native_multi_head_attention" in calls[2:]
    with pytest.raises(ValueError, match=r"out_proj of an nn\.MultiheadAttention.*Shard the MultiheadAttention"):
        fully_shard(plain.attention.out_proj, process_group=ctx.group)


@contextlib.contextmanager
def counted(owner: Any, name: str, calls: list[str]) -> Iterator[None]:
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, function)


def test_fast_paths_of_attention(pool):
    pool.run(attend_fast, world_size=2)


def train_in_single_precision(ctx, names: list[str]) -> None:
    for name in names:
        case = CASES[name]
        ctx.note(name)
        options = {"oracle": "slices", "rtol": 1e-6, **SINGLE_PRECISION.get(name, {})}
        check_parity(
            ctx,
            case.model,
            case.inputs,
            steps=10,
            dtype=None,
            optimizer=adamw_float32,
            shard=functools.partial(shard_with, case.policies[-1], ShardingStrategy.FULL_SHARD),
            replicated=ctx.world_size == 1,
            **options,
        )


def test_ten_steps_in_single_precision(pool):
    """Kinds of parameters, 10 AdamW steps in float32, within 1e-6 of one process."""
    names = [name for name in CASES if name != "several dtypes"]  # which is in single precision above already
    pool.run(train_in_single_precision, some(names, 8), world_size=3)


def train_manually_nested(ctx) -> None:
    torch.set_default_dtype(torch.float64)

    def shard(outer_policy: Any, model: nn.Module, group: Any) -> None:
        fully_shard(model.embed, process_group=group)
        fully_shard(model, policy=outer_policy, process_group=group)

    def shard_siblings(model: nn.Module, group: Any) -> None:
        fully_shard(model.embed, process_group=group)
        fully_shard(model.head, process_group=group)
        fully_shard(model.body, process_group=group)

    check_parity(ctx, Lm, tokens, steps=3, dtype=None, shard=shard_siblings)
    for policy in (None, {nn.Linear}, {Mlp}):
        ctx.note(f"policy {policy}")
        run = check_parity(ctx, Lm, tokens, steps=3, dtype=None, shard=functools.partial(shard, policy))
        owners = [u.fqn for u in units_below(run.sharded) if _owns(u, run.sharded.embed.weight)]
        assert len(owners) == 1
        assert run.sharded.head.weight is run.sharded.embed.weight


def _owns(unit: Any, param: Tensor) -> bool:
    return any(p is param for b in unit.handle.flats for p in b.params)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_tied_parameter_that_an_earlier_call_sharded(pool, world_size):
    pool.run(train_manually_nested, world_size=world_size)


def find_owner(ctx) -> None:
    model = fully_shard(Lm(), policy={nn.Embedding, nn.Linear}, process_group=ctx.group)
    owners = [u.fqn for u in units_below(model) if _owns(u, model.embed.weight)]
    assert owners == [""]  # H1: the lowest common ancestor, once
    model = fully_shard(nn.Sequential(ParentAndChild(), nn.Tanh()), policy={ParentAndChild, nn.Linear})
    owners = [u.fqn for u in units_below(model) if _owns(u, model[0].weight)]
    assert owners == ["0"]  # H2: the parent
    model = Lm()
    fully_shard(model.embed, process_group=ctx.group)
    fully_shard(model.head, process_group=ctx.group)  # uses the embedding's
    owners = [u.fqn for m in (model.embed, model.head) for u in units_below(m) if _owns(u, model.embed.weight)]
    assert len(owners) == 1


def test_who_owns_a_shared_parameter(pool):
    pool.run(find_owner, world_size=4)


def train_sharing(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    for to_none in (True, False):  # H3
        shard = functools.partial(shard_with, {nn.Embedding, nn.Linear}, STRATEGIES[0])
        check_parity(ctx, Lm, tokens, steps=4, dtype=None, optimizer=sgd, shard=shard, set_to_none=to_none)


def test_sharing_with_either_zero_grad(pool):
    pool.run(train_sharing, world_size=2)


def train_standalone(ctx) -> None:
    torch.set_default_dtype(torch.float64)

    def one_half(model: nn.Module, x: Tensor, scale: float) -> Tensor:
        loss = mean_square(model.encoder(x), x)
        (loss * scale).backward()
        return loss.detach()

    def both_halves(model: nn.Module, x: Tensor, scale: float) -> Tensor:
        loss = mean_square(model.decoder(torch.tanh(model.encoder(x))), x)
        (loss * scale).backward()
        return loss.detach()

    def half_and_whole(model: nn.Module, x: Tensor, scale: float) -> Tensor:
        loss = mean_square(model.decoder(x), x) + mean_square(model(x), x)
        (loss * scale).backward()
        return loss.detach()

    def piece_by_piece(model: nn.Module, ids: Tensor, scale: float) -> Tensor:
        loss = mean_square(model.head(model.body(model.embed(ids))), ids)
        (loss * scale).backward()
        return loss.detach()

    for policy in ({nn.Embedding, nn.Linear}, {nn.Embedding, Mlp, nn.Linear}):  # embedding and head own no parameter
        ctx.note(f"policy {policy}")
        shard = functools.partial(shard_with, policy, STRATEGIES[0])
        check_parity(ctx, Lm, tokens, steps=2, dtype=None, shard=shard, train=piece_by_piece)
    for tied in (False, True):
        for strategy in strategies(ctx):
            for train in (one_half, both_halves, half_and_whole):
                ctx.note(f"{'tied' if tied else 'not tied'}, {strategy.name}, {train.__name__}")
                check_parity(
                    ctx,
                    functools.partial(TwoHalves, tied),
                    vectors,
                    steps=2,
                    dtype=None,
                    shard=functools.partial(shard_with, {Mlp}, strategy),
                    train=train,
                )


@pytest.mark.parametrize("world_size", [1, 3])
def test_units_called_on_their_own(pool, world_size):
    pool.run(train_standalone, world_size=world_size)


def train_not_dense(ctx) -> None:
    torch.set_default_dtype(torch.float64)

    def model(dense: bool) -> nn.Module:
        torch.manual_seed(3)
        params = {"w": torch.randn(1, WIDTH).expand(WIDTH, WIDTH), "v": torch.randn(WIDTH, 3 * WIDTH)[:, ::3]}
        if dense:
            params = {name: p.contiguous() for name, p in params.items()}
        return Apply(lambda x, w, v: torch.tanh(x @ (w * v)) @ v, **params)

    models = iter([model(dense=True), model(dense=False)])  # a plain optimizer refuses an expanded parameter
    run = check_parity(ctx, lambda: next(models), vectors, steps=3, dtype=None)
    assert full_params(run.sharded)["w"].is_contiguous()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_expanded_and_sliced_parameters(pool, world_size):
    pool.run(train_not_dense, world_size=world_size)


def see_strides(ctx) -> None:
    model = nn.Sequential(convolution(), nn.Flatten())
    model.append(Apply(lambda x, w: x @ w, w=torch.randn(3, 5).t()))
    seen: dict[str, tuple[Any, ...]] = {}

    def look(module: nn.Module, *args: Any) -> None:
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


@pytest.mark.parametrize("world_size", [1, 2])
def test_forward_sees_original_shapes_and_strides(pool, world_size):
    pool.run(see_strides, world_size=world_size)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 4)
        self.unused = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.fixed = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64), requires_grad=False)
        self.real = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.real(x).to(torch.complex128) @ self.weight * self.fixed.to(torch.complex128)).abs()


def train_complex(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    for strategy in STRATEGIES:
        ctx.note(strategy.name)
        torch.manual_seed(0)
        plain, sharded = Complex(), Complex()
        sharded.load_state_dict(plain.state_dict())
        fully_shard(sharded, strategy=strategy, process_group=ctx.group)
        optimizers = [adamw(m.parameters()) for m in (plain, sharded)]
        for step in range(3):
            x = vectors(step, 2 * ctx.world_size)
            plain(x).square().mean().backward()
            sharded(x[2 * ctx.rank :][:2]).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        got = full_params(sharded)
        for name, param in plain.named_parameters():
            assert got[name].dtype == param.dtype
            torch.testing.assert_close(got[name], param.detach(), rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("world_size", [1, 3])
def test_complex_parameters(pool, world_size):
    pool.run(train_complex, world_size=world_size)


# ---------------------------------------------------------------------------------------------------------------------
# Frozen and unused parameters
# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counting_reductions(model: nn.Module):
    """The number of elements of each reduce-scatter's input, in order."""
    runtime = units_below(model)[0].context.runtime
    before, seen = runtime.collectives.reduce_scatter, []

    def count(output: Tensor, input: Tensor, *label: Any) -> Any:
        seen.append(input.numel())
        return before(output, input, *label)

    runtime.collectives.reduce_scatter = count
    try:
        yield seen
    finally:
        runtime.collectives.reduce_scatter = before


def cost_of_frozen(ctx) -> None:
    model = fully_shard(PartlyFrozen(), process_group=ctx.group)
    handle = units_below(model)[0].handle
    trainable = [p for p in model.parameters() if p.requires_grad]
    needed = sum(flatshard.full_shape(p).numel() for p in trainable)
    largest: dict[int, int] = {}

    def look(*args: Any) -> None:
        for index, grads in enumerate(f.gradients for f in handle.flats):
            size = storage_nbytes(grads.input)
            largest[index] = max(largest.get(index, 0), size)

    for param in [c for b in handle.flats for c in b.unsharded.params if c.requires_grad]:
        param.register_hook(look)
    with counting_reductions(model) as reductions:
        for step in range(2):
            model(vectors(step, 2)).sum().backward()
    frozen = [index for index, b in enumerate(handle.flats) if not b.params[0].requires_grad]
    assert len(frozen) == 1
    assert largest[frozen[0]] == 0
    assert len(reductions) == 2
    slack = handle.flats[0].layout.world_size * 32 + len(trainable) * 4  # alignment, in elements
    assert needed <= reductions[0] <= needed + slack
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert all(storage_nbytes(f.gradients.input) == 0 for f in handle.flats)


@pytest.mark.parametrize("world_size", [2, 4])
def test_frozen_parameters_cost_no_gradient_memory_and_no_traffic(pool, world_size):
    pool.run(cost_of_frozen, world_size=world_size)


def all_frozen(ctx) -> None:
    """A frozen unit between trainable ones passes gradients on, and reduces nothing."""
    torch.set_default_dtype(torch.float64)

    def model() -> nn.Module:
        result = nn.Sequential(Mlp(), Mlp(), Mlp())
        result[1].requires_grad_(False)
        return result

    for strategy in STRATEGIES:
        ctx.note(strategy.name)
        run = check_parity(
            ctx, model, vectors, steps=2, dtype=None, shard=functools.partial(shard_with, {Mlp}, strategy)
        )
        with counting_reductions(run.sharded) as reductions:
            run.sharded(vectors(0, 1)).sum().backward()
        assert len(reductions) == (0 if strategy is ShardingStrategy.NO_SHARD else 2)


def test_a_frozen_unit(pool):
    pool.run(all_frozen, world_size=2)


def toggle(ctx) -> None:
    torch.set_default_dtype(torch.float64)

    def one(model: nn.Module, step: int) -> None:
        model[0].up.weight.requires_grad_(step % 2 == 0)
        model[1].down.bias.requires_grad_(step % 3 != 1)

    def unit(model: nn.Module, step: int) -> None:
        model[1].requires_grad_(step % 2 == 1)

    def inverse(model: nn.Module, step: int) -> None:
        for index, param in enumerate(model.parameters()):
            param.requires_grad_((index + step) % 2 == 0)

    for strategy in strategies(ctx):
        for change in (one, unit, inverse):
            for policy in (None, {Mlp}):
                ctx.note(f"{strategy.name}, {change.__name__}, policy {policy}")
                check_parity(
                    ctx,
                    lambda: nn.Sequential(Mlp(), Mlp(), Mlp()),
                    vectors,
                    steps=4,
                    dtype=None,
                    shard=functools.partial(shard_with, policy, strategy),
                    before_step=change,
                )


@pytest.mark.parametrize("world_size", [1, 3])
def test_freezing_and_unfreezing_between_steps(pool, world_size):
    pool.run(toggle, world_size=world_size)


def toggle_inside(ctx) -> None:
    """As in plain PyTorch: a parameter frozen after forward gets no gradient; one unfrozen then was not recorded."""
    torch.set_default_dtype(torch.float64)

    def train(freeze: bool, model: nn.Module, x: Tensor, scale: float) -> Tensor:
        param = model[0].down.weight
        param.requires_grad_(freeze)
        loss = mean_square(model(x), x)
        param.requires_grad_(not freeze)
        (loss * scale).backward()
        param.requires_grad_(True)
        return loss.detach()

    for freeze in (True, False):
        for policy in (None, {Mlp}):
            for strategy in strategies(ctx):
                ctx.note(f"{'freeze' if freeze else 'unfreeze'}, policy {policy}, {strategy.name}")
                check_parity(
                    ctx,
                    lambda: nn.Sequential(Mlp(), Mlp()),
                    vectors,
                    steps=2,
                    dtype=None,
                    shard=functools.partial(shard_with, policy, strategy),
                    train=functools.partial(train, freeze),
                )


@pytest.mark.parametrize("world_size", [1, 2])
def test_freezing_and_unfreezing_between_forward_and_backward(pool, world_size):
    pool.run(toggle_inside, world_size=world_size)


class Experts(nn.Module):
    """Uses the experts that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp() for _ in range(3))
        self.spare = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        for index in used:
            x = x + self.experts[index](x)
        return x


def train_partly_unused(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    for strategy in STRATEGIES:
        ctx.note(strategy.name)
        torch.manual_seed(0)
        plain, sharded = Experts(), Experts()
        sharded.load_state_dict(plain.state_dict())
        fully_shard(sharded, strategy=strategy, process_group=ctx.group)
        optimizers = [adamw(m.parameters()) for m in (plain, sharded)]
        for step in range(3):
            x = vectors(step, ctx.world_size)
            # Expert 0 on all ranks, 1 on the last only, 2 on none.
            choice = [(0, 1) if rank == ctx.world_size - 1 else (0,) for rank in range(ctx.world_size)]
            for rank in range(ctx.world_size):
                (plain(x[rank : rank + 1], choice[rank]).square().mean() / ctx.world_size).backward()
            sharded(x[ctx.rank : ctx.rank + 1], choice[ctx.rank]).square().mean().backward()
            with flatshard.summon_full_params(sharded, writeback=False, with_grads=True):
                grads = {n: None if p.grad is None else p.grad.clone() for n, p in sharded.named_parameters()}
            for name, param in plain.named_parameters():
                assert (grads[name] is None) == (param.grad is None), name
                if param.grad is not None:
                    torch.testing.assert_close(grads[name], param.grad, rtol=1e-9, atol=1e-12, msg=name)
            unused = [n for n, p in sharded.named_parameters() if p.grad is None]
            assert unused == ["spare", *(f"experts.2.{n}" for n, _ in Mlp().named_parameters())]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        got = full_params(sharded)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(got[name], param.detach(), rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_unused_on_all_ranks_and_unused_on_some(pool, world_size):
    pool.run(train_partly_unused, world_size=world_size)


# ---------------------------------------------------------------------------------------------------------------------
# The Parameter objects
# ---------------------------------------------------------------------------------------------------------------------


def keep_identity(ctx) -> None:
    for strategy in STRATEGIES:
        ctx.note(strategy.name)
        model = nn.Sequential(Lm(), nn.Conv1d(3, 5, 2), nn.BatchNorm1d(5), empties(), scalars())
        params = dict(model.named_parameters())
        all_names = dict(model.named_parameters(remove_duplicate=False))
        buffers, modules = dict(model.named_buffers()), dict(model.named_modules())
        classes = [type(m) for m in model.modules()]
        shapes = {name: p.shape for name, p in params.items()}
        values = {name: p.detach().clone() for name, p in params.items()}
        result = fully_shard(model, policy={nn.Linear, nn.Conv1d}, strategy=strategy, process_group=ctx.group)
        assert result is model  # C1
        assert [type(m) for m in model.modules()] == classes  # C3
        assert dict(model.named_modules()) == modules
        assert list(dict(model.named_parameters())) == list(params)  # C2
        assert all(p is params[name] for name, p in model.named_parameters())
        assert all(p is all_names[name] for name, p in model.named_parameters(remove_duplicate=False))
        assert all(b is buffers[name] for name, b in model.named_buffers())
        for name, param in params.items():
            assert isinstance(param, ShardedParameter)
            assert param.is_leaf
            assert flatshard.full_shape(param) == shapes[name]
            assert type(flatshard.full_shape(param)) is torch.Size
            info = param._flatshard_info
            mine = values[name].reshape(-1)[info.start : info.stop]
            assert torch.equal(param.detach().reshape(-1), mine)  # C4
            assert param.shape == (shapes[name] if strategy is ShardingStrategy.NO_SHARD else mine.shape)
        held = [p.numel() for p in params.values()]
        if strategy is not ShardingStrategy.NO_SHARD:
            total = torch.tensor(held)
            dist.all_reduce(total, group=ctx.group)
            assert total.tolist() == [shape.numel() for shape in shapes.values()]
    assert flatshard.full_shape(torch.zeros(2, 3)) == (2, 3)
    model = fully_shard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), process_group=ctx.group)
    model[0].weight.requires_grad_(False)
    assert flatshard.tensors.num_parameters(model) == 15 + 5 + 10 + 2
    assert flatshard.tensors.num_parameters(model, trainable_only=True) == 5 + 10 + 2
    with flatshard.summon_full_params(model):
        assert flatshard.tensors.num_parameters(model) == 15 + 5 + 10 + 2


def test_names_order_classes_and_objects_survive(pool):
    pool.run(keep_identity, world_size=4)


def optimizer_before_and_after(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    for strategy in STRATEGIES:
        results = []
        for first in (True, False):
            run = check_parity(
                ctx,
                Lm,
                tokens,
                steps=3,
                dtype=None,
                shard=functools.partial(shard_with, {Mlp}, strategy),
                optimizer_first=first,
            )
            results.append([p.detach().clone() for p in run.sharded.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_optimizer_built_before_or_after(pool):
    pool.run(optimizer_before_and_after, world_size=3)


def keep_attributes(ctx) -> None:
    model = Mlp()
    model.up.weight.lr_scale = 0.5
    model.down.weight.tags = ["decay"]
    fully_shard(model, process_group=ctx.group)
    model.up.weight.group = "first"  # set on the sharded view
    seen = {}

    def look(module: nn.Module, *args: Any) -> None:
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


def test_attributes_are_seen_on_both_views(pool):
    pool.run(keep_attributes, world_size=2)
    pool.run(keep_attributes, world_size=1)


def keep_gradients(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        plain, sharded = transposed(), transposed()
        sharded.load_state_dict(plain.state_dict())
        x = vectors(0, 2)
        for model in (plain, sharded):
            model(x).sum().backward()
        sharded.v.grad, plain.v.grad = None, None
        fully_shard(sharded, strategy=strategy, process_group=ctx.group)
        assert sharded.v.grad is None
        assert sharded.w.grad.shape == sharded.w.shape
        for model in (plain, sharded):
            model(x).square().sum().backward()
        with flatshard.summon_full_params(sharded, with_grads=True):
            for name, param in plain.named_parameters():
                torch.testing.assert_close(sharded.get_parameter(name).grad, param.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_from_before_sharding_are_kept(pool, world_size):
    pool.run(keep_gradients, world_size=world_size)


def ignore(ctx) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    plain, model = (nn.Sequential(Mlp(), Mlp(), Mlp()) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    ignored = [*model[1].parameters(), model[0].up.weight]
    before = [(p, p.data_ptr(), p.shape) for p in ignored]
    fully_shard(model, policy={Mlp}, process_group=ctx.group, ignored_states=[model[1], model[0].up.weight])
    assert [(p, p.data_ptr(), p.shape) for p in ignored] == before
    assert all(type(p) is nn.Parameter for p in ignored)
    assert len(units_below(model)) == 3  # the root and two of the blocks
    x = vectors(0, ctx.world_size)
    local, whole = (nn.Sequential(Mlp(), Mlp(), Mlp()) for _ in range(2))
    for other, part in ((local, x[ctx.rank : ctx.rank + 1]), (whole, x), (model, x[ctx.rank : ctx.rank + 1])):
        if other is not model:
            other.load_state_dict(plain.state_dict())
        mean_square(other(part), part).backward()
    ignored_names = {name for name, p in model.named_parameters() if type(p) is nn.Parameter}
    with flatshard.summon_full_params(model, with_grads=True):
        for name, param in model.named_parameters():
            expected = local if name in ignored_names else whole
            torch.testing.assert_close(param.grad, expected.get_parameter(name).grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("world_size", [1, 3])
def test_ignored_states_stay_whole_with_local_gradients(pool, world_size):
    pool.run(ignore, world_size=world_size)


def refuse_sparse(ctx) -> None:
    for world_policy in (None, {nn.Embedding}):
        model = nn.Sequential(nn.Embedding(11, WIDTH, sparse=True), nn.Linear(WIDTH, 3))
        fully_shard(model, policy=world_policy, process_group=ctx.group)
        with pytest.raises(RuntimeError, match=r"gradient of '0.weight' is sparse.*sparse=False"):
            model(torch.tensor([1, 2])).sum().backward()
        model[0].sparse = False
        model.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("world_size", [1, 2])
def test_sparse_gradients_are_refused(pool, world_size):
    pool.run(refuse_sparse, world_size=world_size)


def tie_later(ctx) -> None:
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


def test_a_parameter_tied_after_sharding(pool):
    pool.run(tie_later)


class Scaled(nn.Module):
    """Multiplies by a parameter of another module, once it has been given one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.scale is None else x * self.scale.sum()


def tie_to_a_new_name(ctx) -> None:
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


def test_a_parameter_tied_to_a_new_name_after_sharding(pool):
    pool.run(tie_to_a_new_name)


def add_later(ctx) -> None:
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
        with pytest.raises(ValueError, match="nothing to compare"):
            flatshard.debug.check_replicas(model)
        step(model, optimizer, ctx.rank)
        with pytest.raises(ValueError, match="nothing to compare"):
            flatshard.debug.check_replicas(model)
        model[2].add_module("adapter", nn.Linear(4, 4))
        model[2].register_forward_hook(lambda module, args, output: module.adapter(output))
        flatshard.debug.check_replicas(model)  # equal as yet
        optimizer.add_param_group({"params": model[2].adapter.parameters()})
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"SGD steps '2.adapter.weight', '2.adapter.bias', registered .* after"
            ):
                step(model, optimizer, ctx.rank)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        with torch.no_grad():
            model[2].adapter.weight.add_(ctx.rank)
        with pytest.raises(
            RuntimeError, match=r"1 of 2 values: '2.adapter.weight' .* averages the gradients of '2.adap"
        ):
            flatshard.debug.check_replicas(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    model(torch.full((1, 4), 1.0 + rank)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_parameters_added_after_sharding(pool):
    pool.run(add_later)


class Adapter(nn.Module):
    """Takes the place of a layer, as peft's do."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def add_adapters(ctx) -> None:
    """Around units, in a root unit that has no parameter of its own; an optimizer of nothing else."""
    for cure in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
        fully_shard(model, policy={nn.Linear}, process_group=ctx.group).requires_grad_(False)
        model[1][0] = Adapter(model[1][0])
        if cure:
            plain = copy.deepcopy([model[1][0].a, model[1][0].b])
            for each in (model[1][0].a, model[1][0].b):
                fully_shard(each, process_group=ctx.group)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        if cure:
            step(model, optimizer, ctx.rank)
            assert full_params(model[1][0].b)["weight"].shape == plain[1].weight.shape
            continue
        with pytest.raises(
            RuntimeError, match=r"SGD steps '1.0.[ab].weight', '1.0.[ab].weight', registered .* fully_shard"
        ):
            step(model, optimizer, ctx.rank)


def test_adapters_added_after_sharding(pool):
    pool.run(add_adapters)
