"""Mixed precision: which dtype what has, and where. Numbers: ``together/test_parity_with_fsdp2``, and the fuzzer's, whose
oracle casts, computes, averages in the reduce dtype and casts back by hand.
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
from flatshard import CPUOffload, CustomPolicy, MixedPrecision, ShardingStrategy, _torch, fully_shard
from flatshard._composable.find import units_below

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FULL, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
INPUTS = torch.ones(2, 3, dtype=torch.long), torch.ones(())
"""Of a ``Net``."""


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 9)
        self.outer = nn.Linear(9, width, bias=False)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [x.dtype, self.inner.weight.dtype]
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.full((6,), 0.5))
        self.ids_seen: torch.dtype | None = None

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.ids_seen = ids.dtype
        x = self.embed(ids) * scale
        x = x + self.offset.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Widening(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


@ranks(2)
def test_inputs_and_outputs_are_cast(ctx):
    shard = functools.partial(fully_shard, process_group=ctx.group)
    everywhere = MixedPrecision(BF16, cast_forward_inputs=True, output_dtype=FP32)
    inner = dataclasses.replace(everywhere, output_dtype=None)
    units = CustomPolicy(lambda m: {"mixed_precision": inner} if isinstance(m, Block) else False)
    for policy in (everywhere, dataclasses.replace(everywhere, buffer_dtype=FP32)):
        model = shard(Net(), policy=units, mixed_precision=policy)
        out = model(*INPUTS)
        assert out.dtype is FP32
        assert model.ids_seen is torch.long
        assert [b.seen for b in model.blocks] == [[BF16, BF16]] * 2
        out.sum().backward()
        assert model.blocks[0](torch.ones(1, 6)).dtype is BF16  # alone it is the outermost one
    model = shard(Block(), mixed_precision=MixedPrecision(BF16, cast_root_forward_inputs=False))
    assert model(torch.ones(1, 6, dtype=BF16)).dtype is BF16
    widening = shard(Widening(Block()), policy={Block}, mixed_precision=MixedPrecision(BF16))
    for uncast in (model, widening):  # inputs of inner units are not cast
        with pytest.raises(RuntimeError, match="dtype"):
            uncast(torch.ones(1, 6))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.seen: list[torch.dtype] = []
        self.norm.register_forward_hook(lambda m, a, o: self.seen.extend([a[0].dtype, m.weight.dtype]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


@ranks(2)
def test_ignored_classes_keep_their_precision(ctx):
    policy = MixedPrecision(BF16, buffer_dtype=BF16)
    for ignores, norm in ((policy, FP32), (dataclasses.replace(policy, module_classes_to_ignore=()), BF16)):
        model = fully_shard(Normed(), process_group=ctx.group, mixed_precision=ignores)
        out = model(torch.randn(8, 4))
        out.sum().backward()
        assert out.dtype is BF16
        assert model.seen == [norm, norm]
        assert model.norm.running_mean.dtype is norm
        assert {f.compute_dtype for f in flatshard.describe(model).units[0].flats} == {BF16, norm}


@ranks(1, 3)
def test_summon_full_params(ctx):
    """The user's own dtype, bit for bit; changes written back without rounding; nested; forwards in full precision inside."""
    torch.manual_seed(0)
    reference = Net()
    policy = MixedPrecision(BF16, reduce_dtype=FP32)
    for strategy, offload in itertools.product((FULL, NO_SHARD), (False, True)):
        model = copy.deepcopy(reference)
        fully_shard(model, policy={Block}, process_group=ctx.group, mixed_precision=policy, strategy=strategy)
        with torch.no_grad(), flatshard.summon_full_params(model, offload_to_cpu=offload):
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(p, q)
                p.add_(1e-6)
            with flatshard.summon_full_params(model, offload_to_cpu=offload):
                model.blocks[0].inner.bias.fill_(1 / 3)
            assert model(*INPUTS).dtype is FP32
        for _ in range(2):
            with torch.no_grad(), flatshard.summon_full_params(model, writeback=False):
                for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                    expected = torch.full_like(q, 1 / 3) if name == "blocks.0.inner.bias" else q + 1e-6
                    assert torch.equal(p, expected), name
                    p.zero_()  # which is not written back
        model(*INPUTS).sum().backward()


