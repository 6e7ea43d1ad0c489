"""Tensor parallelism first, sharding second: 2-D meshes against one process.

A model is parallelised by ``parallelize_module`` over one dimension of a mesh and sharded over the other. The oracle is the
plain model in one process, on the whole batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import flatshard
from flatshard import ShardedParameter, ShardingStrategy, full_shape, fully_shard

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
WIDTH, LENGTH = 6, 4


class Block(nn.Module):
    """``hidden`` 7 does not divide by two: uneven shards of the tensor-parallel mesh."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale


class SequenceBlock(nn.Module):
    """The same without a plain parameter among activations that are sharded along the sequence."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Block, hidden: int = 8) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block(hidden) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(block: type[nn.Module] = Block, hidden: int = 8) -> Net:
    torch.manual_seed(0)
    return Net(block, hidden).double()


def parallelize(model: Net, mesh: DeviceMesh, sequence: bool) -> None:
    for block in model.blocks:
        # Between the two stays a DTensor: local tensors would not say that they are uneven.
        if sequence:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
        else:
            plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    if sequence:
        parallelize_module(
            model,
            mesh,
            {
                "front": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            },
        )


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The parameters in whole, over both meshes."""
    with flatshard.summon_full_params(model, writeback=False):
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
        }


def train(ctx, sequence: bool, hidden: int, options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    block = SequenceBlock if sequence else Block
    plain, model = make(block, hidden), make(block, hidden)
    parallelize(model, mesh["tp"], sequence)
    placements = {n: p.placements for n, p in model.named_parameters() if isinstance(p, DTensor)}
    shapes = {n: p.shape for n, p in plain.named_parameters()}
    fully_shard(model, policy={block}, device_mesh=mesh["dp"], **options)
    assert {n: full_shape(p) for n, p in model.named_parameters()} == shapes
    assert all(type(p) is ShardedParameter for p in model.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    mine = mesh["dp"].get_local_rank()
    for step in range(4):
        x = torch.randn(2, 2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        plain(x.flatten(0, 1)).square().mean().backward()
        output = model(x[mine])
        output = output.full_tensor() if isinstance(output, DTensor) else output
        output.square().mean().backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        clip = torch.nn.utils.clip_grad_norm_ if step % 2 else flatshard.clip_grad_norm_
        norm = clip(model.parameters() if step % 2 else model, 0.3)
        torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in whole(model).items():
        expected = plain.get_parameter(name).detach()
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    with flatshard.summon_full_params(model):
        shown = {n: p.placements for n, p in model.named_parameters() if isinstance(p, DTensor)}
        assert shown == placements


CASES: dict[str, dict[str, Any]] = {
    "full shard": {},
    "grad op": {"strategy": GRAD_OP},
    "no shard": {"strategy": NO_SHARD},
}


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])
@pytest.mark.parametrize("hidden", [8, 7])
@pytest.mark.parametrize("case", CASES)
def test_parity(pool, sequence: bool, hidden: int, case: str):
    pool.run(train, sequence, hidden, CASES[case], world_size=4)
