"""Check correctness and speed on a machine with GPUs: one command, and one file to attach to an issue.

    python benchmarks/gpu.py                                         # all GPUs of this machine, one or more
    python benchmarks/gpu.py --minutes 8                             # the same in order of value, until the time is over
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 benchmarks/gpu.py   # on both hosts
    python benchmarks/gpu.py --simulated                             # without a GPU: shows that it runs; no results

On several GPUs each has a rank. On one GPU, two ranks and then four share it: NCCL allows that from version 2.30 on
(``NCCL_MULTI_RANK_GPU_ENABLE=1``), and ``--nccl LIBRARY`` loads another one than torch's. If NCCL refuses, collectives go
through the host by gloo, and the report says so. Numbers, streams, memory and graphs of such ranks are real. Their times are
not, and one GPU cannot show the bandwidth between GPUs, and how much of it computation hides.

It needs no answers. Each part has a time limit and processes of its own. A case that fails is a finding, and the others run;
if a process ends or hangs, new ones run the cases that are left. Each part checks something: its verdict is right or wrong.
On the simulated device, ``test/accelerator/test_report.py`` plants a fault in each. The parts, in order of value:

- probe: sums over all ranks, and the time of small and large gathers.
- correctness: every mode trains a small GPT on all ranks, and is compared with one process that trains on the full batch
  (``gpu_parity.py``): strategies, late and poisoned devices with a planted fault, captured steps, schedules, offload,
  precision, models. In float64, the tolerance is 1e-9 of the change by training. FSDP2 has the same check.
- host: ``host_overhead.py`` on the GPU: host time of a unit.
- step: ``one_gpu.py``: a GPT of 1.3 billion parameters in bf16, over the fake group of 8, also with offload.
- predictions: ``predictions.py``: the peak of memory that ``plan`` and ``fit`` predict, against the measured one.
- tests that need a GPU, if pytest is installed (``pip install -e '.[test]'``).
- hybrid: hybrid strategies on four ranks, or on all GPUs.
- races: some modes under torch's stream sanitizer (``TORCH_CUDA_SANITIZER``), and a planted race that it must find.
- steps: a GPT of 670 million parameters on all ranks, in fp32 and bf16, with FSDP2, FSDP1 and DDP: time, memory, overlap.
- nccl: the GPT of 1.3 billion parameters over NCCL with one rank.
- kernels: ``gpu_kernels.py``: alignment of parameters, compiled units, checkpoints.
- switch: ``switch.py``: seconds for each GiB of training state that moves to host memory and back.
- tables, without ``--minutes``: ``one_gpu.py`` in full: kernels, bytes copied, host waits, graphs.
- memcheck, without ``--minutes``: if compute-sanitizer is installed, some modes under it, with an allocator that frees memory
  immediately.

``gpu-report.txt`` (``--out``) is written again after each part, so an interrupted run has a report, too. With torchrun, the
host of rank 0 writes it. It begins with a verdict a part. It has versions, GPUs, and the environment variables of NCCL and
torch, but neither the machine's name nor its folders.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
from gpu_processes import GRACE, HERE, ROOT, environments, prepare_forks, run_all, tail, without_a_job
from ranks import are_started
from suite import Figure, Table, arguments, check, commit

import flatshard.env

MINUTE = 60.0


# -- the report --------------------------------------------------------------------------------------------------------


@dataclass
class Section:
    """A section of the report."""

    title: str
    text: str
    problems: list[str] = field(default_factory=list)
    """Findings for the top of the report, one line each."""
    verdict: str = "done"
    """A few words for the top of the report."""
    has_run: bool = True
    seconds: float = 0.0

    def line(self) -> str:
        """Return the line for the top of the report."""
        outcome = "WRONG" if self.problems else "right" if self.has_run else "not run"
        took = f", {self.seconds:.0f} s" if self.has_run else ""
        return f"{outcome:8}{self.title}: {self.verdict}{took}"


def error_of(case: Mapping[str, Any]) -> str:
    """Return a case's error with the ranks that failed, or "" if none did."""
    if "ended" in case:
        return f"{case['ended']}; here: {case['ranks'][0].get('error', 'no error')}"
    failed = [rank for rank, mine in enumerate(case["ranks"]) if "error" in mine]
    if not failed:
        return ""
    first = case["ranks"][failed[0]]
    return f"failed on {len(failed)} of {len(case['ranks'])} ranks: {first['error']}\n{first.get('where', '')}".rstrip()


