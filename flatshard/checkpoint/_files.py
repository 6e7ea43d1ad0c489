"""The files of a checkpoint: a directory that is whole or not there, read without executing what it says.

The format is that of ``torch.distributed.checkpoint``, whose writer, reader and planners these are; so those of FSDP2,
sharded ones of FSDP1 and those of plain models are read, and the other way round.

[Note: Whole or not there]
Ranks write into a hidden directory beside. When all have written, and every element of every tensor is accounted for, rank 0
writes the metadata and renames the directory. A save that dies before leaves the hidden directory, which the next one
clears, and what was at the path as it was. Where that is replaced, it is renamed too, and removed last: at no moment does
neither lie whole on the disk, and ``find`` knows both names.

[Note: No pickle is executed]
torch's reader unpickles the metadata, and its planner the values that are not tensors, whatever they say. Here the metadata
may name the classes of metadata and nothing else, and values are read as ``torch.load(weights_only=True)`` does.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem

from flatshard._errors import name_list

Say = Callable[[str], None]

METADATA = ".metadata"


# -- the directory: [Note: Whole or not there] -------------------------------------------------------------------------


def hidden(path: Path) -> Path:
    """Where a save writes."""
    return path.with_name(f".{path.name}.saving")


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def prepare(path: Path, overwrite: bool) -> Path:
    """Make the directory that a save writes into, and return it.

    Raises:
        FileExistsError: there is something at ``path``, and not ``overwrite``.
    """
    if path.exists() and not overwrite:
        raise FileExistsError(f"{str(path)!r} exists: choose another path, or pass overwrite=True to replace it")
    if path.exists() and not (path / METADATA).exists():
        raise FileExistsError(f"{str(path)!r} exists and is no checkpoint: it is not replaced. Choose another path")
    target = hidden(path)
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    return target


def publish(path: Path) -> None:
    """Put what was written in its place."""
    written, before = hidden(path), _replaced(path)
    _sync(written)
    if path.exists():
        if before.exists():
            shutil.rmtree(before)
        path.rename(before)
    written.rename(path)
    _sync(path.parent)
    if before.exists():
        shutil.rmtree(before)


def discard(path: Path) -> None:
    """Remove what a save that failed has written."""
    shutil.rmtree(hidden(path), ignore_errors=True)


def find(path: Path) -> Path:
    """Where the checkpoint of ``path`` lies.

    Raises:
        FileNotFoundError: nowhere.
    """
    if (path / METADATA).exists():
        return path
    if not path.exists() and (_replaced(path) / METADATA).exists():  # a save died between two renames
        return _replaced(path)
    what = (
        "is no checkpoint: it has no .metadata, so a save that did not end wrote it" if path.exists() else "not found"
    )
    raise FileNotFoundError(f"{str(path)!r} {what}")


def _sync(directory: Path) -> None:
    """Have a directory's entries on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- progress ----------------------------------------------------------------------------------------------------------


class Progress:
    """Says every few seconds how far one rank's work on tensors is."""

    def __init__(self, verb: str, say: Say | None, every: float = 5.0) -> None:
        self._verb, self._say, self._every = verb, say, every
        self._began = self._said = time.monotonic()
        self.done = self.total = 0  # bytes; of the total those of tensors

    def add(self, nbytes: int) -> None:
        """So much more has been done."""
        self.done += nbytes
        if self._say is not None and time.monotonic() - self._said > self._every:
            self._said = time.monotonic()
            share = f" of {_size(self.total)}" if self.total else ""
            self._say(f"{self._verb}: {_size(self.done)}{share} on this rank after {self._said - self._began:.0f} s")

    def end(self, path: Path) -> None:
        """All is done."""
        if self._say is not None:
            seconds = time.monotonic() - self._began
            self._say(f"{self._verb}: {_size(self.done)} on this rank in {seconds:.1f} s, {str(path)!r}")


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


# -- writing -----------------------------------------------------------------------------------------------------------


Writer = FileSystemWriter


class SavePlanner(DefaultSavePlanner):
    """torch's, which counts what it hands to the writer."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """See torch."""
        tensors = [item.tensor_data for item in new_plan.items if item.tensor_data is not None]
        self._progress.total = sum(math.prod(t.chunk.sizes) * t.properties.dtype.itemsize for t in tensors)
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        """See torch."""
        data: Any = super().resolve_data(write_item)
        self._progress.add(data.nbytes if isinstance(data, torch.Tensor) else len(data.getbuffer()))
        return data


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


# -- reading: [Note: No pickle is executed] ----------------------------------------------------------------------------

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


class Reader(FileSystemReader):
    """torch's, which executes nothing, and sees that the files are all there."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See torch.

        Raises:
            UnpicklingError, EOFError: it is not the metadata of a checkpoint.
        """
        found: Metadata = _MetadataUnpickler(io.BytesIO((Path(self.path) / METADATA).read_bytes())).load()
        return found

    def check_files(self, plan: LoadPlan) -> None:
        """What ``plan`` reads lies within its files.

        Raises:
            ValueError: with the names of the files that are missing or cut off.
        """
        ends: dict[str, int] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        wrong = []
        for name, end in ends.items():
            file = Path(self.path) / name
            size = file.stat().st_size if file.exists() else None
            if size is None or size < end:
                wrong.append(f"{name!r} ({'missing' if size is None else f'{size} of at least {end} bytes'})")
        if wrong:
            raise ValueError(f"files of the checkpoint are incomplete: {', '.join(sorted(wrong))}")


class LoadPlanner(DefaultLoadPlanner):
    """torch's, which executes nothing, and counts what it reads."""

    def __init__(self, progress: Progress, strict: bool) -> None:
        super().__init__(allow_partial_load=not strict)
        self._progress, self._strict = progress, strict

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
                if tuple(kind.size) != tuple(value.shape):
                    wrong.append(f"{name!r} has shape {tuple(kind.size)} in the checkpoint, {tuple(value.shape)} here")
                elif not torch.can_cast(kind.properties.dtype, value.dtype):
                    wrong.append(f"{name!r} has {kind.properties.dtype} in the checkpoint, {value.dtype} here")
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
