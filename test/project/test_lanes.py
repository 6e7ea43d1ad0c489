"""Lanes: the outcome of a run is that of one lane, whatever happens in any."""

import os
import subprocess
import sys
from pathlib import Path

import lanes
import pytest

COUNT = lanes.ENOUGH // 2
TOTAL = 2 * COUNT + 4
CONFTEST = """
import os
import lanes

os.environ["FIRST"] = str(os.getpid())

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
    while os.environ["FIRST"] == str(os.getpid()) and not Path(__file__).with_name("last").exists():
        time.sleep(0.001)  # so a fork has the last one

def test_last():
    {last}
"""


def run(folder: Path, last: str, *arguments: str) -> tuple[int, str]:
    """pytest on tests that pass, and one that does ``last``, in a fork."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, count, its_last in (
        ("a", COUNT - 1, "pass"),
        ("b", COUNT - 1, "pass"),
        ("c", 3, "Path(__file__).with_name('last').touch(); " + last),
    ):
        (folder / f"test_{name}.py").write_text(TESTS.format(count=count, last=its_last))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(folder)],
        env={**os.environ, "PYTHONPATH": str(Path(lanes.__file__).parent), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


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
