"""Parameters that are tensor subclasses: quantised weights as bytes, weights with a dispatch of their own."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any, ClassVar

import pytest
import torch
from encoded import Product
from on_ranks import ranks
from pairs import some
from parity import check_parity
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, full_shape, fully_shard
from flatshard._composable.find import units_below
from flatshard.tensors import ShardedParameter

WIDTH = 7
STRATEGIES = list(ShardingStrategy)[:3]


class Quantised(Tensor):
    """int8 values with a scale and a zero point for each row, as libraries for quantisation have them."""

    fields: ClassVar[list[str]] = ["stored", "scale", "zero"]

    @staticmethod
    def __new__(cls, stored: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Quantised:
        result = Tensor._make_wrapper_subclass(cls, stored.shape, dtype=dtype, device=stored.device)
        result.stored, result.scale, result.zero = stored, scale, zero
        return result

    @classmethod
    def of(cls, weight: Tensor) -> Quantised:
        weight = weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        zero = torch.ones(len(weight), dtype=torch.int32)
        return cls((weight / scale + 1).round().to(torch.int8), scale, zero, weight.dtype)

    def dequantise(self) -> Tensor:
        return ((self.stored - self.zero[:, None]) * self.scale).to(self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return self.fields, self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> Quantised:
        return cls(*(inner[name] for name in cls.fields), dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            inner = {name: func(getattr(args[0], name)) for name in cls.fields}
            return cls.__tensor_unflatten__(inner, args[0].dtype, None, None)
        whole = pytree.tree_map_only(Quantised, lambda t: t.dequantise(), (args, kwargs or {}))
        return func(*whole[0], **whole[1])

    def __repr__(self, **_: Any) -> str:
        return "Quantised(...)"


class Copying(Quantised):
    """Its tensors cannot be views of others'."""

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> Quantised:
        return cls(*(inner[name].clone() for name in cls.fields), dtype)


class Wrapped(Tensor):
    """One tensor of the same shape and dtype inside, which may be another subclass."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        kept = {"strides": inner.stride(), "dtype": inner.dtype, "requires_grad": inner.requires_grad}
        result = Tensor._make_wrapper_subclass(cls, inner.shape, device=inner.device, **kept)
        result.inner = inner
        return result

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Wrapped:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(Wrapped, lambda t: t.inner, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        return cls(out) if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default) else out

    def __repr__(self, **_: Any) -> str:
        return "Wrapped(...)"


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
    """Trainable, and one of them shared by two modules."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    for linear in (model[0], model[3]):
        linear.weight = nn.Parameter(Wrapped(linear.weight.detach()))
    model[2].weight = model[0].weight
    return model


def nested() -> nn.Module:
    model = adapted()
    for block in model:
        block.base.weight = frozen(Wrapped(block.base.weight.detach()))
    return model


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = adapted()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


MODELS = {"adapted": adapted, "wrapped": wrapped, "nested": nested, "checkpointed": Checkpointed}


def vectors(step: int, n: int) -> Tensor:
    return torch.randn(n, WIDTH)


def clip(model: nn.Module) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def check(ctx: Any, make: Any, **options: Any) -> None:
    def shard(model: nn.Module, group: Any) -> None:
        fully_shard(model, process_group=group, **options)

    torch.set_default_dtype(torch.float64)
    replicated = options.get("strategy") is ShardingStrategy.NO_SHARD or ctx.world_size == 1
    check_parity(ctx, make, vectors, steps=3, dtype=None, shard=shard, replicated=replicated, clip=clip)


@pytest.mark.parametrize(("name", "world_size"), some(itertools.product(MODELS, (3, 2, 1)), 2 * len(MODELS)))
@ranks()
def test_trains_as_in_one_process(ctx, name: str) -> None:
    units = {Adapted, nn.Linear} if name in ("wrapped", "nested") else {Adapted}
    for strategy in STRATEGIES if ctx.world_size == 2 else STRATEGIES[:1]:
        for options in ({}, {"policy": units}, {"policy": units, "static_buffers": True}):
            ctx.note(f"{strategy.name}, {options}")
            check(ctx, MODELS[name], strategy=strategy, **options)


# -- What is sharded --------------------------------------------------------------------------------------------------


def made(ctx: Any, model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, process_group=ctx.group, **options)


def in_bfloat16() -> nn.Module:
    """Whose quantised weights say that they are, too."""
    model = adapted()
    for block in model:
        block.base.weight = frozen(Quantised.of(block.base.weight.dequantise().bfloat16()))
    return model


@ranks(2)
def test_bytes_travel_and_only_adapters_have_gradients(ctx) -> None:
    """49 int8 + pad, 7 bf16 scales + pad, 7 int32; the bias; the adapters."""
    plain = in_bfloat16()
    for block in plain:
        block.base.bias.data = block.base.bias.data.bfloat16()
    model = made(ctx, plain, policy={Adapted})
    flats = units_below(model)[1].handle.flats
    found = [(b.kind.dtype, b.layout.numel, any(b.requires_grad)) for b in flats]
    assert found == [(torch.uint8, 108, False), (torch.bfloat16, 7, True), (torch.float32, 28, True)]
    weight = model[0].base.weight
    assert type(weight) is ShardedParameter
    assert not weight.requires_grad
    assert full_shape(weight) == (WIDTH, WIDTH)


