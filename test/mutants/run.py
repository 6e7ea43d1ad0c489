"""Runs the mutants of ``table.txt``: does a test fail where the package has a mistake?

    python test/mutants/run.py [--only FILE] [--jobs N] [--again] [--results FILE]

Each mutant is made in a copy of the repository, and its tests run there until one fails. Results are kept in a file outside
of the repository; a later run has those left that no test has killed. In the end the tests that have failed run without
a mutant: one that fails there, too, has shown nothing.
"""

import argparse
import collections
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import py_compile
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("table.txt")
TIMEOUT = 400.0
"""Seconds after which the tests of a mutant hang. The limits of the tests themselves end most of them before."""
PRELOAD = "torch torch.distributed torch._dynamo torch.distributed.checkpoint torch.distributed.fsdp pytest expecttest"
_TEST = re.compile(r"[^\s\[]+(?:\[[^]]*\])?\*?")  # the name of a case may have spaces
COPIED = ("flatshard", "test", "benchmarks", "pyproject.toml")


class Mutant(NamedTuple):
    """One mistake: in ``file``, ``old`` is replaced by ``new``. ``tests``: ``directory/file:function``, quickest first."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def key(self) -> str:
        return hashlib.sha256(repr(self[:3]).encode()).hexdigest()[:16]

    def apply(self, source: str) -> str:
        if (found := source.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {found} times, not once: {self.old!r}")
        return source.replace(self.old, self.new)

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()!r} -> {self.new.strip()!r}"


def read_table(text: str) -> list[Mutant]:
    """The mutants of ``table.txt``, which says how it is read."""
    mutants: list[Mutant] = []
    file, usual = "", list[str]()
    for line in text.splitlines():
        if line.startswith("== "):
            file, _, tests = line[3:].partition(": ")
            usual = _TEST.findall(tests)
        elif line.strip() and not line.startswith("# "):
            change, _, tests = line.partition("  @@ ")
            old, arrow, new = (each.replace("\\n", "\n") for each in change.partition("  ==>  "))
            if not arrow:
                raise ValueError(f"table.txt: no arrow in {line!r}")
            mutants.append(Mutant(f"flatshard/{file}", old, new, tuple(_TEST.findall(tests) or usual)))
    return mutants


# -- one copy of the repository ----------------------------------------------------------------------------------------


class Cases:
    """A plugin of pytest: one case of each test, but all of those that the table names with a ``*`` or by their case."""

    def __init__(self, tests: Sequence[str]) -> None:
        split = [t.rstrip("*").partition(":") for t in tests]
        self.named = [f"test/{file}.py" + (f"::test_{name}" if name else "") for file, _, name in split]
        self.every = tuple(n.partition("[")[0] for n, t in zip(self.named, tests, strict=True) if t[-1] in "*]")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        items[:] = [i for i in items if i.nodeid.startswith(self.every) or first[i.nodeid.partition("[")[0]] is i]


def _copy(where: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, where / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, where / name)
    for file in (where / "flatshard").rglob("*.py"):  # by contents: a mutant may have the size and time of the original
        py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


def _run(where: Path, arguments: Sequence[str], plugins: list[Any], parent: int) -> tuple[int | None, str]:
    """pytest's exit code (None: it took too long), and its output. ``parent``: without it this process is to end."""
    log = where / "log"
    if not (pid := os.fork()):
        code = 3
        try:
            os.setsid()  # a group of processes, so that nothing of it is left running
            os.chdir(where)
            sys.path[:] = [str(where), *(p for p in sys.path if Path(p).resolve() not in (ROOT, TABLE.parent))]
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            get_context: Any = multiprocessing.get_context  # ranks are forks of what has imported torch already
            multiprocessing.get_context = lambda kind=None: get_context("fork" if kind == "forkserver" else kind)
            import pytest

            code = int(pytest.main([*arguments, "-q", "--lanes", "1", "-p", "no:cacheprovider"], plugins))
        finally:
            sys.stdout.flush()
            os._exit(code)
    until, status = time.monotonic() + TIMEOUT, None
    try:
        while status is None and time.monotonic() < until and os.getppid() == parent:
            found, raw = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(raw) if found else time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if status is None:
            os.waitpid(pid, 0)
    if os.getppid() != parent:
        sys.exit(1)
    return status, log.read_text(errors="replace")


def _judge(code: int | None, output: str) -> tuple[str, str]:
    """What has come of a mutant, and the test that failed."""
    if code is None:
        return "killed", "timeout"
    if gone := re.search(r"ERROR: (?:not found|file or directory not found): (.+)", output):
        return "no such test", gone[1]
    failed = re.search(r"^(?:FAILED|ERROR) (test/.+?)(?: - .*)?$", output, re.MULTILINE)
    return {0: "survived", 5: "no such test"}.get(code, "killed"), failed[1] if failed else f"exit code {code}"


def _apart(tests: Sequence[str]) -> list[list[str]]:
    """``tests``, those on the simulated device apart: no backward may have run in the process that forks their ranks."""
    found: dict[bool, list[str]] = {}
    for test in tests:
        found.setdefault("accelerator/" in test, []).append(test)
    return list(found.values())


def _work(mutants: list[Mutant], results: Path, parent: int) -> None:
    for name in PRELOAD.split():
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="flatshard-mutants-") as made:
        where, killers = Path(made), set[str]()
        _copy(where)
        for mutant in mutants:
            path, start, what, test = where / mutant.file, time.monotonic(), "", ""
            source = path.read_text()
            path.write_text(mutant.apply(source))
            for cases in map(Cases, _apart(mutant.tests)):
                what, test = _judge(*_run(where, [*cases.named, "-x"], [cases], parent))
                if what != "survived":
                    break
            path.write_text(source)
            took = round(time.monotonic() - start, 1)
            with open(results, "a") as file:
                file.write(json.dumps([mutant.key, what, took, test]) + "\n")
            print(f"{what:9} {took:6.1f} s  {mutant}  {test}", flush=True)
            killers |= {test} if what == "killed" and "::" in test else set()
        for tests in _apart(sorted(killers)):
            if (found := _run(where, tests, [], parent))[0]:
                print(f"These tests fail without a mutant, too (or took {TIMEOUT:g} s):\n{found[1]}")


def _read(results: Path) -> dict[str, list[Any]]:
    lines = results.read_text().splitlines() if results.exists() else []
    return {entry[0]: entry[1:] for entry in map(json.loads, lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="FILE", help="mutants of files with this in their path")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "flatshard-mutants.jsonl")
    given = parser.parse_args()
    every = [mutant for mutant in read_table(TABLE.read_text()) if given.only in mutant.file]
    known = {} if given.again else _read(given.results)
    todo = [mutant for mutant in every if known.get(mutant.key, [""])[0] != "killed"]
    turns = collections.Counter[str]()  # files take turns, and what has not run yet comes first
    todo.sort(key=lambda m: (m.key in known, (turns.update([m.file]), turns[m.file])[1]))
    print(f"{len(every)} mutants, {len(todo)} to run; results: {given.results}", flush=True)
    start, pid = multiprocessing.get_context("fork").Process, os.getpid()
    jobs = [
        start(target=_work, args=(todo[i :: given.jobs], given.results, pid)) for i in range(min(given.jobs, len(todo)))
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    known = _read(given.results)
    left = [mutant for mutant in every if known.get(mutant.key, ["not run"])[0] != "killed"]
    for mutant in left:
        print(f"{known.get(mutant.key, ['not run'])[0]}: {mutant}")
    print(f"{len(every) - len(left)} of {len(every)} killed")
    return bool(left)


if __name__ == "__main__":
    sys.exit(main())
