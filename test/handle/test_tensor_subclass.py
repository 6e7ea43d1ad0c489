"""Parameters that are tensor subclasses: quantised weights sent as bytes, and weights with a dispatch of their own."""

import copy
import itertools
import math
from typing import Any, ClassVar

import pytest
import torch
from encoded import KEPT, Inner, Wrapped
from on_ranks import ranks
from pairs import some
from parity import check_parity
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, full_shape, fully_shard
from flatshard.tensors import ShardedParameter

WIDTH = 7
STRATEGIES = list(ShardingStrategy)[:3]


class Quantised(Inner):
    """int8 values with a scale and a zero point for each row, as in quantisation libraries."""

    names: ClassVar[list[str]] = ["stored", "scale", "zero"]

    @classmethod
    def of(cls, weight: Tensor) -> "Quantised":
        weight = weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        zero = torch.ones(len(weight), dtype=torch.int32)
        return cls.make(weight.dtype, (weight / scale + 1).round().to(torch.int8), scale, zero)

    def dequantise(self) -> Tensor:
        return ((self.stored - self.zero[:, None]) * self.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KEPT:
            return cls.make(args[0].dtype, *(func(getattr(args[0], name)) for name in cls.names))
        whole = pytree.tree_map_only(Quantised, lambda t: t.dequantise(), (args, kwargs or {}))
        return func(*whole[0], **whole[1])


class Copying(Quantised):
    """A subclass whose tensors cannot be views of other tensors."""

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> Quantised:
        return cls.make(dtype, *(inner[name].clone() for name in cls.names))


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Adapted(nn.Module):
    """A quantised weight with a trainable adapter and bias, as in QLoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.weight = frozen(Quantised.of(self.base.weight))
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x)) + self.b(self.a(x))


def adapted() -> nn.Module:
    return nn.Sequential(*[Adapted() for _ in range(3)])


def wrapped() -> nn.Module:
    """Make a model of trainable subclasses, one of them shared by two modules."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    for layer in (model[0], model[3]):
        layer.weight = nn.Parameter(Wrapped.of(layer.weight.detach()))
    model[2].weight = model[0].weight
    return model


def nested() -> nn.Module:
    model = adapted()
    for block in model:
        block.base.weight = frozen(Wrapped.of(block.base.weight.detach()))
    return model


MODELS = {"adapted": adapted, "wrapped": wrapped, "nested": nested}


def vectors(step: int, n: int) -> Tensor:
    return torch.randn(n, WIDTH)


def check(ctx: Any, make: Any, **options: Any) -> None:
    def shard(model: nn.Module, group: Any) -> None:
        made(ctx, model, **options)

    torch.set_default_dtype(torch.float64)
    replicated = options.get("strategy") is ShardingStrategy.NO_SHARD or ctx.world_size == 1
    clip = lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # noqa: E731
    check_parity(ctx, make, vectors, steps=3, dtype=None, shard=shard, replicated=replicated, clip=clip)


@pytest.mark.parametrize(("name", "world_size"), some(itertools.product(MODELS, (3, 2, 1)), 5))
@ranks()
def test_trains_as_in_one_process(ctx, name: str) -> None:
    units = {Adapted} if name == "adapted" else {Adapted, nn.Linear}
    for strategy in STRATEGIES if ctx.world_size == 2 else STRATEGIES[:1]:
        for options in ({}, {"policy": units, "static_buffers": strategy is STRATEGIES[0]}):
            ctx.note(f"{strategy.name}, {options}")
            check(ctx, MODELS[name], strategy=strategy, **options)


# -- Sharded subclasses -----------------------------------------------------------------------------------------------


def made(ctx: Any, model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, process_group=ctx.group, **options)


def in_bfloat16() -> nn.Module:
    """Make a model whose quantised weights report bfloat16."""
    model = adapted()
    for block in model:
        block.base.weight = frozen(Quantised.of(block.base.weight.dequantise().bfloat16()))
    return model


@ranks(2)
def test_bytes_travel_and_only_adapters_have_gradients(ctx) -> None:
    """49 int8 + pad, 7 bf16 scales + pad, 7 int32; the bias; the adapters. Every layout cuts bytes anywhere."""
    plain = in_bfloat16()
    for block in plain:
        block.base.bias.data = block.base.bias.data.bfloat16()
    for options in ({}, {"layout": flatshard.layouts.Whole(math.inf)}):
        model = made(ctx, copy.deepcopy(plain), policy={Adapted}, **options)
        found = [(f.dtype, f.numel, f.trainable) for f in flatshard.describe(model).units[1].flats]
        assert found == [(torch.uint8, 108, False), (torch.bfloat16, 7, True), (torch.float32, 28, True)]
        weight = model[0].base.weight
        assert type(weight) is ShardedParameter
        assert full_shape(weight) == (WIDTH, WIDTH)
        assert 0 < weight.numel() < weight._flatshard_info.numel


@ranks(1, 3)
def test_summoned_copied_and_evaluated(ctx) -> None:
    torch.manual_seed(ctx.rank)
    model, x = adapted(), vectors(0, 2)
    torch.manual_seed(0)
    plain = adapted()
    model[0].base.weight.note = [1]
    made(ctx, model, policy={Adapted}, sync_module_states=True, device_id="cpu")
    weight = model[0].base.weight
    assert weight.note == [1]
    with torch.inference_mode(), flatshard.keep_unsharded(model):
        assert torch.equal(model(x), plain(x))
    with flatshard.summon_full_params(model):
        whole = model[0].base.weight
        assert type(whole) is Quantised
        assert whole.note == [1]
        whole.stored.mul_(-1)
    plain[0].base.weight.stored.mul_(-1)
    assert model[0].base.weight is weight
    with flatshard.summon_full_params(model, offload_to_cpu=True):
        model[1].base.weight.scale.mul_(3)
    plain[1].base.weight.scale.mul_(3)
    other = copy.deepcopy(model)
    with flatshard.summon_full_params(other):
        other[0].base.weight.stored.zero_()
    assert torch.equal(model(x), plain(x))
    assert not torch.equal(other(x), plain(x))


@ranks(2)
def test_gradients_and_hooks_after_a_change_of_dtype(ctx) -> None:
    """A conversion makes new tensors for autograd. The user's hooks and flatshard's are registered on them again, and
    gradients from before sharding are kept."""
    torch.manual_seed(0)
    plain, x = wrapped(), vectors(0, 2)
    expected = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))
    model = copy.deepcopy(plain)
    model(x).sum().backward()
    made(ctx, model, policy={nn.Linear})
    seen: list[Any] = []
    model[0].weight.register_hook(lambda grad: seen.append(grad.dtype))
    for dtype in (None, torch.float32, torch.float64):
        if dtype:
            model.to(dtype)(x.to(dtype)).sum().backward()
        with flatshard.summon_full_params(model, with_grads=True):
            for param, grad in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(param.grad.double(), grad.double(), rtol=1e-4, atol=1e-6)
        model.zero_grad()
    assert seen == [torch.float32, torch.float64]


