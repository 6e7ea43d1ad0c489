"""The metadata of a checkpoint: torch's, with a checksum, and read without executing anything.

[Note: No pickle is executed]
torch's reader unpickles the metadata, and its planner the values that are not tensors, without restriction. Here the metadata
may name the classes of metadata and nothing else, and values are read as ``torch.load(weights_only=True)`` reads them. A save
refuses values that such a load would refuse.

[Note: Plans of saves]
Ranks send each other the plans of a save, and the places of what they have written, in the same form: a pickle of classes of
metadata and of plans, and nothing else.

[Note: Versions of torch]
A tensor's properties are pickled as a tuple, and each torch reads only tuples of the length that it knows: 2.15 added the
strides. All versions share the first five fields, and read a tuple of five. So we write five, and read the first five of what
a newer torch wrote. The others are not needed: each entry has its own place and strides.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import pickle
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


class Body(NamedTuple):
    """The own bytes of an entry that flatshard wrote, within the range that torch's reader reads."""

    start: int  # in the file
    nbytes: int
    stride: tuple[int, ...] | None  # in elements; None: the bytes are what torch.save wrote
    sums: bytes


def body_of(info: Any) -> Body | None:
    """Return the body of an entry, or None if flatshard did not write it. ``info``: torch's, its file and place.

    Raises:
        ValueError: a place is not valid, or the body is not within the entry. A checksum does not exclude that: whoever
            forges metadata can compute it.
    """
    given = getattr(info, "flatshard_body", None)
    body = None if given is None else Body(*given)
    numbers = [info.offset, info.length, *(() if body is None else (body.start, body.nbytes, *(body.stride or ())))]
    if (
        {*map(type, numbers)} != {int}
        or min(numbers) < 0
        or not (body is None or info.offset <= body.start <= body.start + body.nbytes <= info.offset + info.length)
    ):
        raise ValueError(f"the checkpoint's .metadata says that an entry lies where none can: {numbers}")
    return body


def place_of(file: str, start: int, nbytes: int, body: Body) -> Any:
    """Return torch's record of the place of an entry, with its ``body``."""
    info: Any = _StorageInfo(file, start, nbytes)
    info.flatshard_body = tuple(body)
    return info


_MAGIC = b"flatshard seal 1"
_PROPERTIES = 5  # fields of TensorProperties that every torch reads
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.distributed.checkpoint.storage": {"WriteResult"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}


def pickled_metadata(metadata: Metadata) -> bytes:
    """Return ``metadata`` in the form that every torch can unpickle. [Note: Versions of torch]

    Equal properties, sizes and names are pickled once, so that reading takes a fifth of the time.
    """
    alike: dict[Any, TensorProperties] = {}
    sizes: dict[Any, Any] = {}
    names = {name: name for name in metadata.state_dict_metadata}

    def same(size: Any) -> Any:
        return sizes.setdefault((type(size), size), size)

    for kind in metadata.state_dict_metadata.values():
        if isinstance(kind, TensorStorageMetadata):
            kind.properties = alike.setdefault(_shared_fields(kind.properties), kind.properties)
            kind.size = same(kind.size)
            for chunk in kind.chunks:
                chunk.offsets, chunk.sizes = same(chunk.offsets), same(chunk.sizes)
    for index in metadata.storage_data or ():
        vars(index).update(fqn=names.get(index.fqn, index.fqn), offset=same(index.offset))
    return pickled(metadata)


def pickled(value: Any) -> bytes:
    """Return metadata, or a plan of a save, as bytes."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: _reduced}
    pickler.dump(value)
    return stream.getvalue()


def unpickled(data: bytes) -> Any:
    """Return the value that ``pickled`` was given."""
    return _MetadataUnpickler(io.BytesIO(data)).load()


def _shared_fields(properties: TensorProperties) -> tuple[Any, ...]:
    """Return the fields that every torch reads."""
    fields: tuple[Any, ...] = properties.__getstate__()  # type: ignore[no-untyped-call]
    return fields[:_PROPERTIES]


def _reduced(properties: TensorProperties) -> tuple[Any, ...]:
    reduced: Any = properties.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    make, arguments, *_ = reduced
    return make, arguments, _shared_fields(properties)


class _Properties(TensorProperties):
    """A stand-in for torch's class while it is unpickled: a newer torch may have written more fields."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__class__ = TensorProperties  # type: ignore[assignment]
        self.__setstate__(state[:_PROPERTIES])


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (TensorProperties.__module__, TensorProperties.__name__):
            return _Properties
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | torch.layout):
            return found
        raise pickle.UnpicklingError(
            f"the checkpoint's metadata names {module}.{name}, which no metadata holds: not read"
        )


def seal(data: bytes) -> bytes:
    """Return the checksum that follows the metadata, where unpickling has stopped."""
    return _MAGIC + hashlib.blake2b(data, digest_size=32).digest()


def read_metadata(data: bytes) -> Metadata:
    """Return the metadata.

    Raises:
        ValueError: it is damaged, or not the metadata of a checkpoint.
    """
    size = len(data) - len(seal(b""))
    sealed = data[max(size, 0) :].startswith(_MAGIC)
    if sealed and data[size:] != seal(data[:size]):
        raise ValueError(
            "the checkpoint's .metadata is damaged: its bytes do not have the sum that they were saved with"
        )
    stream = io.BytesIO(data)
    try:
        found = _MetadataUnpickler(stream).load()
        ours = any(hasattr(info, "flatshard_body") for info in found.storage_data.values())
        fits = isinstance(found, Metadata) and {*map(type, found.storage_data)} <= {MetadataIndex}
        fits = fits and (sealed or not (ours or stream.read(1)))  # torch writes nothing after it
    except pickle.UnpicklingError as e:
        raise ValueError(f"the checkpoint's .metadata cannot be read: {e}") from None
    except Exception as e:
        raise ValueError(f"the checkpoint's .metadata is damaged or cut off: {type(e).__name__}: {e}") from None
    if not fits:
        raise ValueError("the checkpoint's .metadata is damaged or cut off")
    return found  # type: ignore[no-any-return]
