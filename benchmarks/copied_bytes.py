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
from dataclasses import replace

import torch
from contenders import SHARDED, Setting, build, drop_gradients, passes
from counting import CopiedBytes, Sent, Wire
from gpt import GPT, Block, GPTConfig
from suite import OURS, Benchmark, Figure, Table, by_column, fake_world, progress
from torch import nn

RANKS = 8
CONFIG = GPTConfig(vocabulary=512, context=512, layers=12, width=128, heads=8)
COLUMNS = {
    "fp32": Setting(Block),
    "bf16": Setting(Block, bf16=True),
    "fp32, 4 x no_sync": Setting(Block, microbatches=4, reduced=False),
    "fp32, 4 x reduced": Setting(Block, microbatches=4),
}
TARGETS = {"fp32": 2.3, "bf16": 1.9, "fp32, 4 x no_sync": 8.3}
PAYLOAD_TARGETS = {"fp32 payload / P": 2.96, "all-gathers": 25, "reduce-scatters": 13}


def parameter_bytes() -> int:
    """P."""
    return 4 * sum(p.numel() for p in GPT(CONFIG).parameters())


def made(name: str, setting: Setting, wire: Wire) -> nn.Module:
    """A contender's model, whose collectives are noted by ``wire`` if it is flatshard's."""
    torch.manual_seed(0)
    return build(name, GPT(CONFIG), replace(setting, collectives=wire.factory))


def step(name: str, model: nn.Module, setting: Setting) -> None:
    """Forwards and backwards, and no gradients left."""
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    passes(name, model, setting, lambda: model(tokens).float().mean())
    drop_gradients(model)


def copied(name: str, setting: Setting) -> int:
    """Bytes of a step after the first ones, which may build what the later ones use."""
    model = made(name, setting, Wire(out_of_place=True))
    for _ in range(2):
        step(name, model, setting)
    with CopiedBytes() as count:
        step(name, model, setting)
    return count.total


def ratio(name: str, column: str) -> float:
    """A contender's figure, within a fake group."""
    return (copied(name, COLUMNS[column]) - copied("plain", COLUMNS[column])) / parameter_bytes()


def floor() -> dict[str, Figure]:
    """In the order of the columns: see above."""
    values = (2.0, 1.5 + 1.5 / RANKS, 2.0, 4 * 2 + 3 * 3 / RANKS - 3 * 3)
    return {column: Figure(value) for column, value in zip(COLUMNS, values, strict=True)}


def sent(name: str, setting: Setting) -> list[tuple[str, int]]:
    """(kind, bytes of the whole) of each collective of a step, within a fake group."""
    wire = Wire(out_of_place=True)
    model = made(name, setting, wire)
    step(name, model, setting)
    del wire.sent[:]
    with Sent() as count:
        step(name, model, setting)
    return wire.sent + count.sent


def payload(name: str) -> dict[str, Figure]:
    """One contender's row of the second table, within a fake group."""
    fp32, bf16 = sent(name, COLUMNS["fp32"]), sent(name, COLUMNS["bf16"])
    kinds = [kind for kind, _ in fp32]
    gathers, reductions = kinds.count("all-gather"), kinds.count("reduce-scatter")
    return payload_row(
        gathers, reductions, len(kinds) - gathers - reductions, *(sum(n for _, n in s) for s in (fp32, bf16))
    )


def payload_row(gathers: int, reductions: int, others: int, fp32: float, bf16: float) -> dict[str, Figure]:
    counts = {"all-gathers": gathers, "reduce-scatters": reductions, "others": others}
    sizes = {"fp32 payload / P": fp32 / parameter_bytes(), "bf16 payload / P": bf16 / parameter_bytes()}
    return {column: Figure(value) for column, value in {**counts, **sizes}.items()}


def payload_floor() -> dict[str, Figure]:
    with torch.device("meta"):
        model = GPT(CONFIG)
    inner = sum(4 * p.numel() for block in model.blocks for p in block.parameters())
    gathered, reduced, units = parameter_bytes() + inner, parameter_bytes(), len(model.blocks)
    return payload_row(2 * units + 1, units + 1, 0, gathered + reduced, gathered / 2 + reduced)


def measure(args: argparse.Namespace) -> list[Table]:
    columns, rows = {}, {}
    with fake_world(RANKS):
        for column in COLUMNS:
            progress(f"bytes copied, {column}")
            columns[column] = {name: Figure(ratio(name, column)) for name in SHARDED}
        for name in SHARDED:
            progress(f"collectives, {name}")
            rows[name] = payload(name)
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
            {**rows, "floor": payload_floor()},
            {OURS: PAYLOAD_TARGETS},
            digits=3,
        ),
    ]


BENCHMARK = Benchmark(measure, __doc__)

if __name__ == "__main__":
    BENCHMARK.main()
