"""Gradients are sent in the dtype that they were computed in, and added in the reduce dtype: bit for bit the same sums."""

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
    """The built-in collectives, with the dtypes of what they reduce."""

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
            y = y + self.sometimes(x) * -0.0  # gradients of -0.0 are gradients
        return x + self.outer(torch.tanh(y))


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        return self.blocks[1](y.detach() if self.skips else y)


class Trained:
    """A model, what its reductions have sent, and its gradients."""

    def __init__(
        self, ctx: Any, policy: MixedPrecision, width: int, strategy: ShardingStrategy, widens: bool, steps: "Steps"
    ) -> None:
        options: dict[str, Any] = {"process_group": ctx.group}
        if strategy is HYBRID:
            options = {"device_mesh": ctx.device_mesh((2, 2), ("replicate", "shard"))}
        made: list[Recording] = []

        def make(group: Any, device: torch.device) -> Recording:
            made.append(Recording(group, device, widens))
            return made[-1]

        torch.manual_seed(1)
        self.model = fully_shard(
            Net(width), policy={Block}, strategy=strategy, mixed_precision=policy, collectives=make, **options
        )
        self.rank = ctx.rank
        self.sent: list[set[tuple[torch.dtype, torch.dtype]]] = []
        self.grads: list[dict[str, Tensor | None]] = []
        for _ in steps(self):
            self.sent.append({dtypes for each in made for dtypes in each.sent})
            for each in made:
                each.sent.clear()
            self.grads.append({name: p.grad for name, p in self.model.named_parameters() if p.numel()})
            self.model.zero_grad()

    def run(self, step: int, sync: bool = True, uses: bool = True) -> None:
        torch.manual_seed(10 * step + self.rank)
        for block in self.model.blocks:
            block.uses = uses
        with contextlib.nullcontext() if sync else flatshard.no_sync(self.model):
            self.model(torch.randn(3, self.model.blocks[0].inner.in_features)).square().sum().backward()


Steps = Callable[[Trained], Iterator[None]]
"""Trains; yields where gradients are to be looked at."""


def same_bits(
    ctx: Any, policy: MixedPrecision, width: int, strategy: ShardingStrategy, steps: Steps
) -> list[set[tuple[torch.dtype, torch.dtype]]]:
    """Train with and without widening, and compare all gradients. Returns what was sent with it, each time."""
    narrow, wide = (Trained(ctx, policy, width, strategy, widens, steps) for widens in (True, False))
    assert all(sent is summed for each in wide.sent for sent, summed in each)
    for mine, others in zip(narrow.grads, wide.grads, strict=True):
        for name, a in mine.items():
            b = others[name]
            assert (a is None) is (b is None) is ("never" in name), name
            if a is not None and b is not None:
                assert a.dtype is b.dtype
                assert torch.equal(a, b), name
                assert torch.equal(torch.signbit(a), torch.signbit(b)), name
    return narrow.sent


def accumulate(trained: Trained) -> Iterator[None]:
    for step in range(2):
        trained.run(step, uses=step == trained.rank)  # another parameter is unused on each rank
        yield
    trained.run(2)
    trained.run(3, uses=trained.rank == 0)  # added to what is in .grad
    yield
    for step in (4, 5):
        trained.run(step, sync=False, uses=trained.rank == 0)
    trained.run(6)
    yield
    trained.run(7)
    yield
    trained.run(8, sync=False)
    flatshard.reduce_gradients(trained.model)
    yield
    trained.run(9)
    yield


def train(ctx, policy: MixedPrecision, width: int, strategy: ShardingStrategy) -> None:
    reduce, param = policy.reduce_dtype or policy.param_dtype, policy.param_dtype or FP32
    assert reduce is not None
    fits = reduce in (FP32, FP64) and param.itemsize < reduce.itemsize
    wide = {(reduce, reduce)}
    narrow = {(param if fits else reduce, reduce)}
    if strategy is HYBRID:
        narrow |= wide  # between the replicas
    assert same_bits(ctx, policy, width, strategy, accumulate) == [narrow, narrow, narrow, wide, narrow, wide, narrow]


POLICIES = {
    "bf16 to fp32": MixedPrecision(BF16, reduce_dtype=FP32),
    "fp16 to fp32": MixedPrecision(FP16, reduce_dtype=FP32),
    "bf16 to fp32 over replicas": MixedPrecision(BF16, reduce_dtype=FP32),
    "fp32 to fp64": MixedPrecision(reduce_dtype=FP64),
    "bf16 to bf16": MixedPrecision(BF16),
    "fp32 to bf16": MixedPrecision(reduce_dtype=BF16),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_bits(pool, policy: str):
    turn = list(POLICIES).index(policy)
    strategy, world_size = ((FULL, 3), (GRAD_OP, 3), (HYBRID, 4))[turn % 3 if turn < 3 else 0]
    pool.run(train, POLICIES[policy], (5, 200)[turn % 2], strategy, world_size=world_size)


def hold_on_one_rank(trained: Trained) -> Iterator[None]:
    trained.model.skips = trained.rank == 1  # its first block gets no gradient there
    trained.run(0, sync=False)
    trained.model.skips = False
    trained.run(1)
    yield
    flatshard.configure(trained.model, gradient_sync=False)  # told so, and does not hold
    flatshard.configure(trained.model, gradient_sync=True)
    trained.run(2)
    yield
    trained.run(3)
    yield


@ranks(2, 3)
def test_ranks_that_hold_nothing_decide_alike(ctx) -> None:
    """What decides is what the unit was told, not whether this rank holds anything."""
    wide, narrow = {(FP32, FP32)}, {(BF16, FP32)}
    assert same_bits(ctx, POLICIES["bf16 to fp32"], 40, FULL, hold_on_one_rank) == [wide, wide, narrow]
