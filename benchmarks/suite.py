"""What all benchmarks share: tables of figures with their targets and spreads, a command line, ranks, process groups.

A benchmark is a file with ``measure(args) -> tables``, and runs alone (``python benchmarks/memory.py``) or with the others
(``python benchmarks/run.py``). Those over gloo start their own ranks. No environment variable needs to be set by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
"""Set where the user has set nothing: one thread a rank, and gloo need not look up the machine's own name."""

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
        if isinstance(self.value, int):
            digits = 0  # it is counted
        text = f"{self.value:,.{digits}f}"
        if self.low is not None and self.high is not None:
            text += f" ({self.low:,.{digits}f}-{self.high:,.{digits}f})"
        return text


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

    def missed(self) -> dict[tuple[str, str], float]:
        """(contender, column) whose target is missed, as it is printed, with the figure."""
        found = {}
        for name, columns in self.targets.items():
            for column, target in columns.items():
                value = self.rows[name][column].value
                if value is not None and round(value, self.digits) > target:
                    found[name, column] = value
        return found

    def as_text(self) -> str:
        """The table as it is printed."""
        columns = self.columns
        lines = [["", *columns]]
        for name, row in self.rows.items():
            lines.append([name, *(row.get(c, Figure(None)).text(self.digits) for c in columns)])
        missed = self.missed()
        for name, targets in self.targets.items():
            marks = {column: " MISSED" * ((name, column) in missed) for column in targets}
            cells = [f"<= {targets[c]:g}{marks[c]}" if c in targets else "" for c in columns]
            lines.append([f"target ({name})", *cells])
        widths = [max(len(line[i]) for line in lines) for i in range(len(columns) + 1)]
        text = [f"{self.name}: {self.title}"]
        for first, *cells in lines:
            padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            text.append("  ".join([first.ljust(widths[0]), *padded]).rstrip())
        text.append(f"Floor: {self.floor}")
        return "\n".join([*text, *self.notes])

    def to_json(self) -> dict[str, Any]:
        """Of plain dictionaries, lists, strings and numbers."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Table:
        """What :meth:`to_json` gave."""
        rows = {name: {c: Figure(**f) for c, f in row.items()} for name, row in data["rows"].items()}
        return Table(**{**data, "rows": rows})


# ---------------------------------------------------------------------------------------------------------------------
# Timing
# ---------------------------------------------------------------------------------------------------------------------


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
    values = [statistics.median(series), min(series), max(series)]
    return Figure(*(scale * v / base for v in values))


def beyond(series: Sequence[float], base: float, scale: float = 1.0) -> Figure:
    """The same of the difference to ``base``."""
    values = [statistics.median(series), min(series), max(series)]
    return Figure(*(scale * (v - base) for v in values))


# ---------------------------------------------------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------------------------------------------------


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
    if ranks > 1 and "RANK" not in os.environ:
        raise SystemExit(subprocess.call(_launch(ranks), env={**ENVIRONMENT, **os.environ}))
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if ranks > 1:
        dist.init_process_group("gloo")
    tables = measure(args)
    if ranks == 1 or dist.get_rank() == 0:
        print("\n\n".join(table.as_text() for table in tables), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps([table.to_json() for table in tables]))
    if ranks > 1:
        gc.collect()  # what holds the group in a cycle would keep its threads
        dist.destroy_process_group()
    return tables


def _launch(ranks: int) -> list[str]:
    """This very command under torchrun, which finds a free port."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *sys.argv]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the file's docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def progress(text: str) -> None:
    """A line for whoever waits, by rank 0, apart from the tables."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"  {text}", file=sys.stderr, flush=True)
