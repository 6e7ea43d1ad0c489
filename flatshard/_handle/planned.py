"""The input of a handle: parameters with all their registrations, and the options and layout of each flat parameter."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from flatshard._handle.layout import FlatLayout


@dataclass(frozen=True, slots=True)
class FlatOptions:
    """The user's options for one flat parameter."""

    compute_dtype: torch.dtype | None = None  # None: that of the parameters
    reduce_dtype: torch.dtype | None = None  # for the reduction of gradients; None: see the next
    reduce_as_computed: bool = True  # in the compute dtype; False: in the parameters' own
    keep_low_precision_grads: bool = False  # ``.grad`` has the dtype of the reduction
    offload: bool = False  # the shard and its gradient are on the CPU
    pin_memory: bool = True  # they are in page-locked memory, under offload
    encoded_dtype: torch.dtype | None = None  # in which the class of the parameters sends them; None: as they compute


Groups = tuple[dist.ProcessGroup, dist.ProcessGroup | None]
"""The ranks to shard over, and for hybrid strategies those that replicate this rank's shard."""


@dataclass
class PlannedParam:
    """A parameter to shard, and every (module, name) that it is registered under."""

    fqn: str
    param: nn.Parameter
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)
    groups: Groups | None = None  # None: those of its unit
    was: weakref.ref[nn.Parameter] | None = None  # the tensor subclass that ``param`` has replaced


@dataclass(frozen=True, slots=True)
class PlannedFlat:
    """A flat parameter to create. Its parameters have the same dtype, options, groups, and ``requires_grad``."""

    params: tuple[PlannedParam, ...]  # in the order of ``layout``
    options: FlatOptions
    layout: FlatLayout
    warning: str | None = None  # why the layout is not the requested one

    @property
    def groups(self) -> Groups | None:
        """See ``PlannedParam``."""
        return self.params[0].groups
