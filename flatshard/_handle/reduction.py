"""The reduction of one flat parameter's gradients: from its input to this rank's gradient shard.

The input is a tensor of ``padded_numel`` elements, laid out as the unsharded buffer, with a view for each parameter's
gradient. It has memory from the time when a backward's gradients are complete to the end of their reduction.

The gradients are averaged over the ranks that the parameters are sharded over, and then over the replicas, in the reduce
dtype. The result is scaled, cast to the dtype of ``.grad`` and, under offload, copied to the CPU.

[Note: Accumulating within the shard group]
With replicas (hybrid sharding) the output of the reduce-scatter can be kept from one backward to the next
(``Reduction.partial``), so that only the last microbatch averages over the replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from flatshard._comm.capabilities import LendMemory
from flatshard._comm.collectives import Done, Pending
from flatshard._comm.pending import Chain, drain
from flatshard._comm.streams import holding, wait_on_host
from flatshard._handle.flat_shard import FlatShard
from flatshard._handle.layout import FlatLayout
from flatshard._handle.pool import FlatBuffer
from flatshard._handle.unused import Unused
from flatshard._runtime import Runtime

Partial = tuple[torch.Tensor, set[int]]
"""The output of earlier reductions, not averaged over the replicas yet; and the parameters that they did not use."""

_Views = tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]


def views_of(flat: torch.Tensor, layout: FlatLayout) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each parameter's view of ``flat``, in the parameter's shape and stride, and the padding between them."""
    views = [flat.as_strided(info.shape, info.stride, info.start) for info in layout.params]
    return views, [flat[start:stop] for start, stop in layout.gaps()]


class ReductionInput:
    """The input. Its memory is a buffer of the pool, lent by gloo's collectives, or buffers of its own: one for each dtype.

    If nothing is sharded, the memory is new each time: it is all-reduced in place and becomes the gradients.
    """

    def __init__(self, flat: FlatShard, dtype: torch.dtype) -> None:
        """``dtype``: the usual one."""
        self._of, self._layout, self._pool = flat, flat.layout, flat.ranks.pool
        self._buffer: FlatBuffer | None = None  # in use
        self._known: dict[FlatBuffer, _Views] = {}  # the buffers used so far, with their views
        self._make_buffer: Callable[[torch.Tensor], FlatBuffer] = FlatBuffer  # for memory of its own
        self._nothing: _Views = torch.empty(0, device=flat.kind.compute_device), [], []
        self.flat, self.views, self.gaps = self._nothing
        if self._pool is None and flat.is_trainable and not flat.is_whole:
            own = self._find_buffer(dtype)
            self._views(own)  # here, to save the time in the first step
            own.free()

    def allocate(self, dtype: torch.dtype, lend: LendMemory | None) -> None:
        """Allocate the memory, and zero the padding. ``lend``: of the collectives that reduce it."""
        new = self._new(dtype) if self._of.is_whole else None
        if new is None and self._pool is None and lend is not None:
            new = lend(self._layout.padded_numel, dtype, False)
        if new is not None:
            self.flat = new
            self.views, self.gaps = views_of(self.flat, self._layout)
        else:
            self._buffer = buffer = self._find_buffer(dtype)
            buffer.take(self)
            self.flat, self.views, self.gaps = self._known.get(buffer) or self._views(buffer)
        if self.gaps:
            torch._foreach_zero_(self.gaps)

    def _find_buffer(self, dtype: torch.dtype) -> FlatBuffer:
        if self._pool is not None:
            return self._pool.buffer_for_input(self._layout.padded_numel, dtype)
        for buffer in self._known:
            if buffer.flat.dtype is dtype:
                return buffer
        return self._make_buffer(self._new(dtype))

    def _new(self, dtype: torch.dtype) -> torch.Tensor:
        numel = self._layout.padded_numel
        if self._pool is not None:
            return self._pool.allocate(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self._of.kind.compute_device)

    def _views(self, buffer: FlatBuffer) -> _Views:
        flat = buffer.flat[: self._layout.padded_numel]
        self._known[buffer] = views = flat, *views_of(flat, self._layout)
        return views

    def use_buffers(self, make: Callable[[torch.Tensor], FlatBuffer]) -> None:
        """Have ``make`` make the buffers of its own. None of them is in use."""
        self._make_buffer = make
        if self._pool is None:
            self._known = {make(before.flat): views for before, views in self._known.items()}

    def free(self) -> None:
        """Free the memory. Idempotent."""
        self.flat, self.views, self.gaps = self._nothing
        if self._buffer is not None:
            self._buffer.free()
            self._buffer = None

    def leave(self) -> None:
        """Stop using the current memory without freeing it: collectives may use it as long as their group exists. A buffer
        of the pool stays in use, so nobody else gets it.
        """
        self.flat, self.views, self.gaps = self._nothing
        self._known.clear()
        self._buffer = None


