"""The small runtime: where and when collectives run, streams and events. What they are is in ``_comm/backends.py``.

[Note: One code path for CUDA, gloo and the fake group]
``all_gather``, ``reduce_scatter`` and ``all_reduce`` return a :class:`Pending`; whoever needs the result waits for it. On
CPU waiting blocks until gloo's own thread has moved the bytes. On an accelerator the collective runs on a side stream,
waiting makes the current stream wait for an event, and the host never blocks.

[Note: Memory follows the streams]
No ``record_stream``, so memory is deterministic: memory belongs to the stream that it was allocated on, and whoever uses it
on another stream is ordered before its next use. The unsharded buffer belongs to the gather stream. That stream waits for
the current one twice: before each gather (for whatever wrote the shards: an optimizer's step, ``p.data = ...``), and when a
unit is freed. A reduction's input is complete before the reduce stream is entered. It belongs to the stream that backward
computes on, as does the output, which becomes ``.grad``: both are freed when that stream has waited for the reduction. Where
anything else is read on a side stream, a :class:`Pending` holds it until the wait (``Holding``).

[Note: Memory of the host]
Under CPU offload copies between the host and the device run late as well, and no stream orders code on the CPU. The host
waits twice in a step: when the outermost forward is over (until the shards have been read, as the user may now change
them), and when a backward is over (until the gradients are there). ``reads_host`` notes what there is to wait for.

[Note: CUDA graphs]
A stream that is captured may wait for nothing from outside, and what it forked must have joined it at the end. So no event
outlives what it orders: waits are issued when their reason arises. The side streams join the current one when a
pass or a backward ends.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist

from flatshard._comm.backends import (
    Addressed,
    BuiltinCollectives,
    FakeCollectives,
    builtin_collectives,
    subgroup,
)
from flatshard._comm.collectives import Collectives, CollectivesFactory, Pending, make_collectives, settle
from flatshard._comm.progress import EXCHANGE, GATHER, REDUCE, Issued, Label, Progress, describe_place, here
from flatshard._errors import CollectiveError, OutOfStepError
from flatshard._host_memory import keep_freed_memory


class Then:
    """A collective to be issued when another is over: by ``advance``, or by who waits."""

    __slots__ = ("_first", "_next", "_second")

    def __init__(self, first: Pending, next_one: Callable[[], Pending]) -> None:
        self._first = first
        self._next = next_one
        self._second: Pending | None = None

    def advance(self) -> None:
        """Wait for the first and issue the second. Idempotent."""
        if self._second is None:
            if isinstance(self._first, Then):
                self._first.advance()
            self._first.wait()
            self._second = self._next()

    def wait(self) -> None:
        self.advance()
        assert self._second is not None
        self._second.wait()


class Monitor(Protocol):
    """What notices that ranks do different things: see ``_comm/monitor/monitor.py``. Collectives are the same without it."""

    def announce(self, issued: Issued, collectives: Collectives) -> Pending | None:
        """``issued`` is about to be started. Returns what to wait for before its data: it raises if ranks differ."""

    def explain(self, issued: Issued) -> Exception | None:
        """The wait for ``issued`` has failed. Returns an error that says why, if that is known."""


class Unended(NamedTuple):
    """A collective that may never end, as other ranks have issued another one. Nobody waits for it."""

    issued: Issued
    pending: Pending | None


class Awaited:
    """A collective that blocks the host while it is waited for.

    [Note: Memory lives as long as its works]
    Gloo's threads read and write a collective's memory until its works have ended, whatever happens to the unit: an
    interrupted wait, a model that is dropped. So nobody frees memory before he has waited, and after an interrupt waits
    again; and a collective that nobody waits for any more is left to the group (``Progress.abandoned``), which waits for
    it before it issues another one. To destroy works that are under way would leave half of a message on the connection.

    Where ranks turn out to do different things, works may never end, so nobody waits for them: they are the group's to its
    end (``Progress.unended``). So is their memory, which those that it belonged to leave: see ``settle``. No other collective
    is issued on such a group: it could receive what was sent for one of those.
    """

    __slots__ = ("_check", "_issued", "_monitor", "_pending")

    def __init__(self, pending: Pending, issued: Issued, monitor: Monitor | None, check: Pending | None) -> None:
        self._pending: Pending | None = pending  # None: it has ended
        self._issued = issued
        self._monitor = monitor
        self._check = check  # that all ranks have issued the same: first, as else the data never come

    def __del__(self) -> None:
        if self._pending is not None:
            self._issued.progress.abandoned.append(self)

    def wait(self) -> None:
        if self._pending is None:
            return
        issued = self._issued
        before, here.waiting, here.label = (here.waiting, here.label), issued, issued.label
        try:
            if self._check is not None:
                self._compare(self._check)
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

    def _compare(self, check: Pending) -> None:
        try:
            check.wait()
        except OutOfStepError:
            self._issued.progress.unended.append(Unended(self._issued, self._pending))
            raise


class StreamEvent:
    """A collective on a side stream of an accelerator: waiting orders the current stream behind it."""

    __slots__ = ("_event", "_streams")

    def __init__(self, streams: Streams, event: Any) -> None:
        self._streams = streams
        self._event = event

    def wait(self) -> None:
        self._streams.current.wait_event(self._event)

    def wait_on_host(self) -> None:
        """Wait as code on the CPU must, which nothing orders behind a stream."""
        if not self._event.query():
            self._event.synchronize()


class Holding:
    """A collective that reads what nobody else keeps: ``what`` (tensors, or what holds some) lives until the wait."""

    __slots__ = ("_pending", "_what")

    def __init__(self, pending: Pending, what: Sequence[object]) -> None:
        self._pending = pending
        self._what = what

    def wait(self) -> None:
        self._pending.wait()
        self._what = ()

    def wait_on_host(self) -> None:
        """See :class:`StreamEvent`."""
        wait_on_host(self._pending)
        self._what = ()


def wait_on_host(pending: Pending) -> None:
    """Have what ``pending`` brings readable by code on the CPU."""
    if isinstance(pending, StreamEvent | Holding):
        pending.wait_on_host()
    else:
        pending.wait()


class Streams:
    """The side streams of one accelerator. [Note: Memory follows the streams]"""

    def __init__(self, module: Any, device: torch.device) -> None:
        """``module``: ``torch.cuda``, ``torch.xpu``, ..."""
        self._module = module
        self._device = device
        self.gather = module.Stream(device=device, priority=-1)
        self.reduce = module.Stream(device=device, priority=-1)
        self._forked: set[Any] = set()  # the side streams that have waited for another one since they were joined
        self.host_read: StreamEvent | None = None  # when shards on the host have been read: [Note: Memory of the host]

    @classmethod
    def of(cls, device: torch.device) -> Streams | None:
        """None on CPU, where whoever waits for a collective blocks.

        Raises:
            NotImplementedError: the device has no streams.
        """
        if device.type == "cpu":
            return None
        module = torch.get_device_module(device)
        if not hasattr(module, "Stream"):
            raise NotImplementedError(
                f"fully_shard: parameters are on {str(device)!r}, and torch.{device.type} has no streams to run collectives "
                "on. Move the module to the CPU or to another accelerator first"
            )
        return cls(module, device)

    @property
    def current(self) -> Any:
        """The stream that the caller's work is enqueued on."""
        return self._module.current_stream(self._device)

    def record(self) -> StreamEvent:
        """An event behind what the current stream has to do so far."""
        return StreamEvent(self, self.current.record_event())

    @contextlib.contextmanager
    def running_on(self, side: Any) -> Iterator[None]:
        """Enqueue on ``side`` what the caller does inside, behind what the current stream has to do so far."""
        self.fork(side)
        with self._module.stream(side):
            yield

    def fork(self, side: Any) -> None:
        """Order ``side`` behind what the current stream has to do so far."""
        side.wait_stream(self.current)
        self._forked.add(side)

    def join(self) -> None:
        """Order the current stream behind the side streams that were forked. [Note: CUDA graphs]"""
        while self._forked:
            self.current.wait_stream(self._forked.pop())


