"""Collectives of a step, and the bytes that they work on, as a multiple of P, the float32 bytes of the parameters.

    python benchmarks/payload.py

The model, the group and the step are those of ``copied_bytes.py``. An all-gather counts with its whole output, a
reduce-scatter with its whole input: (N - 1) / N of that is what a rank sends and receives. With padding.

The floor: with units that are freed after forward, every parameter is gathered twice, but for the root's, which stay; and
every gradient is reduced once.
"""

from __future__ import annotations

import argparse

import torch
from contenders import SHARDED, Setting, build
from copied_bytes import CONFIG, RANKS, parameter_bytes, step
from counting import Sent, Wire
from gpt import GPT, Block
from suite import OURS, Figure, Table, arguments, fake_world, main, progress

TARGETS = {"fp32 payload / P": 2.96, "all-gathers": 25, "reduce-scatters": 13}


def sent(name: str, bf16: bool) -> list[tuple[str, int]]:
    """(kind, bytes of the whole) of each collective of a step, within a fake group."""
    torch.manual_seed(0)
    wire = Wire(out_of_place=True)
    model = build(name, GPT(CONFIG), Setting(Block, bf16=bf16, collectives=wire.factory))
    step(name, model)
    del wire.sent[:]
    with Sent() as count:
        step(name, model)
    return wire.sent + count.sent


def figures(name: str) -> dict[str, float]:
    """One contender's row."""
    fp32, bf16 = sent(name, False), sent(name, True)
    kinds = [kind for kind, _ in fp32]
    other = len(kinds) - kinds.count("all-gather") - kinds.count("reduce-scatter")
    return {
        "all-gathers": kinds.count("all-gather"),
        "reduce-scatters": kinds.count("reduce-scatter"),
        "others": other,
        "fp32 payload / P": sum(n for _, n in fp32) / parameter_bytes(),
        "bf16 payload / P": sum(n for _, n in bf16) / parameter_bytes(),
    }


def floor() -> dict[str, Figure]:
    with torch.device("meta"):
        model = GPT(CONFIG)
    inner = sum(4 * p.numel() for block in model.blocks for p in block.parameters())
    gathered = 1 + inner / parameter_bytes()
    units = len(model.blocks)
    return {
        "all-gathers": Figure(2 * units + 1),
        "reduce-scatters": Figure(units + 1),
        "others": Figure(0),
        "fp32 payload / P": Figure(gathered + 1),
        "bf16 payload / P": Figure(gathered / 2 + 1),
    }


def measure(args: argparse.Namespace) -> list[Table]:
    rows = {}
    with fake_world(RANKS):
        for name in SHARDED:
            progress(f"collectives, {name}")
            rows[name] = {column: Figure(value) for column, value in figures(name).items()}
    return [
        Table(
            "payload",
            f"collectives of a step and their payload over P (GPT of 12 blocks + root, fake group of {RANKS})",
            "each unit gathered twice and the root once, each gradient reduced once, without padding; by arithmetic",
            {**rows, "floor": floor()},
            {OURS: TARGETS},
            digits=3,
        )
    ]


if __name__ == "__main__":
    main(measure, arguments(__doc__))
