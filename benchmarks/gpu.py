"""On one GPU: step time, kernels, bytes copied, memory, overlap, CUDA graphs, synchronisations. Against FSDP1, FSDP2, plain.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --traces traces

A GPT over the fake group of 8 and of 64, whose collectives cost nothing, so that all else shows, and over NCCL at world size
1. Without a GPU it says so, and its tables are empty. (No file here may be called ``cuda.py``: torch would import it as the
package ``cuda``.)

- ms: a forward, a backward and a step of AdamW (fused), by CUDA events; contenders interleaved, medians of the rounds.
- kernels, copies: launched in a step by ``torch.profiler``'s trace (copies: memcpy and memset).
- copied / P: as ``copied_bytes.py`` counts it, forward and backward, over the plain model's.
- peak, MiB: ``max_memory_allocated`` in a step, over what was allocated before the contender was made, alone on the device.
- synchronises: whether a steady step makes the host wait, by ``torch.cuda.set_sync_debug_mode("error")``.
- CUDA graph: whether forward and backward can be captured and replayed, in a process of its own; the error if not.
- overlap: how much of the time of flatshard's collectives other kernels ran in, with collectives that keep their stream busy
  for a while (``--cycles``) in the place of the fake group's: with prefetch and without.

The floor is the plain model on the same device.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import SHARDED, Setting, build, drop_gradients
from counting import CopiedBytes, Wire
from gpt import GPT, Block, GPTConfig
from suite import Figure, Table, arguments, fake_world, interleaved, main, over, progress
from torch import Tensor

import flatshard

NAMES = ["plain", *SHARDED]
WORLDS = {"fake group of 8": ("fake", 8), "fake group of 64": ("fake", 64), "NCCL, world size 1": ("nccl", 1)}
COLUMNS = ("ms", "over plain", "kernels", "copies", "copied / P", "peak, MiB", "synchronises", "CUDA graph")
NO_GPU = "no GPU"
SPIN = "spin"
"""Part of the name of the kernel behind ``torch.cuda._sleep``."""


@contextlib.contextmanager
def world(backend: str, size: int) -> Iterator[None]:
    """Be rank 0 of ``size``."""
    if backend == "fake":
        with fake_world(size):
            yield
        return
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Job:
    """A contender on a device, with its batch and AdamW."""

    def __init__(self, name: str, args: argparse.Namespace, device: torch.device, **setting: Any) -> None:
        torch.manual_seed(0)
        config = GPTConfig(args.vocabulary, args.context, args.layers, args.width, heads=8)
        self.device = device
        self.model = build(name, GPT(config).to(device), Setting(Block, args.bf16, device=device, **setting))
        self.tokens = torch.zeros(args.batch, args.context, dtype=torch.int64, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def passes(self) -> None:
        """Forward and backward, and no gradients left."""
        self.model(self.tokens).float().mean().backward()
        drop_gradients(self.model)

    def step(self) -> None:
        """Of training."""
        self.model(self.tokens).float().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self) -> float:
        """Seconds of a step: on the device, or on the host's clock where the device is the CPU."""
        if self.device.type != "cuda":
            began = time.perf_counter()
            self.step()
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        self.step()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


# ---------------------------------------------------------------------------------------------------------------------
# Traces
# ---------------------------------------------------------------------------------------------------------------------


