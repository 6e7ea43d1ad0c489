"""The reduction of one flat parameter's gradients: from the filled input to this rank's gradient shard.

The gradients are averaged over the ranks that the parameters are sharded over, and then over the replicas, in the reduce
dtype. The result is scaled, cast to the dtype of ``.grad`` and, under offload, copied to the CPU.

[Note: Accumulating within the shard group]
With replicas (hybrid sharding) the output of the reduce-scatter can be held from one backward to the next
(``FlatGradients.partial``), so that only the last microbatch averages over the replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from flatshard._comm.collectives import Done, Pending, settle
from flatshard._runtime import Then, holding, wait_on_host

if TYPE_CHECKING:
    from flatshard._handle.gradients import FlatGradients


class Reduction:
    """One reduction of one flat parameter's gradients: made when all have come, dropped when ``.grad`` has been set."""

    def __init__(self, gradients: FlatGradients, input: torch.Tensor) -> None:
        """Allocate the output, on the stream that will use it. ``input``: ``padded_numel`` elements."""
        self._of = gradients
        self.flat = gradients.flat
        self._runtime = gradients.runtime
        self._input = input
        self._pending: Pending | None = None  # from `start` on
        if self.flat.is_whole:  # reduced in place
            self._output: torch.Tensor | None = input
        else:
            pool = self.flat.placement.pool
            make = input.new_empty if pool is None else pool.allocate
            self._output = make(self.flat.layout.shard_numel, dtype=gradients.reduce_dtype)

    def start(self) -> None:
        """Start averaging the input.

        Raises:
            CollectiveError: a collective could not be started.
        """
        assert self._output is not None
        flat, runtime, unused = self.flat, self._runtime, self._of.unused
        try:
            if flat.is_whole:
                self._pending = self._reduce_replicas()
            else:
                unused.tell(runtime, flat.placement.label)
                self._pending = runtime.reduce_scatter(self._output, self._input, flat.placement.label)
                if flat.placement.replicas is not None:
                    self._pending = runtime.then(self._pending, self._reduce_replicas)
            if flat.kind.is_offloaded:
                self._pending = runtime.then(self._pending, self._copy_to_host)
        except Exception as e:
            self._fail(e)

    def _fail(self, error: Exception) -> NoReturn:
        self._runtime.fail(
            "all-reduce" if self.flat.is_whole else "reduce-scatter", self.flat.placement.label.unit, error
        )

    def _reduce_replicas(self) -> Pending:
        """Average the output over the replicas, or hold it for the next backward to add to."""
        gradients, placement, runtime = self._of, self.flat.placement, self._runtime
        output, replicas, unused = self._output, placement.replicas, gradients.unused
        assert output is not None
        if replicas is None:
            return runtime.issued(Done())
        if self._pending is not None:
            unused.ask(self._pending)
        earlier, gradients.partial = gradients.partial, None
        if earlier is not None:
            output.add_(earlier[0])
            unused.found &= earlier[1]
        if placement.averaging.reduces_replicas:
            # NO_SHARD: the replicas are the unit's own group, so use `runtime`, which may have a communication hook.
            replicas = runtime if runtime.group is replicas.group else replicas
            unused.tell(replicas, placement.label)
            pending = replicas.all_reduce(output, placement.label)
        else:
            gradients.partial, self._output = (output, unused.found), None
            pending = runtime.issued(Done())
        return holding(pending, earlier)

    def _copy_to_host(self) -> Pending:
        output, kind, pin = self._output, self.flat.kind, self.flat.options.pin_memory
        if output is None:
            return self._runtime.issued(Done())
        dtype = self._of.dtype
        host = torch.empty(output.shape, dtype=dtype, device=kind.device, pin_memory=pin)
        self._output = host.copy_(output.to(dtype), non_blocking=pin)
        return holding(self._runtime.issued(Done()), output)

    def advance(self) -> None:
        """Start the second part of a reduction that has two parts, while later units compute.

        Raises:
            CollectiveError: the first part failed.
        """
        if isinstance(self._pending, Then):
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
            self._of.unused.ask(self._pending)
        except Exception as e:
            self._pending = None
            self._fail(e)

    def settle(self) -> bool:
        """Wait for its end and ignore its error. Returns whether it has ended, so that its memory can be freed."""
        pending, self._pending = self._pending, None
        return pending is None or settle([pending])

    def take(self) -> torch.Tensor | None:
        """After ``wait``: take the gradient shard, or None if it is held. Under offload the host waits for it."""
        output, self._output = self._output, None
        pending, self._pending = self._pending, None  # it refers to this object
        if pending is not None and self.flat.kind.is_offloaded:
            wait_on_host(pending)
        if output is None:
            return None
        if (factor := self.flat.placement.factor) is not None:
            output.mul_(factor)
        dtype = self._of.dtype
        return output if output.dtype is dtype else output.to(dtype)
