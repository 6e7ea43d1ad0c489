"""Streams, events and collectives that run nothing. They record what a rank issues, and model when it would run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from flatshard._comm.backends import BuiltinCollectives
from flatshard._comm.collectives import Done, Pending
from flatshard._comm.progress import here
from flatshard.planning._hardware import Bandwidths, Collective, Span


class RecordedStream:
    """Stands for a stream. The work enqueued so far is done at ``time``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.time = 0.0

    def wait_stream(self, other: RecordedStream | RecordedEvent) -> None:
        self._clock.wait(self, other.time)

    wait_event = wait_stream

    def record_event(self) -> RecordedEvent:
        return RecordedEvent(self._clock, self.time)


class RecordedEvent:
    """Stands for an event, or for a collective that the host waits for. It is done at ``time``."""

    def __init__(self, clock: Clock, time: float) -> None:
        self._clock = clock
        self.time = time

    def query(self) -> bool:
        return True  # the host's time is not modelled

    def synchronize(self) -> None: ...

    def wait(self) -> None:
        self._clock.wait(self._clock.main, self.time)


class Clock:
    """The streams of one rank, and the time of all work on them. [Note: The model of time]

    It has the functions of ``torch.cuda`` that ``Streams`` uses: ``Stream``, ``current_stream`` and ``stream``.
    """

    def __init__(self, hardware: Bandwidths, world_size: int) -> None:
        self.hardware = hardware
        self.world_size = world_size
        self.main = self.current = RecordedStream(self)
        self.on_issue: Callable[[], object] = lambda: None
        self._ends: dict[object, float] = {}  # the time at which the last collective ends, by group
        self.begin()

    def begin(self) -> None:
        """Begin a step at time 0, and forget what was recorded before."""
        self.phase, self.unit = "forward", ""
        self.collectives: list[Collective] = []
        self.spans: list[Span] = []
        self._start = self.main.time

    @property
    def now(self) -> float:
        """Seconds since the step began."""
        return self.main.time - self._start

    def Stream(self, device: torch.device, priority: int) -> RecordedStream:
        return RecordedStream(self)

    def current_stream(self, device: torch.device) -> RecordedStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def compute(self, flops: int) -> None:
        """Record ``flops`` floating-point operations on the current stream."""
        seconds = flops / (self.hardware.flops * self.hardware.efficiency)
        if seconds:
            self._add("compute", self.unit, self.current.time, self.current.time + seconds)
            self.current.time += seconds

    def wait(self, stream: RecordedStream, until: float) -> None:
        """Record that ``stream`` waits until a time."""
        if until > stream.time:
            if stream is self.main:
                self._add("wait", self.unit, stream.time, until)
            stream.time = until

    def issue(self, collective: Collective, group: object) -> Pending:
        """Record a collective of ``group`` on the current stream."""
        start = max(self.current.time, self._ends.get(group, 0.0))
        stop = self._ends[group] = start + self.hardware.seconds_of(collective, self.world_size)
        self.collectives.append(collective)
        self._add(collective.kind, collective.unit, start, stop)
        self.on_issue()
        if self.current is self.main:  # without side streams: the host waits
            return RecordedEvent(self, stop)
        self.current.time = stop
        return Done()

    def _add(self, kind: str, unit: str, start: float, stop: float) -> None:
        start, stop = start - self._start, stop - self._start
        span = Span(kind, unit or "<root>", self.phase, start, stop)
        last = self.spans[-1] if self.spans else span
        if kind == "compute" == last.kind and (last.unit, last.phase, last.stop) == (span.unit, span.phase, start):
            self.spans.pop()
            span = Span(kind, span.unit, span.phase, last.start, stop)
        self.spans.append(span)


class RecordingCollectives(BuiltinCollectives):
    """The collectives of one rank of a group that does not exist. They send nothing, and record each call."""

    out_of_place = True

    def __init__(self, clock: Clock, name: str, rank: int, size: int, widens: bool) -> None:
        """``name``: the group's name, see ``Collective``. ``widens``: see ``BuiltinCollectives``."""
        self._clock = clock
        self._name = name
        self.rank, self.size = rank, size
        self.widens = widens

    @property
    def group(self) -> Any:
        """Stands for the process group. Nothing calls its methods."""
        return self

    def _issue(self, kind: str, tensor: torch.Tensor, name: str) -> Pending:
        clock = self._clock
        return clock.issue(Collective(kind, here.label.unit, clock.phase, tensor.nbytes, self.size, name), self)

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        return self._issue("all-gather", output, self._name)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        if input.dtype is not output.dtype and self._clock.current is not self._clock.main:
            torch.empty_like(input)  # what ``DefaultCollectives`` receives into, and frees when the stream is done
        return self._issue("reduce-scatter", input, self._name)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self._issue("all-reduce", tensor, "replicas")

    def combine(self, numbers: torch.Tensor, op: Literal["sum", "max"]) -> Pending:
        """See :class:`BuiltinCollectives`."""
        return Done()
