"""Gradients sent in their own dtype and added in the reduce dtype give the same bits."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import recording
import torch
from on_ranks import ranks
from torch import Tensor, nn

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, fully_shard

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FULL, GRAD_OP, HYBRID = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD


class Recording(recording.Recording):
    """The built-in collectives; they record the dtypes of reductions."""

    out_of_place = True

    def __init__(self, group: Any, device: torch.device, widens: bool) -> None:
        super().__init__(group, device)
        self.widens = widens
        assert self.inner.widens
        self.sent: list[tuple[torch.dtype, torch.dtype]] = []

    def note(self, call: str, *tensors: Tensor) -> None:
        if call != "all_gather":
            self.sent.append((tensors[1].dtype, tensors[0].dtype))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.sometimes, self.never = nn.Linear(width, 7), nn.Linear(width, 7), nn.Linear(width, 3)
        self.outer = nn.Linear(7, width, bias=False)
        self.uses = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.uses:
            y = y + self.sometimes(x) * -0.0  # a gradient of -0.0 is a gradient
        return x + self.outer(torch.tanh(y))


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        return self.blocks[1](y.detach() if self.skips else y)


Sent = set[tuple[torch.dtype, torch.dtype]]
Steps = Callable[[Net, int], Iterator[None]]
"""Train a model on a rank, and yield when gradients can be compared."""


def trained(
    ctx: Any, policy: MixedPrecision, width: int, strategy: ShardingStrategy, widens: bool, steps: Steps
) -> list[tuple[Sent, dict[str, Tensor | None]]]:
    """Return the dtypes that reductions sent, and the gradients, at each yield of ``steps``."""
    options: dict[str, Any] = {"process_group": ctx.group}
    if strategy is HYBRID:
        options = {"device_mesh": ctx.device_mesh((2, 2), ("replicate", "shard"))}
    made: list[Recording] = []

    def make(group: Any, device: torch.device) -> Recording:
        made.append(Recording(group, device, widens))
        return made[-1]

    torch.manual_seed(1)
    model = Net(width)
    fully_shard(model, policy={Block}, strategy=strategy, mixed_precision=policy, collectives=make, **options)
    found = []
    for _ in steps(model, ctx.rank):
        sent = {dtypes for each in made for dtypes in each.sent}
        for each in made:
            each.sent.clear()
        found.append((sent, {name: p.grad for name, p in model.named_parameters() if p.numel()}))
        model.zero_grad()
    return found


def same_bits(ctx: Any, policy: MixedPrecision, width: int, strategy: ShardingStrategy, steps: Steps) -> list[Sent]:
    """Train with and without widening, and compare all gradients. Return the dtypes sent with it, at each yield."""
    narrow, wide = (trained(ctx, policy, width, strategy, widens, steps) for widens in (True, False))
    for (_, mine), (sent, others) in zip(narrow, wide, strict=True):
        assert all(dtype is summed for dtype, summed in sent)
        for name, a in mine.items():
            b = others[name]
            assert (a is None) is (b is None) is ("never" in name), name
            if a is not None and b is not None:
                assert a.dtype is b.dtype
                assert torch.equal(a, b), name
                assert torch.equal(torch.signbit(a), torch.signbit(b)), name
    return [sent for sent, _ in narrow]


def train(model: Net, rank: int, step: int, sync: bool = True, uses: bool = True) -> None:
    torch.manual_seed(10 * step + rank)
    for block in model.blocks:
        block.uses = uses
    with contextlib.nullcontext() if sync else flatshard.no_sync(model):
        model(torch.randn(3, model.blocks[0].inner.in_features)).square().sum().backward()


def accumulate(model: Net, rank: int) -> Iterator[None]:
    for step in range(2):
        train(model, rank, step, uses=step == rank)  # each rank leaves another parameter unused
        yield
    train(model, rank, 2)
    train(model, rank, 3, uses=rank == 0)  # adds to .grad
    yield
    for step in (4, 5):
        train(model, rank, step, sync=False, uses=rank == 0)
    train(model, rank, 6)
    yield
    train(model, rank, 7)
    yield
    train(model, rank, 8, sync=False)
    flatshard.reduce_gradients(model)
    yield
    train(model, rank, 9)
    yield


TO_FP32 = MixedPrecision(BF16, reduce_dtype=FP32)
CASES = [
    (TO_FP32, 5, FULL, 3),
    (MixedPrecision(FP16, reduce_dtype=FP32), 200, GRAD_OP, 3),
    (TO_FP32, 5, HYBRID, 4),
    (MixedPrecision(reduce_dtype=FP64), 200, FULL, 3),
    (MixedPrecision(BF16), 5, FULL, 3),
    (MixedPrecision(reduce_dtype=BF16), 200, FULL, 3),
]


@pytest.mark.parametrize(("policy", "width", "strategy", "world_size"), CASES)
@ranks()
def test_the_same_bits(ctx, policy: MixedPrecision, width: int, strategy: ShardingStrategy) -> None:
    reduce, param = policy.reduce_dtype or policy.param_dtype, policy.param_dtype or FP32
    assert reduce is not None
    fits = reduce in (FP32, FP64) and param.itemsize < reduce.itemsize
    wide = {(reduce, reduce)}
    narrow = {(param if fits else reduce, reduce)}
    if strategy is HYBRID:
        narrow |= wide  # for the all-reduce between replicas
    assert same_bits(ctx, policy, width, strategy, accumulate) == [narrow, narrow, narrow, wide, narrow, wide, narrow]


def hold_on_one_rank(model: Net, rank: int) -> Iterator[None]:
    model.skips = rank == 1  # its first block gets no gradient on rank 1
    train(model, rank, 0, sync=False)
    model.skips = False
    train(model, rank, 1)
    yield
    flatshard.configure(model, gradient_sync=False)  # requests no_sync, but holds nothing
    flatshard.configure(model, gradient_sync=True)
    train(model, rank, 2)
    yield
    train(model, rank, 3)
    yield


@ranks(2, 3)
def test_ranks_that_hold_nothing_decide_alike(ctx) -> None:
    """The unit's settings decide, not whether this rank holds any gradient."""
    wide, narrow = {(FP32, FP32)}, {(BF16, FP32)}
    assert same_bits(ctx, TO_FP32, 40, FULL, hold_on_one_rank) == [wide, wide, narrow]
