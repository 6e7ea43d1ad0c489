"""The ranks of a job that may die and join: who is there, agreed on at a store that outlives each of them.

[Note: Epochs]
The ranks between two changes are an *epoch*, with a process group of its own. It ends when a rank fails in a collective, or
one comes to join. All who are left meet for the next epoch: each puts an entry into the store. When every rank of the last
epoch has come, or is dead, one of them proposes those that came, by a compare-and-set, so there is one decision whoever
proposes. A rank that finds itself left out is out for good: no two groups train on. A rank that dies after the decision makes
the next group fail, and all go on to the epoch after it. So a death in a recovery is one more death.

[Note: Dead or slow]
Each rank listens at a port, and never answers. The system refuses connections to it when the process has ended, and only
then: a process that is stopped or busy still has its port. So a death is known at once, without threads or heartbeats. What
cannot be known so (a machine that lost its power, or a stopped process) is taken for dead when it has not come for
``patience`` seconds.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from flatshard._trace import logger

_START = 600.0  # seconds in which the first ranks come
_POLL = 0.02


class OutError(RuntimeError):
    """The other ranks have gone on without this one, which did not answer for too long. It can only end.

    Example::

        def run(job, train):
            try:
                for step in job.steps(range(1000)):
                    with job.attempt():
                        train(step)
            except flatshard.elastic.OutError as e:
                exit(f"{e}")  # this rank was stopped, and the others went on without it
    """


class Member(NamedTuple):
    """One process of the job."""

    number: int  # never given twice
    host: str
    pid: int
    address: tuple[str, int]

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_dead(self) -> bool:
        """Whether the process has ended. [Note: Dead or slow]"""
        try:
            socket.create_connection(self.address, timeout=0.5).close()
        except ConnectionRefusedError:
            return True
        except OSError as e:
            logger.debug("%s gives no sign: %s", self, e)
        return False


class World:
    """The ranks of a job that goes on when some die. Make it in place of ``torch.distributed.init_process_group``.

    The default process group (gloo) is always that of the ranks that are left, so ``torch.distributed.get_rank()`` and the
    like are right between steps. A process that starts when the job has begun joins it: until then it has a default group of
    itself alone. It builds its model, shards it and makes its :class:`Job` as the others did; its values are not used.

    Example::

        def main(port):  # each of four processes; their launcher has made TCPStore("localhost", port, is_master=True)
            store = dist.TCPStore("localhost", port, is_master=False)
            return flatshard.elastic.World(store, ranks=4)

    Args:
        store: of all processes. Whoever serves it must live: if it is in a rank, the job ends with that rank.
        ranks: how many processes begin the job.
        patience: seconds that a rank may keep the others waiting in a collective, and then once more when they meet, until it
            is taken for dead. A process that has ended is noticed at once.

    Raises:
        RuntimeError: too few ranks came, or a default process group exists.
    """

    def __init__(self, store: Any, ranks: int, *, patience: float = 60.0) -> None:
        if dist.is_initialized():
            raise RuntimeError("elastic.World makes the default process group itself: leave out init_process_group()")
        self._store = dist.PrefixStore("flatshard/elastic", store)  # type: ignore[attr-defined]
        self.patience = patience
        self._socket = socket.socket()
        self._socket.bind(("", 0))
        self._socket.listen(1024)
        os.register_at_fork(after_in_child=self._socket.close)  # a child that lives on is no rank
        host = socket.gethostname()
        address = "127.0.0.1" if getattr(store, "host", "localhost") in ("localhost", "127.0.0.1") else host
        number = self._store.add("processes", 1)
        self.me = Member(number, host, os.getpid(), (address, self._socket.getsockname()[1]))
        self.epoch, self.members = -1, list[Member]()
        self.copies_group: dist.ProcessGroup | None = None
        if not self._store.check(["0/decided"]):
            self._enter(0, None)
            self._wait_for_first(ranks)
            self.form(0, [member for member, _ in self._decision(0)])
        if not self.members:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]

    @property
    def joins(self) -> bool:
        """Whether this process has yet to join the job."""
        return not self.members

    @property
    def rank(self) -> int:
        return self.members.index(self.me) if self.members else 0

    @property
    def size(self) -> int:
        return len(self.members) or 1

    # -- meeting -------------------------------------------------------------------------------------------------------

    def _enter(self, epoch: int, note: Any) -> None:
        place = self._store.add(f"{epoch}/count", 1)
        self._store.set(f"{epoch}/in/{place}", pickle.dumps((self.me, note)).hex())

    def _entries(self, epoch: int, known: dict[int, tuple[Member, Any]]) -> None:
        """Read the entries that are new. One that is counted may not be there yet, or never."""
        for place in range(1, self._store.add(f"{epoch}/count", 0) + 1):
            if place not in known and self._store.check([f"{epoch}/in/{place}"]):
                known[place] = self._read(f"{epoch}/in/{place}")

    def _decision(self, epoch: int) -> list[tuple[Member, Any]]:
        return self._read(f"{epoch}/decided")  # type: ignore[no-any-return]

    def _read(self, key: str) -> Any:
        return pickle.loads(bytes.fromhex(self._store.get(key).decode()))

    def _propose(self, epoch: int, present: list[tuple[Member, Any]]) -> None:
        self._store.compare_set(f"{epoch}/decided", "", pickle.dumps(present).hex())

    def _wait_for_first(self, ranks: int) -> None:
        known: dict[int, tuple[Member, Any]] = {}
        until = time.monotonic() + _START
        while not self._store.check(["0/decided"]):
            self._entries(0, known)
            if len(known) >= ranks:
                present = sorted(each for each in known.values() if each[0] == self.me or not each[0].is_dead())
                if len(present) >= ranks:
                    self._propose(0, present[:ranks])
            if time.monotonic() > until:
                raise RuntimeError(f"elastic.World: {len(known)} of {ranks} ranks came in {_START:g} s")
            time.sleep(_POLL)

    def called(self) -> bool:
        """Whether somebody waits for the next epoch."""
        return self._store.add(f"{self.epoch + 1}/count", 0) > 0

    def fail(self, text: str) -> None:
        """This rank ends with an error of its own, which is no death: the others shall end, too."""
        with contextlib.suppress(RuntimeError):  # the store is gone: so will they
            self._store.set("failed", f"{self.me}, rank {self.rank}: {text}"[:2000])
        self.abort()

    def meet(self, note: Any) -> list[tuple[Member, Any]]:
        """Meet those who are left, and who join, for the next epoch. Returns who is in it, with their notes, by rank.

        Raises:
            OutError: the others have decided without this rank.
            RuntimeError: a rank has failed by an error of its own.
        """
        epoch = self.epoch + 1
        self._enter(epoch, note)
        self._store.set(f"{epoch}/member", "1")
        known: dict[int, tuple[Member, Any]] = {}
        until = time.monotonic() + self.patience
        while not self._store.check([f"{epoch}/decided"]):
            if self._store.check(["failed"]):
                raise RuntimeError(
                    f"the job ends, because a rank ended with an error of its own, which is no death: "
                    f"{self._store.get('failed').decode()}"
                )
            self._entries(epoch, known)
            present = sorted(known.values(), key=lambda entry: entry[0].number)
            came = {member for member, _ in present}
            missing = [m for m in self.members if m not in came]
            if self.me in came and (all(m.is_dead() for m in missing) or time.monotonic() > until):
                alive = [each for each in present if each[0] == self.me or not each[0].is_dead()]
                old = {m: i for i, m in enumerate(self.members)}
                alive.sort(key=lambda entry: (old.get(entry[0], len(old)), entry[0].number))
                self._propose(epoch, alive)
            time.sleep(_POLL)
        decided = self._decision(epoch)
        if self.me not in {member for member, _ in decided}:
            raise OutError(
                f"the other ranks have gone on without {self.me}, which was rank {self.rank} and did not come to them for "
                f"{self.patience:g} s: it was stopped, or cut off. End this process; a new one may join"
            )
        return decided

    def join(self) -> list[tuple[Member, Any]] | None:
        """Wait until the job takes this process in. Returns who is in the next epoch, or None: the job has ended."""
        tried = 0
        while not self._store.check(["finished"]) and not self._store.check(["failed"]):
            epoch = int(self._store.get("epoch")) + 1 if self._store.check(["epoch"]) else 1
            if epoch > tried:
                self._enter(epoch, None)
                tried = epoch
            if self._store.check([f"{epoch}/decided"]):
                decided = self._decision(epoch)
                if self.me in {member for member, _ in decided}:
                    self.epoch = epoch - 1
                    return decided
            time.sleep(_POLL)
        return None

    # -- groups --------------------------------------------------------------------------------------------------------

    def form(self, epoch: int, members: list[Member]) -> None:
        """Make the process groups of an epoch.

        Raises:
            RuntimeError: one of ``members`` died meanwhile.
        """
        self.epoch, self.members = epoch, members
        self._store.set("epoch", str(epoch))
        self._store.set(f"{epoch}/ready/{self.me.number}", "1")
        waits = list(members)
        until = time.monotonic() + self.patience
        while waits := [m for m in waits if not self._store.check([f"{epoch}/ready/{m.number}"])]:
            if any(m.is_dead() for m in waits) or time.monotonic() > until:
                raise dist.DistError(f"{waits[0]} died when a group was made")
            time.sleep(_POLL / 4)
        self.abort()
        timeout = timedelta(seconds=self.patience)
        store = dist.PrefixStore(f"{epoch}/group", self._store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        made = dist.new_group(timeout=timeout, backend="gloo")
        assert isinstance(made, dist.ProcessGroup)
        self.copies_group = made

    def abort(self) -> None:
        """End the process groups: whoever waits in them fails at once."""
        if not dist.is_initialized():
            return
        for group in (self.copies_group, dist.group.WORLD):
            if group is not None:
                with contextlib.suppress(RuntimeError):  # a backend that cannot
                    group.abort()
        self.copies_group = None
        dist.destroy_process_group()

    @property
    def group(self) -> dist.ProcessGroup:
        """Of all ranks of this epoch."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def finish(self) -> bool:
        """Wait until all ranks have made their last step. False: one has died, or failed, so the others meet again."""
        epoch = self.epoch
        self._store.set(f"{epoch}/done/{self.me.number}", "1")
        while True:
            waits = [m for m in self.members if not self._store.check([f"{epoch}/done/{m.number}"])]
            if not waits:
                self._store.set("finished", "1")
                return True
            if self._store.check([f"{epoch + 1}/member"]) or any(m.is_dead() for m in waits):
                return False
            time.sleep(_POLL)


def is_of_communication(error: BaseException | None) -> bool:
    """Whether ``error`` may come of a rank that died: of a collective, a store, or a connection."""
    while error is not None:
        if isinstance(error, dist.DistError | ConnectionError):
            return True
        if type(error) is RuntimeError and ("gloo" in str(error).lower() or "connection" in str(error).lower()):
            return True
        error = error.__cause__ or error.__context__
    return False
