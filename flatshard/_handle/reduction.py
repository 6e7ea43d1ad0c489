"""The reduction of one flat parameter's gradients: from the filled input to this rank's gradient shard.

Averaged over the ranks that the parameters are sharded over, then over the replicas, in the reduce dtype; scaled, cast to
the dtype of ``.grad``, and copied to the CPU under offload, behind each other.

[Note: Sent as it was computed]
A gradient of bfloat16 compute that is reduced in float32 is a bfloat16 number in float32. So where the collectives can
add wider than they send (``BuiltinCollectives.widens``), it is sent as it is: the same sums bit for bit, by half of the bytes
and with half of the input's memory. Gradients that have been held (``no_sync``) are sums in the reduce dtype already, and are
sent in that. All ranks must decide alike, also one that has held nothing: by whether the unit was told to hold, not by
whether it did (``FlatParamHandle.accumulates``).

[Note: Accumulating within the shard group]
With replicas (hybrid sharding) the reduce-scatter's output may be held from one backward to the next (``_partial``), so
that only the last microbatch averages over the replicas.
"""

from __future__ import annotations

import torch

from flatshard._comm.collectives import Done, Pending, settle
from flatshard._handle.buffers import FlatBuffers
from flatshard._handle.unused import Unused
from flatshard._runtime import Holding, Runtime, Then, wait_on_host


def exactly_sent_as(compute: torch.dtype, reduce: torch.dtype) -> torch.dtype:
    """The smallest dtype that gradients, computed in one dtype and reduced in the other, fit into."""
    wide = reduce in (torch.float32, torch.float64)
    narrow = compute in (torch.bfloat16, torch.float16, torch.float32) and compute.itemsize < reduce.itemsize
    return compute if wide and narrow else reduce


