"""The small runtime: where and when collectives run, streams and events. What they are is in ``_backends.py``.

[Note: One code path for CUDA, gloo and the fake group]
``all_gather``, ``reduce_scatter`` and ``all_reduce`` return a :class:`Pending`; whoever needs the result waits for it. On
CPU waiting blocks until gloo's own thread has moved the bytes. On an accelerator the collective runs on a side stream,
waiting makes the current stream wait for an event, and the host never blocks.

[Note: Memory follows the streams]
No ``record_stream``, so memory is deterministic. The unsharded buffer is allocated on the gather stream, which first
waits for the event recorded when the last unit was freed: memory that is used again has been used up. Reduction inputs
belong to the compute stream; a record keeps each until the compute stream has waited for its reduction.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, NoReturn

import torch
import torch.distributed as dist

from flatshard import _config, _watch
from flatshard._ablation import NoCommunication
from flatshard._backends import Addressed, FakeCollectives, GlooCollectives, builtin_collectives, subgroup
from flatshard._collectives import Collectives, CollectivesFactory, Pending, make_collectives
from flatshard._errors import CollectiveError, OutOfStepError
from flatshard._host_memory import keep_freed_memory
from flatshard._order_check import Comparison, OrderCheck
from flatshard._progress import EXCHANGE, GATHER, REDUCE, Issued, Progress, describe_place, here


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


class Awaited:
    """A collective that blocks the host while it is waited for: the watch knows. [Note: Slow or stuck]"""

    __slots__ = ("_check", "_issued", "_pending", "_runtime")

    def __init__(self, pending: Pending, runtime: Runtime, issued: Issued, check: Comparison | None) -> None:
        self._pending = pending
        self._runtime = runtime
        self._issued = issued
        self._check = check  # that all ranks have issued the same: first, as else the data never come

    def wait(self) -> None:
        issued, runtime = self._issued, self._runtime
        before, here.waiting, here.tag = (here.waiting, here.tag), issued, issued.tag
        try:
            if self._check is not None:
                self._check.wait()
            self._pending.wait()
        except RuntimeError as e:
            if not isinstance(e, OutOfStepError) and (text := _watch.verdict(runtime)) is not None:
                raise OutOfStepError(issued.verb, issued.unit, runtime.rank, runtime.world_size, text) from e
            raise
        finally:
            here.waiting, here.tag = before


class StreamEvent:
    """A collective on a side stream of an accelerator: waiting orders the current stream behind it."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: Any, event: Any) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        self._device.current_stream().wait_event(self._event)

    def wait_on_host(self) -> None:
        self._event.synchronize()


def wait_on_host(pending: Pending) -> None:
    """Wait as code on the CPU must, which nothing orders behind a stream."""
    if isinstance(pending, StreamEvent):
        pending.wait_on_host()
    else:
        pending.wait()


class Streams:
    """The side streams of one accelerator. [Note: Memory follows the streams]"""

    def __init__(self, device: Any) -> None:
        self.device = device  # torch.cuda, torch.xpu, ...
        self.gather = device.Stream(priority=-1)
        self.reduce = device.Stream(priority=-1)
        self.freed: Any = None  # recorded on the compute stream when a unit was last freed

    @contextlib.contextmanager
    def on_gather(self) -> Any:
        if self.freed is not None:
            self.gather.wait_event(self.freed)
        with self.device.stream(self.gather):
            yield

    @contextlib.contextmanager
    def on_reduce(self) -> Any:
        self.reduce.wait_stream(self.device.current_stream())
        with self.device.stream(self.reduce):
            yield


