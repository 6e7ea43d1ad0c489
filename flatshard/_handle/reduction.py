"""The reduction of one flat parameter's gradients: from its input to this rank's gradient shard.

Gradients are averaged over the ranks that the parameters are sharded over, and then over the replicas, in the reduce dtype.
The result is scaled, cast to the dtype of ``.grad`` and, under offload, copied to the CPU.

[Note: Accumulating within the shard group]
With replicas (hybrid sharding) the output of the reduce-scatter can be kept from one backward to the next
(``Reduction.partial``), so that only the last microbatch averages over the replicas.

[Note: Naming unused parameters]
An unused parameter is marked in its elements: gradients.py, [Note: Negative zero marks an unused parameter]. A rank that
holds none of them cannot see the mark. In float16, the average of a small negative gradient can round to the mark. But all
ranks must agree whether ``.grad`` is None: optimizers keep state and count steps by it, and ``p.grad.norm()`` communicates.
The shard of such a rank has no room for a mark, and other ranks do not know that it needs one. So ranks write to the process
group's store. A rank that did not use such parameters appends their numbers to a list *before* it starts the reduction, and
reads the list after the reduction, which ends on no rank before all have started it. A parameter that all ranks have named,
no rank used. A rank that used all parameters does nothing, so this costs nothing if all ranks do. Otherwise a rank makes
three round trips to the store for each unit with an unused parameter.
A flat parameter without elements is not reduced, so ranks never meet: its parameters count as used on all of them.

With replicas this is done twice, before each of the two collectives: if no rank of a shard group used a parameter, they
name it among their replicas.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import NamedTuple

import torch

from flatshard._comm.collectives import ALL_REDUCE, REDUCE, Done, Pending
from flatshard._comm.progress import Chain, Label, drain
from flatshard._comm.runtime import Runtime
from flatshard._comm.streams import holding, wait_on_host
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.layout import FlatLayout


class Partial(NamedTuple):
    """The result of earlier reductions that are not averaged over the replicas yet."""

    output: torch.Tensor
    unused: set[int]  # parameters that none of them used


_SMALL_ENOUGH = 1e-30  # of a dtype's smallest normal number: no gradient of a real model is as small


class Unused:
    """Finds the parameters that no rank used, among those whose mark does not tell: ``named``.

    ``begin`` and ``publish`` come before the reduction, ``read_published`` after it. [Note: Naming unused parameters]
    """

    __slots__ = ("_layout", "_read", "_unread", "found", "named")

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self.named: set[int] = set()  # of the parameters that this rank did not use: ranks name them
        self.found: set[int] = set()  # Local to this rank until `read_published`. It decides about the store alone
        self._unread: tuple[Runtime, str] | None = None  # the runtime and key of a list that was not read yet
        self._read: dict[int, str] = {}  # the list that was read last, to be deleted, by the number of the runtime

    def begin(self, unused: Iterable[int], dtypes: Iterable[torch.dtype]) -> None:
        """Record that this rank has no gradient for the parameters ``unused``. ``dtypes``: of the sums and the gradients."""
        self._unread = None
        layout = self._layout
        loses_marks = any(torch.finfo(dtype).smallest_normal > _SMALL_ENOUGH for dtype in dtypes)
        self.named = {i for i in unused if loses_marks or len(layout.holders(i)) < layout.world_size}
        self.found = {*self.named} if layout.padded_numel else set()

    def keep_only(self, unused: set[int]) -> None:
        """Keep in ``found`` only the parameters that earlier reductions did not use either: ``unused``."""
        self.found &= unused

    def publish(self, runtime: Runtime, label: Label) -> None:
        """Name ``found`` to the other ranks, before the reduction. It must be the next collective of ``runtime``."""
        progress = runtime.progress
        if not self.found or progress is None:
            return
        key = f"flatshard/unused/{label.tag}/{progress.counts.get(label.tag + REDUCE, 0) + 1}"
        # With the rank: a store without an append of its own (a file's) drops bytes that it has already.
        runtime.store().append(key, f"{runtime.rank}:{sum(1 << index for index in self.found):x} ")
        self._unread = runtime, key

    def read_published(self, pending: Pending) -> None:
        """Keep in ``found`` only the parameters that no rank used, after the reduction.

        If there is a list to read, the host waits for ``pending``, the reduction.
        """
        if self._unread is None:
            return
        if not isinstance(pending, Chain):  # which has ended
            wait_on_host(pending)
        (runtime, key), store = self._unread, self._unread[0].store()
        named_by_each = [int(named.partition(b":")[2], 16) for named in store.get(key).split()]
        by_all = functools.reduce(operator.and_, named_by_each) if len(named_by_each) == runtime.world_size else 0
        # All ranks have started this reduction, so they have read the list of the one before.
        if (before := self._read.get(runtime.number)) is not None:
            store.delete_key(before)
        self._read[runtime.number] = key
        self.found, self._unread = {index for index in self.found if by_all >> index & 1}, None


class Reduction:
    """A reduction of one flat parameter's gradients: made when all have arrived, dropped when ``.grad`` is set."""

    _averaged_over: Runtime | None = None  # the replicas, when their all-reduce has been issued

    def __init__(
        self,
        flat: FlatParam,
        runtime: Runtime,
        input: torch.Tensor,
        dtypes: tuple[torch.dtype, torch.dtype],
        unused: Unused,
        partial: Partial | None,
    ) -> None:
        """Allocate the output, on the stream that will use it.

        Args:
            flat: the flat parameter.
            runtime: issues the collective over the ranks that it is sharded over.
            input: the gradients, ``padded_numel`` elements.
            dtypes: of the sums, and of the result.
            unused: the parameters without a gradient: of this rank, and in the end of any rank.
            partial: the output of earlier reductions, to add to this one's.
        """
        self.flat = flat
        self._runtime = runtime
        self._input = input
        self._dtype = dtypes[1]
        self._unused = unused
        self.partial = partial
        self._pending: Pending | None = None  # from `start` on
        if self.flat.holds_all:  # reduced in place
            self._output: torch.Tensor | None = input
        else:
            pool = self.flat.ranks.pool
            make = input.new_empty if pool is None else pool.allocate
            self._output = make(self.flat.layout.shard_numel, dtype=dtypes[0])

    def start(self) -> None:
        """Start averaging the input.

        Raises:
            CollectiveError: a collective could not be started.
        """
        assert self._output is not None
        flat, runtime, unused = self.flat, self._runtime, self._unused
        try:
            if flat.holds_all:
                self._pending = self._reduce_replicas()
            else:
                if unused.found:
                    unused.publish(runtime, flat.ranks.label)
                self._pending = runtime.reduce_scatter(self._output, self._input, flat.ranks.label)
                if flat.ranks.replicas is not None:
                    self._pending = runtime.then(self._pending, self._reduce_replicas)
            if flat.kind.is_offloaded:
                self._pending = runtime.then(self._pending, self._copy_to_host)
        except Exception as e:
            runtime, verb = self._issued
            runtime.fail(verb, self.flat.ranks.label.unit, e)

    @property
    def _issued(self) -> tuple[Runtime, str]:
        """The runtime and the name of the collective that was issued last."""
        replicas = self._averaged_over
        return (self._runtime, self.flat.ranks.reduce_verb) if replicas is None else (replicas, ALL_REDUCE)

    def _reduce_replicas(self) -> Pending:
        """Average the output over the replicas, or keep it for the next backward to add to."""
        ranks, runtime = self.flat.ranks, self._runtime
        output, replicas, unused = self._output, ranks.replicas, self._unused
        assert output is not None
        if replicas is None:
            return runtime.issued(Done())
        if self._pending is not None:
            unused.read_published(self._pending)
        earlier, self.partial = self.partial, None
        if earlier is not None:
            output.add_(earlier.output)
            unused.keep_only(earlier.unused)
        if ranks.averaging.reduces_replicas:
            # NO_SHARD: the replicas are the unit's own group, so use `runtime`, which may have a communication hook.
            replicas = runtime if runtime.group is replicas.group else replicas
            self._averaged_over = replicas
            unused.publish(replicas, ranks.label)
            pending = replicas.all_reduce(output, ranks.label)
        else:
            self.partial, self._output = Partial(output, unused.found), None
            pending = runtime.issued(Done())
        return holding(pending, earlier)

    def _copy_to_host(self) -> Pending:
        output, kind, pin = self._output, self.flat.kind, self.flat.options.pin_memory
        if output is None:
            return self._runtime.issued(Done())
        dtype = self._dtype
        host = torch.empty(output.shape, dtype=dtype, device=kind.device, pin_memory=pin)
        self._output = host.copy_(output.to(dtype), non_blocking=pin)
        return holding(self._runtime.issued(Done()), output)

    def advance(self) -> None:
        """Start the second part of a reduction that has two parts, while later units compute.

        Raises:
            CollectiveError: the first part failed.
        """
        if isinstance(self._pending, Chain):
            try:
                self._pending.advance()
            except Exception as e:
                runtime, verb = self._issued
                runtime.fail(verb, self.flat.ranks.label.unit, e)

    def wait(self) -> None:
        """Wait for the end. On an accelerator only the current stream waits. Idempotent.

        Raises:
            CollectiveError: the reduction failed.
        """
        if self._pending is None:
            return
        try:
            self._pending.wait()
            if self._unused.found:
                self._unused.read_published(self._pending)
            if not self.flat.kind.is_offloaded:  # otherwise `take_result` makes the host wait, too
                self._pending = None
        except Exception as e:
            self._pending = None
            runtime, verb = self._issued
            runtime.fail(verb, self.flat.ranks.label.unit, e)

    def abandon(self) -> bool:
        """Wait for the end, ignore an error, and return whether it has ended, so that its memory can be freed."""
        pending, self._pending = self._pending, None
        return pending is None or drain([pending])

    def take_result(self) -> torch.Tensor | None:
        """Return the gradient shard after ``wait``, or None if it is partial. Under offload the host waits for it."""
        output, self._output = self._output, None
        pending, self._pending = self._pending, None  # it refers to this object
        if pending is not None and self.flat.kind.is_offloaded:
            wait_on_host(pending)
        if output is None:
            return None
        ranks, averaging = self.flat.ranks, self.flat.ranks.averaging
        if averaging.divide_factor is not None or averaging.size != ranks.size:
            output.mul_(ranks.factor)
        dtype = self._dtype
        return output if output.dtype is dtype else output.to(dtype)
