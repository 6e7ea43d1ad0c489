"""Run tests in parallel lanes: this process, and forks of it. Everything else about a run stays the same.

The ranks of a pool wait for each other, and a test without ranks uses one core. With one lane more than cores, the cores are
always busy. All lanes draw chunks of tests from one list, and each has pools of its own. A fork sends its reports, which
pytest handles here as if the test had run here. So dots, failures, durations, ``-x``, ``--lf``, ``--junitxml`` and the exit
status are pytest's own.

A run has one lane with ``--lanes 1``, if it is small, if pytest may talk to the user (``--pdb``, ``-s``), or if the process
has initialised a GPU. Such a process must not fork.

If a fork dies, its current test fails with the fork's last output, and this process runs the remaining tests. The forks end
with this process, however that ends.
"""

import contextlib
import io
import itertools
import os
import pickle
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import IO, Any

import pytest
from pool import share_start

ENOUGH = 300
"""Minimum number of tests for several lanes, as each lane takes some seconds to start its pools."""
CHUNK = 12
"""Number of tests of one file that a lane draws at a time."""
PATIENCE = 10.0
"""Seconds for a fork to end after it was told to."""


def run(session: pytest.Session) -> bool:
    """Run all tests of the session in lanes, as ``pytest_runtestloop`` does. Return False if one lane is enough."""
    if not _is_for_lanes(session):
        return False
    chunks = _chunks(session.items)
    numbers, write = os.pipe()  # each lane reads the number of its next chunk, two bytes
    os.write(write, struct.pack(f"{len(chunks)}H", *range(len(chunks))))
    os.close(write)
    forks: list[Fork] = []
    try:
        if any("pool" in item.fixturenames for item in session.items):
            share_start()
        for _ in range(session.config.option.lanes - 1):
            forks.append(Fork(session, chunks, numbers))
        own: set[str] = set()
        for item, following in _take(chunks, numbers):
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
        os.close(numbers)
    return True


def _is_for_lanes(session: pytest.Session) -> bool:
    option = session.config.option
    return (
        option.lanes > 1
        and len(session.items) >= ENOUGH
        and not session.testsfailed  # during collection
        and not (option.collectonly or option.usepdb or option.trace or option.capture == "no")
        and not any(getattr(option, name, None) for name in ("setupshow", "setuponly", "setupplan", "stepwise"))
        and sys.platform == "linux"
        and len(os.sched_getaffinity(0)) > 1
        and not _has_a_gpu()
        and threading.active_count() == 1  # a fork never gets locks that other threads hold
    )


def _has_a_gpu() -> bool:
    torch = sys.modules.get("torch")  # not imported here: tests may not need it
    return torch is not None and torch.cuda.is_available()


