"""What a handle is made of: parameters with all their registrations, and which of them share a flat parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from flatshard._handle.buffers import FlatOptions


@dataclass(frozen=True, slots=True)
class ParamSlots:
    """One parameter to flatten: its FQN and every (module, name) that it is registered under."""

    fqn: str
    param: nn.Parameter
    slots: tuple[tuple[nn.Module, str], ...]
    options: FlatOptions


def group_by_kind(params: Sequence[ParamSlots]) -> list[list[ParamSlots]]:
    """Parameters of one flat parameter each: equal in dtypes and in being trainable. Order within a group is kept."""
    groups: dict[tuple[torch.dtype, bool, FlatOptions], list[ParamSlots]] = {}
    for owned in params:
        groups.setdefault((owned.param.dtype, owned.param.requires_grad, owned.options), []).append(owned)
    return list(groups.values())
