"""Run parts of ``gpu.py`` on all ranks: correctness, training in other ways, capture, the time of a step.

    python benchmarks/gpu_ranks.py --parts strategies schedules --results FILE

``gpu.py`` starts this once for each rank. Every rank runs the cases in turn, and sends the others its result by the store. So
a case that fails is a line in the results, and the next one runs. If a rank sends nothing, the run ends there, and ``gpu.py``
starts another one for the cases that are left (``--skip``). Without torchrun's environment variables it is a job of one rank.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import json
import math
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
import torch.distributed as dist
from contenders import CONTENDERS, Job, Setting
from devices import Cuda, Device, Simulated
from gpt import Block, GPTConfig
from gpu_parity import (
    ADAMW,
    PARITY,
    RACES,
    SMALL,
    Mode,
    batches,
    full_parameters,
    loss_of,
    parity,
    reason_not_to_run,
    sharded,
    small_gpt,
    trainable,
)
from ranks import leave, set_environment
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.rendezvous import rendezvous

import flatshard
from flatshard import MixedPrecision, ShardingStrategy
from flatshard._base import torch_versions
from flatshard._comm import backends
from flatshard._comm.collectives import Done

PATIENCE = datetime.timedelta(seconds=150)
"""Time limit for other ranks."""


# -- ranks that share a GPU without NCCL -------------------------------------------------------------------------------


class ByHost(backends.BuiltinCollectives):
    """Collectives of a GPU's tensors by gloo: through the host, which waits for the side stream."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._gloo = backends.GlooCollectives(group)

    def _copied(self, call: Callable[..., Any], output: Tensor, *inputs: Tensor) -> Done:
        result = torch.empty(output.shape, dtype=output.dtype) if inputs else output.cpu()
        call(result, *(each.cpu() for each in inputs)).wait()
        output.copy_(result)
        return Done()

    def all_gather(self, output: Tensor, shard: Tensor, label: Any = None) -> Any:
        return self._copied(self._gloo.all_gather, output, shard)

    def reduce_scatter(self, output: Tensor, input: Tensor, label: Any = None) -> Any:
        return self._copied(self._gloo.reduce_scatter, output, input)

    def all_reduce(self, tensor: Tensor, label: Any = None) -> Any:
        return self._copied(self._gloo.all_reduce, tensor)

    def all_to_all(self, output: Tensor, input: Tensor) -> Any:
        return self._copied(self._gloo.all_to_all, output, input)

    def broadcast(self, tensor: Tensor) -> Any:
        return self._copied(self._gloo.broadcast, tensor)

    def combine(self, numbers: Tensor, op: Any) -> Any:
        return self._copied(functools.partial(self._gloo.combine, op=op), numbers)


def communicate_by_host() -> None:
    """Have gloo groups use ``ByHost`` for tensors on a GPU."""

    def choose(group: dist.ProcessGroup, device: torch.device) -> Any:
        return backends.GlooCollectives(group) if device.type == "cpu" else ByHost(group)

    backends.by_backend["gloo"] = choose


# -- training in other ways --------------------------------------------------------------------------------------------


def probe(device: Device, rank: int, size: int) -> dict[str, Any]:
    """Check sums over all ranks, and time a small and a large gather."""
    tensor = torch.full((1 << 16,), float(rank + 1), device=device.device)
    dist.all_reduce(tensor)
    gather = getattr(dist.group.WORLD, torch_versions.ALL_GATHER)
    gathered, mine = (torch.empty(n << 10, device=device.device) for n in (size, 1))
    large, shard = (torch.empty(n << 22, device=device.device) for n in (size, 1))
    small_ms = 1e3 * min(device.seconds(lambda: gather(gathered, mine).wait()) for _ in range(9))
    large_ms = 1e3 * min(device.seconds(lambda: gather(large, shard).wait()) for _ in range(3))
    off = abs(float(tensor[0]) - size * (size + 1) / 2)
    return {"off": off, "allowed": 0.0, "ms of 4 KiB": small_ms, "ms of 16 MiB a rank": large_ms}


