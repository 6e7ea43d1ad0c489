"""Exporting a folder of safetensors files, as Hugging Face loads it: each rank writes the bytes of its own shards.

A file is the length of a JSON header (8 bytes, little endian), the header (dtype, shape and place of each tensor), and the
row-major bytes of the tensors. So all places are known beforehand. The first rank makes the files, and all ranks write into
them at once. Nothing is gathered. The ``safetensors`` package is not needed; it would hold a file in memory.

[Note: Files in a store]
A store takes an object from one writer, from its first byte to its last. So ranks take turns with files: in a round each rank
gathers one file into its memory, and all upload at once. An object appears when all of it is uploaded, and the index last.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from flatshard._base.errors import name_list
from flatshard._comm.process_groups import membership
from flatshard._handle.adapters.tensor_parallel import is_dtensor
from flatshard._handle.adapters.tensor_subclass import TensorSubclass
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.tensors.sharded_parameter import shard_info
from flatshard.checkpoint import _disk as disk
from flatshard.checkpoint._barrier import GIVE_UP_AFTER, Barrier, RankError, barrier, patience
from flatshard.checkpoint._container import memory_of
from flatshard.checkpoint._disk import DiskPath
from flatshard.checkpoint._location import Location, locate
from flatshard.checkpoint._sharded_value import ShardedValue, view_of
from flatshard.checkpoint._state_dict import (
    Flat,
    batches,
    check_dtype,
    check_experts,
    gathered,
    has_first_copy,
    idle_flats,
)
from flatshard.checkpoint._store import NewStoreFile, StorePath

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

ENDING, INDEX_ENDING = ".safetensors", ".safetensors.index.json"
_CALL = "export_safetensors"


def export_safetensors(
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    name: str = "model",
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write ``module``'s state to ``directory`` as Hugging Face's ``save_pretrained`` does, for ``from_pretrained``.

    All ranks must call it. On a disk, which all of them see, each rank writes the bytes of its own shards, and nothing is
    gathered: it needs memory for no more than its shard of one tensor. To a store each rank uploads other files, and holds
    one at a time in CPU memory. Names are those of ``module.state_dict()``. A tied parameter is written once, under the first
    of its names, as Hugging Face ties it again. Buffers are those of rank 0. Several files have an index,
    ``{name}.safetensors.index.json``, which is written last. On a disk files have hidden names until all ranks have written.
    If a rank fails, nothing is left.

    Example::

        flatshard.checkpoint.export_safetensors(model, "exported", dtype=torch.bfloat16)

    Args:
        module: a sharded module, or one that holds sharded ones.
        directory: created if it does not exist, or the URL of one in a store (``s3://bucket/model``): see
            :func:`save_checkpoint`. It must have no safetensors files.
        name: of the files, before ``.safetensors`` or ``-00001-of-00002.safetensors``. transformers reads ``"model"``,
            diffusers ``"diffusion_pytorch_model"``; each beside a ``config.json``, which
            ``model.config.save_pretrained(folder)`` and ``model.save_config(folder)`` write.
        dtype: cast floating-point values to it. Default: each keeps its own.
        max_file_bytes: limit of the tensors in one file, unless it has only one: ``max_shard_size`` of Hugging Face.

    Raises:
        ImportError: ``directory`` is a URL, and fsspec or the library of the store is not installed.
        ValueError: nothing in ``module`` is sharded; a value is no plain tensor of a dtype that the format knows; ``dtype``
            is no floating-point dtype; fsspec does not know the scheme of ``directory``, or ``name`` is no plain file name.
        RankError: on all ranks: one of them could not write, did not call it, sees another file system, or found safetensors
            files.
        RuntimeError: called inside a forward or ``summon_full_params``.
    """
    at = locate(directory, _CALL)
    if not name or Path(name).name != name or name.startswith(".") or name.endswith(".safetensors"):
        raise ValueError(
            f"export_safetensors: name must be a file's name without a folder and without .safetensors, got {name!r}"
        )
    flats = idle_flats(module, _CALL)
    if not flats:
        raise ValueError(f"export_safetensors: this {type(module).__name__} has no parameters to export")
    check_dtype(dtype, _CALL)
    values, is_first = _Values(module, flats), _is_first(flats)
    described = {key: (tuple(value.shape), _dtype(value, dtype)) for key, value in values.shown.items()}
    contents, index = _cut(name, described, max_file_bytes), f"{name}{INDEX_ENDING}"
    export = (
        _StoreExport(at, contents, index, values, is_first)
        if isinstance(at, StorePath)
        else _DiskExport(at, contents, index, values, is_first)
    )
    with _Ranks(flats) as job:
        check_experts(flats)
        try:  # an error of one rank is raised on all, at the end of each step
            job.share(lambda: export.begin() if is_first else None)
            for write in export.rounds():
                job.share(write)
            job.share(lambda: export.publish() if is_first else None)
        except BaseException:
            if is_first:
                export.discard()
            raise


