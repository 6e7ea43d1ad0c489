"""The directory of a checkpoint: whole or not there.

[Note: Whole or not there]
Ranks write into a hidden directory beside the path. When all have written, rank 0 writes the metadata and renames the hidden
directory to the path. Until that rename what was at the path stays; a checkpoint that is replaced is renamed first, renamed
back if the new one cannot take its place, and removed last. A process that dies between two renames leaves the old one under
a hidden name that ``find`` knows and the next save puts back. What a dead save has written is never read, and removed by the
next save. A lock on the hidden directory, which ends with the process, keeps two jobs from saving to one path at once.

Whatever changes the disk is one of the functions ``make_directory`` to ``remove``: tests have each of them fail.

[Note: The disk writes meanwhile]
What is written lies in the system's memory until a flush, and the disk does nothing until then. So the system is told of each
few MiB, as they are written, that the disk may begin with them: it works while the next are summed and copied, and the flush
finds little left. Nothing waits for it, and nothing is promised by it: what it says of errors is not looked at, as the flush
says so, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from flatshard._trace import logger

METADATA = ".metadata"
_LOCK = ".lock"
_IOV_MAX = 512  # buffers in one call: the system's limit is 1,024
_RANGE_WRITE = 2  # SYNC_FILE_RANGE_WRITE, which Python does not name


# -- steps -------------------------------------------------------------------------------------------------------------


def make_directory(path: Path) -> None:
    """Make ``path`` and what it lies in, with all of the new entries on the disk."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        flush_directory(path.parent)


def create(path: Path) -> int:
    """An open, empty file."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)


def write(file: int, buffers: Sequence[memoryview]) -> None:
    """Append all of ``buffers``."""
    _all_of(buffers, lambda rest: os.writev(file, rest))


def read(file: int, buffers: Sequence[memoryview], at: int) -> None:
    """Fill all of ``buffers`` with the bytes from ``at`` on.

    Raises:
        ValueError: the file ends before.
    """

    def some(rest: list[memoryview]) -> int:
        nonlocal at
        count = os.preadv(file, rest, at)
        if not count:
            raise ValueError("a file of the checkpoint has been cut off while it was read")
        at += count
        return count

    _all_of(buffers, some)


def _all_of(buffers: Sequence[memoryview], some: Callable[[list[memoryview]], int]) -> None:
    """Hand ``buffers`` to ``some``, which returns how many bytes it has done, until all are."""
    for i in range(0, len(buffers), _IOV_MAX):
        rest = list(buffers[i : i + _IOV_MAX])
        while rest:
            done = some(rest)
            while rest and done >= rest[0].nbytes:
                done -= rest.pop(0).nbytes
            if done:
                rest[0] = rest[0][done:]


def begin_flush(file: int, start: int, nbytes: int) -> None:
    """Have the disk begin with these bytes, where the system can be told so. [Note: The disk writes meanwhile]"""
    if (sync := _sync_file_range()) is not None:
        sync(file, start, nbytes, _RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Any:
    """Linux's; None elsewhere."""
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
    return found


def flush(file: int) -> None:
    """Have what was written on the disk."""
    os.fsync(file)


def flush_directory(path: Path) -> None:
    """Have the entries of a directory on the disk, where the file system can say so."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def rename(source: Path, target: Path) -> None:
    """Give a directory another name."""
    source.rename(target)


def remove(path: Path) -> None:
    """Remove a directory, or nothing."""
    if path.exists():
        shutil.rmtree(path)


class NewFile:
    """A file that is being written, from its beginning on. Leaving it, as a context, closes it, flushed or not.

    Raises:
        OSError: in all that it does, with its path.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._end = path, 0
        with self._named():
            self._file: int | None = create(path)

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Append, and have the disk begin with it."""
        assert self._file is not None
        with self._named():
            write(self._file, buffers)
        nbytes = sum(buffer.nbytes for buffer in buffers)
        begin_flush(self._file, self._end, nbytes)
        self._end += nbytes

    def flush(self) -> None:
        """Have all of it on the disk."""
        assert self._file is not None
        with self._named():
            flush(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise type(e)(e.errno, e.strerror, str(self.path)) from e


# -- the directory -----------------------------------------------------------------------------------------------------


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}.{ending}")


def real(path: str | os.PathLike[str]) -> Path:
    """Where ``path`` is: a link is followed, so that what it leads to is replaced, and not the link."""
    return Path(os.path.realpath(path))


def local(path: str | os.PathLike[str], verb: str) -> Path:
    """``path``, which ``verb`` was given.

    Raises:
        ValueError: it begins with a scheme, ``s3://``: a folder of that name would be made here.
    """
    if _SCHEME.match(text := os.fspath(path)):
        raise ValueError(
            f"{verb}: {text!r} is no local path. Save to a local folder, and copy that folder there when the save has "
            "ended; to load, copy it back first"
        )
    return Path(path)


_SCHEME = re.compile(r"[A-Za-z][\w+.-]+:/")  # `Path` leaves one slash


class LocalPath:
    """Has torch's readers and writers, which are made or reset with a path, refuse what is not local."""

    @property
    def path(self) -> Path:
        """The checkpoint's directory."""
        return self._path

    @path.setter
    def path(self, path: str | os.PathLike[str]) -> None:
        self._path = local(path, type(self).__name__)


