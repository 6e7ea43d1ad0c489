"""A Muon step on sharded matrices: who steps what, over gloo on CPU, all in one process group, interleaved.

    python benchmarks/muon.py

The blocks of a GPT, fp32. Contenders make the same step from the same gradients:

- ``Whole()``, ``Rows()``, ``Elements()``: ``flatshard.optim.WholeParameterOptimizer`` of ``torch.optim.Muon`` in that layout;
- ``gather all``: each rank gathers every gradient and steps every matrix, keeping its part (the usual way on shards);
- ``FSDP2``: the same there, by ``grad.full_tensor()``.

A round runs each once; figures are medians over the rounds, and ratios to ``gather all``. The floor is a plain Muon's step of
every N-th matrix, without communication: this rank's share of the work.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from contenders import Setting, build
from gpt import GPT, Block, GPTConfig
from suite import Benchmark, Figure, Table, interleaved, over, seconds_of_all, spread
from torch import nn

import flatshard

Step = Callable[[], object]


def matrices_of(model: GPT) -> list[nn.Parameter]:
    """What Muon is for: the matrices of the blocks."""
    return [p for n, p in model.named_parameters() if "blocks" in n and len(flatshard.full_shape(p)) == 2]


def whole(layout: flatshard.layouts.Layout) -> Callable[[GPT], tuple[Step, str]]:
    """Each matrix on one rank."""

    def make(model: GPT) -> tuple[Step, str]:
        flatshard.fully_shard(model, policy={Block}, layout=layout)
        params = matrices_of(model)
        optimizer = flatshard.optim.WholeParameterOptimizer(params, torch.optim.Muon)
        give_gradients(params)
        cut = sum(flatshard.tensors.shard_info(p).owner is None for p in params)  # type: ignore[union-attr]
        return optimizer.step, f"{cut} of {len(params)} matrices are cut"

    return make


def gather_all(model: GPT) -> tuple[Step, str]:
    """Whole gradients on every rank, unit by unit, and a step of everything there."""
    flatshard.fully_shard(model, policy={Block})
    give_gradients(matrices_of(model))
    units = [m for m in model.modules() if isinstance(m, Block)]
    optimizers: list[torch.optim.Optimizer] = []

    def step() -> None:
        for i, unit in enumerate(units):
            with flatshard.summon_full_params(unit, with_grads=True):
                params = [p for p in unit.parameters() if p.dim() == 2 and p.grad is not None]
                if len(optimizers) <= i:
                    optimizers.append(torch.optim.Muon(params))
                before = optimizers[i].param_groups[0]["params"]
                state = optimizers[i].state
                optimizers[i].param_groups[0]["params"] = params
                for old, new in zip(before, params, strict=True):
                    if old is not new and old in state:
                        state[new] = state.pop(old)
                optimizers[i].step()

    return step, "every rank steps all"


def fsdp2(model: GPT) -> tuple[Step, str]:
    """The same with DTensors: whole gradients by ``full_tensor``, each rank keeps its rows of the result."""
    build("FSDP2", model, Setting(Block))
    params = matrices_of(model)
    give_gradients(params)
    wholes = [nn.Parameter(p.detach().full_tensor()) for p in params]  # type: ignore[attr-defined]
    optimizer = torch.optim.Muon(wholes)

    def step() -> None:
        for p, w in zip(params, wholes, strict=True):
            w.grad = p.grad.full_tensor()  # type: ignore[union-attr]
        optimizer.step()
        with torch.no_grad():
            for p, w in zip(params, wholes, strict=True):
                local = p.to_local()  # type: ignore[attr-defined]
                first = dist.get_rank() * -(-w.shape[0] // dist.get_world_size())
                local.copy_(w[first : first + local.shape[0]])

    return step, "every rank steps all, and holds all (not counted)"


def floor(model: GPT) -> tuple[Step, str]:
    """This rank's share of the work alone."""
    params = matrices_of(model)[dist.get_rank() :: dist.get_world_size()]
    give_gradients(params)
    return torch.optim.Muon(params).step, "a plain Muon on every N-th matrix"


def give_gradients(params: list[nn.Parameter]) -> None:
    torch.manual_seed(1)
    for p in params:
        p.grad = torch.randn_like(p)


CONTENDERS: dict[str, Callable[[GPT], tuple[Step, str]]] = {
    "floor": floor,
    "Whole()": whole(flatshard.layouts.Whole(max_padding=1.0)),
    "Rows()": whole(flatshard.layouts.Rows()),
    "Elements()": whole(flatshard.layouts.Elements()),
    "gather all": gather_all,
    "FSDP2": fsdp2,
}


def measure(args: argparse.Namespace) -> list[Table]:
    title = f"a Muon step of {args.layers} blocks of width {args.width}, {dist.get_world_size()} gloo ranks, fp32"
    least = "a plain Muon's step of every N-th matrix, without communication: this rank's share of the work"
    column = "over gather all"
    if not hasattr(torch.optim, "Muon"):
        return [Table("muon", title, least, {"flatshard": {column: Figure(None, note="no torch.optim.Muon here")}})]
    made: dict[str, tuple[Step, str]] = {}
    for name, make in CONTENDERS.items():
        torch.manual_seed(0)
        made[name] = make(GPT(GPTConfig(256, 64, args.layers, args.width, heads=8)))
    steps = {name: partial(seconds_of_all, step) for name, (step, _) in made.items()}
    times = interleaved(steps, args.rounds, warm_up=1)
    rows = {
        name: {column: over(series, times["gather all"]), "ms": spread(1e3 * value for value in series)}
        for name, series in times.items()
    }
    notes = [f"{name}: {note}" for name, (_, note) in made.items()]
    return [Table("muon", f"{title}; medians of {args.rounds} rounds", least, rows, notes=notes)]


BENCHMARK = Benchmark(measure, __doc__, ranks=2, rounds=(5, 9), sizes={"layers": 6, "width": 384})

if __name__ == "__main__":
    BENCHMARK.main()
