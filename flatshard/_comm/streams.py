"""Side streams of an accelerator, events on them, and who may free memory that several streams use.

[Note: Memory follows the streams]
flatshard does not use ``record_stream``, so peak memory is deterministic. Memory belongs to the stream that it was
allocated on, and the allocator returns it to that stream, whichever is current. The user may compute on several streams
(two towers, a loss on a stream of its own), and autograd computes the backward of each operation on the stream of its
forward. So one rule is kept: **whoever frees memory has made its stream wait for all who used it.**

- *Unsharded parameters*, and what is kept of them for backward, belong to the gather stream. It waits for the current
  stream before each all-gather (for whatever wrote the shards: an optimizer step, ``p.data = ...``). Every stream that
  computes with a unit waits for its all-gather. When the unit is freed, the gather stream waits for all of them
  (:class:`Users`).
- *Gradients of a unit* belong to the one stream on which autograd accumulates them (``UnitGradients.stream``). So do the
  reduction's input and its output, which becomes ``.grad``. The input is complete before the reduce stream is entered. It is
  freed after that stream has waited for the reduction. At the end of backward the caller's stream waits for all of them
  (``join``).
- Any other tensor that a side stream reads is held by the :class:`StreamEvent` until the wait (``holding``).

[Note: Memory of the host]
Under CPU offload, copies between host and device are asynchronous too, and streams do not order code on the CPU. So the
host waits twice per step. At the end of the outermost forward it waits until the shards have been read, because the user may
change them now. At the end of backward it waits until the gradients have arrived. ``reads_host`` records the first event.

[Note: CUDA graphs]
A stream under capture must not wait for events from outside the capture, and streams that it forked must have joined it
at the end. So no event is kept longer than needed: a wait is issued as soon as there is a reason for it. The side streams
join the current stream when a pass or a backward ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from flatshard._comm.collectives import Pending


class StreamEvent:
    """A collective on a side stream of an accelerator. ``wait`` makes the current stream wait for it."""

    __slots__ = ("_event", "_held", "_streams")

    def __init__(self, streams: Streams, event: Any) -> None:
        self._streams = streams
        self._event = event
        self._held: tuple[object, ...] = ()

    def hold(self, value: object) -> None:
        """Keep ``value`` (a tensor, or an object that holds tensors) alive until the wait."""
        self._held += (value,)

    def wait(self) -> None:
        self._streams.current.wait_event(self._event)
        self._held = ()

    def wait_on_host(self) -> None:
        """Block the host until the event has completed, so that code on the CPU can read the result."""
        if not self._event.query():
            self._event.synchronize()
        self._held = ()


def holding(pending: Pending, value: object) -> Pending:
    """Return ``pending``, which keeps ``value`` alive if a side stream reads it. [Note: Memory follows the streams]"""
    if isinstance(pending, StreamEvent):
        pending.hold(value)
    return pending


def wait_on_host(pending: Pending) -> None:
    """Wait until code on the CPU can read the result of ``pending``."""
    if isinstance(pending, StreamEvent):
        pending.wait_on_host()
    else:
        pending.wait()


_NEEDED = "current_stream", "stream", "Stream", "Stream.wait_stream", "Stream.wait_event", "Stream.record_event"
"""Attributes that a device module must have."""


def _has(module: Any, name: str) -> bool:
    owner, _, method = name.rpartition(".")
    return hasattr(getattr(module, owner, None) if owner else module, method)


class Streams:
    """The side streams of one accelerator, for all process groups. [Note: Memory follows the streams]

    They live as long as the process: an allocator keeps freed memory for its stream, so a later model would not get it on
    other streams.
    """

    _made: ClassVar[dict[torch.device, Streams]] = {}

    def __init__(self, module: Any, device: torch.device) -> None:
        """``module``: the device module, such as ``torch.cuda`` or ``torch.xpu``."""
        self._module = module
        self._index = device.index  # cheaper than a device
        self.gather = module.Stream(device=device, priority=-1)
        self.reduce = module.Stream(device=device, priority=-1)
        self._forked: set[Any] = set()  # the side streams that have waited for another stream since the last join
        # Completes when the shards on the host have been read: [Note: Memory of the host]
        self.host_read: StreamEvent | None = None

    @classmethod
    def of(cls, device: torch.device) -> Streams | None:
        """Return the side streams of ``device``, or None on CPU, where waiting for a collective blocks.

        Raises:
            NotImplementedError: the device has no streams.
        """
        if device.type == "cpu":
            return None
        module = torch.get_device_module(device)
        missing = [name for name in _NEEDED if not _has(module, name)]
        if missing:
            raise NotImplementedError(
                f"fully_shard: parameters are on {str(device)!r}, and torch.{device.type} has no streams to run collectives "
                f"on: it lacks {', '.join(missing)}. Move the module to the CPU or to another accelerator first"
            )
        if (found := cls._made.get(device)) is None:
            found = cls._made[device] = cls(module, device)
        return found

    @property
    def current(self) -> Any:
        """The device's current stream, which the caller enqueues on."""
        return self._module.current_stream(self._index)

    def record(self) -> StreamEvent:
        """Record an event on the current stream."""
        return StreamEvent(self, self.current.record_event())

    @contextlib.contextmanager
    def running_on(self, side: Any) -> Iterator[None]:
        """Make ``side`` the current stream inside the context, after it has waited for the current one."""
        self.fork(side, self.current)
        with self._module.stream(side):
            yield

    def fork(self, side: Any, current: Any) -> None:
        """Make ``side`` wait for the work that is on the current stream now."""
        side.wait_stream(current)
        self._forked.add(side)

    @contextlib.contextmanager
    def on(self, stream: Any, current: Any = None) -> Iterator[None]:
        """Make ``stream``, one of the user's, the current stream inside the context. Nothing waits before ``join``.

        ``current``: the current stream, if the caller has asked for it.
        """
        if stream == (self.current if current is None else current):
            yield
            return
        self._forked.add(stream)
        with self._module.stream(stream):
            yield

    def let_wait(self, waiting: Any, stream: Any) -> None:
        """Make ``waiting`` wait for the work that is on ``stream`` now. Both may be the user's. [Note: CUDA graphs]"""
        if waiting != stream and (self.is_captured(stream) or not self.is_captured(waiting)):
            waiting.wait_stream(stream)

    def is_captured(self, stream: Any) -> bool:
        """Return whether ``stream`` is being captured into a CUDA graph. Work from before the capture has ended."""
        is_capturing: Callable[[], bool] | None = getattr(self._module, "is_current_stream_capturing", None)
        if is_capturing is None:
            return False
        with self._module.stream(stream):
            return is_capturing()

    def exclude_from_join(self, side: Any) -> None:
        """Have ``join`` not wait for ``side``, until it forks again or is included."""
        self._forked.discard(side)

    def include_in_join(self, side: Any) -> None:
        """Have the next ``join`` wait for ``side``."""
        self._forked.add(side)

    def join(self) -> None:
        """Make the current stream wait for all forked side streams. [Note: CUDA graphs]"""
        while self._forked:
            if (stream := self._forked.pop()) != self.current:
                self.current.wait_stream(stream)


