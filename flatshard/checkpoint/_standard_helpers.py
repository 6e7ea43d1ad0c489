"""What functions of ``torch.distributed.checkpoint`` want of state: its helpers for ``state_dict()``, its writers.

[Note: Whole state for the standard helpers]
``get_model_state_dict(full_state_dict=True)`` calls ``model.state_dict()`` and then gathers what are DTensors. There is no
seam for others: so the hooks that make sharded values look whether this helper is calling, and what its options are, and
give whole tensors to it. With ``cpu_offload`` the helper throws away all but the first rank's, so the others get tensors
without memory.

[Note: One box of a name]
``HuggingFaceStorageWriter`` keeps one box of each name and rank, without a word about others. A value is asked for its boxes
before anything is written, and can look there who is to write them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from flatshard._frames import outward

_HELPERS = "torch.distributed.checkpoint.state_dict"


def callers() -> Iterator[FrameType]:
    """The frames of those who have called the caller, from the innermost."""
    return outward(sys._getframe(2))


class Request(NamedTuple):
    """By a helper for the state of ``module``."""

    module: nn.Module
    whole: bool
    receives: bool  # whether this rank gets the whole
    device: torch.device | None  # for the whole; None: where it is gathered


def request(kind: str) -> Request | None:
    """By the helper for state of this ``kind``, ``"model"`` or ``"optim"``, if it has called us."""
    for frame in callers():
        if frame.f_code.co_name == f"_get_{kind}_state_dict" and frame.f_globals.get("__name__") == _HELPERS:
            options = frame.f_locals["info"]
            receives = not options.cpu_offload or not dist.is_initialized() or dist.get_rank() == 0
            device = torch.device("cpu") if options.cpu_offload else None
            return Request(frame.f_locals["model"], options.full_state_dict, receives, device)
    return None


def check_writer(name: str) -> None:
    """Raise if the writer of the save under way would not keep all of the boxes of ``name``. [Note: One box of a name]

    Raises:
        ValueError: it is torch's ``HuggingFaceStorageWriter``.
    """
    for frame in callers():
        writer = frame.f_locals.get("storage_writer") if frame.f_globals.get("__name__") == _SAVER else None
        if any(kind.__name__ == "HuggingFaceStorageWriter" for kind in type(writer).__mro__):
            raise ValueError(
                f"{name!r}: this rank's part is several boxes, of which torch's HuggingFaceStorageWriter keeps one. Shard "
                "the model by whole rows, fully_shard(..., layout=flatshard.layouts.Rows()), or write the folder by "
                "flatshard.checkpoint.export_safetensors(module, path)"
            )


_SAVER = "torch.distributed.checkpoint.state_dict_saver"
