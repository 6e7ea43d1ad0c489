"""Plans of saves as JSON: what each rank would write, and what it has written.

Rank 0 reads the plans of all ranks, so an item is one flat row: in a third of the time that a generic form takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from flatshard._comm.payloads import PayloadKind, Payloads, dataclass_kind, torch_kind

StorageInfo = _StorageInfo
"""The place of an entry, which torch keeps private."""

_INFO = dataclass_kind(StorageInfo)
_MORE = [field.name for field in dataclasses.fields(SavePlan) if field.name != "items"]


def _write_plan(plan: SavePlan) -> list[Any]:
    numbers: dict[Any, int] = {}
    properties: list[TensorProperties] = []  # most items have the same
    rows = []
    for item in plan.items:
        row = [*_write_index(item.index), item.type.name]
        if item.bytes_io_data is not None:
            row.append(item.bytes_io_data.nbytes)
        if (data := item.tensor_data) is not None:
            number = numbers.setdefault(tuple(vars(data.properties).values()), len(numbers))
            if number == len(properties):
                properties.append(data.properties)
            row += [list(data.chunk.offsets), list(data.chunk.sizes), list(data.size), number]
        rows.append(row)
    return [rows, properties, [getattr(plan, name) for name in _MORE]]


def _read_plan(values: list[Any]) -> SavePlan:
    rows, properties, more = values
    return SavePlan(list(_read_items(rows, properties)), **dict(zip(_MORE, more, strict=True)))


def _read_items(rows: list[list[Any]], properties: list[TensorProperties]) -> Iterator[WriteItem]:
    for fqn, offset, number, kind, *data in rows:
        item_type, index = WriteItemType[kind], _read_index((fqn, offset, number))
        if len(data) == 4:
            offsets, sizes, size = map(torch.Size, data[:3])
            chunk = ChunkStorageMetadata(offsets, sizes)
            yield WriteItem(index, item_type, tensor_data=TensorWriteData(chunk, properties[data[3]], size))
        else:
            yield WriteItem(index, item_type, bytes_io_data=BytesIOWriteData(*data) if data else None)


def _write_index(index: MetadataIndex) -> list[Any]:
    return [index.fqn, None if index.offset is None else list(index.offset), index.index]


def _read_index(values: Any) -> MetadataIndex:
    return MetadataIndex(*values)


def _read_info(values: list[Any]) -> StorageInfo:
    *fields, body = values
    info = StorageInfo(*fields)
    info.flatshard_body = body  # type: ignore[attr-defined]
    return info


PLANS = Payloads(
    [
        PayloadKind(SavePlan, _write_plan, _read_plan),
        PayloadKind(MetadataIndex, _write_index, _read_index),
        PayloadKind(StorageInfo, lambda info: [*_INFO.write(info), info.flatshard_body], _read_info),
        *map(dataclass_kind, (TensorProperties, WriteResult, _StoragePrefix)),
        *map(torch_kind, (torch.layout, torch.memory_format)),
    ]
)
"""Objects that ranks exchange in a save."""
