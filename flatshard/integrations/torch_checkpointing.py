"""torch_checkpointing: checkpoints of sharded models that other numbers of ranks load.

``CheckpointManager`` writes a file for each rank. Its own resharder takes sharded values for replicated ones, so each item
with sharded values needs :class:`ShardResharder`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch_checkpointing.distributed_metadata import DistributedItemMetadata, ShardingMetadata
from torch_checkpointing.resharding import Resharder
from torch_checkpointing.storage.base_storage import Storage
from torch_checkpointing.storage.torch_serialization import load_torch_serialized_from_storage
from torch_checkpointing.walk_utils import walk_checkpoint_structure

Names = tuple[str | int, ...]
Ints = tuple[int, ...]
Chunk = tuple[Ints, Ints]  # offsets and sizes in the full tensor


@dataclass(frozen=True)
class Chunks(ShardingMetadata, type_name="flatshard_chunks_v1"):  # type: ignore[call-arg]
    """The regions of a tensor that a rank has, as ``torch.distributed.checkpoint`` asks tensors for them."""

    shape: Ints
    dtype: str
    chunks: tuple[Chunk, ...]
    is_sharded: bool  # else each rank has a tensor of its own
    is_copy: bool = False  # other ranks have these elements, perhaps cut differently

    @classmethod
    def of(cls, value: torch.Tensor) -> Chunks:
        """Return the regions that ``value`` has."""
        shape, dtype = tuple(value.shape), str(value.dtype)
        if not hasattr(value, "__create_chunk_list__"):
            return cls(shape, dtype, (((0,) * len(shape), shape),), False)
        regions = value.__create_chunk_list__()
        chunks = tuple((tuple(each.offsets), tuple(each.sizes)) for each in regions)
        return cls(shape, dtype, chunks, True, getattr(getattr(value, "part", None), "is_copy", False))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Chunks:
        chunks = tuple((tuple(offsets), tuple(sizes)) for offsets, sizes in d["chunks"])
        return cls(tuple(d["shape"]), d["dtype"], chunks, d["is_sharded"], d["is_copy"])

    @property
    def equivalent_ranks(self) -> None:
        return None


class _Copy(NamedTuple):
    """A region of a target, and the chunk of a rank's file that has it."""

    names: Names
    into: Chunk
    source: Chunk
    region: Chunk


class ShardResharder(Resharder):
    """Loads the sharded values of one checkpoint item, such as ``model.state_dict()``, on any number of ranks.

    It goes into an ``ItemSpec(resharder=ShardResharder())``, for saving and for loading. DTensors are loaded likewise. Plain
    tensors and other values come from this rank's file, or from rank 0's if there was no such rank.
    """

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[Names, ShardingMetadata]:
        """Return the regions of each tensor in an item."""
        leaves = _leaves(item_key, item_value)
        return {names: Chunks.of(leaf) for names, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}

    def should_reshard(
        self, source_metadata: DistributedItemMetadata | None, target_metadata: dict[Names, ShardingMetadata] | None
    ) -> bool:
        """Return whether the item has tensors: a rank's file does not say by itself whose shards it has.

        Raises:
            ValueError: the checkpoint was saved without this resharder.
        """
        if not target_metadata:
            return False
        if source_metadata is None or not any(
            isinstance(each.sharding_metadata, Chunks)
            for alike in source_metadata.nested_path_to_metadata.values()
            for each in alike
        ):
            raise ValueError(
                "ShardResharder: this item was saved without it, so the places of its shards are not known. Save with "
                "ItemSpec(resharder=ShardResharder())"
            )
        return True

    def load(
        self,
        source_path: Path,
        item_key: str,
        target_metadata: dict[Names, ShardingMetadata],
        source_metadata: DistributedItemMetadata,
        target: Any,
        storage: Storage,
    ) -> list[Names]:
        """Copy each region of ``target`` from the files of the ranks that had it.

        Returns:
            The places of tensors that the checkpoint lacks.

        Raises:
            ValueError: a tensor has another shape in the checkpoint, or elements are missing there. Nothing is changed.
        """
        leaves, plans = _leaves(item_key, target), dict[int, list[_Copy]]()
        missing = []
        for names, metadata in target_metadata.items():
            assert isinstance(metadata, Chunks)
            alike = source_metadata.nested_path_to_metadata.get(names, [])  # ranks with the same regions
            have = {rank: each.sharding_metadata for each in alike for rank in each.ranks}
            if not have:
                missing.append(names)
            for rank, copy in _plan(names, metadata, have):
                plans.setdefault(rank, []).append(copy)
        others = not all(isinstance(leaf, torch.Tensor) for leaf in leaves.values())
        own = _rank() if _rank() in source_metadata.rank_to_layout_info else 0
        for rank in sorted({*plans, *[own] * others}):
            file = source_metadata.get_file_path(rank, source_path, item_key)
            value = load_torch_serialized_from_storage(file, storage, map_location="cpu")
            found, copies = _leaves(item_key, value), plans.get(rank, [])
            if rank == own and others:
                _take_others(target, leaves, found)
            for names, into, source, region in copies:
                _view(leaves[names], into, region).copy_(_view(found[names], source, region))
        return missing


