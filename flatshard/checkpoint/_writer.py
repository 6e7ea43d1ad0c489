"""Writing the files of ``torch.distributed.checkpoint`` at the speed of the disk.

Any reader of torch's reads them. Each rank writes one file. The metadata of an entry has the place and the sums of the
tensor's own bytes, which torch's reader ignores. _container.py, [Note: Memory as it is]
"""

from __future__ import annotations

import io
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, DEFAULT_SUFFIX, _StoragePrefix
from torch.distributed.checkpoint.filesystem import FileSystemWriter as TorchWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from flatshard._base.errors import name_list
from flatshard.checkpoint import _disk as disk
from flatshard.checkpoint._boxes import memory_dims
from flatshard.checkpoint._container import ALIGNMENT, around, checksums, memory_of
from flatshard.checkpoint._location import Folder, NewFile
from flatshard.checkpoint._metadata import Body, pickled_metadata, place_of, seal
from flatshard.checkpoint._sharded_value import ShardedValue


class FileSystemWriter(TorchWriter):
    """``torch.distributed.checkpoint.save(state, storage_writer=FileSystemWriter(path))``: a flushed file a rank, no copies.

    Any reader reads what it writes; ``flatshard.checkpoint.FileSystemReader`` verifies it.

    Example::

        import torch.distributed.checkpoint as dcp

        dcp.save(model.state_dict(), storage_writer=flatshard.checkpoint.FileSystemWriter("run/dcp"))
        state = model.state_dict()
        dcp.load(state, storage_reader=flatshard.checkpoint.FileSystemReader("run/dcp"))
        model.load_state_dict(state)

    It takes the arguments of torch's ``FileSystemWriter``: the first is the directory, and ``overwrite=False`` keeps an
    existing checkpoint.
    """

    @property
    def path(self) -> Path:
        """The checkpoint's directory."""
        return self._path

    @path.setter
    def path(self, path: str | os.PathLike[str]) -> None:
        self._path = disk.local(path, "FileSystemWriter")

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """See torch."""
        folder, future = disk.Folder(self._path), Future[list[WriteResult]]()
        try:
            results = write(folder, plan, planner)
            folder.flush()
        finally:
            folder.close()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See torch."""
        disk.Folder(self._path).publish(disk.METADATA, *metadata_bytes(metadata, results, self.storage_meta()))


def with_prefixes(plans: Iterable[SavePlan]) -> list[SavePlan]:
    """Return the plans of all ranks, each with the beginning of the rank's file name, as torch's writer does."""
    return [replace(plan, storage_data=_StoragePrefix(f"__{rank}_")) for rank, plan in enumerate(plans)]


def write(folder: Folder, plan: SavePlan, planner: Any) -> list[WriteResult]:
    """Write this rank's file, or no file if it has nothing to write. Return where each entry is in it."""
    if not plan.items:
        return []
    name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
    return folder.write(name, lambda file: _written(file, plan.items, planner))


def metadata_bytes(
    metadata: Metadata, results: list[list[WriteResult]], storage_meta: StorageMeta | None = None
) -> tuple[bytes, bytes]:
    """Return the content of the metadata's file: without the file, a directory is no checkpoint."""
    metadata.version, metadata.storage_meta = CURRENT_DCP_VERSION, storage_meta
    metadata.storage_data = {r.index: r.storage_data for each in results for r in each}
    data = pickled_metadata(metadata)
    return data, seal(data)


def _written(file: NewFile, items: list[WriteItem], planner: Any) -> list[WriteResult]:
    """Write ``items``, and return where each is in ``file``."""
    results: list[WriteResult] = []
    at = 0
    for item in items:
        data, head, tail, stride = _pieces(planner.resolve_data(item))
        memory = data.getbuffer() if isinstance(data, io.BytesIO) else memory_of(data)
        pad = -at % ALIGNMENT
        body = Body(at + pad + len(head), memory.nbytes, stride, checksums(memory))
        info = place_of(file.name, at + pad, len(head) + memory.nbytes + len(tail), body)
        file.write(bytes(pad) + head, memory, tail)
        results.append(WriteResult(item.index, info.length, info))
        at += pad + info.length
    return results


def _pieces(data: Any) -> tuple[Any, bytes, bytes, tuple[int, ...] | None]:
    """Return a tensor on CPU or a stream, the bytes before and after it, and the strides of a tensor."""
    if isinstance(data, io.BytesIO):
        return data, b"", b"", None
    tensor = data.detach().cpu()
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        stream = io.BytesIO()
        torch.save(tensor, stream)
        return stream, b"", b"", None
    tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.permute(memory_dims(tensor.shape, tensor.stride())).is_contiguous():
        tensor = tensor.contiguous()
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return tensor, *around(tensor.dtype, shape, stride, tensor.nbytes), stride


