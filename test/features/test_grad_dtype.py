"""``p.grad_dtype``: 256 + 1 - 256 is 1 in float32 and 0 in bfloat16."""

import copy
from typing import Any

import pytest
import torch
from on_ranks import ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, fully_shard

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
STEPS = (256.0, 1.0, -256.0)


class Scale(nn.Module):
    """A module whose parameters' gradients equal the input."""

    def __init__(self, size: int = 5) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(size, 3)), nn.Parameter(torch.ones(size + 2))

    def forward(self, *inputs: float) -> Tensor:
        return sum((p * x).sum() for x in inputs for p in (self.a, self.b))


class Net(nn.Sequential):
    """Two modules, the second too large for copying its gradients together."""

    def __init__(self) -> None:
        super().__init__(Scale(), Scale(17_000))

    def forward(self, *inputs: float) -> Tensor:
        return self[0](*inputs) + self[1](*inputs)


def choose(model: nn.Module, names: str, dtype: torch.dtype | None = FP32) -> None:
    for name, param in model.named_parameters():
        if name[-1] in names:
            param.grad_dtype = dtype


def sharded(ctx: Any, names: str = "ab", dtype: Any = BF16, **options: Any) -> nn.Module:
    model = Net().to(dtype)
    choose(model, names)
    return fully_shard(model, policy={Scale}, process_group=ctx.group, **options)


def gradients(model: nn.Module) -> dict[tuple[str, Any], set[float]]:
    """Return the gradients' values by parameter name and gradient dtype."""
    found: dict[tuple[str, Any], set[float]] = {}
    with flatshard.summon_full_params(model, with_grads=True, writeback=False):
        for name, param in model.named_parameters():
            assert param.grad is not None, name
            assert param.grad.shape == param.shape
            found.setdefault((name[-1], param.grad.dtype), set()).update(param.grad.unique().tolist())
    return found


def train(model: nn.Module, *inputs: float) -> nn.Module:
    """Run a backward for each input."""
    for x in inputs:
        model(x).backward()
    return model


WIDE = {("a", FP32): {1.0}, ("b", FP32): {1.0}}
MIXED = {("a", FP32): {1.0}, ("b", BF16): {0.0}}


@ranks(2)
def test_reduced_in_it(ctx):
    """Reduce 256 of one rank and 1 of the other."""
    mine = STEPS[ctx.rank]
    own = MixedPrecision(BF16, reduce_in_param_dtype=False)  # default of FSDP2's policy since torch 2.15
    in_fp32 = MixedPrecision(reduce_dtype=FP32)
    kept = MixedPrecision(reduce_dtype=FP32, keep_low_precision_grads=True)
    for options, names, a, b in (
        ({}, "", (BF16, 128.0), (BF16, 128.0)),
        ({}, "a", (FP32, 128.5), (BF16, 128.0)),  # reduced together, in the promoted dtype
        ({"strategy": ShardingStrategy.NO_SHARD}, "a", (FP32, 128.5), (BF16, 128.0)),
        ({"mixed_precision": MixedPrecision(reduce_dtype=BF16)}, "a", (FP32, 128.0), (BF16, 128.0)),
        ({"mixed_precision": in_fp32}, "a", (FP32, 128.5), (BF16, 128.0)),
        ({"mixed_precision": kept}, "a", (FP32, 128.5), (FP32, 128.5)),
        ({"dtype": FP32, "mixed_precision": MixedPrecision(BF16)}, "", (FP32, 128.0), (FP32, 128.0)),
        ({"dtype": FP64, "mixed_precision": own}, "a", (FP32, 128.5), (FP64, 128.5)),
        ({"dtype": FP64, "mixed_precision": MixedPrecision(BF16)}, "ab", (FP32, 128.5), (FP32, 128.5)),
    ):
        ctx.note(f"{options} {names}")
        model = train(sharded(ctx, names, **options), mine)
        assert gradients(model) == {("a", a[0]): {a[1]}, ("b", b[0]): {b[1]}}
    narrow = sharded(ctx, "", dtype=FP32)
    choose(narrow, "ab", BF16)
    train(narrow, mine)
    assert gradients(narrow) == {("a", BF16): {128.0}, ("b", BF16): {128.0}}


