"""What ``gpu.py`` measures by: a CUDA device, or the simulated accelerator of the tests. A CPU has only a clock.

The simulated device shows that the benchmark runs. It has no time and no kernels of its own: it runs each operator on CPU,
late. So what it counts are operators, and no figure of it is a result.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import suite
import torch

Run = Callable[[], object]

SPIN = "spin"
"""Part of the name of the kernel behind :meth:`Device.spin`."""
MEASURED = "measured"
"""What the part of a trace that counts is called."""


@dataclass(frozen=True)
class Counts:
    """Of one step."""

    kernels: int
    copies: int
    waits: int
    """How often the host waited for the device."""


class Device:
    """A device without anything but the host's clock: a CPU."""

    backend = "gloo"
    """Of a process group that moves something."""
    warm_up = 3
    """Steps until a contender is steady."""
    captures_apart = False
    """Whether a failed capture may leave the process unable to go on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def finish(self) -> None:
        """Wait until everything is over."""

    def recover(self) -> None:
        """After an error in the middle of a step."""

    def seconds(self, run: Run) -> float:
        """How long ``run`` takes."""
        return suite.seconds(run)

    def count(self, run: Run, trace: Path) -> Counts | None:
        """What ``run`` launches and waits for. ``trace``: where it may leave how it knows. None: nobody counts here."""
        return None

    def allocated(self) -> int:
        """Bytes."""
        return 0

    def peak(self, run: Run) -> int | None:
        """The most bytes that are allocated during ``run``."""
        return None

    def spin(self, cycles: int) -> None:
        """Keep the current stream busy for a while."""

    def overlap(self, run: Run, trace: Path) -> float | None:
        """How much of what spins during ``run`` other kernels run beside: 1 is all. None: nothing spins."""
        return None

    def captured(self, run: Run) -> Run | None:
        """Warm up, and run it once as a graph. Returns what runs the graph again, if anything does.

        Raises:
            Exception: it cannot be captured.
        """
        raise NotImplementedError(f"{self.device} has no graphs")


class Accelerator(Device):
    """What all accelerators have, by :func:`torch.get_device_module`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.module: Any = torch.get_device_module(device)
        self.module.set_device(device)

    def finish(self) -> None:
        self.module.synchronize()

    def allocated(self) -> int:
        return int(self.module.memory_allocated())

    def peak(self, run: Run) -> int | None:
        self.finish()
        self.module.reset_peak_memory_stats()
        run()
        self.finish()
        return int(self.module.max_memory_allocated())

    def captured(self, run: Run) -> Run | None:
        side = self.module.Stream()  # as torch.cuda.graph's documentation says
        side.wait_stream(self.module.current_stream())
        with self.module.stream(side):
            for _ in range(self.warm_up):
                run()
        self.module.current_stream().wait_stream(side)
        self.finish()
        replay = self._capture(run)
        self.finish()
        return replay

    def _capture(self, run: Run) -> Run | None:
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------------------------------
# CUDA
# ---------------------------------------------------------------------------------------------------------------------


class Cuda(Accelerator):
    """The first GPU. What it counts is read from the trace of ``torch.profiler``."""

    backend = "nccl"
    captures_apart = True

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 0))

    def seconds(self, run: Run) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def count(self, run: Run, trace: Path) -> Counts | None:
        events = traced(run, trace)
        kinds = launched(events)
        return Counts(kinds["kernels"], kinds["copies"], waits(events))

    def spin(self, cycles: int) -> None:
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    def overlap(self, run: Run, trace: Path) -> float | None:
        return hidden(traced(run, trace))

    def _capture(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        return graph.replay


def traced(run: Run, path: Path) -> list[dict[str, Any]]:
    """The events of ``run`` as torch's profiler exports them to ``path``, for a browser's trace viewer."""
    from torch.profiler import ProfilerActivity, profile, record_function

    activities, finish = [ProfilerActivity.CPU], Device(torch.device("cpu")).finish
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        finish = torch.cuda.synchronize
    finish()
    with profile(activities=activities) as found:
        with record_function(MEASURED):
            run()
        finish()
    path.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(path))
    return list(json.loads(path.read_text())["traceEvents"])


def launched(events: Sequence[dict[str, Any]]) -> Counter[str]:
    """How many kernels, and how many copies, a trace has."""
    kinds = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "copies"}
    return Counter(kinds[e["cat"]] for e in events if e.get("ph") == "X" and e.get("cat") in kinds)