@pytest.mark.parametrize("output_dtype", [None, FP32])
@ranks(2)
def test_summon_full_params_of_some_units(ctx, output_dtype: torch.dtype | None):
    """A unit in full precision inside one that is not, or around one. Tensors are cast on the way from one to the other."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(torch.arange(1.0, 1 + param.numel()).view_as(param).sin() / (number + 1))
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
    """What forward changes in its own parameters is kept; what it doesn't is not rounded to the compute dtype."""
    model = fully_shard(Clamped(), process_group=ctx.group, mixed_precision=MixedPrecision(BF16))
    with torch.no_grad():
        model(torch.ones(5))
    with flatshard.summon_full_params(model, writeback=False):
        assert torch.equal(model.weight, torch.tensor([0.1, 0.5, 1 / 3, -0.2, 0.5]))


@ranks(2)
def test_override_by_policy(ctx):
    """Per-unit policies; tied parameters keep those of the unit that owns them."""
    low = MixedPrecision(BF16, cast_forward_inputs=True, output_dtype=FP32)
    policy = CustomPolicy(lambda m: {"mixed_precision": low} if isinstance(m, Block) else False)
    model = fully_shard(Net(), policy=policy, process_group=ctx.group)
    dtypes = {u.fqn: {f.compute_dtype for f in u.flats} for u in flatshard.describe(model).units}
    assert dtypes == {"": {FP32}, "blocks.0": {BF16}, "blocks.1": {BF16}}
    model(*INPUTS).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {FP32}


def norms_in_their_own(p: nn.Parameter) -> torch.dtype | None:
    return p.dtype if tuple(p.shape) == (6,) else None


def norm_block() -> NormBlock:
    return NormBlock(6, 9, bias=False)


def test_a_dtype_for_each_parameter(fake_group):
    """Numbers: bit for bit as FSDP2's, in ``together/test_parity_with_fsdp2``."""
    policy = MixedPrecision(BF16, FP32, param_dtype_override_fn=norms_in_their_own)
    model = fully_shard(nn.Sequential(norm_block(), norm_block()), policy={NormBlock}, mixed_precision=policy)
    flats = {f.fqns[0]: (f.dtype, f.compute_dtype) for f in flatshard.describe(model).units[1].flats}
    assert flats == {"0.norm.weight": (FP32, FP32), "0.up.weight": (FP32, BF16)}


# [Note: One gather for several dtypes]
# The output of a gather is the memory of the parameters. One for all dtypes would put each rank's pieces of all of them one
# after another, and all would have to be copied, as FSDP2 does: 768 MiB for a GPT block, for one gather of 64 KiB.


def test_each_dtype_of_a_unit_is_gathered_by_itself():
    """One more collective for each dtype, and the bytes of each dtype."""

    def gathers(fn: Any) -> list[int]:
        policy = MixedPrecision(BF16, FP32, param_dtype_override_fn=fn)
        plan = flatshard.plan(norm_block(), world_size=2, mixed_precision=policy)
        return [c.nbytes for c in plan.collectives if c.kind == "all-gather" and c.phase == "forward"]

    norm, linear, padding = 2 * 6, 6 * 9 + 9 + 9 * 6, 64
    assert len(gathers(None)) == 1
    of_norm, of_linear = sorted(gathers(norms_in_their_own))
    assert 4 * norm <= of_norm <= 4 * norm + padding
    assert 2 * linear <= of_linear <= 2 * linear + padding


@pytest.mark.parametrize(("wrong", "shown"), [(FP16, "torch.float16"), ("bf16", "'bf16'"), (FP64, "torch.float64")])
def test_dtypes_that_a_parameter_cannot_have(wrong: Any, shown: str):
    model = norm_block()
    policy = MixedPrecision(BF16, param_dtype_override_fn=lambda p: wrong if p is model.up.bias else None)
    with pytest.raises(
        ValueError, match=f"returned {shown} for parameter 'up.bias': it may return .*torch.float32, or"
    ):
        flatshard.plan(model, world_size=2, mixed_precision=policy)