class Hands(torch.autograd.Function):
    """Gives a float32 gradient, whatever the parameter's dtype."""

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
        model.weight.grad_dtype = FP32  # the cure in the message
    low = Own()
    low.weight.grad_dtype = None
    fully_shard(low, process_group=ctx.group, mixed_precision=MixedPrecision(reduce_dtype=FP32))  # another cure
    for each in (model, model, low):
        each.zero_grad()
        each().backward()
        assert each.weight.grad.dtype is FP32
        assert set(each.weight.grad.tolist()) <= {257.0}


@ranks(2)
def test_conversions_and_copies(ctx):
    for names, expected in (("ab", WIDE), ("a", {("a", FP32): {1.0}, ("b", FP16): {0.0}})):
        model = train(sharded(ctx, names), 4.0)
        model.to(FP16)
        assert {n[-1]: p.grad_dtype for n, p in model.named_parameters()} == dict(expected.keys())
        assert gradients(train(model, -4.0)) == {key: {0.0} for key in expected}
        model.zero_grad()
        assert gradients(train(model, 2048.0, 1.0, -2048.0)) == expected
    model = sharded(ctx)
    assert gradients(train(copy.deepcopy(model), *STEPS)) == WIDE
    state = {n: p.detach().to(FP16) for n, p in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert gradients(train(model, 2048.0, 1.0, -2048.0)) == WIDE
    model.zero_grad()
    new = nn.Parameter(model[0].a.detach().clone())
    new.grad_dtype = FP64
    model[0].a = new
    train(model, 1.0)
    assert {p.grad.dtype for p in model[0].parameters()} == {FP32, FP64}
    model = Net().to(BF16).to("meta")
    choose(model, "a")
    fully_shard(model, policy={Scale}, process_group=ctx.group)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    assert gradients(train(model, *STEPS)) == MIXED


@ranks(1, 2)
def test_chosen_in_between(ctx):
    """Set ``grad_dtype`` while a graph exists, and while gradients are held."""
    model = sharded(ctx, "")
    loss = model(*STEPS)
    choose(model, "ab")
    loss.backward()
    assert gradients(model) == WIDE
    model.zero_grad()
    choose(model, "ab", BF16)
    with flatshard.no_sync(model):
        train(model, 256.0)
        if ctx.world_size == 1:  # the gradient is in .grad already
            with pytest.raises(RuntimeError, match="already a gradient"):
                choose(model, "ab")
            return
        choose(model, "ab")
        train(model, 1.0)
    assert gradients(train(model, -256.0)) == WIDE
    assert gradients(train(model, 1.0)) == {key: {2.0} for key in WIDE}


@ranks(4)
def test_dtensors(ctx):
    mesh = ctx.device_mesh((2, 2), ("dp", "tp"))
    model = Scale(6).to(BF16)
    model.a = nn.Parameter(DTensor.from_local(torch.ones(3, 3, dtype=BF16), mesh["tp"], [Shard(0)]))
    model.b = nn.Parameter(DTensor.from_local(torch.ones(8, dtype=BF16), mesh["tp"], [Replicate()]))
    choose(model, "a")
    fully_shard(model, device_mesh=mesh["dp"])
    choose(model, "b")
    for inputs in ([(x,) for x in STEPS], [STEPS]):
        model.zero_grad()
        for each in inputs:
            model(*each).full_tensor().backward()
        assert {p.grad.dtype for p in model.parameters()} == {FP32}
        assert {v for p in model.parameters() for v in p.grad.tolist()} <= {1.0}
