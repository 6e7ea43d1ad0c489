"""What sharded parameters and gradients cost an optimizer and gradient clipping, over plain ones of the same sizes.

    python benchmarks/optimizer_overhead.py

100 units of 12 parameters of 64 elements, so that host time is all there is: a step of AdamW (foreach) and ``zero_grad``.
The plain parameters are copies of this rank's parts in flatshard, of which in the fake group of 64 one in twelve is not
empty, and in the group of two (``--full``) every second. All run interleaved in one process; figures are medians over the
rounds.

The floor is the plain parameters' time: 1. Flat parameters, one a unit, may be below it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from contenders import SHARDED, Setting, build
from suite import OURS, Benchmark, Figure, Table, by_column, fake_world, interleaved, over, progress, seconds
from torch import nn

import flatshard

PER_UNIT = 12
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


def timed(params: list[nn.Parameter], run: Callable[[], object]) -> Callable[[], float]:
    """Seconds of ``run``, on gradients that are always the same."""
    grads = [torch.ones_like(param) for param in params]

    def step() -> float:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        return seconds(run)

    return step


def stepped(params: list[nn.Parameter]) -> Callable[[], float]:
    """A step of AdamW and ``zero_grad``."""
    optimizer = torch.optim.AdamW(params, foreach=True)
    return timed(params, lambda: (optimizer.step(), optimizer.zero_grad()))


def clipped(made: dict[str, tuple[nn.Module, list[nn.Parameter]]]) -> dict[str, Callable[[], float]]:
    """torch's ``clip_grad_norm_`` of plain and of sharded parameters, and our own."""
    model, params = made["flatshard"]
    plain = made["plain"][1]
    return {
        "plain": timed(plain, lambda: torch.nn.utils.clip_grad_norm_(plain, 1e6)),
        "flatshard, by torch": timed(params, lambda: torch.nn.utils.clip_grad_norm_(params, 1e6)),
        "flatshard, by its own": timed(params, lambda: flatshard.clip_grad_norm_(model, 1e6)),
    }


def ratios(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, Figure]:
    """To the plain parameters'."""
    times = interleaved(steps, rounds)
    names = [*(name for name in times if name != "plain"), "plain"]
    return {"floor: plain" if name == "plain" else name: over(times[name], times["plain"]) for name in names}


def measure(args: argparse.Namespace) -> list[Table]:
    columns: dict[str, dict[str, Figure]] = {}
    for size in (2, 64) if args.full else (64,):
        progress(f"optimizer, fake group of {size}")
        with fake_world(size):
            made = {name: parameters(name, args) for name in ("plain", *SHARDED, FLAT)}
            columns[f"{size} ranks"] = ratios(
                {name: stepped(params) for name, (_, params) in made.items()}, args.rounds
            )
            clip = {f"{size} ranks": ratios(clipped(made), args.rounds)}
    model = f"{args.units} units of {PER_UNIT} parameters"
    what = f"over plain parameters of the same sizes; medians of {args.rounds} rounds ({model})"
    floor = "the plain parameters' own time is 1"
    return [
        Table(
            "optimizer_overhead",
            f"AdamW (foreach) step + zero_grad {what}",
            floor,
            by_column(columns),
            {OURS: dict.fromkeys(columns, 1.3), FLAT: dict.fromkeys(columns, 0.3)},
        ),
        Table("gradient_clipping", f"clip_grad_norm_ {what}", floor, by_column(clip)),
    ]


BENCHMARK = Benchmark(measure, __doc__, rounds=(25, 41), sizes={"units": 100, "numel": 64})

if __name__ == "__main__":
    BENCHMARK.main()