def traced(run: Callable[[], object], path: Path) -> list[dict[str, Any]]:
    """The events of ``run`` as torch's profiler exports them to ``path``, for a browser's trace viewer."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities) as found:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(path))
    return list(json.loads(path.read_text())["traceEvents"])


def launched(events: list[dict[str, Any]]) -> Counter[str]:
    """How many kernels, and how many copies, a trace has."""
    kinds = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "copies"}
    return Counter(kinds[e["cat"]] for e in events if e.get("ph") == "X" and e.get("cat") in kinds)


def hidden(events: list[dict[str, Any]]) -> float | None:
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


class Busy:
    """Collectives that keep their stream busy for a number of the device's cycles first."""

    exact = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device, cycles: int) -> None:
        self._inner, self._cycles = flatshard.builtin_collectives(group, device), cycles

    def all_gather(self, output: Tensor, shard: Tensor) -> Any:
        torch.cuda._sleep(self._cycles)  # type: ignore[no-untyped-call]
        return self._inner.all_gather(output, shard)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Any:
        torch.cuda._sleep(self._cycles)  # type: ignore[no-untyped-call]
        return self._inner.reduce_scatter(output, input)

    def all_reduce(self, tensor: Tensor) -> Any:
        torch.cuda._sleep(self._cycles)  # type: ignore[no-untyped-call]
        return self._inner.all_reduce(tensor)


def overlap(args: argparse.Namespace, device: torch.device, traces: Path) -> Table:
    """How much of slow collectives is hidden."""
    row: dict[str, Figure] = {}
    with world("fake", 8):
        for column, prefetch in (("prefetch", True), ("no prefetch", False)):
            job = Job(
                "flatshard",
                args,
                device,
                prefetch=prefetch,
                collectives=lambda group, where: Busy(group, where, args.cycles),
            )
            for _ in range(3):
                job.passes()
            events = traced(job.passes, traces / f"overlap-{column.replace(' ', '-')}.trace.json")
            row[column] = Figure(hidden(events), note="no such kernels in the trace")
            del job
    title = f"share of the collectives' time that other kernels ran in, collectives of {args.cycles:,} cycles"
    return Table("gpu_overlap", title, "1 would be all", {"flatshard": row})


# ---------------------------------------------------------------------------------------------------------------------
# One contender
# ---------------------------------------------------------------------------------------------------------------------


def synchronises(job: Job) -> str:
    """Whether a steady step makes the host wait for the device: "no", or what it says that does."""
    if job.device.type != "cuda":
        return NO_GPU
    torch.cuda.set_sync_debug_mode("error")
    try:
        job.step()
    except Exception as e:
        return f"yes: {first_line(e)}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no"


