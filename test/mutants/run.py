"""Run the mutants of ``tables/``: does a test fail where the package has a mistake?

    python test/mutants/run.py [--only WHERE] [--since REV] [--jobs N] [--again] [--results FILE]

Each mutant is made in a copy of the repository, and its tests run there until one fails. Results are kept in a file outside
the repository; a later run repeats the mutants that no test has killed. At the end the tests that failed run without
a mutant: a test that fails there, too, has shown nothing.

``--only`` selects a folder, a file or a function: ``_handle/``, ``_handle/lifetime.py``, ``lifetime.py:Lifetime.reshard``.
``--since`` selects the rows that are new or changed since a git revision.
"""

import argparse
import ast
import collections
import contextlib
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
TABLES = Path(__file__).with_name("tables")
TIMEOUT = 400.0
"""Seconds after which a mutant's tests count as hanging. Most of them end earlier by limits of their own."""
PRELOAD = "torch torch.distributed torch._dynamo torch.distributed.checkpoint torch.distributed.fsdp pytest expecttest"
_TEST = re.compile(r"[^\s\[]+(?:\[[^]]*\])?\*?")  # a case's name may have spaces
_FAILED = re.compile(r"^(?:FAILED|ERROR) (test/.+?)(?: - .*)?$", re.MULTILINE)
COPIED = ("flatshard", "test", "benchmarks", "pyproject.toml")


MODULE = "<module>"
"""Function of a row that is outside of functions and classes."""


@functools.lru_cache(1)
def _regions(source: str) -> dict[str, list[tuple[int, int]]]:
    """Return the lines (start, end) of each function and class by qualified name, where a property and its setter share
    one."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[str, list[tuple[int, int]]] = {MODULE: [(0, len(source))]}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = prefix + child.name
                first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                found.setdefault(name, []).append((starts[first - 1], starts[child.end_lineno or 0]))
                inner = f"{name}." if isinstance(child, ast.ClassDef) else f"{name}.<locals>."
            visit(child, inner)

    visit(ast.parse(source), "")
    return found


class Mutant(NamedTuple):
    """A mistake: in ``function`` of ``file``, ``old`` is replaced by ``new``.

    ``tests`` are ``directory/file:function``, quickest first.
    """

    file: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def key(self) -> str:
        return hashlib.sha256(repr(self[:4]).encode()).hexdigest()[:16]

    def apply(self, source: str) -> str:
        regions = _regions(source).get(self.function)
        if regions is None:
            raise ValueError(f"{self.file} has no {self.function}: {self.old!r}")
        if (found := sum(source.count(self.old, *region) for region in regions)) != 1:
            raise ValueError(f"{self.file}: {self.function} has {found} times, not once: {self.old!r}")
        at = next(at for region in regions if (at := source.find(self.old, *region)) >= 0)
        return source[:at] + self.new + source[at + len(self.old) :]

    def __str__(self) -> str:
        return f"{self.file}:{self.function}: {self.old.strip()!r} -> {self.new.strip()!r}"


def read_table(text: str) -> list[Mutant]:
    """Return the mutants of a table; its format is described in ``test/README.md``."""
    mutants: list[Mutant] = []
    file, function, usual = "", "", list[str]()
    for line in text.splitlines():
        if line.startswith("== "):
            file, _, tests = line[3:].partition(": ")
            function, usual = "", _TEST.findall(tests)
        elif line.startswith("-- "):
            function = line[3:]
        elif line.strip() and not line.startswith("# "):
            change, _, tests = line.partition("  @@ ")
            old, arrow, new = (each.replace("\\n", "\n") for each in change.partition("  ==>  "))
            if not (arrow and function):
                raise ValueError(f"{file}: no {'function before' if arrow else 'arrow in'} {line!r}")
            mutants.append(Mutant(f"flatshard/{file}", function, old, new, tuple(_TEST.findall(tests) or usual)))
    return mutants


def read_tables() -> list[Mutant]:
    return [mutant for path in sorted(TABLES.glob("*.txt")) for mutant in read_table(path.read_text())]


def _read_tables_at(revision: str) -> set[Mutant]:
    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True).stdout

    names = git("ls-tree", "--name-only", revision, f"{TABLES.relative_to(ROOT)}/").split()
    if not names:
        sys.exit(f"{revision} has no {TABLES.relative_to(ROOT)}")
    return {mutant for name in names for mutant in read_table(git("show", f"{revision}:{name}"))}


# -- one copy of the repository ----------------------------------------------------------------------------------------


class Cases:
    """A pytest plugin that selects one case of each test, or those that the table names by their case or by ``*``."""

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
    for file in (where / "flatshard").rglob("*.py"):  # a mutant may keep the original's size and time: compare contents
        py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


def _run(where: Path, arguments: Sequence[str], plugins: list[Any], parent: int) -> tuple[int | None, str]:
    """Run pytest; return its exit code, or None on a timeout, and its output. The process ends if ``parent`` does."""
    log = where / "log"
    if not (pid := os.fork()):
        code = 3
        try:
            os.setsid()  # a process group of its own, which can be killed as a whole
            os.chdir(where)
            sys.path[:] = [str(where), *(p for p in sys.path if Path(p).resolve() not in (ROOT, TABLES.parent))]
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            get_context: Any = multiprocessing.get_context  # ranks are forks of a process that has imported torch
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
    """Return the verdict on a mutant, and the test that failed."""
    if code is None:
        return "killed", "timeout"
    if gone := re.search(r"ERROR: (?:not found|file or directory not found): (.+)", output):
        return "no such test", gone[1]
    failed = _FAILED.search(output)
    return {0: "survived", 5: "no such test"}.get(code, "killed"), failed[1] if failed else f"exit code {code}"


def _apart(tests: Sequence[str]) -> list[list[str]]:
    """Separate tests on the simulated device: the process that forks their ranks must not have run a backward."""
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
            failed = set(_FAILED.findall(_run(where, tests, [], parent)[1]))
            for test in sorted(
                failed
            ):  # alone: a test before it may have run a backward in the process that forks ranks
                if (found := _run(where, [test], [], parent))[0]:
                    print(f"This test fails without a mutant, too (or took {TIMEOUT:g} s):\n{found[1]}")


def _read(results: Path) -> dict[str, list[Any]]:
    lines = results.read_text().splitlines() if results.exists() else []
    return {entry[0]: entry[1:] for entry in map(json.loads, lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WHERE", help="mutants with this in FILE:FUNCTION")
    parser.add_argument("--since", metavar="REV", help="rows that are new or changed since this git revision")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "flatshard-mutants.jsonl")
    given = parser.parse_args()
    before = _read_tables_at(given.since) if given.since else set()
    every = [m for m in read_tables() if given.only in f"{m.file}:{m.function}" and m not in before]
    known = {} if given.again else _read(given.results)
    todo = [mutant for mutant in every if known.get(mutant.key, [""])[0] != "killed"]
    turns = collections.Counter[str]()  # files alternate, and mutants that have not run yet come first
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
