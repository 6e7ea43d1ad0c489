"""Forwards in a process that was forked after ``fully_shard``: a worker of a DataLoader, say.

[Note: Forked processes]
A fork has the model, but none of the threads of its process group: its first collective would wait for ever, and without
threads nobody would notice. Python tells of a fork, so the child notes there which units it has from its parent, and no
forward in the parent pays for it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection

from torch import nn

from flatshard._composable.context import Context
from flatshard._composable.extensions import Extension
from flatshard._composable.state import Unit, UnitConfig, all_units
from flatshard._runtime import Runtime

_inherited: weakref.WeakSet[Unit] = weakref.WeakSet()


class Forked(Extension):
    """Has forwards of inherited units raise in the child."""

    def __init__(self) -> None:
        self._is_watching = False

    def prepare(self, module: nn.Module, configs: Collection[UnitConfig], runtime: Runtime) -> None:
        if not self._is_watching:
            os.register_at_fork(after_in_child=_note)
            self._is_watching = True


def _note() -> None:
    """This process is the child of a fork."""
    if units := all_units():
        _inherited.update(units)
        Context.checks[:] = [_refuse]


def _refuse(unit: Unit) -> bool:
    """A pass of ``unit`` starts. Returns whether to look again when the next one does."""
    runtime = unit.context.runtime
    if unit in _inherited and runtime.world_size > 1:
        raise RuntimeError(
            f"unit {unit.fqn or '<root>'!r} runs a forward in process {os.getpid()}, which was forked from rank "
            f"{runtime.rank} that sharded it, and has no process group: it would wait for ever. In a DataLoader's worker "
            "use a model that is not sharded, or run this one where the batch arrives"
        )
    return True
