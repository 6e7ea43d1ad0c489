"""``plan``: what it predicts is what is counted when the same model is built and trained."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg as fake_pg
from test_counts import SMALL_WIDTH, WIDTH, Block, Net, Wire
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import flatshard
from flatshard import (
    BackwardPrefetch,
    Blocks,
    CustomPolicy,
    Memory,
    MixedPrecision,
    Rows,
    ShardingStrategy,
    Whole,
    describe,
    fully_shard,
    plan,
)
from flatshard._composable.state import units_below
from flatshard._handle.handle import FlatParamHandle

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
        more = pytree.tree_leaves((args, kwargs, result)) if _caller() in ("gradients.py", "reduction.py") else []
        self.look(*(t for t in more if isinstance(t, Tensor)))  # gradients on their way: added, copied, cast
        return result

    def look(self, *more: Tensor) -> None:
        held = self.held(*more)
        if held.held > self.peak:
            self.peak, self.of = held.held, held


def _caller() -> str:
    """The file of this package that called an operation."""
    frame = sys._getframe(2)
    while frame.f_back is not None and Path(frame.f_code.co_filename).parent.name not in ("_handle", "_composable"):
        frame = frame.f_back
    return Path(frame.f_code.co_filename).name


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
    size: int | tuple[int, int],
    world: Callable[[int], None],
    policy: Any = Block,
    microbatches: int = 1,
    no_sync: bool = False,
    x: Tensor | None = None,
    freeze: Callable[[nn.Module], None] = lambda model: None,
    optimizer_class: Any = torch.optim.AdamW,
    **options: Any,
) -> None:
    """Plan, build, train, count, compare: all of it is equal, to the byte."""
    x = torch.ones(2, 3) if x is None else x
    with torch.device("meta"):
        on_meta = make()
    freeze(on_meta)
    predicted = plan(
        on_meta,
        policy=policy,
        world_size=size,
        optimizer=optimizer_class,
        microbatches=microbatches,
        no_sync=no_sync,
        device="cpu",
        **options,
    )
    world(math.prod(size) if isinstance(size, tuple) else size)
    model = make()
    freeze(model)
    mesh = init_device_mesh("cpu", size) if isinstance(size, tuple) else None
    fully_shard(model, policy=policy, device_mesh=mesh, **options)
    wire = put_on_wire(model)
    assert [u.flats for u in predicted.units] == [u.flats for u in describe(model).units]
    assert [(u.fqn, u.module, u.strategy) for u in predicted.units] == [
        (u.fqn, u.module, u.strategy) for u in describe(model).units
    ]
    optimizer = optimizer_class([p for p in model.parameters() if p.requires_grad])

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
    receive = FlatParamHandle.receive

    def look_and_receive(handle: FlatParamHandle, *args: Any) -> None:
        counted.look()  # autograd has made the gradient, and no operation has seen it
        receive(handle, *args)

    with pytest.MonkeyPatch.context() as patch, counted:
        patch.setattr(FlatParamHandle, "receive", look_and_receive)
        step()
        counted.look()
    planned = [(c.kind, c.nbytes) for c in predicted.collectives]
    if isinstance(size, tuple):  # on the CPU an all-reduce over replicas starts when somebody waits
        planned, wire.sent = sorted(planned), sorted(wire.sent)
    assert wire.sent == planned
    assert between.shards == predicted.between_steps.shards == describe(model).shard_nbytes
    state = predicted.between_steps.optimizer - between.optimizer  # more on the fullest rank than here
    assert state == 0 if options.get("layout") is None else state >= 0
    grads = counted.held().gradients
    assert grads <= sum(u.gradient_nbytes for u in predicted.units)
    counted.peak += state
    assert counted.peak == predicted.peak.nbytes, (counted.of, predicted.peak)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("precision", [None, BF16, PURE, LOW, KEPT])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("width", [WIDTH, SMALL_WIDTH])
def test_a_step_is_as_planned(world, size, precision, strategy, width):
    # AdamW wants gradients in the parameters' dtype.
    optimizer = torch.optim.SGD if precision is LOW else torch.optim.AdamW
    make = functools.partial(Net, width=width)
    check(make, size, world, strategy=strategy, mixed_precision=precision, optimizer_class=optimizer)


@pytest.mark.parametrize("forward_prefetch", [True, False])
@pytest.mark.parametrize("backward_prefetch", [None, *BackwardPrefetch])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_prefetch(world, strategy, forward_prefetch, backward_prefetch):
    options = {"forward_prefetch": forward_prefetch, "backward_prefetch": backward_prefetch, "strategy": strategy}
    check(Net, 8, world, **options)
    block = 4 * sum(p.numel() for p in Block(WIDTH).parameters())
    check(Net, 8, world, prefetch_limit_bytes=block // 2, **options)
    check(Net, 8, world, prefetch_limit_bytes=2 * block, **options)


@pytest.mark.parametrize("value", [True, False, 1, 2, 4, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reshard_after_forward(world, strategy, value):
    if strategy is NO_SHARD and value:
        with pytest.raises(ValueError, match="has no meaning with NO_SHARD"):
            check(Net, 8, world, strategy=strategy, reshard_after_forward=value)
        return
    check(Net, 8, world, strategy=strategy, reshard_after_forward=value)
    check(Net, 8, world, strategy=strategy, reshard_after_forward=value, mixed_precision=BF16)


@pytest.mark.parametrize("size", [2, 3, 16])
@pytest.mark.parametrize("layout", [Rows(), Rows(4, max_padding=2), Blocks(64, max_padding=5), Whole(max_padding=99)])
def test_layouts(world, layout, size):
    check(Net, size, world, layout=layout)
    check(Net, size, world, layout=lambda name, param: layout if name.endswith("weight") else None)


@pytest.mark.parametrize("no_sync", [True, False])
@pytest.mark.parametrize("width", [WIDTH, SMALL_WIDTH])
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation(world, strategy, size, width, no_sync):
    check(lambda: Net(width=width), size, world, strategy=strategy, microbatches=3, no_sync=no_sync)


def freeze_blocks(model: nn.Module) -> None:
    for block in model.blocks:
        block.requires_grad_(False)


def adapters(model: nn.Module) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        block.norm.requires_grad_(True)


def freeze_front(model: nn.Module) -> None:
    for part in (model.front, model.blocks[0], model.blocks[1]):
        part.requires_grad_(False)


@pytest.mark.parametrize("freeze", [freeze_blocks, adapters, freeze_front])
@pytest.mark.parametrize("backward_prefetch", [None, *BackwardPrefetch])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_parameters(world, strategy, freeze, backward_prefetch):
    check(Net, 8, world, strategy=strategy, freeze=freeze, backward_prefetch=backward_prefetch)


class Mixed(Block):
    """Two dtypes in a unit, and units in a unit."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.low = nn.Linear(width, width, dtype=torch.bfloat16)
        self.inside = Block(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(super().forward(x) + self.low(x.to(self.low.weight.dtype)).to(x.dtype))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(Mixed(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("policy", [{Mixed}, {Mixed, Block}, {Mixed, Block, nn.Embedding, nn.Linear}, None])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nested_units_shared_parameters_and_dtypes(world, strategy, policy):
    x = torch.tensor([[1, 2], [3, 4]])
    for precision in (None, BF16):
        check(Deep, 8, world, policy=policy, strategy=strategy, mixed_precision=precision, x=x)


def test_overrides_of_a_policy(world):
    def choose(module: nn.Module) -> Any:
        if isinstance(module, nn.LayerNorm):
            return {"strategy": NO_SHARD, "backward_prefetch": None}
        return isinstance(module, Block) and {"reshard_after_forward": False, "layout": Rows()}

    check(Net, 8, world, policy=CustomPolicy(choose))


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1), (3, 8)])
@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2])
def test_hybrid(world, strategy, shape):
    check(Net, shape, world, strategy=strategy)
    check(Net, shape, world, strategy=strategy, mixed_precision=BF16)
