"""Reading the files of a checkpoint at the speed of the disk: ours, and those of torch's writer.

Checkpoints of FSDP2, FSDP1 and plain models are read as well. Nothing in them is executed: [Note: No pickle is executed].

[Note: Read twice]
A load that fails changes nothing, so all bytes are verified before the first is replaced. Reading them once would need a log
of the replaced values, or a second copy of the shards.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import math
import operator
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.filesystem import FileSystemReader as TorchReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from flatshard._base.errors import name_list
from flatshard.checkpoint import _disk as disk
from flatshard.checkpoint._container import BLOCK, checksums, checksums_of, memory_of, plain_value
from flatshard.checkpoint._entries import ValuePath
from flatshard.checkpoint._location import Folder, OpenFile, locate
from flatshard.checkpoint._metadata import Body, body_of, read_metadata
from flatshard.checkpoint._sharded_value import ShardedValue, view_of

Target = Callable[[], torch.Tensor]
"""Returns a view of the tensor to fill, when it is filled."""
Region = tuple[Sequence[int], Sequence[int]]
"""Offsets and lengths in a tensor."""
EntryKey = tuple[str, Sequence[int] | None]
"""The name of a value, and the offsets of the entry in it, or None for a value that is no tensor."""

_SHARE = 16 * BLOCK  # bytes for one thread at a time, and the most that a span may have
_GAP = 4096  # bytes between two spans that are mapped together


class FileSpan(NamedTuple):
    """Bytes of a file, to read or to verify."""

    start: int
    nbytes: int
    place: memoryview | None  # to read them to, or None to verify them
    sums: bytes = b""  # expected, of each block
    entry: MetadataIndex | None = None


class EntryPiece(NamedTuple):
    """A region of an entry to read, and the tensor to read it to."""

    entry: MetadataIndex
    info: Any  # torch's: the entry's file and place
    body: Body | None  # the entry's, if flatshard wrote it
    start: int  # of the bytes to read, in the file
    nbytes: int
    dtype: torch.dtype | None  # of a tensor's own bytes, or None if torch.save wrote them
    region: Region | None  # of the entry, or None for all of it
    target: Target | None  # None for a value that is no tensor
    done: Callable[[Any], object]  # called with the tensor when it is filled, or with a stream

    def fits_memory(self, target: torch.Tensor) -> bool:
        """Return whether the bytes can be read directly to the memory of ``target``."""
        assert self.body is not None
        assert self.body.stride is not None
        if target.dtype is not self.dtype or target.nbytes != self.nbytes or target.device.type != "cpu":
            return False
        here, there = target.stride(), self.body.stride
        return here == there or all(n == 1 or s == t for n, s, t in zip(target.shape, here, there, strict=True))


class FileSystemReader(TorchReader):
    """``torch.distributed.checkpoint.load(state, storage_reader=FileSystemReader(path))``: executes nothing, reads in place.

    Everything that the load needs is checked before anything is read in place: files that are missing, cut off or outside of
    the directory, and the sums of what ``flatshard.checkpoint.FileSystemWriter`` or ``save_checkpoint`` wrote.

    Example::

        import torch.distributed.checkpoint as dcp

        dcp.save(model.state_dict(), storage_writer=flatshard.checkpoint.FileSystemWriter("run/dcp"))
        state = model.state_dict()
        dcp.load(state, storage_reader=flatshard.checkpoint.FileSystemReader("run/dcp"))
        model.load_state_dict(state)
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        """
        Args:
            path: the checkpoint's directory, or its URL in a store: see :func:`flatshard.load_checkpoint`.
            verify: compare the bytes with their sums, which reads the files once more.
        """
        self.folder: Folder
        super().__init__(path)
        self.folder = locate(path, "FileSystemReader").folder()  # torch makes a `Path` of URLs
        self._infos: dict[
            EntryKey, tuple[MetadataIndex, Any]
        ] = {}  # where entries are: torch's records by plain tuples
        self.progress: disk.ByteCount | None = None
        self.digest = ""  # of the metadata: the same on all ranks that load one checkpoint
        self.metadata: Metadata
        self._verify = verify
        self._versions: dict[str, tuple[int, ...] | None] = {}  # of the files that have been checked

    @property
    def path(self) -> Path:
        """The checkpoint's directory."""
        return self._path

    @path.setter
    def path(self, path: Path) -> None:
        self._path = path
        self.folder = locate(path, "FileSystemReader").folder()

    # -- torch's -------------------------------------------------------------------------------------------------------

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See torch.

        Raises:
            ValueError: the metadata is damaged, or is not that of a checkpoint.
        """
        with self.folder.open(disk.METADATA) as file:
            self._versions = {disk.METADATA: (version := self.folder.version(disk.METADATA))}
            if version is None:
                raise FileNotFoundError(f"{str(self.path)!r} is no checkpoint: it has no {disk.METADATA}")
            data = bytes(read_bytes(file, 0, version[0]))
        return self._adopt(read_metadata(data), hashlib.blake2b(data, digest_size=16).hexdigest())

    def _adopt(self, metadata: Metadata, digest: str) -> Metadata:
        """Take over the metadata that was read."""
        self.metadata, self.digest = metadata, digest
        # Torch's keys are hashed and compared by Python code, so a lookup would take as long as ten of these.
        self._infos = {(index.fqn, index.offset): (index, info) for index, info in metadata.storage_data.items()}
        return metadata

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """See torch.

        Raises:
            ValueError: files are missing, cut off or damaged. Nothing has been read.
        """
        pieces = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                pieces.append(self.piece(_key(item.storage_index), None, functools.partial(planner.load_bytes, item)))
            else:
                target, done = (functools.partial(f, item) for f in (planner.resolve_tensor, planner.commit_tensor))
                region = item.storage_offsets, item.lengths
                pieces.append(self.piece(_key(item.storage_index), target, done, region))
        self.check(pieces)
        self.read(pieces)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # -- in two steps --------------------------------------------------------------------------------------------------

    def piece(
        self,
        key: EntryKey,
        target: Target | None,
        done: Callable[[Any], object],
        region: Region | None = None,
    ) -> EntryPiece:
        """Internal: return what to read of an entry: see :class:`EntryPiece`.

        Raises:
            ValueError: the metadata does not say where the entry is, or has too few bytes for its shape.
        """
        if key not in self._infos:
            raise ValueError(f"the checkpoint does not say where {_describe(MetadataIndex(*key))} is")
        index, info = self._infos[key]
        body = body_of(info)
        if body is None or body.stride is None:
            return EntryPiece(index, info, body, info.offset, info.length, None, region, target, done)
        dtype = self.metadata.state_dict_metadata[index.fqn].properties.dtype  # type: ignore[union-attr]
        start, nbytes = body.start, body.nbytes
        if region is not None:
            first, last = 0, 0  # elements between which the region is
            for offset, length, stride in zip(*region, body.stride, strict=True):
                first += offset * stride
                last += (offset + length - 1) * stride
            nbytes = 0 if 0 in region[1] else (last + 1 - first) * dtype.itemsize
            start += first * dtype.itemsize if nbytes else 0
            if start + nbytes > body.start + body.nbytes:
                raise ValueError(f"the checkpoint has {body.nbytes} bytes of {_describe(index)}, too few for its shape")
        return EntryPiece(index, info, body, start, nbytes, dtype, region, target, done)

    def check(self, pieces: Sequence[EntryPiece]) -> None:
        """Internal: check that all pieces are there, as they were saved.

        Raises:
            ValueError: files are missing, cut off, damaged, or outside of the directory. The message names them.
        """
        by_file = self._check_files(pieces)
        summed = {file: _summed(found) if self._verify else [] for file, found in by_file.items()}
        if self.progress is not None:
            verified = sum([each.nbytes for of_file in summed.values() for each in of_file])
            self.progress.total = verified + sum([piece.nbytes for piece in pieces if piece.target is not None])
        wrong = [text for file, found in by_file.items() for text in self._damaged(file, found, summed[file])]
        self.check_same()
        if wrong:
            raise ValueError(f"files of the checkpoint are damaged: {', '.join(wrong[:10])}")

    def _check_files(self, pieces: Sequence[EntryPiece]) -> dict[str, list[EntryPiece]]:
        """Return ``pieces`` by file, once each file is known to have enough bytes."""
        wrong = []
        by_file = _by_file(pieces)
        for name, found in by_file.items():
            end = max([piece.info.offset + piece.info.length for piece in found])
            version = self._versions[name] = self.folder.version(name)
            if version is None or version[0] < end:
                has = "missing" if version is None else f"{version[0]} of at least {end} bytes"
                wrong.append(f"{name!r} ({has})")
        self.check_same()
        if wrong:
            raise ValueError(f"files of the checkpoint are incomplete: {', '.join(sorted(wrong))}")
        return by_file

    def check_same(self) -> None:
        """Internal: raise if another save has replaced the files since they were checked."""
        if any(self.folder.version(name) != version for name, version in self._versions.items()):
            raise ValueError("another save has replaced the checkpoint while it was read: load it again")

    def read(self, pieces: Sequence[EntryPiece]) -> None:
        """Internal: fill the targets of pieces that have been checked.

        Raises:
            ValueError: another save has replaced the files.
        """
        self.check_same()
        for name, found in _by_file(pieces).items():
            with self.folder.open(name) as file:
                self._read_file(file, found)

    # -- one file ------------------------------------------------------------------------------------------------------

    def _damaged(self, name: str, pieces: list[EntryPiece], summed: list[FileSpan]) -> Iterator[str]:
        """Describe the entries of a file that are not as they were saved."""
        with self.folder.open(name) as file:
            for piece in pieces if self._verify else ():
                if piece.body is None and piece.target is not None:  # without sums: it can only be tried
                    try:
                        _load(file, piece)
                    except Exception as e:
                        yield f"{_describe(piece.entry)} in {name!r} ({type(e).__name__}: {e})"
            wrong = read_spans(file, summed, self._count)
        for entry in dict.fromkeys(span.entry for span in wrong if span.entry is not None):
            yield f"{_describe(entry)} in {name!r} (its bytes do not have their sum)"

    def _read_file(self, file: OpenFile, pieces: list[EntryPiece]) -> None:
        in_place: list[tuple[EntryPiece, torch.Tensor]] = []
        for piece in pieces:
            if piece.target is None:
                piece.done(io.BytesIO(read_bytes(file, piece.start, piece.nbytes)))
                continue
            target = piece.target()
            target = target.detach() if target.requires_grad else target
            if piece.dtype is None:
                target.copy_(_load(file, piece))
                self._count(piece.nbytes)
            elif piece.fits_memory(target):
                in_place.append((piece, target))
                continue
            else:
                assert piece.body is not None
                assert piece.body.stride is not None
                apart = torch.empty(piece.nbytes // piece.dtype.itemsize, dtype=piece.dtype, device="cpu")
                self._fill(file, [(piece, apart)])
                target.copy_(apart.as_strided(target.shape, piece.body.stride))
                del apart  # before the next one is made
            piece.done(target)
        self._fill(file, in_place)
        increment_version([target for _, target in in_place])
        for piece, target in in_place:
            piece.done(target)

    def _fill(self, file: OpenFile, places: list[tuple[EntryPiece, torch.Tensor]]) -> None:
        """Read the memory of each tensor from ``file``."""
        memories = [(memory_of(tensor), piece.start) for piece, tensor in places]
        spans = [
            FileSpan(start + i, min(_SHARE, memory.nbytes - i), memory[i : i + _SHARE])
            for memory, start in memories
            for i in range(0, memory.nbytes, _SHARE)
        ]
        read_spans(file, spans, self._count)

    def _count(self, nbytes: int) -> None:
        if self.progress is not None:
            self.progress.add(nbytes)


def _by_file(pieces: Iterable[EntryPiece]) -> dict[str, list[EntryPiece]]:
    found: dict[str, list[EntryPiece]] = {}
    for piece in pieces:
        found.setdefault(piece.info.relative_path, []).append(piece)
    return found


def _key(index: MetadataIndex) -> EntryKey:
    return index.fqn, index.offset


def _describe(index: MetadataIndex) -> str:
    return f"{index.fqn!r}" if index.offset is None else f"{index.fqn!r} at {tuple(index.offset)}"


def _summed(pieces: list[EntryPiece]) -> list[FileSpan]:
    """Return the blocks of one file from which something is read, and their sums."""
    # By the start of an entry: its first block that is read, the one after the last, and a piece of it.
    touched: dict[int, tuple[int, int, EntryPiece]] = {}
    for piece in pieces:
        if piece.body is not None:
            inside = piece.start - piece.body.start
            first, stop = inside // BLOCK, -(-(inside + piece.nbytes) // BLOCK)
            if (start := piece.body.start) not in touched:
                touched[start] = first, stop, piece
            else:
                before = touched[start]
                touched[start] = min(first, before[0]), max(stop, before[1]), piece
    spans, step = [], _SHARE // BLOCK
    for start, (first, stop, piece) in touched.items():
        assert piece.body is not None
        body = piece.body
        if body.nbytes <= BLOCK:
            if stop:
                spans.append(FileSpan(start, body.nbytes, None, body.sums, piece.entry))
            continue
        for i in range(first, stop, step):
            end = min(i + step, stop)
            nbytes = min(end * BLOCK, body.nbytes) - i * BLOCK
            spans.append(FileSpan(start + i * BLOCK, nbytes, None, body.sums[8 * i : 8 * end], piece.entry))
    return spans


def read_spans(file: OpenFile, spans: Iterable[FileSpan], count: Callable[[int], object]) -> list[FileSpan]:
    """Read the spans with a place, and return the other spans that do not have their sums.

    ``count`` is called with the number of bytes of each finished share.
    """
    shares: list[list[FileSpan]] = []
    room = 0
    for span in sorted(spans, key=operator.itemgetter(0)):
        if room <= 0:
            shares.append([])
            room = _SHARE
        shares[-1].append(span)
        room -= span.nbytes
    wrong: list[FileSpan] = []
    read = functools.partial(_read_share, file)
    threads = min(file.threads, len(shares))
    with contextlib.ExitStack() as stack:
        done = stack.enter_context(ThreadPoolExecutor(threads)).map(read, shares) if threads > 1 else map(read, shares)
        for share, found in zip(shares, done, strict=True):
            count(sum([span.nbytes for span in share]))
            wrong += found
    return wrong


def _read_share(file: OpenFile, share: list[FileSpan]) -> list[FileSpan]:
    wrong: list[FileSpan] = []
    for span in share:
        if span.place is not None:
            file.read(span.place, span.start)
    for run in _runs([span for span in share if span.place is None]):
        start = run[0].start
        if (seen := file.mapped(start, run[-1].start + run[-1].nbytes - start)) is not None:
            found = checksums_of([seen[s.start - start : s.start - start + s.nbytes] for s in run])
            wrong += [s for s, sums in zip(run, found, strict=True) if sums != s.sums]
        else:
            wrong += _read_wrong(file, run)
    return wrong


def _runs(spans: Iterable[FileSpan]) -> Iterator[list[FileSpan]]:
    """Split sorted spans where more bytes lie between two than there are around a tensor."""
    run: list[FileSpan] = []
    for span in spans:
        if run and span.start > run[-1].start + run[-1].nbytes + _GAP:
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _read_wrong(file: OpenFile, spans: Iterable[FileSpan]) -> list[FileSpan]:
    """Read ``spans``, a block at a time, and return those that do not have their sums."""
    wrong = []
    memory = memoryview(bytearray(BLOCK))  # as large as a core's cache: what is read is summed there
    for span in spans:
        sums = b""
        for at in range(0, span.nbytes, BLOCK):
            block = memory[: span.nbytes - at]
            file.read(block, span.start + at)
            sums += checksums(block)
        if sums != span.sums:
            wrong.append(span)
    return wrong


def _load(file: OpenFile, piece: EntryPiece) -> torch.Tensor:
    """Return the piece of a tensor that ``torch.save`` wrote."""
    stream = io.BytesIO(read_bytes(file, piece.start, piece.nbytes))
    tensor: torch.Tensor = torch.load(stream, map_location="cpu", weights_only=True)
    return tensor if piece.region is None else _region(tensor, *piece.region)


def _region(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    if tensor.shape != lengths:
        for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
    return tensor


def read_bytes(file: OpenFile, start: int, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    file.read(memoryview(data), start)
    return data


# -- planning a load ---------------------------------------------------------------------------------------------------


def plan(
    reader: FileSystemReader,
    values: Mapping[str, Any],
    state: dict[str, Any],
    paths: Mapping[str, ValuePath],
    strict: bool,
    expected: Iterable[str],
) -> list[EntryPiece]:
    """Return the pieces to read, to fill ``values``.

    Args:
        reader: has read the metadata.
        values: by their names in the checkpoint.
        state: nested dicts and lists, in which values that are no tensors are replaced as they are read.
        paths: to these values, by their names.
        strict: require that ``values`` has all ``expected`` names, and no others.
        expected: the names in the checkpoint to load.

    Raises:
        ValueError: with all names that, if ``strict``, are missing or unexpected; that have another shape, kind or dtype in
            the checkpoint; that overlap or are incomplete there.
    """
    saved = reader.metadata.state_dict_metadata
    pieces: list[EntryPiece] = []
    wrong: list[str] = []
    for name, value in values.items():
        kind = saved.get(name)
        if isinstance(value, torch.Tensor) and isinstance(kind, TensorStorageMetadata):
            try:
                sources = _sources(name, value, kind)
            except ValueError as e:
                wrong.append(f"{name!r} {e}")
            else:
                pieces += [reader.piece(key, target, _nothing, region) for key, target, region in sources]
        elif isinstance(value, torch.Tensor) and kind is not None:
            wrong.append(f"{name!r} is a tensor here, and none in the checkpoint")
        elif isinstance(kind, TensorStorageMetadata):
            wrong.append(f"{name!r} is a tensor in the checkpoint, and a {type(value).__name__} here")
        elif kind is not None:
            pieces.append(reader.piece((name, None), None, functools.partial(_put, state, paths[name], name)))
    if strict and (missing := [n for n in values if n not in saved]):
        keys = dict.fromkeys(n.partition(".")[0] for n in saved)
        # A whole module or optimizer that was not saved is named once, with what was.
        if unknown := dict.fromkeys(key for n in missing if (key := n.partition(".")[0]) not in keys):
            missing = [n for n in missing if n.partition(".")[0] in keys]
            wrong.insert(0, f"not in the checkpoint: {name_list(unknown)}; it was saved with {name_list(keys)}")
        if missing:
            wrong.insert(0, f"not in the checkpoint: {name_list(missing, 50)}")
    if strict and (unexpected := [n for n in expected if n not in values]):
        wrong.append(f"in the checkpoint only: {name_list(unexpected, 50)}")
    if wrong:
        raise ValueError("; ".join(wrong))
    return pieces


def _put(state: Any, path: ValuePath, name: str, stream: io.BytesIO) -> None:
    """Put a value that is no tensor at ``path`` in ``state``. Unlike torch's, this executes nothing."""
    try:
        found = plain_value(stream.getvalue())
    except Exception:
        try:
            found = torch.load(stream, weights_only=True)
        except pickle.UnpicklingError as e:
            raise ValueError(f"{name!r} in the checkpoint is of a class that is not read: {e}") from None
    *before, last = path
    for key in before:
        state = state[key]
    state[last] = found