FAULT = "a planted fault"
"""Beginning of the names of cases that must be found wrong."""


def verdict_of(case: Mapping[str, Any]) -> str:
    """Return a case's verdict. A planted fault must be found."""
    if "left out" in case:
        return f"left out, {case['left out']}"
    is_fault = f": {FAULT}" in case["case"]
    if error := error_of(case):
        return f"right, the fault fails: {error.partition(chr(10))[0]}" if is_fault else f"FAILED: {error}"
    off, allowed = max(mine["off"] for mine in case["ranks"]), case["ranks"][0]["allowed"]
    if is_fault:
        return f"right, the fault is seen: off by {off:.1e}" if off > allowed else "WRONG: the fault is not seen"
    figures = {key: value for key, value in case["ranks"][0].items() if key not in ("off", "allowed")}
    more = "".join(f"; {key}: {value:,.3g}" for key, value in figures.items())
    return f"{'right' if off <= allowed else 'WRONG'}, off by {off:.1e} of the change (allowed: {allowed:g}){more}"


def of_parity(part: str, cases: Iterable[Mapping[str, Any]]) -> Section:
    """Report the correctness of each mode in a line."""
    verdicts = {case["case"]: verdict_of(case) for case in cases}
    problems = [
        f"{name}: {text}".partition("\n")[0] for name, text in verdicts.items() if text.startswith(("FAILED", "WRONG"))
    ]
    right = sum(text.startswith("right") for text in verdicts.values())
    text = "\n".join(f"{name}: {text}" for name, text in verdicts.items())
    return Section(part, text, problems, f"{right} right, {len(problems)} wrong", has_run=right + len(problems) > 0)


def of_figures(part: str, cases: Iterable[Mapping[str, Any]]) -> Section:
    """Report figures as a table, each the largest of all ranks. Errors have their first line there, and the rest below."""
    rows: dict[str, dict[str, Figure]] = {}
    errors = []
    for case in cases:
        name = case["case"].removeprefix(f"{part}: ")
        if error := error_of(case):
            rows[name] = {"": Figure(None, note="failed, see below")}
            errors.append(f"FAILED: {name}: {error}")
        else:
            ranks = case["ranks"]
            rows[name] = {column: Figure(max(mine[column] for mine in ranks)) for column in ranks[0]}
    notes = [*checks_of_figures(rows), *errors]
    title, floor = "the largest figure of all ranks", "none is known; plain sends nothing"
    return of_notes(part, Table(part, title, floor, rows, notes=notes, digits=3).as_text())


def checks_of_figures(rows: Mapping[str, Mapping[str, Figure]]) -> list[str]:
    """Compare contenders' losses after as many steps, and flatshard's peak of memory with FSDP2's."""
    found = []
    for dtype, base in (("", "plain"), (", bf16", "FSDP2")):  # plain has bf16 parameters, and rounds each update
        of_dtype = {
            name.removesuffix(", bf16"): row for name, row in rows.items() if name.endswith(", bf16") is bool(dtype)
        }
        losses = {name: row["loss"].value or math.nan for name, row in of_dtype.items() if "loss" in row}
        for name in losses if base in losses else ():
            off = abs(losses[name] / losses[base] - 1)
            if name not in (base, "plain"):
                found.append(check(f"{name}{dtype}: loss over {base}'s, off by", off, LOSS_OFF[dtype]))
        peaks = {name: of_dtype[name]["peak, MiB"].value or math.nan for name in losses}
        if {"flatshard", "FSDP2"} <= peaks.keys():
            found.append(check(f"flatshard's peak over FSDP2's{dtype}", peaks["flatshard"] / peaks["FSDP2"], 1.05))
    return found


LOSS_OFF = {"": 0.001, ", bf16": 0.02}
"""Relative error of losses."""


def of_notes(title: str, printed: str, problem: str = "") -> Section:
    """Report a benchmark's tables, whose checks are lines that begin with "right" or "WRONG"."""
    lines = printed.splitlines()
    problems = [line for line in lines if line.startswith(("WRONG: ", "FAILED: "))]
    right = sum(line.startswith("right: ") for line in lines)
    section = Section(title, printed.rstrip(), problems, f"{right} right, {len(problems)} wrong")
    return with_problem(section, problem or "nothing was checked" * (right + len(problems) == 0))


