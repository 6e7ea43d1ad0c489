"""The order of streams and events on an accelerator, with a recorder in the place of the device.

No GPU is needed to see who waits for whom: the runtime asks its device module for streams and events, and here that
module writes down what it is asked. What the collectives themselves would do is in the text by their trace events.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from event_lines import as_text
from expecttest import assert_expected_inline
from torch import nn

import flatshard
from flatshard import _runtime, _trace
from flatshard._composable.state import unit_of


class Recorder:
    """What ``torch.cuda`` is to the runtime: streams whose calls become lines."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.compute = Stream(self, "compute")
        self.current = self.compute
        self.names = iter(("gather", "reduce"))
        self.events = 0

    def Stream(self, device: torch.device, priority: int = 0) -> "Stream":
        return Stream(self, next(self.names))

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    def __init__(self, device: Recorder, name: str) -> None:
        self.device = device
        self.name = name

    def record_event(self) -> str:
        self.device.events += 1
        event = f"e{self.device.events}"
        self.device.lines.append(f"{event} = {self.name}")
        return event

    def wait_event(self, event: str) -> None:
        self.device.lines.append(f"{self.name} waits for {event}")

    def wait_stream(self, stream: "Stream") -> None:
        self.device.lines.append(f"{self.name} waits for {stream.name}")


def order_of_streams(ctx: Any) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    flatshard.fully_shard(model, policy={nn.Linear}, process_group=ctx.group)
    runtime = unit_of(model[0]).context.runtime
    model(torch.randn(2, 4)).sum().backward()  # the first pass knows no order to prefetch by
    lines: list[str] = []
    runtime.streams = _runtime.Streams(Recorder(lines), runtime.device)
    try:
        _trace.sinks.append(lines.append)
        loss = model(torch.randn(2, 4)).sum()
        in_forward = len(lines)
        loss.backward()
    finally:
        _trace.sinks.remove(lines.append)
        runtime.streams = None
    return as_text([["forward", *lines[:in_forward]], ["backward", *lines[in_forward:]]])


def test_devices_without_streams_are_refused(monkeypatch):
    class OnlyRuns(types.ModuleType):
        Stream, stream, current_stream = object, None, None

    monkeypatch.setattr(torch, "get_device_module", lambda device: OnlyRuns("torch.mps"))
    message = r"parameters are on 'mps', .*: it lacks Stream.wait_stream, Stream.wait_event, Stream.record_event"
    with pytest.raises(NotImplementedError, match=message):
        _runtime.Streams.of(torch.device("mps"))
    assert _runtime.Streams.of(torch.device("cpu")) is None


def test_order_of_streams(pool):
    first, second = pool.run(order_of_streams, world_size=2)
    assert first == second
    assert_expected_inline(
        first,
        """\
forward                   backward
all-gather 0              all-gather 1
gather waits for compute  gather waits for compute
e1 = gather               e3 = gather
compute waits for e1      compute waits for e3
all-gather 1              all-gather 0
gather waits for compute  gather waits for compute
e2 = gather               e4 = gather
reshard 0                 reshard 1
gather waits for compute  gather waits for compute
compute waits for e2      reduce-scatter 1
reshard 1                 reduce waits for compute
gather waits for compute  e5 = reduce
compute waits for gather  compute waits for e4
                          compute waits for e5
                          reshard 0
                          gather waits for compute
                          reduce-scatter 0
                          reduce waits for compute
                          e6 = reduce
                          compute waits for e6
                          compute waits for reduce
                          compute waits for gather""",
    )
