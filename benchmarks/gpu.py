"""On one GPU: step time, kernels, bytes copied, memory, host waits, CUDA graphs, overlap. Against FSDP1, FSDP2 and plain.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --simulated

A GPT in float32, and with bf16 compute, over the fake group of 8 and of 64 and over NCCL at world size 1, where nobody sends
anything. Over the fake group everybody calls the collectives of torch.distributed as over NCCL, each of which is one call
into the group that moves nothing, so that all else shows. Without a GPU it says so, and there are no tables. (No file here
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
- graph: whether a step with SGD (foreach, momentum) can be captured in a CUDA graph and replayed; in a process of its own.
  The replay's time, or the error. Over NCCL its numbers are compared with those of eager steps. Floor: the plain model's.
- overlap (a table of its own): the share of the collectives' time that other kernels ran in, with collectives that keep their
  stream busy for a while (``--cycles``): with prefetch and without. At best 1.

Rows of flatshard: as it is, with ``static_buffers=True``, with ``CPUOffload``, and in bf16 also with
``DefaultCollectives(group, widens=True)``, which sends gradients in bf16 and adds them in float32. A contender that fails has
its error in the first column.

``--simulated`` runs all of this, tiny, on the simulated accelerator of the tests (``test/accelerator``), to show that it
runs. Its figures are no results, say so in every cell, and are not written anywhere: ``devices.py`` has what they are.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from contenders import FSDP1_FLAT, Job, Setting, filling_nothing, numel
from counting import CopiedBytes
from devices import Cuda, Device, Simulated
from gpt import Block, GPTConfig
from suite import Benchmark, Figure, Table, fake_world, interleaved, over, progress, spread

import flatshard
from flatshard.comm import Collectives, DefaultCollectives


@dataclass(frozen=True)
class Place:
    """A process group, and what is computed with."""

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


def as_over_nccl(group: dist.ProcessGroup, device: torch.device) -> Collectives:
    """Flatshard's collectives, also over the fake group, for which it has others."""
    return DefaultCollectives(group)


def widening(group: dist.ProcessGroup, device: torch.device) -> Collectives:
    return DefaultCollectives(group, widens=True)


WIDENS, OFFLOAD = "flatshard, bf16 sent", "flatshard, offload"
OURS = Setting(Block, collectives=as_over_nccl)
ROWS = {
    "plain": ("plain", OURS),
    "flatshard": ("flatshard", OURS),
    "flatshard, static buffers": ("flatshard", replace(OURS, options={"static_buffers": True})),
    WIDENS: ("flatshard", replace(OURS, collectives=widening)),
    OFFLOAD: ("flatshard", replace(OURS, options={"cpu_offload": flatshard.CPUOffload(offload_params=True)})),
    "FSDP2": ("FSDP2", OURS),
    "FSDP1": ("FSDP1", OURS),
    FSDP1_FLAT: (FSDP1_FLAT, OURS),
}
OVERLAPPED = ("flatshard", "flatshard, static buffers", "FSDP2", "FSDP1")
SIZES = {"layers": 12, "width": 1024, "context": 512, "vocabulary": 8192, "batch": 4, "rounds": 15, "cycles": 800_000}
SIMULATED_SIZES = {"layers": 1, "width": 16, "context": 4, "vocabulary": 8, "batch": 1, "rounds": 1}
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)


def rows_of(place: Place) -> list[str]:
    """Those that mean something there."""
    return [name for name in ROWS if place.bf16 or name != WIDENS]


