"""What checkpoints gather besides parameters: texts, and parts of tensors."""

from __future__ import annotations

import torch

from flatshard._handle.handle import FlatParamHandle
from flatshard._handle.tensors.sharded_parameter import ShardInfo
from flatshard._runtime import Runtime


def exchange(handle: FlatParamHandle, text: str) -> list[str]:
    """Gather ``text`` from every rank, in the order of the ranks that hold the shards."""
    world, rank = handle.runtime.world_size, handle.runtime.rank
    if handle.placement.shards is None:
        return [text]
    runtime, device = handle.runtime.exact, handle.flats[0].kind.compute_device
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    sizes = torch.zeros(world, dtype=torch.int64, device=device)
    sizes[rank] = len(data)
    try:
        runtime.all_gather(sizes, sizes[rank : rank + 1], handle.label).wait()
        found: list[int] = sizes.tolist()
        longest = max(1, *found)
        everything = torch.zeros(world, longest, dtype=torch.uint8, device=device)
        everything[rank, : len(data)] = data
        runtime.all_gather(everything.view(-1), everything[rank], handle.label).wait()
    except Exception as e:
        runtime.fail("all-gather", handle.fqn, e)
    return [bytes(row[:size].tolist()).decode() for row, size in zip(everything.cpu(), found, strict=True)]


def from_parts(runtime: Runtime, part: torch.Tensor | None, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor of ``numel`` elements, the same on all ranks. Each rank passes its part, at ``start``, or None."""
    result = torch.zeros(numel, dtype=dtype, device=runtime.device)
    if part is not None:
        result[start : start + part.numel()].copy_(part)
    if numel and runtime.world_size > 1:  # as bytes: all other ranks have zeros, so the sum is exact
        runtime.all_reduce_now(result.view(torch.uint8), "sum", f"a whole tensor of {numel} elements of {dtype}")
    return result


def unwrapped_whole(whole: torch.Tensor, info: ShardInfo | None) -> torch.Tensor:
    """The whole parameter as the user knows it: in its tensor subclass, and not tensor-parallel.

    With tensor parallelism this gathers over its mesh.
    """
    if info is None or info.wrapping is None:
        return whole
    whole = info.wrapping.wrap(whole)
    return whole if info.parallel is None else whole.full_tensor()  # type: ignore[attr-defined]
