"""One rank's part of a save: what it writes, where, and what rank 0 does for all."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flatshard._comm.payloads import Payloads
from flatshard.checkpoint import _disk as disk
from flatshard.checkpoint._byte_count import ByteCount
from flatshard.checkpoint._entries import copied, entries
from flatshard.checkpoint._gathering import check_one_value


class _Plan(NamedTuple):
    """What was agreed on in a save, kept for the next one. [Note: A plan is kept]"""

    of: str  # the same on all ranks that made it together, and on no others
    place: tuple[int, int]  # this rank's in them, and how many there are
    own: Any  # what this rank could write, and the names of all values: what the plan follows from
    items: Any  # what this rank writes
    metadata: Any  # on rank 0


_kept: list[_Plan] = []  # the last one


def plan_payloads() -> Payloads:
    """Return the kinds of objects that ranks exchange in a save."""
    from flatshard.checkpoint import _plan_payloads

    return _plan_payloads.PLANS


class Saving:
    """One rank's part of a save.

    What rank 0 does for all when they have written, it does while their disks work: [Note: The disk writes meanwhile].

    [Note: A plan is kept]
    Who writes what follows from what each rank could write: names, shapes, which parts. In a job that saves every hour these
    are the same each time. So each keeps what it could write and what was agreed on. In the next save a rank on which it is
    the same hands in which plan it has, and where all have the same one, that is it. If some have another, all hand in anew.
    """

    _own: Any  # what this rank could write, and the names of all values
    _plan: _Plan  # that holds
    _into: str  # the directory that is written

    def __init__(self, path: Path, place: tuple[int, int], overwrite: bool, count: ByteCount) -> None:
        from flatshard.checkpoint import _writer

        self._writer, self._path, self._place, self._overwrite = _writer, path, place, overwrite
        self._planner = _writer.SavePlanner(count)
        self._directory: disk.NewDirectory | None = None  # on rank 0
        self._metadata: Any = None  # on rank 0, of a new plan
        self._open = contextlib.ExitStack()  # files
        self._written: list[disk.NewFile] = []  # those that are open

    def plan(self, state: Mapping[str, Any], wait: bool) -> tuple[str | None, Any]:
        """Returns the plan that this rank has, or what it could write.

        Without ``wait`` the state is copied here, and may change afterwards.
        """
        found = {entry.key: entry.saved() for entry in entries(state)}
        self._planner.set_up_planner(found if wait else copied(found, "cpu"), None, self._place[0] == 0)
        names = {n: getattr(value, "ranks_around", None) for n, value in self._planner.state_dict.items()}
        self._own = self._planner.create_local_plan(), names
        for kept in _kept:
            if (kept.place, kept.own) == (self._place, self._own):
                self._plan = kept
                return kept.of, None
        return None, self._own

    def plan_anew(self) -> tuple[str | None, Any]:
        """As ``plan``, where the plan that this rank has does not hold."""
        return None, self._own

    def plan_for_all(self, rows: list[tuple[str | None, Any]]) -> list[Any]:
        """On rank 0: the directory, the plan that holds, and where each rank writes what, if that is new.

        None: all are to hand in anew.
        """
        plans_of, own = zip(*rows, strict=True)
        of = plans_of[0]
        final: list[Any] = [None] * len(rows)
        if any(other != of for other in plans_of):
            return final
        if of is None:
            plans, names = zip(*own, strict=True)
            check_one_value(names)
            self._writer.check_plans(plans, dict.fromkeys(name for each in names for name in each))
            final, self._metadata = self._planner.create_global_plan(list(plans))
            final, of = self._writer.Writer(self._path).prepare_global_plan(final), uuid.uuid4().hex
        self._directory = disk.NewDirectory(disk.real(self._path), self._overwrite)
        return [(str(self._directory.written), of, plan) for plan in final]

    def keep(self, directory: str, of: str, plan: Any) -> None:
        """What was agreed on."""
        self._into = directory
        if plan is not None:
            self._plan = _Plan(of, self._place, self._own, plan, self._metadata)
            _kept[:] = [self._plan]

    def write(self) -> Any:
        """This rank's file. Returns what is where in it."""
        plan = self._planner.finish_plan(self._plan.items)
        results, file = self._writer.Writer(self._into).write(plan, self._planner, self._open)
        self._written += [] if file is None else [file]
        return results

    def write_metadata(self, results: list[Any]) -> None:
        """On rank 0, when all have written."""
        assert self._directory is not None
        metadata = dataclasses.replace(self._plan.metadata)
        self._written.append(self._writer.Writer(self._into).write_metadata(metadata, results, self._open))

    def flush(self) -> None:
        """What this rank has written is on the disk."""
        for file in self._written:
            file.flush()
        self._open.close()

    def publish(self, _: list[None]) -> None:
        """On rank 0, when all is on the disks."""
        assert self._directory is not None
        disk.rename(self._written[-1].path, self._directory.written / disk.METADATA)
        self._directory.publish()

    def discard(self) -> None:
        """Remove what was written, if it has not been published."""
        self._open.close()
        if self._directory is not None:
            self._directory.discard()
