"""Reading a folder of safetensors files, as Hugging Face writes it, into shards: each rank reads the bytes of its own.

[Note: A folder as a checkpoint]
The header of a safetensors file says where the bytes of each tensor are. So headers are turned into the metadata of a
checkpoint, and the checkpoint's reader does the rest: it finds the boxes of this rank's shards, reads them in place, or casts
one box at a time. Nothing is sent between ranks but errors. The ``safetensors`` package is not needed.

[Note: Nothing in a file is believed]
Files come from strangers. A length is compared with the size of the file before that much is read, each tensor's range with
its shape and with the file, and names of files have no folder. A link that leads out of the folder is followed only into the
cache of Hugging Face. All of it is checked before the first value is replaced.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from flatshard._base.errors import name_list
from flatshard.checkpoint import _disk as disk
from flatshard.checkpoint._disk import ByteCount, Report
from flatshard.checkpoint._entries import ModuleState, copied
from flatshard.checkpoint._job import check_call, check_digests, make_barrier
from flatshard.checkpoint._location import Location, OpenFile
from flatshard.checkpoint._metadata import Body, place_of
from flatshard.checkpoint._reader import EntryPiece, FileSystemReader, plan, read_bytes
from flatshard.checkpoint._safetensors import DTYPES, ENDING, INDEX_ENDING, check_value
from flatshard.checkpoint._store import OpenStoreFile

Rename = Callable[[str], "str | tuple[str, Sequence[int]] | list[str] | None"]
"""Returns the name in the model of a tensor's name in the files. See :func:`load_safetensors`."""

_HEADER = 2**18  # bytes of a file in a store that are read first
_MAX_HEADER = 100 * 10**6  # bytes: the limit of the safetensors package
_MAX_DIMS = 64
_NAMED = {text: dtype for dtype, text in DTYPES.items()}


def load_safetensors(
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    name: str | None = None,
    strict: bool = True,
    rename: Rename | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    progress: Report | None = None,
) -> list[str]:
    """Read safetensors files into the shards of ``module``. Every rank must call it, with the same files.

    ``directory`` is as ``save_pretrained`` or :func:`export_safetensors` writes it: one file, or several and an index. Each
    rank reads the bytes of its own shards, and nothing is broadcast. It needs memory for its shards and, where the file has
    another floating-point dtype or memory layout, for one of them in that. Of tied parameters one name in the files is
    enough, and the first is read.

    Example::

        flatshard.checkpoint.export_safetensors(model, "pretrained", dtype=torch.bfloat16)
        flatshard.checkpoint.load_safetensors(model, "pretrained")

    Args:
        module: a sharded module with memory: after ``to_empty``, if it was sharded on the meta device.
        directory: the folder, which all ranks see, or its URL in a store (``s3://bucket/model``): see
            :func:`save_checkpoint`. Files of other formats in it are not read.
        name: of the files, as in :func:`export_safetensors`. Default: the only one that the folder has.
        strict: raise if the files lack a name, or have a name that the module has not. If False, values that the files lack
            stay as they are.
        rename: returns the name in the module of a name in the files, or None to leave that tensor out. Where a parameter
            is made of several tensors, it returns the parameter's name and the offsets of the tensor in it:
            ``("experts.up", (3, 0, 0))`` for the matrix of expert 3. Where a tensor holds several parameters, such as
            queries, keys and values, it returns a list of their names: they have equal shares of its rows.
        process_group: the ranks that share ``module``. Default: all.
        timeout: see :func:`save_checkpoint`.
        progress: called with the bytes that this rank has read, and its total.

    Returns:
        Names of the module that the files lack. Their values have not changed.

    Raises:
        ImportError: ``directory`` is a URL, and fsspec or the library of the store is not installed.
        ValueError: fsspec does not know the scheme of the URL.
        RankError: on all ranks, with nothing changed on any: a rank did not arrive; names are missing or unexpected; shapes
            differ; a dtype cannot become the parameter's, as those of quantised weights; a file is missing, damaged, cut
            off, outside of the folder, or of a format that is not read (pickles, GGUF). If the disk fails after everything
            was checked, the message says that some values are changed.
    """
    at = check_call(directory, {"": module}, process_group, "load_safetensors")
    job = make_barrier(process_group, f"load_safetensors({str(at)!r})", timeout)
    reader = SafetensorsReader(at, name, rename)
    reader.progress = ByteCount("loading", str(at), progress, job.is_first)
    loading = _SafetensorsLoading(module, reader, strict)
    with job:
        job.share(loading.check, check_digests)
        job.share(loading.read)
    return loading.missing