def with_grad_scaler(device: Device, rank: int, size: int) -> dict[str, Any]:
    """Train in float16 with a scale that is too large at first: all ranks find that, and the loss falls."""
    mode = Mode(off=1.0)
    precision = MixedPrecision(torch.float16, reduce_dtype=torch.float32)
    model = flatshard.fully_shard(small_gpt(mode, device), policy={Block}, mixed_precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.device.type, init_scale=2.0**24)
    rows = next(iter(batches(mode, size)))[0, rank].to(device.device)
    losses = []
    for _ in range(16):
        optimizer.zero_grad()
        loss = loss_of(model, rows)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    fell = losses[-1] < losses[0] and scaler.get_scale() < 2.0**24
    return {"off": 0.0 if fell else math.inf, "allowed": 0.0, "scale": scaler.get_scale()}


class Float8(nn.Module):
    """A frozen float8 weight, and a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype) * self.scale


def with_float8(device: Device, rank: int, size: int) -> dict[str, Any]:
    """Gather frozen float8 weights: outputs have the bits of the plain model's."""
    torch.manual_seed(3)
    plain = nn.Sequential(*(Float8() for _ in range(3)))
    model = nn.Sequential(*(Float8() for _ in range(3)))
    model.load_state_dict(plain.state_dict())
    plain, model = plain.to(device.device), flatshard.fully_shard(model.to(device.device), policy={Float8})
    x = torch.randn(8, 64).to(device.device)
    out, expected = model(x), plain(x)
    out.square().mean().backward()
    return {"off": float((out - expected).detach().abs().max()), "allowed": 0.0}


