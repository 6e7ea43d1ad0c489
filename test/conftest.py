"""What every test gets: the pool of ranks, a time limit, the ``gpu`` and ``slow`` markers, the fuzzer's options."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg as fake_pg
from pool import Pool

TEST_TIMEOUT = 120
"""Seconds that a test may take, unless it carries ``@pytest.mark.time_limit(seconds)``."""

_stderr_fd = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flatshard")
    group.addoption("--fuzz", type=int, default=300, metavar="N", help="random cases that test_fuzz.py runs")
    group.addoption("--fuzz-seed", type=int, default=0, metavar="S", help="seed of the first random case")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs CUDA, skipped where there is none")
    config.addinivalue_line("markers", "slow: takes more than a few seconds; leave out with -m 'not slow'")
    config.addinivalue_line("markers", "time_limit(seconds): replaces the default time limit of a test")
    torch.set_num_threads(1)
    config.stash[_stderr_fd] = os.dup(2)  # here output is not captured yet: a last resort must be seen


def pytest_unconfigure(config: pytest.Config) -> None:
    faulthandler.cancel_dump_traceback_later()
    os.close(config.stash[_stderr_fd])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@contextlib.contextmanager
def _time_limit(item: pytest.Item, phase: str) -> Iterator[None]:
    """Fail a phase of a test that takes too long, by an alarm that interrupts Python code and blocking waits in it.

    Where even the alarm cannot run, because the main thread never returns from C++, end the session with all stacks:
    worse than a failed test, better than a hang.
    """
    marker = item.get_closest_marker("time_limit")
    seconds = int(marker.args[0]) if marker else TEST_TIMEOUT
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_alarm(signum: int, frame: object) -> None:
        pytest.fail(f"{item.nodeid}: {phase} took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(seconds + 30, exit=True, file=item.config.stash[_stderr_fd])
    try:
        yield
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item):
    with _time_limit(item, "setup"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    with _time_limit(item, "the test"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item):
    with _time_limit(item, "teardown"):
        return (yield)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo ranks, started at the first ``pool.run(body, ...)`` of the session."""
    p = Pool()
    yield p
    p.close()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def world() -> Iterator[Callable[[int], None]]:
    """``world(n)``: be rank 0 of n, over the fake process group."""

    def start(size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
