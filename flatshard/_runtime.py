"""The small runtime: collectives per backend, streams and events or async works. The only file that communicates.

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
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.distributed as dist


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class Done:
    """A collective that had nothing to wait for."""

    __slots__ = ()

    def wait(self) -> None: ...


class Works:
    """Async works of a CPU backend, then what is left to compute from what they brought."""

    __slots__ = ("_then", "_works")

    def __init__(self, works: Sequence[Any], then: Callable[[], None] | None = None) -> None:
        self._works = works
        self._then = then

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._then is not None:
            self._then()


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


class Collectives(Protocol):
    """What a backend provides. All tensors are 1-D and contiguous; ``group`` has ``N`` ranks.

    ``all_gather``: ``output`` (N * S elements) already holds this rank's ``shard`` (S elements), which is its slice.
    ``reduce_scatter``: ``output`` (S elements) becomes this rank's part of the average of every rank's ``input`` (N * S).
    ``all_reduce``: ``tensor`` becomes the average. ``broadcast``: ``tensor`` becomes that of the group's rank 0.
    """

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending: ...

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending: ...

    def all_reduce(self, tensor: torch.Tensor) -> Pending: ...

    def broadcast(self, tensor: torch.Tensor) -> Pending: ...


_DESTROYED = "the process group that this module was sharded over has been destroyed"


class _GroupCollectives:
    """The process group, held weakly: ``destroy_process_group`` must really end it.

    A sharded model lies in reference cycles, so it may outlive that call; gloo's threads, kept alive by it, would meet
    the interpreter's end and abort the process.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.rank, self.size = group.rank(), group.size()

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError(_DESTROYED)
        return group


class GlooCollectives(_GroupCollectives):
    """Point-to-point in place of gloo's built-in all-gather and reduce-scatter.

    Those copy the whole output once more, and do an all-reduce on a clone of the input. Measured on 2 CPU cores at 32 MB:
    the all-gather below takes 0.2-0.5 of the built-in's time, the reduce-scatter 0.4-0.5. Sends and receives between
    two ranks match in the order of issue, so any number may be under way. Gathers and reductions have a tag each: ranks
    that take different paths through a unit complete it at different times, so only each kind has one order on all ranks.
    """

    GATHER, REDUCE = 0, 1

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        group, rows = self.group, output.view(self.size, -1)
        works = []
        for step in range(1, self.size):
            source = (self.rank - step) % self.size
            works.append(group.recv([rows[source]], source, self.GATHER))
        for step in range(1, self.size):
            works.append(group.send([rows[self.rank]], (self.rank + step) % self.size, self.GATHER))
        return Works(works)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        output, input = _as_real(output).view(-1), _as_real(input).view(-1)
        group, rows = self.group, input.view(self.size, -1)
        # Row k holds what rank k sends, so the sum below runs in rank order whatever arrives first.
        others = torch.empty(self.size - 1, output.numel(), dtype=input.dtype, device=input.device)
        received = [others[peer - (peer > self.rank)] if peer != self.rank else rows[peer] for peer in range(self.size)]
        works = []
        for step in range(1, self.size):
            source = (self.rank - step) % self.size
            works.append(group.recv([received[source]], source, self.REDUCE))
        for step in range(1, self.size):
            dest = (self.rank + step) % self.size
            works.append(group.send([rows[dest]], dest, self.REDUCE))

        def average() -> None:
            torch.add(received[0], received[1], out=output)
            for part in received[2:]:
                output.add_(part)
            output.div_(self.size)

        return Works(works, average)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        tensor = _as_real(tensor)

        def average() -> None:
            tensor.div_(self.size)

        return Works([self.group.allreduce([tensor])], average)

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        return Works([self.group.broadcast(_as_real(tensor), 0)])


class FakeCollectives(_GroupCollectives):
    """The fake process group: every rank has this rank's values.

    The fake group's own all-gather fills the output in one call per rank: host time that no real backend spends, 2 ms
    at 4,096 ranks. The same result comes here from a single operation, and one call into the group keeps its dispatch cost.
    """

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        numel, before, after = shard.numel(), self.rank, self.size - self.rank - 1  # `shard` is the row between them
        if before:
            output.as_strided((before, numel), (numel, 1), 0).copy_(shard)
        if after:
            output.as_strided((after, numel), (numel, 1), (before + 1) * numel).copy_(shard)
        return self.group.broadcast(output, 0)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        numel = output.numel()
        output.copy_(input[self.rank * numel : (self.rank + 1) * numel])
        return self.group.broadcast(output, 0)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self.group.broadcast(tensor, 0)

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        return self.group.broadcast(tensor, 0)


