"""Requests of functions of ``torch.distributed.checkpoint``: its helpers for state dicts, its writers.

[Note: Full state for the standard helpers]
``get_model_state_dict(full_state_dict=True)`` calls ``model.state_dict()``, and gathers the DTensors in it. It gathers
nothing else, and has no hook. So our hooks on ``state_dict()`` look whether this helper calls, and give it full tensors.
With ``cpu_offload`` it drops the tensors of all ranks but the first, so these get tensors without memory.

[Note: One box of a name]
``HuggingFaceStorageWriter`` keeps one box for each name and rank, and silently drops the others. A value is asked for its
boxes before anything is written, and then looks for the writer.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from flatshard._base.callers import variables_of

HELPERS = "torch.distributed.checkpoint.state_dict"
"""The module of torch's helpers. Without it nobody can have called one."""


class Request(NamedTuple):
    """A helper's request for the state of ``module``."""

    module: nn.Module
    is_full: bool  # whether it wants unsharded tensors
    receives: bool  # whether this rank gets the full state
    device: torch.device | None  # for the full state; None: where it is gathered


def request(kind: str) -> Request | None:
    """Return the request of the helper for state of this ``kind``, ``"model"`` or ``"optim"``, or None if none has called."""
    call = variables_of(HELPERS, f"_get_{kind}_state_dict") if HELPERS in sys.modules else None
    if call is None:
        return None
    options = call["info"]
    receives = not options.cpu_offload or not dist.is_initialized() or dist.get_rank() == 0
    device = torch.device("cpu") if options.cpu_offload else None
    return Request(call["model"], options.full_state_dict, receives, device)


class _Last(threading.local):
    """The last state dict that was asked for, and its request: hooks of many modules ask."""

    destination: weakref.ref[OrderedDict[str, Any]] | None = None
    request: Request | None = None


_last = _Last()


def model_request(destination: dict[str, Any]) -> Request | None:
    """Return the helper's request that ``module.state_dict()`` fills ``destination`` for, or None if the user called it."""
    if not isinstance(destination, OrderedDict):  # the user's own: torch makes an OrderedDict
        return None
    if _last.destination is None or _last.destination() is not destination:
        _last.destination, _last.request = weakref.ref(destination), request("model")
    return _last.request


def check_writer(name: str) -> None:
    """Raise if the writer of this save would drop boxes of ``name``. [Note: One box of a name]

    Raises:
        ValueError: it is torch's ``HuggingFaceStorageWriter``.
    """
    call = variables_of("torch.distributed.checkpoint.state_dict_saver", "_save_state_dict")
    writer = None if call is None else call["storage_writer"]
    if any(kind.__name__ == "HuggingFaceStorageWriter" for kind in type(writer).__mro__):
        raise ValueError(
            f"{name!r}: this rank's shard is several boxes, of which torch's HuggingFaceStorageWriter keeps one. Shard "
            "the model by whole rows, fully_shard(..., layout=flatshard.layouts.Rows()), or write the folder by "
            "flatshard.checkpoint.export_safetensors(module, path)"
        )