class _SafetensorsLoading:
    """The load of one rank."""

    def __init__(self, module: nn.Module, reader: SafetensorsReader, strict: bool) -> None:
        self._module, self._reader, self._strict = module, reader, strict
        self.missing: list[str] = []
        self._in_place = True
        self._state: dict[str, Any] = {}  # the tensors to fill
        self._params: list[nn.Parameter] = []
        self._pieces: list[EntryPiece] = []

    def check(self) -> str:
        """Check everything. Return the digest of the headers, which must be the same on all ranks."""
        module, kinds = self._module, self._reader.read_metadata().state_dict_metadata
        state = ModuleState(module)
        shown = state.values
        variables = module.state_dict(keep_vars=True)
        names_of: dict[int, list[str]] = {}  # of each value, by its id: several if it is tied
        for name, value in variables.items():
            check_value(name, value, "load_safetensors")
            names_of.setdefault(id(value), []).append(name)
        read = [next((n for n in names if n in kinds), None) for names in names_of.values()]
        self._in_place = state.shows_memory
        self._state = {n: shown[n] if self._in_place else copied(shown[n]) for n in read if n is not None}
        self._params = [v for n in self._state if isinstance(v := variables[n], nn.Parameter)]
        problems = [
            f"{n!r} is {kind.properties.dtype} in the files, {value.dtype} here: values of another kind are not cast"
            for n, value in self._state.items()
            if isinstance(kind := kinds[n], TensorStorageMetadata) and not _can_cast(kind.properties.dtype, value.dtype)
        ]
        self.missing = [names[0] for names, found in zip(names_of.values(), read, strict=True) if found is None]
        if self._strict:
            unexpected = [n for n in kinds if n not in variables]
            problems += [f"not in the files: {name_list(self.missing, 50)}"] if self.missing else []
            problems += [f"in the files only: {name_list(unexpected, 50)}"] if unexpected else []
        try:
            self._pieces = plan(self._reader, self._state, {}, {}, False, ())
        except ValueError as e:
            problems.append(str(e))
        if problems:
            raise ValueError("; ".join(problems))
        self._reader.check(self._pieces)
        return self._reader.digest

    def read(self) -> None:
        """Read into the shards."""
        try:
            self._reader.read(self._pieces)
            if not self._in_place:
                self._module.load_state_dict(self._state, strict=False)
        except Exception as e:
            raise RuntimeError(
                f"reading failed after everything had been checked, and some values are changed: {e}"
            ) from e
        increment_version(self._params)  # also of parameters of which this rank has no elements


def _can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a cast keeps the meaning of values: numbers of 8 bits are those of quantised weights."""
    return source is target or (source.is_floating_point == target.is_floating_point and source.itemsize > 1)


# -- files -------------------------------------------------------------------------------------------------------------


class _FileTensor(NamedTuple):
    """A tensor in a file, as its header describes it."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # of its bytes in the file
    nbytes: int