@dataclass
class Report:
    """The report so far, as text. It is written after each section."""

    path: Path | None
    head: str
    sections: list[Section] = field(default_factory=list)

    def add(self, section: Section) -> None:
        self.sections.append(section)
        print(f"\n== {section.title}\n{section.text}", flush=True)
        if self.path is not None:
            self.path.write_text(self.text())

    def text(self) -> str:
        parts = [self.head, "A verdict a part:", *(section.line() for section in self.sections), LIMITS]
        problems = [f"- {section.title}: {line}" for section in self.sections for line in section.problems]
        parts += [f"{len(problems)} findings", *problems]
        parts += [f"\n== {section.title}\n\n{section.text}" for section in self.sections]
        return anonymous("\n".join(parts) + "\n")


def anonymous(text: str) -> str:
    """Remove the names of this machine and its folders."""
    master = os.environ.get("MASTER_ADDR", "")
    names = {str(ROOT): ".", sys.prefix: "PYTHON", str(Path.home()): "~", socket.gethostname(): "HOST"}
    names |= {master: "MASTER"} if master not in ("", "localhost", "127.0.0.1") else {}
    for name, shown in sorted(names.items(), key=lambda item: -len(item[0])):
        text = text.replace(name, shown) if len(name) > 1 else text
    return text


def head(machine: Machine) -> str:
    """Describe the machine and the versions."""
    ranks = "two or four ranks that share a GPU" if machine.shares else f"{machine.gpus} ranks"
    ranks += " on the simulated device: no results" * machine.is_simulated
    lines = [f"flatshard on {ranks}, {time.strftime('%Y-%m-%d')}, commit {commit()}", flatshard.env.report()]
    if shutil.which("nvidia-smi"):
        query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        for options in (query, ["topo", "-m"]):
            done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True)
            lines.append(done.stdout.rstrip())
    return "\n".join(lines) + "\n"


