"""On one GPU: step time, kernels, bytes copied, memory, host waits, CUDA graphs, overlap. Against FSDP1, FSDP2 and plain.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --traces traces
    python benchmarks/gpu.py --simulated

A GPT in float32, and with bf16 compute, over the fake group of 8 and of 64 and over NCCL at world size 1, where nobody sends
anything. Over the fake group everybody calls the collectives of torch.distributed as over NCCL, each of which is one call
into the group that moves nothing, so that all else shows. Without a GPU it says so, and its tables are empty. (No file here
may be called ``cuda.py``: torch would import it as the package ``cuda``.)

What the columns are, all of a GPU, and what could not be less:

- ms: a forward, a backward and a step of AdamW (fused), by CUDA events; contenders interleaved, medians of the rounds.
  Floor: the plain model's, on the same device in the same rounds.
- over plain: the same over the plain model's. Floor: 1.
- kernels, copies: launched in such a step, by ``torch.profiler``'s trace (copies: memcpy and memset). Floor: the plain
  model's.
- copied / P: bytes of forward and backward as ``copied_bytes.py`` counts them, over the plain model's; P is the parameters in
  float32. Floor: 2, with bf16 1.5 and the cast of the shard; over NCCL at world size 1, where nothing need be copied, 0.
- peak, MiB: ``max_memory_allocated`` in such a step, over what was allocated before the contender was made, alone on the
  device. Floor: parameters, gradients and optimizer state of one rank, and what autograd saves.
- host waits: how often the host waits for the device in such a step, by the trace. Floor: 0, and 1 with offload, whose
  optimizer reads on the host what the device wrote.
- graph, passes: whether forward and backward can be captured in a CUDA graph and replayed; in a process of its own. The
  replay's time, or the error. Floor of the time: the plain model's.
- graph, step: the same with a step of SGD (foreach, momentum), if the passes can be captured. Over NCCL its numbers are
  compared with those of eager steps.
- overlap (a table of its own): the share of the collectives' time that other kernels ran in, with collectives that keep their
  stream busy for a while (``--cycles``): with prefetch and without. At best 1.

Rows of flatshard: as it is, with ``static_buffers=True``, with ``CPUOffload``, and in bf16 also with
``DefaultCollectives(group, widens=True)``, which sends gradients in bf16 and adds them in float32. A contender that fails has
its error in the first column.

``--simulated`` runs all of this, tiny, on the simulated accelerator of the tests (``test/accelerator``), to show that it
runs: it ends with 1 where a figure is missing. Its figures are no results, say so in every cell, and are not written
anywhere. There a kernel is an operator, copies are those between tensors, times are the host's, a capture follows CUDA's
rules and is not replayed, and overlap is the share of collectives beside which some kernel of the compute stream may run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import FSDP1_FLAT, Setting, build, drop_gradients, filling_nothing
from counting import CopiedBytes
from devices import Cuda, Device, Simulated
from gpt import GPT, Block, GPTConfig
from suite import Benchmark, Figure, Table, fake_world, interleaved, over, progress, spread

import flatshard


@dataclass(frozen=True)
class Place:
    """A process group, and what is computed with."""

    size: int
    is_fake: bool = True
    bf16: bool = False


PLACES = {
    "fake group of 8": Place(8),
    "fake group of 8, bf16": Place(8, bf16=True),
    "fake group of 64": Place(64),
    "NCCL, world size 1": Place(1, is_fake=False),
    "NCCL, world size 1, bf16": Place(1, is_fake=False, bf16=True),
}


@dataclass(frozen=True)
class Row:
    """A contender, or flatshard with options."""

    contender: str
    options: Mapping[str, Any] = field(default_factory=dict)
    widens: bool = False


OFFLOAD = "flatshard, offload"
WIDENS = "flatshard, bf16 sent"
ROWS = {
    "plain": Row("plain"),
    "flatshard": Row("flatshard"),
    "flatshard, static buffers": Row("flatshard", {"static_buffers": True}),
    WIDENS: Row("flatshard", widens=True),
    OFFLOAD: Row("flatshard", {"cpu_offload": flatshard.CPUOffload(offload_params=True)}),
    "FSDP2": Row("FSDP2"),
    "FSDP1": Row("FSDP1"),
    FSDP1_FLAT: Row(FSDP1_FLAT),
}
OVERLAPPED = ("flatshard", "flatshard, static buffers", "FSDP2", "FSDP1")
PASSES, STEP = "graph, passes", "graph, step"
COLUMNS = ("ms", "over plain", "kernels", "copies", "copied / P", "peak, MiB", "host waits", PASSES, STEP)
PREFETCH = {"prefetch": True, "no prefetch": False}
NO_GPU = "no GPU"
SIMULATED = "simulated"
NOTHING = "-"

SIZES = {"layers": 12, "width": 1024, "context": 512, "vocabulary": 8192, "batch": 4, "rounds": 15}
SIMULATED_SIZES = {"layers": 1, "width": 16, "context": 4, "vocabulary": 8, "batch": 1, "rounds": 1}


def rows_of(place: str) -> list[str]:
    """Those that mean something there."""
    return [name for name, row in ROWS.items() if PLACES[place].bf16 or not row.widens]


@contextlib.contextmanager
def world(place: Place, device: Device) -> Iterator[None]:
    """Be rank 0 of a process group."""
    if place.is_fake:
        with fake_world(place.size), filling_nothing():
            yield
        return
    dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=place.size)
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()


def as_over_nccl(group: dist.ProcessGroup, device: torch.device) -> flatshard.comm.Collectives:
    """Flatshard's collectives, also over the fake group, for which it has others."""
    return flatshard.comm.DefaultCollectives(group)


