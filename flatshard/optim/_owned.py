"""Moves the parts of a parameter to the rank that steps the whole parameter, and back.

[Note: Owners]
Each parameter has an owner, the rank that steps it. A parameter that lies on one rank is stepped there, in place. A parameter
that is cut is owned by one of the ranks that hold a part; if all of them have too much work already, by the rank with the
least work. For a step the owner gathers the parts of the gradient and of the parameter, steps, sends the new parts back, and
frees the memory. All ranks together send at most three times the size of the cut parameters. To gather the gradients on every
rank would send N - 1 times their size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version

from flatshard._comm.collectives import Done, Pending
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.tensors.sharded_parameter import shard_info


class Owned:
    """One sharded parameter, and the rank that steps it."""

    def __init__(self, flat: FlatParam, index: int, work: int, loads: list[int]) -> None:
        """``loads``: the work that each rank of the shard group has so far. ``work`` is added to the owner's entry."""
        self.flat, self.index = flat, index
        self.param: nn.Parameter = flat.params[index]
        layout = flat.layout
        holders = layout.holders(index)
        self.is_cut = len(holders) > 1
        self.owner = self._choose(holders, work, loads)
        loads[self.owner] += work
        self.is_mine = flat.is_whole or self.owner == flat.placement.rank
        self._parts = [(rank, layout.shard_slices(rank)[index]) for rank in holders] if self.is_cut else []
        self._whole: torch.Tensor | None = None  # the whole values of a cut parameter, while this rank steps it
        self._grad: torch.Tensor | None = None

    @staticmethod
    def _choose(holders: range, work: int, loads: list[int]) -> int:
        """The owner. [Note: Owners]"""
        if len(holders) == 1:
            return holders[0]
        best = min(holders, key=lambda r: loads[r], default=0)
        least = min(range(len(loads)), key=lambda r: loads[r])
        return best if loads[best] <= loads[least] + work else least

    @property
    def nbytes(self) -> int:
        """Bytes that are gathered for a step."""
        grad = 0 if self.param.grad is None else self.param.grad.element_size()
        return self.flat.layout.params[self.index].numel * (self.param.element_size() + grad) if self.is_cut else 0

    def gather(self, sent: list[tuple[torch.Tensor, int]], received: list[tuple[torch.Tensor, int]]) -> None:
        """Add what this rank must send and receive, so that the owner gets the whole gradient and parameter."""
        info, rank = self.flat.layout.params[self.index], self.flat.placement.rank
        known = shard_info(self.param)
        assert known is not None
        grad = self.param.grad
        assert grad is not None
        with torch.no_grad():
            own = [known.in_memory_order(plain(grad)), known.in_memory_order(self.param.detach())]
        if not self.is_mine:
            sent += [(part, self.owner) for part in own if part.numel()]
            return
        device = grad.device
        self._grad = torch.empty(info.numel, dtype=grad.dtype, device=device)
        self._whole = torch.empty(info.numel, dtype=self.param.dtype, device=device)
        for holder, part in self._parts:
            for target, mine in zip((self._grad, self._whole), own, strict=True):
                piece = target[part.offset : part.offset + part.numel]
                if holder == rank:
                    piece.copy_(mine)
                else:
                    received.append((piece, holder))

    def show(self, proxy: nn.Parameter) -> None:
        """Make ``proxy`` the whole parameter with its gradient, in the original shape, for an optimizer to step."""
        info, grad = self.flat.layout.params[self.index], self.param.grad
        assert grad is not None
        if self.is_cut:
            assert self._whole is not None
            assert self._grad is not None
            value, grad = self._whole, self._grad
        else:
            value, grad = self.param.detach(), plain(grad)
        proxy.data = value if value.shape == info.shape else value.as_strided(info.shape, info.stride)
        if grad.dtype is not proxy.dtype:
            proxy.grad_dtype = grad.dtype  # keep_low_precision_grads
        proxy.grad = grad if grad.shape == info.shape else grad.as_strided(info.shape, info.stride)

    def scatter(self, sent: list[tuple[torch.Tensor, int]], received: list[tuple[torch.Tensor, int]]) -> None:
        """Add what this rank must send and receive, so that all holders get their new parts. Afterwards call ``finish``."""
        if self.is_cut and self.is_mine:
            assert self._whole is not None
            self._grad = None
            for holder, part in self._parts:
                piece = self._whole[part.offset : part.offset + part.numel]
                if holder == self.flat.placement.rank:
                    self._own().copy_(piece)
                else:
                    sent.append((piece, holder))
        elif self.is_cut and self.param.numel():
            received.append((self._own(), self.owner))

    def finish(self) -> None:
        """End the step. The version grows on all ranks, also where the part is empty."""
        self.drop()
        increment_version(self.param)

    def drop(self) -> None:
        """Free the gathered parameter and gradient."""
        self._whole = self._grad = None

    def _own(self) -> torch.Tensor:
        part = self.flat.slices[self.index]
        return self.flat.shard[part.start : part.stop]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A gradient as a plain tensor, whose norm does not communicate."""
    return tensor.detach().as_subclass(torch.Tensor)


def move(owned: Sequence[Owned], back: bool = False) -> Pending:
    """Start to gather cut parameters to their owners, or to send them ``back``, in one batch of messages."""
    sent: list[tuple[torch.Tensor, int]] = []
    received: list[tuple[torch.Tensor, int]] = []
    if not owned:
        return Done()
    flat = owned[0].flat
    runtime = flat.placement.runtime
    try:
        with runtime.reducing():
            return _start(owned, back, sent, received)
    except Exception as e:
        runtime.fail("exchange", flat.placement.label.unit, e)


def _start(
    owned: Sequence[Owned], back: bool, sent: list[tuple[torch.Tensor, int]], received: list[tuple[torch.Tensor, int]]
) -> Pending:
    for each in owned:
        (each.scatter if back else each.gather)(sent, received)
    return owned[0].flat.placement.runtime.exchange(sent, received, owned[0].flat.placement.label)
