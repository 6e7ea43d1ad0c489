"""Runs the mutants of ``table.txt``: does a test fail where the package has a mistake?

    python test/mutants/run.py [--only FILE] [--jobs N] [--again] [--results FILE]

Each mutant is made in a copy of the repository, and its tests run there until one fails. Results are kept in a file outside
of the repository, and a later run continues from there; ``--again`` runs also those that have one. A test that runs longer than
``TIMEOUT`` has found a hang. In the end the tests that have failed run without mutants: one that fails there says nothing.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("table.txt")
TIMEOUT = 240.0
PRELOAD = "torch torch.distributed torch._dynamo torch.distributed.checkpoint torch.distributed.fsdp pytest expecttest"
COPIED = ("flatshard", "test", "benchmarks", "pyproject.toml")


class Mutant(NamedTuple):
    """One mistake: in ``file``, ``old`` is replaced by ``new``. ``tests``: ``directory/file:function``, quickest first."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def key(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def apply(self, source: str) -> str:
        if (found := source.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {found} times, not once: {self.old!r}")
        return source.replace(self.old, self.new)


def table(text: str | None = None) -> list[Mutant]:
    """The mutants of ``table.txt``, which says how it is read."""
    mutants, file, usual = [], "", ()
    for line in (TABLE.read_text() if text is None else text).splitlines():
        if line.startswith("== "):
            file, _, tests = line[3:].partition(": ")
            file, usual = f"flatshard/{file}", tuple(tests.split())
        elif line.strip() and not line.startswith("# "):
            change, _, tests = line.partition("  @@ ")
            old, arrow, new = (each.replace("\\n", "\n") for each in change.partition("  ==>  "))
            if not arrow:
                raise ValueError(f"table.txt: no arrow in {line!r}")
            mutants.append(Mutant(file, old, new, (*tests.split(), *(t for t in usual if t not in tests.split()))))
    return mutants


# -- one copy of the repository ----------------------------------------------------------------------------------------


def _copy(where: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, where / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, where / name)
    for file in (where / "flatshard").rglob("*.py"):  # by contents: a mutant may have the size and time of the original
        py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


class _Cases:
    """A plugin of pytest: one case of each test, but all of those in ``every``."""

    def __init__(self, tests: tuple[str, ...]) -> None:
        self.named = [f"test/{file}.py" + (f"::test_{name}" if name else "") for file, _, name in map(_split, tests)]
        self.every = tuple(name.partition("[")[0] for name, t in zip(self.named, tests, strict=True) if t[-1] in "*]")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        items[:] = [i for i in items if i.nodeid.startswith(self.every) or first[i.nodeid.partition("[")[0]] is i]


def _split(test: str) -> tuple[str, str, str]:
    return test.rstrip("*").partition(":")


def _run(where: Path, tests: tuple[str, ...], *more: str) -> tuple[int | None, str]:
    """pytest's exit code (None: it took too long), and its output."""
    log = where / "log"
    pid = os.fork()
    if pid == 0:
        os.setsid()  # so that nothing of it is left running
        os.chdir(where)
        sys.path[:] = [str(where), *(p for p in sys.path[1:] if Path(p) != ROOT)]
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for fd in (1, 2):
            os.dup2(out, fd)
        get_context: Any = multiprocessing.get_context  # ranks fork here, where torch is imported
        multiprocessing.get_context = lambda kind=None: get_context("fork" if kind == "forkserver" else kind)  # type: ignore
        code = 3
        try:
            import pytest

            cases = _Cases(tests)
            code = int(pytest.main([*cases.named, "-q", "--lanes", "1", "-p", "no:cacheprovider", *more], [cases]))
        finally:
            sys.stdout.flush()
            os._exit(code)
    until, status = time.monotonic() + TIMEOUT, None
    try:
        while status is None and time.monotonic() < until:
            found, raw = os.waitpid(pid, os.WNOHANG)
            if found:
                status = os.waitstatus_to_exitcode(raw)
            else:
                time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if status is None:
            os.waitpid(pid, 0)
    return status, log.read_text(errors="replace")


def _judge(code: int | None, output: str) -> tuple[str, str]:
    """What has come of a mutant, and the test that failed."""
    if code is None:
        return "killed", "timeout"
    if gone := re.search(r"ERROR: (?:not found|file or directory not found): (\S+)", output):
        return "no such test", gone[1]
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return {0: "survived", 5: "no such test"}.get(code, "killed"), failed[1] if failed else f"exit code {code}"


def _work(mutants: list[Mutant], results: Path, verbose: bool) -> None:
    for name in PRELOAD.split():
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory(prefix="flatshard-mutants-") as made:
        where = Path(made)
        _copy(where)
        for mutant in mutants:
            path, start = where / mutant.file, time.monotonic()
            source = path.read_text()
            path.write_text(mutant.apply(source))
            try:
                code, output = _run(where, mutant.tests, "-x")
            finally:
                path.write_text(source)
            what, test = _judge(code, output)
            took = round(time.monotonic() - start, 1)
            with open(results, "a") as file:
                file.write(json.dumps([mutant.key, what, took, test]) + "\n")
            print(f"{what:9} {took:6.1f} s  {mutant.file}: {mutant.old.strip()!r} -> {mutant.new.strip()!r}  {test}", flush=True)
            if verbose:
                print(output, flush=True)


def _read(results: Path) -> dict[str, list[Any]]:
    lines = results.read_text().splitlines() if results.exists() else []
    return {entry[0]: entry[1:] for entry in map(json.loads, lines)}


def _check_unchanged(tests: set[str]) -> None:
    """Name the tests that fail without any mutant."""
    with tempfile.TemporaryDirectory(prefix="flatshard-mutants-") as made:
        _copy(Path(made))
        names = tuple(sorted({re.sub(r"^test/|\.py|test_(?=\w+$)", "", t.partition("[")[0]).replace("::", ":") for t in tests}))
        names = tuple(t if t.count("/") else t for t in names)
        code, output = _run(Path(made), names)
        print(output.splitlines()[-1] if code == 0 else output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="FILE", help="mutants of files with this in their path")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--survivors", action="store_true", help="those that were not killed, with pytest's output")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "flatshard-mutants.jsonl")
    given = parser.parse_args()
    every = [mutant for mutant in table() if given.only in mutant.file]
    known = _read(given.results)
    again = {m for m in every if given.again or (given.survivors and known.get(m.key, ["killed"])[0] != "killed")}
    todo = [mutant for mutant in every if mutant in again or mutant.key not in known]
    turns: collections.Counter[str] = collections.Counter()
    todo.sort(key=lambda mutant: (turns.update([mutant.file]), turns[mutant.file])[1])  # files take turns
    print(f"{len(every)} mutants, {len(todo)} to run; results: {given.results}", flush=True)
    workers = []
    for number in range(given.jobs):
        workers.append(multiprocessing.Process(target=_work, args=(todo[number :: given.jobs], given.results, given.survivors)))
        workers[-1].start()
    for worker in workers:
        worker.join()
    known = _read(given.results)
    left = [m for m in every if known.get(m.key, ["not run"])[0] != "killed"]
    for mutant in left:
        print(f"{known.get(mutant.key, ['not run'])[0].upper()}: {mutant.file}: {mutant.old!r} -> {mutant.new!r}")
    print(f"{len(every) - len(left)} of {len(every)} killed")
    return bool(left)


if __name__ == "__main__":
    sys.exit(main())