@ranks(1, 2, 3)
def test_summoned_copied_and_evaluated(ctx) -> None:
    torch.manual_seed(0)
    plain = adapted()
    for block in plain:
        block.base.weight.note = [1]
    model = made(ctx, copy.deepcopy(plain), policy={Adapted})
    weight = model[0].base.weight
    assert weight.note == [1]
    assert not hasattr(weight, "stored")
    x = vectors(0, 2)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            assert torch.equal(model(x), plain(x))
            with flatshard.keep_unsharded(model):
                assert torch.equal(model(x), plain(x))
    with flatshard.summon_full_params(model):
        whole = model[0].base.weight
        assert type(whole) is Quantised
        assert isinstance(whole, nn.Parameter)
        assert whole.note == [1]
        for name in Quantised.fields:
            got, expected = getattr(whole, name), getattr(plain[0].base.weight, name)
            assert torch.equal(got, expected)
            assert got.dtype is expected.dtype
        whole.stored.mul_(-1)
        plain[0].base.weight.stored.mul_(-1)
    assert model[0].base.weight is weight
    assert torch.equal(model(x), plain(x))
    with flatshard.summon_full_params(model, offload_to_cpu=True):
        model[1].base.weight.scale.mul_(3)
    plain[1].base.weight.scale.mul_(3)
    assert torch.equal(model(x), plain(x))
    other = copy.deepcopy(model)
    with flatshard.summon_full_params(other):
        other[0].base.weight.stored.zero_()
    assert torch.equal(model(x), plain(x))
    assert not torch.equal(other(x), plain(x))
    model(x).sum().backward()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    optimizer.step()
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_bytes_are_cut_whatever_the_layout(world) -> None:
    world(2)
    model = fully_shard(adapted(), policy={Adapted}, layout=flatshard.layouts.Whole(math.inf))
    for block in model:
        assert 0 < block.base.weight.numel() < block.base.weight._flatshard_info.numel


@ranks(2)
def test_gradients_from_before_sharding_are_kept(ctx) -> None:
    model = wrapped()
    model(vectors(0, 2)).sum().backward()
    expected = [param.grad.clone() for param in model.parameters()]
    made(ctx, model, policy={nn.Linear})
    with flatshard.summon_full_params(model, with_grads=True):
        for param, grad in zip(model.parameters(), expected, strict=True):
            assert torch.equal(param.grad, grad)


@ranks(2)
def test_gradients_and_hooks_after_a_change_of_dtype(ctx) -> None:
    """For autograd they are other tensors then, on which the user's hooks and ours are registered, too."""
    torch.manual_seed(0)
    plain = wrapped()
    model = made(ctx, copy.deepcopy(plain), policy={nn.Linear})
    seen: list[Any] = []
    model[0].weight.register_hook(lambda grad: seen.append(grad.dtype))
    x = vectors(0, 2)
    expected = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)(x.to(dtype)).sum().backward()
        with flatshard.summon_full_params(model, with_grads=True):
            for param, grad in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(param.grad.to(dtype), grad.to(dtype), rtol=1e-4, atol=1e-6)
        model.zero_grad()
    assert seen == [torch.float32, torch.float64]


@ranks(3)
def test_sync_module_states(ctx) -> None:
    torch.manual_seed(ctx.rank)
    model = made(ctx, nested(), policy={Adapted}, sync_module_states=True, device_id="cpu")
    torch.manual_seed(0)
    plain = nested()
    with flatshard.summon_full_params(model):
        for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert type(got) is type(expected)
            assert torch.equal(got * 1, expected * 1)


def kinds(model: nn.Module) -> set[tuple[torch.dtype, torch.dtype]]:
    return {(b.kind.dtype, b.kind.compute_dtype) for u in units_below(model) for b in u.handle.flats}


