"""Mixed precision: which dtype what has, and where. Numbers: ``together/test_parity_with_fsdp2``, and the fuzzer's, whose
oracle casts, computes, averages in the reduce dtype and casts back by hand.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import warnings
from typing import Any

import pytest
import torch
from on_ranks import ranks
from parity import whole_gradients
from torch import nn
from torch.distributed import fsdp

import flatshard
import flatshard.fsdp2
from flatshard import CPUOffload, CustomPolicy, MixedPrecision, ShardingStrategy, _torch, fully_shard
from flatshard._composable.find import units_below

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FULL, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD


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


@dataclasses.dataclass
class Point:
    x: torch.Tensor


class Widening(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


@ranks(2)
def test_inputs_and_outputs_are_cast(ctx):
    ids, scale = torch.zeros(2, 3, dtype=torch.long), torch.ones(())
    everywhere = MixedPrecision(BF16, cast_forward_inputs=True, output_dtype=FP32)
    inner = dataclasses.replace(everywhere, output_dtype=None)
    units = CustomPolicy(lambda m: {"mixed_precision": inner} if isinstance(m, Block) else False)
    for policy in (everywhere, dataclasses.replace(everywhere, buffer_dtype=FP32)):
        model = fully_shard(Net(), policy=units, process_group=ctx.group, mixed_precision=policy)
        out = model(ids, scale)
        assert out.dtype is FP32
        assert model.ids_seen is torch.long
        assert [b.seen for b in model.blocks] == [[BF16, BF16]] * 2
        out.sum().backward()
        assert model.blocks[0](torch.ones(1, 6)).dtype is BF16  # alone it is the outermost one
    uncast = MixedPrecision(BF16, cast_root_forward_inputs=False)
    model = fully_shard(Block(), process_group=ctx.group, mixed_precision=uncast)
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.ones(1, 6))
    assert model(torch.ones(1, 6, dtype=BF16)).dtype is BF16
    widening = fully_shard(
        Widening(Block()), policy={Block}, process_group=ctx.group, mixed_precision=MixedPrecision(BF16)
    )
    with pytest.raises(RuntimeError, match="dtype"):
        widening(torch.ones(1, 6))  # inputs of inner units are not cast
    # Inputs of any structure.
    seen: list[Any] = []

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, pair, *, named, point):
            seen.extend([pair[0].dtype, pair[1][0].dtype, named["a"].dtype, named["b"], point.x.dtype])
            return {"out": pair[0] * self.weight, "aux": (pair[1][0] * self.weight.sum(),)}

    nested = fully_shard(Nested(), process_group=ctx.group, mixed_precision=everywhere)
    x = torch.ones(3, requires_grad=True)
    out = nested((x, [torch.ones(3)]), named={"a": torch.ones(3), "b": "text"}, point=Point(torch.ones(1)))
    assert seen == [BF16, BF16, BF16, "text", BF16]
    assert out["out"].dtype is FP32
    assert out["aux"][0].dtype is FP32
    out["out"].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is FP32


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.norm_input: list[torch.dtype] = []
        self.norm.register_forward_hook(lambda m, a, o: self.norm_input.extend([a[0].dtype, m.weight.dtype]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


@ranks(2)
def test_ignored_classes_keep_their_precision(ctx):
    policy = MixedPrecision(BF16, buffer_dtype=BF16)
    model = fully_shard(Normed(), process_group=ctx.group, mixed_precision=policy)
    out = model(torch.randn(8, 4))
    assert out.dtype is BF16
    assert model.norm_input == [FP32, FP32]
    assert model.norm.running_mean.dtype is FP32
    out.sum().backward()
    kinds = [(f.dtype, f.compute_dtype) for f in flatshard.describe(model).units[0].flats]
    assert kinds == [(FP32, BF16), (FP32, FP32)]
    nothing = dataclasses.replace(policy, module_classes_to_ignore=())
    model = fully_shard(Normed(), process_group=ctx.group, mixed_precision=nothing)
    model(torch.randn(8, 4)).sum().backward()
    assert model.norm_input == [BF16, BF16]
    assert model.norm.running_mean.dtype is BF16


class Partly(nn.Module):
    """A unit of which some parameters are not cast: of a normalisation that is ignored, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.table = nn.Parameter(torch.arange(40), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) + self.table[:4]


