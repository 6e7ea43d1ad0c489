"""Gathers the whole values of one flat parameter into a new buffer, for exports rather than for computing.

The values are those of the parameters, or other tensors of the same layout, such as an optimizer's averages. They are
exact, whatever collectives are used for training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatshard._comm.collectives import Done, Pending
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.handle import FlatParamHandle
from flatshard._handle.tensors.sharded_parameter import ShardInfo, shard_info
from flatshard._runtime import Runtime


class Gathering:
    """One all-gather in flight. All ranks start the same ones in the same order."""

    def __init__(
        self, handle: FlatParamHandle, flat: FlatParam, pieces: Sequence[torch.Tensor | None] | None = None
    ) -> None:
        """Start. ``pieces``: this rank's part for each parameter, 1-D, or None for zeros. Default: the parts in the shard.

        On each rank at least one of ``pieces`` is not None, and their dtype is the same on all ranks.
        """
        self._handle, self._owner = handle, flat
        layout = flat.layout
        self._pending: Pending = Done()
        if pieces is None and flat.placement.shards is None:
            self.flat = flat.shard
            return
        found = [p for p in pieces or [flat.shard] if p is not None]
        self.flat = torch.zeros(layout.padded_numel, dtype=found[0].dtype, device=flat.unsharded.flat.device)
        own = self.flat[flat.placement.rank * layout.shard_numel :][: layout.shard_numel]
        if pieces is None:
            own.copy_(flat.shard)
        else:
            for part, piece in zip(flat.slices, pieces, strict=True):
                if piece is not None:
                    own[part.start : part.stop].copy_(piece)
        if flat.placement.shards is not None and layout.padded_numel:
            runtime = handle.runtime.exact
            try:  # as bytes: no backend supports every dtype
                self._pending = runtime.all_gather(self.flat.view(torch.uint8), own.view(torch.uint8), handle.label)
            except Exception as e:
                runtime.fail("all-gather", handle.fqn, e)

    def wait(self) -> list[torch.Tensor]:
        """The whole tensor of each parameter, in its shape and stride: views of one buffer.

        A DTensor parameter is gathered over the tensor-parallel mesh, too, and becomes a plain tensor of the whole shape.
        """
        try:
            self._pending.wait()
        except Exception as e:
            self._handle.runtime.fail("all-gather", self._handle.fqn, e)
        return [
            unwrapped_whole(self.flat.as_strided(i.shape, i.stride, i.start), shard_info(p))
            for i, p in zip(self._owner.layout.params, self._owner.params, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.flat.nbytes


def exchange(handle: FlatParamHandle, text: str) -> list[str]:
    """Gather ``text`` from every rank, in the order of the ranks that hold the shards."""
    world, rank = handle.runtime.world_size, handle.runtime.rank
    if handle.placement.shards is None:
        return [text]
    runtime, device = handle.runtime.exact, handle.flats[0].unsharded.flat.device
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
