"""Reading the files of a checkpoint at the speed of the disk: ours, and those that torch's writer wrote.

So also FSDP2's, sharded ones of FSDP1, those of plain models. Nothing in them is executed: [Note: No pickle is executed].
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from flatshard._errors import name_list
from flatshard.checkpoint import _disk as disk
from flatshard.checkpoint._byte_count import ByteCount
from flatshard.checkpoint._container import BLOCK, checksum, memory_of
from flatshard.checkpoint._metadata import Body, unpickled

Way = tuple[Any, ...]
"""The keys that lead to a value in nested dicts and lists."""

_SHARE = 16 * BLOCK  # bytes for one thread at a time


class Reader(FileSystemReader):
    """``torch.distributed.checkpoint.load(state, storage_reader=Reader(path))``: executes nothing, reads into place.

    Everything that the load needs is looked at before anything is read into its place: files that are missing, cut off or
    outside of the directory, and the sums of what ``flatshard.checkpoint.Writer`` or ``save_checkpoint`` wrote.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        """``verify``: False leaves out the sums, and with them one more reading of the files."""
        super().__init__(path)
        self.progress: ByteCount | None = None
        self.digest = ""  # of the metadata: the same for all ranks that load one checkpoint
        self._verify = verify
        self._metadata: Metadata | None = None
        self._versions: dict[Path, tuple[int, ...]] = {}  # of the files that are read, once they have been looked at

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See torch.

        Raises:
            ValueError: it is damaged, or not the metadata of a checkpoint.
        """
        file = Path(self.path) / disk.METADATA
        self._versions = {file: _version(file)}
        data = file.read_bytes()
        self._metadata, self.digest = unpickled(data), hashlib.blake2b(data, digest_size=16).hexdigest()
        return self._metadata

    def _by_file(self, items: Iterable[ReadItem]) -> dict[Path, list[_Wanted]]:
        """What is read of each file.

        Raises:
            ValueError: the metadata does not say where something is, or names a file outside of the directory.
        """
        found: dict[str, list[_Wanted]] = {}
        for item in items:
            info = self.storage_data.get(item.storage_index)
            if info is None:
                raise ValueError(f"the checkpoint does not say where {_describe(item.storage_index)} is")
            found.setdefault(info.relative_path, []).append(self._wanted(item, info))
        root = Path(os.path.realpath(self.path))
        files = {name: Path(os.path.realpath(root / name)) for name in found}
        for name, file in files.items():
            if not file.is_relative_to(root):
                raise ValueError(f"the checkpoint names a file outside of its directory, which is not read: {name!r}")
        return {files[name]: wanted for name, wanted in found.items()}

    def _wanted(self, item: ReadItem, info: Any) -> _Wanted:
        end = info.offset + info.length
        body = Body(*info.flatshard_body) if hasattr(info, "flatshard_body") else None
        if body is None or body.stride is None:
            return _Wanted(item, info.offset, info.length, end, None, body)
        assert self._metadata is not None
        kind = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(kind, TensorStorageMetadata)
        dtype = kind.properties.dtype
        if 0 in item.lengths:
            return _Wanted(item, body.start, 0, end, dtype, body)
        first, last = 0, 0  # elements that it is within
        for offset, length, stride in zip(item.storage_offsets, item.lengths, body.stride, strict=True):
            first += offset * stride
            last += (offset + length - 1) * stride
        start, nbytes = body.start + first * dtype.itemsize, (last + 1 - first) * dtype.itemsize
        return _Wanted(item, start, nbytes, end, dtype, body)

    def check(self, items: Iterable[ReadItem]) -> None:
        """What is to be read is there, and as it was saved.

        Raises:
            ValueError: with the names of files that are missing or cut off, and of what is damaged.
        """
        files = self._by_file(items)
        wrong = []
        for file, wanted in files.items():
            end = max(each.end for each in wanted)
            size = file.stat().st_size if file.is_file() else None
            if size is None or size < end:
                wrong.append(f"{file.name!r} ({'missing' if size is None else f'{size} of at least {end} bytes'})")
            else:
                self._versions[file] = _version(file)
        self.check_same()
        if wrong:
            raise ValueError(f"files of the checkpoint are incomplete: {', '.join(sorted(wrong))}")
        blocks = {file: _blocks(wanted) if self._verify else {} for file, wanted in files.items()}
        if self.progress is not None:
            verified = sum(block.nbytes for each in blocks.values() for block in each)
            self.progress.total = verified + sum(each.nbytes for w in files.values() for each in w if each.is_tensor)
        with _threads() as pool:
            wrong = [text for file in files for text in self._damaged(pool, file, files[file], blocks[file])]
        self.check_same()
        if wrong:
            raise ValueError(f"files of the checkpoint are damaged: {', '.join(wrong[:10])}")

    def check_same(self) -> None:
        """The files are those that were looked at.

        Raises:
            ValueError: another save has replaced them.
        """
        for file, version in self._versions.items():
            if not file.exists() or _version(file) != version:
                raise ValueError("another save has replaced the checkpoint while it was read: load it again")

    def _damaged(
        self, pool: ThreadPoolExecutor, file: Path, wanted: list[_Wanted], blocks: dict[_Piece, _Wanted]
    ) -> Iterator[str]:
        """What in ``file`` is not as it was saved. Blocks that nothing is wanted of are not looked at."""
        with file.open("rb", buffering=0) as raw:
            for each in wanted if self._verify else ():
                if each.body is None and each.is_tensor:  # of others, without sums: whether it can be read at all
                    try:
                        _load(raw.fileno(), each)
                    except Exception as e:
                        yield f"{each.name} in {file.name!r} ({type(e).__name__}: {e})"

            wrong = self._read_in_threads(pool, raw.fileno(), list(blocks))
        for name in dict.fromkeys(blocks[block].name for block in wrong):
            yield f"{name} in {file.name!r} (its bytes do not have their sum)"

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """See torch.

        Raises:
            ValueError: see :meth:`check`; nothing has been read.
        """
        if len(self._versions) < 2:  # only the metadata's
            self.check(plan.items)
        self.check_same()
        with _threads() as pool:
            for file, wanted in self._by_file(plan.items).items():
                with file.open("rb", buffering=0) as stream:
                    self._read_file(pool, stream.fileno(), wanted, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_file(self, pool: ThreadPoolExecutor, file: int, wanted: list[_Wanted], planner: Any) -> None:
        in_place: list[tuple[_Wanted, torch.Tensor]] = []
        for each in wanted:
            if not each.is_tensor:
                planner.load_bytes(each.item, io.BytesIO(_read(file, each)))
                continue
            target = planner.resolve_tensor(each.item).detach()
            if each.dtype is None:
                target.copy_(_load(file, each))
                self._count(each.nbytes)
            elif each.lies_as(target):
                in_place.append((each, target))
                continue
            else:
                assert each.body is not None
                assert each.body.stride is not None
                whole = torch.empty(each.nbytes // each.dtype.itemsize, dtype=each.dtype)
                self._fill(pool, file, [(each, whole)])
                target.copy_(whole.as_strided(tuple(each.item.lengths), each.body.stride))
            planner.commit_tensor(each.item, target)
        self._fill(pool, file, in_place)
        for each, target in in_place:
            increment_version(target)
            planner.commit_tensor(each.item, target)

    def _fill(self, pool: ThreadPoolExecutor, file: int, places: list[tuple[_Wanted, torch.Tensor]]) -> None:
        """Read each tensor's memory from its place in ``file``."""
        memories = [(memory_of(tensor), each.start) for each, tensor in places]
        pieces = [
            _Piece(at + i, min(_SHARE, memory.nbytes - i), memory[i : i + _SHARE], b"")
            for memory, at in memories
            for i in range(0, memory.nbytes, _SHARE)
        ]
        self._read_in_threads(pool, file, pieces)

    def _read_in_threads(self, pool: ThreadPoolExecutor, file: int, pieces: list[_Piece]) -> list[_Piece]:
        """Read all of ``pieces``, in threads. Returns those that are not as they were saved."""
        shares: list[list[_Piece]] = []
        room = 0
        for piece in pieces:
            if room <= 0:
                shares.append([])
                room = _SHARE
            shares[-1].append(piece)
            room -= piece.nbytes
        read = functools.partial(_read_pieces, file)
        wrong = []
        for share, found in zip(shares, pool.map(read, shares) if len(shares) > 1 else map(read, shares), strict=True):
            self._count(sum(piece.nbytes for piece in share))
            wrong += found
        return wrong

    def _count(self, nbytes: int) -> None:
        if self.progress is not None:
            self.progress.add(nbytes)


