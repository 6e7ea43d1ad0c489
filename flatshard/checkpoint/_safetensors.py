"""Exporting a folder of safetensors files, as Hugging Face loads it, while parameters are gathered one after the other.

A file is the length of a JSON header (8 bytes, little endian), the header (dtype, shape and place of each tensor), and the
row-major bytes of the tensors. So all places are known beforehand: each rank writes some of the files, each tensor as soon as
it is gathered, and holds no more than a unit. The ``safetensors`` package is not needed; it would hold a file in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from flatshard._base.errors import name_list
from flatshard._handle.adapters.tensor_parallel import is_dtensor
from flatshard._handle.adapters.tensor_subclass import TensorSubclass
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, full_shape, shard_info
from flatshard.checkpoint import _disk as disk
from flatshard.checkpoint._barrier import RankError, barrier
from flatshard.checkpoint._container import memory_of
from flatshard.checkpoint._state_dict import Flat, batches, check_dtype, gathered, has_first_copy, idle_flats

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


def export_safetensors(
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    name: str = "model",
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
    bucket_bytes: int = 256 * 2**20,
) -> None:
    """Write ``module``'s state to ``directory`` as Hugging Face's ``save_pretrained`` does, for ``from_pretrained``.

    All ranks must call it, on one file system. Parameters are gathered one unit at a time, and each file is written by one
    rank, so no rank holds the model. Names are those of ``module.state_dict()``. A tied parameter is written once, under the
    first of its names, as Hugging Face ties it again. Buffers are those of the rank that writes the file. Several files have
    an index, ``{name}.safetensors.index.json``, which is written last: a folder without it is not complete.

    Example::

        flatshard.checkpoint.export_safetensors(model, "exported", dtype=torch.bfloat16)

    Args:
        module: a sharded module, or one that holds sharded ones.
        directory: created if it does not exist. It must have no safetensors files.
        name: of the files, before ``.safetensors`` or ``-00001-of-00002.safetensors``. transformers reads ``"model"``,
            diffusers ``"diffusion_pytorch_model"``; each beside a ``config.json``, which
            ``model.config.save_pretrained(folder)`` and ``model.save_config(folder)`` write.
        dtype: cast floating-point values to it. Default: each keeps its own.
        max_file_bytes: limit of the tensors in one file, unless it has only one.
        bucket_bytes: how much to gather at a time, as for ``iter_full_params``.

    Raises:
        ValueError: nothing in ``module`` is sharded; a value is no plain tensor of a dtype that the format knows; ``dtype``
            is no floating-point dtype; ``directory`` begins with a scheme (``s3://``), or ``name`` is no plain file name.
        RankError: on all ranks: one of them could not write, did not call it, or found safetensors files.
        RuntimeError: called inside a forward or ``summon_full_params``.
    """
    folder = disk.local(directory, "export_safetensors")
    if not name or Path(name).name != name or name.startswith(".") or name.endswith(".safetensors"):
        raise ValueError(
            f"export_safetensors: name must be a file's name without a folder and without .safetensors, got {name!r}"
        )
    flats = idle_flats(module, "export_safetensors")
    if not flats:
        raise ValueError(f"export_safetensors: this {type(module).__name__} has no parameters to export")
    check_dtype(dtype, "export_safetensors")
    tensors: dict[int, tuple[str, torch.Tensor]] = {}  # each once, by its id
    for key, value in module.state_dict(keep_vars=True).items():
        check_value(key, value, "export_safetensors")
        tensors.setdefault(id(value), (key, value))
    described = {key: (tuple(full_shape(value)), _dtype(value, dtype)) for key, value in tensors.values()}
    files = _cut(name, described, max_file_bytes)
    _, shared = max(flats, key=lambda flat: flat[1].layout.world_size)
    mine = files[shared.ranks.rank :: shared.layout.world_size] if has_first_copy([unit for unit, _ in flats]) else []
    written = {key: file for each in mine for file in [_File(folder / each[0], each[1])] for key in each[1]}
    own = list(dict.fromkeys(written.values()))
    attempt = _Attempt()
    try:
        attempt(_open, folder, own)
        for param, full in gathered(flats, tensors, "export_safetensors", bucket_bytes):
            key, _ = tensors[id(param)]
            if key in written:
                attempt(written[key].put, key, full.to(described[key][1]))
            del full
        for key, value in tensors.values():
            if key in written and not isinstance(value, ShardedParameter):
                attempt(written[key].put, key, value.to(described[key][1]))
        for file in own:
            attempt(file.close)
        _raise_together(flats, attempt)
        for file in own:
            attempt(file.publish)
        _raise_together(flats, attempt)
    except BaseException:
        for file in own:
            file.discard()
        raise
    if len(files) > 1 and mine and mine[0] is files[0]:
        attempt(_write_index, folder / f"{name}.safetensors.index.json", files)
    _raise_together(flats, attempt)


class _Attempt:
    """Runs actions until one fails, and keeps the error: other ranks wait for this one in gathers."""

    error: Exception | None = None

    def __call__(self, action: Callable[..., None], *args: Any) -> None:
        if self.error is None:
            try:
                action(*args)
            except Exception as e:
                self.error = e


def _raise_together(flats: list[Flat], attempt: _Attempt) -> None:
    """Wait for all ranks.

    Raises:
        RankError: on all ranks, if an attempt has failed on one.
    """
    every = (runtime for _, flat in flats for runtime in (flat.ranks.runtime, flat.ranks.replicas))
    problem = None if attempt.error is None else f"{type(attempt.error).__name__}: {attempt.error}"
    try:
        barrier([runtime for runtime in every if runtime is not None], "export_safetensors", problem)
        if problem is not None:  # this rank is the only one
            raise RankError(f"export_safetensors: {problem}")
    except RankError as e:
        raise e from attempt.error
    finally:
        attempt.error = None  # else the error has a frame that has the error


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
        return [(f"{name}.safetensors", described)]
    return [(f"{name}-{i:05d}-of-{len(files):05d}.safetensors", each) for i, each in enumerate(files, 1)]


def _open(folder: Path, own: list[_File]) -> None:
    if not own:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if found := sorted(p.name for p in folder.glob("[!.]*.safetensors*")):
        raise FileExistsError(f"{str(folder)!r} has {name_list(found, 3)} already: give an empty directory")
    for file in own:
        file.open()


def _write_index(path: Path, files: list[tuple[str, _Described]]) -> None:
    total = sum(_nbytes(*each) for _, described in files for each in described.values())
    index = {"metadata": {"total_size": total}, "weight_map": {name: file for file, names in files for name in names}}
    hidden = path.with_name(f".{path.name}")
    hidden.write_text(json.dumps(index, indent=2) + "\n")
    hidden.rename(path)


class _File:
    """A file, with a hidden name until all files are complete."""

    def __init__(self, path: Path, described: _Described) -> None:
        self._path, self._hidden = path, path.with_name(f".{path.name}")
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
        self._file: BinaryIO | None = None

    def open(self) -> None:
        self._file = self._hidden.open("wb")
        self._file.write(self._header)

    def put(self, name: str, value: torch.Tensor) -> None:
        assert self._file is not None
        self._file.seek(self._starts[name])
        self._file.write(memory_of(value.detach().to("cpu").contiguous()))

    def close(self) -> None:
        """Flush the file to the disk, and close it."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def publish(self) -> None:
        self._hidden.rename(self._path)

    def discard(self) -> None:
        if self._file is not None:
            self._file.close()
            self._hidden.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)
