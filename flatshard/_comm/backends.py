"""The collectives of each backend: gloo, and others such as NCCL.

In the core, this file alone communicates by ``torch.distributed`` in a step. (``construct/groups.py`` makes process groups.)

[Note: Methods of the process group]
``torch.distributed``'s functions take twice the host's time of the process group's methods that they call: 4 to 5
microseconds, not 2 to 3. So a step calls the methods, and they do the same on our tensors. In torch 2.11, 2.13, 2.14 and
2.15, a function also

- makes options with ``asyncOp=False``, and waits for the work unless there is none: so do we. With NCCL the collective
  then runs on the current stream, and the host does not wait;
- sends complex numbers as pairs of real ones, and broadcasts float8 as bytes: so do we;
- passes tensor subclasses with ``__torch_function__`` to these, checks that it was given tensors, and returns on ranks that
  are not in the group: our tensors are plain, and our groups contain this rank;
- only records the call, inside its private coalescing context;
- describes an error to a debug logger of torch's own before it raises it.

Operators of ``c10d``, which profilers and dispatch modes see, names in NCCL's flight recorder and errors of a backend come
from the methods. Exception: :meth:`DefaultCollectives.exchange` calls torch's function for a batch of messages, which knows
the backends that want them as one operation.

[Note: Order of collectives]
Collectives of one communicator match by order, so all ranks must issue them in the same order. Ranks that use different
parameters of a unit complete its gradients at different times. So all ranks have the same order of gathers, and the same
order of reductions, but gathers and reductions may interleave differently. Over gloo each kind of collective has its own
tag for each unit, which suffices. Over NCCL both kinds share the group's communicator, unless :class:`DefaultCollectives`
gets a second group for reductions. flatshard does not make one by default:

- NCCL's manual warns of a deadlock if operations of two communicators are launched in different orders on different ranks
  ("Using multiple NCCL communicators concurrently"): their kernels may not fit on the GPU at the same time.
- ``new_group`` is collective over all ranks of the world, not only over the group's. With ``use_local_synchronization``
  it names the group by a count that each process keeps. Ranks whose other groups differ disagree about it, and hang.
  If the world is eagerly initialised, it splits the world's communicator, and NCCL waits for every rank. Since torch
  2.15 each "nccl" (``ProcessGroupNCCL2``) is eagerly initialised, with or without ``device_id``.
- A communicator costs GPU memory.

[Note: Averages of the backend]
NCCL's AVG multiplies by 1/N before it adds. That is exact if N is a power of two. For other N the collective computes a
sum, and only the result is divided. Exception: in float16 AVG is used for every N, because the sum of N gradients may
overflow where their average does not.

[Note: What ends a wait]
When a rank dies, gloo closes its connections, and pending waits end with an error. Exception: gloo forgets waits for
messages that are partially received or sent. They end at the timeout (``signalException`` in gloo's ``tcp/pair.cc``). So
large messages are sent in two, and of the messages from one rank the last is waited for first: it begins when the others
are over. An exchange also ends with an empty message, which the receiver requests when all else has arrived. The sender
waits for this request before it waits for its sends. Gathers and reductions have none, as ranks may wait for them in
different orders. There, every rank sends as much as it receives, and waits for received messages first.
"""

from __future__ import annotations

import functools
import operator
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from flatshard._base import environment, torch_versions
from flatshard._comm.collectives import (
    EXCHANGE,
    GATHER,
    REDUCE,
    Addressed,
    Collectives,
    Done,
    EnsureMemory,
    Pending,
    as_real,
    gathers_late,
)
from flatshard._comm.process_groups import alive, has_gloo, interrupt, may_change, timeout_of
from flatshard._comm.progress import RESERVED, Label, Works, here, mixed_all_reduce
from flatshard._comm.shared_memory.handshake import Meeting
from flatshard._comm.shared_memory.payloads import Combine, Receive, SharedMemory

_PIECE = 2**17  # elements that a thread adds at a time
_LARGE = 2**16  # bytes of a message that is sent in two
_LAST = 64  # elements of the second of them
_FOREVER = timedelta(days=365)  # to the thread of a handshake: shared_memory, [Note: The handshake]


