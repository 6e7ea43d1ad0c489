"""Ranks compare what they are about to do, at first: a mistake shows there, and later it would cost time.

[Note: Comparing without waiting]
Before a collective a rank sends a message to all others: a hash of the collectives so far, this one included, and the
last of them as text. On CPU it is a collective of its own, beside the one that it is about, so ranks that do their gathers
and reductions in another interleaving don't wait for each other, and it is compared when the data are waited for: those
of another unit cannot have arrived. [Note: Data of different units never mix]. On an accelerator, where gathers and
reductions share one order, the host waits for it before the collective is issued.

Which collectives are checked depends on how many of their kind their unit has had, which is the same on all ranks
whatever else one of them did alone. Every rank gets all messages, so all ranks raise, and tell the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flatshard import _trace
from flatshard._comm.backends import message_collectives
from flatshard._comm.collectives import Pending
from flatshard._comm.monitor.differences import CURE, Described, described, difference
from flatshard._comm.progress import CHECK_LABELS, SAME_ORDER, Issued, here
from flatshard._errors import OutOfStepError

_HASH, _TEXT = 8, 504  # bytes of a message
_NAME = 80  # characters of a unit's name, in a message
_UNIT, _PATIENCE = "flatshard/unit/", 10.0  # where ranks describe their units, and for how long others wait for that: s
_GROUPS = 8  # ranks, and groups of ranks that agree, to tell about in an error


class OrderCheck:
    """The collectives of one process group that have been compared, as hashes."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._collectives, self._device = message_collectives(group, device)
        self._one_order = device.type != "cpu"
        self._recent: list[str] = []
        self._hashes = [b"", b""]

    def announce(self, issued: Issued) -> Comparison:
        """Send a message about the collective that is to be issued next."""
        kind = 0 if self._one_order else issued.kind
        name = issued.unit if len(issued.unit) <= _NAME else f"...{issued.unit[-_NAME:]}"
        line = f"{issued.verb} of {name or '<root>'!r}{' for backward' if issued.again else ''}"
        self._recent = [*self._recent[-3:], line]
        flats = [flat[:2] for flat in issued.label.contents()]  # beside its identity, what could come to differ
        summary = f"{line} {issued.label.identity} {flats}"
        ahead = hashlib.blake2b(self._hashes[kind] + summary.encode(), digest_size=_HASH).digest()
        self._hashes[kind] = ahead
        text = "; ".join(self._recent).encode()[-_TEXT:]
        message = torch.tensor(list((ahead + text).ljust(_HASH + _TEXT, b"\0")), dtype=torch.uint8)
        rank, size = self._collectives.rank, self._collectives.size
        received = torch.empty(size, _HASH + _TEXT, dtype=torch.uint8, device=self._device)
        received[rank].copy_(message)
        before, here.label = here.label, CHECK_LABELS[kind]
        try:
            pending = self._collectives.all_gather(received.view(-1), received[rank])
        finally:
            here.label = before
        return Comparison(issued, pending, received, rank, self._collectives.store)


class Comparison:
    """Messages under way."""

    __slots__ = ("_issued", "_pending", "_rank", "_received", "_store")

    def __init__(
        self, issued: Issued, pending: Pending, received: torch.Tensor, rank: int, store: Callable[[], Any]
    ) -> None:
        self._issued = issued
        self._pending = pending
        self._received = received
        self._rank = rank
        self._store = store  # the process group's

    def wait(self) -> None:
        """Compare with all other ranks.

        Raises:
            OutOfStepError: one is about to do something else. All ranks raise it.
        """
        self._pending.wait()
        rows = [bytes(row) for row in self._received.tolist()]
        alike: dict[bytes, list[int]] = {}  # ranks by their hashes
        for rank, row in enumerate(rows):
            alike.setdefault(row[:_HASH], []).append(rank)
        if len(alike) > 1:
            issued = self._issued
            lines = [_line(ranks, rows[ranks[0]]) for ranks in list(alike.values())[:_GROUPS]]
            why, cure = difference(self._exchange([ranks[0] for ranks in alike.values()][:_GROUPS])), CURE
            if not why:
                why, cure = "ranks run different units", SAME_ORDER
            text = (
                f"{why}. Their last collectives{issued.when}, the latest at the end:{''.join(lines)}\n"
                f"{cure}. (This is compared in the first passes: FLATSHARD_ORDER_CHECK=first, always or off.)"
            )
            raise OutOfStepError(issued.verb, issued.unit, self._rank, len(rows), text)

    def _exchange(self, ranks: list[int]) -> dict[int, Described]:
        """The units that these ranks have come to, by the process group's store: all of them are about to raise."""
        store, found = self._store(), {}
        if store is None:
            return {}
        if self._rank in ranks:
            store.set(f"{_UNIT}{self._rank}", json.dumps(described(self._issued)))
        try:
            store.wait([f"{_UNIT}{rank}" for rank in ranks], timedelta(seconds=_PATIENCE))
            found = {rank: json.loads(store.get(f"{_UNIT}{rank}")) for rank in ranks}
        except RuntimeError as e:  # a rank has ended; the error in hand does without
            _trace.logger.debug("no description of the units: %s", e)
        return found


def _line(ranks: list[int], row: bytes) -> str:
    shown = ", ".join(map(str, ranks[:_GROUPS])) + (f" and {len(ranks) - _GROUPS} more" if len(ranks) > _GROUPS else "")
    return f"\n  rank{'s' if len(ranks) > 1 else ''} {shown}: {row[_HASH:].rstrip(bytes(1)).decode(errors='replace')}"
