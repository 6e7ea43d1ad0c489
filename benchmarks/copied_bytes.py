"""Bytes that a step copies and sends, as multiples of P, the float32 bytes of the parameters. They are counted, not timed.

    python benchmarks/copied_bytes.py

A GPT of 12 blocks, the fake group of 8, forward and backward.

The first table has local bytes beyond the plain model's. Reads and writes of every operation count, except collectives
(``counting.py`` states the convention). The plain model is float32, or bfloat16 if the contenders compute in it, and has as
many microbatches. ``4 x no_sync`` is four microbatches, of which only the last reduces. ``4 x reduced`` reduces each, which
is flatshard's default.

The floor: autograd allocates a gradient, which must be read once and written once into the reduction's input (float32: 2 P;
from bfloat16: 0.5 + 1). A collective can read a float32 shard in place; a bfloat16 shard is cast once, (1 + 0.5) / 8.
Microbatches without a reduction accumulate in the reduction's input. The plain model's own accumulation reads and writes as
much, so the floor is that of one reduction. To reduce each of four takes four copies of 2 P, and three additions of shards, 3
P / 8 each. It saves the plain model's three additions of 3 P.

The second table, ``payload``, has the bytes that collectives work on, with padding. An all-gather counts with its full
output, and a reduce-scatter with its full input: a rank sends and receives (N - 1) / N of it. The floor: if units are freed
after forward, every parameter is gathered twice, except the root's, which stay; every gradient is reduced once.
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
    """Return the float32 bytes of each block's parameters, with the rest of the model last."""
    with torch.device("meta"):
        model = GPT(config)
    blocks = [sum(4 * p.numel() for p in block.parameters()) for block in model.blocks]
    return [*blocks, sum(4 * p.numel() for p in model.parameters()) - sum(blocks)]


P = sum(unit_bytes())


def counted(name: str, setting: Setting) -> tuple[float, list[tuple[str, int]]]:
    """Return a step's copied bytes over P, and (kind, bytes in full) of each collective. Call it in a fake group."""
    wire = Wire(out_of_place=True)
    job = Job(name, CONFIG, replace(setting, collectives=wire.factory), TOKENS)
    for _ in range(2):  # the first steps may build objects that later ones use
        job.passes()
    wire.sent.clear()
    with Sent() as sent, CopiedBytes() as copied:
        job.passes()
    return copied.total / P, wire.sent + sent.sent


def floor() -> dict[str, Figure]:
    """Return the floor of each column; see above."""
    values = (2.0, 1.5 + 1.5 / RANKS, 2.0, 4 * 2 + 3 * 3 / RANKS - 3 * 3)
    return {column: Figure(value) for column, value in zip(COLUMNS, values, strict=True)}


def payload_row(kinds: Counter[str], fp32: float, bf16: float) -> dict[str, Figure]:
    gathers, reductions = kinds["all-gather"], kinds["reduce-scatter"]
    others = kinds.total() - gathers - reductions
    counts = {"all-gathers": gathers, "reduce-scatters": reductions, "others": others}
    sizes = {"fp32 payload / P": fp32 / P, "bf16 payload / P": bf16 / P}
    return {column: Figure(value) for column, value in {**counts, **sizes}.items()}


def payload(fp32: list[tuple[str, int]], bf16: list[tuple[str, int]]) -> dict[str, Figure]:
    """Return a contender's row of the second table, from its collectives in either precision."""
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
