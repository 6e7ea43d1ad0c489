"""Process groups besides their collectives: their members, backends and timeouts, and the end of all waits."""

from __future__ import annotations

import contextlib
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flatshard._base import trace
from flatshard._comm.progress import RESERVED, Members, digest

_INTERRUPT_TAG = RESERVED + 7
"""The tag of a receive that is meant to time out: no message has it."""
_OF_MESH = "mesh_"
"""The start of the description that a device mesh gives to the group of a dimension."""


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


def members_of(group: dist.ProcessGroup) -> Members:
    """Return the ranks of ``group`` in the world, or none if it has all of them or torch.distributed does not know it."""
    if not name_of(group):
        return Members()
    ranks = dist.get_process_group_ranks(group)
    if ranks == list(range(dist.get_world_size())):
        return Members()
    return Members(
        tuple(ranks), group.group_desc.removeprefix(_OF_MESH) if group.group_desc.startswith(_OF_MESH) else ""
    )


def alive(reference: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return the group, or raise if it has been destroyed."""
    group = reference()
    if group is None:
        raise RuntimeError("the process group that this module was sharded over has been destroyed")
    return group


def may_change(group: dist.ProcessGroup) -> bool:
    """Return whether the group may get other ranks (torch 2.15: ``reconfigure``)."""
    try:
        return bool(getattr(group, "supports_reconfigure", False))
    except RuntimeError:  # it has several backends, or one that is written in Python: torch refuses the question
        return False


def has_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether ``group`` has a gloo backend."""
    return "gloo" in str(dist.get_backend_config(group))


def timeout_of(group: dist.ProcessGroup, device: torch.device | None = None) -> timedelta | None:
    """Return the timeout of ``group`` for tensors on ``device``, or the shortest of its devices' if ``device`` is None.

    Returns None if no backend has one: a process group written in Python may not.
    """
    types = [each.partition(":")[0] for each in str(dist.get_backend_config(group)).split(",")]
    found: list[timedelta] = []
    for each in [torch.device(kind) for kind in types] if device is None else [device]:
        try:
            options = getattr(group._get_backend(each), "options", None)
        except RuntimeError as e:
            trace.logger.debug("the timeout of %s is not known: %s", group, e)
        else:
            found += [timeout] if (timeout := getattr(options, "_timeout", None)) is not None else []
    return min(found, default=None)


def interrupt(group: dist.ProcessGroup) -> None:
    """End every wait on a gloo group, on all ranks. monitor/watch.py, [Note: Interrupting gloo]"""
    for step in range(1, group.size()):
        try:
            never = group.recv([torch.empty(1, device="cpu")], (group.rank() + step) % group.size(), _INTERRUPT_TAG)
        except RuntimeError:  # that rank has closed its connection; connections to other ranks may still be open
            continue
        with contextlib.suppress(RuntimeError):  # the timeout
            never.wait(timedelta(milliseconds=1))
        return
