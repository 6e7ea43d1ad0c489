"""Devices on which flatshard cannot order its work."""

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
