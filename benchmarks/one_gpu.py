"""Step time, kernels, bytes copied, memory, host waits and CUDA graphs on one GPU, compared with FSDP1 and FSDP2.

``gpu.py`` runs this, and more.

    python benchmarks/one_gpu.py --graphs
    python benchmarks/one_gpu.py --simulated --places gpu_fake_8

A GPT runs in float32 and with bf16 compute, over the fake group of 8 and of 64, and over NCCL at world size 1. Nothing is
sent. Over the fake group, all contenders call the collectives of torch.distributed as over NCCL. Each is one call into the
group that moves nothing, so that all other costs show. Without a GPU it says so, and prints no tables. (No file here may be
called ``cuda.py``: torch would import it as the package ``cuda``.)

The columns, all measured on a GPU, and their floors:

- ms: a forward, a backward and a step of AdamW (fused), by CUDA events; contenders interleaved, medians of the rounds.
  Floor: the plain model's, on the same device in the same rounds.
- over plain: the ratio to the plain model's time. Floor: 1.
- host ms: until the host has issued such a step. Floor: the plain model's.
- tokens/s: of this rank. Floor: the plain model's.
- kernels, copies: launches in such a step, in ``torch.profiler``'s trace (copies: memcpy and memset). Floor: the plain
  model's.
- copied / P: bytes of forward and backward as ``copied_bytes.py`` counts them, minus the plain model's; P is the parameters
  in float32. Floor: 2, with bf16 1.5 and the cast of the shard; over NCCL at world size 1 nothing need be copied, so 0.
- peak, MiB: ``max_memory_allocated`` in such a step, minus the memory allocated before the contender was made, alone on the
  device. Floor: parameters, gradients and optimizer state of one rank, and saved activations.
- reserved, MiB: memory that the allocator has taken from the device after these steps, minus what it had before.
- host waits: waits of the host for the device in such a step, in the trace. Floor: 0, or 1 with offload, whose optimizer
  reads the device's results on the host.
- graph: whether a step with SGD (foreach, momentum) can be captured in a CUDA graph and replayed, for the plain model and for
  flatshard without offload: the replay's time, or the error. Over NCCL its numbers are compared with eager steps'. It comes
  last, as a failed capture may break the process. Floor: the plain model's.

``test/accelerator/test_gpu.py`` tests whether collectives overlap with compute.

Rows of flatshard: defaults, ``static_buffers=True``, ``CPUOffload``, and in bf16 also ``DefaultCollectives(group,
widens=True)``, which sends gradients in bf16 and adds them in float32. A contender that fails has its error in the first
column.

``--simulated`` runs a tiny version on the tests' simulated accelerator (``test/accelerator``), to show that it runs. Every
cell says that its figures are no results, and they are not written to files; ``devices.py`` explains them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import checkout  # noqa: F401
import torch
import torch.distributed as dist
from contenders import FSDP1_FLAT, Job, Setting, as_over_nccl, filling_nothing, numel
from counting import CopiedBytes
from devices import Device, choose_device
from gpt import Block, GPTConfig
from suite import Benchmark, Figure, Table, check, fake_world, interleaved, marked, over, progress, seconds, spread

import flatshard
from flatshard.comm import Collectives, DefaultCollectives


@dataclass(frozen=True)
class Place:
    """A process group and a compute dtype."""

    name: str
    title: str
    size: int
    is_fake: bool = True
    bf16: bool = False


PLACES = [
    Place("gpu_fake_8", "fake group of 8", 8),
    Place("gpu_fake_8_bf16", "fake group of 8, bf16", 8, bf16=True),
    Place("gpu_fake_64", "fake group of 64", 64),
    Place("gpu_nccl_1", "NCCL, world size 1", 1, is_fake=False),
    Place("gpu_nccl_1_bf16", "NCCL, world size 1, bf16", 1, is_fake=False, bf16=True),
]


def widening(group: dist.ProcessGroup, device: torch.device) -> Collectives:
    return DefaultCollectives(group, widens=True)


WIDENS, OFFLOAD = "flatshard, bf16 sent", "flatshard, offload"
DEFAULT = Setting(Block, collectives=as_over_nccl)
ROWS = {
    "plain": ("plain", DEFAULT),
    "flatshard": ("flatshard", DEFAULT),
    "flatshard, static buffers": ("flatshard", replace(DEFAULT, options={"static_buffers": True})),
    WIDENS: ("flatshard", replace(DEFAULT, collectives=widening)),
    OFFLOAD: ("flatshard", replace(DEFAULT, options={"cpu_offload": flatshard.CPUOffload(offload_params=True)})),
    "FSDP2": ("FSDP2", DEFAULT),
    "FSDP1": ("FSDP1", DEFAULT),
    FSDP1_FLAT: (FSDP1_FLAT, DEFAULT),
}
SIZES = {"layers": 12, "width": 1024, "context": 512, "vocabulary": 8192, "batch": 4, "rounds": 15}
SIMULATED_SIZES = {"layers": 1, "width": 16, "context": 4, "vocabulary": 8, "batch": 1, "rounds": 1}
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)


def rows_of(place: Place, rows: Iterable[str] = ROWS) -> list[str]:
    """Return those of ``rows`` that apply to ``place``, with the plain model's, which others are compared with."""
    return [name for name in ROWS if name == "plain" or (name in rows and (place.bf16 or name != WIDENS))]