class _Ranks:
    """The ranks that have shards or copies of a module: they wait for each other in each of their process groups."""

    def __init__(self, flats: list[Flat]) -> None:
        every = (runtime for _, flat in flats for runtime in (flat.ranks.runtime, flat.ranks.replicas))
        found = {runtime.number: runtime for runtime in every if runtime is not None}
        self._runtimes = [found[number] for number in sorted(found)]
        of_meshes = (m.get_group(dim) for _, flat in flats for m in _meshes(flat) for dim in range(m.ndim))
        self._groups = dict.fromkeys([*(r.group for r in self._runtimes if r.progress is not None), *of_meshes])
        self._jobs: list[Barrier] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Wait until all ranks have come, and begin to give signs of life: a write may take as long as it needs."""
        barrier(self._runtimes, _CALL)
        with contextlib.ExitStack() as stack:
            for group in self._groups:
                rank, _, store = membership(group)
                names, seconds = dist.get_process_group_ranks(group), patience(group, GIVE_UP_AFTER)
                self._jobs.append(stack.enter_context(Barrier(store, rank, names, _CALL, seconds)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def share(self, action: Callable[[], None]) -> None:
        """Call ``action`` on every rank, and wait for all.

        Raises:
            RankError: on all ranks, if it failed on one.
        """
        failed: RankError | None = None
        for job in self._jobs or [Barrier(None, 0, [0], _CALL, 0.0)]:
            try:
                job.share(action)
            except RankError as e:
                failed = failed or e
            problem = None if failed is None else RankError(str(failed).removeprefix(f"{_CALL}: "))
            action = functools.partial(_raise, problem)  # the ranks of the next group raise it, too
        if failed is not None:
            raise failed


def _raise(problem: RankError | None) -> None:
    if problem is not None:
        raise problem


def _is_first(flats: list[Flat]) -> bool:
    """Return whether this rank makes the files, and writes values that are not sharded."""
    _, largest = max(flats, key=lambda flat: flat[1].layout.world_size)
    return largest.ranks.rank == 0 and has_first_copy([unit for unit, _ in flats])


class _Values:
    """Parameters and buffers of a module, each once, by the first of its names."""

    def __init__(self, module: nn.Module, flats: list[Flat]) -> None:
        self.flats = flats
        self.flat_of = {id(param): flat for _, flat in flats for param in flat.params}
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for key, variable in module.state_dict(keep_vars=True).items():
            check_value(key, variable, _CALL)
            found.setdefault(id(variable), (key, variable))
        self.variables = dict(found.values())
        state = module.state_dict()
        self.shown = {key: state[key] for key in self.variables}

    def flat(self, key: str) -> FlatParam | None:
        """Return the flat parameter of a value, or None if it is not sharded."""
        return self.flat_of.get(id(self.variables[key]))

    def own(self, is_first: bool) -> dict[str, torch.Tensor]:
        """Return the values that this rank writes from its shards. Ranks with the same shards take turns."""
        own: dict[str, torch.Tensor] = {}
        for turn, (key, value) in enumerate(self.shown.items()):
            flat = self.flat(key)
            if flat is None and not isinstance(value, ShardedValue):
                is_mine = is_first
            else:
                copies = None if flat is None else flat.ranks.replicas
                is_mine = copies is None or turn % copies.world_size == copies.rank
            if is_mine:
                own[key] = value
        return own


# -- files -------------------------------------------------------------------------------------------------------------

_Described = dict[str, tuple[tuple[int, ...], torch.dtype]]


def check_value(name: str, value: Any, verb: str) -> None:
    """Raise if the format has no such values."""
    info = shard_info(value) if isinstance(value, torch.Tensor) else None
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{verb}: {name!r} is a {type(value).__name__}, and files have tensors only")
    if TensorSubclass.of(value) is not None or (info is not None and isinstance(info.wrapping, TensorSubclass)):
        raise ValueError(f"{verb}: {name!r} is a tensor subclass, of which the format knows nothing")
    if info is None and is_dtensor(value):
        raise ValueError(f"{verb}: {name!r} is a DTensor that flatshard does not shard: give its module to it")
    if value.dtype not in DTYPES:
        raise ValueError(f"{verb}: {name!r} is {value.dtype}, and the format has {name_list(DTYPES.values(), 12)}")


def _dtype(value: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and value.is_floating_point() else value.dtype


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _cut(name: str, described: _Described, limit: int) -> list[_Content]:
    """Return the files in order: names, and the tensors of each."""
    files = [dict(batch) for batch in batches(described.items(), lambda item: _nbytes(*item[1]), limit)]
    if len(files) < 2:
        return [_Content(f"{name}{ENDING}", described)]
    return [_Content(f"{name}-{i:05d}-of-{len(files):05d}{ENDING}", each) for i, each in enumerate(files, 1)]


class _Content:
    """A file's name, its header, and the places of its tensors."""

    def __init__(self, name: str, described: _Described) -> None:
        self.name = name
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        self.described = dict(sorted(described.items(), key=lambda item: -item[1][1].itemsize))  # aligned
        for key, (shape, dtype) in self.described.items():
            end = at + _nbytes(shape, dtype)
            header[key] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.starts = {key: len(self.header) + header[key]["data_offsets"][0] for key in described}
        self.nbytes = len(self.header) + at


