"""Devices on which flatshard cannot order its work."""

import gc
import types

import pytest
import torch

from flatshard._comm.streams import Streams


def test_devices_without_streams_are_refused(monkeypatch):
    class OnlyRuns(types.ModuleType):
        Stream, stream, current_stream = object, None, None

    monkeypatch.setattr(torch, "get_device_module", lambda device: OnlyRuns("torch.mps"))
    message = r"parameters are on 'mps', .*: it lacks Stream.wait_stream, Stream.wait_event, Stream.record_event"
    with pytest.raises(NotImplementedError, match=message):
        Streams.of(torch.device("mps"))
    assert Streams.of(torch.device("cpu")) is None


def test_side_streams_outlive_models(monkeypatch):
    """An allocator keeps freed memory for its stream, so streams of a later model would leave it unused."""
    made = []

    class Stream:
        def __init__(self, **options):
            made.append(self)

        wait_stream = wait_event = record_event = None

    class Device(types.ModuleType):
        stream = current_stream = None

    monkeypatch.setattr(Device, "Stream", Stream, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Device("torch.test"))
    monkeypatch.setattr(Streams, "_made", {})
    for _ in range(2):
        Streams.of(torch.device("mps"))
        gc.collect()
    assert len(made) == 2, "one for gathers and one for reductions"