@ranks(1, 2)
def test_units_that_are_cast_in_part(ctx):
    torch.manual_seed(0)
    reference = Partly().eval()
    policy = MixedPrecision(BF16, full_precision_in_eval=True)
    model = fully_shard(copy.deepcopy(reference), process_group=ctx.group, mixed_precision=policy)
    x = torch.rand(2, 4)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model.eval()(x), reference(x))
            with flatshard.summon_full_params(model):
                for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                    assert torch.equal(p, q)
        model.train()(x).sum().backward()
        model.load_state_dict(model.state_dict())
        model.norm.reset_running_stats()


@ranks(1, 3)
def test_summon_full_params(ctx):
    """The user's own dtype, bit for bit; changes written back without rounding; nested; forwards in full precision inside."""
    torch.manual_seed(0)
    reference = Net()
    policy = MixedPrecision(BF16, reduce_dtype=FP32)
    for strategy, offload in itertools.product((FULL, NO_SHARD), (False, True)):
        model = copy.deepcopy(reference)
        fully_shard(model, policy={Block}, process_group=ctx.group, mixed_precision=policy, strategy=strategy)
        ids, scale = torch.ones(2, 3, dtype=torch.long), torch.ones(())
        with torch.no_grad(), flatshard.summon_full_params(model, offload_to_cpu=offload):
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(p, q)
                p.add_(1e-6)
            with flatshard.summon_full_params(model, offload_to_cpu=offload):
                model.blocks[0].inner.bias.fill_(1 / 3)
            assert model(ids, scale).dtype is FP32
            with torch.enable_grad(), pytest.raises(RuntimeError, match="runs forward with gradients inside summon"):
                model(ids, scale)
        for _ in range(2):
            with torch.no_grad(), flatshard.summon_full_params(model, writeback=False):
                for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                    expected = torch.full_like(q, 1 / 3) if name == "blocks.0.inner.bias" else q + 1e-6
                    assert torch.equal(p, expected), name
                    p.zero_()  # which is not written back
        model(ids, scale).sum().backward()
        assert all(type(p) is flatshard.tensors.ShardedParameter for p in model.parameters())


@ranks(2)
def test_summon_full_params_of_some_units(ctx):
    """A unit in full precision inside one that is not, or around one. Tensors are cast on the way from one to the other."""
    for output_dtype in (None, FP32):
        check_some_units(ctx, output_dtype)


def check_some_units(ctx, output_dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    x, dtype = torch.randn(2, 3), output_dtype or BF16
    full = model(x).detach()
    first, inner, last = (copy.deepcopy(m) for m in model)
    for module, dtypes in ((model[1], {}), (model, {"output_dtype": output_dtype})):
        fully_shard(module, process_group=ctx.group, mixed_precision=MixedPrecision(BF16, **dtypes))
    with torch.no_grad():
        low = [m.bfloat16() for m in (copy.deepcopy(first), copy.deepcopy(inner), copy.deepcopy(last))]
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
    low = MixedPrecision(BF16, cast_forward_inputs=True)
    policy = CustomPolicy(lambda m: {"mixed_precision": low} if isinstance(m, Block) else False)
    model = fully_shard(Net(), policy=policy, process_group=ctx.group)
    dtypes = {u.fqn: {f.compute_dtype for f in u.flats} for u in flatshard.describe(model).units}
    assert dtypes == {"": {FP32}, "blocks.0": {BF16}, "blocks.1": {BF16}}
    with pytest.raises(RuntimeError, match="dtype"):  # the head is fp32 and is given bf16: the user's affair
        model(torch.ones(2, 3, dtype=torch.long), torch.ones(())).sum().backward()
    high = CustomPolicy(
        lambda m: {"mixed_precision": dataclasses.replace(low, output_dtype=FP32)} if isinstance(m, Block) else False
    )
    model = fully_shard(Net(), policy=high, process_group=ctx.group)
    model(torch.ones(2, 3, dtype=torch.long), torch.ones(())).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {FP32}


def test_describe_names_all_dtypes(fake_group):
    policy = MixedPrecision(BF16, FP32, FP16, keep_low_precision_grads=True)
    described = flatshard.describe(fully_shard(Net(), policy={Block}, mixed_precision=policy))
    flat = described.units[0].flats[0]
    assert (flat.dtype, flat.compute_dtype, flat.reduce_dtype, flat.grad_dtype) == (FP32, BF16, FP32, FP32)
    assert described.units[0].buffer_dtypes == (FP16,)
    for told in ("dtypes: master/compute/gradient/reduce", "fp32/bf16/fp32/fp32", "fp16"):
        assert told in str(described)


# -- a dtype for each parameter ----------------------------------------------------------------------------------------


class NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6, bias=False)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [self.norm.weight.dtype, self.up.weight.dtype]
        norm = nn.functional.layer_norm(x.to(self.norm.weight.dtype), (6,), self.norm.weight, self.norm.bias)
        return x + self.down(self.up(norm.to(x.dtype)).relu())


