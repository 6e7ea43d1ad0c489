"""Milliseconds of one-time work: sharding, the first step, and the optimizer's first step.

    python benchmarks/setup_time.py

The first two use 30 units of 12 small parameters over the fake group of 4,096: their sharding, and their first forward and
backward, minus a plain model's. The last is the first step of AdamW (foreach), which makes its state, on this rank's shards
of 480 parameters (40 units). Every contender and round is a process of its own. It is forked from a process that has imported
everything and trained a plain model, but no contender: so the figure includes everything that a library builds or caches
once, but not torch's own first operations. The fake group's collectives fill nothing for peers (``filling_nothing``).
Contenders alternate; figures are medians over the rounds. The peers take seconds per round, and run with ``--full``.

The floor is the plain model: no sharding, its first step, and AdamW's first step on full parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor

import torch
from contenders import SHARDED, Setting, build, filling_nothing
from host_overhead import Unit, batch, units
from suite import OURS, Benchmark, Table, fake_world, progress, seconds, spread

RANKS = 4096
TARGETS = {"wrapping": 60.0, "first step over plain": 10.0, "AdamW's first step": 25.0}


def once(name: str) -> tuple[float, float, float]:
    """Return the seconds of the sharding, the first step, and the optimizer's first step."""
    torch.manual_seed(0)
    models = [units(30)]
    wrapping = seconds(lambda: models.append(build(name, models.pop(), Setting(Unit))))
    with contextlib.nullcontext() if name in ("plain", OURS) else filling_nothing():
        first = seconds(lambda: models[0](batch()).sum().backward())
        larger = build(name, units(40), Setting(Unit))
        larger(batch()).sum().backward()
    return wrapping, first, seconds(torch.optim.AdamW(larger.parameters(), foreach=True).step)


def forked(name: str) -> tuple[float, float, float]:
    """Run :func:`once` in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        return process.submit(once, name).result()


def measure(args: argparse.Namespace) -> list[Table]:
    names = ["plain", *(SHARDED if args.full else [OURS])]
    for module in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"):
        importlib.import_module(module)
    once("plain")
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    with fake_world(RANKS):
        for number in range(args.rounds):
            progress(f"set-up, round {number + 1} of {args.rounds}")
            for name in names:
                times[name].append(forked(name))
    plain = statistics.median(first for _, first, _ in times["plain"])
    rows = {}
    for name, series in times.items():
        less = 0.0 if name == "plain" else plain
        each = [(wrapping, first - less, adam) for wrapping, first, adam in series]
        rows["floor: plain (first step in all)" if name == "plain" else name] = {
            column: spread(1e3 * value for value in values)
            for column, values in zip(TARGETS, zip(*each, strict=True), strict=True)
        }
    return [
        Table(
            "setup_time",
            f"milliseconds of set-up over the fake group of {RANKS:,}: 30 units, and AdamW (foreach) of 480 parameters; "
            f"medians of {args.rounds} rounds",
            "the plain model's, in the same rounds; its first step is subtracted from the others'",
            rows,
            {OURS: TARGETS},
            digits=1,
        )
    ]


BENCHMARK = Benchmark(measure, __doc__, rounds=(11, 3))

if __name__ == "__main__":
    BENCHMARK.main()