class Reduction:
    """One reduction of one flat parameter's gradients: made when all have come, dropped when ``.grad`` has been set."""

    def __init__(
        self,
        flat: FlatShard,
        runtime: Runtime,
        input: torch.Tensor,
        dtypes: tuple[torch.dtype, torch.dtype],
        unused: Unused,
        partial: Partial | None,
    ) -> None:
        """Allocate the output, on the stream that will use it.

        Args:
            flat: whose gradients they are.
            runtime: for the ranks that it is sharded over.
            input: ``padded_numel`` elements.
            dtypes: of the sums, and of the result.
            unused: the parameters that this rank has no gradients for; at the end, those that no rank has any for.
            partial: what earlier reductions have left partial. At the end, what this one leaves.
        """
        self.flat = flat
        self._runtime = runtime
        self._input = input
        self._dtype = dtypes[1]
        self._unused = unused
        self.partial = partial
        self._pending: Pending | None = None  # from `start` on
        if self.flat.is_whole:  # reduced in place
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
            if flat.is_whole:
                self._pending = self._reduce_replicas()
            else:
                if unused.found:
                    unused.tell(runtime, flat.ranks.label)
                self._pending = runtime.reduce_scatter(self._output, self._input, flat.ranks.label)
                if flat.ranks.replicas is not None:
                    self._pending = runtime.then(self._pending, self._reduce_replicas)
            if flat.kind.is_offloaded:
                self._pending = runtime.then(self._pending, self._copy_to_host)
        except Exception as e:
            self._fail(e)

    def _fail(self, error: Exception) -> NoReturn:
        self._runtime.fail(self.flat.ranks.reduce_verb, self.flat.ranks.label.unit, error)

    def _reduce_replicas(self) -> Pending:
        """Average the output over the replicas, or hold it for the next backward to add to."""
        ranks, runtime = self.flat.ranks, self._runtime
        output, replicas, unused = self._output, ranks.replicas, self._unused
        assert output is not None
        if replicas is None:
            return runtime.issued(Done())
        if self._pending is not None:
            unused.ask(self._pending)
        earlier, self.partial = self.partial, None
        if earlier is not None:
            output.add_(earlier[0])
            unused.narrow(earlier[1])
        if ranks.averaging.reduces_replicas:
            # NO_SHARD: the replicas are the unit's own group, so use `runtime`, which may have a communication hook.
            replicas = runtime if runtime.group is replicas.group else replicas
            unused.tell(replicas, ranks.label)
            pending = replicas.all_reduce(output, ranks.label)
        else:
            self.partial, self._output = (output, unused.found), None
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
                self._fail(e)

    def wait(self) -> None:
        """Wait for its end. On an accelerator only the current stream waits. Idempotent.

        Raises:
            CollectiveError: the reduction failed.
        """
        if self._pending is None:
            return
        try:
            self._pending.wait()
            if self._unused.found:
                self._unused.ask(self._pending)
        except Exception as e:
            self._pending = None
            self._fail(e)

    def settle(self) -> bool:
        """Wait for its end and ignore its error. Returns whether it has ended, so that its memory can be freed."""
        pending, self._pending = self._pending, None
        return pending is None or drain([pending])

    def take(self) -> torch.Tensor | None:
        """After ``wait``: take the gradient shard, or None if it is partial. Under offload the host waits for it."""
        output, self._output = self._output, None
        pending, self._pending = self._pending, None  # it refers to this object
        if pending is not None and self.flat.kind.is_offloaded:
            wait_on_host(pending)
        if output is None:
            return None
        if (factor := self.flat.ranks.factor) is not None:
            output.mul_(factor)
        dtype = self._dtype
        return output if output.dtype is dtype else output.to(dtype)