class Users:
    """The streams that compute with memory of the gather stream. [Note: Memory follows the streams]"""

    __slots__ = ("_all_gathers", "_before", "_known", "_streams")

    def __init__(self, streams: Streams, gathers: Sequence[Pending], before: Users | None = None) -> None:
        """
        Args:
            streams: of the device.
            gathers: the collectives that write the memory. The current stream waits for them.
            before: the users of the same memory before these gathers, if it was lent to them.
        """
        self._streams = streams
        self._all_gathers = tuple(gathers)
        self._known = [streams.current]
        self._before: list[Any] = [] if before is None else [*before._before, *before._known]

    def add_current(self) -> None:
        """Make the current stream, which is about to use the memory, wait for the gathers unless it has."""
        streams, current = self._streams, self._streams.current
        if current not in self._known:
            if streams.is_captured(current):  # the gathers may be from before the capture
                streams.let_wait(current, self._known[0])
            else:
                for gather in self._all_gathers:
                    gather.wait()
            self._known.append(current)

    def end(self, current: Any) -> None:
        """Make the gather stream wait for all of them but the current stream, for which it waits in any case."""
        streams = self._streams
        for stream in dict.fromkeys([*self._before, *self._known]):
            if stream != current:
                streams.let_wait(streams.gather, stream)
