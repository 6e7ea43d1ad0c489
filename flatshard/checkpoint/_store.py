"""Checkpoints in a store: S3, Google Cloud Storage, Azure and others, by fsspec.

[Note: Published by its marker]
A store cannot rename a folder, but replaces one object at once. So the ranks of a save write to a folder of its own,
``<path>/save-<id>/``, and rank 0 writes ``<path>/.metadata`` last, which names their files. Until then a load finds the
previous checkpoint, and after it the new one. The previous files, and those of dead saves, are removed last. No name is
written twice, so the size of a file identifies it.

A store has no locks. ``<path>/.saving`` has the name of the save that began last. Earlier ones that have not ended fail.

[Note: Requests that fail]
The libraries of stores repeat requests themselves. Where they give up, the action begins again after 1, 2 and 4 seconds: the
read of a range, a listing, or this rank's file. An error that no repetition cures is raised at once.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar

from flatshard._base.trace import logger
from flatshard.checkpoint._disk import METADATA, outside

T = TypeVar("T")

PART = 32 * 2**20  # bytes of a file that are uploaded at a time: S3 takes 10,000 parts
_AHEAD = 8 * 2**20  # bytes: see `OpenStoreFile`
_WAITS = (1.0, 2.0, 4.0)  # seconds before an action begins again
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, LookupError, RuntimeError, TypeError, ValueError)
_CLAIM = ".saving"
_SAVE = re.compile(r"save-[0-9a-f]{32}")


def repeated(url: str, action: Callable[..., T], *args: Any, **options: Any) -> T:
    """Return the result of ``action``, which uses ``url``. [Note: Requests that fail]

    Raises:
        OSError: it failed each time.
    """
    for wait in (*_WAITS, None):
        try:
            return action(*args, **options)
        except _FINAL:
            raise
        except Exception as e:
            if wait is None:
                raise OSError(f"{url}: failed {len(_WAITS) + 1} times, the last time by {type(e).__name__}: {e}") from e
            logger.warning("%s: begins again in %g s, after %s: %s", url, wait, type(e).__name__, e)
            time.sleep(wait)
    raise AssertionError


class NewStoreFile:
    """A new file to append to, in bounded memory: at most two parts."""

    def __init__(self, stream: Any, name: str) -> None:
        self.name = name
        self._stream = stream

    def write(self, *buffers: bytes | memoryview) -> None:
        """Append ``buffers``. Full parts are uploaded."""
        for buffer in buffers:
            for at in range(0, len(buffer), PART):
                self._stream.write(memoryview(buffer)[at : at + PART])


class OpenStoreFile:
    """A file to read from by ranges, by several threads."""

    threads = 8  # which wait, more than they work

    def mapped(self, start: int, nbytes: int) -> None:
        """Return None: nothing of a store is in the system's cache."""

    def __init__(self, files: Any, path: str, url: str) -> None:
        self._files, self._path, self._url = files, path, url
        self.ahead = _AHEAD  # bytes that a request reads at least
        self._last = threading.local()  # the range that this thread has read: its start, and its bytes

    def read(self, buffer: memoryview, at: int) -> None:
        """Fill ``buffer`` with the bytes from ``at`` on. A request reads ahead, as small tensors lie side by side.

        Raises:
            ValueError: the file ends before.
        """
        while buffer:
            start, data = getattr(self._last, "range", (0, b""))
            if not start <= at < start + len(data):
                start, end = at, at + max(len(buffer), self.ahead)
                data = repeated(self._url, self._files.cat_file, self._path, start=start, end=end)
                if not data:
                    raise ValueError(f"{self._url} has been cut off while it was read")
                self._last.range = start, data
            found = memoryview(data)[at - start :][: len(buffer)]
            buffer[: len(found)] = found
            buffer, at = buffer[len(found) :], at + len(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class StoreFolder:
    """The files of a checkpoint by name. New ones are in ``written``."""

    def __init__(self, at: StorePath, written: str = "") -> None:
        self._at, self._written = at, written

    def write(self, name: str, fill: Callable[[NewStoreFile], T]) -> T:
        """Create a file, and return the result of ``fill``, which writes it. It is called again if the store fails."""
        name = f"{self._written}/{name}" if self._written else name

        def attempt() -> T:
            stream = self._at.files.open(self._at.path(name), "wb", block_size=PART)
            try:
                result = fill(NewStoreFile(stream, name))
                stream.close()
            except BaseException:
                _give_up(stream)
                raise
            return result

        return repeated(self._at.url(name), attempt)

    def flush(self) -> None:
        """Do nothing: a written file is complete."""

    def close(self) -> None:
        """Do nothing: a file that could not be written is closed."""

    def open(self, name: str) -> OpenStoreFile:
        """Open a file to read it."""
        return OpenStoreFile(self._at.files, self._at.path(name), self._at.url(name))

    def version(self, name: str) -> tuple[int, ...] | None:
        """Return the size of a file, or None if there is none. [Note: Published by its marker]

        Raises:
            ValueError: it is outside of the checkpoint.
        """
        if name.startswith("/") or ".." in name.split("/"):
            raise outside(name)
        try:
            return (int(repeated(self._at.url(name), self._at.files.info, self._at.path(name))["size"]),)
        except FileNotFoundError:
            return None


def _give_up(stream: Any) -> None:
    """Remove the uploaded parts, as far as possible."""
    try:
        with contextlib.suppress(Exception):
            stream.discard()
    finally:
        with contextlib.suppress(AttributeError):
            stream.closed = True  # else its finalizer uploads the rest


class StorePath:
    """A URL of a checkpoint, or of several."""

    def __init__(self, url: str, verb: str) -> None:
        """
        Args:
            url: for fsspec.
            verb: the caller's, for errors.

        Raises:
            ImportError: fsspec or the library of the store is not installed.
        """
        try:
            from fsspec.core import url_to_fs

            self.files, root = url_to_fs(url, use_listings_cache=False)  # other ranks write there
        except ImportError as e:
            raise ImportError(
                f"{verb}: {url!r} is in a store, which needs a library: pip install 'flatshard[stores]', and the store's "
                f"own, such as s3fs, gcsfs or adlfs ({e})"
            ) from e
        self._verb, self._url, self._root = verb, url.rstrip("/"), root.rstrip("/")

    def __str__(self) -> str:
        return self._url

    def url(self, name: str) -> str:
        """Return the URL of a name in it, for messages."""
        return f"{self._url}/{name}"

    def path(self, name: str) -> str:
        """Return the path of a name in it, for fsspec."""
        return f"{self._root}/{name}"

    def names(self) -> list[str]:
        """Return the names in it."""
        try:
            paths = repeated(self._url, self.files.ls, self._root, detail=False)
        except FileNotFoundError:
            return []
        return [name for path in paths if (name := path.rstrip("/").removeprefix(self._root).strip("/"))]

    def folder(self) -> StoreFolder:
        """Return the files of the path itself."""
        return StoreFolder(self)

    def find(self) -> StoreFolder:
        """Return the files of the checkpoint.

        Raises:
            FileNotFoundError: there is no checkpoint.
        """
        if (found := self.folder()).version(METADATA) is None:
            names = self.names()
            what = (
                "is no checkpoint: it has no .metadata, so a save that did not end wrote it" if names else "not found"
            )
            raise FileNotFoundError(f"{self._url!r} {what}")
        return found

    def put(self, name: str, data: bytes) -> None:
        """Write an object in it, or replace it."""
        repeated(self.url(name), self.files.pipe_file, self.path(name), data)

    def begin(self, overwrite: bool) -> NewSave:
        """Return a new save, on rank 0. See :class:`NewSave`."""
        return NewSave(self, overwrite)

    def writing(self, written: str) -> StoreFolder:
        """Return the files of the new save, by its ``written``."""
        return StoreFolder(self, written)

    def checkpoints(self) -> dict[str, StorePath]:
        """Return the checkpoints in it by name."""
        children = {name: self.child(name) for name in self.names()}
        return {name: child for name, child in children.items() if child.folder().version(METADATA) is not None}

    def child(self, name: str) -> StorePath:
        """Return the path of a checkpoint in it."""
        return StorePath(self.url(name), self._verb)

    def remove(self, names: Iterable[str] | None = None) -> None:
        """Remove ``names``. Default: all, first the metadata, so that the checkpoint is complete or absent."""
        for name in sorted(self.names(), key=lambda name: name != METADATA) if names is None else names:
            with contextlib.suppress(FileNotFoundError):
                repeated(self.url(name), self.files.rm, self.path(name), recursive=True)


class NewSave:
    """A save that all ranks write, and rank 0 publishes or discards. [Note: Published by its marker]"""

    def __init__(self, at: StorePath, overwrite: bool) -> None:
        """Claim the path.

        Raises:
            FileExistsError: ``at`` exists, and is no checkpoint or is not to be overwritten.
        """
        names = at.names()
        if METADATA in names and not overwrite:
            raise FileExistsError(f"{str(at)!r} exists: choose another path, or pass overwrite=True to replace it")
        if METADATA not in names and any(name != _CLAIM and not _SAVE.fullmatch(name) for name in names):
            raise FileExistsError(f"{str(at)!r} exists and is no checkpoint: it is not replaced. Choose another path")
        self._at, self._is_published, self.written = at, False, f"save-{uuid.uuid4().hex}"
        self._at.put(_CLAIM, self.written.encode())

    def publish(self, *metadata: bytes) -> None:
        """Write the metadata, and remove the files of other saves.

        Raises:
            BlockingIOError: another save to the path began meanwhile.
        """
        if not self._is_newest():
            raise BlockingIOError(
                f"another save to {str(self._at)!r} has begun: two jobs must not save to one path at once"
            )
        self._at.put(METADATA, b"".join(metadata))
        self._is_published = True
        try:  # nothing from here on makes the save fail
            old = [name for name in self._at.names() if _SAVE.fullmatch(name) and name != self.written]
            self._at.remove([*old, _CLAIM])
        except Exception as e:
            logger.warning("%r is saved. Left to be cleaned by the next save: %s", str(self._at), e)

    def discard(self) -> None:
        """Remove the files unless they are published, as far as possible. The next save removes the rest."""
        if not self._is_published:
            with contextlib.suppress(Exception):
                self._at.remove([self.written])
                if self._is_newest():
                    self._at.remove([_CLAIM])

    def _is_newest(self) -> bool:
        try:
            data = repeated(self._at.url(_CLAIM), self._at.files.cat_file, self._at.path(_CLAIM))
        except FileNotFoundError:  # another save was published
            return False
        return bool(data == self.written.encode())
