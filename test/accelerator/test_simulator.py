"""The simulator itself: the work that it delays, and its reports."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerator.harness import POLICIES
from pool import Context, Pool
from torch import Tensor

SIZE = 256  # a block of the allocator, so that the next tensor of this size reuses the last one's memory


def _new(value: float = 1.0) -> Tensor:
    return torch.full((SIZE,), value, device="simdev")


def _across(waits: str = "", then: str = "", joins: str = "last") -> Callable[[Any, Any], Tensor]:
    """Return a program that reads a tensor on another stream.

    ``waits``: the other stream waits for nothing, an early event, or this stream. ``then`` happens to the tensor after
    that. ``joins``: when this stream waits for the other.
    """

    def program(device: Any, side: Any) -> Tensor:
        here = device.current_stream()
        event = here.record_event()
        a = _new()
        if waits:
            side.wait_event(event) if waits == "event" else side.wait_stream(here)
        with device.stream(side):
            b = a * 2
        if joins == "first":
            here.wait_stream(side)
        if then == "recorded":
            a.record_stream(side)
        if then == "written":
            a.fill_(7.0)
        elif then:
            del a
            _new(7.0)
        if joins == "last":
            here.wait_stream(side)
        return b

    return program


def _pinned_read_early(device: Any, side: Any) -> Tensor:
    host = torch.empty(SIZE, pin_memory=True)
    host.copy_(_new(2.0), non_blocking=True)
    return host + 0


def _pinned_read_in_time(device: Any, side: Any) -> Tensor:
    host = torch.empty(SIZE, pin_memory=True)
    host.copy_(_new(2.0), non_blocking=True)
    device.current_stream().record_event().synchronize()
    return host + 0


def _pinned_changed_early(device: Any, side: Any) -> Tensor:
    host = torch.full((SIZE,), 2.0).pin_memory()
    b = host.to("simdev", non_blocking=True)
    host.fill_(7.0)
    return b


UNORDERED = "no order between two streams"
HOST = "the host does not wait for the device"
PROGRAMS: dict[str, tuple[Callable[[Any, Any], Tensor], str]] = {
    "missing_wait": (_across(joins=""), UNORDERED),
    "event_too_early": (_across("event", joins=""), UNORDERED),
    "written_while_read": (_across("stream", "written"), UNORDERED),
    "freed_too_early": (_across("stream", "freed"), "memory freed while another stream may use it"),
    "pinned_read_early": (_pinned_read_early, HOST),
    "pinned_changed_early": (_pinned_changed_early, HOST),
    "right_wait": (_across("stream"), ""),
    "recorded_stream": (_across("stream", "recorded"), ""),
    "freed_after_wait": (_across("stream", "freed", joins="first"), ""),
    "pinned_read_in_time": (_pinned_read_in_time, ""),
}


def run_program(ctx: Context, name: str) -> tuple[set[str], set[bool]]:
    """Return the kinds of reported races, and whether numbers were right, over all policies."""
    from accelerator.sim import HostWatch, sim

    device = torch.get_device_module("simdev")
    kinds, right = set(), set()
    for policy in POLICIES:
        sim.reset()
        sim.policy = policy
        with HostWatch():
            b = PROGRAMS[name][0](device, device.Stream())
        kinds |= {race.what for race in sim.races.values()}
        device.synchronize()
        right.add(bool((b.cpu() == 2.0).all()))
    return kinds, right


@pytest.mark.parametrize("name", PROGRAMS)
def test_races(simulated_process: Pool, name: str) -> None:
    ((kinds, right),) = simulated_process.run(run_program, name, world_size=1)
    expected = PROGRAMS[name][1]
    assert kinds == ({expected} if expected else set())
    assert right == {True} if not expected else False in right, "a race shows in the numbers under some policy"
