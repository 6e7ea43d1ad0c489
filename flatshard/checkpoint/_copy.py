"""Copying a checkpoint between a disk and a store, so that a save to a fast disk can be uploaded, also by a later job."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import PurePosixPath

import torch.distributed as dist

from flatshard.checkpoint._disk import ByteCount, Report
from flatshard.checkpoint._job import check_call, check_digests, make_barrier
from flatshard.checkpoint._location import Folder, Location, NewCheckpoint, NewFile, locate
from flatshard.checkpoint._metadata import pickled_metadata, seal
from flatshard.checkpoint._reader import FileSystemReader, read_bytes
from flatshard.checkpoint._store import PART

_CALL = "copy_checkpoint"


def copy_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    overwrite: bool = False,
    timeout: timedelta | None = None,
    progress: Report | None = None,
) -> None:
    """Copy a checkpoint, such as from a disk to a store. Every rank must call it, and copies some of the files.

    The copy appears when all its files are complete. If a rank fails or dies, ``target`` is as it was, and so is ``source``:
    call it again, also in another job, with any number of ranks. A save to a disk and a copy of it take training less time
    than a save to a store, and the disk has the checkpoint if the store cannot be reached.

    Example::

        flatshard.save_checkpoint("run/step-500", {"model": model})
        flatshard.checkpoint.copy_checkpoint("run/step-500", "run/copy")  # or "s3://bucket/run/step-500"

    Args:
        source: the path or URL of a checkpoint.
        target: a path or URL, as for :func:`save_checkpoint`.
        process_group: the ranks that call it. Default: all.
        overwrite: replace a checkpoint at ``target``.
        timeout: see :func:`save_checkpoint`.
        progress: called with the bytes that this rank has copied, and its total.

    Raises:
        ImportError, ValueError: see :func:`save_checkpoint`.
        RankError: on all ranks: one of them did not arrive or failed; there is no checkpoint, or files of it are missing;
            ``target`` exists.
    """
    at, to = check_call(source, {}, process_group, _CALL), locate(target, _CALL)
    job = make_barrier(process_group, f"{_CALL}({str(at)!r}, {str(to)!r})", timeout)
    copying = _Copying(at, to, overwrite, job.place, ByteCount("copying to", str(to), progress, job.is_first))
    with contextlib.ExitStack() as stack:
        stack.enter_context(job)
        stack.callback(copying.discard)
        copying.begin(job.share(copying.check, copying.make_target))
        job.share(copying.write, copying.rename_files)
        job.share(copying.flush, copying.publish)


class _Copying:
    """The copy of one rank."""

    _new: NewCheckpoint | None = None  # on rank 0
    _written: Folder | None = None  # to write to

    def __init__(self, at: Location, to: Location, overwrite: bool, place: tuple[int, int], count: ByteCount) -> None:
        self._at, self._to, self._overwrite, self._place, self._count = at, to, overwrite, place, count
        self._reader = FileSystemReader(str(at), verify=False)
        self._sizes: dict[str, int] = {}  # of this rank's files

    def check(self) -> str:
        """Look for the files. Return the digest of the metadata, which must be the same on all ranks."""
        self._reader.folder = self._at.find()
        infos = self._reader.read_metadata().storage_data.values()
        rank, size = self._place
        files = sorted({info.relative_path for info in infos})
        found = {file: self._reader.folder.version(file) for file in files}
        if missing := [file for file, version in found.items() if version is None]:
            raise ValueError(f"files of the checkpoint are missing: {', '.join(missing)}")
        self._sizes = {file: found[file][0] for file in files[rank::size]}  # type: ignore[index]
        self._count.total = sum(self._sizes.values())
        return self._reader.digest

    def make_target(self, digests: Sequence[str]) -> list[str]:
        """Begin a save, on rank 0, and return for each rank where to write."""
        check_digests(digests)
        self._new = self._to.begin(self._overwrite)
        return [self._new.written] * len(digests)

    def begin(self, written: str) -> None:
        """Write to this folder."""
        self._written = self._to.writing(written)

    def write(self) -> dict[str, str]:
        """Copy this rank's files. Return the new name of each."""
        assert self._written is not None
        names = {}
        for file, size in self._sizes.items():
            names[file] = self._written.write(PurePosixPath(file).name, functools.partial(self._fill, file))
            self._count.add(size)
        return names

    def _fill(self, file: str, new: NewFile) -> str:
        with self._reader.folder.open(file) as opened:
            for at in range(0, self._sizes[file], PART):
                new.write(memoryview(read_bytes(opened, at, min(PART, self._sizes[file] - at))))
        return new.name

    def rename_files(self, rows: list[dict[str, str]]) -> None:
        """Give the metadata the new names of the files, on rank 0."""
        names = {file: name for row in rows for file, name in row.items()}
        for info in self._reader.metadata.storage_data.values():
            info.relative_path = names[info.relative_path]

    def flush(self) -> None:
        """Flush the files, and check that the source is the same still."""
        assert self._written is not None
        self._written.flush()
        self._reader.check_same()

    def publish(self, _: list[None]) -> None:
        """Put the copy in its place, on rank 0."""
        assert self._new is not None
        data = pickled_metadata(self._reader.metadata)
        self._new.publish(data, seal(data))

    def discard(self) -> None:
        """Remove the written files, unless they are published."""
        if self._written is not None:
            self._written.close()
        if self._new is not None:
            self._new.discard()
