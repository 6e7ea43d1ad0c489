"""The files of a checkpoint, and its directory, which is complete or absent.

[Note: Complete or absent]
Ranks write into a hidden directory beside the path. When all have written, rank 0 writes the metadata and renames the hidden
directory to the path. The path keeps its previous content until that rename. A checkpoint that is replaced is renamed first,
renamed back if the new one cannot take its place, and removed last. A process that dies between two renames leaves the old
checkpoint under a hidden name, which ``find`` knows and the next save restores. Files of a dead save are never read, and are
removed by the next save. A lock on the hidden directory keeps two jobs from saving to one path at once; it ends with the
process.

Only the functions ``make_directory`` to ``remove`` change the disk. Tests make each of them fail.

[Note: The seam of a store]
Readers and writers know names of files, and no paths: a :class:`Folder` opens and writes them. A :class:`DiskPath` finds the
folder to read, and makes the :class:`NewDirectory` that ranks write and rank 0 publishes. ``_store.py`` has the same three
for stores.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from stat import S_ISREG
from typing import Self, TypeVar

from flatshard._base.environment import local_world_size
from flatshard._base.trace import logger
from flatshard.checkpoint._other_files import explain_path

T = TypeVar("T")

METADATA = ".metadata"
_LOCK = ".lock"
_EARLY = 4 * 2**20  # bytes that the disk begins with at a time


# -- steps -------------------------------------------------------------------------------------------------------------


def make_directory(path: Path) -> None:
    """Make ``path`` and its parents, with all new entries on the disk."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        flush_directory(path.parent)