def first_line(error: BaseException) -> str:
    """Of its message, with its type."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:120]


def capture(name: str, args: argparse.Namespace, device: torch.device) -> str:
    """Whether forward and backward can be captured in a CUDA graph and replayed; the error if not."""
    job = Job(name, args, device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            job.passes()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            job.passes()
        graph.replay()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
    except Exception as e:  # the finding, whatever it is
        return first_line(e)
    return f"yes, {begin.elapsed_time(end):.2f} ms"


def captured_apart(name: str, place: str) -> str:
    """The same in a process of its own: a failed capture may leave a process unable to go on."""
    command = [sys.executable, *sys.argv, "--capture", name, place]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return "its process did not end in 300 s"
    lines = done.stdout.strip().splitlines()
    return lines[-1] if done.returncode == 0 and lines else f"its process ended with {done.returncode}"


def copied(name: str, args: argparse.Namespace, device: torch.device) -> int:
    """Bytes of a forward and backward."""
    job = Job(name, args, device, collectives=Wire().factory)
    for _ in range(2):
        job.passes()
    with CopiedBytes() as count:
        job.passes()
    return count.total


def alone(name: str, args: argparse.Namespace, device: torch.device, trace: Path) -> dict[str, Figure]:
    """What is counted of one contender, with nothing else on the device."""
    cuda = device.type == "cuda"
    gc.collect()  # sharded models lie in cycles
    before = torch.cuda.memory_allocated(device) if cuda else 0
    job = Job(name, args, device)
    for _ in range(3):
        job.step()
    row: dict[str, Figure] = {}
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        job.step()
        torch.cuda.synchronize(device)
        row["peak, MiB"] = Figure((torch.cuda.max_memory_allocated(device) - before) / 2**20)
    kinds = launched(traced(job.step, trace))
    if cuda:
        row |= {kind: Figure(kinds[kind]) for kind in ("kernels", "copies")}
    row["synchronises"] = Figure(None, note=synchronises(job))  # last: it may end in the middle of a step
    return row


def figures(args: argparse.Namespace, device: torch.device, place: str, traces: Path) -> dict[str, dict[str, Figure]]:
    """All contenders' rows, over one process group."""
    backend, size = WORLDS[place]
    rows: dict[str, dict[str, Figure]] = {}
    with world(backend, size):
        base = copied("plain", args, device)
        numel = sum(p.numel() for p in Job("plain", args, torch.device("cpu")).model.parameters())
        works: list[str] = []
        for name in NAMES:
            progress(f"{place}, {name}")
            label = f"{place} {name}".replace(",", "").replace(" ", "-")
            try:
                rows[name] = alone(name, args, device, traces / f"{label}.trace.json")
                rows[name]["copied / P"] = Figure((copied(name, args, device) - base) / (4 * numel))
                works.append(name)
            except Exception as e:  # of a peer, or ours: it stands in the table, and the others go on
                rows[name] = {"ms": Figure(None, note=first_line(e))}
        jobs = {name: Job(name, args, device) for name in works}
        times = interleaved({name: job.timed for name, job in jobs.items()}, args.rounds or 15, warm_up=3)
        jobs.clear()
    for name, series in times.items():
        rows[name]["ms"] = over(series, 1.0, 1e3)
        rows[name]["over plain"] = over(series, statistics.median(times["plain"]))
        if device.type == "cuda":
            rows[name]["CUDA graph"] = Figure(None, note=captured_apart(name, place))
    empty = Figure(None, note=NO_GPU if device.type != "cuda" else "")
    return {name: {c: row.get(c, empty) for c in COLUMNS} for name, row in rows.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def tables(args: argparse.Namespace, rows: dict[str, dict[str, dict[str, Figure]]]) -> list[Table]:
    """One for each process group."""
    dtype = "bf16 compute" if args.bf16 else "fp32"
    sizes = f"GPT of {args.layers} blocks of width {args.width}, batch {args.batch} x {args.context}, {dtype}"
    return [
        Table(f"gpu_{backend}_{size}", f"{place}: {sizes}", "the plain model on the same device", rows[place])
        for place, (backend, size) in WORLDS.items()
    ]


def measure(args: argparse.Namespace) -> list[Table]:
    if not torch.cuda.is_available():
        progress("no GPU is available here: the rows of gpu.py stay empty")
        empty = {name: {column: Figure(None, note=NO_GPU) for column in COLUMNS} for name in NAMES}
        nothing = Figure(None, note=NO_GPU)
        return [
            *tables(args, dict.fromkeys(WORLDS, empty)),
            Table(
                "gpu_overlap",
                "overlap",
                "1 would be all",
                {"flatshard": {"prefetch": nothing, "no prefetch": nothing}},
            ),
        ]
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    if args.capture:
        name, place = args.capture
        with world(*WORLDS[place]):
            print(capture(name, args, device), flush=True)
        return []
    with tempfile.TemporaryDirectory() as folder:
        traces = args.traces or Path(folder)
        rows = {place: figures(args, device, place, traces) for place in WORLDS}
        return [*tables(args, rows), overlap(args, device, traces)]


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--layers", type=int, default=12)
    made.add_argument("--width", type=int, default=1024)
    made.add_argument("--context", type=int, default=512)
    made.add_argument("--vocabulary", type=int, default=8192)
    made.add_argument("--batch", type=int, default=4)
    made.add_argument("--rounds", type=int, default=0, help="default: 15")
    made.add_argument("--bf16", action="store_true", help="float32 parameters, bfloat16 compute, float32 reduction")
    made.add_argument("--cycles", type=int, default=800_000, help="of the collectives that show overlap")
    made.add_argument("--traces", type=Path, metavar="DIR", help="keep the profiler's traces there")
    made.add_argument("--capture", nargs=2, metavar=("NAME", "GROUP"), help="only capture this contender's step")
    return made


if __name__ == "__main__":
    main(measure, parser())
