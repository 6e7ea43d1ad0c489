"""The owner of each full parameter, and the messages that gather it there and scatter it again.

[Note: Owners]
Each parameter has an owner, the rank that steps it. A parameter on a single rank is stepped there, in place. A parameter that
is cut belongs to one of the ranks with a shard, or to the rank with the least work if all of these have too much. For a step
the owner gathers the shards of the gradient and the parameter, steps, sends the new shards back, and frees the memory. All
ranks together send at most three times the size of the cut parameters. Gathering the gradients on every rank would send N - 1
times their size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version

from flatshard._comm.collectives import Done, Pending
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.tensors.sharded_parameter import full_shape, shard_info
from flatshard.layouts import work_of

Addressed = list[tuple[torch.Tensor, int]]
"""Messages, each with the rank that it is sent to or received from."""


class Stepped:
    """A parameter and its ``proxy`` in the inner optimizer. In this class it is a plain one, and its own proxy."""

    owner: int | None = None  # the rank of the shard group that steps it, or None if every rank does
    is_mine = True  # this rank steps it
    is_cut = False  # its shards are sent to the owner

    def __init__(self, param: nn.Parameter) -> None:
        self.param = self.proxy = param

    def show(self) -> None:
        """Make the proxy the full parameter with its gradient, for the inner optimizer to step."""

    def hide(self) -> None:
        """Drop the proxy's gradient after its step, so that no later batch steps it again."""
        self.proxy.grad = None


class Owned(Stepped):
    """A sharded parameter. Its proxy has the full shape, and memory only while it is shown."""

    def __init__(self, param: nn.Parameter, flat: FlatParam, loads: list[int]) -> None:
        """``loads``: the work of each rank of the shard group so far, to which this adds its own."""
        super().__init__(param)
        index = flat.index_of(param)
        assert index is not None
        self.flat, self.index = flat, index
        layout, work = flat.layout, work_of(owned_shape(param))
        holders = layout.holders(index)
        self.is_cut = len(holders) > 1
        if not flat.holds_all:
            self.owner = _chosen(holders, work, loads)
            self.is_mine = self.owner == flat.ranks.rank
            loads[self.owner] += work
        self.proxy = nn.Parameter(self._placeholder(), param.requires_grad)
        self._parts = [(rank, layout.shard_slices(rank)[index]) for rank in holders] if self.is_cut else []
        self._whole: torch.Tensor | None = None  # the full values of a cut parameter, while this rank steps it
        self._grad: torch.Tensor | None = None

    def _placeholder(self) -> torch.Tensor:
        return torch.empty((), dtype=self.param.dtype, device=self.param.device).expand(owned_shape(self.param))

    @property
    def nbytes(self) -> int:
        """Bytes to gather for a step."""
        grad = 0 if self.param.grad is None else self.param.grad.element_size()
        return self.flat.layout.params[self.index].numel * (self.param.element_size() + grad)

    def gather(self, sent: Addressed, received: Addressed) -> None:
        """Add the messages that bring the full gradient and parameter to the owner."""
        info, grad = shard_info(self.param), self.param.grad
        assert info is not None
        assert grad is not None
        assert self.owner is not None
        with torch.no_grad():
            own = (info.in_memory_order(plain(grad)), self._own())
        if not self.is_mine:
            sent += [(part, self.owner) for part in own if part.numel()]
            return
        self._grad = torch.empty(info.numel, dtype=grad.dtype, device=grad.device)
        self._whole = torch.empty(info.numel, dtype=self.param.dtype, device=grad.device)
        for holder, part in self._parts:
            for target, mine in zip((self._grad, self._whole), own, strict=True):
                piece = target[part.offset : part.offset + part.numel]
                if holder == self.owner:
                    piece.copy_(mine)
                else:
                    received.append((piece, holder))

    def show(self) -> None:
        info, grad = self.flat.layout.params[self.index], self.param.grad
        assert grad is not None
        if self.is_cut:
            assert self._whole is not None
            assert self._grad is not None
            value, grad = self._whole, self._grad
        else:
            value, grad = plain(self.param), plain(grad)
        self.proxy.data = value if value.shape == info.shape else value.as_strided(info.shape, info.stride)
        if self.proxy.grad_dtype is not grad.dtype:
            self.proxy.grad_dtype = grad.dtype
        self.proxy.grad = grad if grad.shape == info.shape else grad.as_strided(info.shape, info.stride)

    def hide(self) -> None:
        super().hide()
        self.proxy.data = self._placeholder()
        if not self.is_cut:
            self.finish()

    def scatter(self, sent: Addressed, received: Addressed) -> None:
        """Add the messages that bring the new shards to their ranks. Call ``finish`` afterwards."""
        assert self.owner is not None
        if not self.is_mine:
            received += [(part, self.owner) for part in (self._own(),) if part.numel()]
            return
        assert self._whole is not None
        self._grad = None
        for holder, part in self._parts:
            piece = self._whole[part.offset : part.offset + part.numel]
            if holder == self.owner:
                self._own().copy_(piece)
            else:
                sent.append((piece, holder))

    def finish(self) -> None:
        """Free the memory, and increment the version on all ranks, also if the shard is empty."""
        self.drop()
        increment_version(self.param)

    def drop(self) -> None:
        """Free the gathered parameter and gradient."""
        self._whole = self._grad = None

    def _own(self) -> torch.Tensor:
        part = self.flat.slices[self.index]
        return self.flat.shard[part.start : part.stop]


def _chosen(holders: range, work: int, loads: list[int]) -> int:
    """Return the owner. [Note: Owners]"""
    if len(holders) == 1:
        return holders[0]
    best = min(holders, key=lambda r: loads[r], default=0)
    least = min(range(len(loads)), key=lambda r: loads[r])
    return best if loads[best] <= loads[least] + work else least


def owned_shape(param: torch.Tensor) -> torch.Size:
    """Return the shape that an owner steps: of the full parameter, or of the experts that the owner's process group has."""
    info = shard_info(param)
    return full_shape(param) if info is None or info.parallel is None else torch.Size(info.shape)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter or gradient as a plain tensor, whose norm does not communicate."""
    return tensor.detach().as_subclass(torch.Tensor)


def exchange(owned: Sequence[Owned], back: bool = False) -> Pending:
    """Start to gather cut parameters to their owners, or to scatter them if ``back``, in one batch of messages."""
    if not owned:
        return Done()
    flat = owned[0].flat
    runtime = flat.ranks.runtime
    sent: Addressed = []
    received: Addressed = []
    try:
        with runtime.reducing():
            for each in owned:
                (each.scatter if back else each.gather)(sent, received)
            return runtime.exchange(sent, received, flat.ranks.label)
    except Exception as e:
        runtime.fail("exchange", flat.ranks.label.unit, e)