def norms_in_their_own(p: nn.Parameter) -> torch.dtype | None:
    return p.dtype if tuple(p.shape) == (6,) else None


@ranks(2, 3)
def test_a_dtype_for_each_parameter(ctx):
    """As in one process that casts by hand. Bit for bit as FSDP2: ``together/test_parity_with_fsdp2``."""
    torch.manual_seed(0)
    reference = nn.Sequential(NormedBlock(), nn.Sequential(NormedBlock(), NormedBlock()))
    model = copy.deepcopy(reference)
    policy = MixedPrecision(BF16, FP32, param_dtype_override_fn=norms_in_their_own)
    fully_shard(model, policy={NormedBlock}, process_group=ctx.group, mixed_precision=policy)
    slices = torch.randn(ctx.world_size, 4, 6).to(BF16)
    sums: dict[str, torch.Tensor] = {}
    for x in slices:
        plain = copy.deepcopy(reference)
        for p in plain.parameters():
            p.data = p.data.to(norms_in_their_own(p) or BF16)
        plain(x).float().square().mean().backward()
        for name, p in plain.named_parameters():
            sums[name] = sums.get(name, 0) + p.grad.float()
    model(slices[ctx.rank]).float().square().mean().backward()
    assert model[0].seen == model[1][1].seen == [FP32, BF16]
    for name, grad in whole_gradients(model).items():
        assert grad.dtype is FP32
        torch.testing.assert_close(grad, sums[name] / ctx.world_size, rtol=1e-6, atol=1e-7, msg=name)
    flats = {f.fqns: (f.dtype, f.compute_dtype) for f in flatshard.describe(model).units[1].flats}
    assert sorted(flats.values(), key=str) == [(FP32, BF16), (FP32, FP32)]
    assert next(dtypes for fqns, dtypes in flats.items() if "0.norm.weight" in fqns) == (FP32, FP32)


# [Note: One gather for several dtypes]
# FSDP2 sends the bytes of all dtypes in one all-gather, and copies each parameter out of it, as it always does. Here the
# output of a gather is the memory of the parameters, which lie across the boundaries between ranks. One gather would put
# each rank's pieces of all dtypes one after another, so that no dtype is in one piece, and all would have to be copied. For
# a GPT block of width 4096 whose two norms stay in fp32, one more gather sends 64 KiB beside 384 MiB of bf16; one for both
# would send as much, and read and write 768 MiB more each time.


def test_each_dtype_of_a_unit_is_gathered_by_itself():
    """One more collective for each dtype, and the bytes of each dtype."""

    def gathers(fn: Any) -> list[int]:
        policy = MixedPrecision(BF16, FP32, param_dtype_override_fn=fn)
        plan = flatshard.plan(NormedBlock(), world_size=2, mixed_precision=policy)
        return [c.nbytes for c in plan.collectives if c.kind == "all-gather" and c.phase == "forward"]

    norm, linear, padding = 2 * 6, 6 * 9 + 9 + 9 * 6, 64
    assert len(gathers(None)) == 1
    of_norm, of_linear = sorted(gathers(norms_in_their_own))
    assert 4 * norm <= of_norm <= 4 * norm + padding
    assert 2 * linear <= of_linear <= 2 * linear + padding


