"""Process groups besides their collectives: this process's place in them, and the end of all waits."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flatshard._comm.progress import RESERVED, digest

_INTERRUPT_TAG = RESERVED + 7
"""The tag of a receive that is meant to time out: no message has it."""


def default_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks, or None if torch.distributed is not initialised."""
    return dist.group.WORLD if dist.is_initialized() else None


def membership(group: dist.ProcessGroup | None) -> tuple[int, int, Any]:
    """Return this process's rank in ``group``, the group's size, and its store."""
    return (0, 1, None) if group is None else (group.rank(), group.size(), group.get_group_store())


def name_of(group: dist.ProcessGroup) -> str:
    """Return a name of ``group``, the same on all its ranks. Empty if torch.distributed does not know the group."""
    try:
        return digest((group.group_name, dist.get_process_group_ranks(group)))
    except (KeyError, RuntimeError, ValueError):
        return ""


def interrupt(group: dist.ProcessGroup) -> None:
    """End every wait on a gloo group, on all ranks. watch.py, [Note: Interrupting gloo]"""
    for step in range(1, group.size()):
        try:
            never = group.recv([torch.empty(1, device="cpu")], (group.rank() + step) % group.size(), _INTERRUPT_TAG)
        except RuntimeError:  # that rank has closed its connection; connections to other ranks may still be open
            continue
        with contextlib.suppress(RuntimeError):  # the timeout
            never.wait(timedelta(milliseconds=1))
        return