def first_line(error: Exception) -> Figure:
    """Return a cell for a figure that failed, with the error's first line."""
    return Figure(None, note=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:120])


def values(job: Job) -> torch.Tensor:
    """Return this rank's parameters, on the host."""
    return torch.cat([p.detach().clone().flatten().float().cpu() for p in job.model.parameters()])


@dataclass(frozen=True)
class Bench:
    """Measures contenders in one place, on one device."""

    args: argparse.Namespace
    device: Device
    place: Place

    @property
    def config(self) -> GPTConfig:
        a = self.args
        return GPTConfig(a.vocabulary, a.context, a.layers, a.width, heads=8)

    @contextlib.contextmanager
    def world(self) -> Iterator[None]:
        """Make this process rank 0 of the process group."""
        if self.place.is_fake:
            with fake_world(self.place.size), filling_nothing():
                yield
            return
        dist.init_process_group(self.device.backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            gc.collect()
            dist.destroy_process_group()

    def job(self, name: str, optimizer: Callable[..., torch.optim.Optimizer] = ADAMW) -> Job:
        contender, setting = ROWS[name]
        setting = replace(setting, bf16=self.place.bf16, device=self.device.device)
        tokens = torch.zeros(self.args.batch, self.args.context, dtype=torch.int64)
        return Job(contender, self.config, setting, tokens, optimizer)

    def alone(self, name: str) -> dict[str, Figure]:
        """Count a contender's figures with nothing else on the device. Copied bytes are totals."""
        gc.collect()  # sharded models are in reference cycles
        gc.freeze()  # the next collection skips the rest
        self.device.recover()
        before, had, job = self.device.allocated(), self.device.reserved(), self.job(name)
        for _ in range(self.device.warm_up):
            job.step()
        peak, reserved = self.device.peak(job.step), self.device.reserved() - had
        counts = self.device.count(job.step)
        with CopiedBytes() as copied:
            job.passes()
        self.device.finish()
        return {
            "kernels": Figure(counts.kernels),
            "copies": Figure(counts.copies),
            "copied / P": Figure(copied.total),
            "peak, MiB": Figure((peak - before) / 2**20),
            "reserved, MiB": Figure(reserved / 2**20),
            "host waits": Figure(counts.waits),
        }

    def rows(self) -> dict[str, dict[str, Figure]]:
        """Return all contenders' figures except graphs."""
        rows: dict[str, dict[str, Figure]] = {}
        with self.world():
            for name in rows_of(self.place, self.args.rows):
                progress(f"{self.place.title}, {name}")
                try:
                    rows[name] = {"ms": Figure(None), "over plain": Figure(None), **self.alone(name)}
                except Exception as e:  # any error: the other contenders run
                    rows[name] = {"ms": first_line(e)}
                    self.device.recover()
            if len(rows["plain"]) == 1:  # there is nothing to compare with
                return rows
            jobs = {name: self.job(name) for name, row in rows.items() if len(row) > 1}
            host: dict[str, list[float]] = {name: [] for name in jobs}

            def timed(name: str, step: Callable[[], object]) -> float:
                return self.device.seconds(lambda: host[name].append(seconds(step)))

            steps = {name: functools.partial(timed, name, job.step) for name, job in jobs.items()}
            times = interleaved(steps, self.args.rounds, min(self.device.warm_up, self.args.rounds - 1))
            jobs.clear()
            steps.clear()
        plain = rows["plain"]["copied / P"].value
        for name, series in times.items():
            copied = (rows[name]["copied / P"].value - plain) / (4 * numel(self.config))
            rows[name] |= {
                "ms": spread(1e3 * value for value in series),
                "over plain": over(series, times["plain"]),
                "host ms": spread(1e3 * value for value in host[name][-self.args.rounds :]),
                "tokens/s": Figure(round(self.args.batch * self.args.context / statistics.median(series))),
                "copied / P": Figure(copied),
            }
        return rows

    def graph(self, name: str) -> Figure:
        """Capture a step, and return the time of its replay or the error."""
        try:
            with self.world():
                return self.captured(self.job(name, SGD), self.job(name, SGD))
        except Exception as e:  # any error is the finding
            self.device.recover()
            return first_line(e)

    def captured(self, job: Job, eager: Job) -> Figure:
        start = values(job)
        replay = self.device.captured(job.step)
        if not self.place.is_fake:  # over the fake group numbers have no meaning
            trained = values(job)
            for _ in range(self.device.warm_up + 1):
                eager.step()
            off = float((trained - values(eager)).norm() / (values(eager) - start).norm())
            if not off < 0.05:
                return Figure(None, note=f"it computes other numbers: off by {off:.0%}")
        return Figure(None, note=f"yes, {self.device.seconds(replay) * 1e3:.2f} ms")


def notes(rows: dict[str, dict[str, Figure]]) -> list[str]:
    """Return checks: each contender runs, flatshard's host does not wait, and its memory is at most FSDP2's."""
    failed = {name: row["ms"].note for name, row in rows.items() if len(row) == 1}
    found = [f"WRONG: {name} fails: {note}" for name, note in failed.items()]
    for name, row in rows.items():
        if "graph" in row and not row["graph"].note.startswith("yes"):
            found.append(f"WRONG: {name} is not captured: {row['graph'].note}")
    peaks = {name: row["peak, MiB"].value for name, row in rows.items() if name not in failed}
    if (ours := peaks.get("flatshard")) is not None:
        found.append(check("waits of the host in flatshard's step", rows["flatshard"]["host waits"].value or 0, 0))
        if theirs := peaks.get("FSDP2"):
            found.append(check("flatshard's peak over FSDP2's", ours / theirs, 1.02))
    return found


def measure(args: argparse.Namespace) -> list[Table]:
    if (device := choose_device(args, SIMULATED_SIZES)) is None:
        return []
    places = [place for place in PLACES if place.name in args.places]
    benches = [Bench(args, device, place) for place in places]
    rows = [bench.rows() for bench in benches]
    for bench, of_place in zip(benches if args.graphs else (), rows, strict=args.graphs):
        for name, row in of_place.items():
            if ROWS[name][0] in ("plain", "flatshard") and name != OFFLOAD:
                progress(f"graph, {bench.place.title}, {name}")
                row["graph"] = bench.graph(name)
    sizes = f"GPT of {args.layers} blocks of width {args.width}, batch {args.batch} x {args.context}"
    floor = "the plain model on the same device; of each column in benchmarks/one_gpu.py"
    tables = [
        Table(p.name, f"{p.title}: {sizes}", floor, of, notes=notes(of)) for p, of in zip(places, rows, strict=True)
    ]
    return [marked(table) for table in tables] if args.simulated else tables


BENCHMARK = Benchmark(
    measure,
    __doc__,
    sizes=SIZES,
    flags={"simulated": "on the simulated device: no results", "graphs": "capture steps in CUDA graphs, too"},
    names={"places": [place.name for place in PLACES], "rows": list(ROWS)},
)

if __name__ == "__main__":
    BENCHMARK.main()
