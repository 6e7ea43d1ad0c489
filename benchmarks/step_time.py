"""Step time of a GPT against FSDP2, FSDP1 and DDP, over gloo on CPU, all in one process group, interleaved.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/step_time.py

Every contender trains the same model on the same batch: forward, backward and an AdamW step, fp32. A round runs each
once; figures are medians over the rounds, and ratios to FSDP2's median. The floor is the plain model's step without any
communication, on each rank's own batch.
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
from gpt import GPT, Block, GPTConfig
from torch import nn

import flatshard


def shard_flatshard(model: GPT) -> nn.Module:
    return flatshard.fully_shard(model, policy={Block})


def shard_fsdp2(model: GPT) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module)
    return fully_shard(model)


def shard_fsdp1(model: GPT) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu")
    )


CONTENDERS: dict[str, Callable[[GPT], nn.Module]] = {
    "plain": lambda model: model,
    "flatshard": shard_flatshard,
    "FSDP2": shard_fsdp2,
    "FSDP1": shard_fsdp1,
    "DDP": nn.parallel.DistributedDataParallel,
}


def join() -> None:
    """Make this process a rank over gloo, with one thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), default=list(CONTENDERS))
    args = parser.parse_args()
    join()

    trainers: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
    for name in args.only:
        torch.manual_seed(0)
        config = GPTConfig(256, args.context, args.layers, args.width, heads=8)
        model = CONTENDERS[name](GPT(config))
        trainers[name] = model, torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 256, (args.batch, args.context + 1))
    numel = sum(p.numel() for p in GPT(config).parameters())

    times: dict[str, list[float]] = {name: [] for name in trainers}
    losses: dict[str, float] = {}
    for round_ in range(args.rounds + 1):
        for name, (model, optimizer) in trainers.items():
            dist.barrier()
            start = time.perf_counter()
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dist.barrier()
            losses[name] = loss.item()
            if round_:
                times[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(
            f"GPT of {numel / 1e6:.1f} M parameters, {dist.get_world_size()} gloo ranks, fp32, torch {torch.__version__}"
        )
        print(f"{'':12}{'ms':>9}{'min-max':>14}{'over FSDP2':>12}{'last loss':>11}")
        base = statistics.median(times["FSDP2"]) if "FSDP2" in times else float("nan")
        for name, series in times.items():
            median = statistics.median(series)
            spread = f"{min(series) * 1e3:.0f}-{max(series) * 1e3:.0f}"
            print(f"{name:12}{median * 1e3:9.0f}{spread:>14}{median / base:12.2f}{losses[name]:11.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