def waits(events: Sequence[dict[str, Any]]) -> int:
    """How often the host waited for the device in the measured part of a trace, on whichever thread.

    ``torch.cuda.set_sync_debug_mode`` would not tell of events that the host waits for.
    """
    (whole,) = (e for e in events if e.get("name") == MEASURED and e.get("cat") == "user_annotation")
    start, stop = whole["ts"], whole["ts"] + whole["dur"]
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and start <= e["ts"] <= stop]
    return sum("Synchronize" in e["name"] or e["name"] in ("cudaMemcpy", "cudaMemset") for e in calls)


def hidden(events: Sequence[dict[str, Any]]) -> float | None:
    """The share of the spinning kernels' time in which another kernel ran; None if there is none."""
    kernels = [
        (e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if e.get("cat") == "kernel"
    ]
    slow = [(start, stop) for name, start, stop in kernels if SPIN in name]
    busy = sorted((start, stop) for name, start, stop in kernels if SPIN not in name)
    if not slow:
        return None
    covered = 0.0
    for start, stop in slow:
        reached = start  # others may overlap each other: no moment counts twice
        for from_, to in busy:
            low, high = max(from_, reached), min(to, stop)
            if high > low:
                covered += high - low
                reached = high
    return covered / sum(stop - start for start, stop in slow)


# ---------------------------------------------------------------------------------------------------------------------
# Simulated
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """A kernel that a stream was given, with what is known to be over when it starts."""

    name: str
    stream: Any
    number: int
    """Among what its stream was given."""
    over: dict[Any, int]
    """How much of each stream."""

    def may_run_beside(self, other: Launch) -> bool:
        """Whether nothing orders the two."""
        return self.over.get(other.stream, 0) < other.number and other.over.get(self.stream, 0) < self.number


class Simulated(Accelerator):
    """The simulated accelerator of the tests, which is built and registered with torch here, for good.

    Kernels and copies are the operators that it was given, seconds are the host's, and a captured step has run once.
    """

    backend = "cpu:gloo,simdev:simccl"
    warm_up = 2
    copies = ("copy_", "memcpy", "copy from host", "copy to host", "item", "zero_")

    def __init__(self) -> None:
        tests = str(Path(__file__).parent.parent / "test")
        if tests not in sys.path:
            sys.path.append(tests)
        if why := importlib.import_module("accelerator.build").missing():
            raise SystemExit(why)
        self.sim: Any = importlib.import_module("accelerator.sim").sim
        self.sim.checked = False  # the tests look for races
        importlib.import_module("accelerator.sim_ccl")
        super().__init__(torch.device("simdev", 0))

    def finish(self) -> None:
        self.sim.drain()

    def recover(self) -> None:
        self.sim.abandon()

    def seconds(self, run: Run) -> float:
        return super().seconds(lambda: (run(), self.finish()))

    def count(self, run: Run, trace: Path) -> Counts | None:
        self.finish()
        before, waited = self.sim.launched.copy(), len(self.sim.host_syncs)
        run()
        launched, waits = self.sim.launched - before, len(self.sim.host_syncs) - waited
        copies = sum(launched[name] for name in self.copies)
        return Counts(launched.total() - copies, copies, waits)

    def spin(self, cycles: int) -> None:
        self.sim.enqueue(self._stream(), SPIN, lambda: None, [], [])

    def overlap(self, run: Run, trace: Path) -> float | None:
        """The share of the spinning kernels beside which some kernel of the current stream may run."""
        launches: list[Launch] = []
        enqueue = self.sim.enqueue

        def watched(stream: Any, name: str, *rest: Any, **more: Any) -> None:
            with self.sim.inside():
                enqueue(stream, name, *rest, **more)
                queue = self.sim.queue(stream)
                launches.append(Launch(name, stream, queue.issued, dict(queue.clock)))

        self.finish()
        with mock.patch.object(self.sim, "enqueue", watched):
            run()
        spinning = [launch for launch in launches if launch.name == SPIN]
        compute = [launch for launch in launches if launch.name != SPIN and launch.stream == self._stream()]
        if not spinning:
            return None
        return statistics.fmean(any(slow.may_run_beside(other) for other in compute) for slow in spinning)

    def _stream(self) -> Any:
        return self.sim.current(self.device.index)

    def _capture(self, run: Run) -> None:
        with self.module.stream(self.module.Stream()), self.sim.capture():
            run()
