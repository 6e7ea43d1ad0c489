"""Exporting a folder of safetensors files, as Hugging Face loads it: each rank writes the bytes of its own shards.

A file is the length of a JSON header (8 bytes, little endian), the header (dtype, shape and place of each tensor), and the
row-major bytes of the tensors. So all places are known beforehand. The first rank makes the files, and all ranks write into
them at once. Nothing is gathered. The ``safetensors`` package is not needed; it would hold a file in memory.
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
from flatshard._handle.tensors.sharded_parameter import shard_info
from flatshard.checkpoint import _disk as disk
from flatshard.checkpoint._barrier import GIVE_UP_AFTER, Barrier, RankError, barrier, patience
from flatshard.checkpoint._container import memory_of
from flatshard.checkpoint._sharded_value import ShardedValue, view_of
from flatshard.checkpoint._state_dict import Flat, batches, check_dtype, check_experts, has_first_copy, idle_flats

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

    All ranks must call it, on one file system. Each rank writes the bytes of its own shards, and nothing is gathered: it
    needs memory for no more than its shard of one tensor. Names are those of ``module.state_dict()``. A tied parameter is
    written once, under the first of its names, as Hugging Face ties it again. Buffers are those of rank 0. Files have hidden
    names until all ranks have written. Several files have an index, ``{name}.safetensors.index.json``, which is written last.
    If a rank fails, nothing is left.

    Example::

        flatshard.checkpoint.export_safetensors(model, "exported", dtype=torch.bfloat16)

    Args:
        module: a sharded module, or one that holds sharded ones.
        directory: created if it does not exist. It must have no safetensors files.
        name: of the files, before ``.safetensors`` or ``-00001-of-00002.safetensors``. transformers reads ``"model"``,
            diffusers ``"diffusion_pytorch_model"``; each beside a ``config.json``, which
            ``model.config.save_pretrained(folder)`` and ``model.save_config(folder)`` write.
        dtype: cast floating-point values to it. Default: each keeps its own.
        max_file_bytes: limit of the tensors in one file, unless it has only one: ``max_shard_size`` of Hugging Face.

    Raises:
        ValueError: nothing in ``module`` is sharded; a value is no plain tensor of a dtype that the format knows; ``dtype``
            is no floating-point dtype; ``directory`` begins with a scheme (``s3://``), or ``name`` is no plain file name.
        RankError: on all ranks: one of them could not write, did not call it, sees another file system, or found safetensors
            files.
        RuntimeError: called inside a forward or ``summon_full_params``.
    """
    folder = disk.local(directory, _CALL)
    if not name or Path(name).name != name or name.startswith(".") or name.endswith(".safetensors"):
        raise ValueError(
            f"export_safetensors: name must be a file's name without a folder and without .safetensors, got {name!r}"
        )
    flats = idle_flats(module, _CALL)
    if not flats:
        raise ValueError(f"export_safetensors: this {type(module).__name__} has no parameters to export")
    check_dtype(dtype, _CALL)
    variables, shown, is_first = _variables(module), module.state_dict(), _is_first(flats)
    values = {key: shown[key] for key in variables}
    described = {key: (tuple(value.shape), _dtype(value, dtype)) for key, value in values.items()}
    files = [_File(folder / file, names) for file, names in _cut(name, described, max_file_bytes)]
    own = _own_values(flats, variables, values, is_first)
    with _Ranks(flats) as job:
        check_experts(flats)
        try:
            job.share(lambda: _create(folder, files) if is_first else None)
            job.share(lambda: _write(files, own))
            job.share(lambda: _publish(folder / f"{name}{INDEX_ENDING}", files) if is_first else None)
        except BaseException:
            for file in files if is_first else ():
                file.discard()
            raise


class _Ranks:
    """The ranks that have shards or copies of a module: they wait for each other in each of their process groups."""

    def __init__(self, flats: list[Flat]) -> None:
        every = (runtime for _, flat in flats for runtime in (flat.ranks.runtime, flat.ranks.replicas))
        found = {runtime.number: runtime for runtime in every if runtime is not None}
        self._runtimes = [found[number] for number in sorted(found)]
        infos = (shard_info(param) for _, flat in flats for param in flat.params)
        meshes = (info.parallel.mesh for info in infos if info is not None and info.parallel is not None)
        of_meshes = (mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim))
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


