"""The least code that trains sharded units: the host time that is left when nothing else is asked for.

It gathers each unit twice, one ahead, frees it twice, reduces one unit at a time and hands out gradients, with the same
operations as flatshard. But it knows one dtype, and one chain of units that always runs alike, each forward with its
backward. It sees no unused parameter, no change that a user makes, no exception, and no other rank out of step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard._comm.backends import FakeCollectives


def shard(chain: Sequence[nn.Module]) -> None:
    """Make each of ``chain``, which run one after the other, a unit on rank 0 of the fake group."""
    assert dist.group.WORLD is not None
    collectives, before = FakeCollectives(dist.group.WORLD), None
    for module in chain:
        before = BareUnit(module, collectives, before)


class BareUnit:
    """One unit. ``before``: the one that runs forward before it."""

    def __init__(self, module: nn.Module, collectives: FakeCollectives, before: BareUnit | None) -> None:
        self.collectives, self.before = collectives, before
        self.after: BareUnit | None = None
        self.reducing: list[BareUnit] = before.reducing if before else []  # shared by all
        if before is not None:
            before.after = self
        named = [(m._parameters, name, p) for m in module.modules() for name, p in m.named_parameters(recurse=False)]
        self.dicts, self.names, self.params = (list(column) for column in zip(*named, strict=True))
        ends = list(itertools.accumulate(p.numel() for p in self.params))
        numel = -(-ends[-1] // collectives.size)
        self.shard, self.flat, self.input = (torch.zeros(n) for n in (numel, *[numel * collectives.size] * 2))
        self.nbytes = self.flat.nbytes
        self.cuts = [min(end, numel) for end in ends[:-1]]
        self.computes, self.slots = [], []
        for param, end, own in zip(self.params, ends, self.shard.tensor_split(self.cuts), strict=True):
            compute, place = nn.Parameter(torch.empty(0)), slice(end - param.numel(), end)
            compute.data = self.flat[place].view_as(param)
            compute.register_post_accumulate_grad_hook(self.gradient_comes)
            self.computes.append(compute)
            self.slots.append(self.input[place].view_as(param))
            param.data = own.copy_(param.data.flatten()[: own.numel()])
        self.storage, self.input_storage = self.flat.untyped_storage(), self.input.untyped_storage()
        self.storage.resize_(0)
        self.input_storage.resize_(0)
        self.pending = 0  # gradients
        self.gathering: Any = None  # None: sharded
        module.register_forward_pre_hook(lambda module, args: self.show(self.after))
        module.register_forward_hook(lambda module, args, output: self.end_forward(output))

    def gather(self) -> None:
        if self.gathering is None:
            self.storage.resize_(self.nbytes)
            self.gathering = self.collectives.all_gather(self.flat, self.shard)

    def show(self, following: BareUnit | None) -> None:
        self.gather()
        self.gathering.wait()
        self.register(self.computes)
        if following is not None:
            following.gather()

    def register(self, params: list[nn.Parameter]) -> None:
        for parameters, name, param in zip(self.dicts, self.names, params, strict=True):
            parameters[name] = param

    def free(self) -> None:
        self.register(self.params)
        self.storage.resize_(0)
        self.gathering = None

    def end_forward(self, output: Tensor) -> None:
        self.free()
        output.grad_fn.register_prehook(lambda grads: self.begin_backward())

    def begin_backward(self) -> None:
        self.show(self.before)
        self.pending = len(self.params)

    def gradient_comes(self, param: Tensor) -> None:
        self.pending -= 1
        if self.pending:
            return
        self.free()
        if self.reducing:
            self.reducing.pop().finish()
        self.input_storage.resize_(self.nbytes)
        torch._foreach_copy_(self.slots, [compute.grad for compute in self.computes])
        for compute in self.computes:
            compute.grad = None
        self.output = torch.empty_like(self.shard)
        self.reduction = self.collectives.reduce_scatter(self.output, self.input)
        self.reducing.append(self)
        if self.before is None:
            self.reducing.pop().finish()

    def finish(self) -> None:
        self.reduction.wait()
        self.input_storage.resize_(0)
        for param, grad in zip(self.params, self.output.tensor_split(self.cuts), strict=True):
            param.grad = grad