def _version(file: Path) -> tuple[int, ...]:
    """By which a file is known from another that has taken its place."""
    stat = file.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


class _Wanted(NamedTuple):
    """What an item of a plan reads of a file."""

    item: ReadItem
    start: int
    nbytes: int
    end: int  # of the entry that it is within
    dtype: torch.dtype | None  # of a tensor's own bytes. None: they are what torch.save wrote
    body: Body | None  # None: we did not write it

    @property
    def is_tensor(self) -> bool:
        return self.item.type is not LoadItemType.BYTE_IO

    @property
    def name(self) -> str:
        return _describe(self.item.storage_index)

    def lies_as(self, target: torch.Tensor) -> bool:
        """Whether the bytes can be read to where ``target`` is."""
        assert self.body is not None
        assert self.body.stride is not None
        return (
            target.device.type == "cpu"
            and target.dtype is self.dtype
            and target.nbytes == self.nbytes
            and all(n == 1 or s == t for n, s, t in zip(target.shape, self.body.stride, target.stride(), strict=True))
        )


class _Piece(NamedTuple):
    """Bytes of a file that are read at once: to their place, or to see that they have their sum."""

    start: int
    nbytes: int
    place: memoryview | None
    sum: bytes


class _Beside(threading.local):
    """Memory of each thread for what is only looked at: small enough for a processor's cache."""

    def __init__(self) -> None:
        self.block = memoryview(bytearray(BLOCK))