def _options(made: Any, op: Any = None, is_async: bool = False) -> Any:
    """Return the options ``made``, after they were set."""
    made.asyncOp = is_async
    if op is not None:
        made.reduceOp = op
    return made


# Options of collectives on the current stream, made once, as nobody changes them. [Note: Methods of the process group]
_GATHERING = _options(AllgatherOptions())
_EXCHANGING = _options(dist.AllToAllOptions())
_BROADCASTING = _options(dist.BroadcastOptions())  # from rank 0
_AVERAGING = {False: dist.ReduceOp.SUM, True: dist.ReduceOp.AVG}  # by whether the backend computes averages
_SCATTERING = {averages: _options(dist.ReduceScatterOptions(), op) for averages, op in _AVERAGING.items()}
_REDUCING = {averages: _options(dist.AllreduceOptions(), op) for averages, op in _AVERAGING.items()}
_COMBINED = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_COMBINING = {name: _options(dist.AllreduceOptions(), op) for name, op in _COMBINED.items()}
_COMBINING_LATER = {name: _options(dist.AllreduceOptions(), op, is_async=True) for name, op in _COMBINED.items()}

_memories: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedMemory] = weakref.WeakKeyDictionary()
"""The shared memory of gloo groups. It lives as long as the group."""


class BuiltinCollectives(Collectives):
    """The collectives that flatshard uses by default, with more operations: broadcast, all-to-all, point-to-point.

    The process group is held weakly, so that ``destroy_process_group`` really ends it. A sharded model is part of reference
    cycles and may outlive that call. If it kept the group's gloo threads alive until the interpreter exits, they would
    abort the process.

    Example::

        collectives = flatshard.comm.builtin_collectives(dist.group.WORLD, torch.device("cpu"))
        numbers = torch.full((2,), float(collectives.rank))
        collectives.broadcast(numbers).wait()  # 0, 0 on all ranks
    """

    exact = True
    # See ``Capabilities``.
    out_of_place = False
    widens = False
    compared: tuple[int, ...] = (GATHER, REDUCE)

    imitates = False
    """Whether the other ranks are simulated: there is nobody to wait for, or to differ from."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.rank, self.size = group.rank(), group.size()

        self.may_change = may_change(group)

    def place_now(self) -> tuple[int, int]:
        """Return this process's current rank in the group, and the group's current size."""
        group = self.group
        return group.rank(), group.size()

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group() or alive(self._group)

    def store(self) -> Any:
        """Return the process group's store, or None if the group has been destroyed."""
        group = self._group()
        return None if group is None else group.get_group_store()

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, label: Label | None = None) -> Pending:
        """See :class:`Collectives`.

        ``label`` is the unit's, in reductions, too. Without it see progress.py, [Note: Labels of a user's collectives].
        """
        raise NotImplementedError

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        """Send the ``k``-th of N equal parts of ``input`` to rank ``k``, and receive the ``k``-th part of ``output`` from it.

        In the order of collectives it counts as a reduction.
        """
        raise NotImplementedError

    def exchange(self, sent: Addressed, received: Addressed, label: Label | None = None) -> Pending:
        """Send each tensor of ``sent`` to its rank, and fill each tensor of ``received`` from its rank, all concurrently.

        Messages between two ranks match in the order in which each of them lists its tensors. Tensors are 1-D, contiguous.
        """
        raise NotImplementedError

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        """Overwrite ``tensor`` with the values of the group's rank 0."""
        raise NotImplementedError

    def release_unused(self) -> None:
        """Return memory that is not in use. Called at the end of a pass and of a backward."""

    def combine(self, numbers: torch.Tensor, op: Literal["sum", "max"]) -> Pending:
        """Replace ``numbers`` by their sum or maximum over the ranks, on the current stream."""
        return _finish(self.group.allreduce([numbers], _COMBINING[op]))


def _finish(work: dist.Work | None) -> Pending:
    """Wait for ``work`` as torch's functions do. On an accelerator this makes the current stream wait."""
    if work is not None:
        work.wait()
    return Done()


