"""Shared by all benchmarks: tables of figures with targets and spreads, interleaved timing, the command line and its ranks.

A benchmark is a file with a function ``measure(args) -> list[Table]``, and a :class:`Benchmark` that lists its options. It
runs alone (``python benchmarks/memory.py``) or with the others (``python benchmarks/run.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import are_started, process_group, set_environment, start
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (it registers the backend)

OURS = "flatshard"


# -- tables ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A number, or the reason why there is none. A timed figure also has the minimum and maximum of its rounds."""

    value: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""
    """Reason why there is no value, or text in its place."""

    def text(self, digits: int) -> str:
        if self.value is None:
            return self.note or "-"
        digits = 0 if isinstance(self.value, int) else digits  # an int is a count
        spread = "" if self.low is None else f" ({self.low:,.{digits}f}-{self.high:,.{digits}f})"
        return f"{self.value:,.{digits}f}{spread}"


def spread(values: Iterable[float]) -> Figure:
    """Return the median of the rounds, with the minimum and the maximum."""
    values = list(values)
    return Figure(statistics.median(values), min(values), max(values))


def over(series: Iterable[float], base: Iterable[float]) -> Figure:
    """Return the spread of each round's value over the median of ``base``."""
    middle = statistics.median(base)
    return spread(value / middle for value in series)


@dataclass(frozen=True)
class Table:
    """A measure, with rows of contenders and columns of settings."""

    name: str
    title: str
    """Measure, model, and unit."""
    floor: str
    """Lower bound, and how it is computed."""
    rows: Mapping[str, Mapping[str, Figure]]
    """Figures by contender and column."""
    targets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Maximum of figures by contender and column, for flatshard and its variants."""
    notes: Sequence[str] = ()
    digits: int = 2

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.rows.values() for column in row))

    def judged(self) -> Iterator[tuple[str, str, float, float, bool]]:
        """Yield (contender, column, figure, target, whether the printed figure misses it) for each figure."""
        for name, columns in self.targets.items():
            for column, target in columns.items():
                value = self.rows[name][column].value if name in self.rows else None
                if value is not None:
                    yield name, column, value, target, round(value, self.digits) > target

    def as_text(self) -> str:
        """Return the table as printed."""
        missed = {(name, column) for name, column, *_, is_missed in self.judged() if is_missed}
        lines = [["", *self.columns]]
        for name, row in self.rows.items():
            lines.append([name, *(row.get(c, Figure(None)).text(self.digits) for c in self.columns)])
        for name, targets in self.targets.items():
            cells = {c: f"<= {target:g}{' MISSED' * ((name, c) in missed)}" for c, target in targets.items()}
            lines.append([f"target ({name})", *(cells.get(c, "") for c in self.columns)])
        first, *widths = (max(map(len, cells)) for cells in zip(*lines, strict=True))
        text = [f"{self.name}: {self.title}"]
        for name, *cells in lines:
            padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
            text.append("  ".join([name.ljust(first), *padded]).rstrip())
        return "\n".join([*text, f"Floor: {self.floor}", *self.notes])

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Table:
        """Make a table from the result of ``dataclasses.asdict``."""
        rows = {name: {c: Figure(**f) for c, f in row.items()} for name, row in data["rows"].items()}
        return Table(**{**data, "rows": rows})


def marked(table: Table) -> Table:
    """Mark every cell of the simulated device's table, so that no number in it looks like a result."""
    rows = {
        name: {column: Figure(None, note=f"{figure.text(table.digits)} simulated") for column, figure in row.items()}
        for name, row in table.rows.items()
    }
    title = f"simulated, no results: {table.title}"
    return dataclasses.replace(table, name=f"simulated_{table.name}", title=title, rows=rows)


def check(what: str, value: float, allowed: float) -> str:
    """Return a note for a table: whether a figure, such as an error, is at most what is allowed. ``gpu.py`` counts them."""
    return f"{'right' if value <= allowed else 'WRONG'}: {what}: {value:.2g} (allowed: {allowed:g})"


