"""Records what one rank does in a step: collectives and their times (``Clock``), and memory (``Books``).

[Note: What is counted]
Tensors on the meta device have no memory, but their storages have a size, are resized and are freed like real ones. ``Books``
sees every operation, and so every new storage. The file that called the operation gives the category: files of reductions
(``_OF_REDUCTIONS``) and collectives: "reductions"; inner shards and other files of the handle: "unsharded"; any other file:
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

from flatshard._comm.backends import BuiltinCollectives
from flatshard._comm.collectives import Done, Pending
from flatshard._comm.progress import here
from flatshard._composable.features import kept_shards, static_buffers
from flatshard._handle import gradients, pool, reduction, reduction_input
from flatshard.planning._hardware import Bandwidths
from flatshard.planning._records import CATEGORIES, Collective, Memory, Sample, Span


class Clock:
    """What the streams of one rank do, and when. [Note: The model of time]

    It has the functions of ``torch.cuda`` that ``Streams`` uses: ``Stream``, ``current_stream`` and ``stream``.
    """

    def __init__(self, bandwidths: Bandwidths) -> None:
        self.bandwidths = bandwidths
        self.is_recording = False  # until then nothing takes time
        self.phase, self.unit = "forward", ""
        self.spans: list[Span] = []
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

    def compute(self, flops: int) -> None:
        """Record ``flops`` floating-point operations on the current stream."""
        if not (flops and self.is_recording):
            return
        start = self.current.time
        self.current.time += flops / (self.bandwidths.flops * self.bandwidths.efficiency)
        last = self.spans[-1] if self.spans else None
        if last and (last.kind, last.unit, last.phase, last.stop) == ("compute", self.unit, self.phase, start):
            start = self.spans.pop().start  # one span for operations without a gap
        self.spans.append(Span("compute", self.unit, self.phase, start, self.current.time))


class RecordedStream:
    """Stands for a stream, whose work so far is done at ``time``; or for an event or a collective, which is done then."""

    def __init__(self, clock: Clock, time: float = 0.0) -> None:
        self._clock = clock
        self.time = time

    def wait_stream(self, other: RecordedStream) -> None:
        if other.time > self.time:
            clock = self._clock
            if self is clock.main:
                clock.spans.append(Span("wait", clock.unit, clock.phase, self.time, other.time))
            self.time = other.time

    wait_event = wait_stream

    def record_event(self) -> RecordedStream:
        return RecordedStream(self._clock, self.time)

    def query(self) -> bool:
        return True  # the host's time is not modelled

    def wait(self) -> None:
        self._clock.current.wait_event(self)


class _LiveStorage(NamedTuple):
    """One storage that exists."""

    ref: weakref.ref[torch.UntypedStorage]
    category: str
    on_host: bool
    nbytes: int  # 0 for a storage that may be resized: its size is read each time


class Books(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees all operations, and records their memory and floating-point operations. [Note: What is counted]"""

    def __init__(self, clock: Clock) -> None:
        from torch.utils.flop_counter import flop_registry

        super().__init__()  # type: ignore[no-untyped-call]
        self.clock, self._flops_of = clock, flop_registry
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
        """Record what is in memory now, if the clock is recording."""
        clock = self.clock
        if not clock.is_recording:
            return
        now = tuple(dict(nbytes) for nbytes in self._nbytes)
        for live in list(self._resized.values()):
            if (storage := live.ref()) is not None:
                now[live.on_host][live.category] += storage.nbytes()
        sample = Sample(clock.main.time, clock.phase, clock.unit, *(Memory(**nbytes) for nbytes in now))
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
        if formula is not None:
            self.clock.compute(formula(*args, **kwargs, out_val=result))
        self.look()
        return result


_HANDLE = str(Path(reduction.__file__).parent)
_POOLS = (pool.__file__, static_buffers.__file__)
_OF_REDUCTIONS = (gradients.__file__, reduction.__file__, reduction_input.__file__, __file__)


def _category(frame: Any) -> str:
    """The category of storages made by an operation that ``frame`` called. [Note: What is counted]"""
    path: str = frame.f_code.co_filename
    while path in _POOLS and frame.f_back is not None:  # they allocate for their callers
        frame = frame.f_back
        path = frame.f_code.co_filename
    if path in _OF_REDUCTIONS:
        return "reductions"
    return "unsharded" if path.startswith(_HANDLE) or path == kept_shards.__file__ else "activations"


class RecordingCollectives(BuiltinCollectives):
    """The collectives of one rank of a group that does not exist. They send nothing, and record each call."""

    out_of_place = True

    def __init__(self, books: Books, name: str, rank: int, size: int, stride: int, widens: bool) -> None:
        """``name``: see ``Collective.group``. ``stride``: the ranks of the group are every ``stride``-th one of the job."""
        self._books, self._clock = books, books.clock
        self._name = name
        self.rank, self.size = rank, size
        self.widens = widens
        self._ranks_in_node = min(size, max(1, self._clock.bandwidths.gpus_per_node // stride))
        self._end = 0.0  # of the last collective

    @property
    def group(self) -> Any:
        """Stands for the process group. Nothing calls its methods."""
        return self

    def _issue(self, kind: str, tensor: torch.Tensor, group: str) -> Pending:
        clock, nbytes = self._clock, tensor.nbytes
        if not clock.is_recording:
            return Done()
        start = max(clock.current.time, self._end)
        self._end = start + clock.bandwidths.seconds(kind, nbytes, self.size, self._ranks_in_node)
        unit = here.label.unit
        clock.spans.append(Collective(kind, unit, clock.phase, start, self._end, nbytes, self.size, group))
        self._books.look()
        return RecordedStream(clock, self._end)

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        return self._issue("all-gather", output, self._name)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        if input.dtype is not output.dtype and self._clock.current is not self._clock.main:
            torch.empty_like(input)  # what ``DefaultCollectives`` receives into, and frees when the stream is done
        return self._issue("reduce-scatter", input, self._name)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self._issue("all-reduce", tensor, "replicas")

    def combine(self, numbers: torch.Tensor, op: Literal["sum", "max"]) -> Pending:
        """See :class:`BuiltinCollectives`."""
        return Done()
