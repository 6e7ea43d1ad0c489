"""Records what one rank does in a step: collectives and operations (``Recorder``), and memory (``Books``).

[Note: What is counted]
Tensors on the meta device have no memory, but their storages have a size, are resized and are freed like real ones. ``Books``
sees every operation, and so every new storage. The file that called the operation gives the category: files of reductions
(``_OF_REDUCTIONS``) and collectives: "reductions"; kept shards and other files of the handle: "unsharded"; any other file:
"activations". A storage changes its category when it becomes a gradient of autograd ("arriving"), or ``.grad`` ("gradients").
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flatshard import _mesh_runtime
from flatshard._comm.backends import BuiltinCollectives
from flatshard._comm.collectives import Done, Pending
from flatshard._comm.progress import Label
from flatshard._composable.features import kept_shards
from flatshard._handle import gradients, pool, reduction
from flatshard.planning._records import CATEGORIES, Collective, Memory, Sample


class Recorder:
    """Where a step is, and what it has issued.

    It has the functions of ``torch.cuda`` that ``Streams`` uses: ``Stream``, ``current_stream`` and ``stream``. Time does not
    pass: what is in memory depends on the order of the program only.
    """

    def __init__(self) -> None:
        self.is_recording = False
        self.phase, self.unit = "forward", ""
        self.collectives: list[Collective] = []
        self.flops = 0
        self.main = self.current = RecordedStream(self)

    def Stream(self, device: torch.device, priority: int) -> RecordedStream:
        return RecordedStream(self)

    def current_stream(self, device: torch.device) -> RecordedStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class RecordedStream:
    """Stands for a stream, an event or a collective, whose work is done at once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def wait_stream(self, other: RecordedStream) -> None:
        """Nothing is waited for."""

    wait_event = wait_stream

    def record_event(self) -> RecordedStream:
        return RecordedStream(self._recorder)

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is waited for."""


class _LiveStorage(NamedTuple):
    """One storage that exists."""

    ref: weakref.ref[torch.UntypedStorage]
    category: str
    on_host: bool
    nbytes: int  # 0 for a storage that may be resized: its size is read each time


class Books(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees all operations, and records their memory and floating-point operations. [Note: What is counted]"""

    def __init__(self, recorder: Recorder) -> None:
        from torch.utils.flop_counter import flop_registry

        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder, self._flops_of = recorder, flop_registry
        self.samples: list[Sample] = []
        # Bytes by category, of what keeps its size: on the device, and on the host.
        self._nbytes = (dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0))
        self._storages: dict[int, _LiveStorage] = {}  # by id
        self._resized: dict[int, _LiveStorage] = {}  # those that may be resized

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
            live = _LiveStorage(ref, category, at, 0 if is_resized else storage.nbytes())
            self._storages[key] = live
            self.add(category, live.nbytes, live.on_host)
            if is_resized:
                self._resized[key] = live

    def add(self, category: str, nbytes: int, on_host: bool) -> None:
        """Count that many bytes more."""
        self._nbytes[on_host][category] += nbytes

    def _end(self, key: int, ended: object = None) -> None:
        self._resized.pop(key, None)
        if (live := self._storages.pop(key, None)) is not None:
            self.add(live.category, -live.nbytes, live.on_host)

    def look(self) -> None:
        """Record what is in memory now, if the step is recorded."""
        recorder = self.recorder
        if not recorder.is_recording:
            return
        now = tuple(dict(nbytes) for nbytes in self._nbytes)
        for live in list(self._resized.values()):
            if (storage := live.ref()) is not None:
                now[live.on_host][live.category] += storage.nbytes()
        sample = Sample(recorder.phase, recorder.unit, *(Memory(**nbytes) for nbytes in now))
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
        formula = self._flops_of.get(func._overloadpacket)
        if formula is not None and self.recorder.is_recording:
            self.recorder.flops += formula(*args, **kwargs, out_val=result)
        self.look()
        return result


_HANDLE = str(Path(reduction.__file__).parent)
_POOL = pool.__file__
_OF_REDUCTIONS = (gradients.__file__, reduction.__file__, _mesh_runtime.__file__, __file__)


def _category(frame: Any) -> str:
    """The category of storages made by an operation that ``frame`` called. [Note: What is counted]"""
    path: str = frame.f_code.co_filename
    while path == _POOL and frame.f_back is not None:  # they allocate for their callers
        frame = frame.f_back
        path = frame.f_code.co_filename
    if path in _OF_REDUCTIONS:
        return "reductions"
    return "unsharded" if path.startswith(_HANDLE) or path == kept_shards.__file__ else "activations"


class RecordingCollectives(BuiltinCollectives):
    """The collectives of one rank of a group that does not exist. They send nothing, and record each call."""

    out_of_place = True

    def __init__(self, books: Books, name: str, rank: int, size: int, widens: bool) -> None:
        """``name``: see ``Collective.group``."""
        self._books, self._recorder = books, books.recorder
        self._name = name
        self.rank, self.size = rank, size
        self.widens = widens

    @property
    def group(self) -> Any:
        """Stands for the process group. Nothing calls its methods."""
        return self

    def _issue(self, kind: str, tensor: torch.Tensor, group: str, label: Label | None) -> Pending:
        recorder = self._recorder
        if not recorder.is_recording:
            return Done()
        assert label is not None
        recorder.collectives.append(Collective(kind, label.unit, recorder.phase, tensor.nbytes, self.size, group))
        self._books.look()
        return RecordedStream(recorder)

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, label: Label | None = None) -> Pending:
        return self._issue("all-gather", output, self._name, label)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, label: Label | None = None) -> Pending:
        if input.dtype is not output.dtype and self._recorder.current is not self._recorder.main:
            torch.empty_like(input)  # what ``DefaultCollectives`` receives into, and frees when the stream is done
        return self._issue("reduce-scatter", input, self._name, label)

    def all_reduce(self, tensor: torch.Tensor, label: Label | None = None) -> Pending:
        return self._issue("all-reduce", tensor, "replicas", label)

    def combine(self, numbers: torch.Tensor, op: Literal["sum", "max"]) -> Pending:
        """See :class:`BuiltinCollectives`."""
        return Done()
