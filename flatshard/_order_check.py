"""Ranks compare what they are about to do, in the first passes: a mistake shows there, and later it would cost time.

[Note: Comparing without waiting]
Before each collective a rank sends a message to all others: a hash of the collectives so far, this one included, and the
last of them as text. On CPU it is a collective of its own, beside the one that it is about, so ranks that do their gathers
and reductions in another interleaving don't wait for each other, and it is compared when the data are waited for: those
of another unit cannot have arrived. [Note: Data of different units never mix]. On an accelerator, where gathers and
reductions share one order, the host waits for it before the collective is issued.

Every rank gets all messages, so all ranks raise, and tell the same.
"""

from __future__ import annotations

import hashlib

import torch

from flatshard import _config
from flatshard._collectives import Pending
from flatshard._errors import OutOfStepError
from flatshard._progress import SAME_ORDER, Issued
from flatshard._runtime import Runtime

_HASH, _TEXT = 8, 504  # bytes of a message
_NAME = 80  # characters of a unit's name, in a message


class OrderCheck:
    """The collectives of one process group since a pass began, as hashes."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._recent: list[str] = []
        self._hashes = [b"", b""]

    def begin(self, what: str) -> None:
        """A pass begins. ``what``: which one."""
        self._hashes = [hashlib.blake2b(what.encode(), digest_size=_HASH).digest()] * 2

    def announce(self, issued: Issued, kind: int) -> _Comparison:
        """Send a message about the collective that is to be issued next."""
        runtime = self._runtime
        kind = kind if runtime.device.type == "cpu" else 0
        name = issued.unit if len(issued.unit) <= _NAME else f"...{issued.unit[-_NAME:]}"
        line = f"{issued.verb} of {name or '<root>'!r}{' for backward' if issued.again else ''}"
        self._recent = [*self._recent[-3:], line]
        ahead = hashlib.blake2b(self._hashes[kind] + line.encode(), digest_size=_HASH).digest()
        self._hashes[kind] = ahead
        text = "; ".join(self._recent).encode()[-_TEXT:]
        message = torch.tensor(list((ahead + text).ljust(_HASH + _TEXT, b"\0")), dtype=torch.uint8)
        received = torch.empty(runtime.world_size, _HASH + _TEXT, dtype=torch.uint8, device=runtime.device)
        mine = received[runtime.rank]
        mine.copy_(message)
        return _Comparison(issued, runtime.exchange(received.view(-1), mine, kind), received, runtime.rank)


class _Comparison:
    """Messages under way."""

    __slots__ = ("_issued", "_pending", "_rank", "_received")

    def __init__(self, issued: Issued, pending: Pending, received: torch.Tensor, rank: int) -> None:
        self._issued = issued
        self._pending = pending
        self._received = received
        self._rank = rank

    def wait(self) -> None:
        """Compare with all other ranks.

        Raises:
            OutOfStepError: one is about to do something else. All ranks raise it.
        """
        self._pending.wait()
        rows = [bytes(row) for row in self._received.tolist()]
        mine = rows[self._rank]
        others = [rank for rank, row in enumerate(rows) if row[:_HASH] != mine[:_HASH]]
        if others:
            issued = self._issued
            text = (
                f"ranks run different units. This rank, {self._rank}, and the first that differs, in their last "
                f"collectives:\n  rank {self._rank}: {_text(mine)}\n  rank {others[0]}: {_text(rows[others[0]])}\n"
                f"{SAME_ORDER}. (This is compared in the first passes: FLATSHARD_ORDER_CHECK=first, always or off.)"
            )
            raise OutOfStepError(issued.verb, issued.unit, self._rank, len(rows), text)


def _text(row: bytes) -> str:
    return row[_HASH:].rstrip(b"\0").decode(errors="replace")


def begin_pass(runtime: Runtime, unit: str, passes: int) -> None:
    """Check the order in what follows, or stop checking. ``passes``: from outermost ``unit``, with this one."""
    progress = runtime.progress
    if progress is None:
        return
    mode = _config.order_check()
    if mode == "off" or (mode == "first" and passes > _config.CHECKED_PASSES):
        progress.check = None
        return
    check = progress.check
    if not isinstance(check, OrderCheck):
        check = progress.check = OrderCheck(runtime)
    check.begin(f"pass {passes} of {unit}")