def read(results: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Read rank 0's results: the names of all cases, and the results of those that ran."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return [name for line in lines for name in line.get("cases", ())], [line for line in lines if "case" in line]


# -- the parts ---------------------------------------------------------------------------------------------------------

LARGE = [
    "--layers",
    "24",
    "--width",
    "2048",
    "--context",
    "2048",
    "--vocabulary",
    "32000",
    "--batch",
    "4",
    "--rounds",
    "8",
]
"""The GPT of 1.3 billion parameters."""
LIMITS = """\
One GPU cannot tell: the bandwidth between GPUs, and how much of it computation hides. Times of ranks that share it are none.
The simulated device cannot tell: times, kernels, NCCL, errors of CUDA, and what PyTorch's allocator reserves."""
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
"""Environment of ranks that share a GPU."""


@dataclass
class Machine:
    """The devices of all parts: ``gpus`` of them, on one of which several ranks run."""

    device: str
    gpus: int
    end: float
    """The time at which the last part ends, by ``time.monotonic()``."""
    nccl: str = ""
    """Path of another NCCL library than torch's."""
    by_host: bool = False
    """Whether ranks that share a GPU communicate through the host, as NCCL refused."""

    @property
    def is_simulated(self) -> bool:
        return self.device == "simulated"

    @property
    def shares(self) -> bool:
        """Whether ranks share a GPU."""
        return self.device == "cuda" and self.gpus == 1 and not are_started()

    def left(self, limit: float) -> float:
        """Return the seconds that a part with this limit has."""
        return min(limit, self.end - time.monotonic())

    def ranks(self, count: int, **env: str) -> list[dict[str, str]]:
        """Return the environments of the ranks."""
        more = {**({"LD_PRELOAD": self.nccl} if self.nccl else {}), **env}
        if not self.shares:
            return environments(count if self.is_simulated else self.gpus, **more)
        return [{**each, "LOCAL_RANK": "0"} for each in environments(count, **SHARED, **more)]

    def on_ranks(self, title: str, parts: Sequence[str], limit: float, count: int = 2, **env: str) -> Section:
        """Run parts of ``gpu_ranks.py`` on all ranks, or on ``count`` that share a GPU.

        If a process ends or hangs, new ones run the cases that are left.
        """
        problems, end = [], time.monotonic() + self.left(limit)
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results"
            results.touch()
            names: list[str] = []
            cases: list[dict[str, Any]] = []
            while (seconds := end - time.monotonic()) > 0:
                command = [
                    *self.script("gpu_ranks"),
                    "--parts",
                    *parts,
                    "--results",
                    str(results),
                    "--device",
                    self.device,
                ]
                command += ["--skip", str(len(cases)), "--seconds", str(seconds), *["--by-host"] * self.by_host]
                _, problem = run_all(command, self.ranks(count, **env), seconds + GRACE, self.is_simulated)
                before = len(cases)  # without a new result, another try would end there, too
                names, cases = read(results)
                if problem:
                    problems.append(problem)
                if not problem or len(cases) in (before, len(names)) or are_started():
                    break
        figures = parts == ["steps"]
        section = of_figures(title, cases) if figures else of_parity(title, cases)
        if missed := names[len(cases) :]:
            section.verdict += f", {len(missed)} not reached"
            section.text += f"\nnot reached: {', '.join(missed)}"
        return with_problem(section, "\n".join(problems))

    def probe(self, limit: float) -> Section:
        """Find out whether ranks can communicate. If NCCL refuses to share a GPU, later parts go through the host."""
        section = self.on_ranks("probe", ["probe"], limit)
        if self.shares and section.problems:
            self.by_host = True
            other = self.on_ranks("probe", ["probe"], limit)
            section = Section(section.title, f"{section.text}\n{other.text}", other.problems)
            section.verdict = "NCCL refuses several ranks on one GPU: collectives go through the host, by gloo"
            section.verdict += ", and fail there, too" * bool(other.problems)
        return section

    def script(self, name: str) -> list[str]:
        return [sys.executable, str(HERE / f"{name}.py")]

    def tables(self, title: str, script: str, limit: float, *options: str) -> Section:
        """Run a benchmark in a process of its own."""
        command = [*self.script(script), *options, *["--simulated"] * self.is_simulated]
        printed, problem = run_all(command, [without_a_job()], self.left(limit), self.is_simulated)
        return of_notes(title, printed, problem)

    def memcheck(self, limit: float) -> Section:
        title = "memcheck"
        found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if not found:
            return Section(title, "", verdict="compute-sanitizer is not installed here", has_run=False)
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results"
            results.touch()
            tool = [found, "--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "5"]
            command = [*tool, *self.script("gpu_ranks"), "--parts", "races", "--results", str(results)]
            env = without_a_job(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
            printed, problem = run_all(command, [env], self.left(limit))
            section = of_parity(title, read(results)[1])
        section.text += f"\n{tail(printed, 5)}"
        return with_problem(section, problem)

    def tests(self, limit: float) -> Section:
        if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("expecttest") is None:
            why = "pytest or expecttest is not installed: pip install -e '.[test]'"
            return Section("tests", "", verdict=why, has_run=False)
        folder = str(ROOT / "test" / "accelerator" / "test_gpu.py")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--lanes", "1", folder]
        printed, problem = run_all(command, [without_a_job(OMP_NUM_THREADS="1")], self.left(limit))
        return with_problem(Section("tests", tail(printed, 5)), problem)


def with_problem(section: Section, problem: str) -> Section:
    if problem:
        section.text += f"\n{problem}"
        section.problems.append(problem.partition("\n")[0])
        section.verdict += f", {section.problems[-1].rstrip(':')}"
        section.has_run = True
    return section


@dataclass(frozen=True)
class Part:
    """A part of the report."""

    name: str
    seconds: float
    """Time limit with ``--minutes``. Without, it is four times as long."""
    run: Callable[[Machine, float], Section]
    on_all: bool = False
    """Whether all ranks of torchrun take part. Rank 0 alone runs the others."""
    in_short: bool = True
    """Whether it runs with ``--minutes``."""
    simulated: bool = True

    def section(self, machine: Machine, limit: float) -> Section:
        """Run the part, if there is time, and return its section."""
        if machine.is_simulated and not self.simulated:
            return Section(self.name, "", verdict="needs a GPU", has_run=False)
        if (left := machine.left(limit)) < 5:
            return Section(self.name, "not begun", verdict="no time was left", has_run=False)
        began = time.perf_counter()
        section = self.run(machine, left)
        section.seconds = time.perf_counter() - began
        section.title += ", simulated, no results" * machine.is_simulated
        return section


def on_ranks(name: str, seconds: float, parts: Sequence[str], count: int = 2, **options: Any) -> Part:
    """Return a part that runs parts of ``gpu_ranks.py``."""
    env = options.pop("env", {})
    return Part(name, seconds, lambda m, limit: m.on_ranks(name, parts, limit, count, **env), on_all=True, **options)


def tables(
    name: str, seconds: float, script: str, *arguments: str, if_simulated: Sequence[str] = (), **options: Any
) -> Part:
    """Return a part that is a benchmark of its own."""

    def run(machine: Machine, limit: float) -> Section:
        return machine.tables(name, script, limit, *arguments, *(if_simulated if machine.is_simulated else ()))

    return Part(name, seconds, run, **options)


OFFLOAD = "flatshard, offload"
SHORT_ROWS = ["--rows", "plain", "flatshard", "flatshard, static buffers", "FSDP2", "FSDP1"]
FEW_PLACES = ["--places", "gpu_fake_8_bf16", "gpu_nccl_1"]
CORRECTNESS = ["strategies", "disturbances", "capture", "schedules", "offload", "precision", "models", "others"]
PARTS = [
    Part("probe", 40, Machine.probe, on_all=True),
    on_ranks("correctness", 150, CORRECTNESS),
    tables("host", 60, "host_overhead", "--gpu", "--units", "50"),
    tables("step", 90, "one_gpu", "--places", "gpu_fake_8_bf16", *SHORT_ROWS, OFFLOAD, *LARGE),
    tables("predictions", 40, "predictions"),
    Part("tests", 70, Machine.tests, simulated=False),
    on_ranks("hybrid", 50, ["hybrid"], 4),
    on_ranks("races", 50, ["races"], env={"TORCH_CUDA_SANITIZER": "1"}),
    on_ranks("steps", 60, ["steps"]),
    tables("nccl", 60, "one_gpu", "--places", "gpu_nccl_1_bf16", *SHORT_ROWS, *LARGE),
    tables("kernels", 60, "gpu_kernels"),
    tables("switch", 50, "switch", "--layers", "6", "--rounds", "3"),
    tables("tables", 300, "one_gpu", "--graphs", if_simulated=FEW_PLACES, in_short=False),
    Part("memcheck", 200, Machine.memcheck, in_short=False, simulated=False),
]


def main(given: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, help="the report; default: gpu-report.txt, and none with --simulated")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="these parts")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no part later, and shorten parts to fit")
    parser.add_argument(
        "--nccl", default="", metavar="LIBRARY", help="another NCCL library than torch's, for all ranks"
    )
    parser.add_argument("--simulated", action="store_true", help="two ranks on the simulated device: no results")
    args = parser.parse_args(given)
    if not args.simulated and not torch.cuda.is_available():
        raise SystemExit("gpu.py: no GPU is available here. --simulated shows, tiny and without one, that it runs")
    is_short = args.minutes < math.inf
    end = time.monotonic() + MINUTE * args.minutes
    gpus = 2 if args.simulated else torch.cuda.device_count()
    count = int(os.environ.get("WORLD_SIZE", gpus))
    machine = Machine("simulated" if args.simulated else "cuda", count, end, args.nccl)
    reports = os.environ.get("RANK", "0") == "0"
    out = args.out or (None if args.simulated else Path("gpu-report.txt"))
    report = Report(out if reports else None, head(machine) if reports else "")
    if args.simulated:
        prepare_forks()
    for part in PARTS:
        # Under torchrun, each process runs this file. Only parts on all ranks need them all.
        is_wanted = part.name in args.only if args.only else part.in_short or not is_short
        if is_wanted and (part.on_all or reports):
            section = part.section(machine, part.seconds * (1 if is_short else 4))
            if reports:
                report.add(section)
    problems = [line for section in report.sections for line in section.problems]
    if reports:
        where = "" if report.path is None else f". Attach {report.path} to an issue, please"
        print(f"\n{len(problems)} findings{where}", flush=True)
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