def _variables(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers, each once, by the first of its names."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for key, variable in module.state_dict(keep_vars=True).items():
        check_value(key, variable, _CALL)
        found.setdefault(id(variable), (key, variable))
    return dict(found.values())


def _own_values(
    flats: list[Flat], variables: dict[str, torch.Tensor], values: dict[str, torch.Tensor], is_first: bool
) -> dict[str, torch.Tensor]:
    """Return the values that this rank writes. Ranks with the same shards take turns."""
    replicas = {id(param): flat.ranks.replicas for _, flat in flats for param in flat.params}
    own: dict[str, torch.Tensor] = {}
    for turn, (key, value) in enumerate(values.items()):
        copies = replicas.get(id(variables[key]))
        if id(variables[key]) not in replicas and not isinstance(value, ShardedValue):
            is_mine = is_first
        else:
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


def _cut(name: str, described: _Described, limit: int) -> list[tuple[str, _Described]]:
    """Return the files in order: names, and the tensors of each."""
    files = [dict(batch) for batch in batches(described.items(), lambda item: _nbytes(*item[1]), limit)]
    if len(files) < 2:
        return [(f"{name}{ENDING}", described)]
    return [(f"{name}-{i:05d}-of-{len(files):05d}{ENDING}", each) for i, each in enumerate(files, 1)]


def _create(folder: Path, files: list[_File]) -> None:
    """Make the files, with their headers."""
    folder.mkdir(parents=True, exist_ok=True)
    if found := sorted(p.name for p in folder.glob("[!.]*.safetensors*")):
        raise FileExistsError(f"{str(folder)!r} has {name_list(found, 3)} already: give an empty directory")
    for file in files:
        file.create()


def _write(files: list[_File], own: dict[str, torch.Tensor]) -> None:
    """Write this rank's shards, and the full values that are its turn."""
    with contextlib.ExitStack() as stack:
        for file in files:
            boxes = [(key, *box) for key in file.described if key in own for box in _boxes(own[key])]
            if boxes:
                stack.enter_context(file)
                for key, offsets, value in boxes:
                    file.put(key, offsets, value)
        for file in files:
            file.flush()


def _boxes(value: torch.Tensor) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
    """Yield the regions that this rank has: offsets in the full tensor, and values."""
    if not isinstance(value, ShardedValue):
        yield (0,) * value.dim(), value
    elif not value.part.is_copy:
        for box in value.part.boxes:
            yield box.offsets, view_of(value.to_local(), box)


def _publish(index: Path, files: list[_File]) -> None:
    """Give the files their names, and write the index of several."""
    for file in files:
        file.publish()
    if len(files) > 1:
        total = sum(_nbytes(*each) for file in files for each in file.described.values())
        weight_map = {key: file.path.name for file in files for key in file.described}
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        disk.Folder(index.parent).publish(index.name, (json.dumps(content, indent=2) + "\n").encode())
    disk.flush_directory(index.parent)


class _File:
    """A file that all ranks write, with a hidden name until all files are complete. Leaving its context closes it."""

    def __init__(self, path: Path, described: _Described) -> None:
        self.path, self.described, self._hidden = path, described, path.with_name(f".{path.name}")
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, (shape, dtype) in sorted(described.items(), key=lambda item: -item[1][1].itemsize):  # aligned
            end = at + _nbytes(shape, dtype)
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self._starts = {name: len(self._header) + header[name]["data_offsets"][0] for name in described}
        self._nbytes = len(self._header) + at
        self._file: int | None = None
        self._made: Path | None = None  # by this rank: where the file is

    def create(self) -> None:
        """Make the file with its header, and as long as it will be."""
        self._made = self._hidden
        file = disk.create(self._hidden)
        try:
            disk.write(file, [memoryview(self._header)])
            os.ftruncate(file, self._nbytes)
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
        shape, dtype = self.described[name]
        memory = memory_of(value.detach().to("cpu", dtype).contiguous())
        numel, starts = _runs(shape, offsets, value.shape)
        nbytes, place = numel * dtype.itemsize, 0
        for i, start in enumerate(starts):
            place = self._starts[name] + start * dtype.itemsize
            disk.write_at(self._file, memory[i * nbytes : (i + 1) * nbytes], place)
        if len(memory) == nbytes:
            disk.begin_flush(self._file, place, nbytes)

    def flush(self) -> None:
        """Flush the file to the disk, if this rank wrote to it."""
        if self._file is not None:
            disk.flush(self._file)

    def publish(self) -> None:
        """Give the file its name."""
        disk.rename(self._hidden, self.path)
        self._made = self.path

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
