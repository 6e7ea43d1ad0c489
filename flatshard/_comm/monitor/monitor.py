"""The monitor of one process group: it detects ranks that issue different collectives.

In the first passes, ranks compare the collectives that they are about to issue. Most mistakes show in these passes, and
comparing in all passes would cost time.

[Note: Comparing without waiting]
Before a collective, a rank sends a message to all others: a hash of all collectives so far, including this one, and the
latest ones as text. On CPU the message is a collective of its own, issued beside the checked one. So ranks that interleave
gathers and reductions differently do not wait for each other. The messages are compared when the data are waited for; data
of another unit cannot have arrived by then. [Note: Data of different units never mix]. On an accelerator, where gathers
and reductions share one order, the host waits for the messages before the collective is issued.

Whether a collective is checked depends on the number of collectives of its kind that its unit has had. This number is the
same on all ranks, whatever one of them did alone. Every rank gets all messages, so all ranks raise the same error.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
import weakref
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.distributed as dist

from flatshard._base import environment, trace
from flatshard._base.errors import OutOfStepError
from flatshard._comm.backends import BuiltinCollectives, GlooCollectives, builtin_collectives
from flatshard._comm.collectives import ALL_REDUCE, Capabilities, Pending
from flatshard._comm.monitor import watch
from flatshard._comm.monitor.differences import Described, described, difference, settings
from flatshard._comm.process_groups import has_gloo
from flatshard._comm.progress import RESERVED, SAME_ORDER, Awaited, Chain, Issued, Label, Progress
from flatshard._comm.rendezvous import Rendezvous
from flatshard._comm.streams import Streams

_LABELS = Label("the order check", RESERVED + 4), Label("the order check", RESERVED)  # about gathers, about reductions
_HASH, _TEXT = 8, 496  # bytes of a message: a hash of the order, one of the unit's first values, then the text
_BYTES = 2 * _HASH + _TEXT
_NAME = 80  # maximum characters of a unit's name in a message
_PATIENCE = 10.0  # seconds to wait for descriptions of other ranks' units
_OTHER_STARTS = (
    "fully_shard: ranks had different values of the same parameters, so the model has shards of each. Call "
    "torch.manual_seed(...) alike on all ranks before the model is built, or fully_shard(..., sync_module_states=True) to "
    "take the values of rank 0"
)
_GROUPS = 8  # maximum number of groups of agreeing ranks, and of ranks per group, that an error lists


class GroupMonitor:
    """The monitor of one process group and device. See ``_comm.progress.Monitor``."""

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
        if issued.verb == ALL_REDUCE:  # it carries no tag
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


class OrderCheck:
    """Compares the collectives of one process group between its ranks, by hashes."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._device = torch.device("cpu") if has_gloo(group) else device  # of the messages: CPU if possible
        self._collectives = builtin_collectives(group, self._device)
        self._one_order = device.type != "cpu"
        self._recent: list[str] = []
        self._hashes = [repr(settings()).encode()] * 2

    def announce(self, issued: Issued) -> Comparison:
        """Send a message about the collective that is issued next."""
        kind = 0 if self._one_order else issued.kind
        unit = issued.label.unit
        name = unit if len(unit) <= _NAME else f"...{unit[-_NAME:]}"
        line = f"{issued.verb} of {name or '<root>'!r}{' for backward' if issued.for_backward else ''}"
        self._recent = [*self._recent[-3:], line]
        cut, start = _summary(issued.label)
        summary = f"{line} {issued.label.identity} {cut}"
        ahead = hashlib.blake2b(self._hashes[kind] + summary.encode(), digest_size=_HASH).digest()
        self._hashes[kind] = ahead
        text = "; ".join(self._recent).encode()[-_TEXT:]
        content = (ahead + start + text).ljust(_BYTES, b"\0")
        message = torch.tensor(list(content), dtype=torch.uint8, device="cpu")
        collectives = self._collectives
        received = torch.empty(collectives.size, _BYTES, dtype=torch.uint8, device=self._device)
        own = received[collectives.rank].copy_(message)
        pending = collectives.all_gather(received.view(-1), own, _LABELS[kind])
        return Comparison(issued, pending, received, collectives)


