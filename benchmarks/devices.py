"""What ``gpu.py`` measures by: a CUDA device, the simulated accelerator of the tests, or, in its own tests, a CPU."""

from __future__ import annotations

import bisect
import importlib
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import suite
import torch
from torch.profiler import profile, record_function

Run = Callable[[], object]
MEASURED, SPIN = "measured", "spin"
"""Parts of names: of what a trace is taken of, and of the kernels behind :meth:`Device.spin`."""


@dataclass(frozen=True)
class Trace:
    """What a device did."""

    kernels: Sequence[tuple[str, float, float]]
    """(name, start, end)"""
    copies: int
    waits: int
    """How often the host waited for the device."""

    @staticmethod
    def read(events: Sequence[dict[str, Any]]) -> Trace:
        """From what torch's profiler exports. ``torch.cuda.set_sync_debug_mode`` would not tell of waits for events."""
        (whole,) = (e for e in events if e.get("name") == MEASURED and e.get("cat") == "user_annotation")
        calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
        waits = [e for e in calls if "Synchronize" in e["name"] or e["name"] in ("cudaMemcpy", "cudaMemset")]
        return Trace(
            [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"],
            sum(e.get("cat") in ("gpu_memcpy", "gpu_memset") for e in events),
            sum(0 <= e["ts"] - whole["ts"] <= whole["dur"] for e in waits),
        )

    def hidden(self) -> float | None:
        """The share of the spinning kernels' time in which another kernel ran; None if none spins."""
        slow = [(start, end) for name, start, end in self.kernels if SPIN in name]
        busy = sorted((start, end) for name, start, end in self.kernels if SPIN not in name)
        covered = 0.0
        for start, end in slow:
            for other_start, other_end in busy:
                reached = min(max(other_end, start), end)
                covered += reached - min(max(other_start, start), reached)
                start = reached  # others may overlap each other: no moment counts twice
        return covered / sum(end - start for start, end in slow) if slow else None


class Device:
    """A CPU, which has neither kernels nor memory to count, and no graphs."""

    backend = "gloo"
    """Of a process group that moves something."""
    warm_up = 3
    """Steps until a contender is steady."""
    captures_apart = False
    """Whether a failed capture may leave the process unable to go on."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)

    def finish(self) -> None:
        """Wait until everything is over."""
        self.module.synchronize()

    def recover(self) -> None:
        """After an error in the middle of a step."""

    def seconds(self, run: Run) -> float:
        return suite.seconds(lambda: (run(), self.finish()))

    def trace(self, run: Run) -> Trace:
        self.finish()
        with profile() as profiled:
            with record_function(MEASURED):
                run()
            self.finish()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiled.export_chrome_trace(str(path))
            return Trace.read(json.loads(path.read_text())["traceEvents"])

    def spin(self, cycles: int) -> None:
        """Keep the current stream busy for a while."""

    def allocated(self) -> int:
        """Bytes."""
        return 0

    def peak(self, run: Run) -> int:
        """The most bytes that are allocated during ``run``."""
        return 0

    def captured(self, run: Run) -> Run:
        """Warm up, and run it once as a graph. Returns what runs the graph again.

        Raises:
            Exception: it cannot be captured.
        """
        raise NotImplementedError(f"{self.device} has no graphs")


class Cuda(Device):
    """The first GPU, or what has the same interface."""

    backend = "nccl"
    captures_apart = True

    def __init__(self, kind: str = "cuda") -> None:
        super().__init__(torch.device(kind, 0))
        self.module.set_device(self.device)

    def seconds(self, run: Run) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.finish()
        begin.record()
        run()
        end.record()
        self.finish()
        return float(begin.elapsed_time(end)) / 1e3

    def spin(self, cycles: int) -> None:
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    def allocated(self) -> int:
        return int(self.module.memory_allocated())

    def peak(self, run: Run) -> int:
        self.finish()
        self.module.reset_peak_memory_stats()
        run()
        self.finish()
        return int(self.module.max_memory_allocated())

    def captured(self, run: Run) -> Run:
        side = self.module.Stream()  # as torch.cuda.graph's documentation says
        side.wait_stream(self.module.current_stream())
        with self.module.stream(side):
            for _ in range(self.warm_up):
                run()
        self.module.current_stream().wait_stream(side)
        self.finish()
        return self._capture(run)

    def _capture(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        return graph.replay


class Simulated(Cuda):
    """The simulated accelerator of the tests, which is built and registered with torch here, for good.

    It runs each operator on CPU, late. So kernels and copies are operators, seconds are the host's, a captured step has run
    once and is not replayed, and a trace has the earliest schedule that streams and events allow.
    """

    backend = "cpu:gloo,simdev:simccl"
    warm_up = 2
    captures_apart = False
    copies = ("copy_", "memcpy", "copy from host", "copy to host", "item", "zero_")

    def __init__(self) -> None:
        sys.path.append(str(Path(__file__).parent.parent / "test"))
        if why := importlib.import_module("accelerator.build").missing():
            raise SystemExit(why)
        self.sim: Any = importlib.import_module("accelerator.sim").sim
        self.sim.checked = False  # the tests look for races
        importlib.import_module("accelerator.sim_ccl")
        super().__init__("simdev")

    def finish(self) -> None:
        self.sim.drain()

    def recover(self) -> None:
        self.sim.abandon()

    def seconds(self, run: Run) -> float:
        return Device.seconds(self, run)

    def trace(self, run: Run) -> Trace:
        """Every operator takes a unit of time, and begins as soon as all that comes before it is over."""
        given: dict[Any, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))  # numbers and ends, by stream
        operators: list[tuple[str, int, int]] = []
        enqueue = self.sim.enqueue

        def end_of(stream: Any, number: int) -> int:
            numbers, ends = given[stream]
            known = bisect.bisect(numbers, number)
            return ends[known - 1] if known else 0

        def watched(stream: Any, name: str, *rest: Any, **more: Any) -> None:
            with self.sim.inside():
                enqueue(stream, name, *rest, **more)
                queue = self.sim.queue(stream)
                start = max(end_of(other, number) for other, number in queue.clock.items())
                given[stream][0].append(queue.issued)
                given[stream][1].append(start + 1)
                operators.append((name, start, start + 1))

        self.finish()
        waits = len(self.sim.host_syncs)
        with mock.patch.object(self.sim, "enqueue", watched):
            run()
        kernels = [operator for operator in operators if operator[0] not in self.copies]
        return Trace(kernels, len(operators) - len(kernels), len(self.sim.host_syncs) - waits)

    def spin(self, cycles: int) -> None:
        self.sim.enqueue(self.sim.current(self.device.index), SPIN, lambda: None, [], [])

    def _capture(self, run: Run) -> Run:
        with self.module.stream(self.module.Stream()), self.sim.capture():
            run()
        return lambda: None
