"""``plan``: what it predicts is what is counted when the same model is built and trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg as fake_pg
from test_counts import SMALL_WIDTH, WIDTH, Block, Net, Wire
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import flatshard
from flatshard import (
    Memory,
    MixedPrecision,
    ShardingStrategy,
    describe,
    fully_shard,
    plan,
)
from flatshard._composable.state import units_below

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
STRATEGIES = (FULL, GRAD_OP, NO_SHARD)
BF16 = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
PURE = MixedPrecision(torch.bfloat16)
LOW = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
KEPT = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32, keep_cast_shard=True)


@pytest.fixture
def world() -> Iterator[Callable[[int], None]]:
    """``world(n)``: be rank 0 of n."""

    def start(size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------
# Counting
# ---------------------------------------------------------------------------------------------------------------------


def nbytes(tensors: Any) -> dict[int, int]:
    """Bytes of the memory behind tensors, by address: each once."""
    found = [t.untyped_storage() for t in tensors]
    return {s.data_ptr(): s.nbytes() for s in found if s.nbytes()}


class Counted(TorchDispatchMode):
    """What the units of a model, and its optimizer, hold at each operation: the most, by ``Memory.held``."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__()
        self.flats = [
            (b, g, u) for u in units_below(model) for b, g in zip(u.handle.buffers, u.handle.grads, strict=True)
        ]
        self.handles = [u.handle for u in units_below(model)]
        self.optimizer = optimizer
        self.peak = 0
        self.of: Memory | None = None

    def held(self, *more: Tensor) -> Memory:
        shards = nbytes(b.shard for b, _, _ in self.flats)
        gradients = nbytes(p.grad for b, _, _ in self.flats for p in b.params if p.grad is not None)
        unsharded = nbytes(
            t
            for b, _, _ in self.flats
            for t in (b.unsharded.flat, b._cast)
            if t is not None and not (t is b.unsharded.flat and b.is_alias)
        )
        kept = [h.inner._alive for h in self.handles if h.inner is not None and h.inner._alive is not None]
        unsharded |= nbytes(t for k in kept for t in k.shards or ())
        reductions = nbytes(t for _, g, _ in self.flats for t in (g._input, g.reduction._output) if t is not None)
        arriving = nbytes(c.grad for b, _, _ in self.flats for c in b.computes if c.grad is not None)
        for at in gradients:
            reductions.pop(at, None)
        known = shards | gradients | unsharded | reductions | arriving
        arriving |= {at: n for at, n in nbytes(more).items() if at not in known}
        state = (
            0
            if self.optimizer is None
            else sum(
                t.numel() * t.itemsize
                for s in self.optimizer.state.values()
                for t in s.values()
                if isinstance(t, Tensor)
            )
        )
        sizes = [sum(d.values()) for d in (shards, gradients, unsharded, reductions, arriving)]
        return Memory(sizes[0], sizes[1], state, sizes[2], sizes[3], sizes[4])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        inputs = nbytes(t for _, g, _ in self.flats for t in (g._input, g.reduction._output) if t is not None)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        more: list[Tensor] = []
        if name in ("aten::add", "aten::add_", "aten::_foreach_copy_") and any(
            t.untyped_storage().data_ptr() in inputs for t in tensors
        ):
            more = tensors  # gradients on their way into a reduction's input
        if name == "aten::_to_copy" and any(
            tensors[0].numel() in (b.layout.shard_numel,) and tensors[0].dtype is g.reduction.input_dtype
            for b, g, _ in self.flats
        ):
            more = [*tensors, result]  # a reduction's output, cast to be gradients
        held = self.held(*more)
        if held.held > self.peak:
            self.peak, self.of = held.held, held
        return result


def put_on_wire(model: nn.Module) -> Wire:
    wire = Wire()
    for unit in units_below(model):
        for runtime in (unit.context.runtime, unit.handle.runtime, unit.handle.replicas):
            if runtime is not None:
                runtime.collectives = wire
        if unit.handle.inner is not None:
            unit.handle.inner.runtime.collectives = wire
    return wire


def check(
    make: Callable[[], nn.Module],
    size: int,
    world: Callable[[int], None],
    policy: Any = Block,
    microbatches: int = 1,
    no_sync: bool = False,
    x: Tensor | None = None,
    freeze: Callable[[nn.Module], None] = lambda model: None,
    **options: Any,
) -> float:
    """Plan, build, train, count, compare. Returns the peak's error."""
    x = torch.ones(2, 3) if x is None else x
    with torch.device("meta"):
        on_meta = make()
    freeze(on_meta)
    predicted = plan(
        on_meta,
        policy=policy,
        world_size=size,
        optimizer=torch.optim.AdamW,
        microbatches=microbatches,
        no_sync=no_sync,
        device="cpu",
        **options,
    )
    world(size)
    model = make()
    freeze(model)
    fully_shard(model, policy=policy, **options)
    wire = put_on_wire(model)
    assert [u.flats for u in predicted.units] == [u.flats for u in describe(model).units]
    assert [(u.fqn, u.module, u.strategy) for u in predicted.units] == [
        (u.fqn, u.module, u.strategy) for u in describe(model).units
    ]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def step() -> None:
        for number in range(microbatches):
            with flatshard.no_sync(model) if no_sync and number < microbatches - 1 else torch.enable_grad():
                model(x).sum().backward()

    for _ in range(3):
        step()
        optimizer.step()
        optimizer.zero_grad()
    del wire.sent[:]
    counted = Counted(model, optimizer)
    between = counted.held()
    with counted:
        step()
    assert wire.sent == [(c.kind, c.nbytes) for c in predicted.collectives]
    assert between.shards == predicted.between_steps.shards == describe(model).shard_nbytes
    assert between.optimizer == predicted.between_steps.optimizer
    grads = counted.held().gradients
    assert grads <= sum(u.gradient_nbytes for u in predicted.units)
    assert abs(counted.peak - predicted.peak.nbytes) <= 0.02 * counted.peak, (counted.of, predicted.peak)
    return predicted.peak.nbytes / counted.peak - 1


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("precision", [None, BF16, PURE, LOW, KEPT])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("width", [WIDTH, SMALL_WIDTH])
def test_a_step_is_as_planned(world, size, precision, strategy, width):
    print(check(lambda: Net(width=width), size, world, strategy=strategy, mixed_precision=precision))
