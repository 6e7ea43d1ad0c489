"""Run a part of ``gpu.py`` on all ranks: correctness, the time of a step, or its capture.

    python benchmarks/gpu_ranks.py --part strategies --results FILE

``gpu.py`` starts this once for each rank and part. Every rank runs the cases in turn, and sends the others its result by the
store. So a case that fails is a line in the results, and the next one runs. If a rank sends nothing, the part ends there.
Without torchrun's environment variables it is a job of one rank.
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
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contenders import CONTENDERS, Job, Setting
from devices import Cuda, Device, Simulated
from gpt import GPT, Block, GPTConfig
from ranks import leave, set_environment
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

import flatshard
from flatshard import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from flatshard.comm import DefaultCollectives, QuantizedCollectives

S = ShardingStrategy
PATIENCE = datetime.timedelta(seconds=150)
"""Time limit for other ranks."""
EXACT, ROUNDED = 1e-9, 0.01
"""Maximum error of weights relative to their change by training, in float64 and with bf16 compute."""


# -- correctness -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """A kind of training that must agree with one process on the full batch."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``fully_shard``."""
    off: float = EXACT
    microbatches: int = 1
    is_held: bool = False
    """Whether microbatches are under ``no_sync``, instead of each being reduced."""
    prepare: Callable[[GPT, Device], object] = lambda model, device: None
    """Change to the model before it is sharded."""
    freezes: bool = False
    """Whether the first block is frozen."""
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    """The optimizer. None is AdamW, or SGD if numbers are rounded, as Adam divides small gradients by themselves."""
    whole: bool = False
    """Whether the sharded model has a ``WholeParameterOptimizer``."""
    axes: tuple[str, ...] = ()
    """Mesh dimensions for hybrid strategies, the second of which shards."""
    is_fsdp2: bool = False
    """Whether torch's FSDP2 trains, to check the reference itself."""

    @property
    def makes(self) -> Callable[..., torch.optim.Optimizer]:
        rounds = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        return self.optimizer or (functools.partial(torch.optim.AdamW, lr=1e-2) if self.off == EXACT else rounds)

    @property
    def is_bf16(self) -> bool:
        precision = self.options.get("mixed_precision")
        return precision is not None and precision.param_dtype is torch.bfloat16


def checkpointed(model: GPT, device: Device) -> None:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))


def compiled(model: GPT, device: Device) -> None:
    for block in model.blocks:
        block.compile(fullgraph=True, backend="inductor" if device.device.type == "cuda" else "aot_eager")


def widening(group: Any, device: torch.device) -> Any:
    return DefaultCollectives(group, widens=True)


