"""The files of a checkpoint, as ``torch.distributed.checkpoint`` has them, written and read at the speed of the disk.

Any reader of torch's reads them, and these read what torch's writer wrote: FSDP2's, sharded ones of FSDP1, those of plain
models. Each rank writes one file. Where an entry's own bytes lie, and their sums, is said in its place in the metadata, which
torch's reader passes over.

[Note: No pickle is executed]
torch's reader unpickles the metadata, and its planner the values that are not tensors, whatever they say. Here the metadata
may name the classes of metadata and nothing else, and values are read as ``torch.load(weights_only=True)`` does: so what that
would refuse is refused when it is saved.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from flatshard._errors import name_list
from flatshard.checkpoint import _disk as disk
from flatshard.checkpoint._boxes import memory_dims
from flatshard.checkpoint._container import ALIGNMENT, BLOCK, around, checksum, checksums, memory_of
from flatshard.checkpoint._progress import Progress

_BATCH = 4 * BLOCK  # bytes in one call


class Body(NamedTuple):
    """Of an entry that we wrote: its own bytes, within the bytes that torch's reader is told of."""

    start: int  # in the file
    nbytes: int
    stride: tuple[int, ...] | None  # in elements; None: the bytes are what torch.save wrote
    sums: bytes


# -- writing: [Note: Memory as it is] ----------------------------------------------------------------------------------


class Writer(FileSystemWriter):
    """``torch.distributed.checkpoint.save(state, storage_writer=Writer(path))``: one flushed file a rank, without copies.

    Any reader reads what it writes; ``flatshard.checkpoint.Reader`` verifies it.
    """

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """See torch."""
        future: Future[list[WriteResult]] = Future()
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        future.set_result(_write_file(Path(self.path), name, plan.items, planner) if plan.items else [])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See torch."""
        metadata.version, metadata.storage_meta = CURRENT_DCP_VERSION, self.storage_meta()
        metadata.storage_data = {r.index: r.storage_data for each in results for r in each}
        data = pickle.dumps(metadata)
        file = disk.create(Path(self.path) / f"{disk.METADATA}.tmp")
        try:
            disk.write(file, [memoryview(data), memoryview(_seal(data))])
            disk.flush(file)
        finally:
            os.close(file)
        disk.rename(Path(self.path) / f"{disk.METADATA}.tmp", Path(self.path) / disk.METADATA)


def _write_file(directory: Path, name: str, items: list[WriteItem], planner: Any) -> list[WriteResult]:
    results: list[WriteResult] = []
    buffers: list[memoryview] = []
    at = ready = 0
    file = disk.create(directory / name)
    try:
        for item in items:
            data, head, tail, stride = _pieces(planner.resolve_data(item))
            memory = data.getbuffer() if isinstance(data, io.BytesIO) else memory_of(data)
            pad = -at % ALIGNMENT
            body = Body(at + pad + len(head), memory.nbytes, stride, checksums(memory))
            info = _StorageInfo(name, at + pad, len(head) + memory.nbytes + len(tail))
            info.flatshard = tuple(body)  # type: ignore[attr-defined]
            results.append(WriteResult(item.index, info.length, info))
            buffers += [memoryview(b) for b in (bytes(pad), head, memory, tail) if len(b)]
            at += pad + info.length
            if at - ready > _BATCH:
                disk.write(file, buffers)
                ready = at
                buffers.clear()
        disk.write(file, buffers)
        disk.flush(file)
    except OSError as e:
        raise type(e)(e.errno, e.strerror, str(directory / name)) from e
    finally:
        os.close(file)
    return results


def _pieces(data: Any) -> tuple[Any, bytes, bytes, tuple[int, ...] | None]:
    """A tensor on CPU, or a stream; what comes before and after; the strides."""
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
    """torch's, which makes bytes of values at once, refuses what could not be loaded, and counts what it hands out."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._streams: dict[str, io.BytesIO] = {}

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        """See torch.

        Raises:
            ValueError: with the names of all values that a load would refuse.
        """
        super().set_up_planner(state_dict, *args, **kwargs)
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

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """See torch."""
        self._progress.total = sum(map(_write_nbytes, new_plan.items))
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        """See torch."""
        self._progress.add(_write_nbytes(write_item))
        return self._streams.get(write_item.index.fqn) or super().resolve_data(write_item)


