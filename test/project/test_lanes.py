"""Lanes: the outcome of a run is that of one lane, whatever happens in any. And how long a run takes."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lanes
from time_left import TimeLeft

COUNT = lanes.ENOUGH // 2
TOTAL = 2 * COUNT + 4
CONFTEST = """
import lanes

def pytest_addoption(parser):
    parser.addoption("--lanes", type=int, default=2)

def pytest_runtestloop(session):
    return lanes.run(session) or None
"""
TESTS = """
import os, signal, time, warnings
from pathlib import Path
import pytest

@pytest.mark.parametrize("i", range({count}))
def test_it(i):
    with open(Path(__file__).with_name("ran"), "a") as file:
        print(os.getpid(), __name__, i, file=file)
    time.sleep(0.001)

def test_last():
    {last}
"""


def start(folder: Path, last: str, *arguments: str) -> subprocess.Popen[str]:
    """pytest on tests that pass, and one that does ``last``: in the last file, with which a fork begins."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, count, its_last in (("a", COUNT - 1, "pass"), ("b", COUNT - 1, "pass"), ("c", 3, last)):
        (folder / f"test_{name}.py").write_text(TESTS.format(count=count, last=its_last))
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(folder)],
        env={**os.environ, "PYTHONPATH": str(Path(lanes.__file__).parent), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A run in the background of a script ignores Ctrl-C, and so would its children.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        text, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, text


def run(folder: Path, last: str, *arguments: str) -> tuple[int, str]:
    return finish(start(folder, last, *arguments))


def ran(folder: Path) -> list[list[str]]:
    """Process, module and number of each test that was run, if it is not the last of its file."""
    file = folder / "ran"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def test_every_test_runs_once_in_one_of_the_lanes(tmp_path):
    status, text = run(tmp_path, "warnings.warn('from a fork')", "--lanes", "3")
    assert status == 0, text
    assert f"{TOTAL} passed, 1 warning" in text
    assert "from a fork" in text
    found = ran(tmp_path)
    assert len(found) == len({(module, i) for _, module, i in found}) == TOTAL - 3
    assert len({pid for pid, _, _ in found}) == 3


def test_a_failure_in_the_fork_is_shown_with_its_output(tmp_path):
    status, text = run(tmp_path, "print('what was said'); assert 1 == 2")
    assert status == 1, text
    assert f"1 failed, {TOTAL - 1} passed" in text
    assert "assert 1 == 2" in text
    assert "what was said" in text


def test_a_failure_in_the_fork_ends_the_run_where_that_is_asked_for(tmp_path):
    status, text = run(tmp_path, "assert False", "-x")
    assert status == 1, text
    assert "stopping after 1 failures" in text
    assert len(ran(tmp_path)) < TOTAL - 3


def test_what_a_fork_that_dies_leaves_is_run(tmp_path):
    status, text = run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert status == 1, text
    assert "test_last: Another lane ended (signal SIGKILL)" in text
    assert f"1 failed, {TOTAL - 1} passed" in text


def test_an_interrupt_ends_all(tmp_path):
    process = start(tmp_path, "time.sleep(50)", "--lanes", "3")
    while len({pid for pid, _, _ in ran(tmp_path)}) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    status, text = finish(process)
    assert status == 2, text
    assert "KeyboardInterrupt" in text
    for pid in {pid for pid, _, _ in ran(tmp_path)}:
        assert not Path(f"/proc/{pid}").exists()


def test_a_small_run_takes_one_lane(tmp_path):
    for arguments in (["--lanes", "1"], ["-k", "test_c"]):
        status, text = run(tmp_path, "pass", *arguments)
        assert status == 0, text
        assert len({pid for pid, _, _ in ran(tmp_path)}) == 1
        (tmp_path / "ran").unlink()


class Reporter:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def ensure_newline(self) -> None:
        pass

    def write_line(self, line: str) -> None:
        self.lines.append(line)


class Cache(dict[str, Any]):
    def set(self, key: str, value: Any) -> None:
        self[key] = value


def lines_of_a_run(cache: Cache | None, factor: float = 1.0) -> list[str]:
    """What 100 tests say that take 6 s each, and the last 50 of them 0.6 s; all ``factor`` times as long."""
    now = [0.0]
    reporter = Reporter()
    left = TimeLeft(reporter, cache, lambda: now[0])
    names = [f"test_{i}" for i in range(100)]
    left.pytest_collection_finish(SimpleNamespace(items=[SimpleNamespace(nodeid=name) for name in names]))
    for i, name in enumerate(names):
        seconds = factor * (6.0 if i < 50 else 0.6)
        now[0] += seconds
        for phase in (0.25, 0.5, 0.25):
            left.pytest_runtest_logreport(SimpleNamespace(nodeid=name, duration=phase * seconds))
        left.pytest_runtest_logfinish(name)
    left.pytest_sessionfinish()
    return reporter.lines


def test_a_run_says_how_long_it_takes_where_tests_have_run_before(request):
    cache = Cache()
    first = lines_of_a_run(cache)
    assert first == [f"{10 * minute} of 100 tests in {minute} min" for minute in range(1, 6)]
    assert cache[TimeLeft.KEY]["test_0"] == 6.0
    again = lines_of_a_run(cache, factor=2.0)  # a busier machine: 11 minutes in all
    assert again[0] == "5 of 100 tests in 1 min, about 10 min left"
    assert again[-1] == "50 of 100 tests in 10 min, about 1 min left"
    for name in list(cache[TimeLeft.KEY])[:20]:
        del cache[TimeLeft.KEY][name]
    assert lines_of_a_run(cache) == first  # too many are new
    assert lines_of_a_run(None) == first
    assert request.config.pluginmanager.get_plugin("time-left") is not None
