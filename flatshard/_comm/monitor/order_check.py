"""In the first passes, ranks compare the collectives that they are about to issue. Most mistakes show in these passes, and
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

import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from flatshard._base import trace
from flatshard._base.errors import OutOfStepError
from flatshard._comm.backends import builtin_collectives, has_gloo
from flatshard._comm.collectives import Pending
from flatshard._comm.monitor.differences import Described, described, difference, flats_of, settings, start_of
from flatshard._comm.progress import RESERVED, SAME_ORDER, Issued, Label
from flatshard._comm.rendezvous import Rendezvous

_LABELS = Label("the order check", RESERVED + 4), Label("the order check", RESERVED)  # about gathers, about reductions
_HASH, _TEXT = 8, 496  # bytes of a message: a hash of the order, one of the unit's first values, then the text
_BYTES = 2 * _HASH + _TEXT
_NAME = 80  # maximum characters of a unit's name in a message
_PATIENCE = 10.0  # seconds to wait for descriptions of other ranks' units
_OTHER_STARTS = (
    "fully_shard: ranks had different values of the same parameters, so the model has parts of each. Call "
    "torch.manual_seed(...) alike on all ranks before the model is built, or fully_shard(..., sync_module_states=True) to "
    "take the values of rank 0"
)
_GROUPS = 8  # maximum number of groups of agreeing ranks, and of ranks per group, that an error lists


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
        line = f"{issued.verb} of {name or '<root>'!r}{' for backward' if issued.again else ''}"
        self._recent = [*self._recent[-3:], line]
        flats, start = flats_of(issued.label), start_of(issued.label)
        summary = f"{line} {issued.label.identity} {[flat[:2] for flat in flats]}"
        ahead = hashlib.blake2b(self._hashes[kind] + summary.encode(), digest_size=_HASH).digest()
        self._hashes[kind] = ahead
        text = "; ".join(self._recent).encode()[-_TEXT:]
        content = (ahead + start + text).ljust(_BYTES, b"\0")
        message = torch.tensor(list(content), dtype=torch.uint8, device="cpu")
        collectives = self._collectives
        rank, size = collectives.rank, collectives.size
        received = torch.empty(size, _BYTES, dtype=torch.uint8, device=self._device)
        received[rank].copy_(message)
        pending = collectives.all_gather(received.view(-1), received[rank], _LABELS[kind])
        return Comparison(issued, pending, received, rank, collectives.store)


class Comparison:
    """The messages about one collective, in flight."""

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
            OutOfStepError: ranks are about to issue different collectives. All ranks raise it.
        """
        self._pending.wait()
        rows = [bytes(row) for row in self._received.tolist()]
        alike: dict[bytes, list[int]] = {}  # ranks by hash
        for rank, row in enumerate(rows):
            alike.setdefault(row[:_HASH], []).append(rank)
        if len(alike) > 1:
            issued = self._issued
            lines = [_line(ranks, rows[ranks[0]]) for ranks in list(alike.values())[:_GROUPS]]
            told = self._exchange([ranks[0] for ranks in alike.values()][:_GROUPS])
            why, cure = difference(told) or ("ranks run different units", SAME_ORDER)
            text = (
                f"{why}. Their last collectives{issued.when}, the latest at the end:{''.join(lines)}\n"
                f"{cure}. (This check runs in the first passes: FLATSHARD_ORDER_CHECK=first, always or off.)"
            )
            raise OutOfStepError(issued.verb, issued.label.unit, self._rank, len(rows), text)
        starts = {row[_HASH : 2 * _HASH] for row in rows}
        if len(starts) > 1 and bytes(_HASH) not in starts:
            warnings.warn(_OTHER_STARTS, stacklevel=2)  # without a name, so that Python shows it once

    def _exchange(self, ranks: list[int]) -> dict[int, Described]:
        """Return the units of these ranks, by rank. All ranks call this, as all are about to raise."""
        store = self._store()
        if store is None:
            return {}
        units = Rendezvous(store, "flatshard/unit/")
        try:
            if self._rank in ranks:
                units.put(str(self._rank), described(self._issued))
            if units.await_all([str(rank) for rank in ranks], _PATIENCE):
                return {rank: units.read(str(rank)) for rank in ranks}
        except RuntimeError as e:  # a rank has exited: the error is raised without the descriptions
            trace.logger.debug("no description of the units: %s", e)
        return {}


def _line(ranks: list[int], row: bytes) -> str:
    shown = ", ".join(map(str, ranks[:_GROUPS])) + (f" and {len(ranks) - _GROUPS} more" if len(ranks) > _GROUPS else "")
    return (
        f"\n  rank{'s' if len(ranks) > 1 else ''} {shown}: {row[2 * _HASH :].rstrip(bytes(1)).decode(errors='replace')}"
    )