def _write_nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def check_plans(plans: Iterable[SavePlan], names: Iterable[str]) -> None:
    """Every element of every tensor is written by some rank.

    Raises:
        ValueError: with all names of which elements are missing, or written twice.
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


# -- metadata: [Note: No pickle is executed] ---------------------------------------------------------------------------

_MAGIC = b"flatshard seal 1"
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | torch.layout):
            return found
        raise pickle.UnpicklingError(
            f"the checkpoint's metadata names {module}.{name}, which no metadata holds: not read"
        )


def _seal(data: bytes) -> bytes:
    """What follows the metadata, where a reader of pickles has stopped."""
    return _MAGIC + hashlib.blake2b(data, digest_size=32).digest()


def _read_metadata(data: bytes) -> Metadata:
    """Raises ValueError if it is damaged, or not the metadata of a checkpoint."""
    size = len(data) - len(_seal(b""))
    sealed = data[max(size, 0) :].startswith(_MAGIC)
    if sealed and data[size:] != _seal(data[:size]):
        raise ValueError(
            "the checkpoint's .metadata is damaged: its bytes do not have the sum that they were saved with"
        )
    stream = io.BytesIO(data)
    try:
        found = _MetadataUnpickler(stream).load()
        ours = any(hasattr(info, "flatshard") for info in found.storage_data.values())
        fits = isinstance(found, Metadata) and all(map(_is_entry, found.state_dict_metadata.items()))
    except pickle.UnpicklingError as e:
        raise ValueError(f"the checkpoint's .metadata cannot be read: {e}") from None
    except Exception as e:
        raise ValueError(f"the checkpoint's .metadata is damaged or cut off: {type(e).__name__}: {e}") from None
    if not fits or (not sealed and (ours or stream.tell() != len(data))):
        raise ValueError("the checkpoint's .metadata is damaged or cut off")
    return found  # type: ignore[no-any-return]


def _is_entry(entry: tuple[Any, Any]) -> bool:
    name, kind = entry
    if isinstance(kind, TensorStorageMetadata):
        numbers = [*kind.size, *(n for c in kind.chunks for n in (*c.offsets, *c.sizes))]
        return isinstance(name, str) and all(isinstance(n, int) and n >= 0 for n in numbers)
    return isinstance(name, str) and isinstance(kind, BytesStorageMetadata)


# -- reading -----------------------------------------------------------------------------------------------------------


class Reader(FileSystemReader):
    """``torch.distributed.checkpoint.load(state, storage_reader=Reader(path))``: executes nothing, reads into place.

    Everything that the load needs is looked at before anything is read into its place: files that are missing, cut off or
    outside of the directory, and the sums of what ``flatshard.checkpoint.Writer`` or ``save_checkpoint`` wrote.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        """``verify``: False leaves out the sums, and with them one more reading of the files."""
        super().__init__(path)
        self._verify, self._checked = verify, False
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See torch.

        Raises:
            ValueError: it is damaged, or not the metadata of a checkpoint.
        """
        self._metadata = _read_metadata((Path(self.path) / disk.METADATA).read_bytes())
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
        if self._verify and (wrong := [each for file, items in files.items() for each in self._damaged(file, items)]):
            raise ValueError(f"files of the checkpoint are damaged: {', '.join(wrong)}")
        self._checked = True

    def _damaged(self, file: Path, items: list[ReadItem]) -> list[str]:
        """What in ``file`` is not as it was saved. Blocks that no item touches are not looked at."""
        blocks: dict[tuple[int, int], tuple[ReadItem, bytes]] = {}  # where, and how many bytes
        for item in items:
            info, body = self._entry(item)
            if body is None:
                with file.open("rb") as stream:
                    try:
                        self._load(stream, item, info)
                    except Exception as e:
                        return [f"{_describe(item.storage_index)} in {file.name!r} ({type(e).__name__}: {e})"]
            else:
                first, last = self._region(item, body)
                for i in range(first // BLOCK, -(-last // BLOCK)):
                    size = min(BLOCK, body.nbytes - i * BLOCK)
                    blocks[body.start + i * BLOCK, size] = item, body.sums[8 * i : 8 * i + 8]
        memory = memoryview(bytearray(BLOCK))
        wrong: dict[str, None] = {}
        with file.open("rb", buffering=0) as raw:
            for (at, size), (item, expected) in blocks.items():
                _read_into(raw.fileno(), memory[:size], at)
                if checksum(memory[:size]) != expected:
                    wrong[f"{_describe(item.storage_index)} in {file.name!r} (its bytes do not have their sum)"] = None
        return list(wrong)[:10]

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
                for item in items:
                    info, body = self._entry(item)
                    if item.type is LoadItemType.BYTE_IO:
                        planner.load_bytes(item, io.BytesIO(_read(stream, info)))
                        continue
                    target = planner.resolve_tensor(item).detach()
                    if body is None or body.stride is None:
                        target.copy_(self._load(stream, item, info))
                    else:
                        self._read_body(stream.fileno(), item, body, target)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _load(self, stream: Any, item: ReadItem, info: Any) -> torch.Tensor | None:
        """What torch.save wrote; of values that are no tensors nothing."""
        data = io.BytesIO(_read(stream, info))
        if item.type is LoadItemType.BYTE_IO:
            return None
        tensor: torch.Tensor = torch.load(data, map_location="cpu", weights_only=True)
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def _read_body(self, file: int, item: ReadItem, body: Body, target: torch.Tensor) -> None:
        first, last = self._region(item, body)
        dtype = self._dtype(item)
        assert body.stride is not None
        in_place = target.device.type == "cpu" and target.dtype is dtype and target.nbytes == last - first
        if in_place and all(
            n == 1 or s == t for n, s, t in zip(target.shape, body.stride, target.stride(), strict=True)
        ):
            _read_into(file, memory_of(target), body.start + first)
            increment_version(target)
        elif last > first:
            whole = torch.empty((last - first) // dtype.itemsize, dtype=dtype)
            _read_into(file, memory_of(whole), body.start + first)
            target.copy_(whole.as_strided(tuple(item.lengths), body.stride))


def _describe(index: MetadataIndex) -> str:
    return f"{index.fqn!r}" if index.offset is None else f"{index.fqn!r} at {tuple(index.offset)}"


def _read(stream: Any, info: Any) -> bytes:
    data = bytearray(info.length)
    _read_into(stream.fileno(), memoryview(data), info.offset)
    return bytes(data)


def _read_into(file: int, memory: memoryview, at: int) -> None:
    while memory.nbytes:
        count = os.preadv(file, [memory], at)
        if not count:
            raise ValueError("a file of the checkpoint has been cut off while it was read")
        memory, at = memory[count:], at + count


class LoadPlanner(DefaultLoadPlanner):
    """torch's, which executes nothing, takes tensors on meta for such as come later, and counts what it reads."""

    def __init__(self, progress: Progress, strict: bool) -> None:
        super().__init__(allow_partial_load=not strict)
        self._progress, self._strict = progress, strict

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

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """See torch."""
        items = [item for item in new_plan.items if isinstance(self.state_dict[item.dest_index.fqn], torch.Tensor)]
        sizes = [math.prod(i.lengths) * self.state_dict[i.dest_index.fqn].dtype.itemsize for i in items]
        self._progress.total = sum(sizes)
        return super().finish_plan(new_plan)

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

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """See torch."""
        super().commit_tensor(read_item, tensor)
        self._progress.add(tensor.nbytes)


def _boxes_of(tensor: torch.Tensor) -> list[tuple[torch.Size, torch.Size]]:
    """(offsets, sizes) of what this rank has of it."""
    if hasattr(tensor, "__create_chunk_list__"):
        return [(chunk.offsets, chunk.sizes) for chunk in tensor.__create_chunk_list__()]
    return [(torch.Size([0] * tensor.dim()), tensor.size())]
