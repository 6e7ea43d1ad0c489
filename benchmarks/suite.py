"""What all benchmarks share: tables of figures with their targets and spreads, timing, a command line.

A benchmark is a file with ``measure(args) -> tables``, and runs alone (``python benchmarks/memory.py``) or with the others
(``python benchmarks/run.py``). Those over gloo start their own ranks. No environment variable needs to be set by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import are_started, process_group, set_environment, start
from torch.testing._internal.distributed.fake_pg import FakeStore

OURS = "flatshard"


@dataclass(frozen=True)
class Figure:
    """A number, or why there is none. A timed one has the least and the most of its rounds beside it."""

    value: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""
    """Why there is no value, or what was found in its place."""

    def text(self, digits: int) -> str:
        if self.value is None:
            return self.note or "-"
        digits = 0 if isinstance(self.value, int) else digits  # an int is counted
        spread = "" if self.low is None else f" ({self.low:,.{digits}f}-{self.high:,.{digits}f})"
        return f"{self.value:,.{digits}f}{spread}"


@dataclass(frozen=True)
class Table:
    """One measure: rows of contenders, columns of settings."""

    name: str
    """Unique among all tables; the name of its plot."""
    title: str
    """What is measured, of what, in which unit."""
    floor: str
    """What could not be less, and how that is computed."""
    rows: Mapping[str, Mapping[str, Figure]]
    """Figures by column, by contender."""
    targets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """What a figure should be at most, by column, by contender: flatshard and its variants."""
    notes: Sequence[str] = ()
    digits: int = 2

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.rows.values() for column in row))

    def judged(self) -> Iterator[tuple[str, str, float, float, bool]]:
        """(contender, column, figure, target, whether it is missed as it is printed), where there is a figure."""
        for name, columns in self.targets.items():
            for column, target in columns.items():
                value = self.rows[name][column].value
                if value is not None:
                    yield name, column, value, target, round(value, self.digits) > target

    def as_text(self) -> str:
        """The table as it is printed."""
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

    def to_json(self) -> dict[str, Any]:
        """Of plain dictionaries, lists, strings and numbers."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Table:
        """What :meth:`to_json` gave."""
        rows = {name: {c: Figure(**f) for c, f in row.items()} for name, row in data["rows"].items()}
        return Table(**{**data, "rows": rows})


def interleaved(steps: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each step in each round. A round runs every contender once; the first ``warm_up`` are not counted.

    A step returns its own time, so that it can leave out what does not belong to it.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + warm_up):
        if number == warm_up:
            gc.collect()
            gc.freeze()  # a collection in one contender's step must not walk the objects of all the others
        for name, step in steps.items():
            seconds = step()
            if number >= warm_up:
                times[name].append(seconds)
    gc.unfreeze()
    return times


def seconds(run: Callable[[], object]) -> float:
    """How long ``run`` takes, by the wall clock."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def over(series: Sequence[float], base: float, scale: float = 1.0) -> Figure:
    """The median's, the least's and the most's ratio to ``base``."""
    return Figure(*(scale * v / base for v in (statistics.median(series), min(series), max(series))))


def beyond(series: Sequence[float], base: float, scale: float = 1.0) -> Figure:
    """The same of the difference to ``base``."""
    return over([v - base for v in series], 1.0, scale)


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Be rank 0 of ``size``, over the fake process group: its collectives move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()


def main(
    measure: Callable[[argparse.Namespace], list[Table]], parser: argparse.ArgumentParser, ranks: int = 1
) -> list[Table]:
    """The command line of one benchmark: its own arguments, ``--full`` and ``--json``. Over ``ranks`` gloo processes.

    Returns what was measured.
    """
    parser.add_argument("--full", action="store_true", help="more rounds, sizes and contenders")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables there, too")
    args = parser.parse_args()
    if ranks > 1 and not are_started():
        start(ranks, sys.argv[0], sys.argv[1:])
        raise SystemExit
    set_environment()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with process_group(use_gpu=False) if ranks > 1 else contextlib.nullcontext() as job:
        tables = measure(args)
        if job is None or job.rank == 0:
            print("\n\n".join(table.as_text() for table in tables), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps([table.to_json() for table in tables]))
    return tables


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the file's docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def progress(text: str) -> None:
    """A line for whoever waits, by rank 0, apart from the tables."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"  {text}", file=sys.stderr, flush=True)
