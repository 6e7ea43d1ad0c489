"""``World``: the process groups of a job whose ranks may die and join.

[Note: New groups]
Each epoch has new process groups. torch 2.15 can give a group of gloo other ranks (``enable_reconfigure``), by calls that are
private and experimental. They need the same meeting, as ranks must agree on handles first. And runtimes, meshes, and torch's
own tables remember the rank and the size of a group: with a group that has ended they are gone, with a changed one they would
be wrong. A new group of gloo takes milliseconds, so there is nothing to win.

[Note: Groups of others]
Ranks also wait in groups that a world does not make: of a mesh, of the user, of a library. A stopped process ends no
connection, so only a group's timeout ends a wait for it: 30 minutes by default. A timeout that is set later does not reach
waits for single messages over gloo. So while a world has groups, ``timeout`` is the default timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from flatshard._base.old_names import OldMember, old_arguments
from flatshard._comm.process_groups import has_gloo, interrupt
from flatshard.elastic._epochs import Epochs, ExcludedError, Member

_TORCHS_TIMEOUT = dist.distributed_c10d.default_pg_timeout


class World:
    """The ranks of a job that continues when some die. Make it in place of ``torch.distributed.init_process_group``.

    The default process group (gloo) always has the ranks that are left, so ``torch.distributed.get_rank()`` and the like are
    right between steps. A process that starts when the job has begun joins it: until then its default group has only itself.
    It builds its model, shards it and makes its :class:`Job` as the others did; its values are not used. If it comes after
    the last step, the loop raises :class:`ExcludedError`, and no code behind the loop runs.

    Example::

        def main(port):  # each of four processes; their launcher has made TCPStore("localhost", port, is_master=True)
            store = dist.TCPStore("localhost", port, is_master=False)
            return flatshard.elastic.World(store, world_size=4)

    Args:
        store: the store of all processes. Its server must outlive them: if it is in a rank, the job ends with that rank.
        world_size: the number of processes that begin the job.
        timeout: how long a stalled rank may keep the others waiting in a collective, and again when they meet. Then it
            counts as dead. The end of a process is noticed at once. While the job runs, process groups that are made without
            a timeout have this one.
        host: the name of the machine, the rack or another unit of failure: copies go to another host if there is one.
            Default: this machine.
        backend: the backends of the default group. With parameters on an accelerator: gloo and the accelerator's, such as
            ``"cpu:gloo,cuda:nccl"``. Copies and recoveries go over gloo.

    Raises:
        RuntimeError: too few ranks came, or there is a default process group already.
    """

    @old_arguments(
        ranks="world_size", patience="timeout", converted={"patience": lambda seconds: timedelta(seconds=seconds)}
    )
    def __init__(
        self,
        store: Any,
        world_size: int,
        *,
        timeout: timedelta = timedelta(seconds=60),
        host: str | None = None,
        backend: str = "gloo",
    ) -> None:
        if "gloo" not in backend:
            raise ValueError(f'elastic.World: backend must have gloo, as "cpu:gloo,cuda:nccl" has, got {backend!r}')
        if dist.is_initialized():
            raise RuntimeError("elastic.World makes the default process group itself: leave out init_process_group()")
        self._store = dist.PrefixStore("flatshard/elastic", store)  # type: ignore[attr-defined]
        self.timeout, self._backend = timeout, backend
        self._socket = socket.socket()  # _epochs.py, [Note: Dead or slow]
        self._socket.bind(("", 0))
        self._socket.listen(1024)
        self._socket.setblocking(False)
        os.register_at_fork(after_in_child=self._socket.close)  # a child that lives longer is no rank
        self.epochs = Epochs(
            store, host or socket.gethostname(), self._socket.getsockname()[1], timeout.total_seconds()
        )
        self.copies_group: dist.ProcessGroup | None = None
        atexit.register(self._at_exit, os.getpid())
        first = self.epochs.meet_first(world_size)
        if self.epochs.me in first:
            self.form(0, first)
        else:
            alone = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=alone, rank=0, world_size=1)

    @property
    def joins(self) -> bool:
        """Internal: whether this process has yet to join the job."""
        return not self.epochs.members and not self.epochs.has_ended

    @property
    def rank(self) -> int:
        """The rank of this process among those that are left."""
        self._check_in()
        return self.epochs.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that are left."""
        self._check_in()
        return len(self.epochs.members) or 1

    size = OldMember("world_size")
    group = OldMember("process_group")

    def _check_in(self) -> None:
        if self.epochs.has_ended and not self.epochs.members:
            raise ExcludedError(
                f"{self.epochs.me} is not in the job, and its model was not trained to the end: end this process"
            )

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group of all ranks of this epoch."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def agree(self, note: Any) -> list[tuple[Member, Any]]:
        """Internal: agree with the other ranks on the next epoch. Return its members with their notes, by rank.

        ``note``: plain values for the other ranks, unless this process joins.

        Raises:
            ExcludedError: the others decided without this process, or had made the last step when it came.
            RuntimeError: a rank failed by an error of its own, or all ranks have died.
        """
        try:
            return self.epochs.join() if self.joins else self.epochs.meet(note)
        except ExcludedError:
            self.abort()  # from now on nothing of this process must pass for the work of a rank
            raise

    def form(self, epoch: int, members: list[Member]) -> None:
        """Internal: make the process groups of an epoch.

        Raises:
            RuntimeError: one of ``members`` died meanwhile.
        """
        self.epochs.begin(epoch, members)
        self.abort()
        dist.distributed_c10d.default_pg_timeout = self.timeout  # [Note: Groups of others]
        # [Note: New groups]
        store = dist.PrefixStore(f"{epoch}/group", self._store)  # type: ignore[attr-defined]
        dist.init_process_group(self._backend, store=store, rank=self.rank, world_size=self.world_size)
        made = dist.new_group(backend="gloo")
        assert isinstance(made, dist.ProcessGroup)
        self.copies_group = made

    def abort(self) -> None:
        """Internal: end the process groups, also the user's: all waits in them fail at once, on all ranks.

        Destroying them is not enough: as long as a group of gloo is referred to, its connections stay open.
        """
        if not dist.is_initialized():
            return
        for group in list(dist.distributed_c10d._world.pg_map):
            with contextlib.suppress(RuntimeError):  # a backend that cannot
                group.abort()  # which does nothing on gloo
            if has_gloo(group):
                interrupt(group)
        self.copies_group = None
        dist.destroy_process_group()
        dist.distributed_c10d.default_pg_timeout = _TORCHS_TIMEOUT

    def fail(self, text: str) -> None:
        """Internal: end the job on all ranks: this rank has an error of its own, which is no death."""
        self.epochs.record_failure(text)
        self.abort()

    def hang_up(self) -> None:
        """Internal: end connections of others who looked whether this process lives. The system keeps a limited number."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.accept()[0].close()

    def _at_exit(self, pid: int) -> None:
        if self.epochs.members and not self.epochs.has_ended and os.getpid() == pid:
            self.epochs.record_failure(
                "the process ended in the middle of the job, by an error outside of attempt() or by sys.exit"
            )


def is_of_communication(error: BaseException | None) -> bool:
    """Return whether a dead rank may be the cause of ``error``: it comes from a collective, a store, or a connection."""
    while error is not None:
        if isinstance(error, dist.DistError | ConnectionError):
            return True
        if type(error) is RuntimeError and ("gloo" in str(error).lower() or "connection" in str(error).lower()):
            return True
        error = error.__cause__ or error.__context__
    return False