def _chunks(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """Split tests into chunks of one file each, or full files if a fixture lives for the file.

    Large chunks come first, as one at the end would leave other lanes idle. Otherwise the order is kept.
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
    """Return whether the test uses a fixture that lives for several tests, but not for all."""
    fixtures = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
    return any(f.scope not in ("function", "session") for found in fixtures for f in found)


def _take(chunks: list[list[pytest.Item]], numbers: int) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Yield the tests of a lane, each with its successor, whose fixtures stay."""

    def next_chunk() -> list[pytest.Item]:
        number = os.read(numbers, 2)
        return chunks[struct.unpack("H", number)[0]] if number else []

    chunk = next_chunk()
    while chunk:
        yield from itertools.pairwise(chunk)
        last, chunk = chunk[-1], next_chunk()
        yield last, chunk[0] if chunk else None


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
    """A fork, as seen by the first lane."""

    def __init__(self, session: pytest.Session, chunks: list[list[pytest.Item]], numbers: int) -> None:
        self.ended: set[str] = set()
        """Tests that it completed."""
        self._under_way: tuple[str, Any] | None = None
        self._how_it_ended, self._is_told = "", False
        self._messages, self._output = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._heard = 0
        sender = _Sender(session, self._messages)
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's C++ threads are the only other ones
            self._pid = os.fork()
        if self._pid == 0:
            _be_the_fork(session, chunks, numbers, sender, self._output)

    def hear(self, session: pytest.Session, to_its_end: bool = False) -> None:
        """Handle reports of the fork; if ``to_its_end``, until it has ended."""
        runs = True
        while runs:
            runs = self._runs() and to_its_end  # checked before reading: nothing follows its end
            for message in self._new_messages():
                self._replay(session, *message)
                _stop_if_told(session)
            if runs:
                time.sleep(0.02)
        if self._how_it_ended not in ("", "exit status 0") and not self._is_told:
            self._report_death(session)

    def _new_messages(self) -> Iterator[tuple[str, Any]]:
        start, size = self._heard, os.fstat(self._messages.fileno()).st_size
        stream = io.BytesIO(os.pread(self._messages.fileno(), size - start, start))
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # the rest is still being written
            while True:
                message = pickle.load(stream)
                self._heard = start + stream.tell()
                yield message

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

    def _report_death(self, session: pytest.Session) -> None:
        self._is_told = True
        self._output.seek(0)
        text = f"Another lane ended ({self._how_it_ended}); the first runs what is left. Its last output:\n"
        text += self._output.read().decode(errors="replace")[-10_000:]
        if self._under_way is None:  # between two tests
            raise pytest.UsageError(text)
        nodeid, location = self._under_way
        report = pytest.TestReport(nodeid, location, {}, "failed", f"{nodeid}: {text}", "call")
        session.config.hook.pytest_runtest_logreport(report=report)
        session.config.hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)
        self.ended.add(nodeid)

    def close(self) -> None:
        """End the fork if it is running."""
        end = time.monotonic() + PATIENCE
        if self._runs():
            os.kill(self._pid, signal.SIGINT)  # so that fixtures end
        while self._runs():
            if time.monotonic() > end:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.01)
        self._messages.close()
        self._output.close()

    def _runs(self) -> bool:
        if not self._how_it_ended:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if not pid:
                return True
            code = os.waitstatus_to_exitcode(status)
            self._how_it_ended = f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return False


class _Sender:
    """A plugin that sends this lane's reports to the first lane."""

    def __init__(self, session: pytest.Session, messages: IO[bytes]) -> None:
        self._config = session.config
        self._messages = messages
        self._first_lane = os.getpid()

    def send(self, kind: str, value: Any) -> None:
        if os.getppid() != self._first_lane:  # the first lane has ended
            os._exit(1)
        pickle.dump((kind, value), self._messages)
        self._messages.flush()

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.send("start", (nodeid, location))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.send("end", (nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self.send("report", data)

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        told = warnings.WarningMessage(
            f"{warning_message.category.__name__}: {warning_message.message}",  # a test's own class may not pickle
            UserWarning,
            warning_message.filename,
            warning_message.lineno,
        )
        self.send("warning", {"warning_message": told, "when": when, "nodeid": nodeid, "location": location})


def _be_the_fork(
    session: pytest.Session, chunks: list[list[pytest.Item]], numbers: int, sender: _Sender, output: IO[bytes]
) -> None:
    """Run the fork's lane; never return."""
    try:
        plugins = session.config.pluginmanager
        plugins.unregister(name="terminalreporter")
        capture: Any = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # it shares files with the first lane
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        capture.start_global_capturing()
        capture.suspend_global_capture()
        plugins.register(sender, "lane")
        try:
            for item, following in _take(chunks, numbers):
                _run_one(session, item, following)
        finally:
            session._setupstate.teardown_exact(None)
        os._exit(0)
    except (session.Failed, session.Interrupted, KeyboardInterrupt):
        os._exit(1)  # the first lane reports it
    except BaseException:
        os.write(output.fileno(), traceback.format_exc().encode())
        os._exit(1)
    finally:
        os._exit(1)
