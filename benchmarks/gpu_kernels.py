"""Facts of one GPU on which flatshard's choices rest: alignment of parameters, compiled units, bandwidth of checkpoints.

``gpu.py`` runs this.

    python benchmarks/gpu_kernels.py
    python benchmarks/gpu_kernels.py --simulated

- alignment: a parameter is a view of the unit's flat buffer, and begins where the one before it ends, rounded up to 16 bytes.
  A bf16 matrix product with a weight at such an offset, over the same with a weight of its own. Floor: 1. A row with an
  offset of 2 bytes shows what rounding saves.
- compiled: a step of a GPT whose blocks are compiled, by the default mode and by ``reduce-overhead`` (CUDA graphs), over the
  eager step, with the largest relative error of its gradients. Floor: unknown.
- checkpoint: seconds for each GiB of a sharded model and AdamW's state, from the device to the disk and back. Floor: a copy
  of as many bytes to the host and a write.

Without a GPU it says so, and prints no tables.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
import torch.nn.functional as F
from contenders import Job, Setting, as_over_nccl
from devices import Device, choose_device
from gpt import GPT, Block, GPTConfig
from one_gpu import first_line
from suite import Benchmark, Figure, Table, check, fake_world, marked, over, progress, seconds, spread

import flatshard

SIZES = {"layers": 6, "width": 2048, "context": 1024, "vocabulary": 8192, "batch": 4, "rounds": 15}
SIMULATED_SIZES = {"layers": 1, "width": 16, "context": 4, "vocabulary": 8, "batch": 1, "rounds": 2}
GIB = 2**30


def config_of(args: argparse.Namespace) -> GPTConfig:
    return GPTConfig(args.vocabulary, args.context, args.layers, args.width, heads=8)


def times_of(device: Device, run: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds of each round after a warm-up."""
    for _ in range(3):
        run()
    return [device.seconds(run) for _ in range(rounds)]


def alignment(args: argparse.Namespace, device: Device) -> Table:
    """Time matrix products with weights at several offsets in a flat buffer."""
    shapes = {
        "attention": (3 * args.width, args.width),
        "MLP": (4 * args.width, args.width),
        "odd": (args.width + 1,) * 2,
    }
    rows: dict[str, dict[str, Figure]] = {"own memory": {}, "16 bytes": {}, "2 bytes": {}}
    notes: list[str] = []
    for name, shape in shapes.items():
        x = torch.ones(args.batch * args.context, shape[1], device=device.device, dtype=torch.bfloat16)
        numel = shape[0] * shape[1]
        flat = torch.ones(numel + 8, device=device.device, dtype=torch.bfloat16)
        weights = {"own memory": torch.ones(shape, device=device.device, dtype=torch.bfloat16)}
        weights |= {"16 bytes": flat[8 : 8 + numel].view(shape), "2 bytes": flat[1 : 1 + numel].view(shape)}
        products = {row: functools.partial(F.linear, x, weight) for row, weight in weights.items()}
        times = {row: times_of(device, product, args.rounds) for row, product in products.items()}
        for row, series in times.items():
            rows[row][name] = over(series, times["own memory"])
            off = float((products[row]() / products["own memory"]() - 1).abs().max())
            if row != "own memory":
                notes.append(check(f"{name}, {row}: a product is off by", off, 0.01))
    title = "bf16 matrix product over the same with aligned memory of its own"
    return Table("alignment", title, "1", rows, notes=notes)


