"""Refuses forwards in a process that was forked after ``fully_shard``, such as a worker of a DataLoader.

[Note: Forked processes]
A forked process has a copy of the model, but not the threads of its process group. Its first collective would wait forever,
and the thread that would notice does not exist there either. So the child remembers, right after the fork, which units it
inherited. This costs nothing in the forwards of the parent.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection

from torch import nn

from flatshard._comm.runtime import Runtime
from flatshard._composable.extensions import Extension
from flatshard._composable.find import all_units
from flatshard._composable.state import Context, Unit
from flatshard._composable.unit_config import UnitConfig

_inherited: weakref.WeakSet[Unit] = weakref.WeakSet()


class Forked(Extension):
    """Makes forwards of inherited units raise in the child process."""

    def __init__(self) -> None:
        self._is_watching = False

    def prepare(self, module: nn.Module, configs: Collection[UnitConfig], runtime: Runtime) -> None:
        if not self._is_watching:
            os.register_at_fork(after_in_child=_note)
            self._is_watching = True


def _note() -> None:
    """Make units of the parent refuse to run; called by Python in the child process after a fork."""
    if units := all_units():
        _inherited.update(units)
        Context.checks[:] = [_refuse]


def _refuse(unit: Unit) -> bool:
    """Raise if ``unit`` was inherited when its pass starts. Return whether to check again in the next pass."""
    runtime = unit.runtime
    if unit in _inherited and runtime.world_size > 1:
        raise RuntimeError(
            f"unit {unit.fqn or '<root>'!r} runs a forward in process {os.getpid()}, which was forked from rank "
            f"{runtime.rank} after fully_shard. A forked process has no process group, so the forward would wait forever. In "
            "a DataLoader worker use a model that is not sharded, or run this one in the training loop"
        )
    return True
