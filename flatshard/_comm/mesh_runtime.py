"""The runtime of all ranks of a mesh. Its collectives go over one axis of the mesh after the other.

[Note: One axis after the other]
Ranks on the inner axis are near each other, usually in one node. A gather goes over the outer axis first, among ranks of
equal inner rank, and then over the inner axis. A reduction goes the other way. So the bytes that leave a node are divided by
the number of its ranks. Rank ``i`` of the inner and ``o`` of the outer axis is number ``i * outer + o`` of all. Then the
shards of an outer group are adjacent, and both gathers fill ranges of one buffer.
"""

from __future__ import annotations

import dataclasses

import torch

from flatshard._comm.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    CollectivesFactory,
    Done,
    EnsureMemory,
    Pending,
)
from flatshard._comm.progress import Label
from flatshard._comm.runtime import Runtime
from flatshard._comm.streams import holding


class MeshRuntime(Runtime):
    """A runtime of all ranks of a mesh. [Note: One axis after the other]"""

    def __init__(self, every: Runtime, inner: Runtime, outer: Runtime) -> None:
        """``every``: a runtime of all ranks, in the order of the note."""
        gathers_first = inner if outer.world_size == 1 else outer
        reduces_first = outer if inner.world_size == 1 else inner
        capabilities = dataclasses.replace(
            reduces_first.capabilities,
            exact=inner.capabilities.exact and outer.capabilities.exact,
            out_of_place=gathers_first.capabilities.out_of_place,
            gathers_late=False,  # the second gather reads what the first one wrote
            compared=(),  # ranks compare the collectives of each axis
        )
        super().__init__(every.peers, reduces_first.collectives, capabilities)
        self.inner, self.outer = inner, outer
        assert self.rank == inner.rank * outer.world_size + outer.rank

    def using(self, factory: CollectivesFactory | None) -> Runtime:
        """Return a runtime of the same ranks with the collectives that ``factory`` makes for each axis."""
        return self if factory is None else MeshRuntime(self, self.inner.using(factory), self.outer.using(factory))

    @property
    def axes(self) -> tuple[Runtime, ...]:
        """See ``Runtime``."""
        return self.inner, self.outer

    @property
    def exact(self) -> Runtime:
        """See ``Runtime``."""
        return self if self.capabilities.exact else MeshRuntime(self, self.inner.exact, self.outer.exact)

    def part(self, output: torch.Tensor) -> torch.Tensor:
        """Return the range of ``output`` that this rank has once the outer axis is gathered."""
        return output.view(self.inner.world_size, -1)[self.inner.rank]

    def all_gather(
        self,
        output: torch.Tensor,
        shard: torch.Tensor,
        label: Label,
        for_backward: bool = False,
        ensure_output: EnsureMemory | None = None,
    ) -> Pending:
        assert ensure_output is None
        if self.outer.world_size == 1:
            return self.gather_inner(output, shard, label, for_backward)
        if self.inner.world_size == 1:
            return self.outer.all_gather(output, shard, label, for_backward)
        return self._issue(ALL_GATHER, GATHER, label, for_backward, self._gather, output, shard, label, for_backward)

    def _gather(self, output: torch.Tensor, shard: torch.Tensor, label: Label, for_backward: bool) -> Pending:
        part = self.part(output)
        first = self.outer.all_gather(part, shard, label, for_backward)
        return self.then(first, lambda: self.gather_inner(output, part, label, for_backward))

    def gather_inner(self, output: torch.Tensor, part: torch.Tensor, label: Label, for_backward: bool) -> Pending:
        """Gather over the inner axis: ``part`` is this rank's range of ``output``."""
        if self.inner.world_size == 1:
            return self.issued(Done())
        return self.inner.all_gather(output, part, label, for_backward)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, label: Label) -> Pending:
        if 1 in (self.inner.world_size, self.outer.world_size):
            axis = self.outer if self.inner.world_size == 1 else self.inner
            return axis.reduce_scatter(output, input, label)
        return self._issue(REDUCE_SCATTER, REDUCE, label, False, self._reduce, output, input, label)

    def _reduce(self, output: torch.Tensor, input: torch.Tensor, label: Label) -> Pending:
        half = output.new_empty(self.outer.world_size * output.numel())
        first = self.inner.reduce_scatter(half, input, label)
        return holding(self.then(first, lambda: self.outer.reduce_scatter(output, half, label)), half)

    def all_reduce(self, tensor: torch.Tensor, label: Label) -> Pending:
        def start() -> Pending:
            return self.then(self.inner.all_reduce(tensor, label), lambda: self.outer.all_reduce(tensor, label))

        return self._issue(ALL_REDUCE, REDUCE, label, False, start)
