"""The input of a handle: parameters with all their registrations, and the layout of each flat parameter."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import nn

from flatshard._handle.flat_param import FlatOptions
from flatshard._handle.layout import FlatLayout


@dataclass
class PlannedParam:
    """A parameter to shard, and every (module, name) that it is registered under."""

    fqn: str
    param: nn.Parameter
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)
    was: weakref.ref[nn.Parameter] | None = None  # the tensor subclass that ``param`` has replaced


@dataclass(frozen=True, slots=True)
class PlannedFlat:
    """A flat parameter to create. Its parameters have the same dtype, options, and ``requires_grad``."""

    params: tuple[PlannedParam, ...]  # in the order of ``layout``
    options: FlatOptions
    layout: FlatLayout
    warning: str | None = None  # why the layout is not the requested one
