"""The save of one rank: its plan and its file, and on rank 0 the plan, metadata and directory for all."""

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
    """The plan of a save, kept for the next one. [Note: A plan is kept]"""

    id: str  # the same on all ranks that made it together, and on no others
    place: tuple[int, int]  # this rank, and the number of ranks
    own: Any  # the rank's own plan and the names of all values, from which the plan follows
    items: Any  # the write items of this rank
    metadata: Any  # on rank 0


_kept: list[_Plan] = []  # the last plan


def plan_payloads() -> Payloads:
    """Return the kinds of objects that ranks exchange in a save."""
    from flatshard.checkpoint import _plan_payloads

    return _plan_payloads.PLANS


class Saving:
    """The save of one rank.

    Rank 0 writes the metadata for all ranks while their disks work: _disk.py, [Note: The disk writes meanwhile].

    [Note: A plan is kept]
    The plan of a save follows from each rank's own plan: names, shapes, boxes. In a job that saves every hour these stay the
    same. So each rank keeps its own plan and the agreed one. In the next save a rank whose own plan is unchanged sends the id
    of the kept plan. If all ranks send the same id, the kept plan holds. Otherwise all send their own plans.
    """

    _own: Any  # this rank's own plan, and the names of all values
    _plan: _Plan  # the agreed one
    _into: str  # the directory to write

    def __init__(self, path: Path, place: tuple[int, int], overwrite: bool, count: ByteCount) -> None:
        from flatshard.checkpoint import _writer

        self._writer, self._path, self._place, self._overwrite = _writer, path, place, overwrite
        self._planner = _writer.SavePlanner(count)
        self._directory: disk.NewDirectory | None = None  # on rank 0
        self._metadata: Any = None  # on rank 0, of a new plan
        self._open = contextlib.ExitStack()  # closes the files
        self._written: list[disk.NewFile] = []  # the open files

    def plan(self, state: Mapping[str, Any], wait: bool) -> tuple[str | None, Any]:
        """Return the id of the kept plan, or this rank's own plan.

        Without ``wait`` this copies the state, which may change afterwards.
        """
        found = {entry.key: entry.saved() for entry in entries(state)}
        self._planner.set_up_planner(found if wait else copied(found, "cpu"), None, self._place[0] == 0)
        names = {n: getattr(value, "ranks_around", None) for n, value in self._planner.state_dict.items()}
        self._own = self._planner.create_local_plan(), names
        for kept in _kept:
            if (kept.place, kept.own) == (self._place, self._own):
                self._plan = kept
                return kept.id, None
        return None, self._own

    def plan_anew(self) -> tuple[str | None, Any]:
        """Return this rank's own plan, where not all ranks have the kept one."""
        return None, self._own

    def plan_for_all(self, rows: list[tuple[str | None, Any]]) -> list[Any]:
        """Return for each rank, on rank 0: the directory, the id of the plan, and the rank's part of it if it is new.

        Returns None for each rank if all must send their own plans.
        """
        ids, own = zip(*rows, strict=True)
        final: list[Any] = [None] * len(rows)
        if any(other != ids[0] for other in ids):
            return final
        if (plan_id := ids[0]) is None:
            plans, names = zip(*own, strict=True)
            check_one_value(names)
            self._writer.check_plans(plans, dict.fromkeys(name for each in names for name in each))
            final, self._metadata = self._planner.create_global_plan(list(plans))
            final, plan_id = self._writer.FileSystemWriter(self._path).prepare_global_plan(final), uuid.uuid4().hex
        self._directory = disk.NewDirectory(disk.real(self._path), self._overwrite)
        return [(str(self._directory.written), plan_id, plan) for plan in final]

    def keep(self, directory: str, plan_id: str, plan: Any) -> None:
        """Keep the agreed plan, if it is new."""
        self._into = directory
        if plan is not None:
            self._plan = _Plan(plan_id, self._place, self._own, plan, self._metadata)
            _kept[:] = [self._plan]

    def write(self) -> Any:
        """Write this rank's file. Return where each entry is in it."""
        plan = self._planner.finish_plan(self._plan.items)
        results, file = self._writer.FileSystemWriter(self._into).write(plan, self._planner, self._open)
        self._written += [] if file is None else [file]
        return results

    def write_metadata(self, results: list[Any]) -> None:
        """Write the metadata, on rank 0, when all ranks have written."""
        assert self._directory is not None
        metadata = dataclasses.replace(self._plan.metadata)
        self._written.append(self._writer.FileSystemWriter(self._into).write_metadata(metadata, results, self._open))

    def flush(self) -> None:
        """Flush this rank's files to the disk."""
        for file in self._written:
            file.flush()
        self._open.close()

    def publish(self, _: list[None]) -> None:
        """Put the directory in its place, on rank 0, when all files are on the disks."""
        assert self._directory is not None
        disk.rename(self._written[-1].path, self._directory.written / disk.METADATA)
        self._directory.publish()

    def discard(self) -> None:
        """Remove the written files, unless they are published."""
        self._open.close()
        if self._directory is not None:
            self._directory.discard()
