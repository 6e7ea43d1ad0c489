"""What a handle is made of: parameters with all their registrations, and how each flat parameter is laid out."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import nn

from flatshard._handle.buffers import FlatOptions
from flatshard._handle.layout import FlatLayout


@dataclass
class PlannedParam:
    """A parameter to be sharded, and every (module, name) that it is registered under."""

    fqn: str
    param: nn.Parameter
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)
    was: weakref.ref[nn.Parameter] | None = None  # the tensor subclass that ``param`` has taken the place of


@dataclass(frozen=True, slots=True)
class PlannedFlat:
    """A flat parameter to be made: of parameters equal in dtype, in being trainable, and in options."""

    params: tuple[PlannedParam, ...]  # as in ``layout``
    options: FlatOptions
    layout: FlatLayout
    warning: str | None = None  # why it is not laid out as was asked for
