"""Models that move to other ranks between steps, on the simulated accelerator: nothing is sent before it is written."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerator.harness import Cases, Env, mean_square, numbers, sgd

import flatshard
from flatshard import CPUOffload, MixedPrecision
from flatshard import ShardingStrategy as S

cases = Cases()


@cases.add(
    {
        "full": {},
        "optim_mixed": {"strategy": S.SHARD_OPTIM, "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
        "static": {"strategy": S.SHARD_GRAD_OP, "static_buffers": True},
        "offloaded": {"cpu_offload": CPUOffload()},
    },
    fake=False,
    rtol=2e-2,
    atol=2e-3,
)
def moved(env: Env, **options: Any) -> dict[str, Any]:
    """To each rank alone and back, with gradients and momentum. The host enqueues a step, and moves at once."""
    model = env.shard(env.make(), **options)
    optimizer = sgd(model.parameters())
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)

    def step(number: int) -> None:
        optimizer.zero_grad()
        mean_square(model(env.batch(number))).backward()
        optimizer.step()

    for number, group in enumerate((alone, env.group, alone, env.group)):
        step(2 * number)
        step(2 * number + 1)
        flatshard.elastic.reshard_over(model, optimizer, process_group=group, over=env.group)
    step(8)
    return numbers(model)
