"""Correctness of every mode on several ranks: each is compared with one process that trains on the full batch.

``gpu.py`` runs this. In float64, the tolerance is 1e-9 of the change by training. FSDP2 has the same check, to check the
check.

A second group makes the device late, as real ones are at times, and overwrites freed memory with NaN. So a missing wait is
a wrong number. One of them plants such a fault, which the check must see.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import checkout  # noqa: F401
import torch
import torch.distributed as dist
import torch.nn.functional as F
from devices import Device, Simulated
from gpt import GPT, Block, GPTConfig
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh

import flatshard
from flatshard import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from flatshard._comm.runtime import Runtime
from flatshard._comm.streams import Streams
from flatshard._handle import unsharded
from flatshard.comm import DefaultCollectives, QuantizedCollectives

S = ShardingStrategy
EXACT, ROUNDED = 1e-9, 0.01
"""Maximum error of weights relative to their change by training, in float64 and with bf16 compute."""


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
    sharded_optimizer: Callable[..., torch.optim.Optimizer] | None = None
    """The sharded model's optimizer, or None if it is ``optimizer``."""
    axes: tuple[str, ...] = ()
    """Mesh dimensions for hybrid strategies, the second of which shards."""
    is_fsdp2: bool = False
    """Whether torch's FSDP2 trains, to check the reference itself."""
    is_late: str = ""
    """Work that the device begins late: "collectives" or "compute"."""
    is_poisoned: bool = False
    """Whether freed memory is overwritten with NaN."""
    has_fault: bool = False
    """Whether nothing waits before memory is freed: a fault, which must be seen."""

    @property
    def makes(self) -> Callable[..., torch.optim.Optimizer]:
        rounds = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        return self.optimizer or (ADAMW if self.off == EXACT else rounds)

    @property
    def is_bf16(self) -> bool:
        precision = self.options.get("mixed_precision")
        return precision is not None and precision.param_dtype is torch.bfloat16

    @contextlib.contextmanager
    def disturbed(self) -> Iterator[None]:
        """Overwrite freed memory inside the context, or leave out waits, if the mode says so."""
        with contextlib.ExitStack() as stack:
            if self.is_poisoned:
                stack.enter_context(_poisoning())
            if self.has_fault:
                stack.enter_context(mock.patch.object(Runtime, "before_free"))
            yield


# -- disturbances ------------------------------------------------------------------------------------------------------


class LateCollectives(DefaultCollectives):
    """Collectives that begin late, and whose side stream is busy for a while afterwards."""

    def __init__(self, group: dist.ProcessGroup, device: Device) -> None:
        super().__init__(group)
        self._device = device

    def all_gather(self, output: Tensor, shard: Tensor) -> Any:
        self._device.keep_busy()
        done = super().all_gather(output, shard)
        self._device.keep_busy()
        return done

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Any:
        self._device.keep_busy()
        done = super().reduce_scatter(output, input)
        self._device.keep_busy()
        return done


def _make_compute_late(model: GPT, device: Device) -> None:
    """Keep the current stream busy before each block's forward and backward."""

    def before_backward(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: device.keep_busy())

    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: device.keep_busy())
        block.register_forward_hook(before_backward)


def _poisoning() -> AbstractContextManager[Any]:
    """Overwrite the memory of flat buffers with NaN before it is freed, on the stream that it belongs to."""
    free = unsharded.FlatBuffer.free

    def poison_and_free(self: unsharded.FlatBuffer) -> None:
        flat = self.flat
        if (
            self.taken_by is not None
            and flat.device.type != "cpu"
            and flat.is_floating_point()
            and flat.untyped_storage().nbytes()
        ):
            streams = Streams.of(flat.device)
            assert streams is not None
            owner = streams.gather if isinstance(self.taken_by, unsharded.UnshardedBuffer) else streams.current
            with torch.no_grad(), streams.on(owner):
                flat.fill_(math.nan)
        free(self)

    return mock.patch.object(unsharded.FlatBuffer, "free", poison_and_free)


# -- modes -------------------------------------------------------------------------------------------------------------


def checkpointed(model: GPT, device: Device) -> None:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))


def compiled(model: GPT, device: Device) -> None:
    for block in model.blocks:
        block.compile(fullgraph=True, backend="inductor" if device.device.type == "cuda" else "aot_eager")


ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True)
ADAFACTOR = functools.partial(torch.optim.Adafactor, lr=1e-2)