def _take_others(target: Any, leaves: dict[Names, Any], found: dict[Names, Any]) -> None:
    """Put values that are no tensors into the dicts and lists of ``target``."""
    for names in [names for names, leaf in leaves.items() if not isinstance(leaf, torch.Tensor) and names in found]:
        holder: Any = target
        for key in names[:-1]:
            holder = holder[key]
        if not isinstance(holder, tuple):
            holder[names[-1]] = found[names]


def _leaves(item_key: str, value: Any) -> dict[Names, Any]:
    found: dict[Names, Any] = {}

    def note(path: Any, leaf: Any, _: Any) -> Any:
        found[path.nested_path] = leaf
        return leaf

    walk_checkpoint_structure(item_key=item_key, source=value, target=None, leaf_fn=note)
    return found


def _plan(names: Names, target: Chunks, have: dict[int, Any]) -> Iterator[tuple[int, _Copy]]:
    """Yield (source rank, copy) so that each element of the target comes once."""
    sources: dict[Chunk, int] = {}  # of several ranks with one chunk the first; this rank, if it is one
    for rank in sorted(have, key=lambda rank: (rank != _rank(), rank)):
        if have[rank].shape != target.shape:
            raise ValueError(
                f"ShardResharder: {_dotted(names)} is {have[rank].shape} in the checkpoint, not {target.shape}"
            )
        if not have[rank].is_copy and (have[rank].is_sharded or not sources):
            for chunk in have[rank].chunks:
                sources.setdefault(chunk, rank)
    for into in target.chunks:
        found = 0
        for source, rank in sources.items():
            start = tuple(map(max, into[0], source[0]))
            ends = [min(a + n, b + m) for a, n, b, m in zip(*into, *source, strict=True)]
            size = tuple(end - at for end, at in zip(ends, start, strict=True))
            if min(size, default=1) > 0:
                found += math.prod(size)
                yield rank, _Copy(names, into, source, (start, size))
        if found != math.prod(into[1]):
            raise ValueError(
                f"ShardResharder: the checkpoint has {found} of {math.prod(into[1])} elements of {_dotted(names)} from "
                f"{into[0]} on, of shape {into[1]}"
            )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _dotted(names: Names) -> str:
    return repr(".".join(map(str, names)))


def _view(value: torch.Tensor, chunk: Chunk, region: Chunk) -> torch.Tensor:
    """Return a view of ``region`` in a chunk of ``value``."""
    local = value
    if hasattr(value, "__get_tensor_shard__"):
        local = value.__get_tensor_shard__(MetadataIndex("", chunk[0]))
    for dim, (start, at, size) in enumerate(zip(chunk[0], *region, strict=True)):
        local = local.narrow(dim, at - start, size)
    return local
