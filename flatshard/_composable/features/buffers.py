"""``sync_buffers``: the same buffers on all ranks.

[Note: Buffers differ between ranks]
Buffers are not sharded. What a forward writes into them is of its rank's slice of the batch: BatchNorm's running statistics.
DDP sends rank 0's buffers to all others before each forward, and so throws the others' statistics away; FSDP leaves them
different. Nothing of a training step reads them, so flatshard leaves them alone, too, and the user says when they are made
equal: before an evaluation or a save. They are averaged, as the mean over the ranks' slices is that of the whole batch.
"""

from __future__ import annotations

import torch
from torch import nn

from flatshard._base.errors import name_list
from flatshard._comm.runtime import Runtime
from flatshard._composable.find import units_of
from flatshard._composable.hooks import is_running
from flatshard._composable.state import Unit, unit_of

Named = list[tuple[str, torch.Tensor]]


def sync_buffers(module: nn.Module, *, average: bool = True) -> None:
    """Make the buffers in ``module`` the same on all ranks: call it before an evaluation or a save. Every rank must call it.

    Floating-point buffers are averaged over the ranks, in one all-reduce per process group; others become those of the first
    rank. So BatchNorm's running mean becomes what it is in one process with the whole batch. Its running variance is the mean
    of those within the ranks' slices; ``torch.nn.SyncBatchNorm`` also counts how their means differ.

    Example::

        flatshard.sync_buffers(model)  # does nothing here, as the model has no buffers
        model.eval()

    Args:
        module: a sharded module, one that contains sharded modules, or a part of one.
        average: False: all buffers become those of the first rank, as DDP has it.

    Raises:
        ValueError: nothing in ``module`` is sharded.
        RuntimeError: called inside a forward or a backward; or a buffer is on the meta device.
    """
    units = units_of(module, "sync_buffers")
    if any(is_running(unit.context) for unit in units):
        raise RuntimeError("sync_buffers: called inside a forward or a backward. Call it between steps")
    groups: tuple[dict[Runtime, Named], dict[Runtime, Named]] = {}, {}  # over shards first, then over replicas
    for unit, buffers in buffers_of_units(module, units):
        over = unit.runtime, unit.handle.ranks.replicas if unit.config.strategy.is_hybrid else None
        for found, runtime in zip(groups, over, strict=True):
            if runtime is not None and runtime.world_size > 1:
                found.setdefault(runtime, []).extend(buffers)
    if on_meta := [name for found in groups for named in found.values() for name, b in named if b.is_meta]:
        raise RuntimeError(f"sync_buffers: {name_list(on_meta)} are on the meta device. Give them values first")
    with torch.no_grad():
        for found in groups:
            for runtime in sorted(found, key=lambda runtime: runtime.number):
                averaged: list[torch.Tensor] = []
                for _, buffer in found[runtime]:
                    if average and (buffer.is_floating_point() or buffer.is_complex()):
                        averaged.append(torch.view_as_real(buffer) if buffer.is_complex() else buffer)
                    else:
                        there = buffer.to(runtime.device)
                        runtime.broadcast_now(there)
                        buffer.copy_(there)
                _average(runtime, averaged)


def _average(runtime: Runtime, buffers: list[torch.Tensor]) -> None:
    if not buffers:
        return
    flat = torch.cat([b.reshape(-1).to(runtime.device, torch.float64) for b in buffers])
    runtime.all_reduce_now(flat, "sum", f"the averages of {len(buffers)} buffers")
    flat /= runtime.world_size
    for buffer, mean in zip(buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view(buffer.shape))


def buffers_of_units(module: nn.Module, units: list[Unit]) -> list[tuple[Unit, Named]]:
    """Return the buffers in ``module``, each once, by their innermost unit of ``units``, the units of its parameters."""
    found: list[tuple[Unit, Named]] = []
    seen: set[int] = set()

    def visit(at: nn.Module, name: str, unit: Unit | None) -> None:
        unit = unit_of(at) or unit
        if unit is not None:
            mine = [(f"{name}{n}", b) for n, b in at._buffers.items() if b is not None and id(b) not in seen]
            seen.update(id(b) for _, b in mine)
            found.append((unit, mine))
        for child_name, child in at.named_children():
            visit(child, f"{name}{child_name}.", unit)

    visit(module, "", next((u for u in units if any(m is module for m in u.module.modules())), None))
    return found
