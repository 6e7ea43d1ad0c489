"""Saving and loading the state of a job: completely or not at all, by any number of ranks.

The files are those of ``torch.distributed.checkpoint``, which takes ``model.state_dict()`` just as well. These functions add:
they need no numpy, they name ranks that do not arrive, a save that dies leaves the previous checkpoint, a load that cannot
succeed changes nothing on any rank, and nothing in a checkpoint is executed.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from flatshard._base.errors import name_list
from flatshard._base.old_names import old_arguments
from flatshard._base.trace import logger
from flatshard._comm.process_groups import default_group, membership
from flatshard._composable.find import units_below
from flatshard.checkpoint._barrier import Barrier, RankError, patience
from flatshard.checkpoint._disk import ByteCount, Report
from flatshard.checkpoint._entries import Entry, Undo, ValuePath, copied, entries
from flatshard.checkpoint._gathering import check_one_value
from flatshard.checkpoint._location import Folder, Location, NewCheckpoint, locate

_MINUTE = 60.0  # seconds


@old_arguments(wait="async_op", converted={"wait": lambda wait: not wait})
def save_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    overwrite: bool = False,
    async_op: bool = False,
    timeout: timedelta | None = None,
    progress: Report | None = None,
) -> Future[None]:
    """Write ``state`` to the directory or URL ``path``, which all ranks see. Every rank must call it, with the same path.

    Each rank writes its own shards to one file, without a collective on them. The checkpoint appears when everything is
    written, flushed to disk, and every element accounted for. Until then ``path`` is as it was.

    Example::

        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 500}
        flatshard.save_checkpoint("run/step-500", state)
        saved = flatshard.save_checkpoint("run/step-501", state, async_op=True)  # training continues meanwhile
        saved.result()

    Args:
        path: a directory that does not exist, or a link to the directory to write. Or the URL of one in a store that fsspec
            knows (``s3://bucket/run/step-500``): ``pip install 'flatshard[stores]' s3fs``. A rank uploads 32 MiB at a time.
            Only one job may save to a URL at a time.
        state: modules, optimizers over their parameters, objects with ``state_dict()`` and ``load_state_dict()``, tensors,
            and plain values (numbers, strings, lists and dicts of such). Values that are not sharded come from rank 0.
        process_group: the ranks that share ``state``. Default: all.
        overwrite: replace a checkpoint at ``path``. It is removed when the new one is in its place.
        async_op: copy ``state`` to CPU memory, return, and write it in a thread while training continues. If False, return
            when the checkpoint is written. The checkpoint is the state at the call. The next call waits for this one.
        timeout: how much later than the first rank the last may arrive, and how long a rank may give no sign of life. A write
            may take as long as it needs. Default: a minute, or the process group's timeout if that is shorter.
        progress: called by the writing thread with the bytes that this rank has written and its total: for tqdm, ``lambda
            done, total: bar.update(done - bar.n)``. Default: during a long save rank 0 prints a line to stderr every ten
            seconds.

    Returns:
        A future, which is done unless ``async_op``. Its ``result()`` raises the error of a save in the background. An error
        that nobody retrieves is logged by rank 0 and raised by the next call.

    Raises:
        ImportError: ``path`` is a URL (``s3://``), and fsspec or the library of the store is not installed.
        ValueError: fsspec does not know the scheme of the URL.
        RuntimeError: ``destroy_process_group`` was called before.
        RankError: on all ranks, if one did not arrive or failed: the path exists, a disk is full, elements are missing, a
            value is of a class that loading refuses, another job is saving to ``path``; or the previous save failed in the
            background and nobody retrieved its error. The files of the attempt are removed.
    """
    at = check_call(path, state, process_group, "save_checkpoint")
    job = make_barrier(process_group, f"save_checkpoint({str(at)!r})", timeout)
    count = ByteCount("saving", str(at), progress, job.is_first)
    saving, save = _Saving(at, job.place, overwrite, count), Save(count)
    with contextlib.ExitStack() as stack:
        stack.enter_context(job)
        stack.callback(saving.discard)
        plan = job.share(lambda: saving.plan(state, not async_op), saving.plan_for_all)
        if plan is None:  # only some ranks could use the plan of the last save
            plan = job.share(saving.plan_anew, saving.plan_for_all)
        saving.keep(*plan)

        def write() -> None:
            job.share(saving.write, saving.make_metadata)
            job.share(saving.flush, saving.publish)

        if not async_op:
            write()
            save.set_result(None)
        else:
            _report_at_exit()
            _background.append(save)
            arguments = (stack.pop_all(), write, job.is_first)  # the thread leaves the barrier
            threading.Thread(target=save.run, args=arguments, name="flatshard-save").start()
    return save


def load_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    strict: bool = True,
    verify: bool = True,
    timeout: timedelta | None = None,
    progress: Report | None = None,
) -> dict[str, Any]:
    """Read ``state`` from ``path``: modules and optimizers in place. Every rank must call it, with the same path.

    The checkpoint may come from any number of ranks, strategy, policy or precision, from a plain model, or from
    ``torch.distributed.checkpoint.save`` of any of these or of FSDP2. Each rank reads its own shards twice: once to verify
    them, and in place when all ranks have done so. Nothing in the files is executed.

    Example::

        flatshard.save_checkpoint("run/step-500", {"model": model, "optimizer": optimizer, "step": 500})
        step = flatshard.load_checkpoint("run/step-500", {"model": model, "optimizer": optimizer, "step": 0})["step"]

    Args:
        path: the path that ``save_checkpoint`` was given.
        state: as for saving. Only the names in it are read.
        process_group: as for saving.
        strict: raise if a module, an optimizer or a dict in ``state`` has names that the checkpoint lacks, or the other way
            round. If False, values that the checkpoint lacks stay as they are.
        verify: compare the bytes with the sums that they were saved with. False saves one of two readings.
        timeout: see :func:`save_checkpoint`.
        progress: see :func:`save_checkpoint`. It counts the bytes that this rank reads, with ``verify`` twice.

    Returns:
        ``state``, with the values that were read in place of tensors and plain values.

    Raises:
        ImportError, ValueError, RuntimeError: as for saving.
        RankError: on all ranks, with nothing changed on any: a rank did not arrive; names are missing or unexpected,
            shapes differ, files are missing, cut off or damaged, all of them in one message; an object refused its state;
            another save has replaced the checkpoint, or ranks see different ones. If the disk fails after everything was
            verified, the message says that some state is changed.
    """
    at = check_call(path, state, process_group, "load_checkpoint")
    job = make_barrier(process_group, f"load_checkpoint({str(at)!r})", timeout)
    loading = _Loading(at, job.is_first, strict, verify, progress)
    with job:
        job.share(lambda: loading.check(state), check_digests)
        try:
            job.share(loading.install)
        except BaseException:
            loading.undo()
            raise
        job.share(loading.read)
    return loading.results()


def check_call(path: Any, state: Any, group: dist.ProcessGroup | None, verb: str) -> Location:
    """Return where the checkpoint is.

    Raises:
        ImportError: the library of the store is not installed.
        RuntimeError: ``state`` is sharded, and there is no process group any more.
    """
    at = locate(path, verb)
    if group is None and default_group() is None and isinstance(state, Mapping):
        units = [u for value in state.values() if isinstance(value, nn.Module) for u in units_below(value)]
        if ranks := max((u.runtime.world_size for u in units), default=1) - 1:
            raise RuntimeError(
                f"{verb}: the model is sharded over {ranks + 1} ranks, and there is no process group any more: call it "
                "before torch.distributed.destroy_process_group(), or give it the group, process_group="
            )
    return at


def make_barrier(group: dist.ProcessGroup | None, call: str, timeout: timedelta | None) -> Barrier:
    """Wait for a save under way, and return a barrier of the ranks of ``group`` or of all, named after ``call``."""
    group = default_group() if group is None else group
    rank, size, store = membership(group)
    seconds = patience(group, _MINUTE) if timeout is None else timeout.total_seconds()
    note = _wait_for_saves()
    return Barrier(store, rank, range(size), call, seconds, note=note, check_notes=_check_failures)


# -- saving ------------------------------------------------------------------------------------------------------------


class Save(Future[None]):
    """A save that is running or done."""

    is_known = False  # whether a caller has retrieved the error, if any

    def __init__(self, count: ByteCount) -> None:
        super().__init__()
        self._count = count
        self.set_running_or_notify_cancel()  # a save that has begun cannot be cancelled

    def __repr__(self) -> str:
        state = "failed" if self.done() and super().exception() is not None else "saved" if self.done() else "saving"
        return f"<Save {state} {self._count.path!r}: {self._count} written by this rank>"

    def result(self, timeout: float | None = None) -> None:
        """Wait, and raise the error of a save that failed."""
        try:
            self.exception(timeout)
            super().result()
        finally:
            del self  # else the error has a frame that has the error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error of a save that failed, or None."""
        found = super().exception(timeout)
        self.is_known = True
        return found

    def run(self, around: contextlib.ExitStack, write: Callable[[], None], is_first: bool) -> None:
        """Call ``write`` inside of ``around``, and set its outcome."""
        try:
            with around:
                write()
        except BaseException as e:
            if is_first:
                logger.error("in the background, %s", e)
            self.set_exception(e)
        else:
            self.set_result(None)
        finally:
            del self  # as in `result`

    @property
    def failure(self) -> str | None:
        """The error message of a save that is done, or None if it succeeded or a caller has retrieved the error."""
        error = super().exception()
        return None if error is None or self.is_known else str(error)


class _Plan(NamedTuple):
    """The plan of a save, kept for the next one. [Note: A plan is kept]"""

    id: str  # the same on all ranks that made it together, and on no others
    place: tuple[int, int]  # this rank, and the number of ranks
    own: Any  # the rank's own plan and the names of all values, from which the plan follows
    items: Any  # the write items of this rank
    metadata: Any  # on rank 0


_kept: list[_Plan] = []  # the last plan


class _Saving:
    """The save of one rank.

    Rank 0 writes the metadata, and the directory, for all ranks. What ranks hand in is pickled: [Note: Plans of saves].

    [Note: A plan is kept]
    The plan of a save follows from each rank's own plan: names, shapes, boxes. In a job that saves every hour these stay the
    same. So each rank keeps its own plan and the agreed one. In the next save a rank whose own plan is unchanged sends the id
    of the kept plan. If all ranks send the same id, the kept plan holds. Otherwise all send their own plans.
    """

    _own: Any  # this rank's own plan, and the names of all values
    _plan: _Plan  # the agreed one
    _folder: Folder | None = None  # to write to

    def __init__(self, at: Location, place: tuple[int, int], overwrite: bool, count: ByteCount) -> None:
        from flatshard.checkpoint import _metadata, _writer

        self._pickled, self._unpickled = _metadata.pickled, _metadata.unpickled
        self._writer, self._at, self._place, self._overwrite = _writer, at, place, overwrite
        self._planner = _writer.SavePlanner(count)
        self._new: NewCheckpoint | None = None  # on rank 0
        self._metadata: Any = None  # on rank 0: of a new plan, and then the bytes

    def plan(self, state: Mapping[str, Any], wait: bool) -> tuple[str | None, bytes | None]:
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
        return self.plan_anew()

    def plan_anew(self) -> tuple[None, bytes]:
        """Return this rank's own plan, where not all ranks have the kept one."""
        return None, self._pickled(self._own)

    def plan_for_all(self, rows: list[tuple[str | None, bytes | None]]) -> list[Any]:
        """Return for each rank, on rank 0: the directory, the id of the plan, and the rank's part of it if it is new.

        Returns None for each rank if all must send their own plans.
        """
        ids, own = zip(*rows, strict=True)
        final: list[Any] = [None] * len(rows)
        if any(other != ids[0] for other in ids):
            return final
        if (plan_id := ids[0]) is None:
            plans, names = zip(*map(self._unpickled, own), strict=True)
            check_one_value(names)
            self._writer.check_plans(plans, dict.fromkeys(name for each in names for name in each))
            final, self._metadata = self._planner.create_global_plan(list(plans))
            final = [self._pickled(plan) for plan in self._writer.with_prefixes(final)]
            plan_id = uuid.uuid4().hex
        self._new = self._at.begin(self._overwrite)
        return [(self._new.written, plan_id, plan) for plan in final]

    def keep(self, written: str, plan_id: str, plan: bytes | None) -> None:
        """Keep the agreed plan, if it is new."""
        self._folder = self._at.writing(written)
        if plan is not None:
            self._plan = _Plan(plan_id, self._place, self._own, self._unpickled(plan), self._metadata)
            _kept[:] = [self._plan]

    def write(self) -> bytes:
        """Write this rank's file. Return where each entry is in it."""
        plan = self._planner.finish_plan(self._plan.items)
        assert self._folder is not None
        return self._pickled(self._writer.write(self._folder, plan, self._planner))

    def make_metadata(self, results: list[bytes]) -> None:
        """Make the bytes of the metadata, on rank 0, when all ranks have written."""
        metadata, found = dataclasses.replace(self._plan.metadata), list(map(self._unpickled, results))
        self._metadata = self._writer.metadata_bytes(metadata, found)

    def flush(self) -> None:
        """Flush this rank's file."""
        assert self._folder is not None
        self._folder.flush()

    def publish(self, _: list[None]) -> None:
        """Put the checkpoint in its place, on rank 0, when the files of all ranks are complete."""
        assert self._new is not None
        self._new.publish(*self._metadata)

    def discard(self) -> None:
        """Remove the written files, unless they are published. Drop the state, of which the next save makes a copy."""
        self._planner.state_dict = {}
        if self._folder is not None:
            self._folder.close()
        if self._new is not None:
            self._new.discard()


_background: list[Save] = []  # saves that are running, or whose outcome nobody has retrieved


def _wait_for_saves() -> str | None:
    """Wait for saves in the background, and return the first error message that no caller has retrieved, or None."""
    failures = [save.failure for save in _background]
    _background.clear()
    return next((f for f in failures if f is not None), None)


def _check_failures(before: Sequence[str | None]) -> None:
    """Raise if a save in the background has failed, and no rank's caller has retrieved the error."""
    if all(failure is not None for failure in before):
        raise RankError(f"not begun, as the save before this call had failed in the background: {before[0]}")


@functools.cache
def _report_at_exit() -> None:
    # Before `concurrent.futures` takes no more work, which libraries of stores give it: `atexit` calls after that.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_report)


def _report() -> None:
    if failure := _wait_for_saves():
        logger.error("a save in the background had failed, and nobody asked for its result(): %s", failure)


# -- loading -----------------------------------------------------------------------------------------------------------


def check_digests(digests: Sequence[str]) -> None:
    """Raise if ranks have read the metadata of different checkpoints."""
    if odd := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise ValueError(
            f"{name_list([f'rank {rank}' for rank in odd], 10)} found another checkpoint there than rank 0: all must see "
            "one file system, and no other job may replace the checkpoint meanwhile"
        )


class _Loading:
    """The load of one rank. _entries.py, [Note: Nothing is changed by a failed load]"""

    def __init__(self, at: Location, is_first: bool, strict: bool, verify: bool, report: Report | None) -> None:
        from flatshard.checkpoint import _reader

        self._files, self._at, self._strict = _reader, at, strict
        self._reader = _reader.FileSystemReader(str(at), verify=verify)
        self._reader.progress = ByteCount("loading", str(at), report, is_first)
        self._entries: dict[str, Entry] = {}
        self._loaded: dict[str, Any] = {}
        self._later: list[Any] = []  # pieces to read in place
        self._undos: list[Undo] = []

    def check(self, state: Mapping[str, Any]) -> str:
        """Check and read what phase 1 can. Return the digest of the metadata, which must be the same on all ranks."""
        self._reader.folder = self._at.find()
        metadata = self._reader.read_metadata()
        names = metadata.state_dict_metadata
        self._entries = {entry.key: entry for entry in entries(state, self._strict)}
        self._loaded = {key: entry.template(names) for key, entry in self._entries.items()}
        in_place, values, paths = dict[str, Any](), dict[str, Any](), dict[str, ValuePath]()
        for key, entry in self._entries.items():
            in_place |= entry.in_place
            found = entry.flat(self._loaded[key])
            values, paths = values | found[0], paths | found[1]
        elsewhere = tuple(prefix for entry in self._entries.values() for prefix in entry.elsewhere)
        expected = [n for n in names if n.partition(".")[0] in state and not (elsewhere and n.startswith(elsewhere))]
        pieces = self._files.plan(self._reader, values | in_place, self._loaded, paths, self._strict, expected)
        self._later = [piece for piece in pieces if piece.entry.fqn in in_place]
        self._reader.check(pieces)
        self._reader.read([piece for piece in pieces if piece.entry.fqn not in in_place])
        for key, entry in self._entries.items():
            entry.check(self._loaded[key])
        return self._reader.digest

    def install(self) -> None:
        """Load what may refuse, in phase 2."""
        for key, entry in self._entries.items():
            entry.install(self._loaded[key], self._undos)
        self._reader.check_same()

    def undo(self) -> None:
        """Undo phase 2, after it failed on any rank."""
        while self._undos:
            self._undos.pop()()

    def read(self) -> None:
        """Read in place, in phase 3."""
        try:
            self._reader.read(self._later)
        except Exception as e:
            raise RuntimeError(
                f"reading failed after everything had been verified, and some of the state is changed: {e}"
            ) from e

    def results(self) -> dict[str, Any]:
        """Return the caller's values."""
        return {key: entry.result(self._loaded[key]) for key, entry in self._entries.items()}