def _average(output: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Write the average of ``parts``, one from each rank, to ``output``.

    Sums are in rank order, those of 16-bit numbers in float32. They are computed piece by piece, so that a sum stays in the
    processor's caches until it is complete.
    """
    numel = _PIECE * torch.get_num_threads() if output.device.type == "cpu" else max(output.numel(), 1)
    size = len(parts)
    is_power = size & (size - 1) == 0  # then the product is the quotient, bit for bit, and takes less time
    scale = operator.methodcaller("mul_", 1 / size) if is_power else operator.methodcaller("div_", size)
    for start in range(0, output.numel(), numel):
        piece, first, *others = (each[start : start + numel] for each in (output, *parts))
        narrow = output.dtype.itemsize < 4
        if narrow:
            total = first.float()
        elif first.dtype is output.dtype:
            total = torch.add(first, others.pop(0), out=piece)
        else:
            total = piece.copy_(first)
        for part in others:
            total.add_(part)
        scale(total)
        if narrow:
            piece.copy_(total)


def _in_two(messages: Addressed) -> Addressed:
    """Split each large message in two. [Note: What ends a wait]"""
    return [
        (part, rank)
        for tensor, rank in messages
        for part in ((tensor[:-_LAST], tensor[-_LAST:]) if tensor.nbytes >= _LARGE else (tensor,))
    ]


class GlooCollectives(BuiltinCollectives):
    """Collectives of gloo, on CPU. All-gather and reduce-scatter are point-to-point messages, not gloo's own collectives.

    Gloo's own all-gather copies the whole output once more; its reduce-scatter does an all-reduce on a clone of the input.
    Measured on 2 CPU cores at 32 MB: this all-gather takes 0.2-0.5 of the built-in's time, the reduce-scatter 0.4-0.5.
    Sends and receives between two ranks match in the order of issue, so any number may be in flight. Each kind of
    collective and each unit has a tag, so data of different units never mix.

    Ranks of one host read payloads in each other's memory. The bits are the same. ``FLATSHARD_SHARED_MEMORY=0`` sends
    everything by gloo.

    Example::

        def collectives(group, device):
            return flatshard.comm.GlooCollectives(group)

        flatshard.fully_shard(model, policy={Block}, collectives=collectives)

    Args:
        group: the ranks to communicate among. It is held weakly.
    """

    out_of_place = widens = True

    @gathers_late
    def all_gather(
        self,
        output: torch.Tensor,
        shard: torch.Tensor,
        label: Label | None = None,
        ensure_output: EnsureMemory | None = None,
    ) -> Pending:
        """See :class:`Collectives`, and ``gathers_late``."""
        if ensure_output is not None:
            if (sent := self._lend_memory(shard.numel(), output.dtype, to_all=True)) is not None:
                return self._gather_late(output, sent.copy_(shard), label, ensure_output)
            ensure_output()
        rows = output.view(self.size, -1).unbind()
        if rows[self.rank].data_ptr() != shard.data_ptr():
            rows[self.rank].copy_(shard)  # and sent from there: the shard may change before the send has ended
        return self._exchange([rows[self.rank]] * self.size, rows.__getitem__, label, GATHER)

    def _gather_late(
        self, output: torch.Tensor, sent: torch.Tensor, label: Label | None, ensure_output: EnsureMemory
    ) -> Pending:
        """Gather ``sent``, which lies in lent memory. The wait allocates and fills ``output``; messages need it earlier."""

        def receive(rank: int) -> torch.Tensor:
            ensure_output()
            return output.view(self.size, -1)[rank]

        def place(parts: Sequence[torch.Tensor]) -> None:
            for rank, part in enumerate(parts):
                receive(rank).copy_(part)

        return self._exchange([sent] * self.size, receive, label, GATHER, place)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, label: Label | None = None) -> Pending:
        """See :class:`Collectives`. 16-bit inputs are summed in float32."""
        if output.is_complex():
            output, input = as_real(output), as_real(input)
        rows = input.view(self.size, -1).unbind()

        def receive(rank: int) -> torch.Tensor:
            return torch.empty(output.numel(), dtype=input.dtype, device=input.device)

        # The sum is in rank order, whichever message arrives first.
        return self._exchange(rows, receive, label, REDUCE, functools.partial(_average, output))

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        received, sent = output.view(self.size, -1).unbind(), input.view(self.size, -1).unbind()
        received[self.rank].copy_(sent[self.rank])
        return self._exchange(sent, received.__getitem__, None, REDUCE)

    def _exchange(
        self,
        sent: Sequence[torch.Tensor],
        receive: Receive,
        label: Label | None,
        kind: int,
        combine: Combine | None = None,
    ) -> Pending:
        """Send ``sent[k]`` to each other rank ``k``, and receive their payloads, all of one size.

        Args:
            sent: by rank.
            receive: returns memory for the payload of a rank.
            label: of the unit.
            kind: of the collective.
            combine: called with the payloads of all ranks, which may lie in other memory. If None, they are written to the
                memory of ``receive``.
        """
        tag = (label or here.label).tag + kind
        is_shared = tag < RESERVED and self.size > 1
        if is_shared and 0 < environment.SHARED_MEMORY <= sent[0].nbytes:
            return self._share_memory().exchange(self.messages, sent, receive, tag, combine)
        by_messages = functools.partial(self._exchange_messages, sent, receive, tag, combine)
        if not is_shared:
            return by_messages()
        memory = self._find_memory()
        return by_messages() if memory is None else memory.handshake.after(by_messages)

    def _exchange_messages(
        self, sent: Sequence[torch.Tensor], receive: Receive, tag: int, combine: Combine | None
    ) -> Pending:
        """Exchange payloads with any ``tag``, by a message to each rank and one from each."""
        sources = [(self.rank - step) % self.size for step in range(1, self.size)]
        parts = [sent[self.rank] if rank == self.rank else receive(rank) for rank in range(self.size)]
        to, from_ = [(sent[k], k) for k in reversed(sources)], [(parts[k], k) for k in sources]
        return self.messages(to, from_, tag, None if combine is None else functools.partial(combine, parts))

    def exchange(self, sent: Addressed, received: Addressed, label: Label | None = None) -> Pending:
        """See :class:`BuiltinCollectives`. It ends when all sent messages have arrived.

        So all ranks must wait for their exchanges in the same order.
        """
        as_bytes = [[(tensor.view(torch.uint8), rank) for tensor, rank in messages] for messages in (sent, received)]
        tag, nothing = (label or here.label).tag + EXCHANGE, torch.empty(0, dtype=torch.uint8, device="cpu")
        last = Works([])

        def ask() -> None:
            last.add([self.group.recv([nothing], rank, tag) for rank in dict.fromkeys(rank for _, rank in received)])

        receiving, sending = self.messages([], as_bytes[1], tag, ask), self.messages(as_bytes[0], [], tag)
        asked = self.messages([(nothing, rank) for rank in dict.fromkeys(rank for _, rank in sent)], [], tag)
        return Works([receiving, last, asked, sending])

    def messages(
        self,
        sent: Addressed,
        received: Addressed,
        tag: int,
        then: Callable[[], object] | None = None,
        timeout: timedelta | None = None,
    ) -> Pending:
        """Exchange tensors with any ``tag``, and run ``then``. ``timeout`` replaces the group's.

        It ends when this rank has received all of its messages, and the system has taken those that it sends.
        """
        group, sent, received = self.group, _in_two(sent), _in_two(received)
        messages = [*received[::-1], *sent]  # in the order of waits: [Note: What ends a wait]

        def describe(index: int) -> str:
            verb = "receiving from" if index < len(received) else "sending to"
            return f"while {verb} rank {messages[index][1]} of the group"

        works: list[dist.Work] = []
        try:
            for tensor, rank in received:
                works.append(group.recv([tensor], rank, tag))
            works.reverse()
            for tensor, rank in sent:
                works.append(group.send([tensor], rank, tag))
        except RuntimeError as e:  # the connection is closed
            issued = len(works)
            e.add_note(describe(issued if issued >= len(received) else len(received) - 1 - issued))
            raise

        return Works(works, then, describe, timeout)

    def all_reduce(self, tensor: torch.Tensor, label: Label | None = None) -> Pending:
        tensor, tag = as_real(tensor), (label or here.label).tag
        # The maxima over the ranks are the largest tag, and minus the smallest.
        tags = torch.tensor([tag, -tag], device="cpu")

        def average() -> None:
            largest, smallest = tags.tolist()
            if largest != -smallest:
                raise mixed_all_reduce(tag, (-smallest, largest), self.rank, self.size)
            tensor.div_(self.size)

        group = self.group
        return Works([group.allreduce([tensor]), group.allreduce([tags], _COMBINING_LATER["max"])], average)

    def combine(self, numbers: torch.Tensor, op: Literal["sum", "max"]) -> Pending:
        return Works([self.group.allreduce([numbers], _COMBINING_LATER[op])])

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        return Works([self.group.broadcast(as_real(tensor), 0)])

    # -- memory of one host ------------------------------------------------------------------------------------------

    def _find_memory(self) -> SharedMemory | None:
        """Return the ranks' shared memory, or None if they have not begun to share any."""
        found = _memories.get(self.group)
        # The group may have been given other ranks.
        return None if found is None or (found.rank, found.size) != (self.rank, self.size) else found

    def _share_memory(self) -> SharedMemory:
        """Return the ranks' shared memory. The first call for a group begins to share it."""
        found = self._find_memory()
        if found is None:
            _let_go_in_forks()
            send, timeout = (
                functools.partial(self.messages, timeout=_FOREVER),
                timeout_of(self.group, torch.device("cpu")),
            )
            meeting = Meeting(send, lambda: interrupt(self.group), timeout)
            found = _memories[self.group] = SharedMemory(self.rank, self.size, meeting)
        return found

    def _lend_memory(self, numel: int, dtype: torch.dtype, to_all: bool) -> torch.Tensor | None:
        """Lend memory for the input of a collective, which ranks read where it lies, or return None if there is none.

        Nobody writes there after the collective was issued. The memory is in use as long as a tensor lies in it.
        ``to_all``: each rank reads all of it, not its own shard.
        """
        is_large = 0 < environment.SHARED_MEMORY * (1 if to_all else self.size) <= numel * dtype.itemsize
        memory = self._find_memory() if is_large else None
        return None if memory is None else memory.lend(numel, dtype)

    def release_unused(self) -> None:
        if (memory := self._find_memory()) is not None:
            memory.release_unused()


@functools.cache
def _let_go_in_forks() -> None:
    """Have a process that is forked from this one close its copies of all segments."""
    os.register_at_fork(after_in_child=_memories.clear)


class DefaultCollectives(BuiltinCollectives):
    """Collectives of the backend itself, on the current stream (NCCL and other accelerator backends).

    Averages are exact where the number of ranks N is a power of two. For other N the collective computes a sum, and only the
    result is divided; in float16 each gradient is multiplied by 1/N first, because the sum may overflow.

    Example::

        def collectives(group, device):
            return flatshard.comm.DefaultCollectives(group, widens=True)

        flatshard.fully_shard(model, policy={Block}, collectives=collectives)

    Args:
        group: the ranks to communicate among.
        widens: send gradients in the dtype that they were computed in, and add them in ``reduce_dtype``, if that is wider.
            An all-to-all and a local sum in rank order replace the reduce-scatter. With bfloat16 gradients reduced in
            float32 this sends half of the bytes, and the sums are those of float32 gradients. It needs memory for one
            more input.
        reduce_group: a second group of the same ranks in the same order, with a communicator of its own, for reductions.
            With it, ranks may use different parameters of a unit over NCCL, too. But NCCL's manual warns of a deadlock if
            operations of two communicators are launched in different orders on different ranks, and each communicator costs
            GPU memory. All ranks of the world create it by ``torch.distributed.new_group()``. It is held weakly and ends
            with ``destroy_process_group``.

    Raises:
        ValueError: the two groups are the same group, or do not have the same ranks in the same order.
    """

    out_of_place = True

    def __init__(
        self, group: dist.ProcessGroup, reduce_group: dist.ProcessGroup | None = None, *, widens: bool = False
    ) -> None:
        super().__init__(group)
        self.widens = widens
        if reduce_group is not None:
            ranks, others = dist.get_process_group_ranks(group), dist.get_process_group_ranks(reduce_group)
            if reduce_group is group or ranks != others:
                raise ValueError(
                    f"reduce_group must be a second group of the ranks {ranks}, got "
                    f"{'the same group' if reduce_group is group else f'one of the ranks {others}'}: make it by "
                    "torch.distributed.new_group(ranks) on every rank of the world"
                )
            self.compared = (GATHER,)  # a reduction may come before a gather on one rank and after it on another
        self._reduce_group = weakref.ref(group if reduce_group is None else reduce_group)

    @property
    def reduce_group(self) -> dist.ProcessGroup:
        return self._reduce_group() or alive(self._reduce_group)

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, label: Label | None = None) -> Pending:
        if output.is_complex():
            output, shard = as_real(output), as_real(shard)
        return _finish(getattr(self.group, torch_versions.ALL_GATHER)(output, shard, _GATHERING))

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, label: Label | None = None) -> Pending:
        if output.is_complex():
            output, input = as_real(output), as_real(input)
        if input.dtype is not output.dtype:
            received = torch.empty_like(input)
            self.all_to_all(received, input)
            _average(output, received.view(self.size, -1).unbind())
            return Done()
        averages = self._averages(output.dtype)
        work = getattr(self.reduce_group, torch_versions.REDUCE_SCATTER)(output, input, _SCATTERING[averages])
        return self._finish_average(work, output, averages)

    def all_reduce(self, tensor: torch.Tensor, label: Label | None = None) -> Pending:
        tensor = as_real(tensor)
        averages = self._averages(tensor.dtype)
        return self._finish_average(self.reduce_group.allreduce([tensor], _REDUCING[averages]), tensor, averages)

    def _averages(self, dtype: torch.dtype) -> bool:
        """Return whether the backend computes averages, not sums. [Note: Averages of the backend]"""
        return self.size & (self.size - 1) == 0 or dtype is torch.float16

    def _finish_average(self, work: dist.Work | None, result: torch.Tensor, averages: bool) -> Pending:
        """Wait for ``work``, which writes the average to ``result``, or the sum unless it ``averages``."""
        done = _finish(work)
        if not averages:
            result.div_(self.size)
        return done

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        output, input = as_real(output), as_real(input)
        return _finish(getattr(self.reduce_group, torch_versions.ALL_TO_ALL)(output, input, [], [], _EXCHANGING))

    def exchange(self, sent: Addressed, received: Addressed, label: Label | None = None) -> Pending:
        group, ranks = self.group, dist.get_process_group_ranks(self.group)
        both = ((dist.irecv, received), (dist.isend, sent))
        messages = [dist.P2POp(op, t.view(torch.uint8), ranks[r], group) for op, tensors in both for t, r in tensors]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()  # makes the current stream wait
        return Done()

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        # Not every NCCL, and not every GPU, supports float8.
        as_sent = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else as_real(tensor)
        return _finish(self.group.broadcast([as_sent], _BROADCASTING))


