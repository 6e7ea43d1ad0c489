"""Sends bytes between the ranks of a process group on CPU, apart from the model's collectives."""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def default_group() -> dist.ProcessGroup | None:
    """The group of all ranks, or None if torch.distributed is not initialised."""
    return dist.group.WORLD if dist.is_initialized() else None


def membership(group: dist.ProcessGroup | None) -> tuple[int, int, Any]:
    """This process's rank in ``group``, the group's size, and the group's store."""
    return (0, 1, None) if group is None else (group.rank(), group.size(), group.get_group_store())


class Messages:
    """Sends bytes between rank 0 of a process group and the others, on CPU, from any thread, over a gloo group of its own.

    The gloo group is not made by ``new_group``: all ranks of the world must call that, and the group lives as long as the
    default group.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        """All ranks of ``group`` call this together. ``name``: a unique name, used once."""
        self.rank, self.size, store = membership(group)
        store = dist.distributed_c10d.PrefixStore(name, store)
        self._gloo: Any = dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(hours=1))

    def gather(self, data: bytes) -> list[bytes]:
        """Send ``data`` to rank 0. Returns the data of all ranks on rank 0, and an empty list on others."""
        if self.rank == 0:
            return [data, *map(self._receive, range(1, self.size))]
        self._send(data, 0)
        return []

    def scatter(self, items: list[bytes] | None) -> bytes:
        """Send ``items[k]`` to rank ``k``. Rank 0 passes ``items``, others pass None. Returns this rank's item."""
        if items is None:
            return self._receive(0)
        for rank in range(1, self.size):
            self._send(items[rank], rank)
        return items[0]

    def _send(self, data: bytes, rank: int) -> None:
        for message in (torch.tensor([len(data)]), torch.frombuffer(bytearray(data), dtype=torch.uint8)):
            self._gloo.send([message], rank, 0).wait()

    def _receive(self, rank: int) -> bytes:
        size = torch.empty(1, dtype=torch.int64)
        self._gloo.recv([size], rank, 0).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self._gloo.recv([data], rank, 0).wait()
        return ctypes.string_at(data.data_ptr(), data.numel())