class SavePlanner(DefaultSavePlanner):
    """torch's planner, with four changes.

    It serializes values at once, refuses values that could not be loaded, takes unsharded values from rank 0, and counts the
    bytes that it resolves.
    """

    def __init__(self, progress: disk.ByteCount) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self._progress = progress
        self._counted: set[Any] = set()  # indices of resolved items: a store may need them again
        self._streams: dict[str, io.BytesIO] = {}

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        """See torch.

        Raises:
            ValueError: a load would refuse some values. The message names all of them.
        """
        super().set_up_planner(state_dict, *args, **kwargs)
        if any(
            type(value).__name__ == "ShardedTensor" for value in self.state_dict.values()
        ):  # FSDP1's, perhaps nested
            self.flatten_sharded_tensors = True
            super().set_up_planner(state_dict, *args, **kwargs)
        if lacking := [n for n, v in self.state_dict.items() if isinstance(v, torch.Tensor) and v.is_meta]:
            raise ValueError(f"{name_list(lacking)} are on the meta device, and have no values to save")
        _check_no_copies_of_shards(self.state_dict)
        wrong = []
        for name, value in self.state_dict.items():
            if not isinstance(value, torch.Tensor):
                stream = self._streams[name] = io.BytesIO()
                try:
                    torch.save(value, stream)
                    stream.seek(0)
                    torch.load(stream, weights_only=True)
                except Exception as e:
                    named = re.search(r"(?:GLOBAL|instantiate) (\S+)", str(e))
                    wrong.append(f"{name!r}: {named[1] if named else f'{type(e).__name__}: {e}'}")
        if wrong:
            raise ValueError(
                "a load would refuse these, as it executes nothing: make them tensors, numbers, strings, or lists and "
                f"dicts of such; or name their classes to torch.serialization.add_safe_globals. {'; '.join(wrong)}"
            )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """See torch, which spreads unsharded values over ranks: here rank 0 writes them, so they are of one state.

        Raises:
            ValueError: an unsharded tensor has another shape on another rank. The message names all of them.
        """
        _check_same_shapes(all_plans)
        seen: set[Any] = set()
        first = []
        for plan in all_plans:
            items = [i for i in plan.items if i.type is WriteItemType.SHARD or i.index not in seen]
            seen.update(item.index for item in items)
            first.append(replace(plan, items=items))
        return super().create_global_plan(first)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """See torch."""
        self._progress.total = sum(map(_write_nbytes, new_plan.items))
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        """See torch."""
        if write_item.index not in self._counted:
            self._counted.add(write_item.index)
            self._progress.add(_write_nbytes(write_item))
        return self._streams.get(write_item.index.fqn) or super().resolve_data(write_item)


def _check_no_copies_of_shards(values: Mapping[str, Any]) -> None:
    """Raise if a plain tensor is a copy of this rank's shard: it has the name and the elements of one, and no other shape.

    Raises:
        ValueError: the message names all of them.
    """
    shards = {name.partition(".")[2]: (name, v) for name, v in values.items() if isinstance(v, ShardedValue)}
    found = []
    for name, value in values.items() if shards else ():
        if type(value) is torch.Tensor and value.dim() == 1:
            parts = name.split(".")
            for of, shard in (shards[tail] for i in range(1, len(parts)) if (tail := ".".join(parts[i:])) in shards):
                if shard.shape != value.shape and len(shard.to_local()) == len(value):
                    found.append(f"{name} (of {of})")
                    break
    if found:
        raise ValueError(
            f"plain copies of this rank's shards, which only rank 0 would save: {name_list(found)}. Copy the values of "
            "model.state_dict() in place of parameters, or copy the model: copy.deepcopy(model)"
        )


def _check_same_shapes(plans: Iterable[SavePlan]) -> None:
    """Raise if ranks have different shapes of a tensor that is not sharded.

    Raises:
        ValueError: the message names all of them.
    """
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for item in (item for plan in plans for item in plan.items):
        if item.type is WriteItemType.TENSOR and item.tensor_data is not None:
            shapes.setdefault(item.index.fqn, set()).add(tuple(item.tensor_data.size))
    if wrong := [f"{name} ({', '.join(map(str, sorted(each)))})" for name, each in shapes.items() if len(each) > 1]:
        raise ValueError(
            f"ranks have tensors of different shapes, and only rank 0's would be saved: {name_list(wrong)}. Gather them, "
            "or give each rank's a name of its own"
        )


def _write_nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def check_plans(plans: Iterable[SavePlan], names: Iterable[str]) -> None:
    """Check that every element of every tensor is written by some rank.

    Raises:
        ValueError: elements are missing, or written twice. The message names all such tensors.
    """
    sizes: dict[str, int] = {}
    boxes: dict[str, dict[tuple[int, ...], int]] = {}
    seen: Counter[str] = Counter()
    for item in (item for plan in plans for item in plan.items):
        seen[item.index.fqn] += 1
        if item.tensor_data is not None:
            sizes[item.index.fqn] = math.prod(item.tensor_data.size)
            chunk = item.tensor_data.chunk  # replicated tensors come from every rank: once each
            boxes.setdefault(item.index.fqn, {})[tuple(chunk.offsets)] = math.prod(chunk.sizes)
    wrong = [
        f"{n!r} ({sum(boxes[n].values())} of {size})" for n, size in sizes.items() if sum(boxes[n].values()) != size
    ]
    if wrong:
        raise ValueError(f"elements that the ranks would write, and of the tensor: {', '.join(wrong)}")
    if lost := [n for n in names if n not in seen]:
        raise ValueError(f"no rank would write {name_list(lost, 20)}")
