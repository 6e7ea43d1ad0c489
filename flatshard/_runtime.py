"""Where and when collectives run: streams, events, and memory. The collectives themselves are in ``_comm/backends.py``.

[Note: One code path for CUDA, gloo and the fake group]
``all_gather``, ``reduce_scatter`` and ``all_reduce`` return a :class:`Pending`. Code that needs the result calls ``wait``.
On CPU, ``wait`` blocks until gloo's thread has moved the bytes. On an accelerator the collective runs on a side stream,
``wait`` makes the current stream wait for an event, and the host never blocks.

[Note: Memory follows the streams]
flatshard does not use ``record_stream``, so peak memory is deterministic. Memory belongs to the stream that it was
allocated on, and the allocator gives it back to that stream, whichever is current. The user may compute on several streams
(two towers, a loss on a stream of its own), and autograd computes the backward of each operation on the stream of its
forward. So one rule is kept: **whoever frees memory has made its stream wait for all who used it.**

- *Unsharded parameters*, and what is kept of them for backward, belong to the gather stream. It waits for the current
  stream before each all-gather (for whatever wrote the shards: an optimizer step, ``p.data = ...``). Every stream that
  computes with a unit waits for its all-gather, and when the unit is freed, the gather stream waits for all of them
  (:class:`Users`).
- *Gradients of a unit* are worked on by one stream, which is entered for that: the one on which autograd accumulates them
  (``UnitGradients.home``). The reduction's input and output (which becomes ``.grad``) belong to it. The input is complete
  before the reduce stream is entered, and freed after the home stream has waited for the reduction. At the end of backward
  the caller's stream waits for all of them (``join``).
- Any other tensor that a side stream reads is held by the :class:`StreamEvent` until the wait (``holding``).

[Note: Memory of the host]
Under CPU offload, copies between host and device are asynchronous too, and streams do not order code on the CPU. So the
host waits twice per step: at the end of the outermost forward (until the shards have been read, because the user may
change them now), and at the end of backward (until the gradients have arrived). ``reads_host`` records the first event.

[Note: CUDA graphs]
A stream under capture must not wait for events from outside the capture, and streams that it forked must have joined it
at the end. So no event is kept longer than needed: a wait is issued as soon as there is a reason for it. The side streams
join the current stream when a pass or a backward ends.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn, Protocol

import torch
import torch.distributed as dist

from flatshard._comm.backends import Addressed, BuiltinCollectives, builtin_collectives
from flatshard._comm.capabilities import Capabilities, EnsureMemory, read_capabilities
from flatshard._comm.collectives import Collectives, CollectivesFactory, Pending, settle
from flatshard._comm.progress import EXCHANGE, GATHER, NUMBERS, REDUCE, Issued, Label, Progress, describe_place, here
from flatshard._comm.rank_group import RankGroup
from flatshard._errors import CollectiveError, OutOfStepError, cannot_trace
from flatshard._host_memory import keep_freed_memory


class Then:
    """Two collectives in a row. ``advance`` or ``wait`` issues the second when the first has ended."""

    __slots__ = ("_first", "_next", "_second")

    def __init__(self, first: Pending, next_one: Callable[[], Pending]) -> None:
        self._first = first
        self._next = next_one
        self._second: Pending | None = None

    def advance(self) -> None:
        """Wait for the first and issue the second. Idempotent."""
        if self._second is None:
            self._first.wait()
            self._second = self._next()

    def wait(self) -> None:
        self.advance()
        assert self._second is not None
        self._second.wait()


class Monitor(Protocol):
    """Detects that ranks issue different collectives: see ``_comm/monitor/monitor.py``. It does not change results."""

    def start(
        self, issued: Issued, capabilities: Capabilities, start: Callable[[], Pending], streams: Streams | None
    ) -> Pending:
        """Start ``issued`` by calling ``start``. Waiting for it raises if ranks differ. ``streams``: of an accelerator."""

    def explain(self, issued: Issued) -> Exception | None:
        """Called when the wait for ``issued`` has failed. Returns an error that gives the reason, if it is known."""


class Awaited:
    """A collective whose wait blocks the host.

    [Note: Memory lives as long as its works]
    Gloo's threads read and write a collective's memory until its works end, even if a wait is interrupted or the model
    is dropped. So memory is freed only after a wait; after an interrupt, the wait is repeated. A collective that is
    garbage-collected before its wait is moved to the group (``Progress.abandoned``). The group waits for it before it
    issues the next collective. Works cannot be destroyed instead: half a message would stay on the connection.

    When ranks turn out to issue different collectives, works may never end, so they are not waited for. They stay with
    the group until it is destroyed (``Progress.unended``), and so does their memory: its owners drop it without freeing
    it (see ``settle``). No further collective is issued on such a group: it could receive a message that was sent for
    one of those works.
    """

    __slots__ = ("_issued", "_monitor", "_pending")

    def __init__(self, pending: Pending, issued: Issued, monitor: Monitor | None) -> None:
        self._pending: Pending | None = pending  # None after it has ended
        self._issued = issued
        self._monitor = monitor

    def __del__(self) -> None:
        if self._pending is not None:
            self._issued.progress.abandoned.append(self)

    def wait(self) -> None:
        if self._pending is None:
            return
        issued = self._issued
        before = here.waiting, here.label
        here.waiting, here.label = issued, issued.label  # its `wait` may be the user's
        try:
            self._pending.wait()
            self._pending = None
        except Exception as e:
            self._pending = None
            is_ours = isinstance(e, OutOfStepError) or not isinstance(e, RuntimeError)
            if not is_ours and self._monitor is not None and (why := self._monitor.explain(issued)) is not None:
                raise why from e
            raise
        finally:
            here.waiting, here.label = before


class StreamEvent:
    """A collective on a side stream of an accelerator. ``wait`` makes the current stream wait for it."""

    __slots__ = ("_event", "_held", "_streams")

    def __init__(self, streams: Streams, event: Any) -> None:
        self._streams = streams
        self._event = event
        self._held: tuple[object, ...] = ()

    def hold(self, what: object) -> None:
        """Keep ``what`` (a tensor, or an object that holds tensors) alive until the wait."""
        self._held += (what,)

    def wait(self) -> None:
        self._streams.current.wait_event(self._event)
        self._held = ()

    def wait_on_host(self) -> None:
        """Block the host until the event has completed, so that code on the CPU can read the result."""
        if not self._event.query():
            self._event.synchronize()
        self._held = ()


def holding(pending: Pending, what: object) -> Pending:
    """``pending``, which keeps ``what`` alive if a side stream reads it. [Note: Memory follows the streams]"""
    if isinstance(pending, StreamEvent):
        pending.hold(what)
    return pending


def wait_on_host(pending: Pending) -> None:
    """Wait until code on the CPU can read the result of ``pending``."""
    if isinstance(pending, StreamEvent):
        pending.wait_on_host()
    else:
        pending.wait()


_NEEDED = "current_stream", "stream", "Stream", "Stream.wait_stream", "Stream.wait_event", "Stream.record_event"
"""What a device module must have."""


def _has(module: Any, name: str) -> bool:
    owner, _, method = name.rpartition(".")
    return hasattr(getattr(module, owner, None) if owner else module, method)


class Streams:
    """The side streams of one accelerator, for all process groups. [Note: Memory follows the streams]"""

    _made: ClassVar[weakref.WeakValueDictionary[torch.device, Streams]] = weakref.WeakValueDictionary()

    def __init__(self, module: Any, device: torch.device) -> None:
        """``module``: the device module, such as ``torch.cuda`` or ``torch.xpu``."""
        self._module = module
        self._device = device
        self.gather = module.Stream(device=device, priority=-1)
        self.reduce = module.Stream(device=device, priority=-1)
        self._forked: set[Any] = set()  # the side streams that have waited for another stream since the last join
        # Completes when the shards on the host have been read: [Note: Memory of the host]
        self.host_read: StreamEvent | None = None

    @classmethod
    def of(cls, device: torch.device) -> Streams | None:
        """The side streams of ``device``; None on CPU, where waiting for a collective blocks.

        Raises:
            NotImplementedError: the device has no streams.
        """
        if device.type == "cpu":
            return None
        module = torch.get_device_module(device)
        missing = [name for name in _NEEDED if not _has(module, name)]
        if missing:
            raise NotImplementedError(
                f"fully_shard: parameters are on {str(device)!r}, and torch.{device.type} has no streams to run collectives "
                f"on: it lacks {', '.join(missing)}. Move the module to the CPU or to another accelerator first"
            )
        if (found := cls._made.get(device)) is None:
            found = cls._made[device] = cls(module, device)
        return found

    @property
    def current(self) -> Any:
        """The device's current stream: the one that the caller enqueues on."""
        return self._module.current_stream(self._device)

    def record(self) -> StreamEvent:
        """Record an event on the current stream."""
        return StreamEvent(self, self.current.record_event())

    @contextlib.contextmanager
    def running_on(self, side: Any) -> Iterator[None]:
        """Make ``side`` the current stream inside the context, after it has waited for the current one."""
        self.fork(side)
        with self._module.stream(side):
            yield

    def fork(self, side: Any) -> None:
        """Make ``side`` wait for the work that is on the current stream now."""
        side.wait_stream(self.current)
        self._forked.add(side)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Make ``stream``, one of the user's, the current stream inside the context. Nothing waits before ``join``."""
        if stream == self.current:
            yield
            return
        self._forked.add(stream)
        with self._module.stream(stream):
            yield

    def let_wait(self, waiting: Any, stream: Any) -> None:
        """Make ``waiting`` wait for the work that is on ``stream`` now; both may be the user's. [Note: CUDA graphs]"""
        if waiting != stream and (self.is_captured(stream) or not self.is_captured(waiting)):
            waiting.wait_stream(stream)

    def is_captured(self, stream: Any) -> bool:
        """Whether ``stream`` is captured into a CUDA graph. What came before the capture is over: capturing begins so."""
        is_capturing: Callable[[], bool] | None = getattr(self._module, "is_current_stream_capturing", None)
        if is_capturing is None:
            return False
        with self._module.stream(stream):
            return is_capturing()

    def leave(self, side: Any) -> None:
        """Have ``join`` not wait for ``side``, until it forks again or comes back."""
        self._forked.discard(side)

    def come_back(self, side: Any) -> None:
        """Have the next ``join`` wait for ``side``."""
        self._forked.add(side)

    def join(self) -> None:
        """Make the current stream wait for all forked side streams. [Note: CUDA graphs]"""
        while self._forked:
            if (stream := self._forked.pop()) != self.current:
                self.current.wait_stream(stream)