def compiled(args: argparse.Namespace, device: Device) -> Table:
    """Time steps with compiled units."""
    modes: dict[str, dict[str, Any] | None] = {
        "eager": None,
        "default": {},
        "reduce-overhead": {"mode": "reduce-overhead"},
    }
    rows: dict[str, dict[str, Figure]] = {}
    tokens = torch.zeros(args.batch, args.context, dtype=torch.int64, device=device.device)
    found: dict[str, list[float]] = {}
    norms: dict[str, float] = {}
    notes: list[str] = []
    for name, options in modes.items():
        progress(f"compiled, {name}")
        torch.manual_seed(0)
        model: Any = GPT(config_of(args)).to(device.device)
        for block in model.blocks if options is not None else ():
            block.compile(**options)
        model = flatshard.fully_shard(model, policy={Block}, collectives=as_over_nccl)

        def step(model: Any = model) -> None:
            for p in model.parameters():
                p.grad = None
            model(tokens).float().square().mean().backward()

        try:
            found[name] = times_of(device, step, args.rounds)
        except Exception as e:  # any error is the finding
            rows[name] = {"ms": first_line(e)}
            notes.append(f"WRONG: {name} fails: {first_line(e).note}")
            device.recover()
            continue
        norms[name] = float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())
        rows[name] = {
            "ms": spread(1e3 * value for value in found[name]),
            "over eager": over(found[name], found["eager"]),
            "norm of gradients, off by": Figure(abs(norms[name] / norms["eager"] - 1)),
        }
        notes.append(check(f"{name}: the norm of gradients is off by", abs(norms[name] / norms["eager"] - 1), 0.01))
    title = "forward and backward with compiled units"
    return Table("compiled", title, "none is known", rows, notes=notes, digits=4)


def checkpoints(args: argparse.Namespace, device: Device) -> Table:
    """Time the save and the load of a trained model and its optimizer."""
    tokens = torch.zeros(args.batch, args.context, dtype=torch.int64)
    job = Job("flatshard", config_of(args), Setting(Block, device=device.device, collectives=as_over_nccl), tokens)
    job.step()
    state = {"model": job.model, "optimizer": job.optimizer}
    numel = sum(p.numel() for p in job.model.parameters())
    nbytes = 12 * numel
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved"
        saves = [seconds(lambda: flatshard.save_checkpoint(path, state, overwrite=True)) for _ in range(3)]
        saved = [p.detach().clone() for p in job.model.parameters()]
        with torch.no_grad():
            for p in job.model.parameters():
                p.zero_()
        loads = [seconds(lambda: (flatshard.load_checkpoint(path, state), device.finish())) for _ in range(3)]
        differ = sum(not torch.equal(p, was) for p, was in zip(job.model.parameters(), saved, strict=True))
        host = torch.empty(nbytes, dtype=torch.uint8)
        here = torch.empty(nbytes, dtype=torch.uint8, device=device.device)
        device.finish()
        plain = memoryview((ctypes.c_char * nbytes).from_address(host.data_ptr()))  # numpy may be absent
        floor = seconds(lambda: (host.copy_(here), (Path(folder) / "plain").write_bytes(plain)))
    per_gib = GIB / nbytes
    rows = {
        "flatshard": {
            "save, s/GiB": spread(s * per_gib for s in saves),
            "load, s/GiB": spread(s * per_gib for s in loads),
        },
        "copy and write": {"save, s/GiB": Figure(floor * per_gib)},
    }
    median = statistics.median(saves)
    title = f"a sharded GPT and AdamW's state, {nbytes / 2**20:,.0f} MiB here, saved in {median:.2f} s"
    notes = [check("parameters that were loaded with other values", differ, 0)]
    return Table("checkpoints", title, "a copy of as many bytes to the host, and a write", rows, notes=notes, digits=3)


def measure(args: argparse.Namespace) -> list[Table]:
    if (device := choose_device(args, SIMULATED_SIZES)) is None:
        return []
    tables = [alignment(args, device)]
    with fake_world(1):
        if not args.simulated:
            tables.append(compiled(args, device))  # the simulated device has no compiler
        tables.append(checkpoints(args, device))
    return [marked(table) for table in tables] if args.simulated else tables


BENCHMARK = Benchmark(measure, __doc__, sizes=SIZES, flags={"simulated": "on the simulated device: no results"})

if __name__ == "__main__":
    BENCHMARK.main()