class Reduction:
    """One at a time; lives as long as the flat parameter."""

    def __init__(self, buffers: FlatBuffers, replicas: Runtime | None) -> None:
        self.buffers = buffers
        self.replicas = replicas  # the group of ranks that hold the same shard, if there are others
        self.ranks = buffers.layout.world_size * (replicas.world_size if replicas is not None else 1)
        self.divide_factor: float | None = None  # divides the sum over the ranks; None: their number
        self.reduces_replicas = True  # False: [Note: Accumulating within the shard group]
        self._partial: torch.Tensor | None = None
        self._pending: Pending | None = None
        self._output: torch.Tensor | None = None
        self._copied: Pending | None = None  # the output's copy to the host, which `take` waits for
        self.unused = Unused(buffers.layout)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Of the sums, and of the output."""
        return self.buffers.options.reduce_dtype or self.buffers.compute_dtype

    @property
    def dtype(self) -> torch.dtype:
        """Of the user's ``.grad``."""
        return self.reduce_dtype if self.buffers.options.keep_low_precision_grads else self.buffers.dtype

    @property
    def is_partial(self) -> bool:
        """Whether a result of earlier backwards waits to be averaged over the replicas."""
        return self._partial is not None

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """New memory for what becomes gradients: 1-D."""
        pool = self.buffers.pool
        return torch.empty(numel, dtype=dtype, device=device) if pool is None else pool.allocate(numel, dtype)

    def prepare(self, input: torch.Tensor) -> None:
        """Allocate the output, on the stream that will use it. Where nothing is sharded the input becomes it."""
        if self.buffers.is_whole:
            self._output = input
        else:
            self._output = self.allocate(self.buffers.layout.shard_numel, self.reduce_dtype, input.device)

    def start(self, runtime: Runtime, input: torch.Tensor) -> None:
        """Start averaging ``input`` (``padded_numel`` elements); where nothing is sharded it becomes the result itself.

        Raises:
            CollectiveError: a collective could not be started.
        """
        try:
            self._start(runtime, input)
        except Exception as e:
            runtime.fail(self._phase, self.buffers.label.unit, e)

    def _start(self, runtime: Runtime, input: torch.Tensor) -> None:
        assert self._output is not None
        if self.buffers.is_whole:
            self._pending = self._reduce_replicas(runtime)
        else:
            self.unused.tell(runtime, self.buffers.label)
            self._pending = runtime.reduce_scatter(self._output, input, self.buffers.label)
            if self.replicas is not None:
                self._pending = runtime.then(self._pending, lambda: self._reduce_replicas(runtime))
        if self.buffers.is_offloaded:
            self._pending = runtime.then(self._pending, lambda: self._copy_to_host(runtime))

    @property
    def _phase(self) -> str:
        return "all-reduce" if self.buffers.is_whole else "reduce-scatter"

    def _reduce_replicas(self, runtime: Runtime) -> Pending:
        """Average the output over the replicas, or hold it for the next backward to add to."""
        output = self._output
        assert output is not None
        if self.replicas is None:
            return runtime.issued(Done())
        if self._pending is not None:
            self._look_for_unused(self._pending)
        earlier, self._partial = self._partial, None
        if earlier is not None:
            output.add_(earlier)
            self.unused.add_held()
        if self.reduces_replicas:
            # Where the replicas are the unit's group itself (NO_SHARD), a communication hook may have taken its place.
            replicas = runtime if runtime.group is self.replicas.group else self.replicas
            self.unused.tell(replicas, self.buffers.label)
            pending = replicas.all_reduce(output, self.buffers.label)
            return pending if earlier is None else Holding(pending, [earlier])
        self._partial, self._output = output, None
        self.unused.hold()
        pending = runtime.issued(Done())
        return pending if earlier is None else Holding(pending, [earlier])

    def _look_for_unused(self, pending: Pending) -> None:
        """``pending`` is over, or is waited for here where only the device waits: what did no rank use?"""
        if self.unused.is_open:
            if not isinstance(pending, Then):
                wait_on_host(pending)
            self.unused.ask()

    def _copy_to_host(self, runtime: Runtime) -> Pending:
        output = self._output
        if output is None:
            return runtime.issued(Done())
        pin = self.buffers.options.pin_memory
        host = torch.empty(output.shape, dtype=self.dtype, device=self.buffers.device, pin_memory=pin)
        self._output = host.copy_(output.to(self.dtype), non_blocking=pin)
        return Holding(runtime.issued(Done()), [output])

    def advance(self, runtime: Runtime) -> None:
        """Start the second part of a reduction that has two, while later units compute.

        Raises:
            CollectiveError: the first part failed.
        """
        if isinstance(self._pending, Then):
            try:
                self._pending.advance()
            except Exception as e:
                runtime.fail(self._phase, self.buffers.label.unit, e)

    def wait(self, runtime: Runtime) -> None:
        """Wait for what is under way, if anything is: on an accelerator, have the current stream wait.

        Raises:
            CollectiveError: it failed.
        """
        pending = self._pending
        if pending is None:
            return
        try:
            pending.wait()
            self._look_for_unused(pending)
        except Exception as e:
            self._pending = None
            runtime.fail(self._phase, self.buffers.label.unit, e)
        self._pending = None  # not before: after an interrupt it is still under way
        if self.buffers.is_offloaded:
            self._copied = pending

    def settle(self) -> bool:
        """Wait for what is under way, and ignore its error, so that the memory can be freed. Returns whether it can."""
        ended = self._pending is None or settle([self._pending])
        self._pending = None
        return ended

    def take(self) -> torch.Tensor | None:
        """After ``wait``: the gradient shard, or None where there is none (yet). Under offload the host waits for it."""
        output, self._output = self._output, None
        copied, self._copied = self._copied, None
        if copied is not None:
            wait_on_host(copied)
        if output is None:
            return None
        if self.divide_factor is not None:
            output.mul_(self.ranks / self.divide_factor)
        dtype = self.dtype
        return output if output.dtype is dtype else output.to(dtype)

    def discard(self) -> None:
        """Forget everything, what is held included."""
        self.unused.discard()
        self._pending = self._output = self._partial = self._copied = None
