"""Detects ranks that issue different collectives: the monitor of one process group."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.distributed as dist

from flatshard._base import environment
from flatshard._base.errors import OutOfStepError
from flatshard._comm.backends import BuiltinCollectives, GlooCollectives
from flatshard._comm.capabilities import Capabilities
from flatshard._comm.collectives import Pending
from flatshard._comm.monitor import watch
from flatshard._comm.monitor.order_check import OrderCheck
from flatshard._comm.pending import Awaited, Chain
from flatshard._comm.progress import Issued, Progress
from flatshard._comm.streams import Streams


class GroupMonitor:
    """The monitor of one process group and device. See ``_comm.pending.Monitor``."""

    # Lives as long as the group. rank_group.py, [Note: Ranks collect garbage at different times]
    _orders: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, OrderCheck]] = weakref.WeakKeyDictionary()

    def __init__(self, builtin: BuiltinCollectives, device: torch.device, progress: Progress) -> None:
        self._builtin, self._on_cpu = builtin, device.type == "cpu"
        self.checks_until = environment.checked_collectives()
        group = builtin.group
        self._order = self._orders.setdefault(group, OrderCheck(group, device))
        if isinstance(builtin, GlooCollectives):
            watch.start(builtin, progress)

    def start(
        self, issued: Issued, capabilities: Capabilities, start: Callable[[], Pending], streams: Streams | None
    ) -> Pending:
        if issued.kind not in capabilities.compared:
            return start()
        if streams is not None and streams.is_captured(streams.current):
            return start()  # the host can't wait for messages while it makes a CUDA graph
        check = self._order.announce(issued)
        if not self._on_cpu:
            check.wait()
            return start()
        if issued.verb == "all-reduce":  # it carries no tag
            return Chain(check, start)
        try:
            return _Compared(check, start(), issued)
        except BaseException:  # the check's messages are in flight
            with contextlib.suppress(Exception):
                Awaited(check, issued, self).wait()
            raise

    def explain(self, issued: Issued) -> OutOfStepError | None:
        text = watch.verdict(self._builtin)
        if text is None:
            return None
        return OutOfStepError(issued.verb, issued.label.unit, self._builtin.rank, self._builtin.size, text)


class _Compared:
    """A collective in flight on CPU. Its check is waited for first: if ranks issued different ones, the data never arrive."""

    __slots__ = ("_check", "_issued", "_pending")

    def __init__(self, check: Pending, pending: Pending, issued: Issued) -> None:
        self._check = check
        self._pending = pending
        self._issued = issued

    def wait(self) -> None:
        try:
            self._check.wait()
        except OutOfStepError:
            self._issued.progress.unended.append((self._issued, self._pending))
            raise
        self._pending.wait()