def find(path: Path) -> Path:
    """Where the checkpoint of ``path`` lies.

    Raises:
        FileNotFoundError: nowhere.
    """
    if (path / METADATA).exists():
        return path
    if not path.exists() and (_beside(path, "replaced") / METADATA).exists():
        return _beside(path, "replaced")
    what = (
        "is no checkpoint: it has no .metadata, so a save that did not end wrote it" if path.exists() else "not found"
    )
    raise FileNotFoundError(f"{str(path)!r} {what}")


class NewDirectory:
    """A directory that is being written, by all ranks, and published or discarded by rank 0."""

    def __init__(self, path: Path, overwrite: bool) -> None:
        """Make it, and clear what dead saves have left.

        Args:
            path: where it is to be in the end: see :func:`real`.
            overwrite: replace a checkpoint that is there.

        Raises:
            FileExistsError: there is something at ``path``, and not ``overwrite``, or it is no checkpoint.
            BlockingIOError: another save to ``path`` is under way.
        """
        self.path, self.written, self._before = path, _beside(path, "saving"), _beside(path, "replaced")
        make_directory(self.written)
        self._lock: int | None = _locked(self.written / _LOCK, path)
        try:
            if not path.exists() and (self._before / METADATA).exists():
                rename(self._before, path)  # a save died between two renames
            _check_target(path, overwrite)
            for left in self.written.iterdir():
                if left.name != _LOCK:
                    remove(left) if left.is_dir() else left.unlink()
        except BaseException:
            self.discard()
            raise

    def publish(self) -> None:
        """Put what was written in its place."""
        flush_directory(self.written)
        replaces = self.path.exists()
        if replaces:
            remove(self._before)
            rename(self.path, self._before)
        try:
            rename(self.written, self.path)
        except BaseException:
            if replaces:
                rename(self._before, self.path)
            raise
        self._close()
        try:  # it is published: nothing from here on makes the save fail
            flush_directory(self.path.parent)
            (self.path / _LOCK).unlink()
            remove(self._before)
        except OSError as e:
            logger.warning("%r is saved. Left to be cleaned by the next save: %s", str(self.path), e)

    def discard(self) -> None:
        """Remove what was written, unless it is published, as far as that is possible: the next save removes the rest."""
        if self._lock is not None:
            try:
                with contextlib.suppress(OSError):
                    remove(self.written)
            finally:
                self._close()

    def _close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def _check_target(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise FileExistsError(f"{str(path)!r} exists: choose another path, or pass overwrite=True to replace it")
    if path.exists() and not (path / METADATA).exists():
        raise FileExistsError(f"{str(path)!r} exists and is no checkpoint: it is not replaced. Choose another path")


def _locked(file: Path, path: Path) -> int:
    """A lock that ends with this process. Where the file system has none (some of a network), none is taken.

    Raises:
        BlockingIOError: another process, or another save of this one, holds it.
    """
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = file.exists() and os.path.samestat(os.fstat(handle), file.stat())
    except OSError as e:
        held = e.errno in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)
    if not held:
        os.close(handle)
        raise BlockingIOError(f"another save to {str(path)!r} is under way: two jobs must not save to one path at once")
    return handle