by_backend: dict[str, Callable[[dist.ProcessGroup, torch.device], BuiltinCollectives]] = {}
"""Functions that make the collectives of backends that this file does not know, by name."""


def builtin_collectives(group: dist.ProcessGroup, device: torch.device) -> BuiltinCollectives:
    """Return the collectives that flatshard uses over ``group`` by default: a base for your own to wrap.

    Besides the methods of :class:`Collectives` they have ``all_to_all(output, input)``, which sends part ``k`` of ``input``
    to rank ``k``, and the attributes ``rank`` and ``size``. A class that wraps them may also set ``out_of_place`` (its
    ``all_gather`` takes a shard outside of ``output``, and copies it there) and ``widens`` (its ``reduce_scatter`` takes an
    input of a narrower dtype than the output's, and adds in the output's). A class without these is called as
    :class:`Collectives` says.

    Example::

        collectives = flatshard.comm.builtin_collectives(dist.group.WORLD, torch.device("cpu"))
        output = torch.empty(3 * collectives.size)
        shard = output.view(-1, 3)[collectives.rank].fill_(collectives.rank)
        collectives.all_gather(output, shard).wait()  # 0, 0, 0, 1, 1, 1, ...

    Args:
        group: the ranks to communicate among. It is held weakly.
        device: where the tensors are.
    """
    if (make := by_backend.get(dist.get_backend(group))) is not None:
        return make(group, device)
    if device.type == "cpu" and has_gloo(group):
        return GlooCollectives(group)
    return DefaultCollectives(group)
