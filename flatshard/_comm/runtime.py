"""The runtime of a process group on a device: it issues every collective, on the right stream and for the right unit.

The collectives themselves are in ``_comm/backends.py``; ``_comm/streams.py`` says who frees memory that streams share.

[Note: One code path for CUDA, gloo and the fake group]
``all_gather``, ``reduce_scatter`` and ``all_reduce`` return a :class:`Pending`. Code that needs the result calls ``wait``.
On CPU, ``wait`` blocks until gloo's thread has moved the bytes. On an accelerator the collective runs on a side stream,
``wait`` makes the current stream wait for an event, and the host never blocks.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn

import torch
import torch.distributed as dist

from flatshard._base.errors import CollectiveError, OutOfStepError, ReconfiguredError, cannot_trace
from flatshard._comm.backends import BuiltinCollectives, builtin_collectives
from flatshard._comm.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    EXCHANGE,
    GATHER,
    NUMBERS,
    REDUCE,
    REDUCE_SCATTER,
    Addressed,
    Capabilities,
    Collectives,
    CollectivesFactory,
    Done,
    EnsureMemory,
    Pending,
    read_capabilities,
)
from flatshard._comm.host_memory import keep_freed_memory
from flatshard._comm.process_groups import members_of
from flatshard._comm.progress import Awaited, Chain, Issued, Label, Monitor, Progress, describe_place, drain, here
from flatshard._comm.rank_group import RankGroup
from flatshard._comm.streams import Streams, Users, holding

_Lasting = dict[torch.device, tuple[int, dict[CollectivesFactory, Collectives]]]
"""The ``number`` and ``made`` of the ``Peers`` of one group, by device."""


@dataclass(frozen=True, eq=False)
class Peers:
    """The constants of a process group on a device, which all its runtimes share."""

    builtin: BuiltinCollectives  # the backend's, among the ranks of the group
    device: torch.device  # of the tensors
    streams: Streams | None  # the device's side streams, or None if waiting for a collective blocks
    host: torch.device | None = None  # where CPU offload keeps the shards, or None if ``device`` is the host
    progress: Progress | None = None  # None if there is no other process: in a group of one rank, and in the fake group
    monitor: Monitor | None = None
    number: int = field(default_factory=RankGroup.next_number)  # see ``RankGroup``
    made: dict[CollectivesFactory, Collectives] = field(default_factory=dict)  # see ``Runtime.using``

    make_monitor: ClassVar[Callable[[BuiltinCollectives, torch.device, Progress], Monitor] | None] = None
    """Makes the monitor of a group of several processes. If None, no group has a monitor."""

    _known: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakValueDictionary[torch.device, Peers]]] = (
        weakref.WeakKeyDictionary()
    )

    # These live as long as the group. rank_group.py, [Note: Ranks collect garbage at different times]
    _progress: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, Progress]] = weakref.WeakKeyDictionary()
    _lasting: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, _Lasting]] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> Peers:
        """Return the one description of ``group`` on ``device``."""
        known = cls._known.setdefault(group, weakref.WeakValueDictionary())
        found = known.get(device)
        if found is None:
            on_cpu, builtin = device.type == "cpu", builtin_collectives(group, device)
            progress = monitor = None
            if on_cpu and builtin.size > 1:
                keep_freed_memory()
            if builtin.size > 1 and not builtin.imitates:
                progress = cls._progress.setdefault(group, Progress(members_of(group)))
                monitor = None if cls.make_monitor is None else cls.make_monitor(builtin, device, progress)
            host = None if on_cpu else torch.device("cpu")
            streams, lasting = Streams.of(device), cls._lasting.setdefault(group, {})
            number, made = lasting.get(device) or lasting.setdefault(device, (RankGroup.next_number(), {}))
            found = known[device] = cls(builtin, device, streams, host, progress, monitor, number, made)
        return found


class Runtime(RankGroup):
    """The collectives of some :class:`Peers`. Runtimes of the same peers are equal, also with different collectives."""

    _plain: ClassVar[weakref.WeakValueDictionary[int, Runtime]] = weakref.WeakValueDictionary()

    def __init__(
        self, peers: Peers, collectives: Collectives | None = None, capabilities: Capabilities | None = None
    ) -> None:
        """
        Args:
            peers: the ranks.
            collectives: None for the backend's.
            capabilities: None for those of ``collectives``.
        """
        self.peers, self._builtin = peers, peers.builtin
        super().__init__(peers.device, self._builtin.rank, self._builtin.size, peers.number)
        self.host, self.progress, self.streams = peers.host, peers.progress, peers.streams
        self.collectives: Collectives = collectives or self._builtin
        self._is_builtin = self.collectives is self._builtin
        self.capabilities = capabilities or read_capabilities(self.collectives)

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> Runtime:
        """Return the runtime of ``group`` on ``device`` with the backend's collectives. All units share it."""
        peers = Peers.of(group, device)
        found = cls._plain.get(peers.number)
        if found is None:
            found = cls._plain[peers.number] = Runtime(peers)
        return found

    def using(self, factory: CollectivesFactory | None) -> Runtime:
        """Return a runtime of the same ranks with the collectives of ``factory``, or this one if it is None.

        ``factory`` is called once.

        Raises:
            TypeError: ``factory`` returned an object that is no :class:`Collectives`.
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
        """The runtimes that issue its collectives: itself, or one per axis for the ranks of a mesh."""
        return (self,)

    @property
    def exact(self) -> Runtime:
        """The runtime for values that must arrive bit for bit: this one, unless its collectives approximate."""
        return self if self.capabilities.exact else Runtime(self.peers)

    @property
    def group(self) -> dist.ProcessGroup:
        return self._builtin.group

    # -- streams -----------------------------------------------------------------------------------------------------

    def gathering(self) -> AbstractContextManager[None]:
        """Return a context in which the unsharded buffer is allocated and the all-gather is issued."""
        return contextlib.nullcontext() if self.streams is None else self.streams.running_on(self.streams.gather)

    def reducing(self) -> AbstractContextManager[None]:
        """Return a context in which a reduction is issued. Its input is complete, and its output allocated, before."""
        return contextlib.nullcontext() if self.streams is None else self.streams.running_on(self.streams.reduce)

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Return a context in which ``stream``, one of this device's, is current. Nothing waits before ``join``."""
        return contextlib.nullcontext() if self.streams is None else self.streams.on(stream)

    def before_free(self, users: Users | None = None) -> None:
        """Make the gather stream wait for the current stream and all ``users``, before it reuses the memory of a unit."""
        if self.streams is not None:
            current = self.streams.current
            self.streams.fork(self.streams.gather, current)
            if users is not None:
                users.end(current)

    @property
    def current_stream(self) -> Any:
        """The device's current stream, or None on CPU."""
        return None if self.streams is None else self.streams.current

    def join(self) -> None:
        """Make the current stream wait for all side streams, at the end of a pass or a backward."""
        if self.streams is not None:
            self.streams.join()
        self._builtin.release_unused()

    def join_reductions_later(self) -> None:
        """Have the next ``join`` not wait for reductions in flight: ``join_reductions`` will."""
        if self.streams is not None:
            self.streams.exclude_from_join(self.streams.reduce)

    def join_reductions(self) -> None:
        """Make the current stream wait for all side streams, also for reductions that ``join`` did not wait for."""
        if self.streams is not None:
            self.streams.include_in_join(self.streams.reduce)
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

    # -- collectives of a unit ---------------------------------------------------------------------------------------

    def all_gather(
        self,
        output: torch.Tensor,
        shard: torch.Tensor,
        label: Label,
        for_backward: bool = False,
        ensure_output: EnsureMemory | None = None,
    ) -> Pending:
        """Gather the shards of one unit.

        Args:
            output: gets the shards of all ranks.
            shard: of this rank.
            label: the unit.
            for_backward: the backward gathers parameters that the forward has already gathered.
            ensure_output: only for collectives that can gather late: see ``gathers_late``.
        """
        gather: Callable[..., Pending] = self.collectives.all_gather
        if ensure_output is not None:
            gather = functools.partial(gather, ensure_output=ensure_output)
        if self._is_builtin:
            return self._issue(ALL_GATHER, GATHER, label, for_backward, gather, output, shard, label)
        return self._issue(ALL_GATHER, GATHER, label, for_backward, self._call, label, gather, output, shard)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, label: Label) -> Pending:
        reduce = self.collectives.reduce_scatter
        if self._is_builtin:
            return self._issue(REDUCE_SCATTER, REDUCE, label, False, reduce, output, input, label)
        return self._issue(REDUCE_SCATTER, REDUCE, label, False, self._call, label, reduce, output, input)

    def all_reduce(self, tensor: torch.Tensor, label: Label) -> Pending:
        reduce = self.collectives.all_reduce
        if self._is_builtin:
            return self._issue(ALL_REDUCE, REDUCE, label, False, reduce, tensor, label)
        return self._issue(ALL_REDUCE, REDUCE, label, False, self._call, label, reduce, tensor)

    def exchange(self, sent: Addressed, received: Addressed, label: Label) -> Pending:
        """Send tensors to any ranks and receive others, by the backend, bit for bit: see ``BuiltinCollectives.exchange``."""
        return self._issue("exchange", EXCHANGE, label, False, self._builtin.exchange, sent, received, label)

    def _call(self, label: Label, method: Callable[..., Pending], *tensors: torch.Tensor) -> Pending:
        """Call ``method``, of a user's class, for ``label``. progress.py, [Note: Labels of a user's collectives]"""
        before, here.called = here.called, label
        try:
            pending = method(*tensors)
            if self.streams is not None:
                pending.wait()  # the current stream, for the backend's own; on CPU `Awaited` names the label in the wait
                pending = Done()
            return pending
        finally:
            here.called = before

    def _issue(
        self, verb: str, kind: int, label: Label, for_backward: bool, start: Callable[..., Pending], *arguments: Any
    ) -> Pending:
        """Issue a collective by calling ``start`` with ``arguments``, unless ranks are out of step on this group."""
        progress, monitor = self.progress, self.peers.monitor
        if progress is None:
            return self.issued(start(*arguments))
        if progress.unended:
            raise _out_of_step(self, verb, label, progress.unended[0][0])
        if progress.abandoned:
            drain(progress.abandoned)
        issued = progress.issue(verb, kind, label, for_backward)
        if self._builtin.may_change and self._builtin.place_now() != (self.rank, self.world_size):
            raise _reconfigured(self, verb, label)
        if monitor is None or issued.number > monitor.checks_until:
            pending = start(*arguments)
        else:
            pending = monitor.start(issued, self.capabilities, functools.partial(start, *arguments), self.streams)
        return Awaited(pending, issued, monitor) if self.streams is None else self.issued(pending)

    def then(self, pending: Pending, next_one: Callable[[], Pending]) -> Pending:
        """Run ``next_one`` after ``pending``: enqueued behind it at once (accelerator), or when it is waited for (CPU)."""
        if self.streams is None:
            return Chain(pending, next_one)
        return holding(next_one(), pending)

    def issued(self, pending: Pending) -> Pending:
        """Turn ``pending`` into a :class:`Pending` that any stream can wait for.

        On an accelerator it is work of the current stream: collectives on another one have been waited for (``_call``).
        """
        return pending if self.streams is None else self.streams.record()

    # -- other communication -----------------------------------------------------------------------------------------

    def store(self) -> Any:
        """Return the process group's store, or None after the group has been destroyed."""
        return self._builtin.store()

    def broadcast_now(self, tensor: torch.Tensor) -> None:
        """Overwrite ``tensor`` (any shape and dtype) with the values of the group's rank 0."""
        if self.world_size > 1 and tensor.numel():
            dense = tensor.detach().contiguous()
            self._builtin.broadcast(dense.view(-1).view(torch.uint8)).wait()  # no backend supports every dtype
            if dense.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(dense)

    def all_reduce_now(self, tensor: torch.Tensor, op: Literal["sum", "max"], question: str) -> None:
        """See :class:`RankGroup`."""
        try:
            self._issue(ALL_REDUCE, NUMBERS, Label(question), False, self._builtin.combine, tensor, op).wait()
        except Exception as e:
            self.fail(f"{ALL_REDUCE} for {question}", "", e)

    def fail(self, phase: str, unit: str, error: Exception) -> NoReturn:
        """Raise ``error`` as a :class:`CollectiveError` that names the collective and the unit.

        Raises:
            CollectiveError: chained to ``error``. An out-of-memory error is raised as it is.
        """
        if isinstance(error, CollectiveError | torch.OutOfMemoryError):
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: a cycle would keep variables of the caller alive
        if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            raise cannot_trace("torch.jit.trace", f"unit {unit or '<root>'!r}") from error
        text = str(error)  # the chained error has the full text
        text = text if len(text) <= 400 else f"{text[:400]}..."
        where = describe_place(self.progress.place) if self.progress is not None else ""
        cause = "; ".join([f"{type(error).__name__}: {text}", *getattr(error, "__notes__", ())]) + where
        raise CollectiveError(phase, unit, self.rank, self.world_size, cause) from error