@pytest.mark.parametrize(("wrong", "shown"), [(FP16, "torch.float16"), ("bf16", "'bf16'"), (FP64, "torch.float64")])
def test_dtypes_that_a_parameter_cannot_have(wrong: Any, shown: str):
    model = NormedBlock()
    policy = MixedPrecision(BF16, param_dtype_override_fn=lambda p: wrong if p is model.up.bias else None)
    message = f"returned {shown} for parameter 'up.bias': it may return .*torch.float32, or"
    with pytest.raises(ValueError, match=message):
        flatshard.plan(model, world_size=2, mixed_precision=policy)
    assert type(model.up.bias) is nn.Parameter


# -- the policy objects ------------------------------------------------------------------------------------------------


def test_policies_of_fsdp_are_accepted():
    one = MixedPrecision.of(fsdp.MixedPrecision(BF16, FP32, FP16, keep_low_precision_grads=True))
    assert one == MixedPrecision(BF16, FP32, FP16, keep_low_precision_grads=True)
    two = MixedPrecision.of(fsdp.MixedPrecisionPolicy(BF16, FP32, output_dtype=FP16))
    expected = MixedPrecision(BF16, FP32, output_dtype=FP16, cast_forward_inputs=True, module_classes_to_ignore=())
    assert dataclasses.replace(two, reduce_in_param_dtype=True) == expected
    assert MixedPrecision.of(None) == MixedPrecision()
    assert CPUOffload.of(fsdp.CPUOffload(True)) == CPUOffload(True)
    assert CPUOffload.of(fsdp.CPUOffloadPolicy(pin_memory=False)) == CPUOffload(True, False)
    assert not CPUOffload.of(fsdp.OffloadPolicy()).offload_params
    assert not CPUOffload.of(None).offload_params
    assert CPUOffload.of(True).offload_params


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        (fsdp.MixedPrecision, "mixed_precision"),
        (fsdp.MixedPrecisionPolicy, "mixed_precision"),
        (flatshard.fsdp2.MixedPrecisionPolicy, "mixed_precision"),
        (fsdp.CPUOffload, "cpu_offload"),
        (fsdp.CPUOffloadPolicy, "cpu_offload"),
        (fsdp.OffloadPolicy, "cpu_offload"),
    ],
)
def test_what_a_later_torch_can_say_is_refused(kind: type, argument: str):
    """A field that is not known is refused unless it says nothing."""
    frozen = kind.__dataclass_params__.frozen
    later = dataclasses.make_dataclass(
        kind.__name__,
        [("sum_backwards", bool, False), ("axes", list, dataclasses.field(default_factory=list))],
        bases=(kind,),
        frozen=frozen,
    )
    model = nn.Linear(2, 2)
    for given in ({"sum_backwards": True}, {"axes": [1]}):
        (name,) = given
        message = rf"^{argument}: {kind.__name__}\({name}=.* has no counterpart .*: leave it out"
        with pytest.raises(ValueError, match=message):
            fully_shard(model, **{argument: later(**given)})
    assert type(model.weight) is nn.Parameter
    ours = MixedPrecision if argument == "mixed_precision" else CPUOffload
    assert ours.of(later()) == ours.of(kind())


