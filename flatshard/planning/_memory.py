"""Records the memory of one rank, by category, while a program runs on the meta device.

[Note: What is counted]
Tensors on the meta device have no memory, but their storages have a size, are resized and are freed like real ones. ``Books``
sees every operation, and so every new storage. The file that called the operation gives the category: files of reductions
(``_OF_REDUCTIONS``) and collectives: "reductions"; inner shards and other files of the handle: "unsharded"; any other file:
"activations". A storage changes its category when it becomes a gradient of autograd ("arriving"), or ``.grad`` ("gradients").
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from flatshard._composable.features import inner_shards
from flatshard._handle import incoming, pool, reduction, reduction_input
from flatshard.planning import _clock
from flatshard.planning._clock import Clock


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank, by category."""

    shards: int = 0
    """This rank's part of the parameters, with padding."""
    gradients: int = 0
    """``.grad``: this rank's part, with padding, from the reduction to ``zero_grad``."""
    optimizer: int = 0
    """The optimizer's state."""
    unsharded: int = 0
    """Gathered parameters until they are freed, casts of shards, and static buffers."""
    reductions: int = 0
    """Inputs and outputs of gradient reductions."""
    arriving: int = 0
    """Gradients that autograd has computed, until they are copied into a reduction's input."""
    activations: int = 0
    """What forward and backward compute: inputs, saved tensors, temporary results. Or the argument ``activations``."""
    others: int = 0
    """Buffers and ignored parameters."""

    @property
    def total(self) -> int:
        known = self.shards + self.gradients + self.optimizer + self.unsharded + self.reductions + self.arriving
        return known + self.activations + self.others

    @property
    def held(self) -> int:
        """Bytes that flatshard and the optimizer allocate: all but ``activations`` and ``others``."""
        return self.total - self.activations - self.others


CATEGORIES = tuple(f.name for f in fields(Memory))


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that are in memory at the same time, and their categories."""

    nbytes: int = 0
    memory: Memory = Memory()
    phase: str = "forward"  # "forward", "backward" or "optimizer"
    unit: str = ""  # that runs then


def _higher(before: Peak, now: Peak) -> Peak:
    """The higher peak. If both are equal and in the same unit, ``now``, whose categories are more accurate."""
    if now.nbytes == before.nbytes and (now.phase, now.unit) == (before.phase, before.unit):
        return now
    return now if now.nbytes > before.nbytes else before


class Ledger:
    """The memory of one device over time, and its peaks."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, Memory]] = []  # (seconds, what is in memory from then on)
        self.held_peak = self.peak = Peak()

    def note(self, memory: Memory, clock: Clock) -> None:
        """Record what is in memory now. If several are recorded at the same time, the largest is kept."""
        self.held_peak = _higher(self.held_peak, Peak(memory.held, memory, clock.phase, clock.unit))
        self.peak = _higher(self.peak, Peak(memory.total, memory, clock.phase, clock.unit))
        if self.samples and self.samples[-1][0] == clock.now:
            if memory.total < self.samples[-1][1].total:
                return
            self.samples.pop()
        if not self.samples or self.samples[-1][1] != memory:
            self.samples.append((clock.now, memory))


class _LiveStorage:
    """One storage that exists."""

    __slots__ = ("category", "nbytes", "on_host", "ref")

    def __init__(self, ref: weakref.ref[torch.UntypedStorage], category: str, on_host: bool, nbytes: int) -> None:
        self.ref, self.category, self.on_host = ref, category, on_host
        self.nbytes = nbytes  # 0 for a storage that may be resized: its size is read each time


_RESIZED = ("unsharded", "reductions")  # categories whose storages may be resized


class Books(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees all operations, and records their memory and floating-point operations. [Note: What is counted]"""

    def __init__(self, clock: Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = clock
        self._storages: dict[int, _LiveStorage] = {}  # by id
        self._resized: dict[int, _LiveStorage] = {}  # the storages that may be resized
        self._held: tuple[dict[str, int], dict[str, int]] = (
            dict.fromkeys(CATEGORIES, 0),
            dict.fromkeys(CATEGORIES, 0),
        )  # bytes of all other storages, on the device and on the host
        self.is_open = False
        self.device, self.host = Ledger(), Ledger()

    def open(self) -> None:
        """Begin to record samples and peaks."""
        self.is_open = True
        self.look()

    def close(self) -> None:
        """End the recording with a sample of what is left after the step."""
        for ledger, memory in zip((self.device, self.host), self.look(), strict=True):
            ledger.samples.append((self.clock.now, memory))
        self.is_open = False

    def add(self, category: str, on_host: bool, nbytes: int) -> None:
        """Count bytes that have no storage."""
        self._held[on_host][category] += nbytes

    def track(self, tensors: Iterable[torch.Tensor], category: str, on_host: bool = False) -> None:
        """Count the storages of ``tensors`` in ``category`` from now on. Storages on the host stay there."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = id(storage)
            known = self._storages.get(key)
            is_there = on_host or (known is not None and known.on_host)
            self._end(key)
            resized = category in _RESIZED
            ref = weakref.ref(storage, functools.partial(self._end, key))
            entry = self._storages[key] = _LiveStorage(ref, category, is_there, 0 if resized else storage.nbytes())
            self._held[is_there][category] += entry.nbytes
            if resized:
                self._resized[key] = entry

    def _end(self, key: int, ended: object = None) -> None:
        if (entry := self._storages.pop(key, None)) is not None:
            self._held[entry.on_host][entry.category] -= entry.nbytes
            self._resized.pop(key, None)

    def look(self) -> tuple[Memory, Memory]:
        """Record and return what is in memory now, on the device and on the host."""
        held = dict(self._held[False]), dict(self._held[True])
        for entry in list(self._resized.values()):
            if (storage := entry.ref()) is not None:
                held[entry.on_host][entry.category] += storage.nbytes()
        device, host = Memory(**held[False]), Memory(**held[True])
        if self.is_open:
            self.device.note(device, self.clock)
            self.host.note(host, self.clock)
        return device, host

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps `__torch_dispatch__`, and imports torch._dynamo, which takes two seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        category = _category(sys._getframe(1))
        if func is torch.ops.aten._local_scalar_dense.default and category != "activations":
            return True  # the answer to "did no rank use this parameter?": all ranks do what this one does
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self._storages and storage.nbytes():
                    if kwargs.get("pin_memory"):  # under CPU offload
                        self.track([tensor], "gradients", on_host=True)
                    else:
                        self.track([tensor], category)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.clock.compute(formula(*args, **kwargs, out_val=result))
        if self.is_open:
            self.look()
        return result


_HANDLE = str(Path(reduction.__file__).parent)
_OF_REDUCTIONS = (incoming.__file__, reduction.__file__, reduction_input.__file__, _clock.__file__)


def _category(frame: Any) -> str:
    """The category of storages made by an operation that ``frame`` called. [Note: What is counted]"""
    path: str = frame.f_code.co_filename
    while path == pool.__file__ and frame.f_back is not None:  # the pool allocates for its caller
        frame = frame.f_back
        path = frame.f_code.co_filename
    if path in _OF_REDUCTIONS:
        return "reductions"
    return "unsharded" if path.startswith(_HANDLE) or path == inner_shards.__file__ else "activations"