def _nothing(_: object) -> None:
    pass


def _sources(name: str, tensor: torch.Tensor, saved: TensorStorageMetadata) -> list[tuple[EntryKey, Target, Region]]:
    """Return the entries that this rank reads for ``tensor``, with their targets, and the region of each entry.

    Raises:
        ValueError: the tensor cannot be loaded. The message follows its name.
    """
    if tensor.is_meta:
        raise ValueError("is on the meta device here: give it memory first, module.to_empty(device=...)")
    if saved.size != tensor.shape:
        raise ValueError(f"has shape {tuple(saved.size)} in the checkpoint, {tuple(tensor.shape)} here")
    dtype, sizes = saved.properties.dtype, {chunk.offsets: chunk.sizes for chunk in saved.chunks}
    if dtype is not tensor.dtype and not torch.can_cast(dtype, tensor.dtype):
        raise ValueError(f"has {dtype} in the checkpoint, {tensor.dtype} here")
    if (has := sum(map(math.prod, sizes.values()))) != (numel := math.prod(saved.size)):
        raise ValueError(f"has {has} of {numel} elements in the checkpoint")
    found: list[tuple[EntryKey, Target, Region]] = []
    for offsets, lengths, target in _boxes_of(name, tensor):
        if sizes.get(offsets) == lengths:  # type: ignore[call-overload]  # it was saved with the same boxes
            found.append(((name, offsets), target, ((0,) * len(lengths), lengths)))
            continue
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
        items = create_read_items_for_chunk_list(name, saved, [chunk])
        if (got := sum(math.prod(item.lengths) for item in items)) != math.prod(lengths):
            raise ValueError(f"at {tuple(offsets)}: the checkpoint has {got} of {math.prod(lengths)} elements")
        for i in items:
            part = functools.partial(_region_of, target, i.dest_offsets, i.lengths)
            found.append((_key(i.storage_index), part, (i.storage_offsets, i.lengths)))
    return found


def _boxes_of(name: str, tensor: torch.Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...], Target]]:
    """Return the boxes that this rank has of ``tensor``: offsets, sizes, and the memory."""
    if isinstance(tensor, ShardedValue):
        return [(b.offsets, b.sizes, functools.partial(view_of, tensor.to_local(), b)) for b in tensor.part.boxes]
    if hasattr(tensor, "__create_chunk_list__"):  # a DTensor
        shard: Callable[[MetadataIndex], torch.Tensor] = tensor.__get_tensor_shard__  # type: ignore[attr-defined]
        return [
            (c.offsets, c.sizes, functools.partial(shard, MetadataIndex(name, c.offsets)))
            for c in tensor.__create_chunk_list__()
        ]
    return [((0,) * tensor.dim(), tensor.shape, lambda: tensor)]


def _region_of(target: Target, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    return _region(target(), offsets, lengths)
