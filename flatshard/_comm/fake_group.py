"""Collectives of torch's fake process group, in which planning, tests and benchmarks run one rank of many. Plugged in."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from flatshard._comm.backends import BuiltinCollectives
from flatshard._comm.collectives import Addressed, Done, Pending
from flatshard._comm.progress import Label


class FakeCollectives(BuiltinCollectives):
    """Collectives of the fake process group: each simulated rank has this rank's values.

    The fake group's own all-gather fills the output with one call per rank. At 4,096 ranks that takes 2 ms of host time, far
    more than a real backend. Here one operation has the same result, and one call into the group keeps its dispatch cost.
    """

    out_of_place = True
    imitates = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        super().__init__(group)
        self.widens = device is not None and device.type == "cpu"  # like gloo

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, label: Label | None = None) -> Pending:
        numel, before, after = shard.numel(), self.rank, self.size - self.rank - 1
        if output.data_ptr() + before * shard.nbytes != shard.data_ptr():
            output.as_strided((self.size, numel), (numel, 1), 0).copy_(shard)
            return self.group.broadcast(output, 0)
        if before:
            output.as_strided((before, numel), (numel, 1), 0).copy_(shard)
        if after:
            output.as_strided((after, numel), (numel, 1), (before + 1) * numel).copy_(shard)
        return self.group.broadcast(output, 0)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, label: Label | None = None) -> Pending:
        numel = output.numel()
        output.copy_(input[self.rank * numel : (self.rank + 1) * numel])
        return self.group.broadcast(output, 0)

    def all_reduce(self, tensor: torch.Tensor, label: Label | None = None) -> Pending:
        return self.group.broadcast(tensor, 0)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        output.view(self.size, -1).copy_(input.view(self.size, -1)[self.rank])
        return self.group.broadcast(output, 0)

    def exchange(self, sent: Addressed, received: Addressed, label: Label | None = None) -> Pending:
        """See :class:`BuiltinCollectives`. There are no other ranks to receive from, so ``received`` becomes zeros."""
        for tensor, _ in received:
            tensor.zero_()
        return self.group.broadcast(received[0][0], 0) if received else Done()

    def broadcast(self, tensor: torch.Tensor) -> Pending:
        return self.group.broadcast(tensor, 0)

    def combine(self, numbers: torch.Tensor, op: Literal["sum", "max"]) -> Pending:
        pending = super().combine(numbers, op)
        if op == "sum":
            numbers.mul_(self.size)
        return pending
