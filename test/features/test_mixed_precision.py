"""Dtypes in mixed precision. ``together/test_parity_with_fsdp2`` and the fuzzer check values.
The fuzzer's oracle casts, computes, averages in the reduce dtype and casts back.
"""

import copy
import dataclasses
import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
from models import NormBlock
from on_ranks import ranks
from torch import nn
from torch.distributed import fsdp

import flatshard
import flatshard.fsdp2
from flatshard import CPUOffload, CustomPolicy, MixedPrecision, ShardingStrategy, fully_shard
from flatshard._composable.find import units_below

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FULL, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
INPUTS = torch.ones(2, 3, dtype=torch.long), torch.ones(())
"""Inputs of ``Net``."""


def norm_block() -> NormBlock:
    return NormBlock(6, 9, bias=False)


class Net(nn.Module):
    """A net whose head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.Sequential(norm_block(), norm_block())
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        assert ids.dtype is torch.long
        return self.head(self.blocks(self.embed(ids) * scale))


def note_dtypes(module: nn.Module) -> list[torch.dtype]:
    """Record the dtypes of the module's input and weight in each forward."""
    seen: list[torch.dtype] = []
    module.register_forward_hook(lambda m, args, output: seen.extend((args[0].dtype, m.weight.dtype)))
    return seen