def _out_of_step(runtime: Runtime, verb: str, label: Label, unended: Issued) -> OutOfStepError:
    """Return the error for a collective on a group where ``unended`` may still arrive."""
    text = (
        f"the {verb} of {label.unit or '<root>'!r} was not issued: ranks got out of step before on this process group, at "
        f"the {unended}{unended.when}, and messages of that collective may still arrive. Save what you need without "
        "collectives, fix the cause that the first error names, and restart all ranks"
    )
    return OutOfStepError(verb, label.unit, runtime.rank, runtime.world_size, text)


def _reconfigured(runtime: Runtime, verb: str, label: Label) -> ReconfiguredError:
    """Return the error for a collective on a group that got other ranks."""
    rank, size = runtime.peers.builtin.place_now()
    text = (
        f"the {verb} of unit {label.unit or '<root>'!r} was not issued: its process group was reconfigured. When the unit "
        f"was sharded, this was rank {runtime.rank} of {runtime.world_size}; now it is rank {rank} of {size}, and the shards "
        "of other ranks are gone. Make a new group of the ranks that are left (destroy_process_group, init_process_group), "
        "build the model anew, call fully_shard, and load a checkpoint: flatshard.load_checkpoint takes one of any number of "
        "ranks"
    )
    return ReconfiguredError(verb, label.unit, runtime.rank, runtime.world_size, text)


def on_any_rank(runtimes: Iterable[Runtime], flag: bool) -> bool:
    """Return whether ``flag`` is True on any rank of these process groups, by one all-reduce per group.

    All ranks go over the groups in the same order. The result of one group is the input to the next.
    """
    for runtime in sorted({r.number: r for r in runtimes}.values(), key=lambda r: r.number):
        if runtime.world_size > 1:
            found = torch.tensor([float(flag)], device=runtime.device)
            runtime.all_reduce_now(found, "max", "whether a rank has found an error")
            flag = bool(found.item())
    return flag
