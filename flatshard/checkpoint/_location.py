"""Where checkpoints are: a path on a disk, or a URL of a store. _disk.py, [Note: The seam of a store]"""

from __future__ import annotations

import os
from typing import TypeAlias

from flatshard.checkpoint import _disk as disk
from flatshard.checkpoint import _store as store

Location: TypeAlias = disk.DiskPath | store.StorePath
NewCheckpoint: TypeAlias = disk.NewDirectory | store.NewSave
Folder: TypeAlias = disk.Folder | store.StoreFolder
NewFile: TypeAlias = disk.NewFile | store.NewStoreFile
OpenFile: TypeAlias = disk.OpenFile | store.OpenStoreFile


def locate(path: str | os.PathLike[str], verb: str) -> Location:
    """Return the location that ``path``, the argument of ``verb``, names.

    Raises:
        ImportError: it begins with a scheme (``s3://``) whose library is not installed.
        ValueError: the scheme is unknown, or it is a chain of URLs.
    """
    scheme = disk.SCHEME.match(text := disk.check_unchained(path, verb))
    if scheme is None:
        return disk.DiskPath(path)
    protocol, rest = text[: scheme.end() - 2], text[scheme.end() - 1 :]
    rest = rest if rest.startswith("//") else f"/{rest}"  # `Path` leaves one slash
    if protocol in ("file", "local"):
        return disk.DiskPath("/" + rest.lstrip("/"))
    return store.StorePath(f"{protocol}:{rest}", verb)
