"""Fixtures and hooks of all tests: the pool of ranks, a time limit, the ``gpu`` marker, and the fuzzer's options.

Functions here import torch themselves, as that takes seconds, and pytest should first report that it collects.
"""

import contextlib
import faulthandler
import gc
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lanes
import pairs
import pytest
from pool import Pool
from time_left import TimeLeft

TEST_TIMEOUT = 120
"""Seconds that a test may take by default; see ``@pytest.mark.time_limit(seconds)``."""

BUILD_TIMEOUT = 600
"""Seconds for building the simulated accelerator in the first test that needs it."""

_stderr_fd = pytest.StashKey[int]()
_file = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flatshard")
    group.addoption(
        "--thorough", action="store_true", help="every case, where else pairs or some are run: see pairs.py"
    )
    group.addoption("--once", action="store_true", help="of each test that has several cases, one")
    group.addoption("--fuzz", type=int, default=40, metavar="N", help="random programs that test_fuzz.py runs")
    group.addoption("--fuzz-seed", type=int, default=0, metavar="S", help="seed of the first random program")
    group.addoption("--lanes", type=int, default=3, help="tests at a time: see lanes.py")
    group.addoption("--minimise", action="store_true", help="make failing random programs shorter")


@pytest.hookimpl(trylast=True)  # after the terminal reporter
def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr_fd] = os.dup(2)  # before output is captured: a last resort must be visible
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and config.option.verbose > -2:
        config.pluginmanager.register(TimeLeft(reporter), "time-left")

    import torch

    if config.getoption("--thorough"):
        os.environ["PAIRS_THOROUGH"] = "1"  # read by the ranks
        pairs.thorough = True
    torch.set_num_threads(1)


def pytest_unconfigure(config: pytest.Config) -> None:
    faulthandler.cancel_dump_traceback_later()
    os.close(config.stash[_stderr_fd])
    gc.unfreeze()  # otherwise C++ libraries report frozen objects as leaked at exit


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if config.getoption("--once"):
        cases: dict[str, list[pytest.Item]] = {}
        for item in items:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        # Not always the first: tests with the same parameters alternate between them.
        chosen = {each[turn % len(each)] for turn, each in enumerate(cases.values())}
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    simulated = [item for item in items if _is_simulated(item)]
    if len(simulated) < len(items):  # in a large run, the simulator is built meanwhile
        others = [item for item in items if not _is_simulated(item)]
        half = next((i for i in range(len(others) // 2, len(others)) if others[i].path != others[i - 1].path), 0)
        items[:] = [*others[:half], *simulated, *others[half:]]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def _is_simulated(item: pytest.Item) -> bool:
    return "_simulator" in getattr(item, "fixturenames", ())


def pytest_collection_finish(session: pytest.Session) -> None:
    from accelerator import build

    if any(map(_is_simulated, session.items)) and not session.config.option.collectonly:
        build.start()
    _keep_what_lives()


def _keep_what_lives() -> None:
    """Exempt modules, tests, and objects left by test files from later collections, as they live forever."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    if item.path != item.session.stash.get(_file, None):
        item.session.stash[_file] = item.path
        _keep_what_lives()


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    return lanes.run(session) or None  # None: pytest's own loop


def _limited(phase: str) -> Callable[[pytest.Item], Any]:
    """Return a hook that fails a phase of a test after its time limit. An alarm interrupts Python code, and waits in it.

    If the main thread never returns from C++, the alarm cannot run. Then the session ends with all stacks: worse than a
    failed test, better than a hang.
    """

    @pytest.hookimpl(wrapper=True)
    def hook(item: pytest.Item) -> Any:
        marker = item.get_closest_marker("time_limit")
        seconds = int(marker.args[0]) if marker else TEST_TIMEOUT

        def on_alarm(signum: int, frame: object) -> None:
            pytest.fail(f"{item.nodeid}: {phase} took longer than {seconds} s")

        before = signal.signal(signal.SIGALRM, on_alarm)
        signal.alarm(seconds)
        faulthandler.dump_traceback_later(seconds + 30, exit=True, file=item.config.stash[_stderr_fd])
        try:
            return (yield)
        finally:
            signal.alarm(0)
            faulthandler.cancel_dump_traceback_later()
            signal.signal(signal.SIGALRM, before)

    return hook


pytest_runtest_setup, pytest_runtest_call, pytest_runtest_teardown = map(_limited, ("setup", "the test", "teardown"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Skip a test, also on ranks, if flatshard says that it needs a newer torch than this one."""
    try:
        return (yield)
    except Exception as e:
        from flatshard._base import torch_versions

        needed = re.search(r"needs torch (\d+)\.(\d+) or later", str(e))
        if needed is None or tuple(map(int, needed.groups())) <= torch_versions.VERSION:
            raise
        pytest.skip(f"{pyfuncitem.name} {needed.group()}")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo ranks, started by the session's first ``pool.run(body, ...)``."""
    with contextlib.closing(Pool()) as p:
        yield p


@pytest.fixture(scope="session")
def _simulator(pytestconfig: pytest.Config) -> None:
    """Build the simulated accelerator, once per machine: half a minute, or longer on a busy machine."""
    from accelerator import build

    if why := build.missing():
        pytest.skip(why)
    signal.alarm(BUILD_TIMEOUT)  # replaces the test's alarm; its next phase sets a new one
    faulthandler.dump_traceback_later(BUILD_TIMEOUT + 30, exit=True, file=pytestconfig.stash[_stderr_fd])
    build.build()
    signal.alarm(TEST_TIMEOUT)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Pool]:
    """A pool whose default group has two ranks."""
    with contextlib.closing(Pool(2)) as p:
        yield p


@pytest.fixture(scope="session")
def simulated_pool(_simulator: None) -> Iterator[Pool]:
    """Four ranks, each with a simulated accelerator."""
    from accelerator import harness

    with contextlib.closing(Pool(backend="cpu:gloo,simdev:simccl", prepare=harness.prepare)) as p:
        yield p


@pytest.fixture(scope="session")
def simulated_process(_simulator: None) -> Iterator[Pool]:
    """A process with a simulated accelerator and without a process group."""
    from accelerator import harness

    with contextlib.closing(Pool(1, backend=None, prepare=harness.prepare)) as p:
        yield p


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture
def world() -> Iterator[Callable[[int], None]]:
    """A function ``world(n)`` that makes this process rank 0 of n, over the fake process group."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg

    def start(size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def fake_group(world: Callable[[int], None]) -> None:
    """This process is rank 0 of two, over the fake process group."""
    world(2)
