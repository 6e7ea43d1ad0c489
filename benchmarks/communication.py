"""What cheaper communication costs in exactness, and saves in time: a small GPT, trained by each way of communicating.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/communication.py

All train the same model on the same bytes of the standard library's sources, interleaved: a round is one step of each.
The loss is the mean over ranks; "off" is the largest relative distance from fp32's curve in any step. Over loopback bytes
are cheap, so here int8 costs more time than it saves. "none" is garbage, and shows what communication costs at all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from corpus import VOCABULARY, load_corpus, random_windows
from gpt import GPT, Block, GPTConfig
from torch import nn

import flatshard
from flatshard import NoCommunication, QuantizedCollectives


def with_collectives(factory: object = None) -> Callable[[GPT], nn.Module]:
    return lambda model: flatshard.fully_shard(model, policy={Block}, collectives=factory)


def with_hook(hook: Callable[..., object]) -> Callable[[GPT], nn.Module]:
    def shard(model: GPT) -> nn.Module:
        flatshard.fully_shard(model, policy={Block})
        flatshard.register_comm_hook(model, None, hook)
        return model

    return shard


WAYS: dict[str, Callable[[GPT], nn.Module]] = {
    "fp32": with_collectives(),
    "bf16 hook": with_hook(flatshard.bf16_compress_hook),
    "fp16 hook": with_hook(flatshard.fp16_compress_hook),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    config = GPTConfig(VOCABULARY, args.context, args.layers, args.width, heads=4)
    trainers: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
    for name, shard in WAYS.items():
        torch.manual_seed(0)
        model = shard(GPT(config))
        trainers[name] = model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = load_corpus().train
    curves: dict[str, list[float]] = {name: [] for name in WAYS}
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for step in range(args.steps):
        windows = random_windows(text, size * args.batch, args.context + 1, seed=step)
        tokens = windows[rank * args.batch : (rank + 1) * args.batch]
        for name, (model, optimizer) in trainers.items():
            dist.barrier()
            start = time.perf_counter()
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dist.barrier()
            times[name].append(time.perf_counter() - start)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            curves[name].append(mean.item() / size)
        if step == 0:
            parameters = parameter_error(trainers["int8"][0])
            gradients = gradient_error(trainers["fp32"][0], trainers["int8 reduce"][0])
    if rank == 0:
        numel = sum(p.numel() for p in GPT(config).parameters())
        print(
            f"GPT of {numel / 1e6:.2f} M parameters, {size} gloo ranks, torch {torch.__version__}, {args.steps} steps"
        )
        print(
            f"int8: relative RMS error of the gathered parameters {parameters:.2%}, of reduced gradients {gradients:.2%}"
        )
        marks = [0, args.steps // 4, args.steps // 2, args.steps - 1]
        print(
            f"{'':12}{'ms':>8}" + "".join(f"{'loss ' + str(m + 1):>11}" for m in marks) + f"{'last 10':>11}{'off':>9}"
        )
        for name, curve in curves.items():
            off = max(abs(a / b - 1) for a, b in zip(curve, curves["fp32"], strict=True))
            last = statistics.mean(curve[-10:])
            cells = "".join(f"{curve[m]:11.4f}" for m in marks)
            print(f"{name:12}{statistics.median(times[name]) * 1e3:8.1f}{cells}{last:11.4f}{off:9.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