@contextlib.contextmanager
def world(place: Place, device: Device, before: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Be rank 0 of a process group. ``before`` is called before each collective, if it is fake."""
    if place.is_fake:
        with fake_world(place.size), filling_nothing(before):
            yield
        return
    dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=place.size)
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()


@dataclass(frozen=True)
class Bench:
    """Makes contenders in one place, on one device."""

    args: argparse.Namespace
    device: Device
    place: Place

    @property
    def config(self) -> GPTConfig:
        a = self.args
        return GPTConfig(a.vocabulary, a.context, a.layers, a.width, heads=8)

    def job(self, name: str, prefetch: bool = True, optimizer: Callable[..., torch.optim.Optimizer] = ADAMW) -> Job:
        contender, setting = ROWS[name]
        setting = replace(setting, bf16=self.place.bf16, prefetch=prefetch, device=self.device.device)
        tokens = torch.zeros(self.args.batch, self.args.context, dtype=torch.int64)
        return Job(contender, self.config, setting, tokens, optimizer)

    def attempt(self, run: Callable[[], Figure | dict[str, Figure]]) -> Figure | dict[str, Figure]:
        """What ``run`` returns, or its error as a figure: it stands in the table, and the others go on."""
        try:
            return run()
        except Exception as e:
            self.device.recover()
            return Figure(None, note=f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"[:120])

    def alone(self, name: str) -> dict[str, Figure]:
        """What is counted of one contender, with nothing else on the device. Bytes copied: in all, over P."""
        gc.collect()  # sharded models lie in cycles
        gc.freeze()  # what is left: the next time is quicker
        self.device.finish()
        before, job = self.device.allocated(), self.job(name)
        for _ in range(self.device.warm_up):
            job.step()
        peak, trace = self.device.peak(job.step), self.device.trace(job.step)
        with CopiedBytes() as copied:
            job.passes()
        self.device.finish()
        return {
            "kernels": Figure(len(trace.kernels)),
            "copies": Figure(trace.copies),
            "copied / P": Figure(copied.total / (4 * numel(self.config))),
            "peak, MiB": Figure((peak - before) / 2**20),
            "host waits": Figure(trace.waits),
        }

    def graph(self, name: str) -> Figure:
        """Whether a step can be captured, and how long its replay takes."""
        job, eager = self.job(name, optimizer=SGD), self.job(name, optimizer=SGD)
        start = values(job)
        replay = self.device.captured(job.step)
        if not self.place.is_fake:  # over which the numbers are of no meaning
            trained = values(job)
            for _ in range(self.device.warm_up + 1):
                eager.step()
            off = float((trained - values(eager)).norm() / (values(eager) - start).norm())
            if not off < 0.05:
                return Figure(None, note=f"it computes other numbers: off by {off:.0%}")
        return Figure(None, note=f"yes, {self.device.seconds(replay) * 1e3:.2f} ms")

    def rows(self) -> dict[str, dict[str, Figure]]:
        """All contenders' figures."""
        rows: dict[str, dict[str, Figure]] = {}
        with world(self.place, self.device):
            for name in rows_of(self.place):
                progress(f"{self.place.title}, {name}")
                found = self.attempt(functools.partial(self.alone, name))
                rows[name] = {"ms": found} if isinstance(found, Figure) else found
            well = [name for name, row in rows.items() if "ms" not in row]
            jobs = {name: self.job(name) for name in well}
            steps = {name: functools.partial(self.device.seconds, job.step) for name, job in jobs.items()}
            times = interleaved(steps, self.args.rounds, min(self.device.warm_up, self.args.rounds - 1))
            jobs.clear()
            steps.clear()
            plain = rows["plain"]["copied / P"].value
            for name, series in times.items():
                copied = rows[name]["copied / P"].value
                assert copied is not None and plain is not None  # noqa: PT018
                timed = {"ms": spread(1e3 * value for value in series), "over plain": over(series, times["plain"])}
                rows[name] = {**timed, **rows[name], "copied / P": Figure(copied - plain)}
                if not self.device.captures_apart:
                    rows[name]["graph"] = self.attempt(functools.partial(self.graph, name))
        if self.device.captures_apart:
            for name in well:
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    run = process.submit(graph_on_cuda, name, self.args, self.place).result
                    rows[name]["graph"] = self.attempt(run)
        return rows

    def hidden(self, name: str, prefetch: bool) -> Figure:
        """How much of slow collectives is."""
        job = self.job(name, prefetch)
        for _ in range(2):
            job.passes()
        return Figure(self.device.trace(job.passes).hidden())


def values(job: Job) -> torch.Tensor:
    """This rank's parameters, on the host."""
    local = [getattr(p, "_local_tensor", p).detach() for p in job.model.parameters()]
    return torch.cat([p.flatten().float().cpu() for p in local])


def graph_on_cuda(name: str, args: argparse.Namespace, place: Place) -> Figure:
    """:meth:`Bench.graph`, in a process of its own."""
    device = Cuda()
    with world(place, device):
        return Bench(args, device, place).graph(name)


def overlap(args: argparse.Namespace, device: Device) -> dict[str, dict[str, Figure]]:
    bench = Bench(args, device, PLACES[0])
    rows: dict[str, dict[str, Figure]] = {name: {} for name in OVERLAPPED}
    with world(bench.place, device, before=lambda: device.spin(args.cycles)):
        for name, row in rows.items():
            progress(f"overlap, {name}")
            for column, prefetch in (("prefetch", True), ("no prefetch", False)):
                row[column] = bench.attempt(functools.partial(bench.hidden, name, prefetch))
    return rows


def marked(table: Table) -> Table:
    """A table of the simulated device: no cell of it is a number any more, and nobody takes it for a result."""
    rows = {
        name: {column: Figure(None, note=f"{figure.text(table.digits)} simulated") for column, figure in row.items()}
        for name, row in table.rows.items()
    }
    title = f"simulated, no results: {table.title}"
    return dataclasses.replace(table, name=f"simulated_{table.name}", title=title, rows=rows)


def measure(args: argparse.Namespace) -> list[Table]:
    if args.simulated:
        if args.json:
            raise SystemExit("gpu.py: --simulated writes no files: its figures are no results")
        vars(args).update(SIMULATED_SIZES)
    elif not torch.cuda.is_available():
        progress("no GPU is available here: gpu.py has no tables")
        return []
    device = Simulated() if args.simulated else Cuda()
    sizes = f"GPT of {args.layers} blocks of width {args.width}, batch {args.batch} x {args.context}"
    floor = "the plain model on the same device; of each column in benchmarks/gpu.py"
    tables = [Table(p.name, f"{p.title}: {sizes}", floor, Bench(args, device, p).rows()) for p in PLACES]
    title = f"share of the collectives' time that other kernels ran in, collectives of {args.cycles:,} cycles"
    tables.append(Table("gpu_overlap", title, "none; 1 would be all", overlap(args, device)))
    return [marked(table) for table in tables] if args.simulated else tables


BENCHMARK = Benchmark(measure, __doc__, sizes=SIZES, flags={"simulated": "on the simulated device: no results"})

if __name__ == "__main__":
    BENCHMARK.main()
