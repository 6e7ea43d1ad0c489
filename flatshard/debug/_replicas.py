"""``check_replicas``: compares values that must be equal on several ranks."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from flatshard._base.errors import name_list
from flatshard._comm.progress import Label
from flatshard._comm.runtime import Runtime, on_any_rank
from flatshard._composable.features.buffers import Named, buffers_of_units
from flatshard._composable.features.other_code import added_later
from flatshard._composable.find import units_of
from flatshard._handle.flat_param import FlatParam

_LABEL = Label("check_replicas")


def check_replicas(module: nn.Module, *, buffers: bool = False) -> None:
    """Raise if ranks that must have the same values do not have them, bit for bit.

    It compares the parameters of ``NO_SHARD`` units over all ranks; the shards of hybrid units over their replicas; the
    parameters that were registered in a sharded module after ``fully_shard``; and with ``buffers`` the buffers of all units
    over all ranks.

    Every rank must call it, at a point where the values should be equal, such as between an optimizer's step and the next
    forward. It reads all values once, on the CPU. It takes one collective of 8 bytes per parameter for each process group,
    and a second small one, so that all ranks raise.

    Example::

        flatshard.fully_shard(model, policy={Block}, strategy=flatshard.ShardingStrategy.NO_SHARD)
        flatshard.debug.check_replicas(model, buffers=True)

    Args:
        module: a sharded module, or one that contains sharded modules.
        buffers: also compare buffers. (The running statistics of BatchNorm differ, because each rank has its own data, until
            ``flatshard.sync_buffers(module)``.)

    Raises:
        RuntimeError: some values differ. The message names the parameters and buffers, and the global ranks. All ranks raise.
        ValueError: nothing in ``module`` is sharded; or there is nothing to compare, as no unit has replicas and ``buffers``
            is False.
    """
    units = units_of(module, "check_replicas")
    added = list(added_later(module))
    if not (buffers or added) and not any(u.config.strategy.has_replicas for u in units):
        raise ValueError(
            "check_replicas: no unit has the strategy NO_SHARD or a hybrid one, so each rank has a different shard of every "
            "parameter, and there is nothing to compare. To compare buffers, pass buffers=True"
        )
    compared: dict[int, tuple[Runtime, Named]] = {}  # by the number of the process group

    def compare(runtime: Runtime | None, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        if runtime is not None and runtime.world_size > 1:
            compared.setdefault(runtime.number, (runtime, []))[1].extend(values)

    for unit in units:
        for flat in unit.handle.flats:
            compare(flat.ranks.replicas, _parameters(flat))
    for unit, fqn, param in added:
        for runtime in (
            unit.runtime,
            unit.handle.ranks.replicas if unit.config.strategy.is_hybrid else None,
        ):
            compare(runtime, [(fqn, param.data)])
    if buffers:
        for unit, values in buffers_of_units(module, units):
            compare(unit.runtime, values)
            if unit.config.strategy.is_hybrid:
                compare(unit.handle.ranks.replicas, values)
    problems = [p for number in sorted(compared) if (p := _compare(*compared[number]))]
    shards = [u.runtime for u in units if u.config.strategy.is_hybrid]
    differ_elsewhere = on_any_rank(shards, bool(problems))
    if problems or differ_elsewhere:
        start = "Start from the same values (fully_shard(..., sync_module_states=True))"
        cure = f"{start}, and change parameters on all ranks alike"
        if buffers:
            cure += ". To make buffers equal, call flatshard.sync_buffers(module)"
        if names := list(dict.fromkeys(fqn for _, fqn, _ in added)):
            cure += (
                f". Nobody averages the gradients of {name_list(names, 3)}, which were registered after fully_shard: add "
                "modules and parameters before it"
            )
        raise RuntimeError(
            "replicas differ: "
            + ("; ".join(problems) or "not on this rank, but on others in its shard group; see their messages")
            + f". They must be equal, bit for bit. {cure}"
        )


def _parameters(flat: FlatParam) -> Iterator[tuple[str, torch.Tensor]]:
    for info, param in zip(flat.layout.params, flat.params, strict=True):
        yield info.fqn, param.data


def _compare(runtime: Runtime, values: Named) -> str:
    """Compare ``values`` over the ranks of ``runtime``, and return a text about those that differ, or an empty one."""
    if not values:
        return ""
    every = torch.empty(runtime.world_size, len(values), dtype=torch.int64, device=runtime.device)
    mine = every[runtime.rank]
    mine.copy_(torch.tensor([_hash(t) for _, t in values], device="cpu"))
    runtime.exact.all_gather(every.view(-1), mine, _LABEL).wait()
    ranks = dist.get_process_group_ranks(runtime.group)
    found = []
    for (name, _), column in zip(values, every.t().tolist(), strict=True):
        others = [str(rank) for rank, value in zip(ranks, column, strict=True) if value != column[0]]
        if others:
            found.append(f"{name!r} (rank{'s' if len(others) > 1 else ''} {', '.join(others)} against rank {ranks[0]})")
    shown = "; ".join(found[:8]) + (f"; ... ({len(found) - 8} more)" if len(found) > 8 else "")
    return f"{len(found)} of {len(values)} values: {shown}" if found else ""


def _hash(tensor: torch.Tensor) -> int:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    memory = (ctypes.c_char * data.numel()).from_address(data.data_ptr()) if data.numel() else b""
    return int.from_bytes(hashlib.blake2b(memory, digest_size=8).digest(), "big", signed=True)
