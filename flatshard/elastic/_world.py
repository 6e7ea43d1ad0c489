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
``patience`` seconds. A process that ends in the middle of the job because of an error of its own, or by ``sys.exit``, says
so at the store, and the job ends on all ranks. Only what can say nothing (a signal, a machine that is gone) is a death.

[Note: New groups]
Each epoch has new process groups. torch 2.15 can give a group of gloo other ranks (``enable_reconfigure``), by calls that are
private and experimental. They need the same meeting: ranks must agree on handles first. And runtimes, meshes, and torch's own
tables remember the rank and the size of a group. Of a group that has ended they are gone with it; in one that has changed
they would be wrong. A new group of gloo takes milliseconds, so there is nothing to win.

[Note: Groups of others]
Ranks wait in groups that a world does not make, too: those of a mesh, of the user, of a library. A stopped process ends no
connection, so only a group's timeout ends a wait for it. Torch takes 30 minutes where none is given. A timeout that is set
later does not reach waits for single messages over gloo. As long as a world has groups, torch takes ``patience`` where none
is given.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from flatshard._comm.backends import has_gloo
from flatshard._comm.monitor.messages import interrupt
from flatshard._trace import logger
from flatshard.elastic import _wire

_START = 600.0  # seconds in which the first ranks come
_POLL = 0.02
_PROBE = 0.1  # seconds between two looks at whether a process lives
_TORCHS_TIMEOUT = dist.distributed_c10d.default_pg_timeout


