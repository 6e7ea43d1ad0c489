"""A model with activation checkpoints of any kind and place, and optional tensor parallelism."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from flatshard import MixedPrecision, ShardingStrategy

WIDTH = 6
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FULL, GRAD_OP, HYBRID = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


Call = Callable[[nn.Module, Tensor], Tensor]
CALLS: dict[str, Call] = {
    "none": lambda module, x: module(x),
    "reentrant": lambda module, x: checkpoint(module, x, use_reentrant=True),
    "non-reentrant": lambda module, x: checkpoint(module, x, use_reentrant=False),
    "selective": lambda module, x: checkpoint(
        module, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(save_products)
    ),
    "no early stop": lambda module, x: without_early_stop(module, x),
}
"""Functions that call a module."""

WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "wrapper": lambda module: checkpoint_wrapper(module),
    "composable": lambda module: composable_checkpoint(module),
}
"""Functions that make a module checkpoint itself."""

KINDS = [*CALLS, *WRAPS]
PLACES = ["inside", "around", "across", "nested"]


def without_early_stop(module: nn.Module, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(module, x, use_reentrant=False)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Linear(2 * WIDTH + 1, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(torch.tanh(self.up(x))))


class Block(nn.Module):
    """A unit."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = Inner()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return x + self.call(self.inner, self.norm(x))


class Net(nn.Module):
    """Blocks between a front and a head. ``kind`` of checkpoint is at ``place``, relative to units (``Block``)."""

    def __init__(self, kind: str, place: str) -> None:
        super().__init__()
        plain = CALLS["none"]
        call = CALLS.get(kind, plain)
        self.front = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*[Block(call if place in ("inside", "nested") else plain) for _ in range(4)])
        self.halves = [self.blocks[:2], self.blocks[2:]]  # not registered, so that blocks keep their names
        self.head = nn.Linear(WIDTH, 3)
        self.place, self.call = place, call
        if kind in WRAPS:
            for block in self.blocks:
                if place in ("inside", "nested"):
                    block.inner = WRAPS[kind](block.inner)
            if place == "across":
                self.halves = [WRAPS[kind](half) for half in self.halves]
            elif place != "inside":
                self.around = [WRAPS[kind](block) for block in self.blocks]

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        if self.place == "across":
            for half in self.halves:
                x = self.call(half, x)
        else:
            for block in self.around if hasattr(self, "around") else self.blocks:
                x = block(x) if self.place == "inside" else self.call(block, x)
        return self.head(x)


def make(kind: str = "none", place: str = "inside", drops: bool = False) -> Net:
    """Make the model in float64. Without ``drops`` there is no dropout, whose numbers differ for a slice of the sequence."""
    torch.manual_seed(0)
    model = Net(kind, place).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout) and not drops:
            module.p = 0.0
    return model


def parallelize(model: Net, mesh: DeviceMesh, sequence: bool) -> None:
    """Parallelise the model. If ``sequence``, activations between ``front`` and ``head`` are sharded along the sequence."""
    between = {"input_layouts": Shard(1)} if sequence else {}
    for inner in [m for m in model.modules() if isinstance(m, Inner)]:
        after = {"output_layouts": Shard(1)} if sequence else {}
        plan = {"up": ColwiseParallel(use_local_output=False, **between), "down": RowwiseParallel(**after)}
        parallelize_module(inner, mesh, plan)
    if sequence:
        for block in model.blocks:
            parallelize_module(block, mesh, {"norm": SequenceParallel()})
        front = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, mesh, {"front": front, "head": head})


def loss_of(model: nn.Module, x: Tensor, rank: int, step: int) -> Tensor:
    torch.manual_seed(100 * step + rank)  # for dropout: equal on tensor-parallel ranks
    return model(x).double().square().mean()
