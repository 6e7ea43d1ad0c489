"""Instructions that sharding adds to a unit's forward and backward, counted by callgrind, over the fake process group.

    python benchmarks/instructions.py               # four minutes of one core; needs valgrind (apt install valgrind)
    python benchmarks/instructions.py --profiles    # and keep callgrind's files, for callgrind_annotate

The units are those of ``host_overhead.py``. Load does not change a count, so a change of one in a thousand is visible. All
contenders run in one process under valgrind, one at a time, in eager steps after warm-up, without Python's garbage collector.
The plain model's count is subtracted. Counts depend on the build of Python and torch: compare within one run.

The imitation of other ranks is left out, as in ``host_overhead.py``. DDP reduces nothing here: it would be one call in a
step.

callgrind simulates caches and branches, too: "L1 misses" are of instructions and data, of 32 KiB each by default, and
"mispredicted" are branches. "cycles" is callgrind's estimate: instructions, 10 for each of these, and 100 for each access to
memory. So it tells how far time is from instructions, whatever else runs.

The floor: instructions of the operations that every eager flat design needs, as in ``host_overhead.py``.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import checkout  # noqa: F401
import host_overhead
import torch
from contenders import Setting, build, drop_gradients, filling_nothing
from suite import OURS, Benchmark, Figure, Table, fake_world, progress
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

WORLD_SIZE = 64
TARGET = 0.12
"""Maximum ratio to FSDP2's."""
WARM_UP = 6
"""Number of uncounted steps, which fill caches and let Python specialise its bytecode."""
TOOLS = "valgrind", "callgrind_control"
PLAIN, FLOOR = "plain", "floor"
PRECISIONS = {False: "fp32", True: "bf16"}
NOTHING = "nothing"
"""An empty step, which counts the start and the end of a count."""


@dataclass(frozen=True)
class Count:
    """A counted contender in one precision."""

    name: str
    bf16: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether it is no model beside the plain one."""
        return self.name in (PLAIN, FLOOR)

    def step(self, units: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return the counted part of a step, and the uncounted part after it."""
        if self.name == NOTHING:
            return lambda: None, lambda: None
        if self.name == FLOOR:
            return host_overhead.floor(WORLD_SIZE, units, self.bf16), lambda: None
        torch.manual_seed(0)
        setting = Setting(host_overhead.Unit, bf16=self.bf16)
        model = build(self.name, host_overhead.units(units), setting)
        if self.name == "DDP":
            # DDP reads an all-reduce's result from the group's work, which the fake group does not provide.
            model.register_comm_hook(None, noop_hook)
        x = host_overhead.batch(torch.bfloat16 if self.bf16 else torch.float32)
        return lambda: model(x).sum().backward(), lambda: drop_gradients(model)


def counts() -> list[Count]:
    """Return the counts in the order in which they run. DDP has no bf16."""
    found = [Count(NOTHING), Count("DDP")]
    for bf16 in (False, True):
        found += [Count(name, bf16) for name in (PLAIN, OURS, "FSDP2", FLOOR)]
    return found


# -- under valgrind ----------------------------------------------------------------------------------------------------