def offloaded_adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return flatshard.optim.OffloadedOptimizer(params, torch.optim.AdamW, lr=1e-2)


def whole_adafactor(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return flatshard.optim.WholeParameterOptimizer(params, ADAFACTOR)


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
        "SHARD_OPTIM": Mode({"strategy": S.SHARD_OPTIM}),
        "NO_SHARD": Mode({"strategy": S.NO_SHARD}),
    },
    "disturbances": {
        "late collectives": Mode(is_late="collectives"),
        "late compute": Mode(is_late="compute"),
        "late collectives, static buffers": Mode({"static_buffers": True}, is_late="collectives"),
        "late compute, offload": Mode({"cpu_offload": CPUOffload()}, is_late="compute"),
        "late collectives, SHARD_GRAD_OP, no_sync": Mode(
            {"strategy": S.SHARD_GRAD_OP}, microbatches=3, is_held=True, is_late="collectives"
        ),
        "poisoned": Mode(is_poisoned=True),
        "poisoned, late collectives": Mode(is_late="collectives", is_poisoned=True),
        "poisoned, late compute": Mode(is_late="compute", is_poisoned=True),
        "poisoned, offload": Mode({"cpu_offload": CPUOffload()}, is_poisoned=True),
        "poisoned, microbatches under no_sync": Mode(microbatches=3, is_held=True, is_poisoned=True),
        "poisoned, bf16": Mode({"mixed_precision": BF16}, ROUNDED, is_poisoned=True),
        "a planted fault: memory is freed without a wait": Mode(is_late="compute", is_poisoned=True, has_fault=True),
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
        "OffloadedOptimizer": Mode(sharded_optimizer=offloaded_adamw),
    },
    "precision": {
        "bf16, reduced in fp32": Mode({"mixed_precision": BF16}, ROUNDED),
        "bf16, reduced in bf16": Mode({"mixed_precision": replace(BF16, reduce_dtype=torch.bfloat16)}, 0.1),
        "bf16 sent, added in fp32": Mode({"mixed_precision": BF16, "collectives": widening}, 0.1),
        "bf16, cast shard kept": Mode({"mixed_precision": replace(BF16, keep_cast_shard=True)}, ROUNDED),
        "int8 sent": Mode({"collectives": QuantizedCollectives()}, 0.4),
        "fused AdamW": Mode(optimizer=functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)),
        "capturable AdamW": Mode(optimizer=functools.partial(ADAMW, capturable=True)),
    },
    "models": {
        "activation checkpointing": Mode(prepare=checkpointed),
        "a frozen block": Mode(freezes=True),
        "Adafactor by WholeParameterOptimizer": Mode(optimizer=ADAFACTOR, sharded_optimizer=whole_adafactor),
        "units compiled": Mode(prepare=compiled),
    },
    "hybrid": {
        "HYBRID_SHARD": Mode({"strategy": S.HYBRID_SHARD}, axes=HYBRID),
        "HYBRID_SHARD_ZERO2": Mode({"strategy": S.HYBRID_SHARD_ZERO2}, axes=HYBRID),
        "HYBRID_FULL_SHARD": Mode({"strategy": S.HYBRID_FULL_SHARD}, axes=HYBRID),
        "reshard to half of the ranks": Mode({"reshard_after_forward": 2}),
    },
}
"""Modes by part, in the order in which they are worth their time."""

RACES = (FSDP2, "FULL_SHARD", "SHARD_GRAD_OP", "static buffers", "offload", "microbatches under no_sync")
"""Modes that run under torch's sanitizer."""

SMALL = GPTConfig(vocabulary=37, context=12, layers=3, width=20, heads=2)
STEPS, ROWS = 3, 2


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).flatten(0, 1)
    exact = logits.dtype is torch.float64
    return F.cross_entropy(logits if exact else logits.float(), tokens[:, 1:].flatten())


