"""Reading the files of a checkpoint at the speed of the disk: ours, and those that torch's writer wrote.

So also FSDP2's, sharded ones of FSDP1, those of plain models. Nothing in them is executed: [Note: No pickle is executed].
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.futures import Future

from flatshard._errors import name_list
from flatshard.checkpoint import _disk as disk
from flatshard.checkpoint._container import BLOCK, checksum, memory_of
from flatshard.checkpoint._metadata import Body, unpickled
from flatshard.checkpoint._progress import Progress

_SHARE = 4 * BLOCK  # bytes for one thread at a time
_THREADS = min(8, os.cpu_count() or 1)  # that read: memory and most disks are faster than one of many cores

T = TypeVar("T")
R = TypeVar("R")


class Reader(FileSystemReader):
    """``torch.distributed.checkpoint.load(state, storage_reader=Reader(path))``: executes nothing, reads into place.

    Everything that the load needs is looked at before anything is read into its place: files that are missing, cut off or
    outside of the directory, and the sums of what ``flatshard.checkpoint.Writer`` or ``save_checkpoint`` wrote.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        """``verify``: False leaves out the sums, and with them one more reading of the files."""
        super().__init__(path)
        self.progress: Progress | None = None
        self._verify, self._checked = verify, False
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See torch.

        Raises:
            ValueError: it is damaged, or not the metadata of a checkpoint.
        """
        self._metadata = unpickled((Path(self.path) / disk.METADATA).read_bytes())
        return self._metadata

    def _entry(self, item: ReadItem) -> tuple[Any, Body | None]:
        info = self.storage_data.get(item.storage_index)
        if info is None:
            raise ValueError(f"the checkpoint does not say where {_describe(item.storage_index)} is")
        return info, Body(*info.flatshard) if hasattr(info, "flatshard") else None

    def _by_file(self, plan: LoadPlan) -> Iterator[tuple[Path, list[ReadItem]]]:
        found: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            found.setdefault(self._entry(item)[0].relative_path, []).append(item)
        root = Path(os.path.realpath(self.path))
        for name, items in found.items():
            file = Path(os.path.realpath(root / name))
            if not file.is_relative_to(root):
                raise ValueError(f"the checkpoint names a file outside of its directory, which is not read: {name!r}")
            yield file, items

    def check(self, plan: LoadPlan) -> None:
        """What ``plan`` reads is there, and as it was saved.

        Raises:
            ValueError: with the names of files that are missing or cut off, and of what is damaged.
        """
        files = dict(self._by_file(plan))
        wrong = []
        for file, items in files.items():
            end = max(info.offset + info.length for info, _ in map(self._entry, items))
            size = file.stat().st_size if file.is_file() else None
            if size is None or size < end:
                wrong.append(f"{file.name!r} ({'missing' if size is None else f'{size} of at least {end} bytes'})")
        if wrong:
            raise ValueError(f"files of the checkpoint are incomplete: {', '.join(sorted(wrong))}")
        blocks = {file: self._blocks(items) for file, items in files.items()} if self._verify else {}
        if self.progress is not None:
            verified = sum(size for each in blocks.values() for _, size in each)
            self.progress.total = verified + sum(map(self._nbytes, plan.items))
        if wrong := [each for file in blocks for each in self._damaged(file, files[file], blocks[file])]:
            raise ValueError(f"files of the checkpoint are damaged: {', '.join(wrong)}")
        self._checked = True

    def _blocks(self, items: list[ReadItem]) -> dict[tuple[int, int], tuple[ReadItem, bytes]]:
        """Those of one file that ``items`` touch: where, and how many bytes; one of the items, and the sum."""
        blocks: dict[tuple[int, int], tuple[ReadItem, bytes]] = {}
        for item in items:
            _, body = self._entry(item)
            if body is not None:
                first, last = self._region(item, body)
                for i in range(first // BLOCK, -(-last // BLOCK)):
                    size = min(BLOCK, body.nbytes - i * BLOCK)
                    blocks[body.start + i * BLOCK, size] = item, body.sums[8 * i : 8 * i + 8]
        return blocks

    def _damaged(
        self, file: Path, items: list[ReadItem], blocks: dict[tuple[int, int], tuple[ReadItem, bytes]]
    ) -> list[str]:
        """What in ``file`` is not as it was saved. Blocks that no item touches are not looked at."""
        wrong: dict[str, None] = {}
        with file.open("rb", buffering=0) as raw:
            for item in items:
                info, body = self._entry(item)
                if body is None:  # of others: whether it can be read at all
                    try:
                        _load(raw.fileno(), item, info)
                    except Exception as e:
                        return [f"{_describe(item.storage_index)} in {file.name!r} ({type(e).__name__}: {e})"]

            def differing(some: list[tuple[int, int]]) -> list[ReadItem]:
                memory, found = memory_of(torch.empty(BLOCK, dtype=torch.uint8)), []
                for at, size in some:
                    _read_into(raw.fileno(), memory[:size], at)
                    item, expected = blocks[at, size]
                    if checksum(memory[:size]) != expected:
                        found.append(item)
                return found

            for some, found in _in_threads(differing, [(block, block[1]) for block in blocks]):
                for item in found:
                    wrong[f"{_describe(item.storage_index)} in {file.name!r} (its bytes do not have their sum)"] = None
                self._count(sum(size for _, size in some))
        return list(wrong)[:10]

    def _nbytes(self, item: ReadItem) -> int:
        """What ``progress`` is told of a tensor's reading."""
        info, body = self._entry(item)
        if item.type is LoadItemType.BYTE_IO or body is None or body.stride is None:
            return 0 if item.type is LoadItemType.BYTE_IO else int(info.length)
        first, last = self._region(item, body)
        return last - first

    def _count(self, nbytes: int) -> None:
        if self.progress is not None:
            self.progress.add(nbytes)

    def _region(self, item: ReadItem, body: Body) -> tuple[int, int]:
        """The bytes of ``body`` that ``item`` is within."""
        if body.stride is None or item.type is LoadItemType.BYTE_IO:
            return 0, body.nbytes
        if 0 in item.lengths:
            return 0, 0
        size = self._dtype(item).itemsize
        first = sum(o * s for o, s in zip(item.storage_offsets, body.stride, strict=True))
        return first * size, (
            first + sum((n - 1) * s for n, s in zip(item.lengths, body.stride, strict=True)) + 1
        ) * size

    def _dtype(self, item: ReadItem) -> torch.dtype:
        assert self._metadata is not None
        kind = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(kind, TensorStorageMetadata)
        return kind.properties.dtype

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """See torch.

        Raises:
            ValueError: see :meth:`check`; nothing has been read.
        """
        if not self._checked:
            self.check(plan)
        for file, items in self._by_file(plan):
            with file.open("rb", buffering=0) as stream:
                self._read_file(stream.fileno(), items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_file(self, file: int, items: list[ReadItem], planner: Any) -> None:
        in_place: list[tuple[ReadItem, torch.Tensor]] = []
        places: list[tuple[torch.Tensor, int]] = []
        for item in items:
            info, body = self._entry(item)
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(_read(file, info)))
                continue
            target = planner.resolve_tensor(item).detach()
            if body is None or body.stride is None:
                target.copy_(_load(file, item, info))
                self._count(info.length)
            else:
                first, last = self._region(item, body)
                dtype = self._dtype(item)
                if _lies_as(target, body.stride, dtype, last - first):
                    places.append((target, body.start + first))
                    in_place.append((item, target))
                    continue
                whole = torch.empty((last - first) // dtype.itemsize, dtype=dtype)
                self._fill(file, [(whole, body.start + first)])
                target.copy_(whole.as_strided(tuple(item.lengths), body.stride))
            planner.commit_tensor(item, target)
        self._fill(file, places)
        for item, target in in_place:
            increment_version(target)
            planner.commit_tensor(item, target)

    def _fill(self, file: int, places: list[tuple[torch.Tensor, int]]) -> None:
        """Read each tensor's memory from its place in ``file``."""

        def read(some: list[tuple[memoryview, int]]) -> None:
            for memory, at in some:
                _read_into(file, memory, at)

        memories = [(memory_of(tensor), at) for tensor, at in places]
        pieces = [(m[i : i + BLOCK], at + i) for m, at in memories for i in range(0, m.nbytes, BLOCK)]
        for some, _ in _in_threads(read, [(piece, piece[0].nbytes) for piece in pieces]):
            self._count(sum(memory.nbytes for memory, _ in some))


def _load(file: int, item: ReadItem, info: Any) -> torch.Tensor | None:
    """What torch.save wrote; of values that are no tensors nothing."""
    data = io.BytesIO(_read(file, info))
    if item.type is LoadItemType.BYTE_IO:
        return None
    tensor: torch.Tensor = torch.load(data, map_location="cpu", weights_only=True)
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _lies_as(target: torch.Tensor, stride: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> bool:
    """Whether bytes of a file can be read to where ``target`` is."""
    return (
        target.device.type == "cpu"
        and target.dtype is dtype
        and target.nbytes == nbytes
        and all(n == 1 or s == t for n, s, t in zip(target.shape, stride, target.stride(), strict=True))
    )


def _in_threads(function: Callable[[list[T]], R], sized: list[tuple[T, int]]) -> Iterator[tuple[list[T], R]]:
    """Call ``function`` with some of ``sized`` (each with how many bytes it has) at a time, and yield what it returned."""
    shares: list[list[T]] = []
    room = 0
    for each, nbytes in sized:
        if room <= 0:
            shares.append([])
            room = _SHARE
        shares[-1].append(each)
        room -= nbytes
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="flatshard-read") as pool:
        yield from zip(shares, pool.map(function, shares), strict=True)


def _describe(index: MetadataIndex) -> str:
    return f"{index.fqn!r}" if index.offset is None else f"{index.fqn!r} at {tuple(index.offset)}"


def _read(file: int, info: Any) -> bytes:
    data = bytearray(info.length)
    _read_into(file, memoryview(data), info.offset)
    return bytes(data)


def _read_into(file: int, memory: memoryview, at: int) -> None:
    while memory.nbytes:
        count = os.preadv(file, [memory], at)
        if not count:
            raise ValueError("a file of the checkpoint has been cut off while it was read")
        memory, at = memory[count:], at + count


class LoadPlanner(DefaultLoadPlanner):
    """torch's, which executes nothing, and takes tensors on meta for such as come later."""

    def __init__(self, strict: bool) -> None:
        super().__init__(allow_partial_load=not strict)
        self._strict = strict

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """See torch, which would put others in the place of tensors on meta."""
        self.original_state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator
        self.state_dict, self.mappings = flatten_state_dict(state_dict)

    def split(self, plan: LoadPlan) -> tuple[LoadPlan, LoadPlan]:
        """What can be read now, and what is on meta as yet."""
        later = [self._is_later(item) for item in plan.items]
        now = [item for item, is_later in zip(plan.items, later, strict=True) if not is_later]
        return LoadPlan(now), LoadPlan([item for item, is_later in zip(plan.items, later, strict=True) if is_later])

    def _is_later(self, item: ReadItem) -> bool:
        return getattr(self.state_dict[item.dest_index.fqn], "is_meta", False)

    def replace(self, values: Mapping[str, Any]) -> None:
        """Read into these from now on."""
        self.state_dict.update(
            {name: v for name, v in flatten_state_dict(dict(values))[0].items() if name in self.state_dict}
        )

    def check(self, expected: Iterable[str]) -> None:
        """What is to be loaded is in the checkpoint, in the same shape and of a kind that it can become.

        Args:
            expected: names in the checkpoint that are to be loaded.

        Raises:
            ValueError: with all names that are missing or unexpected, if that matters, or differ.
        """
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        wrong = []
        for name, value in self.state_dict.items():
            kind = saved.get(name)
            if isinstance(value, torch.Tensor) and isinstance(kind, TensorStorageMetadata):
                has = sum(math.prod(c.sizes) for c in kind.chunks)
                if tuple(kind.size) != tuple(value.shape):
                    wrong.append(f"{name!r} has shape {tuple(kind.size)} in the checkpoint, {tuple(value.shape)} here")
                elif not torch.can_cast(kind.properties.dtype, value.dtype):
                    wrong.append(f"{name!r} has {kind.properties.dtype} in the checkpoint, {value.dtype} here")
                elif has != math.prod(kind.size):
                    wrong.append(f"{name!r} has {has} of {math.prod(kind.size)} elements in the checkpoint")
            elif isinstance(value, torch.Tensor) and isinstance(kind, BytesStorageMetadata):
                wrong.append(f"{name!r} is a tensor here, and none in the checkpoint")
            elif not isinstance(value, torch.Tensor) and isinstance(kind, TensorStorageMetadata):
                wrong.append(f"{name!r} is a tensor in the checkpoint, and a {type(value).__name__} here")
        if self._strict and (missing := [n for n in self.state_dict if n not in saved]):
            wrong.insert(0, f"not in the checkpoint: {name_list(missing, 50)}")
        if self._strict and (unexpected := [n for n in expected if n not in self.state_dict]):
            wrong.append(f"in the checkpoint only: {name_list(unexpected, 50)}")
        if wrong:
            raise ValueError("; ".join(wrong))

    def create_local_plan(self) -> LoadPlan:
        """See torch.

        Raises:
            ValueError: parts overlap, or are missing, in the checkpoint.
        """
        plan = super().create_local_plan()
        got: Counter[tuple[str, Any]] = Counter()
        for item in plan.items:
            got[item.dest_index.fqn, item.dest_index.offset] += math.prod(item.lengths)
        assert self.metadata is not None
        for name, value in self.state_dict.items():
            if isinstance(value, torch.Tensor) and name in self.metadata.state_dict_metadata:
                for offsets, sizes in _boxes_of(value):
                    if got[name, offsets] != math.prod(sizes):
                        has = f"{got[name, offsets]} of {math.prod(sizes)} elements"
                        raise ValueError(f"{name!r} at {tuple(offsets)}: the checkpoint has {has}")
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See torch, which would execute ``value``."""
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as e:
            raise ValueError(f"{name!r} in the checkpoint is of a class that is not read: {e}") from None
        safe = io.BytesIO()
        torch.save(found, safe)  # what this very process made may be executed
        safe.seek(0)
        super().load_bytes(read_item, safe)

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """See torch, which would narrow where there is nothing to leave out."""
        if read_item.lengths == tensor.shape:
            return tensor
        found: torch.Tensor = super().transform_tensor(read_item, tensor)
        return found


def _boxes_of(tensor: torch.Tensor) -> list[tuple[torch.Size, torch.Size]]:
    """(offsets, sizes) of what this rank has of it."""
    if hasattr(tensor, "__create_chunk_list__"):
        return [(chunk.offsets, chunk.sizes) for chunk in tensor.__create_chunk_list__()]
    return [(torch.Size([0] * tensor.dim()), tensor.size())]
