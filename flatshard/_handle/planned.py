"""The input of a handle: parameters with their registrations, and the options and layout of each flat parameter."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from flatshard._comm.runtime import Runtime
from flatshard._handle.layout import FlatLayout


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