def batches(mode: Mode, size: int, steps: int = STEPS) -> Iterator[Tensor]:
    """Yield the batches of all steps, the same on all ranks: (microbatches, ranks, rows, tokens)."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        shape = (mode.microbatches, size, ROWS, SMALL.context + 1)
        yield torch.randint(SMALL.vocabulary, shape, generator=generator)


def small_gpt(mode: Mode, device: Device) -> GPT:
    torch.manual_seed(0)
    model = GPT(SMALL).to(device.device, torch.float32 if mode.off > EXACT else torch.float64)
    model.blocks[0].requires_grad_(not mode.freezes)
    return model


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


Reference = tuple[list[Tensor], list[Tensor], list[float]]
"""Parameters before and after training by one process, and the norms of its gradients."""


def alone(mode: Mode, device: Device, size: int) -> Reference:
    """Train one process, rounded as ranks round for bf16; return parameters before and after training, and gradient norms."""
    model = small_gpt(mode, device)
    start = [p.detach().clone() for p in model.parameters()]
    low = small_gpt(mode, device).bfloat16() if mode.is_bf16 else model
    optimizer, norms = mode.makes(trainable(model)), []
    for batch in batches(mode, size, device.training_steps):
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
    if mode.is_late == "compute":
        _make_compute_late(model, device)
    if mode.is_fsdp2:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)  # type: ignore[no-any-return]
    options = {"process_group": group, **mode.options}
    if mode.is_late == "collectives":
        options["collectives"] = lambda ranks, where: LateCollectives(ranks, device)
    if mode.axes:
        options["device_mesh"] = init_device_mesh(device.device.type, (2, size // 2), mesh_dim_names=mode.axes)
    if type(options.get("reshard_after_forward")) is int:
        options["reshard_after_forward"] = size // 2
    return flatshard.fully_shard(model, policy={Block}, **options)


def full_parameters(mode: Mode, model: GPT) -> list[Tensor]:
    """Return the full parameters after training, on this rank's device."""
    if mode.is_fsdp2:
        return [p.detach().full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    with flatshard.summon_full_params(model, writeback=False):
        return [p.detach().clone() for p in model.parameters()]


def train(mode: Mode, device: Device, rank: int, size: int, group: dist.ProcessGroup | None) -> tuple[GPT, list[float]]:
    """Train the sharded model, and return it with the norms of the gradients."""
    model, norms = sharded(mode, device, size, group), []
    optimizer = (mode.sharded_optimizer or mode.makes)(trainable(model))
    for batch in batches(mode, size, device.training_steps):
        optimizer.zero_grad()
        for number, rows in enumerate(batch[:, rank]):
            is_held = mode.is_held and number < mode.microbatches - 1
            with flatshard.no_sync(model) if is_held else contextlib.nullcontext():
                loss_of(model, rows.to(device.device)).backward()
        norm = nn.utils.clip_grad_norm_(trainable(model), 1.0)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
    return model, norms


def parity(
    mode: Mode,
    device: Device,
    rank: int,
    size: int,
    group: dist.ProcessGroup | None = None,
    references: dict[Any, Reference] | None = None,
) -> dict[str, Any]:
    """Return the errors of this rank's results, in a world that the mode supports.

    Args:
        references: results of one process, which modes share. It may get another one.
    """
    references = {} if references is None else references
    key = mode.off == EXACT, mode.is_bf16, mode.optimizer, mode.microbatches, mode.freezes
    if key not in references:
        references[key] = alone(mode, device, size)
    start, expected, norms = references[key]
    with mode.disturbed():
        model, seen = train(mode, device, rank, size, group)
        found = full_parameters(mode, model)
    apart = [
        float((a.to(b.device, b.dtype) - b).norm() / (b - s).norm())
        for a, b, s in zip(found, expected, start, strict=True)
        if not torch.equal(b, s) or not torch.equal(a.to(b.device, b.dtype), b)
    ]
    trains = any(not torch.equal(b, s) for b, s in zip(expected, start, strict=True))
    apart += [abs(a / b - 1) for a, b in zip(seen, norms, strict=True)]
    off = max(apart) if trains and all(map(math.isfinite, apart)) else math.inf
    return {"off": off, "allowed": mode.off}


def reason_not_to_run(mode: Mode, device: Device, size: int) -> str:
    """Return why a mode cannot run there, or ""."""
    if mode.is_fsdp2 and isinstance(device, Simulated):
        return "the simulated device has no functional collectives"
    needs_pairs = mode.axes or type(mode.options.get("reshard_after_forward")) is int
    return "needs an even number of ranks, four or more" if needs_pairs and (size < 4 or size % 2) else ""
