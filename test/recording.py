"""A small model, collectives that record their calls, and a count of sent bytes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import models
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard import ShardingStrategy
from flatshard._base import environment
from flatshard._composable.state import unit_of
from flatshard.comm import builtin_collectives

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD


WIDTH = 24


class Net(models.Net):
    def __init__(self, blocks: int = 2, width: int = WIDTH) -> None:
        super().__init__(blocks, width, inputs=8, outputs=4)


def make_input(step: int, n: int) -> Tensor:
    return torch.randn(n, 8)


class Recording:
    """The built-in collectives with a record of their calls."""

    exact = True
    out_of_place = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.inner = builtin_collectives(group, device)
        self.calls: list[str] = []

    def note(self, call: str, *tensors: Tensor) -> None:
        """Record a call with its output and input tensors."""
        self.calls.append(call)

    def all_gather(self, output: Tensor, shard: Tensor) -> Any:
        assert output.dim() == shard.dim() == 1
        assert output.numel() == self.inner.size * shard.numel()
        assert self.out_of_place or output.view(self.inner.size, -1)[self.inner.rank].data_ptr() == shard.data_ptr()
        self.note("all_gather", output, shard)
        return self.inner.all_gather(output, shard)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Any:
        assert output.dim() == input.dim() == 1
        assert input.numel() == self.inner.size * output.numel()
        self.note("reduce_scatter", output, input)
        return self.inner.reduce_scatter(output, input)

    def all_reduce(self, tensor: Tensor) -> Any:
        assert tensor.dim() == 1
        self.note("all_reduce", tensor, tensor)
        return self.inner.all_reduce(tensor)


def collectives_of(module: nn.Module) -> Any:
    return unit_of(module).handle.runtime.collectives


@contextlib.contextmanager
def sent_bytes() -> Iterator[list[int]]:
    """Count the bytes that this rank sends by gloo, which carries all payloads meanwhile. Collective."""
    sent: list[int] = []
    before, environment.SHARED_MEMORY = environment.SHARED_MEMORY, 0
    send = vars(dist.ProcessGroup)["send"]  # a function, which binds later

    def counted(group: Any, tensors: list[Tensor], to: int, tag: int) -> Any:
        sent.append(sum(t.nbytes for t in tensors))
        return send.__get__(group)(tensors, to, tag)

    dist.ProcessGroup.send = counted
    try:
        yield sent
    finally:
        dist.ProcessGroup.send = send
        environment.SHARED_MEMORY = before


def same_everywhere(group: Any, tensor: Tensor) -> bool:
    size = dist.get_world_size(group)
    everywhere = tensor.new_empty(size * tensor.numel(), dtype=torch.float64)
    dist.all_gather_into_tensor(everywhere, tensor.double(), group=group)
    return all(torch.equal(tensor.double(), other) for other in everywhere.view(size, -1))