def kinds(model: nn.Module) -> set[tuple[torch.dtype, torch.dtype]]:
    return {(f.dtype, f.compute_dtype) for u in flatshard.describe(model).units for f in u.flats}


@ranks(2)
def test_mixed_precision(ctx) -> None:
    """A subclass keeps its dtype, as only the class knows its meaning. Everything else is cast."""
    bf16 = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}
    model = made(ctx, wrapped(), policy={nn.Linear}, **bf16)
    assert kinds(model) == {(torch.float32, torch.float32), (torch.float32, torch.bfloat16)}
    dtypes: list[Any] = []
    model = made(ctx, in_bfloat16(), policy={Adapted}, **bf16)
    model[0].base.register_forward_hook(lambda m, a, y: dtypes.extend((m.weight.dtype, m.weight.scale.dtype, y.dtype)))
    model(vectors(0, 2)).sum().backward()
    assert dtypes == [torch.bfloat16] * 3
    assert {p.grad.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


class Asked(Wrapped):
    """A subclass with FSDP2's gather extension. Its values are numbers of any dtype, so they are cast and gathered
    directly."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise AssertionError

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        raise AssertionError


@ranks(1, 2, 3)
def test_a_class_that_is_asked_what_to_gather(ctx) -> None:
    def asked() -> nn.Module:
        return linear(Asked.of(torch.randn(WIDTH, WIDTH)), True)

    torch.manual_seed(0)
    plain, x = asked(), vectors(0, 2).bfloat16()
    model = made(ctx, copy.deepcopy(plain), mixed_precision=MixedPrecision(torch.bfloat16))
    assert kinds(model) == {(torch.float32, torch.bfloat16)}
    assert torch.equal(model(x), nn.functional.linear(x, plain.weight.inner.bfloat16(), plain.bias.bfloat16()))
    model(x).sum().backward()
    with flatshard.summon_full_params(model, with_grads=True):
        assert type(model.weight) is Asked
        assert {(p.dtype, p.grad.dtype) for p in model.parameters()} == {(torch.float32, torch.float32)}
    check(ctx, asked)


@ranks(1, 3)
def test_checkpoints(ctx, path: str) -> None:
    make = nested if ctx.world_size == 3 else adapted
    torch.manual_seed(0)
    plain, x = make(), vectors(0, 2)
    model = made(ctx, copy.deepcopy(plain), policy={Adapted})
    flatshard.save_checkpoint(path, {"model": model}, process_group=ctx.group)
    full = flatshard.checkpoint.full_state_dict(model)
    assert type(full["0.base.weight"]) is type(plain[0].base.weight)
    for load in (
        lambda other: other.load_state_dict(full, assign=True),
        lambda other: made(ctx, other).load_state_dict(plain.state_dict()),  # each rank its shard of a subclass
        lambda other: flatshard.load_checkpoint(path, {"model": made(ctx, other)}, process_group=ctx.group),
    ):
        load(other := make())
        assert torch.equal(other(x), plain(x))
    with pytest.raises(RuntimeError, match=r"0\.base\.weight"):
        other.load_state_dict({**full, "0.base.weight": torch.randn(WIDTH, WIDTH)})


# -- Refused subclasses -----------------------------------------------------------------------------------------------


class Opaque(Tensor):
    pass


class Packed(Quantised):
    """A subclass like torchao's NF4Tensor, whose inner tensors FSDP2 gathers unchanged."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.stored, self.scale, self.zero), None


def linear(weight: Tensor, requires_grad: bool = False) -> nn.Module:
    result = nn.Linear(WIDTH, WIDTH)
    result.weight = nn.Parameter(weight, requires_grad)
    return result


@ranks(4)
def test_refused(ctx) -> None:
    weight = torch.randn(WIDTH, WIDTH)
    distributed = DTensor.from_local(weight, ctx.device_mesh((ctx.world_size,), ("tp",)), [Replicate()])
    for error, of, requires_grad in (
        ("is a Quantised, which requires grad, but has 3 tensors inside.*Freeze it", Quantised.of(weight), True),
        ("is a Copying, which copies the tensors that its __tensor_unflatten__ is", Copying.of(weight), False),
        ("is a Opaque, a tensor subclass that does not say which tensors", weight.as_subclass(Opaque), False),
        ("is a Wrapped, which has a DTensor inside", Wrapped.of(distributed), False),
        ("is a Wrapped on the meta device", Wrapped.of(weight.to("meta")), False),
    ):
        module = linear(of, requires_grad)
        with pytest.raises(ValueError, match=rf"parameter 'weight' {error}"):
            made(ctx, module)
        made(ctx, module, ignored_states=[module.weight])
    packed, x = linear(Packed.of(weight)), torch.randn(2, WIDTH)
    expected = packed(x)
    torch.testing.assert_close(made(ctx, packed)(x), expected)
