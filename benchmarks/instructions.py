"""Instructions that sharding adds to a unit's forward and backward, counted by callgrind, with the fake process group.

    python benchmarks/instructions.py               # two minutes of one core; needs valgrind (apt install valgrind)
    python benchmarks/instructions.py --profiles    # and keep callgrind's files, for callgrind_annotate

What ``host_overhead.py`` times, of the same units, is counted here: load does not change a count, so it tells a change of one
in a thousand. All contenders run in one process under valgrind, each alone, in eager steps after warm-up, and Python's own
collector is off. The plain model's count is subtracted. A count is of one build of Python and torch: compare within one run.

The fake group imitates what a real one would deliver, and no real one executes that on the host. It is counted alone, as
"imitation": what callgrind counts inside torch's fake group (it fills the output of an all-gather rank by rank), and of
flatshard, which fills the output by operations of its own, the difference to a run whose collectives are one call into the
group (``OneCall``). "net" is the rest. DDP reduces nothing: it would be one call in a step.

The floor: what those operations take that no eager flat design can leave out, as in ``host_overhead.py``. Their collectives
are ``OneCall``'s.
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
"""Of FSDP2's, both net."""
WARM_UP = 6
"""Steps that are not counted: caches are filled, and Python's bytecode specialises."""
TOOLS = "valgrind", "callgrind_control", "callgrind_annotate"
IMITATION = "c10d::FakeProcessGroup::"
PLAIN, FLOOR = "plain", "floor"
PRECISIONS = {False: "fp32", True: "bf16"}
NOTHING = "nothing"
"""An empty step: what it takes to begin and to end a count."""


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
    """What is counted: a contender in one precision."""

    name: str
    bf16: bool = False
    fills: bool = True
    """False: flatshard with collectives that fill nothing."""

    def step(self, units: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """What is counted, and what follows it uncounted."""
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
            # It takes the result of an all-reduce from the group's work, and the fake group's has none.
            model.register_comm_hook(None, noop_hook)
        x = host_overhead.batch(torch.bfloat16 if self.bf16 else torch.float32)
        return lambda: model(x).sum().backward(), lambda: drop_gradients(model)


def counts() -> list[Count]:
    """In the order in which they are counted. DDP has no bf16."""
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
    """Tell the callgrind that runs this process."""
    command = ["callgrind_control", *options, str(os.getpid())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run_counted(units: int, steps: int) -> None:
    """Run all counts in this process: callgrind writes a file after each."""
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


# -- what it has counted -----------------------------------------------------------------------------------------------


def profiles(folder: Path, units: int, steps: int) -> Iterator[tuple[Count, Path]]:
    """Run callgrind; yields its files, one for each count.

    Raises:
        SystemExit: valgrind is not installed, or the counted process has failed.
    """
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise SystemExit(
            f"instructions.py counts with valgrind, and {', '.join(missing)} is not there: install the package valgrind "
            "(apt install valgrind)"
        )
    here = Path(__file__).parent
    search = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    # The same hashes, addresses of stacks and threads in each run.
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
    """All instructions in one of callgrind's files."""
    (line,) = (line for line in profile.read_text().splitlines() if line.startswith("totals:"))
    return int(line.split()[1])


def inside(annotated: str, function: str) -> int:
    """The instructions in functions whose name begins with ``function``, and in what they call. ``annotated``: inclusive."""
    lines = (line.strip() for line in annotated.splitlines() if f":{function}" in line)
    return sum(int(line.split()[0].replace(",", "")) for line in lines)


def imitation(profile: Path) -> int:
    """The instructions in torch's fake group."""
    command = ["callgrind_annotate", "--inclusive=yes", "--threshold=100", str(profile)]
    return inside(subprocess.run(command, check=True, capture_output=True, text=True).stdout, IMITATION)


def rows(found: dict[Count, tuple[int, int]]) -> dict[str, dict[str, Figure]]:
    """From each count's total and imitation, per unit and step: one row per contender and precision."""
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