class DefaultCollectives(_GroupCollectives):
    """The backend's own collectives, on the current stream (NCCL and other accelerator backends)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        # torch 2.13 renamed these; 2.11 has the old names only.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        self._all_gather(output, shard, group=self.group)
        return Done()

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        self._reduce_scatter(output, input, op=dist.ReduceOp.AVG, group=self.group)
        return Done()

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=self.group)
        return Done()

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        dist.broadcast(tensor, group_src=0, group=self.group)
        return Done()


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """For gloo, which knows no complex numbers, and for arithmetic that keeps -0.0: complex arithmetic does not."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _collectives_for(group: dist.ProcessGroup, device: torch.device) -> Collectives:
    backend = dist.get_backend(group)
    if backend == "fake":
        return FakeCollectives(group)
    if device.type == "cpu" and "gloo" in str(dist.get_backend_config(group)):
        return GlooCollectives(group)
    return DefaultCollectives(group)


class _Streams:
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
    """The collectives of one process group on one device, with their streams. One per group and device: see ``of``."""

    # By id of the group; another group may have the id after that one's end.
    _instances: ClassVar[weakref.WeakValueDictionary[tuple[int, torch.device], Runtime]] = weakref.WeakValueDictionary()

    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = weakref.ref(group)
        self.number = next(
            self._numbers
        )  # orders groups alike on all ranks, as they are first sharded over in one order
        self.device = device
        self.rank, self.world_size = group.rank(), group.size()
        self.collectives = _collectives_for(group, device)
        self._is_fake = dist.get_backend(group) == "fake"
        self._streams = None if device.type == "cpu" else _Streams(torch.get_device_module(device))

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> Runtime:
        """The runtime of ``group`` on ``device``: units share it, so that they share streams."""
        found = cls._instances.get((id(group), device))
        if found is None or found._group() is not group:
            found = cls._instances[id(group), device] = cls(group, device)
        return found

    # -- where collectives run ---------------------------------------------------------------------------------------

    def gathering(self) -> AbstractContextManager[None] | None:
        """Allocate the unsharded buffer and issue the all-gather inside. None: anywhere."""
        return None if self._streams is None else self._streams.on_gather()

    def reducing(self) -> AbstractContextManager[None] | None:
        """Allocate the gradient shard and issue the reduction inside. None: anywhere."""
        return None if self._streams is None else self._streams.on_reduce()

    def before_pass(self) -> None:
        """What the current stream did to the shards (the optimizer's step) comes before gathers from here on."""
        if self._streams is not None:
            self._streams.gather.wait_stream(self._streams.device.current_stream())

    def before_free(self) -> None:
        """The current stream is done with a unit: its memory may be used again after what has been issued so far."""
        if self._streams is not None:
            self._streams.freed = self._streams.device.current_stream().record_event()

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        return self.issued(self.collectives.all_gather(output, shard))

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        return self.issued(self.collectives.reduce_scatter(output, input))

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self.issued(self.collectives.all_reduce(tensor))

    def broadcast_now(self, tensor: torch.Tensor) -> None:
        """Make ``tensor`` (any shape and dtype) that of the group's rank 0."""
        if self.world_size > 1 and tensor.numel():
            dense = tensor.detach().contiguous()
            self.collectives.broadcast(dense.view(-1).view(torch.uint8)).wait()  # bytes: no backend knows every dtype
            if dense.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(dense)

    def all_reduce_now(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> None:
        """Make ``tensor`` (a few numbers, dense) the sum or the maximum over the ranks, on the current stream."""
        group = self._group()
        if group is None:
            raise RuntimeError(_DESTROYED)
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=group)
        if op == "sum" and self._is_fake:  # where every rank has this rank's values
            tensor.mul_(self.world_size)

    def then(self, pending: Pending, next_one: Callable[[], Pending]) -> Pending:
        """``next_one`` after ``pending``: at once behind it on the stream, or when somebody waits for it (CPU)."""
        if self._streams is None:
            return Then(pending, next_one)
        pending.wait()
        return next_one()

    def issued(self, pending: Pending) -> Pending:
        """``pending`` as something that any stream can wait for."""
        if self._streams is None:
            return pending
        pending.wait()  # orders the side stream (the current one here) behind a backend's own streams
        return StreamEvent(self._streams.device, self._streams.device.current_stream().record_event())