def create(path: Path) -> int:
    """Open an empty file."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)


def write(file: int, buffers: Sequence[memoryview]) -> None:
    """Append all of ``buffers``."""
    for buffer in buffers:
        while buffer:
            buffer = buffer[os.write(file, buffer) :]


def write_at(file: int, buffer: memoryview, at: int) -> None:
    """Write all of ``buffer`` from byte ``at`` on."""
    while buffer:
        count = os.pwrite(file, buffer, at)
        buffer, at = buffer[count:], at + count


def read(file: int, buffer: memoryview, at: int) -> None:
    """Fill ``buffer`` with the bytes from ``at`` on.

    Raises:
        ValueError: the file ends before.
    """
    while buffer:
        count = os.preadv(file, [buffer], at)
        if not count:
            raise ValueError("a file of the checkpoint has been cut off while it was read")
        buffer, at = buffer[count:], at + count


def begin_flush(file: int, at: int, nbytes: int) -> bool:
    """Let the disk begin with these bytes, and return whether it does: not with few."""
    if nbytes < _EARLY or sys.platform != "linux":
        return False
    # Linux starts to write these bytes, and waits for nothing. It forgets none, as they are not on the disk yet.
    os.posix_fadvise(file, at, nbytes, os.POSIX_FADV_DONTNEED)
    return True


def flush(file: int) -> None:
    """Flush a file to the disk."""
    os.fsync(file)


def flush_directory(path: Path) -> None:
    """Flush the entries of a directory to the disk, if the file system supports it."""
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
    """Remove a directory, if it exists."""
    if path.exists():
        shutil.rmtree(path)


# -- files -------------------------------------------------------------------------------------------------------------


class NewFile:
    """A new file to append to. Leaving its context closes it.

    Raises:
        OSError: from any method, with the file's path.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self._end = self._begun = 0  # bytes that are written, and that the disk has begun with
        with self._named():
            self._file: int | None = create(path)

    def write(self, *buffers: bytes | memoryview) -> None:
        """Append ``buffers``. The disk begins with them, so that the flush finds little left."""
        assert self._file is not None
        with self._named():
            write(self._file, [memoryview(buffer) for buffer in buffers if len(buffer)])
        self._end += sum(map(len, buffers))
        if begin_flush(self._file, self._begun, self._end - self._begun):
            self._begun = self._end

    def flush(self) -> None:
        """Flush the file to the disk."""
        assert self._file is not None
        with self._named():
            flush(self._file)

    def close(self) -> None:
        """Close the file, flushed or not."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise type(e)(e.errno, e.strerror, str(self.path)) from e


class OpenFile:
    """A file to read from, by several threads. Leaving its context closes it."""

    def __init__(self, path: str | Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def threads(self) -> int:
        """The number of threads that read best: this rank's share of the cores, as memory and most disks are faster."""
        return min(8, max(1, (os.cpu_count() or 1) // (local_world_size() or 1)))

    def read(self, buffer: memoryview, at: int) -> None:
        """Fill ``buffer`` with the bytes from ``at`` on.

        Raises:
            ValueError: the file ends before.
        """
        read(self._file, buffer, at)

    def mapped(self, start: int, nbytes: int) -> memoryview | None:
        """Return bytes in the system's cache of the file, or None if they cannot be mapped.

        It takes half the time of a copy. If a file were cut off while it is mapped, the system would end the process. That
        does not happen to a checkpoint: it is never written again, and a removed file stays for those who have it open.
        """
        skip = start % mmap.ALLOCATIONGRANULARITY
        with contextlib.suppress(OSError, ValueError):  # no such advice, no mappings here; the file ends before
            # Writable, as torch wants it, though not to the file.
            found = mmap.mmap(self._file, skip + nbytes, access=mmap.ACCESS_COPY, offset=start - skip)
            found.madvise(_POPULATE_READ)  # raises if the disk fails
            return memoryview(found)[skip:]
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which Python does not name


class Folder:
    """The files of a checkpoint by name. [Note: The seam of a store]"""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._written: list[NewFile] = []  # the open files

    def write(self, name: str, fill: Callable[[NewFile], T]) -> T:
        """Create a file, and return the result of ``fill``, which writes it. The file is complete after ``flush``."""
        file = NewFile(self._path / name)
        self._written.append(file)
        return fill(file)

    def flush(self) -> None:
        """Flush the written files to the disk."""
        for file in self._written:
            file.flush()
        self.close()

    def close(self) -> None:
        """Close the written files, flushed or not."""
        while self._written:
            self._written.pop().close()

    def publish(self, name: str, *buffers: bytes) -> None:
        """Write a file that appears with all its bytes, in place of one that is there."""
        with NewFile(self._path / f"{name}.tmp") as file:
            file.write(*buffers)
            file.flush()
        rename(self._path / f"{name}.tmp", self._path / name)

    def open(self, name: str) -> OpenFile:
        """Open a file to read it."""
        return OpenFile(self._inside(name))

    def version(self, name: str) -> tuple[int, ...] | None:
        """Return the size of a file and what tells it from another in its place, or None if there is none.

        Raises:
            ValueError: it is outside of the directory.
        """
        try:
            stat = os.stat(self._inside(name))
        except OSError as e:
            if e.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            return None
        is_file = S_ISREG(stat.st_mode)
        return (stat.st_size, stat.st_dev, stat.st_ino, stat.st_mtime_ns) if is_file else None

    def _inside(self, name: str) -> str:
        root = os.path.realpath(self._path).rstrip("/")
        path = os.path.realpath(os.path.join(self._path, name))
        if not f"{path}/".startswith(f"{root}/"):
            raise outside(name)
        return path


def outside(name: str) -> ValueError:
    """Return the error for a file that is not in the checkpoint's directory."""
    return ValueError(f"the checkpoint names a file outside of its directory, which is not read: {name!r}")


# -- the directory -----------------------------------------------------------------------------------------------------


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}.{ending}")


def real(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` with links resolved, so that a save replaces the link's target and not the link."""
    return Path(os.path.realpath(path))


def local(path: str | os.PathLike[str], verb: str) -> Path:
    """Return ``path``, the argument of ``verb``, which uses no store.

    Raises:
        ValueError: it begins with a scheme (``s3://``), for which a local folder of that name would be made.
    """
    if SCHEME.match(text := check_unchained(path, verb)):
        raise ValueError(
            f"{verb}: {text!r} is no local path. Use a local folder, and copy it to the store: "
            "fsspec.filesystem('s3').put(folder, url, recursive=True). flatshard.save_checkpoint, load_checkpoint, "
            "export_safetensors and load_safetensors use stores directly"
        )
    return Path(path)


SCHEME = re.compile(r"[A-Za-z][\w+.-]+:/")  # `Path` leaves one slash
_CHAINED = re.compile(r"[A-Za-z][\w+.-]+(:/.*)?::.*:/")


def check_unchained(path: str | os.PathLike[str], verb: str) -> str:
    """Return ``path``, the argument of ``verb``, as text.

    Raises:
        ValueError: it is a chain of URLs, as fsspec has them (``simplecache::s3://``): a cache or an archive does not publish
            files at once.
    """
    if _CHAINED.match(text := os.fspath(path)):
        store = text.rpartition("::")[2]
        raise ValueError(f"{verb}: {text!r} is a chain of URLs. Name the store itself, {store!r}")
    return text


def find(path: Path) -> Path:
    """Return the directory of the checkpoint of ``path``, which may be a hidden one beside it.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    if (path / METADATA).exists():
        return path
    if not path.exists() and (_beside(path, "replaced") / METADATA).exists():
        return _beside(path, "replaced")
    around = path.iterdir() if path.is_dir() else [path.parent]
    near = [each for each in around if (each / METADATA).is_file()]
    raise FileNotFoundError(f"{str(path)!r} {explain_path(path, near)}")


class DiskPath:
    """A path of a checkpoint, or of several, on a disk that all ranks see. [Note: The seam of a store]"""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()

    def __str__(self) -> str:
        return str(self._path)

    def folder(self) -> Folder:
        """Return the files of the path itself."""
        return Folder(self._path)

    def find(self) -> Folder:
        """Return the files of the checkpoint, which may be in a hidden directory beside the path.

        Raises:
            FileNotFoundError: there is no checkpoint.
        """
        return Folder(find(real(self._path)))

    def begin(self, overwrite: bool) -> NewDirectory:
        """Return a new directory, on rank 0. See :class:`NewDirectory`."""
        return NewDirectory(real(self._path), overwrite)

    def writing(self, written: str) -> Folder:
        """Return the files of the new directory, by its ``written``."""
        return Folder(written)

    def names(self) -> list[str]:
        """Return the names in it."""
        return [path.name for path in self._path.iterdir()] if self._path.is_dir() else []

    def checkpoints(self) -> dict[str, DiskPath]:
        """Return the checkpoints in this directory by name."""
        return {name: self.child(name) for name in self.names() if (self._path / name / METADATA).exists()}

    def child(self, name: str) -> DiskPath:
        """Return the path of a checkpoint in this directory."""
        return DiskPath(self._path / name)

    def remove(self) -> None:
        """Remove the checkpoint, if it exists. It is complete or absent, and never half removed."""
        if self._path.exists():
            gone = _beside(self._path, "removed")
            remove(gone)  # of a process that died
            rename(self._path, gone)
            remove(gone)


class NewDirectory:
    """A directory that all ranks write, and rank 0 publishes or discards."""

    def __init__(self, path: Path, overwrite: bool) -> None:
        """Make a hidden directory, and remove the files of dead saves.

        Args:
            path: the final path: see :func:`real`.
            overwrite: replace a checkpoint that is there.

        Raises:
            FileExistsError: ``path`` exists, and is no checkpoint or is not to be overwritten.
            BlockingIOError: another save to ``path`` is running.
        """
        self.path, self._new, self._before = path, _beside(path, "saving"), _beside(path, "replaced")
        self.written = str(self._new)
        make_directory(self._new)
        self._lock: int | None = _locked(self._new / _LOCK, path)
        try:
            if not path.exists() and (self._before / METADATA).exists():
                rename(self._before, path)  # a save died between two renames
            _check_target(path, overwrite)
            for left in self._new.iterdir():
                if left.name != _LOCK:
                    remove(left) if left.is_dir() else left.unlink()
        except BaseException:
            self.discard()
            raise

    def publish(self, *metadata: bytes) -> None:
        """Write the metadata, and rename the hidden directory to the final path."""
        Folder(self._new).publish(METADATA, *metadata)
        flush_directory(self._new)
        replaces = self.path.exists()
        if replaces:
            remove(self._before)
            rename(self.path, self._before)
        try:
            rename(self._new, self.path)
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
        """Remove the directory unless it is published, as far as possible. The next save removes the rest."""
        if self._lock is not None:
            try:
                with contextlib.suppress(OSError):
                    remove(self._new)
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
    """Lock ``file`` until this process ends, if the file system has locks: some network file systems have none.

    Raises:
        BlockingIOError: another process, or another save of this one, holds the lock.
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


# -- progress ----------------------------------------------------------------------------------------------------------

Report = Callable[[int, int], object]

_EVERY = 10.0  # seconds between lines


class ByteCount:
    """Counts bytes, and reports them: to ``report``, or, on rank 0, with a line on stderr every few seconds."""

    def __init__(self, verb: str, path: str, report: Report | None, is_first: bool) -> None:
        self._verb, self.path, self._report = verb, path, report
        self._began = self._said = time.monotonic()
        self._is_first = is_first
        self.done = self.total = 0  # bytes; of the total those of tensors

    def add(self, nbytes: int) -> None:
        """So much more has been done."""
        self.done += nbytes
        if self._report is not None:
            try:
                self._report(self.done, self.total)
            except Exception:  # what is shown does not decide on a checkpoint
                logger.exception("%s %r goes on, without progress, which raised", self._verb, self.path)
                self._report = lambda done, total: None
        elif self._is_first and time.monotonic() - self._said > _EVERY:
            self._said = time.monotonic()
            seconds = self._said - self._began
            print(f"{self._verb} {self.path!r}: {self} on rank 0 after {seconds:.0f} s", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        """``12.5 of 64.0 MiB``."""
        divisor, unit = (2**30, "GiB") if self.total >= 2**30 else (2**20, "MiB")
        return f"{self.done / divisor:.2f} of {self.total / divisor:.2f} {unit}"
