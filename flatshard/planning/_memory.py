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
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from flatshard._composable.features import kept_shards, static_buffers
from flatshard._handle import gradients, pool, reduction, reduction_input
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
        return self.held + self.activations + self.others

    @property
    def held(self) -> int:
        """Bytes that flatshard and the optimizer allocate: all but ``activations`` and ``others``."""
        return self.shards + self.gradients + self.optimizer + self.unsharded + self.reductions + self.arriving


CATEGORIES = tuple(f.name for f in fields(Memory))


class Sample(NamedTuple):
    """What is in memory at one time of a step."""

    seconds: float
    phase: str  # "forward", "backward" or "optimizer"
    unit: str  # that runs then
    device: Memory
    host: Memory


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that are in memory at the same time, and their categories."""

    nbytes: int
    memory: Memory
    phase: str  # "forward", "backward" or "optimizer"
    unit: str  # that runs then


class _LiveStorage(NamedTuple):
    """One storage that exists."""

    ref: weakref.ref[torch.UntypedStorage]
    category: str
    on_host: bool
    nbytes: int  # 0 for a storage that may be resized: its size is read each time


class Books(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees all operations, and records their memory and floating-point operations. [Note: What is counted]"""

    def __init__(self, clock: Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = clock
        self.samples: list[Sample] = []
        self._is_open = False
        # Bytes by category, of what keeps its size: on the device, and on the host.
        self._nbytes = (dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0))
        self._storages: dict[int, _LiveStorage] = {}  # by id
        self._resized: dict[int, _LiveStorage] = {}  # those that may be resized

    def open(self) -> None:
        """Begin to record samples, with one of what is in memory now."""
        self._is_open = True
        self.look()

    def track(self, tensors: Iterable[torch.Tensor], category: str, on_host: bool = False) -> None:
        """Count the storages of ``tensors`` in ``category`` from now on. Storages on the host stay there."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = id(storage)
            known = self._storages.get(key)
            self._end(key)
            is_resized = category in ("unsharded", "reductions")
            ref = weakref.ref(storage, functools.partial(self._end, key))
            at = on_host if known is None else known.on_host
            entry = _LiveStorage(ref, category, at, 0 if is_resized else storage.nbytes())
            self._storages[key] = entry
            self.add(category, entry.nbytes, entry.on_host)
            if is_resized:
                self._resized[key] = entry

    def add(self, category: str, nbytes: int, on_host: bool) -> None:
        """Count that many bytes more."""
        self._nbytes[on_host][category] += nbytes

    def _end(self, key: int, ended: object = None) -> None:
        self._resized.pop(key, None)
        if (entry := self._storages.pop(key, None)) is not None:
            self.add(entry.category, -entry.nbytes, entry.on_host)

    def look(self) -> None:
        """Record what is in memory now, after ``open``."""
        if not self._is_open:
            return
        now = tuple(dict(nbytes) for nbytes in self._nbytes)
        for entry in list(self._resized.values()):
            if (storage := entry.ref()) is not None:
                now[entry.on_host][entry.category] += storage.nbytes()
        sample = Sample(self.clock.now, self.clock.phase, self.clock.unit, *(Memory(**nbytes) for nbytes in now))
        if not self.samples or self.samples[-1] != sample:
            self.samples.append(sample)

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
                    on_host = bool(kwargs.get("pin_memory"))  # under CPU offload
                    self.track([tensor], "gradients" if on_host else category, on_host)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.clock.compute(formula(*args, **kwargs, out_val=result))
        self.look()
        return result


_HANDLE = str(Path(reduction.__file__).parent)
_POOLS = (pool.__file__, static_buffers.__file__)
_OF_REDUCTIONS = (gradients.__file__, reduction.__file__, reduction_input.__file__, _clock.__file__)


def _category(frame: Any) -> str:
    """The category of storages made by an operation that ``frame`` called. [Note: What is counted]"""
    path: str = frame.f_code.co_filename
    while path in _POOLS and frame.f_back is not None:  # they allocate for their callers
        frame = frame.f_back
        path = frame.f_code.co_filename
    if path in _OF_REDUCTIONS:
        return "reductions"
    return "unsharded" if path.startswith(_HANDLE) or path == kept_shards.__file__ else "activations"