def control(*options: str) -> None:
    """Send a command to the callgrind that runs this process."""
    command = ["callgrind_control", *options, str(os.getpid())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run_counted(units: int, steps: int) -> None:
    """Run all counts in this process; callgrind writes a file after each."""
    torch.set_num_threads(1)
    with fake_world(WORLD_SIZE), filling_nothing():
        for count in counts():
            progress(f"instructions, {count}")
            step, after = count.step(units)
            for _ in range(WARM_UP):
                step()
                after()
            gc.collect()
            gc.disable()
            for _ in range(steps):
                control("--instr=on")
                step()
                control("--instr=off")
                after()
            control("--dump")
            gc.enable()


# -- results of callgrind ----------------------------------------------------------------------------------------------


def profiles(folder: Path, units: int, steps: int) -> Iterator[tuple[Count, Path]]:
    """Run callgrind; yield its files, one for each count.

    Raises:
        SystemExit: valgrind is not installed, or the counted process failed.
    """
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise SystemExit(
            f"instructions.py counts with valgrind, and {', '.join(missing)} is not there: install the package valgrind "
            "(apt install valgrind)"
        )
    here = Path(__file__).parent
    search = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Each run has equal hashes, stack addresses and threads.
    env = {**os.environ, "PYTHONPATH": search, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    out, log = folder / "callgrind.out", folder / "valgrind.log"
    valgrind = [
        "valgrind",
        "--tool=callgrind",
        "--instr-atstart=no",
        "--cache-sim=yes",
        "--branch-sim=yes",
        f"--callgrind-out-file={out}",
        f"--log-file={log}",
    ]
    body = f"import instructions; instructions.run_counted({units}, {steps})"
    done = subprocess.run([*valgrind, sys.executable, "-W", "ignore", "-c", body], env=env)
    if done.returncode:
        raise SystemExit(f"the counted process ended with {done.returncode}; valgrind says:\n{log.read_text()[-2000:]}")
    yield from ((count, Path(f"{out}.{number}")) for number, count in enumerate(counts(), 1))


def events(profile: Path) -> dict[str, int]:
    """Return how often each event of callgrind came, by its short name, in all of a file."""
    lines = dict(
        line.split(": ", 1) for line in profile.read_text().splitlines() if line.startswith(("events:", "totals:"))
    )
    return dict(zip(lines["events"].split(), map(int, lines["totals"].split()), strict=True))


COLUMNS: dict[str, dict[str, int]] = {
    "instructions": {"Ir": 1},
    "L1 misses": {"I1mr": 1, "D1mr": 1, "D1mw": 1},
    "mispredicted": {"Bcm": 1, "Bim": 1},
    "cycles": {"Ir": 1}
    | dict.fromkeys(("I1mr", "D1mr", "D1mw", "Bcm", "Bim"), 10)
    | dict.fromkeys(("ILmr", "DLmr", "DLmw"), 100),
}
"""The weights of callgrind's events in each column."""
COMPARED = "instructions", "cycles"


def rows(found: dict[Count, dict[str, int]], each: int) -> dict[str, dict[str, Figure]]:
    """Return a row per contender and precision, from each count's events in ``each`` units and steps."""
    counted: dict[Count, dict[str, int]] = {}
    for count, of_count in found.items():
        if count.name != NOTHING:
            base = found[Count(NOTHING) if count.is_alone else Count(PLAIN, count.bf16)]
            counted[count] = {
                column: sum(weight * (of_count[event] - base[event]) for event, weight in weights.items()) // each
                for column, weights in COLUMNS.items()
            }
    result = {}
    for count, figures in counted.items():
        row = {column: Figure(value) for column, value in figures.items()}
        if count.name != PLAIN:
            peer = counted[Count("FSDP2", count.bf16)]
            row |= {f"{column}, over FSDP2's": Figure(figures[column] / peer[column]) for column in COMPARED}
        result[f"{count.name}{' (in all)' * count.is_alone}, {PRECISIONS[count.bf16]}"] = row
    return result


def measure(args: argparse.Namespace) -> list[Table]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(tempfile.mkdtemp(prefix="callgrind-", dir=".")) if args.profiles else Path(temporary)
        found = {count: events(profile) for count, profile in profiles(folder, args.units, args.steps)}
    kept = [f"callgrind's files are in {folder}, in the order of the counts"] if args.profiles else []
    return [
        Table(
            "instructions",
            "instructions of forward + backward over the plain model, per unit of 12 small parameters, counted by callgrind "
            f"(fake group of {WORLD_SIZE}, {args.units} units, {args.steps} steps)",
            "what no eager flat design can leave out, counted alone",
            rows(found, args.units * args.steps),
            {f"{OURS}, {precision}": {"instructions, over FSDP2's": TARGET} for precision in PRECISIONS.values()},
            kept,
            digits=3,
        )
    ]


BENCHMARK = Benchmark(
    measure,
    __doc__,
    sizes={"units": 20, "steps": 2},
    flags={"profiles": "keep callgrind's files in a new folder here"},
)

if __name__ == "__main__":
    BENCHMARK.main()