class Comparison:
    """The messages about one collective, in flight."""

    __slots__ = ("_collectives", "_issued", "_pending", "_received")

    def __init__(
        self, issued: Issued, pending: Pending, received: torch.Tensor, collectives: BuiltinCollectives
    ) -> None:
        """``received``: a row for each rank. ``pending``: when they have come, by ``collectives``."""
        self._issued, self._pending, self._received, self._collectives = issued, pending, received, collectives

    def wait(self) -> None:
        """Compare with all other ranks.

        Raises:
            OutOfStepError: ranks are about to issue different collectives. All ranks raise it.
        """
        self._pending.wait()
        rows = [bytes(row) for row in self._received.tolist()]
        alike: dict[bytes, list[int]] = {}  # ranks by hash
        for rank, row in enumerate(rows):
            alike.setdefault(row[:_HASH], []).append(rank)
        if len(alike) > 1:
            issued = self._issued
            members = issued.progress.members
            lines = [
                _line([*map(members.world_rank, ranks)], rows[ranks[0]]) for ranks in list(alike.values())[:_GROUPS]
            ]
            units = self._exchange([ranks[0] for ranks in alike.values()][:_GROUPS])
            told = {members.world_rank(rank): unit for rank, unit in units.items()}
            why, cure = difference(told) or ("ranks run different units", SAME_ORDER)
            text = (
                f"{why}. Their last collectives{members}{issued.when}, the latest at the end:{''.join(lines)}\n"
                f"{cure}. (This check runs in the first passes: FLATSHARD_ORDER_CHECK=first, always or off.)"
            )
            raise OutOfStepError(issued.verb, issued.label.unit, self._collectives.rank, len(rows), text)
        starts = {row[_HASH : 2 * _HASH] for row in rows}
        if len(starts) > 1 and bytes(_HASH) not in starts:
            warnings.warn(_OTHER_STARTS, stacklevel=2)  # without a name, so that Python shows it once

    def _exchange(self, ranks: list[int]) -> dict[int, Described]:
        """Return the units of these ranks, by rank. All ranks call this, as all are about to raise."""
        rank, store = self._collectives.rank, self._collectives.store()
        if store is None:
            return {}
        units = Rendezvous(store, "flatshard/unit/")
        try:
            if rank in ranks:
                units.put(str(rank), described(self._issued))
            if units.await_all([str(each) for each in ranks], _PATIENCE):
                return {each: units.read(str(each)) for each in ranks}
        except RuntimeError as e:  # a rank has exited: the error is raised without the descriptions
            trace.logger.debug("no description of the units: %s", e)
        return {}


def _line(ranks: list[int], row: bytes) -> str:
    shown = ", ".join(map(str, ranks[:_GROUPS])) + (f" and {len(ranks) - _GROUPS} more" if len(ranks) > _GROUPS else "")
    return (
        f"\n  rank{'s' if len(ranks) > 1 else ''} {shown}: {row[2 * _HASH :].rstrip(bytes(1)).decode(errors='replace')}"
    )


def _summary(label: Label) -> tuple[str, bytes]:
    """Return the cut of a unit's flat parameters as text, and an 8-byte hash of the values that they were cut from.

    The cut may differ between ranks that have the same label. The hash is zeros if values have changed or are unknown.
    """
    flats = label.describe_flats()
    cut = str([(flat.dtype, flat.shard_numel) for flat in flats])
    starts = [flat.hash_start() for flat in flats]
    if None in starts or not starts:
        return cut, bytes(_HASH)
    return cut, hashlib.blake2b(b"".join(filter(None, starts)), digest_size=_HASH).digest()