BF16 = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
HYBRID = ("replicate", "shard")
FSDP2 = "FSDP2, to check the check"
PARITY: dict[str, dict[str, Mode]] = {
    "strategies": {
        FSDP2: Mode(is_fsdp2=True),
        "FULL_SHARD": Mode(),
        "SHARD_GRAD_OP": Mode({"strategy": S.SHARD_GRAD_OP}),
        "NO_SHARD": Mode({"strategy": S.NO_SHARD}),
        "HYBRID_SHARD": Mode({"strategy": S.HYBRID_SHARD}, axes=HYBRID),
        "HYBRID_SHARD_ZERO2": Mode({"strategy": S.HYBRID_SHARD_ZERO2}, axes=HYBRID),
        "reshard to half of the ranks": Mode({"reshard_after_forward": 2}),
    },
    "schedules": {
        "no prefetch": Mode({"backward_prefetch": None, "forward_prefetch": False}),
        "BACKWARD_POST": Mode({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}),
        "outermost unit reshards": Mode({"reshard_after_forward": True}),
        "static buffers": Mode({"static_buffers": True}),
        "microbatches, each reduced": Mode(microbatches=3),
        "microbatches under no_sync": Mode(microbatches=3, is_held=True),
        "Rows": Mode({"layout": flatshard.layouts.Rows()}),
        "Whole": Mode({"layout": flatshard.layouts.Whole(max_padding=math.inf)}),
    },
    "offload": {
        "offload": Mode({"cpu_offload": CPUOffload()}),
        "offload, no pinned memory": Mode({"cpu_offload": CPUOffload(pin_memory=False)}),
        "offload, SHARD_GRAD_OP": Mode({"cpu_offload": CPUOffload(), "strategy": S.SHARD_GRAD_OP}),
        "offload, microbatches under no_sync": Mode({"cpu_offload": CPUOffload()}, microbatches=3, is_held=True),
        "offload, bf16": Mode({"cpu_offload": CPUOffload(), "mixed_precision": BF16}, ROUNDED),
    },
    "precision": {
        "bf16, reduced in fp32": Mode({"mixed_precision": BF16}, ROUNDED),
        "bf16, reduced in bf16": Mode({"mixed_precision": replace(BF16, reduce_dtype=torch.bfloat16)}, 0.1),
        "bf16 sent, added in fp32": Mode({"mixed_precision": BF16, "collectives": widening}, 0.1),
        "bf16, cast shard kept": Mode({"mixed_precision": replace(BF16, keep_cast_shard=True)}, ROUNDED),
        "int8 sent": Mode({"collectives": QuantizedCollectives()}, 0.4),
    },
    "models": {
        "activation checkpointing": Mode(prepare=checkpointed),
        "a frozen block": Mode(freezes=True),
        "Adafactor by WholeParameterOptimizer": Mode(
            optimizer=functools.partial(torch.optim.Adafactor, lr=1e-2), whole=True
        ),
        "units compiled": Mode(prepare=compiled),
    },
}
"""Modes by part. Each part starts new processes, without the state of an earlier failure."""

RACES = (FSDP2, "FULL_SHARD", "SHARD_GRAD_OP", "static buffers", "offload", "microbatches under no_sync")
"""Modes that run under torch's sanitizer."""

SMALL = GPTConfig(vocabulary=37, context=12, layers=3, width=20, heads=2)
STEPS, ROWS = 3, 2


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).flatten(0, 1)
    exact = logits.dtype is torch.float64
    return F.cross_entropy(logits if exact else logits.float(), tokens[:, 1:].flatten())


def batches(mode: Mode, size: int) -> Iterator[Tensor]:
    """Yield the batches of all steps, the same on all ranks: (microbatches, ranks, rows, tokens)."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        shape = (mode.microbatches, size, ROWS, SMALL.context + 1)
        yield torch.randint(SMALL.vocabulary, shape, generator=generator)


def small_gpt(mode: Mode, device: Device) -> GPT:
    torch.manual_seed(0)
    model = GPT(SMALL).to(device.device, torch.float32 if mode.off > EXACT else torch.float64)
    model.blocks[0].requires_grad_(not mode.freezes)
    return model


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def alone(mode: Mode, device: Device, size: int) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Train one process, rounded as ranks round for bf16; return parameters before and after training, and gradient norms."""
    model = small_gpt(mode, device)
    start = [p.detach().clone() for p in model.parameters()]
    low = small_gpt(mode, device).bfloat16() if mode.is_bf16 else model
    optimizer, norms = mode.makes(trainable(model)), []
    for batch in batches(mode, size):
        optimizer.zero_grad()
        if mode.is_bf16:
            with torch.no_grad():
                for rounded, p in zip(low.parameters(), model.parameters(), strict=True):
                    rounded.copy_(p)
        for rows in batch.flatten(0, 1):
            loss_of(low, rows.to(device.device)).backward()
            if mode.is_bf16:
                for rounded, p in zip(low.parameters(), model.parameters(), strict=True):
                    p.grad = rounded.grad.float() if p.grad is None else p.grad + rounded.grad.float()
                    rounded.grad = None
        for p in trainable(model):
            p.grad /= size
        norms.append(float(nn.utils.clip_grad_norm_(trainable(model), 1.0)))
        optimizer.step()
    return start, [p.detach() for p in model.parameters()], norms


