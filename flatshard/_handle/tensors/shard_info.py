"""``ShardInfo``: the shard of a parameter that a tensor holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from flatshard._base.old_names import OldMember
from flatshard._comm.rank_group import RankGroup
from flatshard._handle.adapters.tensor_parallel import TensorParallel
from flatshard._handle.adapters.wrapping import Wrapping
from flatshard._handle.layout import part_shape
from flatshard._handle.tensors.aggregate import plainly

TO_COPY = (
    "To keep a copy of the model, such as an average (EMA): call fully_shard on the copy, too, with the same policy, or copy "
    "the model after fully_shard"
)
"""The cure where a copy of the model meets its shards, and is not sharded."""


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """The place of a sharded parameter's shard in the full parameter. See ``flatshard.tensors.shard_info(p)``.

    Example::

        info = flatshard.tensors.shard_info(model[0].up.weight)
        print(f"{info.fqn} of shape {info.shape}: elements {info.start} to {info.stop} are here")
    """

    fqn: str  # the parameter's
    shape: tuple[int, ...]  # of the full parameter
    stride: tuple[int, ...]  # of the full parameter, dense: defines the memory order for ``start`` and ``stop``
    start: int  # this rank's elements, half-open, in memory order
    stop: int  # the element after this rank's last
    shard_world_size: int  # ranks that the parameter is sharded over
    by_rows: bool = False  # this rank's shard consists of whole rows, and has the parameter's dimensions
    owner: int | None = None  # the rank that holds all of it, if one does; None also in an unpickled copy
    # The ranks that hold the shards. None if the shard group has a single rank, unless its `around` has others; and in an
    # unpickled copy.
    runtime: RankGroup | None = field(default=None, repr=False, compare=False)
    # Averages a few numbers over the ranks as gradients are: ``UnitRanks.average_now``. None in an unpickled copy.
    average: Callable[[torch.Tensor, str], torch.Tensor] | None = field(default=None, repr=False, compare=False)
    # For a tensor subclass. All fields above except `runtime` then describe the plain tensor that is sharded of it.
    wrapping: Wrapping | None = field(default=None, repr=False, compare=False)
    # Another tensor-parallel rank holds the same values (perhaps cut differently), and writes them into checkpoints.
    is_copy: bool = field(default=False, repr=False, compare=False)
    # Ranges of this rank's elements, from ``start``, that another rank of ``runtime`` also has and counts in norms. Sorted.
    elsewhere: tuple[tuple[int, int], ...] = field(default=(), repr=False, compare=False)
    # Its layout cuts between parameters only: ``owner`` has all of it, and others have nothing.
    never_cut: bool = field(default=False, repr=False, compare=False)

    @property
    def parallel(self) -> TensorParallel | None:
        """Internal: the tensor parallelism of a DTensor parameter, or None."""
        return self.wrapping if isinstance(self.wrapping, TensorParallel) else None

    @property
    def is_full(self) -> bool:
        """Whether every rank has all of the parameter: ``NO_SHARD``, or a single rank to shard over."""
        return self.shard_world_size == 1

    is_whole = OldMember("is_full")

    @property
    def is_cut(self) -> bool:
        """Internal: whether no rank has all of it in its own shape."""
        return not self.is_full and (self.owner is None or not (self.by_rows or len(self.shape) < 2))

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard: 1-D; ``(rows, *rest)`` if cut by rows; the full shape on a single rank."""
        if self.is_full:
            return self.shape
        return part_shape(self.shape, self.stop - self.start, self.by_rows)

    @property
    def rows(self) -> tuple[int, int] | None:
        """The rows of the parameter that this rank has, half-open. None if it was not cut by rows."""
        if not self.shape or not (self.by_rows or self.is_full):
            return None
        row = max(1, math.prod(self.shape[1:]))
        return self.start // row, self.stop // row

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Internal: the shape of the full parameter, as its user sees it."""
        return self.shape if self.wrapping is None else tuple(self.wrapping.shape)

    def describe(self) -> str:
        """Internal: describe the elements that this rank has, for an error."""
        return (
            f"parameter {self.fqn!r} is sharded: this rank has elements {self.start}:{self.stop} of shape "
            f"{self.full_shape} {'in whole rows' if self.by_rows else 'as a 1-D shard'}"
        )

    def explain_full_shape(self, what: str) -> str:
        """Internal: return the error for ``what``, which was given the shard and a tensor of the full shape."""
        return (
            f"{self.describe()}, and {what} was given the full parameter, or another tensor of that shape. {TO_COPY}. "
            "To load full values: module.load_state_dict(...), where each rank takes its shard. Otherwise compute inside "
            "`with flatshard.summon_full_params(module):`"
        )

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)

    def in_memory_order(self, part: torch.Tensor) -> torch.Tensor:
        """Internal: flatten ``part``, in the shape of this rank's shard, in memory order: a view if its stride allows."""
        return part if len(part.shape) == 1 else in_memory_order(part, self.stride)

    def shaped(self, part: torch.Tensor) -> torch.Tensor:
        """Internal: reshape 1-D ``part``, in memory order, to the shape of this rank's shard."""
        shape = self.part_shape
        with plainly():
            return part if shape == part.shape else part.as_strided(shape, self.stride)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardInfo, (
            self.fqn,
            self.shape,
            self.stride,
            self.start,
            self.stop,
            self.shard_world_size,
            self.by_rows,
        )


_OF_ITS_PARAMETER = "flatshard.tensors.shard_info(p) of the parameter p has"
_TO_LOAD = "To load a full tensor call module.load_state_dict(...), where each rank takes its shard"
DTENSOR_CURES = {
    "full_tensor": "read it in `with flatshard.summon_full_params(module):` (a gradient, with with_grads=True), or use "
    "`module.state_dict()[name].full_tensor()`",
    "redistribute": "it stays as it is. Its full tensor is shown in `with flatshard.summon_full_params(module):`",
    "to_local": "use it as it is",
    "placements": f"{_OF_ITS_PARAMETER} its shape and place. {_TO_LOAD}",
    "device_mesh": f"{_OF_ITS_PARAMETER} the number of ranks. {_TO_LOAD}",
}
"""The attributes of a DTensor that scripts for FSDP2 ask for, and the cures: what to write instead."""


def _what_it_is(shard: Any) -> str:
    return f"{getattr(shard, '_whose', '')}parameter {shard._flatshard_info.fqn!r} is this rank's shard"


def attribute_of_dtensors(name: str, what_it_is: Callable[[Any], str] = _what_it_is) -> property:
    """Return an attribute of ``DTENSOR_CURES`` for a class of shards. It is missing, and the error has the cure."""

    def fget(shard: Any) -> NoReturn:
        what = f"{what_it_is(shard)}, and not a DTensor with {name}"
        raise AttributeError(f"{what}: {DTENSOR_CURES[name]}", name=name, obj=shard)

    return property(fget)


def in_memory_order(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Flatten ``tensor`` in the order of a dense ``stride``: a view if ``tensor`` has that stride."""
    with plainly():
        if any(a != b and n > 1 for a, b, n in zip(tensor.stride(), stride, tensor.shape, strict=True)):
            dense = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
            tensor = dense.copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))


def elements_of(
    full: Iterable[tuple[torch.Tensor, Wrapping | None, tuple[int, ...]]],
) -> Iterator[torch.Tensor]:
    """Yield the elements of each full tensor, in memory order. ``full``: the tensors, with their wrappings and strides."""
    for tensor, wrapping, stride in full:
        yield in_memory_order(tensor.detach() if wrapping is None else wrapping.unwrap(tensor), stride)
