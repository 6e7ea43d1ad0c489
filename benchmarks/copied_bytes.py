"""What a step copies and what it sends, as multiples of P, the float32 bytes of the parameters. Counted, not timed.

    python benchmarks/copied_bytes.py

A GPT of 12 blocks, the fake group of 8, forward and backward.

The first table: local bytes beyond the plain model's. Every operation's reads and writes are counted, collectives left out
(``counting.py`` states the convention). The plain model is float32, or bfloat16 where the contenders compute in it.
``4 x no_sync`` is four microbatches of which the last reduces; ``4 x reduced`` reduces each, which is flatshard's default
way to accumulate. The plain model makes as many microbatches.

The floor: autograd makes a gradient in memory of its own, and it must get into the reduction's input: read once, written
once (float32: 2 P; from bfloat16: 0.5 + 1). A float32 shard may be handed to the collective where it lies; one of bfloat16 is
cast once (1 + 0.5) / 8. Microbatches that are not reduced are added up in the reduction's input: what that reads and writes,
the plain model's own accumulation does as well, so the floor is that of one reduction. Reducing each of four makes four
copies of 2 P, adds three shards of 3 P / 8, and saves the plain model's three additions of 3 P.

The second table, ``payload``: the bytes that collectives work on, with padding. An all-gather counts with its whole output, a
reduce-scatter with its whole input: (N - 1) / N of that is what a rank sends and receives. The floor: with units that are
freed after forward, every parameter is gathered twice, but for the root's, which stay; and every gradient is reduced once.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace

import torch
from contenders import SHARDED, Job, Setting
from counting import CopiedBytes, Sent, Wire
from gpt import GPT, Block, GPTConfig
from suite import OURS, Benchmark, Figure, Table, by_column, fake_world, progress

RANKS = 8
CONFIG = GPTConfig(vocabulary=512, context=512, layers=12, width=128, heads=8)
TOKENS = torch.zeros(1, 16, dtype=torch.int64)
COLUMNS = {
    "fp32": Setting(Block),
    "bf16": Setting(Block, bf16=True),
    "fp32, 4 x no_sync": Setting(Block, microbatches=4, reduced=False),
    "fp32, 4 x reduced": Setting(Block, microbatches=4),
}
TARGETS = {"fp32": 2.3, "bf16": 1.9, "fp32, 4 x no_sync": 8.3}
PAYLOAD_TARGETS = {"fp32 payload / P": 2.96, "all-gathers": 25, "reduce-scatters": 13}


def unit_bytes(config: GPTConfig = CONFIG) -> list[int]:
    """Of the float32 parameters: each block, and the rest last."""
    with torch.device("meta"):
        model = GPT(config)
    blocks = [sum(4 * p.numel() for p in block.parameters()) for block in model.blocks]
    return [*blocks, sum(4 * p.numel() for p in model.parameters()) - sum(blocks)]


P = sum(unit_bytes())


def counted(name: str, setting: Setting) -> tuple[float, list[tuple[str, int]]]:
    """A step's copied bytes over P, and (kind, bytes of the whole) of each collective. Within a fake group."""
    wire = Wire(out_of_place=True)
    job = Job(name, CONFIG, replace(setting, collectives=wire.factory), TOKENS)
    for _ in range(2):  # the first ones may build what the later ones use
        job.passes()
    wire.sent.clear()
    with Sent() as sent, CopiedBytes() as copied:
        job.passes()
    return copied.total / P, wire.sent + sent.sent


def floor() -> dict[str, Figure]:
    """In the order of the columns: see above."""
    values = (2.0, 1.5 + 1.5 / RANKS, 2.0, 4 * 2 + 3 * 3 / RANKS - 3 * 3)
    return {column: Figure(value) for column, value in zip(COLUMNS, values, strict=True)}


def payload_row(kinds: Counter[str], fp32: float, bf16: float) -> dict[str, Figure]:
    gathers, reductions = kinds["all-gather"], kinds["reduce-scatter"]
    others = kinds.total() - gathers - reductions
    counts = {"all-gathers": gathers, "reduce-scatters": reductions, "others": others}
    sizes = {"fp32 payload / P": fp32 / P, "bf16 payload / P": bf16 / P}
    return {column: Figure(value) for column, value in {**counts, **sizes}.items()}


def payload(fp32: list[tuple[str, int]], bf16: list[tuple[str, int]]) -> dict[str, Figure]:
    """One contender's row of the second table, from what it sends in either precision."""
    return payload_row(Counter(kind for kind, _ in fp32), *(sum(n for _, n in sent) for sent in (fp32, bf16)))


def payload_floor() -> dict[str, Figure]:
    *blocks, _ = unit_bytes()
    gathered = P + sum(blocks)
    kinds = Counter({"all-gather": 2 * len(blocks) + 1, "reduce-scatter": len(blocks) + 1})
    return payload_row(kinds, gathered + P, gathered / 2 + P)


def measure(args: argparse.Namespace) -> list[Table]:
    columns: dict[str, dict[str, Figure]] = {}
    sent: dict[str, dict[str, list[tuple[str, int]]]] = {name: {} for name in SHARDED}
    with fake_world(RANKS):
        for column, setting in COLUMNS.items():
            progress(f"bytes copied, {column}")
            plain, _ = counted("plain", setting)
            columns[column] = {}
            for name in SHARDED:
                copied, sent[name][column] = counted(name, setting)
                columns[column][name] = Figure(copied - plain)
    where = f"over P (GPT of 12 blocks, fake group of {RANKS})"
    return [
        Table(
            "copied_bytes",
            f"local bytes copied in a step over the plain model's, {where}",
            "each gradient is read and written once, into the reduction's input; bf16 shards are cast once; by arithmetic",
            {**by_column(columns), "floor": floor()},
            {OURS: TARGETS},
        ),
        Table(
            "payload",
            f"collectives of a step and their payload {where}",
            "each unit gathered twice and the root once, each gradient reduced once, without padding; by arithmetic",
            {**{name: payload(s["fp32"], s["bf16"]) for name, s in sent.items()}, "floor": payload_floor()},
            {OURS: PAYLOAD_TARGETS},
            digits=3,
        ),
    ]


BENCHMARK = Benchmark(measure, __doc__)

if __name__ == "__main__":
    BENCHMARK.main()
