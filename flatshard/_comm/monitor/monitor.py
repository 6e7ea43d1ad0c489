"""Detects ranks that issue different collectives: the order check and the watch of one process group."""

from __future__ import annotations

import weakref
from typing import ClassVar

import torch
import torch.distributed as dist

from flatshard import _config
from flatshard._comm.backends import BuiltinCollectives, GlooCollectives
from flatshard._comm.collectives import Collectives, Pending
from flatshard._comm.monitor import watch
from flatshard._comm.monitor.order_check import OrderCheck
from flatshard._comm.progress import GATHER, REDUCE, Issued, Progress
from flatshard._errors import OutOfStepError


class GroupMonitor:
    """The monitor of one process group and device. See ``_runtime.Monitor``."""

    # Lives as long as the group: the hashes must be the same on all ranks, whenever each collects garbage.
    _orders: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, OrderCheck]] = weakref.WeakKeyDictionary()

    def __init__(self, builtin: BuiltinCollectives, device: torch.device, progress: Progress) -> None:
        self._builtin = builtin
        self._checked = _config.checked_collectives()  # how many collectives of each unit and kind are compared
        group = builtin.group
        self._order = self._orders.setdefault(group, OrderCheck(group, device))
        if isinstance(builtin, GlooCollectives):
            watch.start(builtin, progress)

    def announce(self, issued: Issued, collectives: Collectives) -> Pending | None:
        compared = getattr(collectives, "compared", (GATHER, REDUCE))
        return self._order.announce(issued) if issued.count <= self._checked and issued.kind in compared else None

    def explain(self, issued: Issued) -> OutOfStepError | None:
        text = watch.verdict(self._builtin)
        if text is None:
            return None
        return OutOfStepError(issued.verb, issued.unit, self._builtin.rank, self._builtin.size, text)