def test_policies_of_fsdp_are_accepted():
    one = MixedPrecision.of(fsdp.MixedPrecision(BF16, FP32, FP16, keep_low_precision_grads=True))
    assert one == MixedPrecision(BF16, FP32, FP16, keep_low_precision_grads=True)
    two = MixedPrecision.of(fsdp.MixedPrecisionPolicy(BF16, FP32, output_dtype=FP16))
    expected = MixedPrecision(BF16, FP32, output_dtype=FP16, cast_forward_inputs=True, module_classes_to_ignore=())
    assert dataclasses.replace(two, reduce_in_param_dtype=True) == expected
    assert two.reduce_in_param_dtype == _torch.FSDP2_REDUCES_IN_PARAM_DTYPE
    assert one.reduce_in_param_dtype
    assert MixedPrecision.of(None) == MixedPrecision()
    assert CPUOffload.of(fsdp.CPUOffload(True)) == CPUOffload(True)
    assert CPUOffload.of(fsdp.CPUOffloadPolicy(pin_memory=False)) == CPUOffload(True, False)
    assert not CPUOffload.of(fsdp.OffloadPolicy()).offload_params
    assert not CPUOffload.of(None).offload_params
    assert CPUOffload.of(True).offload_params


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        *((kind, "mixed_precision") for kind in (fsdp.MixedPrecision, flatshard.fsdp2.MixedPrecisionPolicy)),
        *((kind, "cpu_offload") for kind in (fsdp.CPUOffload, fsdp.OffloadPolicy)),
    ],
)
def test_what_a_later_torch_can_say_is_refused(kind: type, argument: str):
    """A field that is not known is refused unless it says nothing."""
    later = dataclasses.make_dataclass(
        kind.__name__,
        [("sum_backwards", bool, False), ("axes", list, dataclasses.field(default_factory=list))],
        bases=(kind,),
        frozen=kind.__dataclass_params__.frozen,
    )
    for name, value in (("sum_backwards", True), ("axes", [1])):
        message = rf"^{argument}: {kind.__name__}\({name}=.* has no counterpart .*: leave it out"
        with pytest.raises(ValueError, match=message):
            fully_shard(nn.Linear(2, 2), **{argument: later(**{name: value})})
    ours = MixedPrecision if argument == "mixed_precision" else CPUOffload
    assert ours.of(later()) == ours.of(kind())


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"])
def test_what_is_no_dtype(field: str):
    for value in (torch.int8, "bf16", torch.complex64):
        with pytest.raises(
            ValueError, match=f"MixedPrecision\\({field}=.*must be a floating-point torch.dtype or None"
        ):
            MixedPrecision(**{field: value})


@ranks(2)
def test_low_precision_masters_with_a_stateful_optimizer_are_warned_about(ctx):
    """Once; also where the parameters come into a group of an optimizer that has stepped already."""

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
    assert warned(low, torch.optim.SGD(low.parameters(), lr=0.1)) == 0  # it has no state to lose
    assert warned(low, torch.optim.AdamW(low.parameters())) == 1
    optimizer = torch.optim.AdamW(high.parameters())
    assert warned(high, optimizer) == 0
    for late in (optimizer, torch.optim.AdamW(nn.Linear(1, 1).parameters())):
        late.step()
        low = sharded(BF16)
        late.step()  # it is known now, without them
        late.add_param_group({"params": low.parameters()})
        assert warned(low, late) == 1


@ranks(2)
def test_a_kept_cast_lives_from_forward_to_backward(ctx):
    """And not a moment longer."""
    policy = MixedPrecision(BF16, reduce_dtype=FP32, keep_cast_shard=True)
    model = fully_shard(Net(), policy={Block}, process_group=ctx.group, mixed_precision=policy)
    handles = [u.handle for u in units_below(model)]

    def kept() -> list[torch.Tensor]:
        return [cast for handle in handles for cast in handle.source.kept]

    loss = model(*INPUTS).sum()
    freed = [b for handle in handles if handle.is_sharded for b in handle.flats]
    assert [(cast.dtype, cast.numel()) for cast in kept()] == [(BF16, b.layout.shard_numel) for b in freed] != []
    loss.backward()
    assert not kept()
    loss = model(*INPUTS).sum()
    assert kept()
    del loss
    assert not kept()
    with torch.no_grad():
        model(*INPUTS)
    assert not kept()