def restored(device: Device, rank: int, size: int) -> dict[str, Any]:
    """Save a checkpoint from the device and load it into a new model: the next step has the same bits."""
    mode, path = Mode(), Path(tempfile.gettempdir()) / f"flatshard-gpu-{os.environ['MASTER_PORT']}"
    data = [rows[0, rank].to(device.device) for rows in batches(mode, size)]

    def step(model: Any, optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()

    models = [sharded(mode, device, size, None) for _ in range(2)]
    optimizers = [ADAMW(trainable(model)) for model in models]
    for rows in data[:2]:
        step(models[0], optimizers[0], rows)
    states = [{"model": m, "optimizer": o} for m, o in zip(models, optimizers, strict=True)]
    flatshard.save_checkpoint(path, states[0], overwrite=True)
    flatshard.load_checkpoint(path, states[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer, data[2])
    trained, again = (full_parameters(mode, model) for model in models)
    return {"off": max(float((a - b).abs().max()) for a, b in zip(trained, again, strict=True)), "allowed": 0.0}


RACE = "a planted fault: two streams write to one tensor"


def race(device: Device) -> dict[str, Any]:
    """Write to a tensor on two streams without an event between them, which a sanitizer must see."""
    tensor = torch.zeros(1 << 10, device=device.device)
    device.finish()
    with device.module.stream(device.module.Stream()):
        tensor.add_(1)
    tensor.add_(1)
    device.finish()
    return {"off": 0.0, "allowed": 0.0}


OTHERS: dict[str, Callable[[Device, int, int], dict[str, Any]]] = {
    "fp16 with GradScaler": with_grad_scaler,
    "frozen float8 weights": with_float8,
    "a checkpoint, saved and loaded": restored,
}


def captured(name: str, device: Device, rank: int, size: int) -> dict[str, Any]:
    """Capture a step in a graph over all ranks. Replays have the numbers of as many eager steps, and so has an evaluation."""
    mode = Mode(CAPTURED[name])
    rows = next(iter(batches(mode, size)))[0, rank].to(device.device)

    def make() -> tuple[Any, Callable[[], None]]:
        model = sharded(mode, device, size, None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)

        def step() -> None:
            for p in model.parameters():
                p.grad = None
            loss_of(model, rows).backward()
            optimizer.step()

        return model, step

    def evaluated(model: Any, run: Callable[[], None]) -> float:
        run()
        increment_version(list(model.parameters()))  # a replay does not
        with torch.no_grad():
            return float(loss_of(model, rows))

    (model, step), (other, eager) = make(), make()
    replay = device.captured(step)  # warms up, and replays once
    found = [evaluated(model, replay) for _ in range(REPLAYS)]
    for _ in range(device.warm_up + 1):
        eager()
    expected = [evaluated(other, eager) for _ in range(REPLAYS)]
    pairs = zip(full_parameters(mode, model), full_parameters(mode, other), strict=True)
    apart = [abs(a / b - 1) for a, b in zip(found, expected, strict=True)]
    off = max(*apart, *(float((a - b).norm() / b.norm()) for a, b in pairs))
    replay_ms = 1e3 * min(device.seconds(replay) for _ in range(3))
    return {"off": off, "allowed": 1e-9, "replay, ms": replay_ms, "eager, ms": 1e3 * device.seconds(eager)}


REPLAYS = 3
CAPTURED: dict[str, dict[str, Any]] = {
    "as it is": {},
    "static buffers": {"static_buffers": True},
    "SHARD_GRAD_OP": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "SHARD_OPTIM, whose units stay gathered": {"strategy": ShardingStrategy.SHARD_OPTIM},
}


# -- speed -------------------------------------------------------------------------------------------------------------

LARGE = GPTConfig(vocabulary=32_000, context=1024, layers=12, width=2048, heads=16)
CONTENDING = {
    "plain": Setting(Block),
    "flatshard": Setting(Block),
    "flatshard, static buffers": Setting(Block, options={"static_buffers": True}),
    "FSDP2": Setting(Block),
    "FSDP1": Setting(Block),
    "DDP": Setting(Block),
}
"""Contenders over all ranks, with the plain model, which sends nothing. DDP has no bf16 option, and is not simulated."""
FUSED_ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)
ROUNDS, BATCH = 20, 2


def timed(name: str, bf16: bool, config: GPTConfig, device: Device, rounds: int) -> dict[str, Any]:
    """Measure a contender alone on the device: milliseconds of a step, memory, and the overlap of communication."""
    setting = replace(CONTENDING[name], bf16=bf16, device=device.device)
    kind = name.partition(",")[0]
    assert kind in CONTENDERS
    before = device.allocated()
    tokens = torch.zeros(BATCH, config.context, dtype=torch.int64)
    optimizer = FUSED_ADAMW if device.device.type == "cuda" else functools.partial(torch.optim.AdamW, lr=1e-4)
    job = Job(kind, config, setting, tokens, optimizer)
    for _ in range(device.warm_up):
        job.step()
    peak = (device.peak(job.step) - before) / 2**20
    times = sorted(1e3 * device.seconds(job.step) for _ in range(rounds))
    overlap = device.overlap(job.step)
    return {
        "ms": times[len(times) // 2],
        "least": times[0],
        "most": times[-1],
        "tokens/s here": 1e3 * tokens.numel() / times[len(times) // 2],
        "peak, MiB": peak,
        "collectives, ms": 1e3 * overlap.collectives,
        "hidden, ms": 1e3 * overlap.hidden,
        "loss": float(job.loss(job.model(job.tokens))),
    }


# -- a part ------------------------------------------------------------------------------------------------------------

Case = Callable[[], dict[str, Any]]
"""A function that returns this rank's figures."""


def cases_of(
    part: str, device: Device, rank: int, size: int, tiny: bool, references: dict[Any, Any]
) -> dict[str, Case | str]:
    """Return the cases of a part by name, or for a case that does not run here, the reason."""
    if part == "steps":
        config, rounds = (SMALL, 1) if tiny else (LARGE, ROUNDS)
        return {
            f"{name}{', bf16' * bf16}": functools.partial(timed, name, bf16, config, device, rounds)
            for bf16 in (False, True)[: 1 if tiny else 2]
            for name in CONTENDING
            if name != "DDP" or not (bf16 or isinstance(device, Simulated))
        }
    if part == "probe":
        return {"collectives": functools.partial(probe, device, rank, size)}
    if part == "capture":
        return {name: functools.partial(captured, name, device, rank, size) for name in CAPTURED}
    if part == "others":
        return {name: functools.partial(case, device, rank, size) for name, case in OTHERS.items()}
    everything = {name: mode for modes in PARITY.values() for name, mode in modes.items()}
    modes = {name: everything[name] for name in RACES if name in everything} if part == "races" else PARITY[part]
    cases: dict[str, Case | str] = {
        name: reason_not_to_run(mode, device, size)
        or functools.partial(parity, mode, device, rank, size, references=references)
        for name, mode in modes.items()
    }
    return cases | ({RACE: functools.partial(race, device)} if part == "races" else {})


PARTS = ("probe", *PARITY, "others", "races", "capture", "steps")


def exchanged(store: dist.Store, name: str, mine: dict[str, Any], rank: int, size: int) -> list[dict[str, Any]]:
    """Return each rank's result of a case. If a rank sends none, the store raises after ``PATIENCE``."""
    store.set(f"{name}/{rank}", json.dumps(mine))
    keys = [f"{name}/{other}" for other in range(size)]
    store.wait(keys, PATIENCE)
    return [json.loads(store.get(key)) for key in keys]


def result_of(case: Case, device: Device) -> dict[str, Any]:
    """Return a case's figures, or its error: the other cases run."""
    try:
        mine = case()
        device.finish()
        device.check_races()
    except Exception as e:
        text = "".join(traceback.format_exception(e)[-4:])
        mine = {"error": f"{type(e).__name__}: {e}"[:2000], "where": text[-2000:]}
        device.recover()
    gc.collect()  # sharded models are in reference cycles
    return mine


def run(
    cases: dict[str, Case | str], device: Device, store: dist.Store, rank: int, size: int, end: float
) -> Iterator[dict[str, Any]]:
    """Yield each case's results on all ranks. The last one is that after which rank 0's clock is past ``end``, or to which a
    rank does not answer."""
    for name, case in cases.items():
        if isinstance(case, str):
            yield {"case": name, "left out": case}
            continue
        began = time.monotonic()
        mine = result_of(case, device)
        try:
            all_ranks = exchanged(store, name, {**mine, "is_over": time.monotonic() > end}, rank, size)
        except dist.DistError as e:
            yield {"case": name, "ranks": [mine], "ended": f"a rank does not answer: {e}"[:500]}
            return
        is_over = [each.pop("is_over") for each in all_ranks]
        yield {"case": name, "seconds": round(time.monotonic() - began, 2), "ranks": all_ranks}
        if is_over[0]:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", choices=PARTS, nargs="+", required=True)
    parser.add_argument("--results", type=Path, required=True, help="rank 0 adds a line of JSON a case")
    parser.add_argument("--device", choices=("cuda", "simulated", "cpu"), default="cuda")
    parser.add_argument("--by-host", action="store_true", help="collectives by gloo, as ranks share a GPU without NCCL")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first cases: they have run")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case later than that")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    set_environment()
    torch.set_num_threads(1)
    index = int(os.environ.get("LOCAL_RANK", "0"))
    device = {"cuda": lambda: Cuda(index=index), "simulated": Simulated, "cpu": Device}[args.device]()
    if args.by_host:
        communicate_by_host()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    base, rank, size = next(rendezvous("env://"))
    store = dist.PrefixStore(f"gpu.py/{'/'.join(args.parts)}/{args.skip}", base)
    by_nccl = args.device == "cuda" and not args.by_host
    options = {"device_id": device.device} if by_nccl else {}
    backend = "gloo" if args.by_host else device.backend
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE, **options)
    tiny = args.device != "cuda"
    references: dict[Any, Any] = {}
    of_parts = {part: cases_of(part, device, rank, size, tiny, references) for part in args.parts}
    cases = {f"{part}: {name}": case for part, found in of_parts.items() for name, case in found.items()}
    if "races" in args.parts:
        device.look_for_races()
    left = dict(list(cases.items())[args.skip :])
    gc.freeze()  # the collection after each case skips modules
    with args.results.open("a") if rank == 0 else contextlib.nullcontext() as results:
        if results is not None and not args.skip:
            print(json.dumps({"cases": list(cases)}), file=results, flush=True)
        for found in run(left, device, dist.PrefixStore("results", store), rank, size, end):
            if results is not None:
                print(json.dumps(found), file=results, flush=True)
    with contextlib.suppress(dist.DistError):  # rank 0 may have the store, so it leaves last
        store.set(f"left/{rank}", "")
        if rank == 0:
            store.wait([f"left/{other}" for other in range(size)], PATIENCE)
    leave(0)  # after a failed case the process group may not shut down


if __name__ == "__main__":
    main()
