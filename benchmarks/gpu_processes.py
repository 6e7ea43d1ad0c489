"""Processes of the parts of ``gpu.py``: their environments, their start, and their time limits."""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import checkout  # noqa: F401
from ranks import are_started, leave

HERE = Path(__file__).parent
ROOT = HERE.parent
GRACE = 30.0
"""Seconds for the other ranks to end after one has failed."""
OF_A_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
IMPORTED = ("gpu_ranks", "gpu_kernels", "host_overhead", "one_gpu", "predictions", "switch")
"""Scripts of parts."""
AT_FIRST_USE = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor")
"""Modules that torch, or a part, imports when it first needs them."""


class Process(Protocol):
    """A ``subprocess.Popen`` or a ``Forked``."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...


def started(command: Sequence[str], env: Mapping[str, str], output: Path) -> Process:
    """Start a process with a session of its own."""
    with output.open("w") as file:
        options: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(command, env=env, cwd=ROOT, start_new_session=True, **options)


class Forked:
    """A Python script in a fork of this process, which has imported its modules: ``python SCRIPT ARGUMENTS``.

    A process that uses a GPU cannot fork. The simulated device has no threads, so it can.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], output: Path) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()  # the fork would print it again
        self.pid = os.fork()
        if not self.pid:
            self._run(command[1:], env, output)

    @staticmethod
    def _run(arguments: Sequence[str], env: Mapping[str, str], output: Path) -> None:
        code = 1
        try:
            os.setsid()
            written, nothing = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), os.open(os.devnull, os.O_RDONLY)
            for source, number in ((nothing, 0), (written, 1), (written, 2)):
                os.dup2(source, number)
            os.environ.clear()
            os.environ.update(env)
            os.chdir(ROOT)
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
            code = 0
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else int(e.code is not None)
            if isinstance(e.code, str):
                print(e.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            leave(code)

    def poll(self) -> int | None:
        return self._ended(os.WNOHANG)

    def wait(self) -> int:
        code = self._ended(0)
        assert code is not None
        return code

    def _ended(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def prepare_forks() -> None:
    """Import all that parts import on the simulated device, once for all of their processes."""
    for name in (*AT_FIRST_USE, *IMPORTED):
        importlib.import_module(name)
    importlib.import_module("devices").Simulated()


def run_all(
    command: Sequence[str], environments: Sequence[Mapping[str, str]], limit: float, forks: bool = False
) -> tuple[str, str]:
    """Run a command in each environment at the same time; return the first one's output, and the error.

    All end after ``limit`` seconds at the latest, and ``GRACE`` seconds after one has failed.

    Args:
        forks: run a Python script in forks of this process, after ``prepare_forks``.
    """
    start: Callable[[Sequence[str], Mapping[str, str], Path], Process] = Forked if forks else started
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(number) for number in range(len(environments))]
        running = [start(command, env, output) for env, output in zip(environments, outputs, strict=True)]
        end = time.monotonic() + limit
        has_failed = False
        try:
            while None in (codes := [process.poll() for process in running]) and time.monotonic() < end:
                if any(codes) and not has_failed:
                    has_failed, end = True, min(end, time.monotonic() + GRACE)
                time.sleep(0.02 if forks else 0.2)
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        is_over = None in codes
        texts = [output.read_text(errors="replace") for output in outputs]
    failed = [number for number, process in enumerate(running) if process.returncode]
    ended = [
        f"process {n} ended with {running[n].returncode}" + " when its time was over" * is_over for n in failed[:2]
    ]
    problems = [f"{text}:\n{tail(texts[n])}" for n, text in zip(failed, ended, strict=False)]
    return texts[0], "\n".join(problems)


def tail(text: str, lines: int = 30) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])


def without_a_job(**more: str) -> dict[str, str]:
    """Return an environment for a process that is no rank."""
    kept = {k: v for k, v in os.environ.items() if k not in OF_A_JOB and not k.startswith("TORCHELASTIC_")}
    return {**kept, "PYTHONPATH": search_path(), **more}


def search_path() -> str:
    """Return a path for imports, so that flatshard need not be installed."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def environments(count: int, **more: str) -> list[dict[str, str]]:
    """Return environments of the ranks to start: under torchrun this process's own, otherwise ``count``."""
    if are_started():
        return [{**os.environ, "PYTHONPATH": search_path(), **more}]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        of_all = {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    return [without_a_job(**of_all, RANK=str(i), LOCAL_RANK=str(i), **more) for i in range(count)]
