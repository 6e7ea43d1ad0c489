"""A rank's side: the changes in its shards, for each receiver that has asked.

[Note: Versions]
All ranks publish at the same point of training, and each counts. So a version is one state of the full model, though no rank
waits for another, and updates of ranks arrive separately. A run is the life of these senders; they agree on its name when
they are made. So versions of a run that has died mean nothing in the next one.

[Note: History]
A rank keeps its values of the last version, in the dtype that is sent, and the messages of past versions up to
``history_bytes``, until all receivers have confirmed them. A receiver that lacks messages gets these, or, if they are gone,
cells of the last version. Receivers with one layout share a channel: their changes are computed once.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flatshard._base.errors import name_list
from flatshard._base.names import plain_name
from flatshard._comm.process_groups import default_group, membership
from flatshard._handle.tensors.sharded_parameter import shard_info
from flatshard.checkpoint._barrier import Barrier
from flatshard.checkpoint._sharded_value import part_of
from flatshard.weights import _cells, _codec
from flatshard.weights._messages import Bytes, channel_of, message_of, read_message, wrong
from flatshard.weights._sent import SentParams, full_part

Name = str | int
"""The name of a receiver."""

_MESSAGE = 2**20  # bytes: a message is at most as long, or one cell
_PATIENCE = timedelta(minutes=5)


@dataclass
class _Follower:
    """A receiver of one channel."""

    life: str  # another one after a restart
    version: int = -1  # the version that it has confirmed, or -1


class _Sending:
    """The messages for receivers with one layout. [Note: History]"""

    def __init__(self, cells: list[_cells.OwnCell], asked: list[_cells.Asked], version: int) -> None:
        self.cells, self.asked = cells, asked
        self.start = version  # messages of later versions are in `kept`
        self.kept: dict[int, list[bytes]] = {}  # by version, ascending
        self.nbytes = 0  # of the kept messages
        self.receivers: dict[Name, _Follower] = {}

    def keep(self, version: int, message: bytes) -> None:
        if version > self.start:  # else those before it are gone
            self.kept.setdefault(version, []).append(message)
            self.nbytes += len(message)

    def forget(self, version: int) -> None:
        """Drop the messages of versions up to this one."""
        self.start = max(self.start, version)
        for old in [v for v in self.kept if v <= version]:
            self.nbytes -= sum(map(len, self.kept.pop(old)))


class Sender:
    """Sends the changes in this rank's shards to receivers, such as inference engines. Each rank has one.

    No rank gathers anything, and none waits for another rank or for a receiver. Beside the model a rank holds a copy of its
    values in ``dtype``, and ``history_bytes``.

    Example::

        sent = []
        sender = flatshard.weights.Sender(model, lambda receiver, message: sent.append(message), dtype=torch.bfloat16)
        optimizer.step()
        assert sender.publish() == 1  # and in the loop of messages: sender.receive(message)

    Args:
        module: a sharded module, or a module with sharded ones inside.
        send: called with a receiver's name and a message for it, ``bytes`` to transport by any means. Messages may be lost,
            doubled and late. It must not call the sender.
        dtype: the dtype in which floating-point parameters are sent. Default: their compute dtype.
        version: the version of the present values. Ranks must agree.
        history_bytes: the limit on kept messages, for receivers that have lost some: they get full cells in place of
            messages that are gone. Without history, a receiver to which cells take longer than the time between versions
            never has a complete version. Default: twice the rank's shards less the copy: half of the shards if float32 is
            sent as bfloat16, nothing if parameters are sent in their own dtype.
        process_group: the ranks over which ``module`` is sharded. Default: all. Each must make a sender.

    Raises:
        ValueError: nothing in ``module`` is sharded, or ``dtype`` is no floating-point dtype.
        RuntimeError: called inside a forward or ``summon_full_params``.
        RankError: a rank did not come, or came with other arguments.
    """

    version: int
    """The version that was published last."""
    run: str
    """The name of these senders: another one after a restart."""
    damaged: int
    """The number of messages that arrived damaged. They count as lost."""

    def __init__(
        self,
        module: nn.Module,
        send: Callable[[Name, bytes], object],
        *,
        dtype: torch.dtype | None = None,
        version: int = 0,
        history_bytes: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._values = SentParams(module, dtype=dtype)
        self._module, self._send, self.version, self.damaged = module, send, version, 0
        held = sum(flat.nbytes for flat in self._values.now("Sender"))
        self._most = max(0, held - self._values.nbytes) if history_bytes is None else history_bytes
        self._channels: dict[str, _Sending] = {}
        self._lock = threading.Lock()
        group = default_group() if process_group is None else process_group
        self._rank, size, store = membership(group)
        what = f"flatshard.weights.Sender(dtype={dtype}, version={version})"
        with Barrier(store, self._rank, range(size), what, _PATIENCE.total_seconds()) as ranks:
            self.run, self._ranks = ranks.share(lambda: bool(self._values.layout), _agree)

    @property
    def versions(self) -> dict[Name, int | None]:
        """The version that each receiver of this rank has confirmed in this run, or None if it has none."""
        with self._lock:
            found = {n: each.version for channel in self._channels.values() for n, each in channel.receivers.items()}
        return {name: None if version < 0 else version for name, version in found.items()}

    @property
    def history_nbytes(self) -> int:
        """The bytes of past messages that are kept now."""
        return sum(channel.nbytes for channel in self._channels.values())

    def publish(self) -> int:
        """Make the present values the next version, and send the changes. All ranks must call it.

        Only ``send`` communicates, and no rank waits. If ``send`` raises, the version is complete all the same: receivers ask
        for missing messages. The first error is raised at the end.

        Returns:
            The number of the version.

        Raises:
            RuntimeError: called inside a forward or ``summon_full_params``; or parameters have been sharded anew.
        """
        with self._lock, torch.no_grad():
            flats = self._values.now("Sender.publish")
            version, failed = self.version + 1, list[Exception]()  # the first error
            unfinished = list(self._channels)
            try:
                for name, channel in self._channels.items():
                    for message in self._updates(name, channel, flats, version):
                        self._keep(channel, version, message)
                        for receiver in channel.receivers:
                            failed += self._try(receiver, message)[len(failed) :]
                    unfinished.remove(name)
            finally:  # whatever has failed: a part of this version may be with a receiver
                for name in unfinished:
                    self._channels[name].forget(version)
                for flat, copy in zip(flats, self._values.copies, strict=True):
                    copy.copy_(flat)
                self.version = version
        if failed:
            raise failed.pop()  # its traceback refers to this frame
        return version

    def receive(self, message: Bytes) -> None:
        """Take a message of a receiver, in any order and however often, and answer by ``send``. Any thread may call it.

        Raises:
            ValueError: it is no message of a receiver.
        """
        found = read_message(message, "Sender.receive")
        if found is None:
            self.damaged += 1
            return
        state = found.header
        if state["kind"] != "state":
            raise ValueError("Sender.receive got what a sender has sent: give it to Receiver.receive")
        with self._lock, torch.no_grad():
            answers = list(self._answers(state))
            failed: list[Exception] = []
            for answer in answers:
                failed += self._try(state["name"], answer)[len(failed) :]
        if failed:
            raise failed.pop()  # its traceback refers to this frame

    def forget(self, name: Name) -> None:
        """Stop sending to this receiver, and drop its messages. It comes back when it asks again."""
        with self._lock:
            self._leave(name)

    # -- receivers -----------------------------------------------------------------------------------------------------

    def _answers(self, state: dict[str, Any]) -> Iterator[bytes]:
        name, number, nonce = state["name"], state["channel"], state["nonce"]
        bases = None
        if "layout" in state:
            yield self._plan(name, number, state["layout"], nonce)
        elif (follower := self._follower(state)) is None:
            yield message_of({"kind": "hello", **self._head(number), "nonce": nonce})
            return
        else:
            bases, channel = state["bases"], self._channels[number]
            follower.version = max(follower.version, state["applied"])
            channel.forget(min(each.version for each in channel.receivers.values()))
        if (
            state["asks"] and number in self._channels and name in self._channels[number].receivers
        ):  # else it gets nothing
            yield from self._lacking(number, bases, state["held"])

    def _follower(self, state: dict[str, Any]) -> _Follower | None:
        """Return the receiver that sent ``state``, or None if it must begin anew: of another run, channel or life."""
        channel = self._channels.get(state["channel"])
        follower = None if channel is None else channel.receivers.get(state["name"])
        if follower is None or channel is None or (state["run"], state["nonce"][0]) != (self.run, follower.life):
            return None
        has_them = len(state["bases"]) == len(channel.cells) and max(*state["bases"], state["applied"]) <= self.version
        return follower if has_them else None

    def _head(self, channel: str) -> dict[str, Any]:
        return {"run": self.run, "channel": channel, "source": self._rank}

    def _plan(self, name: Name, number: str, layout: list[Any] | None, nonce: list[Any]) -> bytes:
        """Return the message that lists what this receiver gets from this rank."""
        if number != channel_of(layout):
            raise wrong("Sender.receive", f"channel {number!r} is not of its layout")
        have = self._parameters()
        asked = [have[name] for name in self._first_names()] if layout is None else [_asked(each) for each in layout]
        head = {"kind": "plan", **self._head(number), "nonce": nonce, "ranks": self._ranks}
        if (why := _why_not(asked, have)) is not None:
            return message_of({**head, "refused": why})
        channel = self._channels.get(number)
        if channel is None:
            channel = _Sending(_cells.own_cells(self._values.layout, asked, _cells.CELL), asked, self.version)
        self._leave(name, unless=number)
        if channel.cells:
            self._channels[number] = channel
            follower = channel.receivers.setdefault(name, _Follower(nonce[0]))
            follower.life, follower.version = nonce[0], -1
        cells_of = [[own.region for own in cell] for cell in channel.cells]
        names = "" if all(each.name in have for each in asked) else name_list(have)
        return message_of({**head, "asked": asked, "cells": cells_of, "names": names})

    def _leave(self, name: Name, unless: str | None = None) -> None:
        for number, channel in list(self._channels.items()):
            if number != unless:
                channel.receivers.pop(name, None)
                if not channel.receivers:
                    del self._channels[number]

    def _first_names(self) -> list[str]:
        return [plain_name(name) for name, _ in self._module.named_parameters()]

    def _parameters(self) -> dict[str, _cells.Asked]:
        """Return all parameters of the module, under each of their names."""
        dtypes = {
            name: _cells.dtype_name(copy.dtype)
            for parts, copy in zip(self._values.layout, self._values.copies, strict=True)
            for placed in parts
            for name in placed.names
        }
        found = {}
        for full_name, param in self._module.named_parameters(remove_duplicate=False):
            info, name = shard_info(param), plain_name(full_name)
            shape = (full_part(param) if info is None else part_of(info)).shape
            found[name] = _cells.Asked(name, (0,) * len(shape), shape, dtypes.get(name, ""))  # "": it is on other ranks
        return found

    # -- messages ------------------------------------------------------------------------------------------------------

    def _updates(self, number: str, channel: _Sending, flats: Sequence[torch.Tensor], version: int) -> Iterator[bytes]:
        """Yield the messages of a version, at least one. The last one says so."""

        def found() -> Iterator[bytes]:
            for at, cell in enumerate(channel.cells):
                copy = self._values.copies[cell[0].flat]
                now, before = (_cells.read(cell, flat, copy.dtype) for flat in (flats[cell[0].flat], copy))
                yield from _codec.encode_changes(at, now, before)

        head = {"kind": "update", **self._head(number), "version": version}
        for index, (payload, is_last) in enumerate(_batches(found())):
            yield message_of({**head, "index": index, "last": is_last}, payload)

    def _lacking(self, number: str, bases: list[int] | None, held: dict[str, list[int]]) -> Iterator[bytes]:
        """Yield the messages that a receiver lacks.

        ``bases``: its version of each cell, or -1. ``held``: its messages, by version.
        """
        channel = self._channels[number]
        bases = [-1] * len(channel.cells) if bases is None else bases
        old = [cell for cell, base in enumerate(bases) if base < channel.start]
        if len(old) < len(bases):
            first = min(base for base in bases if base >= channel.start)
            for version, messages in channel.kept.items():
                if version > first:
                    have = held.get(str(version), ())
                    yield from (message for index, message in enumerate(messages) if index not in have)
        full_cells = (_codec.full_section(cell, self._read(channel.cells[cell])) for cell in old)
        if old:
            head = {"kind": "cells", **self._head(number), "version": self.version}
            for payload, _ in _batches(full_cells):
                yield message_of(head, payload)

    def _read(self, cell: _cells.OwnCell) -> torch.Tensor:
        copy = self._values.copies[cell[0].flat]
        return _cells.read(cell, copy, copy.dtype)

    def _try(self, receiver: Name, message: bytes) -> list[Exception]:
        """Send a message. Return the error, if there is one."""
        try:
            self._send(receiver, message)
        except Exception as e:
            return [e]
        return []

    def _keep(self, channel: _Sending, version: int, message: bytes) -> None:
        """Keep a message. Drop the oldest ones beyond the limit."""
        channel.keep(version, message)
        while self.history_nbytes > self._most:
            oldest = min((c for c in self._channels.values() if c.kept), key=lambda c: min(c.kept))
            oldest.forget(min(oldest.kept))


def _agree(has_values: list[bool]) -> list[tuple[str, list[int]]]:
    """Return the name of the run, and the ranks that have values to send."""
    run = uuid.uuid4().hex[:12]
    return [(run, [rank for rank, has in enumerate(has_values) if has])] * len(has_values)


def _asked(given: Sequence[Any]) -> _cells.Asked:
    name, start, shape, dtype = given
    if len(start) != len(shape) or min(shape, default=0) < 0:
        raise wrong("Sender.receive", f"of {name!r} shape {shape} from {start} on")
    return _cells.Asked(name, tuple(start), tuple(shape), dtype)


def _why_not(asked: Iterable[_cells.Asked], have: dict[str, _cells.Asked]) -> str | None:
    """Return why a receiver cannot have ``asked``, or None. Other ranks may have parameters that this one lacks."""
    for each in asked:
        full = have.get(each.name)
        if full is None:
            continue
        ends = tuple(a + n for a, n in zip(each.start, each.shape, strict=True))
        fits = len(each.shape) == len(full.shape) and all(
            start >= 0 and end <= n for start, end, n in zip(each.start, ends, full.shape, strict=True)
        )
        if not fits:
            return (
                f"{each.name!r} has shape {full.shape} at the sender, and elements {each.start} to {ends} are asked for: "
                "a target's tensor has the shape of the region, and start says where that begins"
            )
        if full.dtype not in ("", each.dtype):
            return (
                f"{each.name!r} is sent in {full.dtype}, and the receiver's tensor is {each.dtype}: give "
                f"Sender(..., dtype=torch.{each.dtype}), or the receiver a tensor of {full.dtype}"
            )
    return None


def _batches(sections: Iterable[bytes]) -> Iterator[tuple[list[bytes], bool]]:
    """Yield the sections of each message, at least one, and whether it is the last."""
    batch, size = list[bytes](), 0
    for section in sections:
        if batch and size + len(section) > _MESSAGE:
            yield batch, False
            batch, size = [], 0
        batch.append(section)
        size += len(section)
    yield batch, True
