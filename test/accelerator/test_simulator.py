"""The simulator itself: what it lets be late, what it reports, what it refuses."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerator.harness import POLICIES
from pool import Context, Pool, RankFailure
from torch import Tensor

SIZE = 256  # a block of the allocator, so that the next tensor of this size takes the last one's memory


def _new(value: float = 1.0) -> Tensor:
    return torch.full((SIZE,), value, device="simdev")


def _across(waits: str = "", then: str = "", joins: str = "last") -> Callable[[Any, Any], Tensor]:
    """A tensor is read on another stream, which waits for nothing, an early event, or this stream; what happens then."""

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
    """The kinds of races that were reported, and whether the numbers were right, under all policies."""
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


# -- captures --------------------------------------------------------------------------------------------------------


def _fork(device: Any, side: Any, a: Tensor, joins: bool = False) -> None:
    side.wait_stream(device.current_stream())
    with device.stream(side):
        a * 2
    if joins:
        device.current_stream().wait_stream(side)


CAPTURES: dict[str, tuple[Callable[[Any, Any, Tensor], Any], str]] = {
    "fork_and_join": (functools.partial(_fork, joins=True), ""),
    "fork": (_fork, "cudaErrorStreamCaptureUnjoined"),
    "past": (lambda device, side, a: device.current_stream().wait_stream(side), "cudaErrorStreamCaptureIsolation"),
    "default_stream": (
        lambda device, side, a: device.default_stream().wait_stream(device.current_stream()),
        "cudaErrorStreamCaptureImplicit",
    ),
    "host": (lambda device, side, a: a.sum().item(), "cudaErrorStreamCaptureUnsupported"),
}


def run_captures(ctx: Context) -> dict[str, str]:
    """The errors of what is run inside a capture, or nothing."""
    from accelerator.sim import CaptureError, sim

    device = torch.get_device_module("simdev")
    errors = {}
    for name, (body, _) in CAPTURES.items():
        sim.reset()
        a, errors[name] = _new(), ""
        with device.stream(device.Stream()):
            try:
                with sim.capture():
                    body(device, device.Stream(), a)
            except CaptureError as e:
                errors[name] = str(e).split(":")[0]
    return errors


def test_captures(simulated_process: Pool) -> None:
    expected = {name: error for name, (_, error) in CAPTURES.items()}
    assert simulated_process.run(run_captures, world_size=1) == [expected]


# -- collectives -----------------------------------------------------------------------------------------------------


def run_collectives(ctx: Context) -> None:
    """Under all policies, with ranks that come at different times."""
    from accelerator.sim import sim

    n, rank = ctx.world_size, ctx.rank
    for policy in POLICIES:
        sim.reset()
        sim.policy = policy
        mine = (torch.arange(4.0) + 10 * rank).to("simdev", non_blocking=True)
        every = torch.arange(4.0) + 10 * torch.arange(n).view(n, 1)
        gathered, part = torch.empty(4 * n, device="simdev"), torch.empty(4 // n, device="simdev")
        work = dist.all_gather_into_tensor(gathered, mine, group=ctx.group, async_op=True)
        total = mine.clone()
        dist.all_reduce(total, op=dist.ReduceOp.AVG, group=ctx.group)
        dist.reduce_scatter_tensor(part, mine, group=ctx.group)
        work.wait()
        assert torch.equal(gathered.cpu(), every.flatten())
        assert torch.equal(total.cpu(), every.mean(0))
        assert torch.equal(part.cpu(), every.sum(0).view(n, -1)[rank])
        sent, came = _new(float(rank)), _new()
        operations = [dist.P2POp(dist.isend, sent, (rank + 1) % n, ctx.group)]
        operations.append(dist.P2POp(dist.irecv, came, (rank - 1) % n, ctx.group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert (came.cpu() == (rank - 1) % n).all()
        sim.drain()
        assert not sim.races


@pytest.mark.parametrize("world_size", [2, 4])
def test_collectives(simulated_pool: Pool, world_size: int) -> None:
    simulated_pool.run(run_collectives, world_size=world_size)


def run_mismatch(ctx: Context) -> None:
    from accelerator.sim import sim

    try:
        dist.all_reduce(torch.ones(2 + ctx.rank, device="simdev"), group=ctx.group)
        sim.drain()
    finally:
        sim.abandon()


def test_mismatch(simulated_pool: Pool) -> None:
    """NCCL would hang, or mix the data."""
    with pytest.raises(RankFailure, match=r"all_reduce\(2 x float32\), rank 1 in all_reduce\(3 x float32\)"):
        simulated_pool.run(run_mismatch, world_size=2)