class _LinkedFolder(disk.Folder):
    """The files of a folder, of which some may be links into the cache of Hugging Face."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._found: dict[str, str] = {}

    def _inside(self, name: str) -> str:
        if name not in self._found:
            self._found[name] = str(self._resolved(name))
        return self._found[name]

    def _resolved(self, name: str) -> Path:
        root, path = Path(os.path.realpath(self._path)), Path(os.path.realpath(self._path / name))
        blobs = root.parents[1] / "blobs" if root.parent.name == "snapshots" else root
        if not path.is_relative_to(root) and not path.is_relative_to(blobs):
            raise ValueError(
                f"{name!r} is a link to {str(path)!r}, outside of the folder, which is not read: copy that file, or give the "
                "folder that it is in"
            )
        return path


class SafetensorsReader(FileSystemReader):
    """A reader of safetensors files. [Note: A folder as a checkpoint]"""

    def __init__(self, at: Location, name: str | None, rename: Rename | None) -> None:
        super().__init__(str(at), verify=False)
        self._at, self._name, self._rename = at, name, rename or str
        self.folder = _LinkedFolder(str(at)) if isinstance(at, disk.DiskPath) else at.folder()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return metadata made of the headers.

        Raises:
            ValueError: files are missing or damaged, or two tensors have one name or place.
        """
        self._versions, self._hash = {}, hashlib.blake2b(digest_size=16)
        tensors: dict[str, _FileTensor] = {}
        file = _main_file(self._at, self._name)
        index = self._read_index(file) if file.endswith(INDEX_ENDING) else {}
        for each in dict.fromkeys(index.values()) or [file]:
            for tensor in self._read_header(each):
                if tensor.name in tensors:
                    raise ValueError(f"{tensor.name!r} is in two files: {tensors[tensor.name].file!r} and {each!r}")
                tensors[tensor.name] = tensor
        if lost := [n for n, each in index.items() if n not in tensors or tensors[n].file != each]:
            raise ValueError(f"the index {file!r} names {name_list(lost)}, not in the files that it says")
        return self._adopt(self._placed(tensors.values()), self._hash.hexdigest())

    def _read_index(self, file: str) -> dict[str, str]:
        with self._open(file) as opened:
            data = self._read_json(opened, file, 0, self._size(file))
        found = data.get("weight_map") if isinstance(data, dict) else None
        if not isinstance(found, dict) or not found or not all(isinstance(each, str) for each in found.values()):
            raise ValueError(f"{file!r} is no index of safetensors files: it has no weight_map of names")
        for each in set(found.values()):
            if each in ("", ".", "..") or Path(each).name != each:
                raise ValueError(f"the index names a file outside of the folder, which is not read: {each!r}")
        return found

    def _read_header(self, file: str) -> list[_FileTensor]:
        size = self._size(file)
        with self._open(file) as opened:
            length = int.from_bytes(read_bytes(opened, 0, min(8, size)), "little")
            if size < 8 or length > size - 8:
                raise ValueError(
                    f"{file!r} has {size} bytes, too few for its header: it is cut off, or no safetensors file"
                )
            header, begin = self._read_json(opened, file, 8, length), 8 + length
        if not isinstance(header, dict):
            raise ValueError(f"{file!r} has a header that names no tensors")
        header.pop("__metadata__", None)
        tensors = [_parse(name, file, described, begin, size) for name, described in header.items()]
        in_order = sorted((each for each in tensors if each.nbytes), key=lambda each: each.start)
        for one, other in itertools.pairwise(in_order):
            if one.start + one.nbytes > other.start:
                raise ValueError(f"{one.name!r} and {other.name!r} have common bytes in {file!r}")
        return tensors

    def _open(self, file: str) -> OpenFile:
        opened = self.folder.open(file)
        if isinstance(opened, OpenStoreFile):
            opened.ahead = _HEADER  # the file's other bytes are those of other ranks
        return opened

    def _size(self, file: str) -> int:
        version = self._versions[file] = self.folder.version(file)
        if version is None:
            raise ValueError(f"{file!r} is missing in the folder")
        return version[0]

    def _read_json(self, opened: OpenFile, file: str, start: int, nbytes: int) -> Any:
        if nbytes > _MAX_HEADER:
            raise ValueError(f"{file!r} has a header or an index of {nbytes} bytes; the most are {_MAX_HEADER}")
        data = bytes(read_bytes(opened, start, nbytes))
        self._hash.update(repr((file, nbytes)).encode() + data)
        try:
            return json.loads(data, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{file!r} has a damaged header or index: {e}") from None

    def _placed(self, tensors: Iterable[_FileTensor]) -> Metadata:
        """Return metadata with each tensor at its place in the model."""
        kinds: dict[str, Any] = {}
        storage: dict[MetadataIndex, Any] = {}
        for tensor, name, offsets in (each for t in tensors for each in _places(t, self._rename(t.name))):
            shape = (1,) * (len(offsets) - len(tensor.shape)) + tensor.shape
            entry = MetadataIndex(name, torch.Size(offsets))
            kind = kinds.setdefault(
                name, TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(shape), [])
            )
            if entry in storage or len(shape) != len(kind.size) or kind.properties.dtype is not tensor.dtype:
                raise ValueError(
                    f"{tensor.name!r} and another tensor of the files are {name!r} in the model: they have one place, or "
                    "other dimensions or dtypes"
                )
            kind.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)))
            kind.size = torch.Size([max(n, o + m) for n, o, m in zip(kind.size, offsets, shape, strict=True)])
            stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
            body = Body(tensor.start, tensor.nbytes, stride, b"")
            storage[entry] = place_of(tensor.file, tensor.start, tensor.nbytes, body)
        if overlapping := [name for name, kind in kinds.items() if _overlap(kind.chunks)]:
            raise ValueError(f"tensors of the files overlap in {name_list(overlapping)} of the model")
        return Metadata(kinds, storage_data=storage)


