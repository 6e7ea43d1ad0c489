"""Runs the tests in lanes side by side: this process, and forks of it. Nothing else about a run changes.

The ranks of a pool wait for each other, and a test without ranks uses one core. With one lane more than there are cores, the
cores are always busy. All lanes take chunks of tests from the same list, this process from its front and the forks from its
back, until they meet; each has pools of its own. A fork sends what it has to report, and pytest hears it here as if the test
had run here: dots, failures, durations, ``-x``, ``--lf``, ``--junitxml`` and the exit status are pytest's own.

A run takes one lane if it is small, if pytest would talk to the user meanwhile (``--pdb``, ``-s``), where a process that has
looked at a GPU must not fork, and with ``--lanes 1``.

If a fork dies, the test that it was in has failed, with the fork's last output, and this process runs what was not run.
If this process ends in any way, so do the forks.
"""

import contextlib
import fcntl
import itertools
import mmap
import os
import pickle
import queue
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import pytest
from pool import share_start

ENOUGH = 300
"""Tests that a run must have for more than one lane: each starts pools of its own, which takes some seconds."""
CHUNK = 12
"""Tests of one file that a lane takes at a time."""
PATIENCE = 10.0
"""Seconds that a fork has to end once it was told to."""


def run(session: pytest.Session) -> bool:
    """Runs all tests of the session in lanes, as ``pytest_runtestloop`` does. False: one lane is enough for them."""
    if not _is_for_lanes(session):
        return False
    chunks = _chunks(session.items)
    with tempfile.TemporaryFile() as lock:
        ends = Ends(len(chunks), lock)
        forks: list[Fork] = []
        try:
            if any("pool" in item.fixturenames for item in session.items):
                share_start()
            for _ in range(session.config.option.lanes - 1):
                forks.append(Fork(session, chunks, ends, forks))
            for fork in forks:  # not before all are there: a process with threads should not fork
                fork.listen()
            own: set[str] = set()
            for item, following in _take(chunks, ends.take_first):
                own.add(item.nodeid)
                _run_one(session, item, following)
                for fork in forks:
                    fork.hear(session)
            for fork in forks:
                fork.hear(session, to_its_end=True)
            ended = own.union(*(fork.ended for fork in forks))
            left = [item for item in session.items if item.nodeid not in ended]
            for item, following in itertools.zip_longest(left, left[1:]):
                _run_one(session, item, following)
        finally:
            for fork in forks:
                fork.close()
    return True


def _is_for_lanes(session: pytest.Session) -> bool:
    option = session.config.option
    return (
        option.lanes > 1
        and len(session.items) >= ENOUGH
        and not session.testsfailed  # while collecting
        and not (option.collectonly or option.usepdb or option.trace or option.capture == "no")
        and not any(getattr(option, name, None) for name in ("setupshow", "setuponly", "setupplan", "stepwise"))
        and sys.platform == "linux"
        and len(os.sched_getaffinity(0)) > 1
        and not _has_a_gpu()
        and threading.active_count() == 1  # what another thread holds, a fork holds forever
    )


def _has_a_gpu() -> bool:
    torch = sys.modules.get("torch")  # not imported for this: tests may have no use for it
    return torch is not None and torch.cuda.is_available()


def _chunks(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """Chunks of one file each, and whole files where something is made once a file.

    Large ones come first: a lane that began with one of them last would leave the other without work. Else in their order.
    """
    chunks: list[list[pytest.Item]] = []
    for item in items:
        same_file = chunks and chunks[-1][0].path == item.path
        if same_file and (len(chunks[-1]) < CHUNK or _shares(item)):
            chunks[-1].append(item)
        else:
            chunks.append([item])
    return sorted(chunks, key=lambda chunk: len(chunk) <= CHUNK)


def _shares(item: pytest.Item) -> bool:
    """Whether the test uses a fixture that lives for several tests, but not for all."""
    fixtures = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
    return any(f.scope not in ("function", "session") for found in fixtures for f in found)


class Ends:
    """How many chunks are taken from the front and from the back of the list, by any process."""

    _TAKEN = struct.Struct("qq")

    def __init__(self, count: int, lock: IO[bytes]) -> None:
        self._count = count
        self._lock = lock
        self._memory = mmap.mmap(-1, self._TAKEN.size)  # shared with forks

    def take_first(self) -> int | None:
        return self._take(1, 0)

    def take_last(self) -> int | None:
        return self._take(0, 1)

    def _take(self, first: int, last: int) -> int | None:
        fcntl.lockf(self._lock, fcntl.LOCK_EX)  # of this process, and given back if it dies
        try:
            front, back = self._TAKEN.unpack_from(self._memory)
            if front + back == self._count:
                return None
            self._TAKEN.pack_into(self._memory, 0, front + first, back + last)
            return front if first else self._count - 1 - back
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)


def _take(
    chunks: list[list[pytest.Item]], take: Callable[[], int | None]
) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """The tests of a lane, each with the one after it, whose fixtures stay."""
    taken = take()
    while taken is not None:
        chunk = chunks[taken]
        yield from itertools.pairwise(chunk)
        taken = take()
        yield chunk[-1], None if taken is None else chunks[taken][0]


