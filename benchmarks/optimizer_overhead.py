"""What sharded parameters and gradients cost an optimizer and gradient clipping, over plain ones of the same sizes.

    python benchmarks/optimizer_overhead.py --implementation foreach

100 units of 12 parameters of 64 elements, so that host time is all there is: a step of AdamW and ``zero_grad``. The plain
parameters are copies of this rank's parts in flatshard, of which in the fake group of 64 one in twelve is not empty, and in
the group of two (``--full``) every second. All run interleaved in one process; figures are medians over the rounds.

The floor is the plain parameters' time: 1. Flat parameters, one a unit, may be below it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from contenders import SHARDED, Setting, build
from suite import OURS, Figure, Table, arguments, fake_world, interleaved, main, over, progress
from torch import nn

import flatshard

PER_UNIT = 12
KINDS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "for-loop": {"foreach": False},
}
FLAT = "flatshard, flat"
"""By ``flat_parameters``."""


class Unit(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(numel)) for _ in range(PER_UNIT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def parameters(name: str, args: argparse.Namespace) -> tuple[nn.Module, list[nn.Parameter]]:
    """The model, and what its optimizer is given."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Unit(args.numel) for _ in range(args.units)))
    kind = "flatshard" if name in ("plain", FLAT) else name
    model = build(kind, model, Setting(Unit))
    if name == "plain":
        return model, [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    return model, flatshard.flat_parameters(model) if name == FLAT else list(model.parameters())


def gradients(params: list[nn.Parameter]) -> Callable[[], object]:
    """Gives every parameter its gradient, always the same one."""
    grads = [torch.ones_like(param) for param in params]

    def give() -> None:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad

    return give


def stepped(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    """Seconds of a step and ``zero_grad``."""
    give = gradients(params)

    def step() -> float:
        give()
        began = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    return step


def clipped(params: list[nn.Parameter], clip: Callable[[], object]) -> Callable[[], float]:
    give = gradients(params)

    def run() -> float:
        give()
        began = time.perf_counter()
        clip()
        return time.perf_counter() - began

    return run


def ratios(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, Figure]:
    """Of medians, to the plain parameters'."""
    times = interleaved(steps, rounds)
    base = statistics.median(times["plain"])
    return {name: over(series, base) for name, series in times.items() if name != "plain"} | {
        "floor: plain": over(times["plain"], base)
    }


def clipping(made: dict[str, tuple[nn.Module, list[nn.Parameter]]]) -> dict[str, Callable[[], float]]:
    """torch's ``clip_grad_norm_`` of plain and of sharded parameters, and our own."""
    model, params = made["flatshard"]
    plain = made["plain"][1]
    return {
        "plain": clipped(plain, lambda: torch.nn.utils.clip_grad_norm_(plain, 1e6)),
        "flatshard, by torch": clipped(params, lambda: torch.nn.utils.clip_grad_norm_(params, 1e6)),
        "flatshard, by its own": clipped(params, lambda: flatshard.clip_grad_norm_(model, 1e6)),
    }


def measure(args: argparse.Namespace) -> list[Table]:
    rounds = args.rounds or (41 if args.full else 25)
    columns: dict[str, dict[str, Figure]] = {}
    sizes = (2, 64) if args.full else (64,)
    for size in sizes:
        progress(f"optimizer, fake group of {size}")
        with fake_world(size):
            made = {name: parameters(name, args) for name in ("plain", *SHARDED, FLAT)}
            optimizers = {n: torch.optim.AdamW(params, **KINDS[args.implementation]) for n, (_, params) in made.items()}
            steps = {name: stepped(params, optimizers[name]) for name, (_, params) in made.items()}
            columns[f"{size} ranks"] = ratios(steps, rounds)
            if size == 64:
                clip = ratios(clipping(made), rounds)
    model = f"{args.units} units of {PER_UNIT} parameters"
    what = f"over plain parameters of the same sizes; medians of {rounds} rounds ({model})"
    names = next(iter(columns.values()))
    return [
        Table(
            "optimizer_overhead",
            f"AdamW ({args.implementation}) step + zero_grad {what}",
            "the plain parameters' own time is 1",
            {name: {c: column[name] for c, column in columns.items()} for name in names},
            {OURS: dict.fromkeys(columns, 1.3), FLAT: dict.fromkeys(columns, 0.3)},
        ),
        Table(
            "gradient_clipping",
            f"clip_grad_norm_ {what}",
            "the plain parameters' own time is 1",
            {name: {"64 ranks": figure} for name, figure in clip.items()},
        ),
    ]


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--units", type=int, default=100, help=f"of {PER_UNIT} parameters each")
    made.add_argument("--numel", type=int, default=64, help="elements of a parameter")
    made.add_argument("--rounds", type=int, default=0, help="default: 25, with --full 41")
    made.add_argument("--implementation", choices=list(KINDS), default="foreach", help="of AdamW")
    return made


if __name__ == "__main__":
    main(measure, parser())
