"""Cost of sharded parameters and gradients in an optimizer and in clipping, relative to plain ones of the same sizes.

    python benchmarks/optimizer_overhead.py

A step of AdamW (foreach) and ``zero_grad`` run on 100 units of 12 parameters of 64 elements, so all of the time is the
host's. Plain parameters are copies of this rank's shards in flatshard. In the fake group of 64 one in twelve is not empty,
with ``--world-size 2`` every second. All contenders run interleaved in one process; figures are medians over the rounds.

The floor is the plain parameters' time: 1. Flat parameters, one per unit, may be below it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import checkout  # noqa: F401
import torch
from contenders import SHARDED, Setting, build
from suite import OURS, Benchmark, Figure, Table, fake_world, interleaved, over, seconds
from torch import nn

import flatshard

PER_UNIT = 12
FLAT = "flatshard, flat"
"""flatshard with ``flat_parameters``."""


class Unit(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(numel)) for _ in range(PER_UNIT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def sharded(name: str, args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return build(name, nn.Sequential(*(Unit(args.numel) for _ in range(args.units))), Setting(Unit))


def timed(params: Sequence[nn.Parameter], run: Callable[[], object]) -> Callable[[], float]:
    """Return a function that times ``run``, always on the same gradients."""
    grads = [torch.ones_like(param) for param in params]

    def step() -> float:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        return seconds(run)

    return step


def stepped(params: Sequence[nn.Parameter]) -> Callable[[], float]:
    """Return a function that times a step of AdamW and ``zero_grad``."""
    optimizer = torch.optim.AdamW(params, foreach=True)
    return timed(params, lambda: (optimizer.step(), optimizer.zero_grad()))


def ratios(steps: dict[str, Callable[[], float]], rounds: int, column: str) -> dict[str, dict[str, Figure]]:
    """Return a table's rows, as ratios to the first of ``steps``."""
    times = interleaved(steps, rounds)
    floor, *others = times
    return {name: {column: over(times[name], times[floor])} for name in [*others, floor]}


def measure(args: argparse.Namespace) -> list[Table]:
    column = f"{args.world_size} ranks"
    clip = partial(torch.nn.utils.clip_grad_norm_, max_norm=1e6)
    with fake_world(args.world_size):
        models = {name: sharded(name, args) for name in SHARDED}
        params = {name: list(model.parameters()) for name, model in models.items()}
        params[FLAT] = list(flatshard.flat_parameters(sharded(OURS, args)))
        ours, plain = params[OURS], [nn.Parameter(p.detach().clone()) for p in params[OURS]]
        steps = {"floor: plain": stepped(plain), **{name: stepped(each) for name, each in params.items()}}
        stepping = ratios(steps, args.rounds, column)
        clips = {
            "floor: plain": timed(plain, lambda: clip(plain)),
            "flatshard, by torch": timed(ours, lambda: clip(ours)),
            "flatshard, by its own": timed(ours, lambda: flatshard.clip_grad_norm_(models[OURS], 1e6)),
        }
        clipping = ratios(clips, args.rounds, column)
    model = f"{args.units} units of {PER_UNIT} parameters"
    what = f"over plain parameters of the same sizes; medians of {args.rounds} rounds ({model})"
    floor = "the plain parameters' own time is 1"
    targets = {OURS: {column: 1.3}, FLAT: {column: 0.3}}
    return [
        Table("optimizer_overhead", f"AdamW (foreach) step + zero_grad {what}", floor, stepping, targets),
        Table("gradient_clipping", f"clip_grad_norm_ {what}", floor, clipping),
    ]


BENCHMARK = Benchmark(measure, __doc__, rounds=(25, 41), sizes={"world_size": 64, "units": 100, "numel": 64})

if __name__ == "__main__":
    BENCHMARK.main()
