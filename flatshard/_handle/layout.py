"""The plan of a unit: its flat parameters (``PlannedFlat``), with the options and the layout of each.

A layout (``FlatLayout``) is the place of each parameter in a flat parameter, in integers. Parameters lie end to end in one
*unsharded buffer*, which is cut into ``world_size`` equal *shards*::

    unsharded buffer   [ w0 w0 w0 | b0 . | w1 w1 w1 w1 w1 | . . ]      '.' = padding
    shards             [   rank 0    |   rank 1    |   rank 2   ]

Parameters with blocks that must not be cut (``block``) may have padding between them, and another order in memory. Their
places are planned once, in ``_composable/construct/layout_plan.py``; offsets of slices are computed only here. All ranges are
half-open; an absent slice is an empty range, not a flag.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from flatshard._comm.runtime import Runtime


class ShardSlice(NamedTuple):
    """The elements of one parameter that one rank holds; empty if it holds none."""

    start: int  # first element in the local shard
    stop: int
    offset: int  # index of the slice's first element in the parameter, in memory order
    numel: int = 0


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """The place of one parameter in the unsharded buffer."""

    fqn: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # dense: the elements fill [start, start + numel) without holes
    numel: int
    start: int  # first element in the unsharded buffer
    block: int = 1  # a cut between ranks must be at a multiple of this many elements, in memory order
    by_rows: bool = False  # blocks consist of rows, and each rank's slice keeps the parameter's dimensions

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The layout of one flat parameter: ``world_size`` shards of ``shard_numel`` elements each."""

    params: tuple[ParamInfo, ...]
    world_size: int
    shard_numel: int

    @property
    def padded_numel(self) -> int:
        """The number of elements of the unsharded buffer."""
        return self.shard_numel * self.world_size

    @property
    def numel(self) -> int:
        """The number of elements of the parameters, without padding."""
        return sum([info.numel for info in self.params])

    def shard_slices(self, rank: int) -> tuple[ShardSlice, ...]:
        """Return the slice of each parameter that is in the shard of ``rank``."""
        first, last = rank * self.shard_numel, (rank + 1) * self.shard_numel
        slices = []
        for info in self.params:
            start, stop = max(info.start, first), min(info.start + info.numel, last)
            if start >= stop:
                slices.append(ShardSlice(0, 0, 0, 0))
            else:
                slices.append(ShardSlice(start - first, stop - first, start - info.start, stop - start))
        return tuple(slices)

    def holders(self, index: int) -> range:
        """Return the ranks that hold elements of parameter ``index``; none for a parameter without elements."""
        info = self.params[index]
        if not info.numel:
            return range(0)
        return range(info.start // self.shard_numel, -(-(info.start + info.numel) // self.shard_numel))

    def renamed(self, fqns: Sequence[str]) -> FlatLayout:
        """Return the same layout with other FQNs."""
        renamed = [replace(info, fqn=fqn) for info, fqn in zip(self.params, fqns, strict=True)]
        return replace(self, params=tuple(renamed))

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Return the padding, as ranges of the unsharded buffer."""
        gaps, end = [], 0
        for start, numel in sorted([(info.start, info.numel) for info in self.params if info.numel]):
            if start > end:
                gaps.append((end, start))
            end = start + numel
        if self.padded_numel > end:
            gaps.append((end, self.padded_numel))
        return tuple(gaps)


def part_shape(shape: Sequence[int], numel: int, by_rows: bool) -> tuple[int, ...]:
    """Return the shape of ``numel`` elements of a parameter of ``shape``: ``(rows, *rest)`` if ``by_rows``, else 1-D."""
    if not by_rows or not shape:
        return (numel,)
    row = math.prod(shape[1:])
    return (numel // row if row else 0, *shape[1:])


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return ``stride`` if the elements fill their range without holes or overlap, otherwise the row-major stride."""
    dims = sorted([(step, size) for size, step in zip(shape, stride, strict=True) if size != 1])
    expected = 1
    for step, size in dims:
        if step != expected:
            return row_major(shape)
        expected *= size
    return tuple(stride) if math.prod(shape) else row_major(shape)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class FlatOptions:
    """The user's options for one flat parameter."""

    compute_dtype: torch.dtype | None = None  # None: the dtype of the parameters
    reduce_dtype: torch.dtype | None = None  # for the reduction of gradients; None: see `reduce_as_computed`
    reduce_as_computed: bool = True  # reduce in the compute dtype; False: in the dtype of the parameters
    keep_low_precision_grads: bool = False  # ``.grad`` has the dtype of the reduction
    offload: bool = False  # the shard and its gradient are on the CPU
    pin_memory: bool = True  # they are in page-locked memory, under offload
    encoded_dtype: torch.dtype | None = None  # that the class of the parameters sends; None: the compute dtype

    def gathered_dtype(self, own: torch.dtype) -> torch.dtype:
        """Return the dtype in which parameters of dtype ``own`` are gathered."""
        return self.encoded_dtype or self.compute_dtype or own


@dataclass(frozen=True, slots=True)
class Kind:
    """The dtypes and devices of a flat parameter. ``module.half()`` or ``module.cuda()`` replaces all of them together."""

    dtype: torch.dtype  # of the shard
    device: torch.device
    buffer_dtype: torch.dtype  # of the unsharded buffer: that of computation, or of encoded values
    compute_device: torch.device
    home: torch.device  # where the shard belongs: on the host under CPU offload, else on the compute device
    is_offloaded: bool  # the shard is on the host

    @classmethod
    def of(cls, dtype: torch.dtype, device: torch.device, options: FlatOptions, runtime: Runtime) -> Kind:
        """Return the kind of a flat parameter that ``fully_shard`` makes of parameters of ``dtype`` on ``device``."""
        # Parameters on meta that are filled later compute on the runtime's device. filled_later.py, [Note: Filled later]
        compute_device = runtime.device if device.type == "meta" else device
        home = runtime.host if options.offload and runtime.host is not None else compute_device
        at = home if device == compute_device else device
        is_offloaded = options.offload and at == runtime.host
        return cls(dtype, at, options.gathered_dtype(dtype), compute_device, home, is_offloaded)

    def converted(self, dtype: torch.dtype, device: torch.device, options: FlatOptions) -> Kind:
        """Return the kind after the shard was given another dtype or device."""
        compute_device, home = self.compute_device, self.home
        if home == compute_device and device.type != "meta":  # without offload
            compute_device = home = device
        is_offloaded = device == home != compute_device
        return Kind(dtype, device, options.gathered_dtype(dtype), compute_device, home, is_offloaded)

    @property
    def is_trainable(self) -> bool:
        """Whether parameters of this dtype can require grad."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def is_on_meta(self) -> bool:
        """Whether the parameters have no memory yet. filled_later.py, [Note: Filled later]"""
        return self.device.type == "meta" and self.compute_device.type != "meta"

    @property
    def is_one(self) -> bool:
        """Whether modules can compute with the shard as it is."""
        return self.buffer_dtype is self.dtype and self.compute_device == self.device and not self.is_offloaded


Groups = tuple[dist.ProcessGroup, dist.ProcessGroup | None]
"""The group to shard over and, for hybrid strategies, the group that replicates this rank's shard."""


@dataclass
class PlannedParam:
    """A parameter to shard, and every (module, name) that it is registered under."""

    fqn: str
    param: nn.Parameter
    registrations: list[tuple[nn.Module, str]] = field(default_factory=list)
    groups: Groups | None = None  # None: the groups of its unit
    was: weakref.ref[nn.Parameter] | None = None  # the tensor subclass that ``param`` has replaced

    def replace(self, param: nn.Parameter) -> None:
        """Set ``param`` to shard in place of the parameter."""
        self.param = param


@dataclass(frozen=True, slots=True)
class PlannedFlat:
    """A flat parameter to create. Its parameters have the same dtype, options, groups, and ``requires_grad``."""

    params: tuple[PlannedParam, ...]  # in the order of ``layout``
    options: FlatOptions
    layout: FlatLayout
    warning: str | None = None  # why the layout is not the requested one

    @property
    def groups(self) -> Groups | None:
        """The groups that its parameters are sharded over, or None for those of the unit."""
        return self.params[0].groups
