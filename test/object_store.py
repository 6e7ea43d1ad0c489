"""An object store in a local directory, for several processes: no rename, parts of files, and requests that fail."""

import contextlib
import io
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class ObjectStore(AbstractFileSystem):
    """``objects:///directory``. As in S3, there are no directories, and an object appears at once, when all is uploaded."""

    protocol = "objects"
    cachable = False
    requests: ClassVar[list[tuple[str, str, int]]] = []  # of this process: kind, path, and bytes
    fault: ClassVar[Callable[[str, str], Any] | None] = None
    """Called with each request. It may raise, or return the number of bytes that a read returns at most."""

    @classmethod
    def request(cls, kind: str, path: str, nbytes: int = 0) -> Any:
        cls.requests.append((kind, path, nbytes))
        return None if cls.fault is None else cls.fault(kind, path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        self.request("list", path)
        at = Path(self._strip_protocol(path))
        if not at.is_dir() or not any(p.is_file() for p in at.rglob("*")):
            raise FileNotFoundError(path)
        found = [self._info(p) for p in sorted(at.iterdir()) if p.suffix != ".upload"]
        return found if detail else [each["name"] for each in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self.request("info", path)
        return self._info(Path(self._strip_protocol(path)))

    def _info(self, path: Path) -> dict[str, Any]:
        if not path.exists():
            raise FileNotFoundError(path)
        return {"name": str(path), "size": path.stat().st_size, "type": "directory" if path.is_dir() else "file"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        with Path(self._strip_protocol(path)).open("rb") as file:
            file.seek(start or 0)
            data = file.read(-1 if end is None else max(0, end - (start or 0)))
        limit = self.request("read", path, len(data))
        return data[:limit]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self.request("write", path, len(value))
        self.put(path, io.BytesIO(value))

    def put(self, path: str, data: BinaryIO) -> None:
        """Let the object appear, with all of ``data``."""
        at = Path(self._strip_protocol(path))
        at.parent.mkdir(parents=True, exist_ok=True)
        upload = at.with_name(f"{uuid.uuid4().hex}.upload")
        with upload.open("wb") as file:
            shutil.copyfileobj(data, file, 2**20)
        os.replace(upload, at)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        at = Path(self._strip_protocol(path))
        for each in sorted(at.rglob("*")) if at.is_dir() else [at]:
            if not each.is_dir():
                self.request("remove", str(each))
                each.unlink()  # raises FileNotFoundError
        shutil.rmtree(at, ignore_errors=True)
        with contextlib.suppress(OSError):
            at.parent.rmdir()  # if it is empty

    def mv(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("a store renames nothing")

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **_: Any) -> Any:
        assert mode == "wb"
        return Upload(self, path, mode, block_size)


class Upload(AbstractBufferedFile):
    """A file that is uploaded by parts. Its object appears with the last."""

    def _initiate_upload(self) -> None:
        ObjectStore.request("begin", self.path)
        self.parts = tempfile.TemporaryFile()  # noqa: SIM115 - of gigabytes, so not in memory

    def _upload_chunk(self, final: bool = False) -> bool:
        ObjectStore.request("part", self.path, len(self.buffer.getbuffer()))
        self.parts.write(self.buffer.getbuffer())
        if final:
            ObjectStore.request("complete", self.path)
            self.parts.seek(0)
            self.fs.put(self.path, self.parts)
            self.parts.close()
        return True

    def discard(self) -> None:
        ObjectStore.request("discard", self.path)
        self.parts.close()


fsspec.register_implementation("objects", ObjectStore, clobber=True)