_beside = _Beside()


def _read_pieces(file: int, pieces: list[_Piece]) -> list[_Piece]:
    """Returns those that do not have their sum."""
    wrong = []
    for piece in pieces:
        memory = piece.place or _beside.block[: piece.nbytes]
        _read_into(file, memory, piece.start)
        if piece.place is None and checksum(memory) != piece.sum:
            wrong.append(piece)
    return wrong


def _blocks(wanted: list[_Wanted]) -> dict[_Piece, _Wanted]:
    """Those of one file that have a sum, and are touched; each with one that touches it."""
    blocks = {}
    for each in wanted:
        if each.body is not None:
            start, nbytes, _, sums = each.body
            first, stop = (each.start - start) // BLOCK, -(-(each.start - start + each.nbytes) // BLOCK)
            for i in range(first, stop):
                size = min(BLOCK, nbytes - i * BLOCK)
                blocks[_Piece(start + i * BLOCK, size, None, sums[8 * i : 8 * i + 8])] = each
    return blocks


def _threads() -> ThreadPoolExecutor:
    """That read: memory and most disks are faster than one of many cores."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="flatshard-read")


def _load(file: int, wanted: _Wanted) -> torch.Tensor:
    """What torch.save wrote."""
    tensor: torch.Tensor = torch.load(io.BytesIO(_read(file, wanted)), map_location="cpu", weights_only=True)
    return _region(tensor, wanted.item.storage_offsets, wanted.item.lengths)


def _region(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    if tensor.shape != lengths:
        for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
    return tensor


def _read(file: int, wanted: _Wanted) -> bytes:
    data = bytearray(wanted.nbytes)
    _read_into(file, memoryview(data), wanted.start)
    return bytes(data)


def _read_into(file: int, memory: memoryview, at: int) -> None:
    while memory.nbytes:
        count = os.preadv(file, [memory], at)
        if not count:
            raise ValueError("a file of the checkpoint has been cut off while it was read")
        memory, at = memory[count:], at + count


def _describe(index: MetadataIndex) -> str:
    return f"{index.fqn!r}" if index.offset is None else f"{index.fqn!r} at {tuple(index.offset)}"


class LoadPlanner:
    """What a job's load reads, and to where: for ``Reader`` a planner of torch's. It executes nothing."""

    def __init__(self, state: dict[str, Any], metadata: Metadata, strict: bool) -> None:
        """``state``: what is filled. ``strict``: it has all names that the checkpoint has, and no others."""
        self._state, self._saved, self._strict = state, metadata.state_dict_metadata, strict
        self._values, self._ways = flatten_state_dict(state)

    def plan(self, expected: Iterable[str], is_later: Callable[[Way], bool]) -> tuple[LoadPlan, LoadPlan]:
        """What is to be read now, and later.

        Args:
            expected: names in the checkpoint that are to be loaded.
            is_later: by where a value is in the state.

        Raises:
            ValueError: with all names that are missing or unexpected, if that matters; that have another shape or kind, or
                one that it cannot become; of which parts overlap, or are missing, in the checkpoint.
        """
        now, later, wrong = LoadPlan([]), LoadPlan([]), []
        for name, value in self._values.items():
            kind, plan = self._saved.get(name), later if is_later(self._ways[name]) else now
            if isinstance(value, torch.Tensor) and isinstance(kind, TensorStorageMetadata):
                try:
                    plan.items.extend(_tensor_items(name, value, kind))
                except ValueError as e:
                    wrong.append(f"{name!r} {e}")
            elif isinstance(value, torch.Tensor) and kind is not None:
                wrong.append(f"{name!r} is a tensor here, and none in the checkpoint")
            elif isinstance(kind, TensorStorageMetadata):
                wrong.append(f"{name!r} is a tensor in the checkpoint, and a {type(value).__name__} here")
            elif kind is not None:
                index, zero = MetadataIndex(name), torch.Size((0,))
                plan.items.append(ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero))
        if self._strict and (missing := [n for n in self._values if n not in self._saved]):
            wrong.insert(0, f"not in the checkpoint: {name_list(missing, 50)}")
        if self._strict and (unexpected := [n for n in expected if n not in self._values]):
            wrong.append(f"in the checkpoint only: {name_list(unexpected, 50)}")
        if wrong:
            raise ValueError("; ".join(wrong))
        return now, later

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See torch, which would execute ``value``."""
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as e:
            raise ValueError(f"{name!r} in the checkpoint is of a class that is not read: {e}") from None
        place: Any = self._state
        *way, last = self._ways[name]
        for key in way:
            place = place[key]
        place[last] = found

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """See torch."""
        index = read_item.dest_index
        tensor = self._values[index.fqn]
        if hasattr(tensor, "__get_tensor_shard__"):
            tensor = tensor.__get_tensor_shard__(index)
        return _region(tensor, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """See torch."""


def _tensor_items(name: str, tensor: torch.Tensor, saved: TensorStorageMetadata) -> list[ReadItem]:
    """What this rank reads of a tensor.

    Raises:
        ValueError: why it cannot be loaded.
    """
    if tuple(saved.size) != tuple(tensor.shape):
        raise ValueError(f"has shape {tuple(saved.size)} in the checkpoint, {tuple(tensor.shape)} here")
    dtype, has = saved.properties.dtype, sum(math.prod(chunk.sizes) for chunk in saved.chunks)
    if not torch.can_cast(dtype, tensor.dtype):
        raise ValueError(f"has {dtype} in the checkpoint, {tensor.dtype} here")
    if has != math.prod(saved.size):
        raise ValueError(f"has {has} of {math.prod(saved.size)} elements in the checkpoint")
    items = []
    for box in _boxes_of(tensor):
        if box in saved.chunks:  # nothing is cut otherwise than it was
            zeros = torch.Size([0] * len(box.sizes))
            index = MetadataIndex(name, box.offsets)
            found = [ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, box.sizes)]
        else:
            found = create_read_items_for_chunk_list(name, saved, [box])
        if (got := sum(math.prod(item.lengths) for item in found)) != math.prod(box.sizes):
            raise ValueError(f"at {tuple(box.offsets)}: the checkpoint has {got} of {math.prod(box.sizes)} elements")
        items += found
    return items


def _boxes_of(tensor: torch.Tensor) -> list[ChunkStorageMetadata]:
    """What this rank has of it."""
    if hasattr(tensor, "__create_chunk_list__"):
        return tensor.__create_chunk_list__()  # type: ignore[no-any-return]
    return [ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())]