class Users:
    """The streams that compute with memory of the gather stream. [Note: Memory follows the streams]"""

    __slots__ = ("_all_gathers", "_known", "_streams")

    def __init__(self, streams: Streams, gathers: Sequence[Pending]) -> None:
        """``gathers``: what writes it. The current stream waits for them."""
        self._streams = streams
        self._all_gathers = tuple(gathers)
        self._known = [streams.current]

    def add_current(self) -> None:
        """The current stream is about to use the memory: make it wait for the gathers, if it has not."""
        streams, current = self._streams, self._streams.current
        if current not in self._known:
            if streams.is_captured(current):  # the gathers may be from before the capture
                streams.let_wait(current, self._known[0])
            else:
                for gather in self._all_gathers:
                    gather.wait()
            self._known.append(current)

    def end(self) -> None:
        """Make the gather stream wait for all of them. The current stream is waited for in any case."""
        streams, current = self._streams, self._streams.current
        for stream in self._known:
            if stream != current:
                streams.let_wait(streams.gather, stream)


_Lasting = dict[torch.device, tuple[int, dict[CollectivesFactory, Collectives]]]
"""The ``number`` and ``made`` of the ``Peers`` of one group, by device."""


@dataclass(frozen=True, eq=False)
class Peers:
    """One process group on one device: what does not change, and what all runtimes that are made from it share."""

    builtin: BuiltinCollectives  # the backend's, among the ranks of the group
    device: torch.device  # of the tensors
    streams: Streams | None  # the device's side streams; None: waiting for a collective blocks
    host: torch.device | None = None  # where CPU offload keeps the shards; None: ``device`` is the host
    progress: Progress | None = None  # None for a world of one rank and for the fake group, where there is nobody else
    monitor: Monitor | None = None
    number: int = field(default_factory=RankGroup.next_number)  # see ``RankGroup``
    made: dict[CollectivesFactory, Collectives] = field(default_factory=dict)  # see ``Runtime.using``

    make_monitor: ClassVar[Callable[[BuiltinCollectives, torch.device, Progress], Monitor] | None] = None
    """Makes the monitor of a group of several processes. None: there is no monitor."""

    _known: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakValueDictionary[torch.device, Peers]]] = (
        weakref.WeakKeyDictionary()
    )

    # These live as long as the group. rank_group.py, [Note: Ranks collect garbage at different times]
    _progress: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, Progress]] = weakref.WeakKeyDictionary()
    _lasting: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, _Lasting]] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> Peers:
        """The peers in ``group`` on ``device``, of whom there is one description."""
        known = cls._known.setdefault(group, weakref.WeakValueDictionary())
        found = known.get(device)
        if found is None:
            on_cpu, builtin = device.type == "cpu", builtin_collectives(group, device)
            progress = monitor = None
            if on_cpu and builtin.size > 1:
                keep_freed_memory()
            if builtin.size > 1 and not builtin.imitates:
                progress = cls._progress.setdefault(group, Progress())
                monitor = None if cls.make_monitor is None else cls.make_monitor(builtin, device, progress)
            host = None if on_cpu else torch.device("cpu")
            streams, lasting = Streams.of(device), cls._lasting.setdefault(group, {})
            number, made = lasting.get(device) or lasting.setdefault(device, (RankGroup.next_number(), {}))
            found = known[device] = cls(builtin, device, streams, host, progress, monitor, number, made)
        return found


