"""What ``torch.distributed.checkpoint.state_dict`` asks for while it calls ``state_dict()``.

[Note: Whole state for the standard helpers]
``get_model_state_dict(full_state_dict=True)`` calls ``model.state_dict()`` and then gathers what are DTensors. There is no
seam for others: so the hooks that make sharded values look whether this helper is calling, and what its options are, and
give whole tensors to it. With ``cpu_offload`` the helper throws away all but the first rank's, so the others get tensors
without memory.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

_HELPERS = "torch.distributed.checkpoint.state_dict"


class Request(NamedTuple):
    """By a helper for the state of ``module``."""

    module: nn.Module
    whole: bool
    receives: bool  # whether this rank gets the whole
    device: torch.device | None  # for the whole; None: where it is gathered


def request(kind: str) -> Request | None:
    """By the helper for state of this ``kind``, ``"model"`` or ``"optim"``, if it has called us."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == f"_get_{kind}_state_dict" and frame.f_globals.get("__name__") == _HELPERS:
            options = frame.f_locals["info"]
            receives = not options.cpu_offload or not dist.is_initialized() or dist.get_rank() == 0
            device = torch.device("cpu") if options.cpu_offload else None
            return Request(frame.f_locals["model"], options.full_state_dict, receives, device)
        frame = frame.f_back
    return None
