"""What a handle is made of: parameters with all their registrations, and how each flat parameter is laid out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from flatshard._handle.buffers import FlatOptions
from flatshard._handle.layout import FlatLayout


@dataclass(frozen=True, slots=True)
class ParamSlots:
    """One parameter to flatten: its FQN and every (module, name) that it is registered under."""

    fqn: str
    param: nn.Parameter
    slots: tuple[tuple[nn.Module, str], ...]


@dataclass(frozen=True, slots=True)
class FlatPlan:
    """One flat parameter to be made: of parameters equal in dtype, in being trainable, and in options."""

    params: tuple[ParamSlots, ...]  # as in ``layout``
    options: FlatOptions
    layout: FlatLayout