class Runtime(RankGroup):
    """The collectives of some :class:`Peers`. With others than the backend's it is another object, equal to the first."""

    _plain: ClassVar[weakref.WeakValueDictionary[int, Runtime]] = weakref.WeakValueDictionary()

    def __init__(self, peers: Peers, collectives: Collectives | None = None) -> None:
        """``collectives``: None: the backend's."""
        self.peers, self._builtin = peers, peers.builtin
        super().__init__(peers.device, self._builtin.rank, self._builtin.size, peers.number)
        self.host, self.progress, self.monitor, self.streams = peers.host, peers.progress, peers.monitor, peers.streams
        self.collectives: Collectives = collectives or self._builtin
        self.capabilities = read_capabilities(self.collectives)

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> Runtime:
        """The runtime of ``group`` on ``device`` with the backend's collectives. All units share it."""
        peers = Peers.of(group, device)
        found = cls._plain.get(peers.number)
        if found is None:
            found = cls._plain[peers.number] = Runtime(peers)
        return found

    def using(self, factory: CollectivesFactory | None) -> Runtime:
        """The same ranks with the collectives that ``factory`` makes; it is called once. None: this runtime.

        Raises:
            TypeError: it has made something else.
        """
        if factory is None:
            return self
        known = self.peers.made
        if (made := known.get(factory)) is None:
            made = known[factory] = factory(self.group, self.device)
        if not isinstance(made, Collectives):
            raise TypeError(
                f"collectives={factory!r} made a {type(made).__name__}, which lacks one of all_gather, reduce_scatter, "
                "all_reduce and exact: see flatshard.comm.Collectives"
            )
        return Runtime(self.peers, made)

    @property
    def axes(self) -> tuple[Runtime, ...]:
        """The runtimes that it issues collectives by: itself, unless its ranks are those of a mesh."""
        return (self,)

    @property
    def exact(self) -> Runtime:
        """The runtime for values that must arrive bit for bit: this one, unless its collectives approximate."""
        return self if self.collectives.exact else Runtime(self.peers)

    @property
    def group(self) -> dist.ProcessGroup:
        return self._builtin.group

    # -- where collectives run ---------------------------------------------------------------------------------------

    def gathering(self) -> AbstractContextManager[None]:
        """Context in which the unsharded buffer is allocated and the all-gather is issued."""
        return contextlib.nullcontext() if self.streams is None else self.streams.running_on(self.streams.gather)

    def reducing(self) -> AbstractContextManager[None]:
        """Context in which a reduction is issued. Its input is complete, and its output allocated, before it is entered."""
        return contextlib.nullcontext() if self.streams is None else self.streams.running_on(self.streams.reduce)

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Context in which ``stream``, one of this device's, is the current one. Nothing waits before ``join``."""
        return contextlib.nullcontext() if self.streams is None else self.streams.on(stream)

    def before_free(self, users: Users | None = None) -> None:
        """Called before a unit is freed: the gather stream waits for the current stream, and for all ``users``, before it
        reuses the memory.
        """
        if self.streams is not None:
            self.streams.fork(self.streams.gather)
            if users is not None:
                users.end()

    @property
    def current_stream(self) -> Any:
        """The device's current stream; None on CPU."""
        return None if self.streams is None else self.streams.current

    def join(self) -> None:
        """Called at the end of a pass or a backward: make the current stream wait for all work on side streams."""
        if self.streams is not None:
            self.streams.join()
        self._builtin.rest()

    def join_reductions_later(self) -> None:
        """Have the next ``join`` not wait for reductions that are in flight: ``join_reductions`` will."""
        if self.streams is not None:
            self.streams.leave(self.streams.reduce)

    def join_reductions(self) -> None:
        """``join``, also for reductions that it did not wait for."""
        if self.streams is not None:
            self.streams.come_back(self.streams.reduce)
            self.streams.join()

    def reads_host(self) -> None:
        """Record that a read of a host shard has been enqueued on the current stream. [Note: Memory of the host]"""
        if self.streams is not None:
            self.streams.host_read = self.streams.record()

    def wait_for_host_reads(self) -> None:
        """Block until the shards in host memory have been read, and may be changed."""
        if self.streams is not None and self.streams.host_read is not None:
            event, self.streams.host_read = self.streams.host_read, None
            event.wait_on_host()

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_gather(
        self,
        output: torch.Tensor,
        shard: torch.Tensor,
        label: Label,
        again: bool = False,
        ensure_output: EnsureMemory | None = None,
    ) -> Pending:
        """Gather the shards of one unit.

        Args:
            output: gets the shards of all ranks.
            shard: of this rank.
            label: the unit.
            again: the backward gathers parameters that the forward has already gathered.
            ensure_output: only for collectives that can gather late: see ``gathers_late``.
        """
        start: Callable[..., Pending] = self.collectives.all_gather
        if ensure_output is not None:
            start = functools.partial(start, ensure_output=ensure_output)
        return self._issue("all-gather", GATHER, label, start, output, shard, again=again)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, label: Label) -> Pending:
        return self._issue("reduce-scatter", REDUCE, label, self.collectives.reduce_scatter, output, input)

    def all_reduce(self, tensor: torch.Tensor, label: Label) -> Pending:
        return self._issue("all-reduce", REDUCE, label, self.collectives.all_reduce, tensor)

    def exchange(self, sent: Addressed, received: Addressed, label: Label) -> Pending:
        """Send tensors to any ranks and receive others, by the backend, bit for bit: see ``BuiltinCollectives.exchange``."""
        start = functools.partial(self._builtin.exchange, sent, received, label)
        return self._issue("exchange", EXCHANGE, label, start)

    def _issue(
        self,
        verb: str,
        kind: int,
        label: Label,
        start: Callable[..., Pending],
        *tensors: torch.Tensor,
        again: bool = False,
    ) -> Pending:
        """Issue a collective by ``start``: a method of ``collectives`` for ``tensors``, or without any a function."""
        progress, monitor = self.progress, self.monitor
        given = (*tensors, label) if tensors and self.collectives is self._builtin else tensors
        if progress is None:
            return start(*given) if self.streams is None else self.issued(start(*given))
        if progress.unended:
            self._refuse(verb, label, progress.unended[0][0])
        if progress.abandoned:
            settle(progress.abandoned)
        issued = progress.issue(verb, kind, label, again)
        before, here.label = here.label, label
        try:
            call = functools.partial(start, *given)
            pending = call() if monitor is None else monitor.start(issued, self.capabilities, call, self.streams)
            return Awaited(pending, issued, monitor) if self.streams is None else self.issued(pending)
        finally:
            here.label = before

    def _refuse(self, verb: str, label: Label, unended: Issued) -> NoReturn:
        text = (
            f"the {verb} of {label.unit or '<root>'!r} was not issued: ranks got out of step before on this process "
            f"group, at the {unended}{unended.when}, and messages of that collective may still arrive. Save what you need "
            "without collectives, fix the cause that the first error names, and restart all ranks"
        )
        raise OutOfStepError(verb, label.unit, self.rank, self.world_size, text)

    def store(self) -> Any:
        """The process group's store. None after the group has been destroyed."""
        return self._builtin.store()

    def broadcast_now(self, tensor: torch.Tensor) -> None:
        """Overwrite ``tensor`` (any shape and dtype) with the values of the group's rank 0."""
        if self.world_size > 1 and tensor.numel():
            dense = tensor.detach().contiguous()
            # As bytes: no backend supports every dtype.
            self._builtin.broadcast(dense.view(-1).view(torch.uint8)).wait()
            if dense.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(dense)

    def all_reduce_now(self, tensor: torch.Tensor, op: Literal["sum", "max"], question: str) -> None:
        """See :class:`RankGroup`."""
        try:
            start = functools.partial(self._builtin.combine, tensor, op)
            self._issue("all-reduce", NUMBERS, Label(question), start).wait()
        except Exception as e:
            self.fail(f"all-reduce for {question}", "", e)

    def then(self, pending: Pending, next_one: Callable[[], Pending]) -> Pending:
        """Run ``next_one`` after ``pending``: enqueued behind it at once (accelerator), or when it is waited for (CPU)."""
        if self.streams is None:
            return Then(pending, next_one)
        return holding(next_one(), pending)

    def issued(self, pending: Pending) -> Pending:
        """Turn ``pending`` into a :class:`Pending` that any stream can wait for."""
        if self.streams is None:
            return pending
        pending.wait()  # makes the side stream (the current stream here) wait for the backend's own streams
        return self.streams.record()

    def fail(self, phase: str, unit: str, error: Exception) -> NoReturn:
        """Raise ``error`` as a :class:`CollectiveError` that names the collective and the unit.

        Raises:
            CollectiveError: chained to ``error``. An out-of-memory error is raised as it is.
        """
        if isinstance(error, CollectiveError | torch.OutOfMemoryError):
            raise error
        if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            raise cannot_trace("torch.jit.trace", f"unit {unit or '<root>'!r}") from error
        text = str(error)  # the chained error has the full text
        text = text if len(text) <= 400 else f"{text[:400]}..."
        where = describe_place(self.progress.place()) if self.progress is not None else ""
        cause = "; ".join([f"{type(error).__name__}: {text}", *getattr(error, "__notes__", ())]) + where
        raise CollectiveError(phase, unit, self.rank, self.world_size, cause) from error


def on_any_rank(runtimes: Iterable[Runtime], flag: bool) -> bool:
    """Whether ``flag`` is True on any rank of these process groups. One all-reduce per group, in the same order on all ranks.

    The result of one group is the input to the next.
    """
    for runtime in sorted({r.number: r for r in runtimes}.values(), key=lambda r: r.number):
        if runtime.world_size > 1:
            told = torch.tensor([float(flag)], device=runtime.device)
            runtime.all_reduce_now(told, "max", "whether a rank has found an error")
            flag = bool(told.item())
    return flag