def _places(tensor: _FileTensor, place: Any) -> Iterator[tuple[_FileTensor, str, tuple[int, ...]]]:
    """Yield pieces of ``tensor``, with their names in the model and their offsets there. ``place``: see :data:`Rename`."""
    if isinstance(place, list):
        rows, rest = divmod(tensor.shape[0] if tensor.shape else 0, len(place))
        if rest or not rows:
            raise ValueError(f"{tensor.name!r} of shape {tensor.shape} has no equal rows for {name_list(place)}")
        nbytes, shape = tensor.nbytes // len(place), (rows, *tensor.shape[1:])
        for i, name in enumerate(place):
            piece = tensor._replace(shape=shape, start=tensor.start + i * nbytes, nbytes=nbytes)
            yield piece, name, (0,) * len(shape)
    elif isinstance(place, tuple):
        yield tensor, place[0], tuple(place[1])
    elif place is not None:
        yield tensor, place, (0,) * len(tensor.shape)


def _overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Return whether two chunks of a tensor have a common element. Few of those that stack up are compared."""
    order = sorted(chunks, key=lambda chunk: chunk.offsets)
    for i, one in enumerate(order):
        for j in range(i + 1, len(order)):
            other = order[j]
            ranges = list(zip(one.offsets, one.sizes, other.offsets, strict=True))
            if ranges[0][2] >= ranges[0][0] + ranges[0][1]:
                break
            if all(o < p + m and p < o + n for (o, n, p), m in zip(ranges, other.sizes, strict=True)):
                return True
    return False


def _main_file(at: Location, name: str | None) -> str:
    """Return the name of the only index, or else of the only file.

    Raises:
        ValueError: there is none, or several.
    """
    files = sorted(each for each in at.names() if not each.startswith("."))
    if not files:
        raise ValueError(f"{str(at)!r} is no folder, or has no files")
    for ending in (INDEX_ENDING, ENDING):
        found = [n for n in files if n.endswith(ending) and name in (None, n.removesuffix(ending))]
        if len(found) > 1:
            hint = "" if ending == INDEX_ENDING else ", and no index of them: copy the index, too"
            raise ValueError(f"{str(at)!r} has {name_list(found, 3)}{hint}. To read one of them, give its name=")
        if found:
            return found[0]
    others = [n for n in files if n.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf"))]
    hint = (
        ""
        if not others
        else (
            f". {name_list(others, 3)} are not read: pickles execute code, and GGUF is quantised. Convert them once, in one "
            "process: AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)"
        )
    )
    wanted = "safetensors files" if name is None else f"{name}{ENDING} or {name}{INDEX_ENDING}"
    raise ValueError(f"{str(at)!r} has no {wanted}{hint}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = [name for name, count in collections.Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"it has {name_list(twice)} twice")
    return found


def _parse(name: str, file: str, described: Any, begin: int, size: int) -> _FileTensor:
    """Return the tensor that a header describes.

    Args:
        name: the tensor's name.
        file: the file's name.
        described: the tensor's entry in the header.
        begin: the end of the header.
        size: the bytes of the file.

    Raises:
        ValueError: the description is wrong, or the file is too short.
    """
    if not isinstance(described, dict) or not described.keys() >= {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} in {file!r} has no dtype, shape and place")
    shape, offsets = described["shape"], described["data_offsets"]
    if (dtype := _NAMED.get(str(described["dtype"]))) is None:
        raise ValueError(f"{name!r} in {file!r} is {described['dtype']!r}, and read are {name_list(_NAMED, 12)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name!r} in {file!r} has shape {shape} and place {offsets}, which none can have")
    start, end = offsets
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} in {file!r} has {end - start} bytes, and shape {shape} in {described['dtype']}")
    if begin + end > size:
        raise ValueError(f"{name!r} ends at byte {begin + end} of {file!r}, which is cut off after {size}")
    return _FileTensor(name, file, dtype, tuple(shape), begin + start, end - start)


def _are_sizes(values: Any) -> bool:
    return (
        isinstance(values, list) and len(values) <= _MAX_DIMS and all(type(n) is int and 0 <= n < 2**63 for n in values)
    )