def widening(group: dist.ProcessGroup, device: torch.device) -> flatshard.comm.Collectives:
    return flatshard.comm.DefaultCollectives(group, widens=True)


class Job:
    """A contender on a device, with its batch and an optimizer: AdamW, or what a graph can hold."""

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        place: Place,
        device: Device,
        *,
        graph: bool = False,
        prefetch: bool = True,
    ) -> None:
        torch.manual_seed(0)
        config = GPTConfig(args.vocabulary, args.context, args.layers, args.width, heads=8)
        row = ROWS[name]
        setting = Setting(
            Block,
            place.bf16,
            prefetch,
            collectives=widening if row.widens else as_over_nccl,
            options=row.options,
            device=device.device,
        )
        self.model = build(row.contender, GPT(config).to(device.device), setting)
        self.tokens = torch.zeros(args.batch, args.context, dtype=torch.int64, device=device.device)
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)
            if graph
            else torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        )

    def passes(self) -> None:
        """Forward and backward, and no gradients left."""
        self.model(self.tokens).float().mean().backward()
        drop_gradients(self.model)

    def step(self) -> None:
        """Of training."""
        self.model(self.tokens).float().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> torch.Tensor:
        """This rank's parameters, on the host."""
        local = [getattr(p, "_local_tensor", p).detach() for p in self.model.parameters()]
        return torch.cat([p.flatten().float().cpu() for p in local])


