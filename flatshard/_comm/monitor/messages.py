"""What is done with a process group besides collectives: ranks find each other by its store; its waits are ended."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flatshard._comm.progress import RESERVED

_INTERRUPT_TAG = RESERVED + 7
"""The tag of a receive that is meant to time out: no message with it is ever sent."""


def default_group() -> dist.ProcessGroup | None:
    """The group of all ranks, or None if torch.distributed is not initialised."""
    return dist.group.WORLD if dist.is_initialized() else None


def membership(group: dist.ProcessGroup | None) -> tuple[int, int, Any]:
    """This process's rank in ``group``, the group's size, and the group's store."""
    return (0, 1, None) if group is None else (group.rank(), group.size(), group.get_group_store())


def all_set(store: Any, keys: list[str], seconds: float) -> bool:
    """Wait until all ``keys`` are set, for at most ``seconds``. Returns whether they are.

    Not by ``store.wait`` with a timeout: when that expires while the key is set, TCPStore's client may lose its place in the
    server's answers, and a later call of this process hangs (torch 2.13.0: within 1,500 waits of 1 to 5 ms on four ranks).
    """
    until, pause = time.monotonic() + seconds, 0.001
    while not store.check(keys):
        left = until - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, 0.1)
    return True


def read_now(store: Any, key: str) -> bytes | None:
    """Return the value under ``key``, or None if there is none.

    It never waits, where ``store.get`` after ``store.check`` waits for the store's timeout if another rank has deleted the
    key in between, as this process was stopped, say.
    """
    found: bytes = store.compare_set(key, _NOTHING, _NOTHING)  # which gives that back where the key is not set
    return None if found == _NOTHING else found


_NOTHING = b"\0nothing"


def interrupt(group: dist.ProcessGroup) -> None:
    """End every wait on a gloo group, on all ranks. [Note: Interrupting gloo]"""
    for step in range(1, group.size()):
        try:
            never = group.recv([torch.empty(1, device="cpu")], (group.rank() + step) % group.size(), _INTERRUPT_TAG)
        except RuntimeError:  # that rank has closed its connection; connections to other ranks may still be open
            continue
        with contextlib.suppress(RuntimeError):  # the timeout
            never.wait(timedelta(milliseconds=1))
        return
