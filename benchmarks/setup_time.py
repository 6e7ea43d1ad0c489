"""Milliseconds of what happens once: sharding, the first step, the optimizer's first step.

    python benchmarks/setup_time.py

30 units of 12 small parameters over the fake group of 4,096: the wrapping, and the first forward and backward, beside a plain
model's first. Then AdamW's (foreach) first step of 480 parameters (40 units), which makes its state, on what this rank has of
4,096. Every contender and round is a process of its own, forked from one that has imported everything and trained a plain
model, but none of a contender: what a library builds or caches once is part of the figure, and what torch itself does at its
first operations is not. The fake group's collectives fill nothing for peers (``filling_nothing``). Contenders take turns;
medians over the rounds. The peers take seconds a round: with ``--full``.

The floor is the plain model: no wrapping, its first step, AdamW's first step on whole parameters.
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
    """Seconds of each: the wrapping, the first step, the optimizer's first step."""
    torch.manual_seed(0)
    models = [units(30)]
    wrapping = seconds(lambda: models.append(build(name, models.pop(), Setting(Unit))))
    with contextlib.nullcontext() if name in ("plain", OURS) else filling_nothing():
        first = seconds(lambda: models[0](batch()).sum().backward())
        larger = build(name, units(40), Setting(Unit))
        larger(batch()).sum().backward()
    return wrapping, first, seconds(torch.optim.AdamW(larger.parameters(), foreach=True).step)


def forked(name: str) -> tuple[float, float, float]:
    """:func:`once` in a process of its own."""
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