def sharded(mode: Mode, device: Device, size: int, group: dist.ProcessGroup | None) -> GPT:
    model = small_gpt(mode, device)
    mode.prepare(model, device)
    if mode.is_fsdp2:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)  # type: ignore[no-any-return]
    options = {"process_group": group, **mode.options}
    if mode.axes:
        options["device_mesh"] = init_device_mesh(device.device.type, (2, size // 2), mesh_dim_names=mode.axes)
    if type(options.get("reshard_after_forward")) is int:
        options["reshard_after_forward"] = size // 2
    return flatshard.fully_shard(model, policy={Block}, **options)


def wholes(mode: Mode, model: GPT) -> list[Tensor]:
    """Return the full parameters after training, on this rank's device."""
    if mode.is_fsdp2:
        return [p.detach().full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    with flatshard.summon_full_params(model, writeback=False):
        return [p.detach().clone() for p in model.parameters()]


def parity(mode: Mode, device: Device, rank: int, size: int, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Return the errors of this rank's results, in a world that the mode supports."""
    start, expected, norms = alone(mode, device, size)
    model, seen = sharded(mode, device, size, group), []
    whole = functools.partial(flatshard.optim.WholeParameterOptimizer, optimizer_class=mode.makes)
    optimizer = (whole if mode.whole else mode.makes)(trainable(model))
    for batch in batches(mode, size):
        optimizer.zero_grad()
        for number, rows in enumerate(batch[:, rank]):
            is_held = mode.is_held and number < mode.microbatches - 1
            with flatshard.no_sync(model) if is_held else contextlib.nullcontext():
                loss_of(model, rows.to(device.device)).backward()
        norm = nn.utils.clip_grad_norm_(trainable(model), 1.0)
        seen.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
    apart = [
        float((a.to(b.device, b.dtype) - b).norm() / (b - s).norm())
        for a, b, s in zip(wholes(mode, model), expected, start, strict=True)
        if not torch.equal(b, s) or not torch.equal(a.to(b.device, b.dtype), b)
    ]
    trains = any(not torch.equal(b, s) for b, s in zip(expected, start, strict=True))
    apart += [abs(a / b - 1) for a, b in zip(seen, norms, strict=True)]
    off = max(apart) if trains and all(map(math.isfinite, apart)) else math.inf
    return {"off": off, "allowed": mode.off}


def fits(mode: Mode, device: Device, size: int) -> str:
    """Return why a mode cannot run there, or ""."""
    if mode.is_fsdp2 and isinstance(device, Simulated):
        return "the simulated device has no functional collectives"
    needs_pairs = mode.axes or type(mode.options.get("reshard_after_forward")) is int
    return "needs an even number of ranks, four or more" if needs_pairs and (size < 4 or size % 2) else ""


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
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)
ROUNDS, BATCH = 20, 2


def timed(name: str, bf16: bool, config: GPTConfig, device: Device, rounds: int) -> dict[str, Any]:
    """Measure a contender alone on the device: milliseconds of a step, memory, and the overlap of communication."""
    setting = replace(CONTENDING[name], bf16=bf16, device=device.device)
    kind = name.partition(",")[0]
    assert kind in CONTENDERS
    before = device.allocated()
    tokens = torch.zeros(BATCH, config.context, dtype=torch.int64)
    optimizer = ADAMW if device.device.type == "cuda" else functools.partial(torch.optim.AdamW, lr=1e-4)
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
    }


def captured(name: str, config: GPTConfig, device: Device) -> dict[str, Any]:
    """Capture a step with SGD in a CUDA graph, over this job's ranks."""
    options = {"static_buffers": True} if "static" in name else {}
    setting = Setting(Block, device=device.device, options=options)
    tokens = torch.zeros(1, config.context, dtype=torch.int64)
    job = Job("flatshard", config, setting, tokens, functools.partial(torch.optim.SGD, lr=0.1, foreach=True))
    replay = device.captured(job.step)
    eager = 1e3 * min(device.seconds(job.step) for _ in range(3))
    return {"eager, ms": eager, "replay, ms": 1e3 * min(device.seconds(replay) for _ in range(3))}


# -- a part ------------------------------------------------------------------------------------------------------------

Case = Callable[[], dict[str, Any]]
"""A function that returns this rank's figures."""


def cases_of(part: str, device: Device, rank: int, size: int, tiny: bool) -> dict[str, Case | str]:
    """Return the cases of a part by name, or for a case that does not run here, the reason."""
    if part == "steps":
        config, rounds = (SMALL, 1) if tiny else (LARGE, ROUNDS)
        return {
            f"{name}{', bf16' * bf16}": functools.partial(timed, name, bf16, config, device, rounds)
            for bf16 in (False, True)
            for name in CONTENDING
            if name != "DDP" or not (bf16 or isinstance(device, Simulated))
        }
    if part == "capture":
        config = SMALL if tiny else replace(LARGE, layers=4, width=512)
        return {name: functools.partial(captured, name, config, device) for name in ("static buffers", "as it is")}
    everything = {name: mode for modes in PARITY.values() for name, mode in modes.items()}
    modes = {name: everything[name] for name in RACES} if part == "races" else PARITY[part]
    return {
        name: fits(mode, device, size) or functools.partial(parity, mode, device, rank, size)
        for name, mode in modes.items()
    }


PARTS = (*PARITY, "races", "steps", "capture")


def told(store: dist.Store, name: str, mine: dict[str, Any], rank: int, size: int) -> list[dict[str, Any]]:
    """Return each rank's result of a case. If a rank sends none, the store raises after ``PATIENCE``."""
    store.set(f"{name}/{rank}", json.dumps(mine))
    keys = [f"{name}/{other}" for other in range(size)]
    store.wait(keys, PATIENCE)
    return [json.loads(store.get(key)) for key in keys]


def run(part: str, device: Device, store: dist.Store, rank: int, size: int, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the names of all cases, then each case's results on all ranks. If a rank does not answer, that case is the
    last."""
    cases = cases_of(part, device, rank, size, tiny)
    yield {"cases": list(cases)}
    for name, case in cases.items():
        if isinstance(case, str):
            yield {"case": name, "left out": case}
            continue
        began = time.perf_counter()
        try:
            mine = case()
            device.finish()
        except Exception as e:  # any error is a line of the results, and the other cases run
            text = "".join(traceback.format_exception(e)[-4:])
            mine = {"error": f"{type(e).__name__}: {e}"[:2000], "where": text[-2000:]}
            device.recover()
        gc.collect()
        try:
            all_ranks = told(store, name, mine, rank, size)
        except dist.DistError as e:
            yield {"case": name, "ranks": [mine], "ended": f"a rank does not answer: {e}"[:500]}
            return
        yield {"case": name, "seconds": time.perf_counter() - began, "ranks": all_ranks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--results", type=Path, required=True, help="rank 0 adds a line of JSON a case")
    parser.add_argument("--device", choices=("cuda", "simulated", "cpu"), default="cuda")
    args = parser.parse_args()
    set_environment()
    torch.set_num_threads(1)
    index = int(os.environ.get("LOCAL_RANK", "0"))
    device = {"cuda": lambda: Cuda(index=index), "simulated": Simulated, "cpu": Device}[args.device]()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    base, rank, size = next(rendezvous("env://"))
    store = dist.PrefixStore(f"gpu.py/{args.part}", base)
    options = {"device_id": device.device} if args.device == "cuda" else {}
    dist.init_process_group(device.backend, store=store, rank=rank, world_size=size, timeout=PATIENCE, **options)
    with args.results.open("a") if rank == 0 else contextlib.nullcontext() as results:
        for found in run(args.part, device, dist.PrefixStore("told", store), rank, size, args.device != "cuda"):
            if results is not None:
                print(json.dumps(found), file=results, flush=True)
    with contextlib.suppress(dist.DistError):  # rank 0 may have the store, so it leaves last
        store.set(f"left/{rank}", "")
        if rank == 0:
            store.wait([f"left/{other}" for other in range(size)], PATIENCE)
    leave(0)  # after a failed case the process group may not shut down


if __name__ == "__main__":
    main()