@ranks(2)
def test_reductions_without_a_dtype_are_those_of_the_policys_class(ctx):
    """The bf16 gradients 256 and 1 of two ranks: 128.5, or 128.0 where the sum is rounded to bf16."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.weight.dtype is BF16
            return (self.weight * x).sum()

    def reduced(policy: Any, backwards: int = 1) -> float:
        model = fully_shard(Scale(), process_group=ctx.group, mixed_precision=policy)
        for i in range(backwards):
            with contextlib.nullcontext() if i == backwards - 1 else flatshard.no_sync(model):
                model(torch.full((4,), 256.0 if (ctx.rank + i) % 2 == 0 else 1.0)).backward()
        with flatshard.summon_full_params(model, with_grads=True):
            assert model.weight.grad.dtype is FP32
            return model.weight.grad[3].item()

    theirs = Scale()
    fsdp.fully_shard(theirs, mesh=ctx.mesh, mp_policy=fsdp.MixedPrecisionPolicy(BF16))
    theirs(torch.full((4,), 256.0 if ctx.rank == 0 else 1.0)).backward()
    expected = theirs.weight.grad.full_tensor()[3].item()
    assert expected == (128.0 if _torch.FSDP2_REDUCES_IN_PARAM_DTYPE else 128.5)
    for kind in (fsdp.MixedPrecisionPolicy, flatshard.fsdp2.MixedPrecisionPolicy):
        assert reduced(kind(BF16)) == expected
        assert reduced(kind(BF16), 2) == (256.0 if _torch.FSDP2_REDUCES_IN_PARAM_DTYPE else 257.0)
    for kind in (fsdp.MixedPrecision, MixedPrecision):
        assert reduced(kind(BF16)) == 128.0
    assert reduced(MixedPrecision(BF16, reduce_in_param_dtype=False)) == 128.5
    assert reduced(MixedPrecision(BF16, BF16, reduce_in_param_dtype=False)) == 128.0


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"])
@pytest.mark.parametrize("value", [torch.int8, "bf16", torch.complex64])
def test_what_is_no_dtype(field: str, value: object):
    with pytest.raises(ValueError, match=f"MixedPrecision\\({field}=.*must be a floating-point torch.dtype or None"):
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
        found = "; ".join(str(w.message) for w in caught)
        expected = "AdamW keeps its state for 'weight', 'bias' in 16 bits"
        assert found.count("keeps its state") == found.count(expected), found
        return found.count(expected)

    def sharded(dtype: torch.dtype) -> nn.Module:
        return fully_shard(nn.Linear(4, 4).to(dtype), process_group=ctx.group)

    assert warned(low := sharded(BF16), torch.optim.AdamW(low.parameters())) == 1
    assert warned(low := sharded(BF16), torch.optim.SGD(low.parameters(), lr=0.1)) == 0  # it has no state to lose
    optimizer = torch.optim.AdamW((high := sharded(FP32)).parameters())
    assert warned(high, optimizer) == 0
    for late in (optimizer, torch.optim.AdamW(nn.Linear(1, 1).parameters())):
        late.step()
        late.add_param_group({"params": (low := sharded(BF16)).parameters()})
        assert warned(low, late) == 1


@ranks(2)
def test_a_kept_cast_lives_from_forward_to_backward(ctx):
    """From forward to backward, and not a moment longer."""
    policy = MixedPrecision(BF16, reduce_dtype=FP32, keep_cast_shard=True)
    model = fully_shard(Net(), policy={Block}, process_group=ctx.group, mixed_precision=policy)
    handles = [u.handle for u in units_below(model)]
    ids, scale = torch.ones(2, 3, dtype=torch.long), torch.ones(())

    def kept() -> list[torch.Tensor]:
        return [cast for handle in handles for cast in handle.source.kept]

    loss = model(ids, scale).sum()
    freed = [b for handle in handles if handle.is_sharded for b in handle.flats]
    assert [(cast.dtype, cast.numel()) for cast in kept()] == [(BF16, b.layout.shard_numel) for b in freed] != []
    loss.backward()
    assert not kept()
    loss = model(ids, scale).sum()
    assert kept()
    del loss
    assert not kept()
    with torch.no_grad():
        model(ids, scale)
    assert not kept()


@ranks(1, 2)
def test_gradient_from_outside(ctx):
    """A gradient that the user makes inside ``summon_full_params`` gets the dtype that gradients have here."""
    policy = MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True)
    model = fully_shard(nn.Linear(3, 4), process_group=ctx.group, mixed_precision=policy)
    with flatshard.summon_full_params(model, with_grads=True):
        model.weight.grad = torch.ones_like(model.weight)
    assert model.weight.grad.dtype is BF16
    assert model.bias.grad is None
