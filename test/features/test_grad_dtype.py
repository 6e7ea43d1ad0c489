"""``p.grad_dtype``, against one process that has the same: 256 + 1 - 256 is 1 in float32, and 0 in bfloat16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from on_ranks import ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, fully_shard
from flatshard.optim import WholeParameterOptimizer

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FULL, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
STEPS = (256.0, 1.0, -256.0)
USES = (1.0, -256.0, 1.0, 256.0, 1.0)


class Scale(nn.Module):
    """The gradient of each element is the input."""

    def __init__(self, size: int = 5) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(size, 3)), nn.Parameter(torch.ones(size + 2))

    def forward(self, *inputs: float) -> Tensor:
        return sum((p * torch.tensor(x, dtype=p.dtype)).sum() for x in inputs for p in (self.a, self.b))


class Net(nn.Sequential):
    """The second is too large for its gradients to be copied together."""

    def __init__(self) -> None:
        super().__init__(Scale(), Scale(17_000))

    def forward(self, *inputs: float) -> Tensor:
        return self[0](*inputs) + self[1](*inputs)


def choose(model: nn.Module, names: str, dtype: torch.dtype | None = FP32) -> None:
    for name, param in model.named_parameters():
        if name[-1] in names:
            param.grad_dtype = dtype


def sharded(ctx: Any, names: str = "ab", after: bool = False, dtype: Any = BF16, **options: Any) -> nn.Module:
    model = Net().to(dtype)
    if not after:
        choose(model, names)
    fully_shard(model, policy={Scale}, process_group=ctx.group, **options)
    if after:
        choose(model, names)
    return model


def gradients(model: nn.Module) -> dict[tuple[str, Any], set[float]]:
    """The values of all whole gradients, by the parameters' names and the gradients' dtypes."""
    found: dict[tuple[str, Any], set[float]] = {}
    with flatshard.summon_full_params(model, with_grads=True, writeback=False):
        for name, param in model.named_parameters():
            assert param.grad is not None, name
            assert param.grad.shape == param.shape
            found.setdefault((name[-1], param.grad.dtype), set()).update(param.grad.unique().tolist())
    return found


def in_one_process(names: str, *steps: tuple[float, ...]) -> dict[tuple[str, Any], set[float]]:
    plain = Net().to(BF16)
    choose(plain, names)
    for inputs in steps:
        plain(*inputs).backward()
    return {(n[-1], p.grad.dtype): set(p.grad.unique().tolist()) for n, p in plain.named_parameters()}


WIDE = {("a", FP32): {1.0}, ("b", FP32): {1.0}}
MIXED = {("a", FP32): {1.0}, ("b", BF16): {0.0}}


@pytest.mark.parametrize("strategy", [FULL, NO_SHARD], ids=lambda s: s.name)
@ranks(1, 3)
def test_accumulates_as_in_one_process(ctx, strategy: ShardingStrategy):
    assert in_one_process("a", *[(x,) for x in STEPS]) == MIXED
    for names, expected in (("ab", WIDE), ("a", MIXED)):
        for after in (False, True):
            ctx.note(f"{strategy}, {names}, {after}")
            model = sharded(ctx, names, after, strategy=strategy)
            for x in STEPS:  # into .grad
                model(x).backward()
            assert {n[-1]: p.grad.dtype for n, p in model.named_parameters()} == dict(expected.keys())
            assert gradients(model) == expected
            model.zero_grad()
            with flatshard.no_sync(model):
                for x in STEPS[:2]:
                    model(x).backward()
            model(STEPS[2]).backward()
            held = {(n, d): {1.0} for n, d in expected}  # in the dtype of the reduction
            assert gradients(model) == (held if ctx.world_size > 1 else expected)
            model.zero_grad()
            model(*USES).backward()  # autograd adds them up
            assert gradients(model) == in_one_process(names, USES)


@ranks(2)
def test_reduced_in_it(ctx):
    """Ranks have 256 and 1."""
    mine = STEPS[ctx.rank]
    own = MixedPrecision(BF16, reduce_in_param_dtype=False)  # as FSDP2's policy since torch 2.15
    for options, names, a, b in (
        ({}, "", (BF16, 128.0), (BF16, 128.0)),
        ({}, "ab", (FP32, 128.5), (FP32, 128.5)),
        ({}, "a", (FP32, 128.5), (BF16, 128.0)),  # reduced together, in the promoted dtype
        ({"strategy": NO_SHARD}, "a", (FP32, 128.5), (BF16, 128.0)),
        ({"mixed_precision": MixedPrecision(reduce_dtype=BF16)}, "a", (FP32, 128.0), (BF16, 128.0)),
        ({"mixed_precision": MixedPrecision(reduce_dtype=FP32)}, "a", (FP32, 128.5), (BF16, 128.0)),
        (
            {"mixed_precision": MixedPrecision(reduce_dtype=FP32, keep_low_precision_grads=True)},
            "a",
            (FP32, 128.5),
            (FP32, 128.5),
        ),
        ({"dtype": FP32, "mixed_precision": MixedPrecision(BF16)}, "", (FP32, 128.0), (FP32, 128.0)),
        ({"dtype": FP32, "mixed_precision": own}, "", (FP32, 128.5), (FP32, 128.5)),
        ({"dtype": FP64, "mixed_precision": own}, "a", (FP32, 128.5), (FP64, 128.5)),
        ({"dtype": FP64, "mixed_precision": MixedPrecision(BF16)}, "ab", (FP32, 128.5), (FP32, 128.5)),
    ):
        ctx.note(f"{options} {names}")
        model = sharded(ctx, names, **options)
        model(mine).backward()
        assert gradients(model) == {("a", a[0]): {a[1]}, ("b", b[0]): {b[1]}}
    narrow = sharded(ctx, "", dtype=FP32)
    choose(narrow, "ab", BF16)
    narrow(mine).backward()
    assert gradients(narrow) == {("a", BF16): {128.0}, ("b", BF16): {128.0}}


class Hands(torch.autograd.Function):
    """A gradient in float32, whatever the parameter is."""

    @staticmethod
    def forward(ctx: Any, param: Tensor) -> Tensor:
        return param.sum().float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.full((9,), 257.0, dtype=FP32)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, dtype=BF16))

    def forward(self) -> Tensor:
        return Hands.apply(self.weight)


@ranks(1, 2, 4)
def test_any_dtype(ctx):
    model = Own()
    model.weight.grad_dtype = None
    fully_shard(model, process_group=ctx.group)
    if ctx.world_size > 1:
        message = r"gradient of 'weight' is torch.float32.*set p.grad_dtype = torch.float32"
        with pytest.raises(RuntimeError, match=message):
            model().backward()
        assert model.weight.grad is None
        model.weight.grad_dtype = FP32  # as it says
    for _ in range(2):
        model().backward()
        assert model.weight.grad.dtype is FP32
        assert set(model.weight.grad.tolist()) <= {257.0}
        model.zero_grad()
    model = Own()
    model.weight.grad_dtype = None
    fully_shard(model, process_group=ctx.group, mixed_precision=MixedPrecision(reduce_dtype=FP32))  # or so
    model().backward()
    assert model.weight.grad.dtype is FP32
    assert set(model.weight.grad.tolist()) <= {257.0}


@ranks(2)
def test_conversions_and_copies(ctx):
    for names, expected in (("ab", WIDE), ("a", {("a", FP32): {1.0}, ("b", FP16): {0.0}})):
        model = sharded(ctx, names)
        model(4.0).backward()
        model.to(FP16)
        assert {n[-1]: p.grad_dtype for n, p in model.named_parameters()} == dict(expected.keys())
        model(-4.0).backward()
        assert {n[-1]: p.grad.dtype for n, p in model.named_parameters()} == dict(expected.keys())
        model.zero_grad()
        for x in (2048.0, 1.0, -2048.0):
            model(x).backward()
        assert gradients(model) == expected

    model = sharded(ctx)
    for dtype in (BF16, FP16):
        state = {n: p.detach().to(dtype) for n, p in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        model(2048.0, 1.0, -2048.0).backward()
        assert gradients(model) == WIDE
        model.zero_grad()
    new = nn.Parameter(model[0].a.detach().clone())
    new.grad_dtype = FP64
    model[0].a = new
    model(1.0).backward()
    assert {p.grad.dtype for p in model[0].parameters()} == {FP32, FP64}

    model = sharded(ctx)
    other = copy.deepcopy(model)
    other(*STEPS).backward()
    assert gradients(other) == WIDE

    model = Net().to(BF16).to("meta")
    choose(model, "a")
    fully_shard(model, policy={Scale}, process_group=ctx.group)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    for x in STEPS:
        model(x).backward()
    assert gradients(model) == MIXED


@ranks(1, 2)
def test_chosen_in_between(ctx):
    """Chosen while there is a graph, and while gradients are held."""
    model = sharded(ctx, "")
    loss = model(*STEPS)
    choose(model, "ab")
    loss.backward()
    assert gradients(model) == WIDE
    model.zero_grad()
    choose(model, "ab", BF16)
    with flatshard.no_sync(model):
        model(256.0).backward()
        if ctx.world_size == 1:  # the gradient is in .grad already
            with pytest.raises(RuntimeError, match="already a gradient"):
                choose(model, "ab")
            return
        choose(model, "ab")
        model(1.0).backward()
    model(-256.0).backward()
    assert gradients(model) == WIDE
    model(1.0).backward()
    assert gradients(model) == {key: {2.0} for key in WIDE}


@ranks(2)
def test_flat_parameters(ctx):
    for names, after in (("ab", False), ("ab", True), ("a", False)):
        model = sharded(ctx, names, after and names == "a")
        flats = flatshard.flat_parameters(model)
        if after:
            for each in flats:
                each.grad_dtype = FP32
        for x in STEPS:
            model(x).backward()
        assert {each.grad.dtype for each in flats} == {FP32}
        assert {v for each in flats for v in each.grad.as_subclass(torch.Tensor).unique().tolist()} <= {0.0, 1.0}
        assert {v for values in gradients(model).values() for v in values} == {1.0}
        torch.optim.SGD(flats, lr=1.0).step()
        with flatshard.summon_full_params(model):
            assert {v for p in model.parameters() for v in p.unique().tolist()} == {0.0}


@ranks(2)
def test_whole_parameter_optimizer(ctx):
    model = sharded(ctx, "a")
    optimizer = WholeParameterOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    for dtype in (FP32, BF16):
        for x in STEPS:
            model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        with flatshard.summon_full_params(model):
            values = {(n[-1], v) for n, p in model.named_parameters() for v in p.unique().tolist()}
        assert values == {("a", 0.0), ("b", 1.0)}, dtype  # of a the gradient was 1, and then 0
        choose(model, "a", BF16)  # no gradient is there


@ranks(4)
def test_dtensors(ctx):
    mesh = ctx.device_mesh((2, 2), ("dp", "tp"))
    for after in (False, True):
        model = Scale(6).to(BF16)
        model.a = nn.Parameter(DTensor.from_local(torch.ones(3, 3, dtype=BF16), mesh["tp"], [Shard(0)]))
        model.b = nn.Parameter(DTensor.from_local(torch.ones(8, dtype=BF16), mesh["tp"], [Replicate()]))
        if not after:
            choose(model, "ab")
        fully_shard(model, device_mesh=mesh["dp"])
        if after:
            choose(model, "ab")

        model.forward = lambda *inputs, model=model: sum((p * x).sum() for x in inputs for p in (model.a, model.b))
        for x in STEPS:
            model(x).full_tensor().backward()
        assert {p.grad.dtype for p in model.parameters()} == {FP32}
        assert {v for p in model.parameters() for v in p.grad.tolist()} <= {1.0}
        model.zero_grad()
        model(*STEPS).full_tensor().backward()
        assert {v for p in model.parameters() for v in p.grad.tolist()} <= {1.0}