def _check_empty(at: Location) -> None:
    if found := sorted(n for n in at.names() if not n.startswith(".") and ENDING in n):
        raise FileExistsError(f"{str(at)!r} has {name_list(found, 3)} already: give an empty directory")


def _index(contents: list[_Content]) -> bytes:
    """Return the index of several files."""
    total = sum(_nbytes(*each) for content in contents for each in content.described.values())
    weight_map = {key: content.name for content in contents for key in content.described}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    return f"{text}\n".encode()


# -- on a disk ---------------------------------------------------------------------------------------------------------


class _DiskExport:
    """Files that all ranks write at once."""

    def __init__(self, at: DiskPath, contents: list[_Content], index: str, values: _Values, is_first: bool) -> None:
        self._at, self._path, self._contents, self._index = at, Path(str(at)), contents, index
        self._files = [_File(self._path, content) for content in contents]
        self._own = values.own(is_first)

    def begin(self) -> None:
        """Make the files, with their headers, on the first rank."""
        self._path.mkdir(parents=True, exist_ok=True)
        _check_empty(self._at)
        for file in self._files:
            file.create()

    def rounds(self) -> list[Callable[[], None]]:
        """Return the steps that ranks take together."""
        return [self._write]

    def _write(self) -> None:
        """Write this rank's shards, and the full values that are its turn."""
        with contextlib.ExitStack() as stack:
            for file in self._files:
                own = {key: self._own[key] for key in file.content.described if key in self._own}
                boxes = [(key, *box) for key, value in own.items() for box in _boxes(value)]
                if boxes:
                    stack.enter_context(file)
                    for key, offsets, value in boxes:
                        file.put(key, offsets, value)
            for file in self._files:
                file.flush()

    def publish(self) -> None:
        """Give the files their names, and write the index of several, on the first rank."""
        for file in self._files:
            file.publish()
        if len(self._files) > 1:
            disk.Folder(self._path).publish(self._index, _index(self._contents))
        disk.flush_directory(self._path)

    def discard(self) -> None:
        """Remove the files that this rank has made."""
        for file in self._files:
            file.discard()


def _boxes(value: torch.Tensor) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
    """Yield the regions that this rank has: offsets in the full tensor, and values."""
    if not isinstance(value, ShardedValue):
        yield (0,) * value.dim(), value
    elif not value.part.is_copy:
        for box in value.part.boxes:
            yield box.offsets, view_of(value.to_local(), box)


class _File:
    """A file that all ranks write, with a hidden name until all files are complete. Leaving its context closes it."""

    def __init__(self, folder: Path, content: _Content) -> None:
        self.content, self._path, self._hidden = content, folder / content.name, folder / f".{content.name}"
        self._file: int | None = None
        self._made: Path | None = None  # by this rank: where the file is

    def create(self) -> None:
        """Make the file with its header, and as long as it will be."""
        self._made = self._hidden
        file = disk.create(self._hidden)
        try:
            disk.write(file, [memoryview(self.content.header)])
            os.ftruncate(file, self.content.nbytes)
        finally:
            os.close(file)

    def __enter__(self) -> Self:
        """Open the file that the first rank has made."""
        try:
            self._file = os.open(self._hidden, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{str(self._hidden)!r}, which the first rank has made, is not here: all ranks must see one file system"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def put(self, name: str, offsets: Sequence[int], value: torch.Tensor) -> None:
        """Write a region of a tensor, which begins at ``offsets``, in the dtype of the file."""
        assert self._file is not None
        if not value.numel():
            return
        shape, dtype = self.content.described[name]
        memory = memory_of(value.detach().to("cpu", dtype).contiguous())
        numel, starts = _runs(shape, offsets, value.shape)
        nbytes, place = numel * dtype.itemsize, 0
        for i, start in enumerate(starts):
            place = self.content.starts[name] + start * dtype.itemsize
            disk.write_at(self._file, memory[i * nbytes : (i + 1) * nbytes], place)
        if len(memory) == nbytes:
            disk.begin_flush(self._file, place, nbytes)

    def flush(self) -> None:
        """Flush the file to the disk, if this rank wrote to it."""
        if self._file is not None:
            disk.flush(self._file)

    def publish(self) -> None:
        """Give the file its name."""
        disk.rename(self._hidden, self._path)
        self._made = self._path

    def discard(self) -> None:
        """Remove the file, if this rank has made it: another one of that name is the user's."""
        if self._made is not None:
            self._made.unlink(missing_ok=True)


def _runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, Iterable[int]]:
    """Return the length and the starts of the runs that a region of a row-major tensor consists of, in elements."""
    dim = len(shape)  # the dimensions from here on are one run
    while dim and tuple(sizes[dim:]) == tuple(shape[dim:]):
        dim -= 1
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    outer = itertools.product(
        *(range(0, size * stride, stride) for size, stride in zip(sizes[:dim], strides, strict=False))
    )
    return math.prod(sizes[dim:]), (first + sum(each) for each in outer)


