"""``plan`` for an accelerator against a real step on the simulated one, with streams: collectives and peak memory."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerator.harness import Block, Cases, Env, numbers, sgd
from torch import Tensor, nn

import flatshard
from flatshard import MixedPrecision, ShardingStrategy

S = ShardingStrategy
BF16 = MixedPrecision(torch.bfloat16, torch.float32)
KEPT = MixedPrecision(torch.bfloat16, torch.float32, keep_cast_shard=True)
AWAY = functools.partial(flatshard.optim.OffloadedOptimizer, optimizer_class=torch.optim.AdamW)
cases = Cases()


class Wide(nn.Module):
    """Blocks larger than an allocator's rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(4))
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def held(env: Env) -> int:
    """Return the requested bytes of tensors on the device."""
    if not env.is_simulated:
        return 0
    from accelerator.sim import sim

    return sum(block.asked for block in sim._blocks if not block.free and block.home != "host")


@contextlib.contextmanager
def at_allocations(call: Callable[[int, int], object]) -> Iterator[None]:
    """Call ``call(bytes, stream)``, which may raise, before each allocation inside."""
    from accelerator.sim import sim

    allocate = sim.alloc

    def alloc(nbytes: int, device: int, stream: int) -> int:
        call(nbytes, stream)
        return allocate(nbytes, device, stream)

    sim.alloc = alloc
    try:
        yield
    finally:
        del sim.alloc


@contextlib.contextmanager
def peak(env: Env) -> Iterator[list[int]]:
    """Measure peak and remaining bytes on the device inside, relative to those at entry. On CPU, yield an empty list."""
    found: list[int] = []
    if not env.is_simulated:
        yield found
        return
    before = held(env)
    counts = [before]
    with at_allocations(lambda nbytes, stream: counts.append(held(env) + nbytes)):
        yield found
    found += [max(counts) - before, held(env) - before]


def issued(order: list[tuple[str, int, str]]) -> list[tuple[str, int, int]]:
    """Return (kind, full bytes, ranks) of each collective."""
    found = []
    for _, ranks, what in order:
        kind, numel, dtype = re.fullmatch(r"(\w+)\((\d+) x (\w+)\)", what).groups()
        nbytes = int(numel) * getattr(torch, dtype).itemsize
        found.append((kind.replace("_", "-"), nbytes * ranks if kind == "reduce_scatter" else nbytes, ranks))
    return found


@cases.add(
    {
        "hybrid_full": {"strategy": S.HYBRID_FULL_SHARD},
        "inner": {"reshard_after_forward": 2},
    },
    ranks=4,
    fake=False,
)
@cases.add(
    {
        "full_shard": {},
        "not_sharded": {"strategy": S.NO_SHARD},
        "optim": {"strategy": S.SHARD_OPTIM, "mixed_precision": BF16},
        "static": {"static_buffers": True},
        "offloaded_mixed": {"cpu_offload": True, "mixed_precision": BF16},
        "cast_shards_kept": {"micro": 2, "holds": True, "mixed_precision": KEPT},
    },
    ranks=2,
    fake=False,
)
def a_step(env: Env, micro: int = 1, holds: bool = False, **options: Any) -> Any:
    asked = dict(options)
    if "strategy" in options and options["strategy"].is_hybrid:
        options["device_mesh"] = env.replicas
    model = env.shard(env.make(Wide), **options)
    optimizer, batch = sgd(model.parameters()), env.tensor(16, 64)

    def step() -> None:
        for number in range(micro):
            with flatshard.no_sync(model) if holds and number < micro - 1 else contextlib.nullcontext():
                model(batch).sum().backward()

    for _ in range(2):
        step()
        optimizer.step()
        optimizer.zero_grad()
    if env.is_simulated:
        from accelerator.sim_ccl import order

        order.clear()
    with peak(env) as found:
        step()
    if found and env.rank == 0:  # a plan takes a second, and `check` asserts that all ranks issue the same
        planned = planned_step(env, micro, holds, asked)
        assert issued(order) == [(c.kind, c.nbytes, c.ranks) for c in planned.collectives]
        assert found[0] == planned.total_peak.nbytes - planned.between_steps.total
    return numbers(model)


@cases.add({"": {}, "in_turns": {"makes": AWAY, "hosts": (1,)}}, ranks=2, fake=False)
def an_optimizers_step_with_some_units_on_the_host(
    env: Env, makes: Any = torch.optim.AdamW, hosts: tuple[int, ...] = (1, 3)
) -> Any:
    """torch does not step parameters on two devices together. An ``OffloadedOptimizer`` steps by unit."""
    policy: Any = {f"blocks.{at}": {"cpu_offload": at in hosts} for at in range(4)}
    model = env.shard(env.make(Wide), policy)
    optimizer = makes(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(env.tensor(16, 64)).sum().backward()
        with peak(env) as found:
            optimizer.step()
    if found and env.rank == 0:
        planned = planned_step(env, 1, False, {"policy": policy, "optimizer": makes})
        memory = [sample.device.total for sample in planned.samples if sample.phase == "optimizer"]
        assert found[0] - found[1] == max(memory) - memory[0]
    return numbers(model)


def planned_step(env: Env, micro: int, holds: bool, options: dict[str, Any]) -> flatshard.planning.StepPlan:
    return flatshard.plan_step(
        Wide(),
        world_size=(2, 2) if "strategy" in options and options["strategy"].is_hybrid else env.size,
        example_inputs=torch.ones(16, 64),
        microbatches=micro,
        no_sync=holds,
        device=env.device.type,
        compare=False,
        **{"policy": Block} | options,
    )
