"""Devices on which flatshard cannot order its work; its calls of streams in a step."""

import contextlib
import gc
import types
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch.testing._internal.distributed import fake_pg

import flatshard
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


CALLS = "current_stream", "stream", "Stream.wait_stream"


def count_calls(ctx: Any, blocks: int) -> Counter[str]:
    """Count calls of streams in a step of a model with so many units, on the simulated device."""
    from accelerator.harness import WIDTH, Block, Net, mean_square, sgd

    device, counts = torch.get_device_module("simdev"), Counter[str]()

    # Replace a function of the device module, or a method of its streams, by one that counts.
    def count_in(stack: contextlib.ExitStack, name: str) -> None:
        owner, _, method = name.rpartition(".")
        of = getattr(device, owner) if owner else device
        called = getattr(of, method)

        def count_and_call(*args: Any) -> Any:
            counts[name] += 1
            return called(*args)

        stack.enter_context(mock.patch.object(of, method, count_and_call))

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=4)
    try:
        model = flatshard.fully_shard(Net(blocks=blocks).to("simdev"), policy={Block})
        x, optimizer = torch.ones(2, WIDTH, device="simdev"), sgd(model.parameters())
        for number in range(3):
            with contextlib.ExitStack() as stack:
                for name in CALLS if number == 2 else ():
                    count_in(stack, name)
                mean_square(model(x)).backward()
                optimizer.step()
                optimizer.zero_grad()
        device.synchronize()
    finally:
        dist.destroy_process_group()
    return counts


def test_calls_of_streams_by_each_unit(simulated_process: Pool):
    """Each costs a microsecond of the host on a GPU, beyond the time on CPU."""
    few, many = (simulated_process.run(count_calls, blocks, world_size=1)[0] for blocks in (4, 6))
    assert {name: (many[name] - few[name]) / 2 for name in CALLS} == dict(zip(CALLS, (17, 3, 5), strict=True))
