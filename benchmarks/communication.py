"""What cheaper communication costs in exactness, and saves in time: a small GPT, trained by each way of communicating.

    python benchmarks/communication.py

All train the same model on the same bytes of the standard library's sources, interleaved: a round is one step of each.
The loss is the mean over ranks; "off" is the largest relative distance from fp32's curve in any step. Over loopback bytes
are cheap, so here int8 costs more time than it saves. "none" is garbage, and shows what communication costs at all.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from corpus import VOCABULARY, load_corpus, random_windows
from gpt import GPT, Block, GPTConfig
from no_communication import NoCommunication
from suite import Benchmark, Figure, Table, progress, seconds_of_all, spread
from torch import nn

import flatshard
from flatshard.comm import QuantizedCollectives


def with_collectives(factory: object = None) -> Callable[[GPT], nn.Module]:
    return lambda model: flatshard.fully_shard(model, policy={Block}, collectives=factory)


def with_hook(hook: Callable[..., object]) -> Callable[[GPT], nn.Module]:
    def shard(model: GPT) -> nn.Module:
        flatshard.fully_shard(model, policy={Block})
        flatshard.comm.register_comm_hook(model, None, hook)
        return model

    return shard


WAYS: dict[str, Callable[[GPT], nn.Module]] = {
    "fp32": with_collectives(),
    "bf16 hook": with_hook(flatshard.comm.bf16_compress_hook),
    "fp16 hook": with_hook(flatshard.comm.fp16_compress_hook),
    "int8": with_collectives(QuantizedCollectives()),
    "int8 gather": with_collectives(QuantizedCollectives(reduce=False)),
    "int8 reduce": with_collectives(QuantizedCollectives(all_gather=False)),
    "none": with_collectives(NoCommunication()),
}


def parameter_error(quantized: nn.Module) -> float:
    """Relative RMS of what quantisation changes in the parameters that forward sees."""
    flatshard.unshard(quantized, recurse=True)
    gathered = [p.detach().clone() for p in quantized.parameters()]
    flatshard.reshard(quantized)
    with flatshard.summon_full_params(quantized, writeback=False):
        return _relative(gathered, [p.detach().clone() for p in quantized.parameters()])


def gradient_error(model: nn.Module, quantized: nn.Module) -> float:
    """The same of the reduced gradients: both models had the same local ones."""
    return _relative(_gradients(quantized), _gradients(model))


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    with flatshard.summon_full_params(model, writeback=False, with_grads=True):
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _relative(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    difference = torch.cat([(g - e).flatten() for g, e in zip(got, expected, strict=True)])
    return (difference.norm() / torch.cat([e.flatten() for e in expected]).norm()).item()


class Trainer:
    """A model with its AdamW, and its curve."""

    def __init__(self, name: str, config: GPTConfig) -> None:
        torch.manual_seed(0)
        self.model = WAYS[name](GPT(config))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        """The mean over ranks, by step."""
        self.times: list[float] = []

    def step(self, tokens: torch.Tensor) -> None:
        """A step of training, and its place on the curve."""
        self.times.append(seconds_of_all(lambda: self.train(tokens)))
        mean = self.loss.clone()
        dist.all_reduce(mean)
        self.losses.append(mean.item() / dist.get_world_size())

    def train(self, tokens: torch.Tensor) -> None:
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()


def measure(args: argparse.Namespace) -> list[Table]:
    rank, size = dist.get_rank(), dist.get_world_size()
    config = GPTConfig(VOCABULARY, args.context, args.layers, args.width, heads=4)
    trainers = {name: Trainer(name, config) for name in WAYS}
    text = load_corpus().train
    for step in range(args.rounds):
        if step % 25 == 0:
            progress(f"training, step {step} of {args.rounds}")
        windows = random_windows(text, size * args.batch, args.context + 1, seed=step)
        tokens = windows[rank * args.batch : (rank + 1) * args.batch]
        for trainer in trainers.values():
            trainer.step(tokens)
        if step == 0:
            parameters = parameter_error(trainers["int8"].model)
            gradients = gradient_error(trainers["fp32"].model, trainers["int8 reduce"].model)
    note = f"int8: relative RMS error of the gathered parameters {parameters:.2%}, of reduced gradients {gradients:.2%}"
    numel = sum(p.numel() for p in GPT(config).parameters())
    title = f"training a GPT of {numel / 1e6:.2f} M parameters, {size} gloo ranks, {args.rounds} steps"
    rows = {name: row(trainer, trainers["fp32"], args.rounds) for name, trainer in trainers.items()}
    return [Table("communication", title, "fp32's loss; none's time", rows, notes=[note], digits=4)]


def row(trainer: Trainer, exact: Trainer, steps: int) -> dict[str, Figure]:
    """Of the table: milliseconds, losses, and how far they are off fp32's."""
    off = max(abs(a / b - 1) for a, b in zip(trainer.losses, exact.losses, strict=True))
    marks = [0, steps // 4, steps // 2, steps - 1]
    last = [statistics.mean(curve[-10:]) for curve in (trainer.losses, exact.losses)]
    return {
        "ms": spread(1e3 * value for value in trainer.times),
        **{f"loss {mark + 1}": Figure(trainer.losses[mark]) for mark in marks},
        "last 10": Figure(last[0]),
        "last 10 / fp32's": Figure(last[0] / last[1]),
        "off": Figure(off),
    }


BENCHMARK = Benchmark(
    measure, __doc__, ranks=2, rounds=(100, 400), sizes={"layers": 4, "width": 128, "context": 64, "batch": 8}
)

if __name__ == "__main__":
    BENCHMARK.main()
