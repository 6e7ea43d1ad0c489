"""Run the benchmarks and print their tables: the quick set, in under five minutes on two cores.

    python benchmarks/run.py
    python benchmarks/run.py --only copied_bytes memory
    python benchmarks/run.py --full

Each benchmark is a process of its own, which starts the gloo ranks that it needs. Tables, with the versions, the hardware,
the commit and this command, are written to ``benchmarks/results/`` as text and JSON. Timed figures are medians, with the
minimum and the maximum of their rounds in brackets. On a shared machine only ratios within one run are meaningful. Counts are
exact.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from ranks import set_environment
from suite import Table, arguments, commit

HERE = Path(__file__).parent
QUICK = (
    "copied_bytes",
    "memory",
    "host_overhead",
    "optimizer_overhead",
    "setup_time",
    "step_time",
    "small_steps",
    "one_gpu",
)
MORE = ("checkpoint", "engine_patches", "instructions", "shared_memory", "weight_updates")
"""Benchmarks that run with ``--full``, or by name."""


def describe(command: str) -> dict[str, str]:
    """Describe how results are made: versions, processors, and the commit, without host names and paths."""
    gpus = "none"
    if torch.cuda.is_available():
        gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    info = Path("/proc/cpuinfo")  # Linux only
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} on {platform.machine()}",
        "cpu": f"{[*models, platform.processor() or 'unknown'][0]}, {os.cpu_count()} cores, 1 thread a rank",
        "gpu": gpus,
    }


def run(name: str, full: bool) -> list[Table]:
    """Run a benchmark in a process of its own, which prints its tables, and return these.

    Raises:
        RuntimeError: it failed; its error is on standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tables.json"
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(path), *(["--full"] if full else [])]
        search = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": search})
        print(flush=True)
        if done.returncode or not path.exists():
            raise RuntimeError(f"{name}.py ended with {done.returncode} and without results")
        return [Table.from_json(table) for table in json.loads(path.read_text())]


def summary(tables: Sequence[Table]) -> list[str]:
    """Return the number of met targets, and the missed ones."""
    judged = [(table, judgement) for table in tables for judgement in table.judged()]
    missed = [
        f"missed: {table.name}, {name}, {column}: {value:.{table.digits}f}, target {target:g}"
        for table, (name, column, value, target, is_missed) in judged
        if is_missed
    ]
    return [f"{len(judged) - len(missed)} of {len(judged)} targets are met", *missed]


def write(stem: Path, about: dict[str, str], tables: Sequence[Table], notes: Sequence[str]) -> None:
    """Write the results' two files."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    head = "\n".join(f"{key}: {value}" for key, value in about.items())
    text = "\n\n".join([head, *(table.as_text() for table in tables), "\n".join(notes)]) + "\n"
    stem.with_suffix(".txt").write_text(text)
    data = {**about, "notes": list(notes), "tables": [dataclasses.asdict(table) for table in tables]}
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--full", action="store_true", help="more rounds, sizes, contenders and benchmarks")
    made.add_argument("--only", nargs="+", choices=[*QUICK, *MORE], metavar="NAME", help=", ".join([*QUICK, *MORE]))
    where = "where to write (default: benchmarks/results)"
    made.add_argument("--results", type=Path, default=HERE / "results", help=where)
    return made


def main() -> None:
    args = parser().parse_args()
    set_environment()
    names = args.only or [*QUICK, *(MORE if args.full else ())]
    options = [*(["--full"] if args.full else []), *(["--only", *args.only] if args.only else [])]
    about = describe(" ".join(["python benchmarks/run.py", *options]))
    tables: list[Table] = []
    failures = []
    began = time.perf_counter()
    for number, name in enumerate(names, 1):
        print(f"[{time.perf_counter() - began:4.0f} s] {name} ({number} of {len(names)})", file=sys.stderr, flush=True)
        try:
            tables += run(name, args.full)
        except RuntimeError as e:
            failures.append(str(e))
    about["seconds"] = f"{time.perf_counter() - began:.0f}"
    notes = [*failures, *summary(tables)]
    print("\n".join([*(f"{key}: {value}" for key, value in about.items()), "", *notes]))
    stem = "-".join([*(args.only or []), *(["full"] if args.full else [])]) or "quick"
    write(args.results / stem, about, tables, notes)
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
