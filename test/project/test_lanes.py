"""Lanes: the outcome of a run is that of one lane, whatever happens in any."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import lanes
import pytest

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
    found = ran(tmp_path)
    assert len(found) == len({(module, i) for _, module, i in found}) == TOTAL - 3
    assert len({pid for pid, _, _ in found}) == 3


@pytest.mark.parametrize(
    ("last", "shown"),
    [
        ("print('what was said'); assert 1 == 2", ("assert 1 == 2", "what was said")),
        ("os.kill(os.getpid(), signal.SIGKILL)", ("test_last: Another lane ended (signal SIGKILL)",)),
    ],
)
def test_a_failure_in_a_fork_or_its_death_is_one_failure(tmp_path, last, shown):
    """And what the fork leaves is run."""
    status, text = run(tmp_path, last)
    assert status == 1, text
    assert all(each in text for each in (*shown, f"1 failed, {TOTAL - 1} passed")), text


def test_an_interrupt_ends_all(tmp_path):
    process = start(tmp_path, "time.sleep(50)", "--lanes", "3")
    while len({pid for pid, _, _ in ran(tmp_path)}) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    status, text = finish(process)
    assert status == 2, text
    for pid in {pid for pid, _, _ in ran(tmp_path)}:
        assert not Path(f"/proc/{pid}").exists()