class Widening(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


@ranks(2)
def test_inputs_and_outputs_are_cast(ctx):
    shard = functools.partial(fully_shard, process_group=ctx.group)
    everywhere = MixedPrecision(BF16, cast_forward_inputs=True, output_dtype=FP32)
    inner = dataclasses.replace(everywhere, output_dtype=None)
    units = CustomPolicy(lambda m: {"mixed_precision": inner} if isinstance(m, NormBlock) else False)
    model = shard(Net(), policy=units, mixed_precision=everywhere)
    seen = [note_dtypes(block.up) for block in model.blocks]
    out = model(*INPUTS)
    assert out.dtype is FP32
    assert seen == [[BF16, BF16]] * 2
    out.sum().backward()
    assert model.blocks[0](torch.ones(1, 6)).dtype is BF16  # called alone, it is the root
    model = shard(norm_block(), mixed_precision=MixedPrecision(BF16, cast_root_forward_inputs=False))
    assert model(torch.ones(1, 6, dtype=BF16)).dtype is BF16
    widening = shard(Widening(norm_block()), policy={NormBlock}, mixed_precision=MixedPrecision(BF16))
    for uncast in (model, widening):  # inputs of inner units are not cast
        with pytest.raises(RuntimeError, match="dtype"):
            uncast(torch.ones(1, 6))


@ranks(2)
def test_ignored_classes_keep_their_precision(ctx):
    policy = MixedPrecision(BF16, buffer_dtype=BF16)
    for ignores, norm in ((policy, FP32), (dataclasses.replace(policy, module_classes_to_ignore=()), BF16)):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        seen = note_dtypes(model[1])
        fully_shard(model, process_group=ctx.group, mixed_precision=ignores)
        out = model(torch.randn(8, 4))
        out.sum().backward()
        assert out.dtype is BF16
        assert seen == [norm, norm]
        assert model[1].running_mean.dtype is norm
        assert {f.compute_dtype for f in flatshard.describe(model).units[0].flats} == {BF16, norm}


@ranks(1, 3)
def test_summon_full_params(ctx):
    """Summoned parameters have the user's dtype, bit for bit, and are written back unrounded. Forwards inside use it."""
    torch.manual_seed(0)
    reference = Net()
    policy = MixedPrecision(BF16, reduce_dtype=FP32)
    for strategy, offload in itertools.product((FULL, NO_SHARD), (False, True)):
        model = copy.deepcopy(reference)
        fully_shard(model, policy={NormBlock}, process_group=ctx.group, mixed_precision=policy, strategy=strategy)
        with torch.no_grad(), flatshard.summon_full_params(model, offload_to_cpu=offload):
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(p, q)
                p.add_(1e-6)
            with flatshard.summon_full_params(model, offload_to_cpu=offload):
                model.blocks[0].up.bias.fill_(1 / 3)
            assert model(*INPUTS).dtype is FP32
        for _ in range(2):
            with torch.no_grad(), flatshard.summon_full_params(model, writeback=False):
                for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                    expected = torch.full_like(q, 1 / 3) if name == "blocks.0.up.bias" else q + 1e-6
                    assert torch.equal(p, expected), name
                    p.zero_()  # not written back
        model(*INPUTS).sum().backward()


@pytest.mark.parametrize("output_dtype", [None, FP32])
@ranks(2)
def test_summon_full_params_of_some_units(ctx, output_dtype: torch.dtype | None):
    """Summon a unit inside or around units in low precision. Tensors are cast between them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    x, dtype = torch.linspace(-1, 1, 6).view(2, 3), output_dtype or BF16
    full = model(x).detach()
    first, inner, last = (copy.deepcopy(m) for m in model)
    for module, dtypes in ((model[1], {}), (model, {"output_dtype": output_dtype})):
        fully_shard(module, process_group=ctx.group, mixed_precision=MixedPrecision(BF16, **dtypes))
    with torch.no_grad():
        low = [copy.deepcopy(m).bfloat16() for m in (first, inner, last)]
        inner_in_full = low[2](inner(low[0](x.bfloat16()).float()).bfloat16()).to(dtype)
        around_in_full = last(low[1](first(x).bfloat16()).float()).to(output_dtype or FP32)
        for summoned, options, expected in (
            (model[1], {}, inner_in_full),
            (model, {"recurse": False}, around_in_full),
            (model, {}, full),
        ):
            before = model(x)
            with flatshard.summon_full_params(summoned, **options):
                found = model(x)
            assert found.dtype is expected.dtype
            torch.testing.assert_close(found, expected)
            assert torch.equal(model(x), before)


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.1, 0.7, 1 / 3, -0.2, 0.9]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight[1].clamp_(max=0.5)
            self.weight.data[4].clamp_(max=0.5)
        return x * self.weight


@ranks(2)
def test_a_forward_that_changes_its_parameters(ctx):
    """Changes by forward to its own parameters are kept; other values are not rounded to the compute dtype."""
    model = fully_shard(Clamped(), process_group=ctx.group, mixed_precision=MixedPrecision(BF16))
    with torch.no_grad():
        model(torch.ones(5))
    with flatshard.summon_full_params(model, writeback=False):
        assert torch.equal(model.weight, torch.tensor([0.1, 0.5, 1 / 3, -0.2, 0.5]))


def test_a_dtype_for_each_parameter():
    """Each dtype is gathered separately. ``together/test_parity_with_fsdp2`` compares values with FSDP2's bit for bit."""
    model = norm_block()

    def gathers(fn: Any) -> list[int]:
        policy = MixedPrecision(BF16, FP32, param_dtype_override_fn=fn)
        plan = flatshard.plan_step(model, world_size=2, mixed_precision=policy)
        return sorted(c.nbytes for c in plan.collectives if c.kind == "all-gather" and c.phase == "forward")

    norm, linear, padding = 2 * 6, 6 * 9 + 9 + 9 * 6, 64
    assert len(gathers(None)) == 1
    of_norm, of_linear = gathers(lambda p: p.dtype if tuple(p.shape) == (6,) else None)  # the norm's parameters
    assert 4 * norm <= of_norm <= 4 * norm + padding
    assert 2 * linear <= of_linear <= 2 * linear + padding
    for wrong, shown in ((FP16, "torch.float16"), ("bf16", "'bf16'"), (FP64, "torch.float64")):
        message = f"returned {shown} for parameter 'up.bias': it may return .*torch.float32, or"
        with pytest.raises(ValueError, match=message):
            gathers(lambda p, wrong=wrong: wrong if p is model.up.bias else None)


def test_policies_of_fsdp_are_accepted():
    one = MixedPrecision.of(fsdp.MixedPrecision(BF16, FP32, FP16, keep_low_precision_grads=True))
    assert one == MixedPrecision(BF16, FP32, FP16, keep_low_precision_grads=True)
    two = MixedPrecision.of(fsdp.MixedPrecisionPolicy(BF16, FP32, output_dtype=FP16))
    two = dataclasses.replace(two, reduce_in_param_dtype=True)  # FSDP2's depends on the installed torch
    assert two == MixedPrecision(BF16, FP32, output_dtype=FP16, cast_forward_inputs=True, module_classes_to_ignore=())
    assert MixedPrecision.of(None) == MixedPrecision()
    assert CPUOffload.of(fsdp.CPUOffload(True)) == CPUOffload(True)
    assert CPUOffload.of(fsdp.CPUOffloadPolicy(pin_memory=False)) == CPUOffload(True, False)
    assert not CPUOffload.of(fsdp.OffloadPolicy()).offload_params
    assert not CPUOffload.of(None).offload_params
    assert CPUOffload.of(True).offload_params


def test_what_a_later_torch_can_say_is_refused():
    """Unknown fields raise unless they have their default."""
    fields = [("sum_backwards", bool, False), ("axes", list, dataclasses.field(default_factory=list))]
    for kind, argument, ours in (
        (fsdp.MixedPrecision, "mixed_precision", MixedPrecision),
        (flatshard.fsdp2.MixedPrecisionPolicy, "mixed_precision", MixedPrecision),
        (fsdp.CPUOffload, "cpu_offload", CPUOffload),
        (fsdp.OffloadPolicy, "cpu_offload", CPUOffload),
    ):
        frozen = kind.__dataclass_params__.frozen
        later = dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=frozen)
        for name, value in (("sum_backwards", True), ("axes", [1])):
            message = rf"^{argument}: {kind.__name__}\({name}=.* has no counterpart .*: leave it out"
            with pytest.raises(ValueError, match=message):
                fully_shard(nn.Linear(2, 2), **{argument: later(**{name: value})})
        assert ours.of(later()) == ours.of(kind())


