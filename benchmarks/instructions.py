"""Instructions that sharding adds to a unit's forward and backward, counted by callgrind, over the fake process group.

    python benchmarks/instructions.py               # two minutes of one core; needs valgrind (apt install valgrind)
    python benchmarks/instructions.py --profiles    # and keep callgrind's files, for callgrind_annotate

The units are those of ``host_overhead.py``. Load does not change a count, so a change of one in a thousand is visible. All
contenders run in one process under valgrind, one at a time, in eager steps after warm-up, without Python's garbage collector.
The plain model's count is subtracted. Counts depend on the build of Python and torch: compare within one run.

The fake group imitates the data of other ranks, for which the host of a real group runs nothing. It is counted alone, as
"imitation": for torch's fake group, which fills an all-gather's output rank by rank, the instructions inside of it. flatshard
fills the output by operations of its own, so its imitation is the difference to collectives that are one call into the group
(``OneCall``). "net" is the rest. DDP reduces nothing here: it would be one call in a step.

The floor: instructions of the operations that every eager flat design needs, as in ``host_overhead.py``, with ``OneCall``'s
collectives.
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
from dataclasses import dataclass, replace
from pathlib import Path

import checkout  # noqa: F401
import host_overhead
import torch
from contenders import Setting, build, drop_gradients
from suite import OURS, Benchmark, Figure, Table, fake_world, progress
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from flatshard._comm.collectives import Pending
from flatshard._comm.fake_group import FakeCollectives
from flatshard._comm.progress import Label

WORLD_SIZE = 64
TARGET = 0.12
"""Maximum ratio to FSDP2's, both net."""
WARM_UP = 6
"""Number of uncounted steps, which fill caches and let Python specialise its bytecode."""
TOOLS = "valgrind", "callgrind_control", "callgrind_annotate"
IMITATION = "c10d::FakeProcessGroup::"
PLAIN, FLOOR = "plain", "floor"
PRECISIONS = {False: "fp32", True: "bf16"}
NOTHING = "nothing"
"""An empty step, which counts the start and the end of a count."""


class OneCall(FakeCollectives):
    """Collectives that fill nothing: one call into the group, as over a real one."""

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, label: Label | None = None) -> Pending:
        return self.group.broadcast(output, 0)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, label: Label | None = None) -> Pending:
        return self.group.broadcast(output, 0)


FILLING = {name: getattr(FakeCollectives, name) for name in ("all_gather", "reduce_scatter")}
"""The collectives of the fake group, which ``OneCall``'s replace: collectives of a user's would take a route of their own."""


@dataclass(frozen=True)
class Count:
    """A counted contender in one precision."""

    name: str
    bf16: bool = False
    fills: bool = True
    """Whether flatshard's collectives fill their output."""

    def step(self, units: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return the counted part of a step, and the uncounted part after it."""
        if self.name == NOTHING:
            return lambda: None, lambda: None
        if self.name == FLOOR:
            return host_overhead.floor(WORLD_SIZE, units, self.bf16, OneCall), lambda: None
        torch.manual_seed(0)
        for name, method in FILLING.items():
            setattr(FakeCollectives, name, method if self.fills else getattr(OneCall, name))
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
        found += [
            Count(PLAIN, bf16),
            Count(OURS, bf16),
            Count(OURS, bf16, fills=False),
            Count("FSDP2", bf16),
            Count(FLOOR, bf16),
        ]
    return found


# -- under valgrind ----------------------------------------------------------------------------------------------------


def control(*options: str) -> None:
    """Send a command to the callgrind that runs this process."""
    command = ["callgrind_control", *options, str(os.getpid())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run_counted(units: int, steps: int) -> None:
    """Run all counts in this process; callgrind writes a file after each."""
    torch.set_num_threads(1)
    with fake_world(WORLD_SIZE):
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
        f"--callgrind-out-file={out}",
        f"--log-file={log}",
    ]
    body = f"import instructions; instructions.run_counted({units}, {steps})"
    done = subprocess.run([*valgrind, sys.executable, "-W", "ignore", "-c", body], env=env)
    if done.returncode:
        raise SystemExit(f"the counted process ended with {done.returncode}; valgrind says:\n{log.read_text()[-2000:]}")
    yield from ((count, Path(f"{out}.{number}")) for number, count in enumerate(counts(), 1))


def total(profile: Path) -> int:
    """Return the number of all instructions in a file of callgrind."""
    (line,) = (line for line in profile.read_text().splitlines() if line.startswith("totals:"))
    return int(line.split()[1])


def inside(annotated: str, function: str) -> int:
    """Return the instructions in functions whose name begins with ``function``, from an inclusive annotation."""
    lines = (line.strip() for line in annotated.splitlines() if f":{function}" in line)
    return sum(int(line.split()[0].replace(",", "")) for line in lines)


def imitation(profile: Path) -> int:
    """Return the instructions in torch's fake group."""
    command = ["callgrind_annotate", "--inclusive=yes", "--threshold=100", str(profile)]
    return inside(subprocess.run(command, check=True, capture_output=True, text=True).stdout, IMITATION)


def rows(found: dict[Count, tuple[int, int]]) -> dict[str, dict[str, Figure]]:
    """Return a row per contender and precision, from each count's total and imitation, per unit and step."""
    result: dict[str, dict[str, Figure]] = {}
    for count, (whole, fake) in found.items():
        if count.name == NOTHING or not count.fills:
            continue
        is_alone = count.name in (PLAIN, FLOOR)
        base = found[Count(NOTHING) if is_alone else Count(PLAIN, count.bf16)][0]
        if count.name == OURS:
            fake += whole - found[replace(count, fills=False)][0]
        figures = {"instructions": whole - base, "imitation": fake, "net": whole - base - fake}
        row = f"{count.name}{' (in all)' * is_alone}, {PRECISIONS[count.bf16]}"
        result[row] = {column: Figure(value) for column, value in figures.items()}
    for row, figures in result.items():
        net, peer = (result[each]["net"].value for each in (row, f"FSDP2, {row.rpartition(', ')[2]}"))
        if not row.startswith(PLAIN) and net and peer:
            figures["net, over FSDP2's"] = Figure(net / peer)
    return result


def measure(args: argparse.Namespace) -> list[Table]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(tempfile.mkdtemp(prefix="callgrind-", dir=".")) if args.profiles else Path(temporary)
        each = args.units * args.steps
        found = {
            count: (total(profile) // each, imitation(profile) // each)
            for count, profile in profiles(folder, args.units, args.steps)
        }
    kept = [f"callgrind's files are in {folder}, in the order of the counts"] if args.profiles else []
    return [
        Table(
            "instructions",
            "instructions of forward + backward over the plain model, per unit of 12 small parameters, counted by callgrind "
            f"(fake group of {WORLD_SIZE}, {args.units} units, {args.steps} steps)",
            "what no eager flat design can leave out, counted alone",
            rows(found),
            {f"{OURS}, {precision}": {"net, over FSDP2's": TARGET} for precision in PRECISIONS.values()},
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