class Runtime:
    """The collectives of one process group on one device, with their streams.

    One per group and device (see ``of``), and one more for each factory of other collectives (see ``using``).
    """

    # By id of the group; another group may have the id after that one's end.
    _instances: ClassVar[weakref.WeakValueDictionary[tuple[int, torch.device], Runtime]] = weakref.WeakValueDictionary()

    # What must be the same on all ranks, whichever garbage they have collected, lives as long as the group.
    _progress: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, Progress]] = weakref.WeakKeyDictionary()

    make_monitor: ClassVar[Callable[[BuiltinCollectives, torch.device, Progress], Monitor] | None] = None
    """What makes a monitor for a group of several processes; None: nobody does."""

    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(
        self, builtin: BuiltinCollectives, device: torch.device, streams: Streams | None, host: torch.device | None
    ) -> None:
        """
        Args:
            builtin: communicates among the ranks of the group.
            device: what the tensors are on.
            streams: of the device; None: whoever waits for a collective blocks.
            host: where shards under CPU offload lie; None: on the device, which is the host.
        """
        # Orders groups alike on all ranks, as they are first sharded over in one order.
        self.number = next(self._numbers)
        self.device = device
        self.host = host
        self._builtin = builtin
        self.rank, self.world_size = builtin.rank, builtin.size
        self.collectives: Collectives = self._builtin
        self._made: dict[CollectivesFactory, Collectives] = {}  # by others' factories, which are called once
        self._inner: dict[int, Runtime] = {}  # by size: see `split`
        self._exact: Runtime | None = None  # the one with the built-in collectives, where those here are not exact
        self.streams = streams
        self.progress: Progress | None = None  # None for one rank and for the fake group, which have no peers
        self.monitor: Monitor | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> Runtime:
        """The runtime of ``group`` on ``device``: units share it, so that they share streams."""
        found = cls._instances.get((id(group), device))
        if found is None or found._group() is not group:
            host = None if device.type == "cpu" else torch.device("cpu")
            found = cls(builtin_collectives(group, device), device, Streams.of(device), host)
            found._join(group)
            cls._instances[id(group), device] = found
        return found

    def _join(self, group: dist.ProcessGroup) -> None:
        """Issue collectives on ``group``."""
        self._group = weakref.ref(group)
        if self.device.type == "cpu" and self.world_size > 1:
            keep_freed_memory()
        if self.world_size > 1 and not isinstance(self._builtin, FakeCollectives):
            self.progress = self._progress.setdefault(group, Progress())
            make = type(self).make_monitor
            self.monitor = None if make is None else make(self._builtin, self.device, self.progress)

    def using(self, factory: CollectivesFactory | None) -> Runtime:
        """The same group, device and streams with the collectives that ``factory`` makes; None: with these.

        Raises:
            TypeError: it makes what cannot be used.
        """
        if factory is None:
            return self
        made = self._made.get(factory)
        if made is None:
            made = self._made[factory] = make_collectives(factory, self.group, self.device)
        return self.replacing(made)

    def replacing(self, collectives: Collectives) -> Runtime:
        """The same group, device and streams with other ``collectives``."""
        result = copy.copy(self)
        result.collectives = collectives
        result._exact = None if collectives.exact else self.exact
        return result

    def split(self, size: int) -> None:
        """Make ``within(size)`` known. Every rank of the world must call it at the same time: see ``subgroup``."""
        self.add_inner(Runtime.of(subgroup(self.group, size, self.device), self.device))

    def add_inner(self, inner: Runtime) -> None:
        """Have ``within`` know the runtime of some consecutive ranks, this one among them."""
        if inner.world_size not in self._inner:
            self._inner[inner.world_size] = inner = copy.copy(inner)
            inner.streams = self.streams

    def within(self, size: int, factory: CollectivesFactory | None) -> Runtime:
        """The ``size`` consecutive ranks of the group that this rank is among, on the same streams. After ``split(size)``.

        It hands on what was gathered before, so it is exact; or left out, where that was.
        """
        made = self._inner[size].using(factory)
        return made if getattr(made.collectives, "everywhere", False) else made.exact

    @property
    def group(self) -> dist.ProcessGroup:
        return self._builtin.group

    @property
    def exact(self) -> Runtime:
        """For what must arrive bit for bit: this one, unless its collectives approximate."""
        return self._exact or self

    # -- where collectives run ---------------------------------------------------------------------------------------

    def gathering(self) -> AbstractContextManager[None]:
        """Allocate the unsharded buffer and issue the all-gather inside."""
        return contextlib.nullcontext() if self.streams is None else self.streams.running_on(self.streams.gather)

    def reducing(self) -> AbstractContextManager[None]:
        """Issue the reduction inside. Its input is complete, and its output allocated, before."""
        return contextlib.nullcontext() if self.streams is None else self.streams.running_on(self.streams.reduce)

    def before_free(self) -> None:
        """The current stream is done with a unit: its memory may be used again after what has been issued so far."""
        if self.streams is not None:
            self.streams.fork(self.streams.gather)

    @property
    def current_stream(self) -> Any:
        """The stream that the caller's work is enqueued on; None on CPU."""
        return None if self.streams is None else self.streams.current

    def join(self) -> None:
        """A pass or a backward is over: nothing is under way on a side stream that the current one is not ordered behind."""
        if self.streams is not None:
            self.streams.join()

    def reads_host(self) -> None:
        """A copy of a shard on the host has just been enqueued on the current stream. [Note: Memory of the host]"""
        if self.streams is not None:
            self.streams.host_read = self.streams.record()

    def wait_for_host_reads(self) -> None:
        """Have the host wait until shards in its memory have been read, and may change."""
        if self.streams is not None and self.streams.host_read is not None:
            event, self.streams.host_read = self.streams.host_read, None
            event.wait_on_host()

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, label: Label, again: bool = False) -> Pending:
        """``label``: whom it is for. ``again``: for a backward, of what a forward has had."""
        if self.progress is None:
            here.label = label
            pending = self.collectives.all_gather(output, shard)
            return pending if self.streams is None else self.issued(pending)
        return self._issue(
            self.progress, "all-gather", GATHER, label, again, self.collectives.all_gather, output, shard
        )

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, label: Label) -> Pending:
        if self.progress is None:
            here.label = label
            pending = self.collectives.reduce_scatter(output, input)
            return pending if self.streams is None else self.issued(pending)
        start = self.collectives.reduce_scatter
        return self._issue(self.progress, "reduce-scatter", REDUCE, label, False, start, output, input)

    def all_reduce(self, tensor: torch.Tensor, label: Label) -> Pending:
        if self.progress is None:
            here.label = label
            return self.issued(self.collectives.all_reduce(tensor))
        return self._issue(self.progress, "all-reduce", REDUCE, label, False, self.collectives.all_reduce, tensor)

    def exchange(self, sent: Addressed, received: Addressed, label: Label) -> Pending:
        """Addressed between any ranks, by the backend: see ``BuiltinCollectives``. Nothing is lost on the way."""
        if self.progress is None:
            return self.issued(self._builtin.exchange(sent, received))
        start = functools.partial(self._builtin.exchange, sent, received)
        return self._issue(self.progress, "exchange", EXCHANGE, label, False, start)

    def _issue(
        self,
        progress: Progress,
        verb: str,
        kind: int,
        label: Label,
        again: bool,
        start: Callable[..., Pending],
        *tensors: torch.Tensor,
    ) -> Pending:
        """Issue a collective by ``start``, known to the monitor."""
        if progress.unended:
            raise self._out_of_step(progress.unended[0].issued, verb, label)
        if progress.abandoned:
            settle(progress.abandoned)
        issued, monitor = progress.issue(verb, kind, label, again), self.monitor
        check = None if monitor is None else monitor.announce(issued, self.collectives)
        if check is not None and self.streams is None and len(tensors) == 1:  # an all-reduce, which has no tag
            return Awaited(Then(check, lambda: start(*tensors)), issued, monitor, None)
        before, here.label = here.label, label
        try:
            if self.streams is not None:
                if check is not None:
                    check.wait()
                return self.issued(start(*tensors))
            return Awaited(start(*tensors), issued, monitor, check)
        except BaseException:
            if check is not None and self.streams is None:  # its messages are under way
                with contextlib.suppress(Exception):
                    Awaited(check, issued, monitor, None).wait()
            raise
        finally:
            here.label = before

    def _out_of_step(self, first: Issued, verb: str, label: Label) -> OutOfStepError:
        """The error for a collective on a group on which messages of another one may still arrive."""
        text = (
            f"the {verb} of {label.unit or '<root>'!r} was not issued: ranks got out of step before on this process group, "
            f"at the {first}{first.when}, and messages of that may still arrive. Save what is needed by other means, remove "
            "the cause that the first error names, and start the ranks anew"
        )
        return OutOfStepError(verb, label.unit, self.rank, self.world_size, text)

    def store(self) -> Any:
        """The process group's store, by which ranks tell each other what they wait for. None: there is none any more."""
        return self._builtin.store()

    def broadcast_now(self, tensor: torch.Tensor) -> None:
        """Make ``tensor`` (any shape and dtype) that of the group's rank 0."""
        if self.world_size > 1 and tensor.numel():
            dense = tensor.detach().contiguous()
            self._builtin.broadcast(dense.view(-1).view(torch.uint8)).wait()  # bytes: no backend knows every dtype
            if dense.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(dense)

    def all_reduce_now(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> None:
        """Make ``tensor`` (a few numbers, dense) the sum or the maximum over the ranks, on the current stream."""
        self._builtin.all_reduce_now(tensor, op)

    def then(self, pending: Pending, next_one: Callable[[], Pending]) -> Pending:
        """``next_one`` after ``pending``: at once behind it on the stream, or when somebody waits for it (CPU)."""
        if self.streams is None:
            return Then(pending, next_one)
        return Holding(next_one(), [pending])

    def issued(self, pending: Pending) -> Pending:
        """``pending`` as something that any stream can wait for."""
        if self.streams is None:
            return pending
        pending.wait()  # orders the side stream (the current one here) behind a backend's own streams
        return self.streams.record()

    def fail(self, phase: str, unit: str, error: Exception) -> NoReturn:
        """Say which collective of which unit it was that ``error`` ended.

        Raises:
            CollectiveError: from ``error``. Where memory ran out, the error itself.
        """
        if isinstance(error, CollectiveError | torch.OutOfMemoryError):
            raise error
        text = str(error)  # in whole in the error that ours comes from
        text = text if len(text) <= 400 else f"{text[:400]}..."
        where = describe_place(self.progress.place()) if self.progress is not None else ""
        cause = "; ".join([f"{type(error).__name__}: {text}", *getattr(error, "__notes__", ())]) + where
        raise CollectiveError(phase, unit, self.rank, self.world_size, cause) from error
