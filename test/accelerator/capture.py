"""A full step captured as in a CUDA graph: neither streams nor the host wait for work outside it."""

from typing import Any

import torch
from accelerator.harness import Cases, Env, mean_square, numbers
from torch.autograd.graph import increment_version

import flatshard
from flatshard import ShardingStrategy as S

cases = Cases()
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "all_resharded": {"reshard_after_forward": True},
    "accumulates": {"micro": 2},
    "clips": {"clips": True},
    "finalized": {"finalized": True, "micro": 2, "holds": True},
    "kept_storage": {"keeps": True},
    "three_warm_ups": {"warm_ups": 3},
}


def step(
    env: Env,
    micro: int = 1,
    holds: bool = False,
    clips: bool = False,
    finalized: bool = False,
    keeps: bool = False,
    warm_ups: int = 4,
    **options: Any,
) -> Any:
    """Warm up on a side stream and capture on another, as ``torch.cuda.graph`` documents."""
    model = env.shard(env.make(), **options)
    flatshard.configure(model, manual_finalization=finalized, keep_unsharded_storage=keeps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    batch = env.batch(0)

    def run() -> Any:
        optimizer.zero_grad()
        for i in range(micro):
            if holds:
                flatshard.configure(model, gradient_sync=i == micro - 1)
            loss = mean_square(model(batch))
            loss.backward()
        if finalized:
            flatshard.reduce_gradients(model, async_op=True).wait()
        if clips:
            flatshard.clip_grad_norm_(model, 0.1)
        optimizer.step()
        return loss.detach()

    with env.side_stream():
        for _ in range(warm_ups):
            run()
    optimizer.zero_grad()
    with env.capture():
        loss = run()
    return loss, numbers(model)


cases.add(OPTIONS)(step)


REPLAYED: dict[str, dict[str, Any]] = {
    "full": {},
    "static_buffers": {"static_buffers": True},
    "grad_op": {"strategy": S.SHARD_GRAD_OP},
    "optim": {"strategy": S.SHARD_OPTIM},
}


@cases.add(REPLAYED, fake=False)
def replayed(env: Env, **options: Any) -> Any:
    """Replay a step, with evaluations between the replays: each sees the parameters of the last."""
    model = env.shard(env.make(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    batch = env.batch(0)

    def run() -> None:
        optimizer.zero_grad()
        mean_square(model(batch)).backward()
        optimizer.step()

    with env.side_stream():
        for _ in range(3):
            run()
    with env.capture() as graph:
        run()
    outputs = []
    for _ in range(3):
        env.replay(graph, run)
        increment_version(list(model.parameters()))  # which a replay does not
        with torch.no_grad():
            outputs.append(model(batch))
    return outputs, numbers(model)


@cases.add({"finalized": {"finalized": True}}, ranks=1, fake=False)
def step_alone(env: Env, **options: Any) -> Any:
    return step(env, **options)


@cases.add({"hybrid": {"strategy": S.HYBRID_SHARD}, "inner": {"reshard_after_forward": 2}}, ranks=4)
def step_on_four(env: Env, **options: Any) -> Any:
    return step(env, **options, **({"device_mesh": env.replicas} if "strategy" in options else {}))


@cases.add({"all_resharded": {"reshard_after_forward": True}})
def evaluation(env: Env, **options: Any) -> Any:
    model = env.shard(env.make(), **options)
    batch = env.batch(0)
    with torch.no_grad():
        with env.side_stream():
            for _ in range(4):
                model(batch)
        with env.capture():
            output = model(batch)
    return output