class OutError(RuntimeError):
    """This process is not in the job, and its model was not trained to the end. It can only end.

    The other ranks have gone on without it, as it did not answer for too long; or they had made the last step when it came.
    Ask such a process for its rank, and this is raised again. It has no process group any more.

    Example::

        def run(job, train):
            try:
                for step in job.steps(range(1000)):
                    with job.attempt():
                        train(step)
            except flatshard.elastic.OutError as e:
                exit(f"{e}")  # it was stopped, and the others went on; or it came too late
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


class _Probes:
    """Looks at which processes have ended, not too often: each look is a connection that the other side keeps."""

    def __init__(self) -> None:
        self._dead: set[Member] = set()
        self._next = 0.0  # when to look again

    def dead(self, members: Iterable[Member]) -> set[Member]:
        """Those of ``members`` that have ended, as far as is known."""
        members = set(members)
        if time.monotonic() >= self._next:
            self._dead |= {member for member in members if member not in self._dead and member.is_dead()}
            self._next = time.monotonic() + _PROBE
        return self._dead.intersection(members)


class World:
    """The ranks of a job that goes on when some die. Make it in place of ``torch.distributed.init_process_group``.

    The default process group (gloo) is always that of the ranks that are left, so ``torch.distributed.get_rank()`` and the
    like are right between steps. A process that starts when the job has begun joins it: until then it has a default group of
    itself alone. It builds its model, shards it and makes its :class:`Job` as the others did; its values are not used. If it
    comes after the last step, the loop raises :class:`OutError`, and no code behind the loop runs.

    Example::

        def main(port):  # each of four processes; their launcher has made TCPStore("localhost", port, is_master=True)
            store = dist.TCPStore("localhost", port, is_master=False)
            return flatshard.elastic.World(store, ranks=4)

    Args:
        store: of all processes. Whoever serves it must live: if it is in a rank, the job ends with that rank.
        ranks: how many processes begin the job.
        patience: seconds that a rank may keep the others waiting in a collective, and then once more when they meet, until it
            is taken for dead. A process that has ended is noticed at once. It is the timeout of all process groups that
            are made without one as long as the job runs.
        host: the name of what dies as a whole, such as a machine or a rack: copies go to another one where there is one.
            Default: this machine.
        backend: of the default group. With parameters on an accelerator gloo's and the accelerator's, such as
            ``"cpu:gloo,cuda:nccl"``: copies and recoveries go over gloo.

    Raises:
        RuntimeError: too few ranks came, or a default process group exists.
    """

    def __init__(
        self, store: Any, ranks: int, *, patience: float = 60.0, host: str | None = None, backend: str = "gloo"
    ) -> None:
        if "gloo" not in backend:
            raise ValueError(f'elastic.World: backend must have gloo, as "cpu:gloo,cuda:nccl" has, got {backend!r}')
        if dist.is_initialized():
            raise RuntimeError("elastic.World makes the default process group itself: leave out init_process_group()")
        self._store = dist.PrefixStore("flatshard/elastic", store)  # type: ignore[attr-defined]
        self.patience, self._backend = patience, backend
        self._socket = socket.socket()
        self._socket.bind(("", 0))
        self._socket.listen(1024)
        self._socket.setblocking(False)
        os.register_at_fork(after_in_child=self._socket.close)  # a child that lives on is no rank
        number = self._store.add("processes", 1)
        address = _address_towards(store), self._socket.getsockname()[1]
        self.me = Member(number, host or socket.gethostname(), os.getpid(), address)
        self.epoch, self.members = -1, list[Member]()
        self.copies_group: dist.ProcessGroup | None = None
        self.has_ended = False  # this rank is in the job no more
        atexit.register(self._at_exit, os.getpid())
        if not self._store.check(["0/decided"]):
            self._enter(0, None)
            self._wait_for_first(ranks)
            first = [member for member, _ in self._decision(0)]
            if self.me in first:  # more than that may have come
                self.form(0, first)
        if not self.members:
            alone = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=alone, rank=0, world_size=1)

    @property
    def joins(self) -> bool:
        """Whether this process has yet to join the job."""
        return not self.members and not self.has_ended

    @property
    def rank(self) -> int:
        self._check_in()
        return self.members.index(self.me) if self.members else 0

    @property
    def size(self) -> int:
        self._check_in()
        return len(self.members) or 1

    def _check_in(self) -> None:
        if self.has_ended and not self.members:
            raise OutError(f"{self.me} is not in the job, and its model was not trained to the end: end this process")

    def _out(self, why: str) -> OutError:
        """End this process's part in the job: whatever it does from now on must not pass for what a rank does."""
        self.abort()
        self.has_ended, self.members = True, []
        return OutError(f"{why}. End this process")

    # -- meeting -------------------------------------------------------------------------------------------------------

    def _enter(self, epoch: int, note: Any) -> None:
        place = self._store.add(f"{epoch}/count", 1)
        self._store.set(f"{epoch}/in/{place}", _wire.encoded((self.me, note)))

    def _entries(self, epoch: int, known: dict[int, tuple[Member, Any]]) -> None:
        """Read the entries that are new. One that is counted may not be there yet, or never."""
        for place in range(1, self._store.add(f"{epoch}/count", 0) + 1):
            if place not in known and self._store.check([f"{epoch}/in/{place}"]):
                known[place] = _entry(self._read(f"{epoch}/in/{place}"))

    def _decision(self, epoch: int) -> list[tuple[Member, Any]]:
        return [_entry(told) for told in self._read(f"{epoch}/decided")]

    def _read(self, key: str) -> Any:
        return _wire.decoded(self._store.get(key))

    def _propose(self, epoch: int, present: list[tuple[Member, Any]]) -> None:
        self._store.compare_set(f"{epoch}/decided", "", _wire.encoded(present))

    def _wait_for_first(self, ranks: int) -> None:
        known: dict[int, tuple[Member, Any]] = {}
        until, probes = time.monotonic() + _START, _Probes()
        while not self._store.check(["0/decided"]):
            self._entries(0, known)
            if len(known) >= ranks:
                gone = probes.dead(member for member, _ in known.values() if member != self.me)
                present = sorted(each for each in known.values() if each[0] not in gone)
                if len(present) >= ranks:
                    self._propose(0, present[:ranks])
            if time.monotonic() > until:
                refuse = ", ".join(map(str, sorted(probes.dead(member for member, _ in known.values()))))
                raise RuntimeError(
                    f"elastic.World: {len(known)} of {ranks} ranks came in {_START:g} s"
                    + f", of which {refuse} refuse connections: they died, or a firewall refuses" * bool(refuse)
                )
            time.sleep(_POLL)

    def called(self) -> bool:
        """Whether somebody waits for the next epoch."""
        return self._store.add(f"{self.epoch + 1}/count", 0) > 0

    def fail(self, text: str) -> None:
        """This rank ends with an error of its own, which is no death: the others shall end, too."""
        self.say_failed(text)
        self.abort()

    def say_failed(self, text: str) -> None:
        """Who waits to join shall know."""
        self.has_ended = True
        with contextlib.suppress(RuntimeError):  # the store is gone: so will they
            self._store.compare_set("failed", "", f"{self.me}, rank {self.rank}: {text}"[:2000])

    def _at_exit(self, pid: int) -> None:
        if self.members and not self.has_ended and os.getpid() == pid:
            self.say_failed(
                "the process ended in the middle of the job, by an error outside of attempt() or by sys.exit"
            )

    def _check_failed(self) -> None:
        if self._store.check(["failed"]):
            self.has_ended = True
            raise RuntimeError(
                f"the job ends, because a rank ended with an error of its own, which is no death: "
                f"{self._store.get('failed').decode()}"
            )

    def leave(self, step: int) -> None:
        """This rank has left the loop after ``step`` steps, as all are to."""
        self.has_ended = True
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self.epoch}/left/{self.me.number}", str(step))
            self._store.set("finished", "1")

    def _check_left(self, missing: Iterable[Member]) -> None:
        for member in missing:
            if self._store.check([key := f"{self.epoch}/left/{member.number}"]):
                steps = self._store.get(key).decode()
                text = (
                    f"rank {self.members.index(member)}, {member}, left the loop after {steps} steps, by break or by an "
                    "error outside of attempt(), and others did not. To end a job early, call job.stop() on all ranks in the "
                    "same step"
                )
                self.fail(text)
                raise RuntimeError(text)

    def meet(self, note: Any) -> list[tuple[Member, Any]]:
        """Meet those who are left, and who join, for the next epoch. Returns who is in it, with their notes, by rank.

        ``note``: plain values. None: this rank joins.

        Raises:
            OutError: the others have decided without this rank.
            RuntimeError: a rank has failed by an error of its own.
        """
        with self._asked():
            return self._meet(self.epoch + 1, note)

    def _meet(self, epoch: int, note: Any) -> list[tuple[Member, Any]]:
        self._enter(epoch, note)
        self._store.set(f"{epoch}/member", "1")
        known: dict[int, tuple[Member, Any]] = {}
        until, probes = time.monotonic() + self.patience, _Probes()
        old = {member: rank for rank, member in enumerate(self.members)}
        while not self._store.check([f"{epoch}/decided"]):
            self._check_failed()
            self._entries(epoch, known)
            present = {member for member, _ in known.values()}
            missing = [member for member in self.members if member not in present]
            self._check_left(missing)
            gone = probes.dead({*present, *missing} - {self.me})
            if self.me in present and (gone.issuperset(missing) or time.monotonic() > until):
                alive = [each for each in known.values() if each[0] not in gone]
                alive.sort(key=lambda entry: (old.get(entry[0], len(old)), entry[0].number))
                self._propose(epoch, alive)
            time.sleep(_POLL)
        decided = self._decision(epoch)
        if self.me not in {member for member, _ in decided}:
            raise self._out(
                f"the other ranks have gone on without {self.me}, which was rank {self.rank} and did not come to them for "
                f"{self.patience:g} s: it was stopped, or cut off. A new process may join"
            )
        return decided

    def join(self) -> list[tuple[Member, Any]]:
        """Wait until the job takes this process in. Returns who is in the next epoch.

        Raises:
            OutError: the job has ended.
            RuntimeError: the job has failed, or all its ranks have died.
        """
        with self._asked():
            epoch, last, tried, probes = 1, self._decision(0), 0, _Probes()
            while not self._store.check(["finished"]):
                self._check_failed()
                while self._store.check([f"{epoch}/decided"]):
                    last = self._decision(epoch)
                    if self.me in {member for member, _ in last}:
                        self.epoch = epoch - 1
                        return last
                    epoch += 1
                if epoch > tried:
                    self._enter(epoch, None)
                    tried = epoch
                if len(probes.dead(member for member, _ in last)) == len(last):
                    self.has_ended = True
                    raise RuntimeError(
                        "elastic.World: this process came to join a job of which no rank is left: start the job anew, with a "
                        "new store"
                    )
                time.sleep(_POLL)
            raise self._out(f"the job had made its last step when {self.me} came to join it, and did not take it in")

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """Context in which only the store is asked."""
        try:
            yield
        except dist.DistError as e:
            self.has_ended = True
            raise RuntimeError(
                f"elastic.World: the store does not answer, and without it ranks cannot agree on who is left: {e}. Keep it "
                "in a process that outlives the ranks, such as the launcher"
            ) from e

    # -- groups --------------------------------------------------------------------------------------------------------

    def form(self, epoch: int, members: list[Member]) -> None:
        """Make the process groups of an epoch.

        Raises:
            RuntimeError: one of ``members`` died meanwhile.
        """
        self.epoch, self.members = epoch, members
        self._mark(epoch, "ready")
        until, probes = time.monotonic() + self.patience, _Probes()
        self._probes = probes
        while self._store.add(f"{epoch}/ready", 0) < len(members):
            if (gone := probes.dead(members)) and (waits := gone.intersection(self._unmarked(epoch, "ready"))):
                raise dist.DistError(f"{min(waits)} died when a group was made")
            if time.monotonic() > until:
                raise dist.DistError(f"{self._unmarked(epoch, 'ready')[0]} did not come when a group was made")
            time.sleep(_POLL / 4)
        self.abort()
        dist.distributed_c10d.default_pg_timeout = timedelta(seconds=self.patience)  # [Note: Groups of others]
        # [Note: New groups]
        store = dist.PrefixStore(f"{epoch}/group", self._store)  # type: ignore[attr-defined]
        dist.init_process_group(self._backend, store=store, rank=self.rank, world_size=self.size)
        made = dist.new_group(backend="gloo")
        assert isinstance(made, dist.ProcessGroup)
        self.copies_group = made

    def hang_up(self) -> None:
        """End the connections of those that looked whether this process lives: the system keeps so many only."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.accept()[0].close()

    def check_alive(self, ranks: Iterable[int]) -> None:
        """Raise DistError if one of ``ranks`` has died."""
        if gone := self._probes.dead(self.members[rank] for rank in ranks):
            raise dist.DistError(f"{min(gone)} has died")

    def _mark(self, epoch: int, what: str) -> None:
        self._store.set(f"{epoch}/{what}/{self.me.number}", "1")
        self._store.add(f"{epoch}/{what}", 1)

    def _unmarked(self, epoch: int, what: str) -> list[Member]:
        return [m for m in self.members if not self._store.check([f"{epoch}/{what}/{m.number}"])]

    def abort(self) -> None:
        """End the process groups, also those of the user: whoever waits in them fails at once, on all ranks.

        Destroying them is not enough: as long as somebody refers to a group of gloo, its connections stay open.
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

    @property
    def group(self) -> dist.ProcessGroup:
        """Of all ranks of this epoch."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def finish(self) -> bool:
        """Wait until all ranks have made their last step. False: one has died, failed or been stopped; the others meet again.

        A compare-and-set says which of both, so a rank that wakes cannot end alone.
        """
        with self._asked():
            return self._finish()

    def _finish(self) -> bool:
        epoch, probes, until = self.epoch, _Probes(), time.monotonic() + self.patience
        self._mark(epoch, "done")
        while not (are_done := self._store.add(f"{epoch}/done", 0) == self.size):
            gone = probes.dead(self.members)  # who is done may have ended
            if self._store.check([f"{epoch + 1}/member"]) or self._store.check(["failed"]):
                break
            if time.monotonic() > until or gone.intersection(self._unmarked(epoch, "done")):
                break
            time.sleep(_POLL)
        self.has_ended = self._store.compare_set(f"{epoch}/end", "", "done" if are_done else "again") == b"done"
        if self.has_ended:
            self._store.set("finished", "1")
        return self.has_ended


def _entry(told: Any) -> tuple[Member, Any]:
    """Read a process that has come, and its note."""
    member, note = told
    return Member(*member), note


def _address_towards(store: Any) -> str:
    """The address of this machine under which those who use ``store`` find it."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    host, port = getattr(store, "host", "localhost"), getattr(store, "port", 0)
    try:
        with socket.socket(socket.getaddrinfo(host, port)[0][0], socket.SOCK_DGRAM) as towards:
            towards.connect((host, port or 1))  # sends nothing
            address = str(towards.getsockname()[0])
    except OSError:
        return socket.gethostname()
    is_own = address.startswith("127.") or address == "::1"
    return socket.gethostname() if is_own and host not in ("localhost", "127.0.0.1", "::1") else address


def is_of_communication(error: BaseException | None) -> bool:
    """Whether ``error`` may come of a rank that died: of a collective, a store, or a connection."""
    while error is not None:
        if isinstance(error, dist.DistError | ConnectionError):
            return True
        if type(error) is RuntimeError and ("gloo" in str(error).lower() or "connection" in str(error).lower()):
            return True
        error = error.__cause__ or error.__context__
    return False
