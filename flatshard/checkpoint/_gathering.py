"""Collectives of checkpoints, besides those for parameters: texts, and shards of single tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from flatshard._base.errors import name_list
from flatshard._comm.collectives import ALL_GATHER
from flatshard._comm.progress import Label
from flatshard._comm.runtime import Runtime
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.tensors.shard_info import ShardInfo


def check_one_value(ranks: Iterable[Mapping[str, list[int] | None]]) -> None:
    """Raise if ranks have different parameters under one name, as experts may be.

    ``ranks`` has a mapping from each rank. Its values are the ranks that have the same parameter under a name
    (``ExpertRanks.ranks_around``), or None if all have it.
    """
    found: dict[str, set[tuple[int, ...]]] = {}
    for of_rank in ranks:
        for name, numbers in of_rank.items():
            if numbers is not None:
                found.setdefault(name, set()).add(tuple(numbers))
    if several := [name for name, groups in found.items() if len(groups) > 1]:
        raise ValueError(
            f"{name_list(several)}: ranks {' and '.join(map(str, sorted(map(list, found[several[0]]))))} have different "
            "values of this name, and one of them would be lost. Make the parameter a DTensor before fully_shard, "
            "DTensor.from_local(param, mesh['ep'], [Shard(0)]), or give it another name on each of them"
        )


def exchange(flat: FlatParam, text: str) -> list[str]:
    """Gather ``text`` from every rank that ``flat`` is sharded over, in their order."""
    if flat.holds_all:
        return [text]
    return exchange_over(flat.ranks.runtime.exact, flat.ranks.label, text)


def exchange_over(runtime: Runtime, label: Label, text: str) -> list[str]:
    """Gather ``text`` from every rank of ``runtime``, in their order."""
    device, world, rank = runtime.device, runtime.world_size, runtime.rank
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
    sizes = torch.zeros(world, dtype=torch.int64, device=device)
    sizes[rank] = len(data)
    try:
        runtime.all_gather(sizes, sizes[rank : rank + 1], label).wait()
        found: list[int] = sizes.tolist()
        longest = max(1, *found)
        everything = torch.zeros(world, longest, dtype=torch.uint8, device=device)
        everything[rank, : len(data)] = data
        runtime.all_gather(everything.view(-1), everything[rank], label).wait()
    except Exception as e:
        runtime.fail(ALL_GATHER, label.unit, e)
    return [bytes(row[:size].tolist()).decode() for row, size in zip(everything.cpu(), found, strict=True)]


def from_parts(runtime: Runtime, part: torch.Tensor | None, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a 1-D tensor of ``numel`` elements, the same on all ranks. Each passes its shard from ``start`` on, or None."""
    result = torch.zeros(numel, dtype=dtype, device=runtime.device)
    if part is not None:
        result[start : start + part.numel()].copy_(part)
    if numel and runtime.world_size > 1:  # as bytes: all other ranks have zeros, so the sum is exact
        runtime.all_reduce_now(result.view(torch.uint8), "sum", f"a full tensor of {numel} elements of {dtype}")
    return result


def wrap_full(full: torch.Tensor, info: ShardInfo | None) -> torch.Tensor:
    """Return the full parameter in its tensor subclass. A tensor-parallel one is gathered over its mesh."""
    if info is None or info.wrapping is None:
        return full
    full = info.wrapping.wrap(full)
    return full if info.parallel is None else full.full_tensor()  # type: ignore[attr-defined]
