"""Devices for the benchmarks on GPUs: a CUDA device, the tests' simulated accelerator, or, in tests, a CPU."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import suite
import torch
from torch.profiler import profile, record_function

Run = Callable[[], object]
MEASURED = "measured"
"""Name of the measured part of a trace."""


@dataclass(frozen=True)
class Counts:
    """A device's operations in a run."""

    kernels: int
    copies: int
    waits: int
    """Number of times that the host waited for the device."""

    @staticmethod
    def read(events: Sequence[dict[str, Any]]) -> Counts:
        """Count the events of a torch profiler's trace. ``torch.cuda.set_sync_debug_mode`` would miss waits for events."""
        (whole,) = (e for e in events if e.get("name") == MEASURED and e.get("cat") == "user_annotation")
        calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
        waits = [e for e in calls if "Synchronize" in e["name"] or e["name"] in ("cudaMemcpy", "cudaMemset")]
        return Counts(
            sum(e.get("cat") == "kernel" for e in events),
            sum(e.get("cat") in ("gpu_memcpy", "gpu_memset") for e in events),
            sum(0 <= e["ts"] - whole["ts"] <= whole["dur"] for e in waits),
        )


@dataclass(frozen=True)
class Overlap:
    """Seconds of a run in which a device communicated, and the part of them in which it also computed."""

    collectives: float
    hidden: float

    @staticmethod
    def read(events: Sequence[dict[str, Any]]) -> Overlap:
        """Measure the events of a torch profiler's trace, in microseconds. NCCL's kernels also wait for other ranks."""
        kernels = [e for e in events if e.get("cat") == "kernel"]
        sends, computes = ([e for e in kernels if ("nccl" in e["name"].lower()) is side] for side in (True, False))
        sent, busy = (_merged((e["ts"], e["ts"] + e["dur"]) for e in each) for each in (sends, computes))
        both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in sent for b in busy)
        return Overlap(sum(end - begin for begin, end in sent) / 1e6, both / 1e6)


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge overlapping spans."""
    out: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((begin, end))
    return out


class Device:
    """A CPU, without kernels or memory to count, and without graphs."""

    backend = "gloo"
    """Backend of a process group that communicates."""
    warm_up = 3
    """Number of steps until a contender is steady."""
    training_steps = 3
    """Number of steps whose numbers are compared with those of one process."""

    def __init__(self, kind: str = "cpu", index: int = 0) -> None:
        self.device = torch.device("cpu") if kind == "cpu" else torch.device(kind, index)
        self.module = torch.get_device_module(self.device)

    def finish(self) -> None:
        """Wait until all operations are complete."""
        self.module.synchronize()

    def recover(self) -> None:
        """Clean up after an error in the middle of a step."""

    def look_for_races(self) -> None:
        """Look for races from now on, where the device and not the environment decides that."""

    def check_races(self) -> None:
        """Raise if races were found, which a GPU's sanitizer does itself."""

    def keep_busy(self) -> None:
        """Keep the current stream busy for a fraction of a millisecond, if the device has streams."""

    def seconds(self, run: Run) -> float:
        return suite.seconds(lambda: (run(), self.finish()))

    def count(self, run: Run) -> Counts:
        return Counts.read(self._trace(run))

    def overlap(self, run: Run) -> Overlap:
        return Overlap.read(self._trace(run))

    def _trace(self, run: Run) -> list[dict[str, Any]]:
        """Return the events of torch's profiler."""
        self.finish()
        with profile() as profiled:
            with record_function(MEASURED):
                run()
            self.finish()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiled.export_chrome_trace(str(path))
            return list(json.loads(path.read_text())["traceEvents"])

    def allocated(self) -> int:
        """Return the allocated bytes."""
        return 0

    def peak(self, run: Run) -> int:
        """Return the peak of allocated bytes during ``run``."""
        return 0

    def reserved(self) -> int:
        """Return the bytes that the allocator has taken from the device."""
        return 0

    def captured(self, run: Run) -> Run:
        """Warm up, capture ``run`` as a graph, and return the graph's replay.

        Raises:
            Exception: it cannot be captured.
        """
        raise NotImplementedError(f"{self.device.type} has no graphs")