def first_line(error: BaseException) -> str:
    """Of its message, with its type."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:120]


# ---------------------------------------------------------------------------------------------------------------------
# Graphs
# ---------------------------------------------------------------------------------------------------------------------


def graphs(name: str, args: argparse.Namespace, place: Place, device: Device) -> dict[str, str]:
    """What the columns of graphs say. A step contains the passes, so it is not tried where they cannot be captured."""
    found: dict[str, str] = {}
    for column in (PASSES, STEP):
        try:
            found[column] = captured(name, args, place, device, whole=column == STEP)
        except Exception as e:  # the finding, whatever it is
            device.recover()
            return {STEP: "as the passes", **found, column: first_line(e)}
    return found


def captured(name: str, args: argparse.Namespace, place: Place, device: Device, whole: bool) -> str:
    """Captures forward and backward, or a ``whole`` step, and replays it."""
    job = Job(name, args, place, device, graph=True)
    start = job.values()
    replay = device.captured(job.step if whole else job.passes)
    if whole and not place.is_fake:  # over which the numbers are of no meaning
        trained, eager = job.values(), Job(name, args, place, device, graph=True)
        for _ in range(device.warm_up + 1):
            eager.step()
        off = float((trained - eager.values()).norm() / (eager.values() - start).norm())
        if not off < 0.05:
            return f"it computes other numbers: off by {off:.0%}"
    return "yes" if replay is None else f"yes, {device.seconds(replay) * 1e3:.2f} ms"


def graphs_apart(name: str, place: str) -> dict[str, str]:
    """The same in a process of its own."""
    command = [sys.executable, *sys.argv, "--capture", name, place]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return dict.fromkeys((PASSES, STEP), "its process did not end in 300 s")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return dict.fromkeys((PASSES, STEP), f"its process ended with {done.returncode}")
    return dict(json.loads(lines[-1]))


# ---------------------------------------------------------------------------------------------------------------------
# All else
# ---------------------------------------------------------------------------------------------------------------------


def alone(
    name: str, args: argparse.Namespace, place: Place, device: Device, trace: Path
) -> tuple[dict[str, Figure], int]:
    """What is counted of one contender, with nothing else on the device; and the bytes that its passes copy."""
    gc.collect()  # sharded models lie in cycles
    gc.freeze()  # what is left: the next time is quicker
    device.finish()
    before = device.allocated()
    job = Job(name, args, place, device)
    for _ in range(device.warm_up):
        job.step()
    row: dict[str, Figure] = {}
    if (peak := device.peak(job.step)) is not None:
        row["peak, MiB"] = Figure((peak - before) / 2**20)
    if (counts := device.count(job.step, trace)) is not None:
        row |= {"kernels": Figure(counts.kernels), "copies": Figure(counts.copies), "host waits": Figure(counts.waits)}
    with CopiedBytes() as copied:
        job.passes()
    device.finish()
    return row, copied.total


def figures(args: argparse.Namespace, device: Device, name: str, traces: Path) -> dict[str, dict[str, Figure]]:
    """All contenders' rows in a place."""
    place = PLACES[name]
    rows: dict[str, dict[str, Figure]] = {}
    copied: dict[str, int] = {}
    with world(place, device):
        numel = sum(p.numel() for p in Job("plain", args, place, device).model.parameters())
        for contender in rows_of(name):
            progress(f"{name}, {contender}")
            label = f"{name} {contender}".replace(",", "").replace(" ", "-")
            try:
                rows[contender], copied[contender] = alone(
                    contender, args, place, device, traces / f"{label}.trace.json"
                )
            except Exception as e:  # of a peer, or ours: it stands in the table, and the others go on
                rows[contender] = {"ms": Figure(None, note=first_line(e))}
                device.recover()
        jobs = {contender: Job(contender, args, place, device) for contender in copied}
        steps = {contender: lambda job=job: device.seconds(job.step) for contender, job in jobs.items()}
        times = interleaved(steps, args.rounds, warm_up=min(device.warm_up, args.rounds - 1))
        jobs.clear()
        steps.clear()
        for contender, series in times.items():
            row = rows[contender]
            row["ms"] = spread(1e3 * value for value in series)
            row["over plain"] = over(series, times["plain"])
            row["copied / P"] = Figure((copied[contender] - copied["plain"]) / (4 * numel))
            if device.device.type == "cpu":
                continue
            found = graphs_apart(contender, name) if device.captures_apart else graphs(contender, args, place, device)
            row |= {column: Figure(None, note=note) for column, note in found.items()}
    empty = Figure(None, note=NO_GPU if device.device.type == "cpu" else NOTHING)
    return {contender: {c: row.get(c, empty) for c in COLUMNS} for contender, row in rows.items()}


