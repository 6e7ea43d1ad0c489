"""The processes of a job that may die and join: they agree at a store, which outlives each of them, on who is in the job.

[Note: Epochs]
An *epoch* is the time between two changes of the ranks; it has process groups of its own. It ends when a rank fails in a
collective, or a process comes to join. All ranks that are left meet for the next epoch: each puts an entry into the store.
When every rank of the last epoch has come or is dead, some rank proposes those that came, by a compare-and-set. So there is
one decision, whoever proposes. A rank that is not in the decision is out for good: no two groups train. If a rank dies after
the decision, the next group fails, and the others meet for the epoch after it. So a death in a recovery is one more death.

[Note: Dead or slow]
Each rank listens at a port, and never answers. The system refuses connections to the port when the process has ended, and
only then: a process that is stopped or busy still has its port. So a death is known at once, without threads or heartbeats.
Other failures, such as a machine without power or a stopped process, count as deaths after the world's timeout. A process
that ends in the middle of the job by its own error, or by ``sys.exit``, writes so to the store, and the job ends on all
ranks. Only a process that can write nothing, after a signal or on a lost machine, has died.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from flatshard._base.trace import logger
from flatshard._comm.rendezvous import Rendezvous, polls

_START = 600.0  # seconds in which the first ranks come
_PAUSE = 0.02  # seconds between two looks at the store, at most
_PROBE = 0.1  # seconds between two looks at whether a process lives


class ExcludedError(RuntimeError):
    """This process is not in the job, its model is not trained to the end, and it must end.

    It did not answer for too long, and the other ranks continued without it; or it came when they had made the last step. It
    has no process group any more, and asking for its rank raises this error again.

    Example::

        def run(job, train):
            try:
                for step in job.steps(range(1000)):
                    with job.attempt():
                        train(step)
            except flatshard.elastic.ExcludedError as e:
                exit(f"{e}")  # it was stopped, and the others continued; or it came too late
    """


class Member(NamedTuple):
    """A process of the job."""

    number: int  # never given twice
    host: str
    pid: int
    address: tuple[str, int]

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_dead(self) -> bool:
        """Return whether the process has ended. [Note: Dead or slow]"""
        try:
            socket.create_connection(self.address, timeout=0.5).close()
        except ConnectionRefusedError:
            return True
        except OSError as e:
            logger.debug("%s gives no sign: %s", self, e)
        return False


class _Probes:
    """The dead processes, as far as known. It looks at intervals: each look is a connection that the other side keeps."""

    def __init__(self) -> None:
        self._dead: set[Member] = set()
        self._next = 0.0  # the time of the next look

    def dead(self, members: Iterable[Member]) -> set[Member]:
        """Return the members that are known to have ended."""
        members = set(members)
        if time.monotonic() >= self._next:
            self._dead |= {member for member in members if member not in self._dead and member.is_dead()}
            self._next = time.monotonic() + _PROBE
        return self._dead.intersection(members)


class Epochs:
    """The current epoch, and the way to the next one. [Note: Epochs]

    Args:
        store: the store of all processes.
        host: the name of this process's host.
        port: the port at which this process listens.
        patience: seconds after which a process that has not come counts as dead.
    """

    def __init__(self, store: Any, host: str, port: int, patience: float) -> None:
        self._keys, self._patience = Rendezvous(store, "flatshard/elastic/"), patience
        self.me = Member(self._keys.add("processes", 1), host, os.getpid(), (_address_towards(store), port))
        self.number, self.members = -1, list[Member]()
        self.has_ended = False  # this process is in the job no more
        self._probes = _Probes()

    @property
    def rank(self) -> int:
        """This process's rank: 0 if it has yet to join."""
        return self.members.index(self.me) if self.members else 0

    # -- meeting -------------------------------------------------------------------------------------------------------

    def meet_first(self, ranks: int) -> list[Member]:
        """Wait for the first ``ranks`` processes. Return the members of the first epoch: this process may come too late.

        Raises:
            RuntimeError: too few came.
        """
        if self._decision(0) is None:
            self._enter(0, None)
            self._await_first(ranks)
        return [member for member, _ in self._decision(0) or ()]

    def _await_first(self, ranks: int) -> None:
        known: dict[int, tuple[Member, Any]] = {}
        probes = _Probes()
        for _ in polls(_START, longest=_PAUSE):
            if self._keys.has("0/decided"):
                return
            self._read_entries(0, known)
            if len(known) >= ranks:
                gone = probes.dead(member for member, _ in known.values() if member != self.me)
                present = sorted(each for each in known.values() if each[0] not in gone)
                if len(present) >= ranks:
                    self._propose(0, present[:ranks])
        refuse = ", ".join(map(str, sorted(probes.dead(member for member, _ in known.values()))))
        raise RuntimeError(
            f"elastic.World: {len(known)} of {ranks} ranks came in {_START:g} s"
            + f", of which {refuse} refuse connections: they died, or a firewall refuses" * bool(refuse)
        )

    def meet(self, note: Any) -> list[tuple[Member, Any]]:
        """Meet the ranks that are left, and processes that join. Return the members of the next epoch with their notes.

        ``note``: plain values, or None for a process that joins.

        Raises:
            ExcludedError: the others decided without this rank.
            RuntimeError: a rank failed by an error of its own.
        """
        epoch = self.number + 1
        with self._explained():
            self._enter(epoch, note)
            self._keys.put(f"{epoch}/member", 1)
            decided = self._await_decision(epoch)
        if self.me not in {member for member, _ in decided}:
            rank, self.has_ended, self.members = self.rank, True, []
            raise ExcludedError(
                f"the other ranks have continued without {self.me}, which was rank {rank} and did not come to them for "
                f"{self._patience:g} s: it was stopped, or cut off. A new process may join. End this process"
            )
        return decided

    def _await_decision(self, epoch: int) -> list[tuple[Member, Any]]:
        known: dict[int, tuple[Member, Any]] = {}
        probes, old = _Probes(), {member: rank for rank, member in enumerate(self.members)}
        for waited in polls(longest=_PAUSE):
            if (decided := self._decision(epoch)) is not None:
                return decided
            self._check_failed()
            self._read_entries(epoch, known)
            present = {member for member, _ in known.values()}
            missing = [member for member in self.members if member not in present]
            self._check_left(missing)
            gone = probes.dead({*present, *missing} - {self.me})
            if self.me in present and (gone.issuperset(missing) or waited > self._patience):
                alive = [each for each in known.values() if each[0] not in gone]
                alive.sort(key=lambda entry: (old.get(entry[0], len(old)), entry[0].number))
                self._propose(epoch, alive)
        raise AssertionError("polls without a limit do not end")

    def join(self) -> list[tuple[Member, Any]]:
        """Wait until the job lets this process join. Return the members of the next epoch with their notes.

        Raises:
            ExcludedError: the job has ended.
            RuntimeError: the job has failed, or all its ranks have died.
        """
        epoch, tried, probes = 1, 0, _Probes()
        with self._explained():
            last = self._decision(0) or []
            for _ in polls(longest=_PAUSE):
                if self._keys.has("finished"):
                    break
                self._check_failed()
                while (decided := self._decision(epoch)) is not None:
                    last = decided
                    if self.me in {member for member, _ in last}:
                        self.number = epoch - 1
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
        self.has_ended = True
        raise ExcludedError(f"the job had made its last step when {self.me} came to join it. End this process")

    def begin(self, epoch: int, members: list[Member]) -> None:
        """Begin an epoch, and wait until all its members do.

        Raises:
            DistError: a member died meanwhile.
        """
        self.number, self.members = epoch, members
        self._probes = _Probes()
        self._mark("ready")
        for waited in polls(longest=_PAUSE):
            if self._keys.count(f"{epoch}/ready") >= len(members):
                return
            if (gone := self._probes.dead(members)) and (late := gone.intersection(self._unmarked("ready"))):
                raise dist.DistError(f"{min(late)} died when a group was made")
            if waited > self._patience:
                raise dist.DistError(f"{self._unmarked('ready')[0]} did not come when a group was made")

    def is_called(self) -> bool:
        """Return whether some process waits for the next epoch."""
        return self._keys.count(f"{self.number + 1}/count") > 0

    def check_alive(self, ranks: Iterable[int]) -> None:
        """Raise DistError if one of ``ranks`` has died."""
        if gone := self._probes.dead(self.members[rank] for rank in ranks):
            raise dist.DistError(f"{min(gone)} has died")

    # -- ends ----------------------------------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Wait until all ranks have made their last step. Return False if one died, failed or was stopped: the others meet.

        A compare-and-set decides between the two, so a rank that wakes cannot end alone.
        """
        epoch, probes = self.number, _Probes()
        with self._explained():
            self._mark("done")
            for waited in polls(longest=_PAUSE):
                are_done = self._keys.count(f"{epoch}/done") == len(self.members)
                if are_done or waited > self._patience:
                    break
                gone = probes.dead(self.members)  # a member that is done may have ended
                if self._keys.has(f"{epoch + 1}/member") or self._keys.has("failed"):
                    break
                if gone.intersection(self._unmarked("done")):
                    break
            self.has_ended = self._keys.propose(f"{epoch}/end", "done" if are_done else "again") == "done"
            if self.has_ended:
                self._keys.put("finished", 1)
        return self.has_ended

    def leave(self, step: int) -> None:
        """Record that this rank left the loop after ``step`` steps, as all ranks must."""
        self.has_ended = True
        with contextlib.suppress(RuntimeError):
            self._keys.put(f"{self.number}/left/{self.me.number}", step)
            self._keys.put("finished", 1)

    def _check_left(self, missing: Iterable[Member]) -> None:
        for member in missing:
            if (steps := self._keys.read(f"{self.number}/left/{member.number}")) is not None:
                text = (
                    f"rank {self.members.index(member)}, {member}, left the loop after {steps} steps, by break or by an "
                    "error outside of attempt(), and others did not. To end a job early, call job.stop() on all ranks in the "
                    "same step"
                )
                self.record_failure(text)
                raise RuntimeError(text)

    def record_failure(self, text: str) -> None:
        """Record an error of this rank, so that all ranks end, and joining processes stop waiting."""
        self.has_ended = True
        if self.members:
            with contextlib.suppress(RuntimeError):  # the store is gone: the others fail, too
                self._keys.propose("failed", f"{self.me}, rank {self.rank}: {text}"[:2000])

    def _check_failed(self) -> None:
        if (text := self._keys.read("failed")) is not None:
            self.has_ended = True
            raise RuntimeError(
                f"the job ends, because a rank ended with an error of its own, which is no death: {text}"
            )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Context that explains why requests to the store fail."""
        try:
            yield
        except dist.DistError as e:
            self.has_ended = True
            raise RuntimeError(
                f"elastic.World: the store does not answer, and without it ranks cannot agree on who is left: {e}. Keep it "
                "in a process that outlives the ranks, such as the launcher"
            ) from e

    # -- keys ----------------------------------------------------------------------------------------------------------

    def _enter(self, epoch: int, note: Any) -> None:
        place = self._keys.add(f"{epoch}/count", 1)
        self._keys.put(f"{epoch}/in/{place}", (self.me, note))

    def _read_entries(self, epoch: int, known: dict[int, tuple[Member, Any]]) -> None:
        """Add the new entries to ``known``. An entry that is counted may come later, or never."""
        for place in range(1, self._keys.count(f"{epoch}/count") + 1):
            if place not in known and (found := self._keys.read(f"{epoch}/in/{place}")) is not None:
                known[place] = _entry(found)

    def _decision(self, epoch: int) -> list[tuple[Member, Any]] | None:
        found = self._keys.read(f"{epoch}/decided")
        return None if found is None else [_entry(each) for each in found]

    def _propose(self, epoch: int, present: list[tuple[Member, Any]]) -> None:
        self._keys.propose(f"{epoch}/decided", present)

    def _mark(self, what: str) -> None:
        self._keys.put(f"{self.number}/{what}/{self.me.number}", 1)
        self._keys.add(f"{self.number}/{what}", 1)

    def _unmarked(self, what: str) -> list[Member]:
        return [m for m in self.members if not self._keys.has(f"{self.number}/{what}/{m.number}")]


def _entry(found: Any) -> tuple[Member, Any]:
    """Return a process that has come, with its note."""
    member, note = found
    return Member(*member), note


def _address_towards(store: Any) -> str:
    """Return this machine's address for the processes that use ``store``."""
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