class Cuda(Device):
    """A GPU, or a device with the same interface."""

    backend = "nccl"

    def __init__(self, kind: str = "cuda", index: int = 0) -> None:
        super().__init__(kind, index)
        self.module.set_device(self.device)
        if kind == "cuda":
            self._make_workspaces()

    def _make_workspaces(self) -> None:
        """Have cuBLAS allocate its workspaces, of this thread and of autograd's: they are no contender's memory."""
        x = torch.ones(256, 256, device=self.device, requires_grad=True)
        for dtype in (torch.float32, torch.bfloat16):
            (x.to(dtype) @ x.to(dtype)).sum().backward()  # type: ignore[no-untyped-call]
        self.finish()

    def keep_busy(self) -> None:
        torch.cuda._sleep(400_000)  # type: ignore[no-untyped-call]

    def recover(self) -> None:
        """Free cached memory, as the failed run may have used all of it."""
        self.module.empty_cache()

    def seconds(self, run: Run) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.finish()
        begin.record()
        run()
        end.record()
        self.finish()
        return float(begin.elapsed_time(end)) / 1e3

    def allocated(self) -> int:
        return int(self.module.memory_allocated())

    def peak(self, run: Run) -> int:
        self.finish()
        self.module.reset_peak_memory_stats()
        run()
        self.finish()
        return int(self.module.max_memory_allocated())

    def reserved(self) -> int:
        return int(self.module.memory_reserved())

    def captured(self, run: Run) -> Run:
        side = self.module.Stream()  # required by torch.cuda.graph's documentation
        side.wait_stream(self.module.current_stream())
        with self.module.stream(side):
            for _ in range(self.warm_up):
                run()
        self.module.current_stream().wait_stream(side)
        self.finish()
        replay = self._capture(run)
        self.finish()
        return replay

    def _capture(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        return graph.replay


def choose_device(args: argparse.Namespace, simulated_sizes: Mapping[str, int]) -> Device | None:
    """Return the device that a benchmark's arguments ask for, or None, with a line of progress, if there is no GPU.

    ``--simulated`` sets the sizes in ``args``, and writes no files, as its figures are no results.
    """
    script = Path(sys.argv[0]).name
    if args.simulated:
        if args.json:
            raise SystemExit(f"{script}: --simulated writes no files: its figures are no results")
        vars(args).update(simulated_sizes)
        return Simulated()
    if not torch.cuda.is_available():
        suite.progress(f"no GPU is available here: {script} has no tables")
        return None
    return Cuda()


class Simulated(Cuda):
    """The tests' simulated accelerator. The first one builds it, and registers it with torch permanently.

    Each operator runs late on CPU. So kernels and copies are operators, and seconds are the host's. A captured step has
    followed CUDA's rules, and its replay runs the operators on the same addresses.
    """

    backend = "cpu:gloo,simdev:simccl"
    warm_up = 2
    training_steps = 2
    copies = ("copy_", "memcpy", "copy from host", "copy to host", "item", "zero_")

    def __init__(self) -> None:
        sys.path.append(str(Path(__file__).parent.parent / "test"))
        if why := importlib.import_module("accelerator.build").missing():
            raise SystemExit(why)
        self.sim: Any = importlib.import_module("accelerator.sim").sim
        self.sim.checked = False  # tests check for races
        importlib.import_module("accelerator.sim_ccl")
        super().__init__("simdev")

    def finish(self) -> None:
        self.sim.drain()
        self.sim.policy = "late_side"

    def keep_busy(self) -> None:
        """Run other streams first, as far as events allow, until the device is finished."""
        is_default = self.module.current_stream() == self.module.default_stream()
        self.sim.policy = "late_main" if is_default else "late_side"

    def look_for_races(self) -> None:
        self.sim.checked = True

    def check_races(self) -> None:
        races = list(self.sim.races.values())
        self.sim.races.clear()
        if races:
            raise RuntimeError(f"{len(races)} races: {races[0]}")

    def recover(self) -> None:
        self.sim.abandon()

    def reserved(self) -> int:
        """Return 0: its allocator takes no memory in advance."""
        return 0

    def seconds(self, run: Run) -> float:
        return Device.seconds(self, run)

    def count(self, run: Run) -> Counts:
        self.finish()
        before, waited = self.sim.launched.copy(), len(self.sim.host_syncs)
        run()
        launched, waits = self.sim.launched - before, len(self.sim.host_syncs) - waited
        copies = sum(launched[name] for name in self.copies)
        return Counts(launched.total() - copies, copies, waits)

    def overlap(self, run: Run) -> Overlap:
        """Return zeros, as the simulated device has no clock."""
        run()
        return Overlap(0.0, 0.0)

    def _capture(self, run: Run) -> Run:
        with self.module.stream(self.module.Stream()), self.sim.capture() as graph:
            run()
        return lambda: self.sim.replay(graph)