def _run_one(session: pytest.Session, item: pytest.Item, following: pytest.Item | None) -> None:
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    _stop_if_told(session)


def _stop_if_told(session: pytest.Session) -> None:
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


# -- The fork --------------------------------------------------------------------------------------------------------


class Fork:
    """Another lane, as the first one sees it."""

    def __init__(
        self, session: pytest.Session, chunks: list[list[pytest.Item]], ends: Ends, others: Sequence["Fork"]
    ) -> None:
        self.ended: set[str] = set()
        """The tests that it ran to their end."""
        self._under_way: tuple[str, Any] | None = None
        self._is_done = False
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._items = {item.nodeid: item for item in session.items}
        self._messages: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # there is one thread, but torch's own C++ ones
            self._pid = os.fork()
        if self._pid == 0:
            os.close(read)
            for other in others:  # else another fork could still write once the first lane is gone
                other._pipe.close()
            _be_the_fork(session, chunks, ends, os.fdopen(write, "wb"), self._output)
        os.close(write)
        self._pipe = os.fdopen(read, "rb")

    def listen(self) -> None:
        """Take in what the fork reports, to be heard later."""
        threading.Thread(target=self._read, args=(self._pipe,), daemon=True).start()

    def _read(self, pipe: IO[bytes]) -> None:
        """On a thread, so that the fork never waits for this process."""
        with pipe, contextlib.suppress(EOFError, pickle.UnpicklingError):  # it died, maybe while it wrote
            while True:
                self._messages.put(pickle.load(pipe))
        self._messages.put(None)

    def hear(self, session: pytest.Session, to_its_end: bool = False) -> None:
        """Report what the fork has reported."""
        while to_its_end or not self._messages.empty():
            message = self._messages.get()
            if message is None:
                self._messages.put(None)  # for the next time
                if not self._is_done:
                    self._report_death(session)
                return
            self._replay(session, *message)
            _stop_if_told(session)

    def _replay(self, session: pytest.Session, kind: str, value: Any) -> None:
        hook = session.config.hook
        if kind == "start":
            self._under_way = value
            hook.pytest_runtest_logstart(nodeid=value[0], location=value[1])
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=value)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=value)
        elif kind == "end":
            self._under_way = None
            self.ended.add(value[0])
            hook.pytest_runtest_logfinish(nodeid=value[0], location=value[1])
        elif kind == "done":
            self._is_done = True

    def _report_death(self, session: pytest.Session) -> None:
        self._is_done = True
        how = self._wait(PATIENCE)
        self._output.seek(0)
        text = f"Another lane ended ({how}); the first runs what is left. Its last output:\n"
        text += self._output.read().decode(errors="replace")[-10_000:]
        if self._under_way is None:  # between two tests
            raise pytest.UsageError(text)
        nodeid, location = self._under_way
        report = pytest.TestReport(nodeid, location, {}, "failed", f"{nodeid}: {text}", "call")
        session.config.hook.pytest_runtest_logreport(report=report)
        session.config.hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)
        self.ended.add(nodeid)

    def close(self) -> None:
        """End it, if it has not ended."""
        if self._pid and not self._is_done:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGINT)  # fixtures end
        self._wait(PATIENCE)
        self._output.close()

    def _wait(self, seconds: float) -> str:
        """How it ended. It is killed if it takes longer than that."""
        end = time.monotonic() + seconds
        while self._pid:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._pid = 0
                code = os.waitstatus_to_exitcode(status)
                return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            if time.monotonic() > end:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.01)
        return "before"


class _Sender:
    """The plugin that tells the first lane what happens in another."""

    def __init__(self, session: pytest.Session, pipe: IO[bytes]) -> None:
        self._config = session.config
        self._pipe = pipe

    def send(self, kind: str, value: Any) -> None:
        pickle.dump((kind, value), self._pipe)
        self._pipe.flush()

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.send("start", (nodeid, location))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.send("end", (nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self.send("report", data)

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        told = warnings.WarningMessage(
            f"{warning_message.category.__name__}: {warning_message.message}",  # a class of a test may not pickle
            UserWarning,
            warning_message.filename,
            warning_message.lineno,
        )
        self.send("warning", {"warning_message": told, "when": when, "nodeid": nodeid, "location": location})


def _be_the_fork(
    session: pytest.Session, chunks: list[list[pytest.Item]], ends: Ends, pipe: IO[bytes], output: IO[bytes]
) -> None:
    """The fork's whole life. Never returns."""
    try:
        plugins = session.config.pluginmanager
        plugins.unregister(name="terminalreporter")
        capture: Any = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # it shares its files with the first lane
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        capture.start_global_capturing()
        capture.suspend_global_capture()
        sender = _Sender(session, pipe)
        plugins.register(sender, "lane")
        try:
            for item, following in _take(chunks, ends.take_last):
                _run_one(session, item, following)
        finally:
            session._setupstate.teardown_exact(None)
        sender.send("done", None)
        os._exit(0)
    except (session.Failed, session.Interrupted, KeyboardInterrupt, BrokenPipeError):
        os._exit(1)  # the first lane knows, or is gone
    except BaseException:
        os.write(output.fileno(), traceback.format_exc().encode())
        os._exit(1)
    finally:
        os._exit(1)