class Runtime:
    """The collectives of one process group on one device, with their streams.

    One per group and device (see ``of``), and one more for each factory of other collectives (see ``using``).
    """

    # By id of the group; another group may have the id after that one's end.
    _instances: ClassVar[weakref.WeakValueDictionary[tuple[int, torch.device], Runtime]] = weakref.WeakValueDictionary()

    # What must be the same on all ranks, whichever garbage they have collected, lives as long as the group.
    _progress: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, Progress]] = weakref.WeakKeyDictionary()
    _orders: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, OrderCheck]] = weakref.WeakKeyDictionary()

    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = weakref.ref(group)
        # Orders groups alike on all ranks, as they are first sharded over in one order.
        self.number = next(self._numbers)
        self.device = device
        self._builtin = builtin_collectives(group, device)
        self.rank, self.world_size = self._builtin.rank, self._builtin.size
        self.collectives: Collectives = self._builtin
        self._made: dict[CollectivesFactory, Collectives] = {}  # by others' factories, which are called once
        self._inner: dict[int, Runtime] = {}  # by size: see `split`
        self._exact: Runtime | None = None  # the one with the built-in collectives, where those here are not exact
        # The side streams; None on CPU, where whoever waits for a collective blocks.
        self.streams = None if device.type == "cpu" else Streams(torch.get_device_module(device))
        self.progress: Progress | None = None  # where all ranks are one process, none can do anything else
        if device.type == "cpu" and self.world_size > 1:
            keep_freed_memory()
        if self.world_size > 1 and not isinstance(self._builtin, FakeCollectives):
            self._checked = _config.checked_collectives()
            self._order = self._orders.setdefault(group, OrderCheck(group, device))
            self.progress = self._progress.setdefault(group, Progress())
            if isinstance(self._builtin, GlooCollectives):
                _watch.start(self)

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> Runtime:
        """The runtime of ``group`` on ``device``: units share it, so that they share streams."""
        found = cls._instances.get((id(group), device))
        if found is None or found._group() is not group:
            found = cls._instances[id(group), device] = cls(group, device)
        return found

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
        group = subgroup(self.group, size, self.device)
        if size not in self._inner:
            self._inner[size] = copy.copy(Runtime.of(group, self.device))
            self._inner[size].streams = self.streams

    def within(self, size: int, factory: CollectivesFactory | None) -> Runtime:
        """The ``size`` consecutive ranks of the group that this rank is among, on the same streams. After ``split(size)``.

        It hands on what was gathered before, so it is exact; or left out, where that was.
        """
        made = self._inner[size].using(factory)
        return made if isinstance(factory, NoCommunication) else made.exact

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
        return contextlib.nullcontext() if self.streams is None else self.streams.on_gather()

    def reducing(self) -> AbstractContextManager[None]:
        """Allocate the gradient shard and issue the reduction inside."""
        return contextlib.nullcontext() if self.streams is None else self.streams.on_reduce()

    def before_pass(self) -> None:
        """What the current stream did to the shards (the optimizer's step) comes before gathers from here on."""
        if self.streams is not None:
            self.streams.gather.wait_stream(self.streams.device.current_stream())

    def before_free(self) -> None:
        """The current stream is done with a unit: its memory may be used again after what has been issued so far."""
        if self.streams is not None:
            self.streams.freed = self.streams.device.current_stream().record_event()

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        if self.progress is None:
            pending = self.collectives.all_gather(output, shard)
            return pending if self.streams is None else self.issued(pending)
        return self._issue(self.progress, "all-gather", GATHER, self.collectives.all_gather, output, shard)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        if self.progress is None:
            pending = self.collectives.reduce_scatter(output, input)
            return pending if self.streams is None else self.issued(pending)
        return self._issue(self.progress, "reduce-scatter", REDUCE, self.collectives.reduce_scatter, output, input)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        if self.progress is None:
            return self.issued(self.collectives.all_reduce(tensor))
        return self._issue(self.progress, "all-reduce", REDUCE, self.collectives.all_reduce, tensor)

    def exchange(self, sent: Addressed, received: Addressed) -> Pending:
        """Addressed between any ranks, by the backend: see ``BuiltinCollectives``. Nothing is lost on the way."""
        if self.progress is None:
            return self.issued(self._builtin.exchange(sent, received))
        start = functools.partial(self._builtin.exchange, sent, received)
        return self._issue(self.progress, "exchange", EXCHANGE, start)

    def _issue(
        self, progress: Progress, verb: str, kind: int, start: Callable[..., Pending], *tensors: torch.Tensor
    ) -> Pending:
        """Issue a collective by ``start``, known to the order check and the watch."""
        issued, check = progress.issue(verb, kind), None
        if issued.count <= self._checked and kind in getattr(self.collectives, "compared", (GATHER, REDUCE)):
            check = self._order.announce(issued, kind)
        if self.streams is not None:
            if check is not None:
                check.wait()
            return self.issued(start(*tensors))
        if check is not None and len(tensors) == 1:  # an all-reduce, which has no tag
            return Awaited(Then(check, lambda: start(*tensors)), self, issued, None)
        here.tag = issued.tag
        try:
            return Awaited(start(*tensors), self, issued, check)
        except BaseException:
            if check is not None:  # its messages are under way
                with contextlib.suppress(Exception):
                    Awaited(check, self, issued, None).wait()
            raise
        finally:
            here.tag = 0

    def store(self) -> Any:
        """The process group's store, by which ranks tell each other what they wait for. None: there is none any more."""
        return self._builtin.store()

    def interrupt(self) -> None:
        """See ``GlooCollectives.interrupt``."""
        if isinstance(self._builtin, GlooCollectives):
            self._builtin.interrupt()

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
        pending.wait()
        return next_one()

    def issued(self, pending: Pending) -> Pending:
        """``pending`` as something that any stream can wait for."""
        if self.streams is None:
            return pending
        pending.wait()  # orders the side stream (the current one here) behind a backend's own streams
        return StreamEvent(self.streams.device, self.streams.device.current_stream().record_event())

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
