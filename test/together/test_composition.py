"""Tensor parallelism x activation checkpointing x precision x strategy, all at once, on a 2 x 2 mesh.

Without tensor parallelism: ``test_checkpointing.py``, whose model and kinds of checkpoints this takes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpointed import BF16, FULL, GRAD_OP, HYBRID, Block, Inner, Net, loss_of
from pairs import all_pairs, some
from parity import step_all
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import flatshard
from flatshard import fully_shard

KINDS = ["none", "reentrant", "non-reentrant", "selective", "wrapper", "composable"]
PLACES = ["inside", "around", "across", "nested"]


def parallelize(model: Net, mesh: DeviceMesh, sequence: bool) -> None:
    """With ``sequence`` all activations between ``front`` and ``head`` are sharded along the sequence."""
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


def make(kind: str, place: str, sequence: bool) -> Net:
    torch.manual_seed(0)
    model = Net(kind, place).double()
    for module in model.modules():
        if sequence and isinstance(module, nn.Dropout):
            module.p = 0.0  # of a part of the sequence it would draw other numbers than of the whole
    return model


def train(ctx, mesh: DeviceMesh, kind: str, place: str, sequence: bool, options: dict[str, Any]) -> dict[str, Tensor]:
    dp = mesh["dp"] if mesh.ndim == 2 else mesh["replicate", "shard"]
    plain, model = make("none", place, sequence), make(kind, place, sequence)
    parallelize(model, mesh["tp"], sequence)
    fully_shard(model, policy={Block}, device_mesh=dp, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    mine = ctx.rank // 2
    for step in range(2):
        x = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(step)).double()
        for rank in range(2):
            (loss_of(plain, x[rank], rank, step) / 2).backward()
        loss_of(model, x[mine], mine, step).backward()
        if "mixed_precision" not in options:
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            norm = flatshard.clip_grad_norm_(model, 0.5)
            torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0)
        step_all(optimizers)
    with flatshard.summon_full_params(model, writeback=False):
        shown = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
        got = {name: p.detach().clone() for name, p in shown.items()}
    if "mixed_precision" not in options:
        for (name, a), b in zip(plain.named_parameters(), got.values(), strict=True):
            torch.testing.assert_close(b, a.detach(), rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    return got


def run_cells(ctx, sequence: bool, options: dict[str, Any], cells: list[tuple[str, str]]) -> None:
    if options["strategy"] is HYBRID:
        mesh = ctx.device_mesh((2, 1, 2), ("replicate", "shard", "tp"))
    else:
        mesh = ctx.device_mesh((2, 2), ("dp", "tp"))
    expected: dict[str, Tensor] | None = None
    if "mixed_precision" in options:  # to compare bits with
        cells = [("none", "inside"), *cells]
    for kind, place in cells:
        ctx.note(f"{kind} {place} {'tp+sp' if sequence else 'tp'} {options}")
        got = train(ctx, mesh, kind, place, sequence, options)
        expected = got if expected is None else expected
        if "mixed_precision" in options:  # checkpoints change no bit
            for (name, a), b in zip(expected.items(), got.values(), strict=True):
                assert torch.equal(a, b), name


# Every two choices come together in one of 24, of which a third are run, by the first three.
CELLS = some(all_pairs((False, True), ("fp64", "bf16"), (FULL, GRAD_OP, HYBRID), KINDS, PLACES), 8)


@pytest.mark.parametrize(
    ("sequence", "precision", "strategy"),
    sorted({cell[:3] for cell in CELLS}, key=str),
    ids=lambda choice: {False: "tp", True: "tp+sp"}.get(choice) or getattr(choice, "name", choice),
)
def test_cells(pool, sequence: bool, precision: str, strategy: Any):
    options = {"strategy": strategy} | ({"mixed_precision": BF16} if precision == "bf16" else {})
    cells = [cell[3:] for cell in CELLS if cell[:3] == (sequence, precision, strategy)]
    pool.run(run_cells, sequence, options, cells, world_size=4)