def test_what_is_no_dtype():
    fields = "param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"
    for field, value in itertools.product(fields, (torch.int8, "bf16", torch.complex64)):
        message = rf"MixedPrecision\({field}=.*must be a floating-point torch.dtype or None"
        with pytest.raises(ValueError, match=message):
            MixedPrecision(**{field: value})


def test_gradients_are_not_reduced_in_float8():
    for dtype in [d for name, d in vars(torch).items() if name.startswith("float8_")]:
        for field in ("reduce_dtype", "param_dtype"):
            with pytest.raises(ValueError, match=rf"{field}={dtype}.*flatshard\.comm\.QuantizedCollectives"):
                MixedPrecision(**{field: dtype})
        assert MixedPrecision(param_dtype=dtype, reduce_dtype=torch.bfloat16).param_dtype is dtype


@ranks(2)
def test_low_precision_masters_with_a_stateful_optimizer_are_warned_about(ctx):
    """Each model warns once, even if its parameters join an optimizer that has already stepped."""

    def warned(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(torch.ones(2, 4, dtype=model.weight.dtype)).sum().backward()
                optimizer.step()
        return "; ".join(str(w.message) for w in caught).count("AdamW keeps its state for 'weight', 'bias' in 16 bits")

    def sharded(dtype: torch.dtype) -> nn.Module:
        return fully_shard(nn.Linear(4, 4).to(dtype), process_group=ctx.group)

    low, high = sharded(BF16), sharded(FP32)
    assert warned(low, torch.optim.SGD(low.parameters(), lr=0.1)) == 0  # has no state that loses precision
    assert warned(low, torch.optim.AdamW(low.parameters())) == 1
    optimizer = torch.optim.AdamW(high.parameters())
    assert warned(high, optimizer) == 0
    for late in (optimizer, torch.optim.AdamW(nn.Linear(1, 1).parameters())):
        late.step()
        low = sharded(BF16)
        late.step()  # known to flatshard before it gets the parameters
        late.add_param_group({"params": low.parameters()})
        assert warned(low, late) == 1


@ranks(2)
def test_a_kept_cast(ctx):
    """Keep casts of units that are freed after forward. ``core/test_subgroups`` tests when they are dropped."""
    policy = MixedPrecision(BF16, reduce_dtype=FP32, keep_cast_shard=True)
    model = fully_shard(Net(), policy={NormBlock}, process_group=ctx.group, mixed_precision=policy)
    loss = model(*INPUTS).sum()
    handles = [unit.handle for unit in units_below(model)]
    kept = [(cast.dtype, cast.numel()) for handle in handles for cast in handle.source.kept]
    assert kept == [(BF16, flat.layout.shard_numel) for h in handles if h.is_sharded for flat in h.flats] != []
    loss.backward()
    assert not any(handle.source.kept for handle in handles)