@ranks(2)
def test_mixed_precision(ctx) -> None:
    """What a dtype means to the class only it knows: it keeps its own. Everything else is cast."""
    bf16 = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}
    model = made(ctx, wrapped(), policy={nn.Linear}, **bf16)
    assert kinds(model) == {(torch.float32, torch.float32), (torch.float32, torch.bfloat16)}
    model = made(ctx, adapted(), policy={Adapted}, **bf16)
    with pytest.raises(RuntimeError, match="dtype"):  # a base that says it is float32, and inputs in bfloat16
        model(vectors(0, 2))
    dtypes: list[Any] = []
    model = made(ctx, in_bfloat16(), policy={Adapted}, **bf16)
    model[0].base.register_forward_hook(lambda m, a, y: dtypes.extend((m.weight.dtype, m.weight.scale.dtype, y.dtype)))
    model(vectors(0, 2)).sum().backward()
    assert dtypes == [torch.bfloat16] * 3
    assert {p.grad.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


class Rounding(Wrapped):
    """Its products are of rounded weights, with one scale for all of a weight. FSDP2 asks it what to gather."""

    @property
    def decoded(self) -> Tensor:
        scale = self.inner.abs().max() / 7
        return (self.inner / scale).round() * scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        x, weight, bias = args
        return Product.apply(x, weight) + bias

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise AssertionError

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        raise AssertionError


def rounding() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    for linear in (model[0], model[2]):
        linear.weight = nn.Parameter(Rounding(linear.weight.detach()))
    return model


@ranks(1, 2, 3)
def test_a_class_that_is_asked_what_to_gather(ctx) -> None:
    torch.manual_seed(0)
    plain = rounding()
    for dtype in (torch.bfloat16, torch.float32):
        policy = MixedPrecision(None if dtype is torch.float32 else dtype)
        model = made(ctx, copy.deepcopy(plain), policy={nn.Linear}, mixed_precision=policy)
        assert kinds(model) == {(torch.float32, dtype)}
        x = vectors(0, 2).to(dtype)
        low = copy.deepcopy(plain)
        for linear in (low[0], low[2]):
            linear.weight = nn.Parameter(Rounding(linear.weight.inner.to(dtype)))
            linear.bias.data = linear.bias.data.to(dtype)
        assert low[0].weight.dtype is dtype
        assert torch.equal(model(x), low(x))
        model(x).sum().backward()
        low(x).sum().backward()
        with flatshard.summon_full_params(model, with_grads=True):
            for mine, expected in zip(model.parameters(), low.parameters(), strict=True):
                assert type(mine) is type(expected)
                assert mine.dtype is mine.grad.dtype is torch.float32
                # All ranks have the same data.
                torch.testing.assert_close(mine.grad, expected.grad.float(), rtol=2e-2 * (ctx.world_size > 2), atol=0)
    check(ctx, rounding, policy={nn.Linear})


@ranks(1, 2, 3)
def test_checkpoints(ctx, path: str) -> None:
    make = nested if ctx.world_size == 3 else adapted
    torch.manual_seed(0)
    plain, x = make(), vectors(0, 2)
    model = made(ctx, copy.deepcopy(plain), policy={Adapted})
    flatshard.save_checkpoint(path, {"model": model}, process_group=ctx.group)
    full = flatshard.checkpoint.full_state_dict(model)
    assert type(full["0.base.weight"]) is type(plain[0].base.weight)
    fresh = make()
    fresh.load_state_dict(full, assign=True)
    assert torch.equal(fresh(x), plain(x))
    for load in (
        lambda other: other.load_state_dict(plain.state_dict()),  # each rank its part of a whole subclass
        lambda other: flatshard.load_checkpoint(path, {"model": other}, process_group=ctx.group),
    ):
        other = made(ctx, make())
        assert not torch.equal(other(x), plain(x))
        load(other)
        assert torch.equal(other(x), plain(x))
    with pytest.raises(RuntimeError, match=r"0\.base\.weight"):
        other.load_state_dict({**full, "0.base.weight": torch.randn(WIDTH, WIDTH)})


# -- What is not ------------------------------------------------------------------------------------------------------


class Opaque(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Packed(Quantised):
    """As torchao's NF4Tensor: what FSDP2 gathers of it are the tensors inside, as they are."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.stored, self.scale, self.zero), None


def linear(weight: Tensor, requires_grad: bool = False) -> nn.Module:
    result = nn.Linear(WIDTH, WIDTH)
    result.weight = nn.Parameter(weight, requires_grad)
    return result


@ranks(4)
def test_refused(ctx) -> None:
    weight = torch.randn(WIDTH, WIDTH)
    quantised = Quantised.of(weight)
    mesh = ctx.device_mesh((ctx.world_size,), ("tp",))
    distributed = DTensor.from_local(weight, mesh, [Replicate()])
    opaque = weight.as_subclass(Opaque)
    cases = {
        "is a Quantised, which requires grad, but has 3 tensors inside.*Freeze it": linear(quantised, True),
        "is a Copying, which copies the tensors that its __tensor_unflatten__ is": linear(Copying.of(weight)),
        "is a Opaque, a tensor subclass that does not say which tensors are inside: give it": linear(opaque),
        "is a Wrapped, which has a DTensor inside": linear(Wrapped(distributed)),
        "is a Wrapped on the meta device": linear(Wrapped(weight.to("meta"))),
    }
    for error, module in cases.items():
        before = dict(module.named_parameters())
        with pytest.raises(ValueError, match=rf"parameter 'weight' {error}"):
            made(ctx, module)
        assert all(p is before[n] for n, p in module.named_parameters())
        made(ctx, module, ignored_states=[module.weight])
    packed = linear(Packed.of(weight))
    x = torch.randn(2, WIDTH)
    expected = packed(x)
    torch.testing.assert_close(made(ctx, packed)(x), expected)