# -- in a store --------------------------------------------------------------------------------------------------------


class _StoreExport:
    """Files that ranks take turns to upload. [Note: Files in a store]"""

    def __init__(self, at: StorePath, contents: list[_Content], index: str, values: _Values, is_first: bool) -> None:
        self._at, self._contents, self._index, self._values, self._is_first = at, contents, index, values, is_first
        self._has_begun = False  # on the first rank

    def begin(self) -> None:
        """Check that there are no files, on the first rank."""
        _check_empty(self._at)
        self._has_begun = True

    def rounds(self) -> list[Callable[[], None]]:
        """Return the steps that ranks take together: in each a rank uploads one file, or none."""
        every = list(enumerate(self._contents))
        size = max(_place(flat)[1] for _, flat in self._values.flats)
        return [functools.partial(self._write, every[i : i + size]) for i in range(0, len(every), size)]

    def _write(self, turns: list[tuple[int, _Content]]) -> None:
        """Gather the values of these files, and upload this rank's."""
        own = [content for turn, content in turns if self._is_mine(turn, content)]
        found = self._gather([content for _, content in turns], {key for content in own for key in content.described})
        for content in own:
            tensors = [memory_of(found.pop(key)) for key in content.described]
            self._at.folder().write(content.name, functools.partial(_append, content.header, tensors))

    def _is_mine(self, turn: int, content: _Content) -> bool:
        """Return whether this rank uploads the file. If two ranks do, which have the same shards, the bytes are the same."""
        flats = [self._values.flat(key) for key in content.described]
        sharded = [flat for flat in flats if flat is not None]
        if len(sharded) < len(flats):  # it has values of the first rank
            return self._is_first
        flat = max(sharded, key=lambda each: bool(_meshes(each)))
        number, count = _place(flat)
        return turn % count == number and not any(any(mesh.get_coordinate() or ()) for mesh in _meshes(flat))

    def _gather(self, contents: list[_Content], own: set[str]) -> dict[str, torch.Tensor]:
        """Return the full values of ``own``, on CPU. All ranks call it, for the same files."""
        values, cpu = self._values, torch.device("cpu")
        dtypes = {key: dtype for content in contents for key, (_, dtype) in content.described.items()}
        wanted = {id(values.variables[key]): key for key in dtypes}
        found: dict[str, torch.Tensor] = {}
        for param, value in gathered(values.flats, wanted, _CALL):
            if (key := wanted[id(param)]) in own:
                found[key] = value.detach().to(cpu, dtypes[key], copy=True).contiguous()
            del value
        for key in own - found.keys():
            found[key] = values.shown[key].detach().to(cpu, dtypes[key]).contiguous()
        return found

    def publish(self) -> None:
        """Write the index of several files, on the first rank."""
        if len(self._contents) > 1:
            self._at.put(self._index, _index(self._contents))

    def discard(self) -> None:
        """Remove the files, as far as possible."""
        if self._has_begun:
            with contextlib.suppress(Exception):
                self._at.remove([self._index, *(content.name for content in self._contents)])


def _append(header: bytes, tensors: list[memoryview], file: NewStoreFile) -> None:
    file.write(header, *tensors)


def _place(flat: FlatParam) -> tuple[int, int]:
    """Return this rank's number among the ranks that have a flat parameter, and the number of these ranks."""
    copies = flat.ranks.replicas
    return flat.ranks.rank * (copies.world_size if copies else 1) + (copies.rank if copies else 0), flat.ranks.size


def _meshes(flat: FlatParam) -> list[Any]:
    """Return the meshes of the tensor-parallel parameters of a flat parameter."""
    infos = [shard_info(param) for param in flat.params]
    return [info.parallel.mesh for info in infos if info is not None and info.parallel is not None]
