"""What sharded parameters and gradients cost an optimizer and gradient clipping, over plain ones of the same sizes.

    python benchmarks/optimizer_overhead.py --implementation foreach

Many small parameters, so that host time is all there is. The fake process group of two communicates nothing. The plain
parameters are copies of this rank's parts, half of which are empty. Both run interleaved in one process; figures are
medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import flatshard

PER_UNIT = 12


class Unit(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(numel)) for _ in range(PER_UNIT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=100, help=f"of {PER_UNIT} parameters each")
    parser.add_argument("--numel", type=int, default=64, help="elements of a parameter")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--implementation", choices=("foreach", "fused", "for-loop"), default="foreach", help="of AdamW"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())

    model = nn.Sequential(*(Unit(args.numel) for _ in range(args.units)))
    flatshard.fully_shard(model, policy={Unit})
    contenders = {
        "plain": [nn.Parameter(p.detach().clone()) for p in model.parameters()],
        "flatshard": list(model.parameters()),
    }
    kind = {"foreach": {"foreach": True}, "fused": {"fused": True}, "for-loop": {"foreach": False}}[args.implementation]
    times: dict[tuple[str, str], list[float]] = defaultdict(list)

    def clock(name: str, what: str, run: Callable[[], object]) -> None:
        start = time.perf_counter()
        run()
        times[name, what].append((time.perf_counter() - start) * 1e3)

    optimizers = {name: torch.optim.AdamW(params, **kind) for name, params in contenders.items()}
    for _ in range(args.rounds):
        for name, params in contenders.items():
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer = optimizers[name]
            clock(name, "clip_grad_norm_", lambda params=params: torch.nn.utils.clip_grad_norm_(params, 1e6))
            if name == "flatshard":
                clock(name, "flatshard.clip_grad_norm_", lambda: flatshard.clip_grad_norm_(model, 1e6))
            clock(name, "step, zero_grad", lambda optimizer=optimizer: (optimizer.step(), optimizer.zero_grad()))

    count = len(contenders["plain"])
    held = sum(p.numel() > 0 for p in contenders["plain"])
    print(
        f"AdamW ({args.implementation}), {count} parameters, {held} of them not empty here, torch {torch.__version__}"
    )
    print(f"{'median, ms':28}{'plain':>10}{'flatshard':>12}{'ratio':>8}")
    for what in ("step, zero_grad", "clip_grad_norm_", "flatshard.clip_grad_norm_"):
        mine = statistics.median(times["flatshard", what])
        plain = statistics.median(times["plain", what.removeprefix("flatshard.")])
        print(f"{what:28}{plain:>10.2f}{mine:>12.2f}{mine / plain:>8.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
