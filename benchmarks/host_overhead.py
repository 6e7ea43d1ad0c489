"""Host time that sharding adds to a unit's forward and backward, with the fake process group (no communication).

    python benchmarks/host_overhead.py --world-size 64 --units 100

A unit has 12 small parameters (16 x 16), so the arithmetic is negligible and what is left is Python, dispatch and
autograd. All contenders run interleaved in one process; figures are medians over the rounds, and the plain model's
median is subtracted. "CPU" is the process's own processor time, which a busy machine disturbs less than the wall clock.

The floor: an eager flat design cannot do less per unit than two all-gathers, one reduce-scatter, four storage resizes,
two copies of the shard, twelve gradient copies, and the dispatch of twelve autograd hooks. `--floor` times just those.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import flatshard

PARAMS = 12
WIDTH = 16


class Unit(nn.Module):
    """Twelve bias-free linears in a row: (batch, 16) -> (batch, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(PARAMS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit() for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


def shard_flatshard(model: Model) -> nn.Module:
    return flatshard.fully_shard(model, policy={Unit})


def shard_fsdp2(model: Model) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for unit in model.units:
        fully_shard(unit)
    return fully_shard(model)


def shard_fsdp1(model: Model) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Unit}), use_orig_params=True, device_id=torch.device("cpu")
    )


CONTENDERS: dict[str, Callable[[Model], nn.Module]] = {
    "plain": lambda model: model,
    "flatshard": shard_flatshard,
    "FSDP2": shard_fsdp2,
    "FSDP1": shard_fsdp1,
}


def floor(world_size: int) -> float:
    """Microseconds for the operations that no eager flat design can leave out, once per unit."""
    from flatshard._backends import FakeCollectives

    group = dist.group.WORLD
    assert group is not None
    collectives = FakeCollectives(group)
    shard = torch.empty(-(-PARAMS * WIDTH * WIDTH // world_size))
    buffer = torch.empty(shard.numel() * world_size)
    grads = [torch.empty(WIDTH, WIDTH) for _ in range(PARAMS)]
    slots = [torch.empty(WIDTH, WIDTH) for _ in range(PARAMS)]
    own, storage = buffer[: shard.numel()], buffer.untyped_storage()
    nbytes = storage.nbytes()
    times = []
    for _ in range(200):
        start = time.perf_counter()
        for _ in range(2):
            storage.resize_(nbytes)
            own.copy_(shard)
            collectives.all_gather(buffer, shard).wait()
        for slot, grad in zip(slots, grads, strict=True):
            slot.copy_(grad)
        collectives.reduce_scatter(shard, buffer).wait()
        storage.resize_(0)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=64)
    parser.add_argument("--units", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--profile", action="store_true", help="cProfile of flatshard's steps instead of timings")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=args.world_size, store=FakeStore())

    models: dict[str, nn.Module] = {}
    for name in dict.fromkeys(["plain", *args.only]):
        torch.manual_seed(0)
        models[name] = CONTENDERS[name](Model(args.units))
    x = torch.randn(2, WIDTH)

    def step(model: nn.Module) -> tuple[float, float]:
        start, cpu = time.perf_counter(), time.process_time()
        model(x).sum().backward()
        elapsed = time.perf_counter() - start, time.process_time() - cpu
        for param in model.parameters():
            param.grad = None
        return elapsed

    if args.profile:
        import cProfile
        import pstats

        for _ in range(3):
            step(models["flatshard"])
        with cProfile.Profile() as profile:
            for _ in range(10):
                step(models["flatshard"])
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for round_ in range(args.rounds + 2):
        if round_ == 2:
            gc.collect()
            gc.freeze()  # a collection in one contender's step must not walk the objects of all the others
        for name, model in models.items():
            elapsed = step(model)
            if round_ >= 2:
                times[name].append(elapsed)

    def median(name: str, clock: int) -> float:
        return statistics.median(t[clock] for t in times[name])

    print(
        f"fake group of {args.world_size}, {args.units} units of {PARAMS} parameters, torch {torch.__version__}, 1 thread"
    )
    print(f"{'':12}{'fwd+bwd ms':>12}{'min-max ms':>18}{'us per unit over plain: wall':>32}{'CPU':>8}")
    for name, series in times.items():
        wall = [t[0] * 1e3 for t in series]
        over = [f"{(median(name, c) - median('plain', c)) / args.units * 1e6:.0f}" for c in (0, 1)]
        if name == "plain":
            over = ["", ""]
        spread = f"{min(wall):.1f}-{max(wall):.1f}"
        print(f"{name:12}{statistics.median(wall):12.2f}{spread:>18}{over[0]:>32}{over[1]:>8}")
    print(f"floor: {floor(args.world_size):.0f} us per unit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
