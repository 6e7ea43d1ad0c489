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
from typing import Any, NamedTuple, TypeVar

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
from flatshard.checkpoint._byte_count import ByteCount
from flatshard.checkpoint._container import BLOCK, checksum, memory_of
from flatshard.checkpoint._metadata import Body, unpickled

_SHARE = 4 * BLOCK  # bytes for one thread at a time

R = TypeVar("R")
Sized = TypeVar("Sized", "_Block", "_Piece")


class Reader(FileSystemReader):
    """``torch.distributed.checkpoint.load(state, storage_reader=Reader(path))``: executes nothing, reads into place.

    Everything that the load needs is looked at before anything is read into its place: files that are missing, cut off or
    outside of the directory, and the sums of what ``flatshard.checkpoint.Writer`` or ``save_checkpoint`` wrote.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        """``verify``: False leaves out the sums, and with them one more reading of the files."""
        super().__init__(path)
        self.progress: ByteCount | None = None
        self._verify, self._checked = verify, False
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See torch.

        Raises:
            ValueError: it is damaged, or not the metadata of a checkpoint.
        """
        self._metadata = unpickled((Path(self.path) / disk.METADATA).read_bytes())
        return self._metadata

    def _by_file(self, plan: LoadPlan) -> dict[Path, list[_Wanted]]:
        """What ``plan`` reads of each file.

        Raises:
            ValueError: the metadata does not say where something is, or names a file outside of the directory.
        """
        found: dict[str, list[_Wanted]] = {}
        for item in plan.items:
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
        body = Body(*info.flatshard) if hasattr(info, "flatshard") else None
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

    def check(self, plan: LoadPlan) -> None:
        """What ``plan`` reads is there, and as it was saved.

        Raises:
            ValueError: with the names of files that are missing or cut off, and of what is damaged.
        """
        files = self._by_file(plan)
        wrong = []
        for file, wanted in files.items():
            end = max(each.end for each in wanted)
            size = file.stat().st_size if file.is_file() else None
            if size is None or size < end:
                wrong.append(f"{file.name!r} ({'missing' if size is None else f'{size} of at least {end} bytes'})")
        if wrong:
            raise ValueError(f"files of the checkpoint are incomplete: {', '.join(sorted(wrong))}")
        blocks = {file: _blocks(wanted) if self._verify else {} for file, wanted in files.items()}
        if self.progress is not None:
            verified = sum(block.nbytes for each in blocks.values() for block in each)
            self.progress.total = verified + sum(each.nbytes for w in files.values() for each in w if each.is_tensor)
        with _threads() as pool:
            wrong = [text for file in files for text in self._damaged(pool, file, files[file], blocks[file])]
        if wrong:
            raise ValueError(f"files of the checkpoint are damaged: {', '.join(wrong[:10])}")
        self._checked = True

    def _damaged(
        self, pool: ThreadPoolExecutor, file: Path, wanted: list[_Wanted], blocks: dict[_Block, _Wanted]
    ) -> Iterator[str]:
        """What in ``file`` is not as it was saved. Blocks that nothing is wanted of are not looked at."""
        with file.open("rb", buffering=0) as raw:
            for each in wanted if self._verify else ():
                if each.body is None and each.is_tensor:  # of others, without sums: whether it can be read at all
                    try:
                        _load(raw.fileno(), each)
                    except Exception as e:
                        yield f"{each.name} in {file.name!r} ({type(e).__name__}: {e})"

            def differing(some: list[_Block]) -> list[_Block]:
                memory, found = memoryview(bytearray(max(block.nbytes for block in some))), []
                for block in some:
                    _read_into(raw.fileno(), memory[: block.nbytes], block.start)
                    if checksum(memory[: block.nbytes]) != block.sum:
                        found.append(block)
                return found

            wrong = [block for found in self._in_threads(pool, differing, [*blocks]) for block in found]
        for name in dict.fromkeys(blocks[block].name for block in wrong):
            yield f"{name} in {file.name!r} (its bytes do not have their sum)"

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """See torch.

        Raises:
            ValueError: see :meth:`check`; nothing has been read.
        """
        if not self._checked:
            self.check(plan)
        with _threads() as pool:
            for file, wanted in self._by_file(plan).items():
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

        def read(some: list[_Piece]) -> None:
            for piece in some:
                _read_into(file, piece.memory, piece.start)

        memories = [(memory_of(tensor), each.start) for each, tensor in places]
        pieces = [_Piece(m[i : i + BLOCK], at + i) for m, at in memories for i in range(0, m.nbytes, BLOCK)]
        for _ in self._in_threads(pool, read, pieces):
            pass

    def _in_threads(
        self, pool: ThreadPoolExecutor, function: Callable[[list[Sized]], R], pieces: list[Sized]
    ) -> Iterator[R]:
        """Call ``function`` with a few MiB of ``pieces`` at a time, and yield what it returned."""
        shares: list[list[Sized]] = []
        room = 0
        for piece in pieces:
            if room <= 0:
                shares.append([])
                room = _SHARE
            shares[-1].append(piece)
            room -= piece.nbytes
        results = pool.map(function, shares) if len(shares) > 1 else map(function, shares)
        for share, result in zip(shares, results, strict=True):
            self._count(sum(piece.nbytes for piece in share))
            yield result

    def _count(self, nbytes: int) -> None:
        if self.progress is not None:
            self.progress.add(nbytes)


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


class _Block(NamedTuple):
    """Bytes of a file that have a sum."""

    start: int
    nbytes: int
    sum: bytes


class _Piece(NamedTuple):
    """Where to read some bytes to, and where they are in a file."""

    memory: memoryview
    start: int

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


def _blocks(wanted: list[_Wanted]) -> dict[_Block, _Wanted]:
    """Those of one file that are touched, each with one that touches it."""
    blocks = {}
    for each in wanted:
        if each.body is not None:
            start, nbytes, _, sums = each.body
            first, stop = (each.start - start) // BLOCK, -(-(each.start - start + each.nbytes) // BLOCK)
            for i in range(first, stop):
                size = min(BLOCK, nbytes - i * BLOCK)
                blocks[_Block(start + i * BLOCK, size, sums[8 * i : 8 * i + 8])] = each
    return blocks


def _threads() -> ThreadPoolExecutor:
    """That read: memory and most disks are faster than one of many cores."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="flatshard-read")


def _load(file: int, wanted: _Wanted) -> torch.Tensor:
    """What torch.save wrote."""
    tensor: torch.Tensor = torch.load(io.BytesIO(_read(file, wanted)), map_location="cpu", weights_only=True)
    for dim, (start, length) in enumerate(zip(wanted.item.storage_offsets, wanted.item.lengths, strict=True)):
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
        place: Any = self.original_state_dict
        *way, last = self.mappings[name]
        for key in way:
            place = place[key]
        place[last] = found

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