def overlap(args: argparse.Namespace, device: Device, traces: Path) -> dict[str, dict[str, Figure]]:
    """How much of slow collectives is hidden."""
    place = Place(8)
    rows: dict[str, dict[str, Figure]] = {name: {} for name in OVERLAPPED}
    with fake_world(place.size), filling_nothing(before=lambda: device.spin(args.cycles)):
        for name in OVERLAPPED:
            progress(f"overlap, {name}")
            for column, prefetch in PREFETCH.items():
                label = f"overlap {column} {name}".replace(",", "").replace(" ", "-")
                try:
                    job = Job(name, args, place, device, prefetch=prefetch)
                    for _ in range(2):
                        job.passes()
                    share = device.overlap(job.passes, traces / f"{label}.trace.json")
                    rows[name][column] = Figure(share, note=NOTHING)
                    del job
                except Exception as e:  # as above
                    rows[name][column] = Figure(None, note=first_line(e))
                    device.recover()
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def tables(
    args: argparse.Namespace, rows: Mapping[str, dict[str, dict[str, Figure]]], overlapped: dict[str, dict[str, Figure]]
) -> list[Table]:
    """One for each place, and that of overlap."""
    sizes = f"GPT of {args.layers} blocks of width {args.width}, batch {args.batch} x {args.context}"
    made = []
    for name, place in PLACES.items():
        kind, dtype = "fake" if place.is_fake else "nccl", "_bf16" if place.bf16 else ""
        floor = "the plain model on the same device; of each column in benchmarks/gpu.py"
        made.append(Table(f"gpu_{kind}_{place.size}{dtype}", f"{name}: {sizes}", floor, rows[name]))
    title = f"share of the collectives' time that other kernels ran in, collectives of {args.cycles:,} cycles"
    return [*made, Table("gpu_overlap", title, "none; 1 would be all", overlapped)]


def no_gpu(args: argparse.Namespace) -> list[Table]:
    """Empty ones."""
    nothing = Figure(None, note=NO_GPU)
    rows = {name: {contender: dict.fromkeys(COLUMNS, nothing) for contender in rows_of(name)} for name in PLACES}
    return tables(args, rows, {name: dict.fromkeys(PREFETCH, nothing) for name in OVERLAPPED})


def marked(table: Table) -> Table:
    """A table of the simulated device: no cell of it is a number any more, and nobody takes it for a result."""
    rows = {
        name: {
            column: Figure(None, note=f"{Figure(figure.value, note=figure.note).text(table.digits)} {SIMULATED}")
            for column, figure in row.items()
        }
        for name, row in table.rows.items()
    }
    title = f"{SIMULATED}, no results: {table.title}"
    return dataclasses.replace(table, name=f"{SIMULATED}_{table.name}", title=title, rows=rows)


def incomplete(made: list[Table]) -> list[str]:
    """Where a simulated figure is missing."""
    missing = f"{NOTHING} {SIMULATED}"
    return [
        f"{table.name}: no figure of {name}: {column}"
        for table in made
        for name, row in table.rows.items()
        for column, figure in row.items()
        if figure.note == missing
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> list[Table]:
    for size, default in (SIMULATED_SIZES if args.simulated else SIZES).items():
        if getattr(args, size) is None:
            setattr(args, size, default)
    if args.simulated and (args.json or args.traces):
        raise SystemExit("gpu.py: --simulated writes no files: its figures are no results")
    if not args.simulated and not torch.cuda.is_available():
        progress("no GPU is available here: the rows of gpu.py stay empty")
        return no_gpu(args)
    device = Simulated() if args.simulated else Cuda()
    if args.capture:
        name, place = args.capture
        with world(PLACES[place], device):
            print(json.dumps(graphs(name, args, PLACES[place], device)), flush=True)
        return []
    with tempfile.TemporaryDirectory() as folder:
        traces = args.traces or Path(folder)
        rows = {name: figures(args, device, name, traces) for name in PLACES}
        made = tables(args, rows, overlap(args, device, traces))
    return [marked(table) for table in made] if args.simulated else made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for size, default in SIZES.items():
        parser.add_argument(f"--{size}", type=int, help=f"default: {default}, simulated {SIMULATED_SIZES[size]}")
    parser.add_argument("--cycles", type=int, default=800_000, help="of the collectives that show overlap")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="keep the profiler's traces there")
    parser.add_argument("--capture", nargs=2, metavar=("ROW", "PLACE"), help="only capture this contender's step")
    parser.add_argument("--simulated", action="store_true", help="on the simulated device: whether it runs, no results")


BENCHMARK = Benchmark(measure, __doc__, more=add_arguments)

if __name__ == "__main__":
    if lacking := incomplete(BENCHMARK.main()):
        raise SystemExit("\n".join(lacking))