def by_column(columns: Mapping[str, Mapping[str, Figure]]) -> dict[str, dict[str, Figure]]:
    """Return rows of figures by contender, then by column."""
    names = dict.fromkeys(name for column in columns.values() for name in column)
    return {name: {c: column[name] for c, column in columns.items() if name in column} for name in names}


# -- measuring ---------------------------------------------------------------------------------------------------------


def interleaved(steps: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Return seconds of each step in each round. A round runs every contender; the first ``warm_up`` rounds do not count.

    A step returns its own time, so that it can leave out parts of its work.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + warm_up):
        if number == warm_up:
            gc.collect()
            gc.freeze()  # a collection in one contender's step must not walk the objects of the others
        for name, step in steps.items():
            seconds = step()
            if number >= warm_up:
                times[name].append(seconds)
    gc.unfreeze()
    return times


def seconds(run: Callable[[], object]) -> float:
    """Return the wall-clock time of ``run``."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def seconds_of_all(run: Callable[[], object]) -> float:
    """Return the seconds from the arrival of all ranks until the slowest is done."""
    dist.barrier()
    return seconds(lambda: (run(), dist.barrier()))


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Make this process rank 0 of ``size``, over the fake process group, whose collectives move nothing."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()


def commit() -> str:
    """Return this repository's commit, and whether the working tree has other changes than results."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "..", ":!results")
        return git("rev-parse", "--short=12", "HEAD") + (", changed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


def progress(text: str) -> None:
    """Print a line of progress on rank 0, apart from the tables."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"  {text}", file=sys.stderr, flush=True)


# -- command line ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Benchmark:
    """Measurements of one file, and its command-line options beside ``--full`` and ``--json``."""

    measure: Callable[[argparse.Namespace], list[Table]]
    doc: str | None
    """Text of ``--help``."""
    ranks: int = 1
    """Number of ranks of the gloo group to start. With 1, ``measure`` makes its own process groups."""
    rounds: tuple[int, int] = (0, 0)
    """Number of rounds without and with ``--full``, or 0 if nothing is timed."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Integer options with their defaults, such as ``{"layers": 8}`` for ``--layers``."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Flags with their help."""
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Options that select some of these names, by default all: ``{"rows": ("plain", "flatshard")}`` for ``--rows``."""

    def parser(self) -> argparse.ArgumentParser:
        parser = arguments(self.doc)
        parser.add_argument("--full", action="store_true", help="more rounds, sizes and contenders")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables there, too")
        for size, default in self.sizes.items():
            parser.add_argument(f"--{size.replace('_', '-')}", type=int, default=default, help=f"default: {default}")
        for flag, text in self.flags.items():
            parser.add_argument(f"--{flag}", action="store_true", help=text)
        for option, names in self.names.items():
            chosen = {"nargs": "+", "choices": list(names), "default": list(names), "metavar": "NAME"}
            parser.add_argument(f"--{option}", help=f"some of: {'; '.join(names)}", **chosen)
        if any(self.rounds):
            quick, full = self.rounds
            parser.add_argument("--rounds", type=int, help=f"default: {quick}, with --full {full}")
        return parser

    def main(self) -> list[Table]:
        """Run the requested measurements on all ranks; print and return the tables."""
        args = self.parser().parse_args()
        if any(self.rounds) and args.rounds is None:
            args.rounds = self.rounds[args.full]
        if self.ranks > 1 and not are_started():
            start(self.ranks, sys.argv[0], sys.argv[1:])
            raise SystemExit
        set_environment()
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        with process_group(use_gpu=False) if self.ranks > 1 else contextlib.nullcontext() as job:
            tables = self.measure(args)
            if job is None or job.rank == 0:
                print("\n\n".join(table.as_text() for table in tables), flush=True)
                if args.json is not None:
                    args.json.write_text(json.dumps([dataclasses.asdict(table) for table in tables]))
        return tables


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the file's docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
