"""The reduction of one flat parameter's gradients: from the filled input to this rank's gradient shard.

The gradients are averaged over the ranks that the parameters are sharded over, and then over the replicas, in the reduce
dtype. The result is scaled, cast to the dtype of ``.grad`` and, under offload, copied to the CPU.

[Note: Accumulating within the shard group]
With replicas (hybrid sharding) the output of the reduce-scatter can be held from one backward to the next (``_partial``),
so that only the last microbatch averages over the replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from flatshard._comm.collectives import Done, Pending, settle
from flatshard._handle.unused import Unused
from flatshard._runtime import Runtime, Then, holding, wait_on_host

if TYPE_CHECKING:
    from flatshard._handle.flat_param import FlatParam


class Reduction:
    """The reductions of one flat parameter, one at a time. It exists as long as the flat parameter."""

    def __init__(self, flat: FlatParam) -> None:
        self.flat = flat
        self.unused = Unused(flat.layout)
        # The output of earlier backwards, not averaged over the replicas yet; and the parameters that they did not use.
        self._partial: tuple[torch.Tensor, set[int]] | None = None
        self._output: torch.Tensor | None = None
        self._pending: Pending | None = None  # from `start` to `take`

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of the sums and of the output."""
        return self.flat.options.reduce_dtype or self.flat.kind.compute_dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the user's ``.grad``."""
        return self.reduce_dtype if self.flat.options.keep_low_precision_grads else self.flat.kind.dtype

    @property
    def factor(self) -> float | None:
        """By which to multiply the average over the ranks of the flat parameter. None: it is the average of the unit."""
        ranks, averaging = self.flat.placement.ranks, self.flat.placement.averaging
        divisor = averaging.divide_factor or averaging.ranks
        return None if divisor == ranks else ranks / divisor

    @property
    def is_partial(self) -> bool:
        """Whether a result of earlier backwards is held, and has yet to be averaged over the replicas."""
        return self._partial is not None

    def prepare(self, input: torch.Tensor) -> None:
        """Allocate the output, on the stream that will use it. If nothing is sharded, the input is the output."""
        if self.flat.is_whole:
            self._output = input
        else:
            pool = self.flat.placement.pool
            make = input.new_empty if pool is None else pool.allocate
            self._output = make(self.flat.layout.shard_numel, dtype=self.reduce_dtype)

    def start(self, runtime: Runtime, input: torch.Tensor) -> None:
        """Start averaging ``input`` (``padded_numel`` elements). If nothing is sharded, this happens in place.

        Raises:
            CollectiveError: a collective could not be started.
        """
        assert self._output is not None
        try:
            if self.flat.is_whole:
                self._pending = self._reduce_replicas(runtime)
            else:
                self.unused.tell(runtime, self.flat.placement.label)
                self._pending = runtime.reduce_scatter(self._output, input, self.flat.placement.label)
                if self.flat.placement.replicas is not None:
                    self._pending = runtime.then(self._pending, lambda: self._reduce_replicas(runtime))
            if self.flat.kind.is_offloaded:
                self._pending = runtime.then(self._pending, lambda: self._copy_to_host(runtime))
        except Exception as e:
            self._fail(runtime, e)

    def _fail(self, runtime: Runtime, error: Exception) -> NoReturn:
        runtime.fail("all-reduce" if self.flat.is_whole else "reduce-scatter", self.flat.placement.label.unit, error)

    def _reduce_replicas(self, runtime: Runtime) -> Pending:
        """Average the output over the replicas, or hold it for the next backward to add to."""
        output, replicas = self._output, self.flat.placement.replicas
        assert output is not None
        if replicas is None:
            return runtime.issued(Done())
        if self._pending is not None:
            self.unused.ask(self._pending)
        earlier, self._partial = self._partial, None
        if earlier is not None:
            output.add_(earlier[0])
            self.unused.found &= earlier[1]
        if self.flat.placement.averaging.reduces_replicas:
            # NO_SHARD: the replicas are the unit's own group, so use `runtime`, which may have a communication hook.
            replicas = runtime if runtime.group is replicas.group else replicas
            self.unused.tell(replicas, self.flat.placement.label)
            pending = replicas.all_reduce(output, self.flat.placement.label)
        else:
            self._partial, self._output = (output, self.unused.found), None
            pending = runtime.issued(Done())
        return holding(pending, earlier)

    def _copy_to_host(self, runtime: Runtime) -> Pending:
        output = self._output
        if output is None:
            return runtime.issued(Done())
        pin = self.flat.options.pin_memory
        host = torch.empty(output.shape, dtype=self.dtype, device=self.flat.kind.device, pin_memory=pin)
        self._output = host.copy_(output.to(self.dtype), non_blocking=pin)
        return holding(runtime.issued(Done()), output)

    def advance(self, runtime: Runtime) -> None:
        """Start the second part of a reduction that has two parts, while later units compute.

        Raises:
            CollectiveError: the first part failed.
        """
        if isinstance(self._pending, Then):
            try:
                self._pending.advance()
            except Exception as e:
                self._fail(runtime, e)

    def wait(self, runtime: Runtime) -> None:
        """Wait for the reduction, if one is in flight. On an accelerator only the current stream waits. Idempotent.

        Raises:
            CollectiveError: the reduction failed.
        """
        if self._pending is None:
            return
        try:
            self._pending.wait()
            self.unused.ask(self._pending)
        except Exception as e:
            self._pending = None
            self._fail(runtime, e)

    def settle(self) -> bool:
        """Wait for the reduction and ignore its error. Returns whether it has ended, so that its memory can be freed."""
        ended = self._pending is None or settle([self._pending])
        self._pending = None
        return ended

    def take(self) -> torch.Tensor | None:
        """After ``wait``: take the gradient shard, or None if it is held or missing. Under offload the host waits for it."""
        output, self._output = self._output, None
        pending, self._pending = self._pending, None
        if pending is not None and self.flat.kind.is_offloaded:
            wait_on_host(pending)
        if output is None:
            return None
        if (factor := self.factor) is not None:
            output.mul_(factor)
        dtype = self.dtype
        return output if output.dtype is dtype else output.to(dtype)

    def discard(self) -> None:
        """Reset, and drop held results, too."""
        self.unused.discard()
        self._pending = self._output = self._partial = None
