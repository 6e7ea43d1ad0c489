"""Check correctness and speed on a machine with GPUs: one command, and one file to attach to an issue.

    python benchmarks/gpu.py                                         # all GPUs of this machine, one or more
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 benchmarks/gpu.py   # on both hosts
    python benchmarks/gpu.py --simulated                             # without a GPU: shows that it runs; no results

It needs no answers. Each part runs in processes of its own with a time limit, so a part that fails or hangs is a finding, and
the others run:

- correctness: every mode trains a small GPT on all GPUs, and is compared with one process that trains on the full batch. In
  float64, the tolerance is 1e-9 of the change by training. FSDP2 has the same check.
- races: some of these modes run under torch's stream sanitizer (``TORCH_CUDA_SANITIZER``). If compute-sanitizer is
  installed, they also run on one GPU under its memcheck, with an allocator that frees memory immediately.
- step time, memory, overlap: a GPT of 670 million parameters on all GPUs, in fp32 and bf16, with FSDP2, FSDP1 and DDP.
- capture: a step in a CUDA graph, over NCCL, on all GPUs.
- one GPU: ``one_gpu.py``: the same contenders over the fake group and NCCL with one rank. Kernels, bytes copied, host waits.
- switch: ``switch.py``: seconds for each GiB of training state that moves to host memory and back.
- tests that need a GPU, if pytest is installed (``pip install -e '.[test]'``).

``gpu-report.txt`` (``--out``) is written again after each part, so an interrupted run has a report, too. With torchrun, the
host of rank 0 writes it. It has versions, GPUs, and the environment variables of NCCL and torch, but neither the machine's
name nor its folders.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_ranks
import torch
from ranks import are_started
from run import commit
from suite import Figure, Table, arguments

import flatshard.env

HERE = Path(__file__).parent
ROOT = HERE.parent
MINUTE = 60.0
GRACE = 30.0
"""Seconds for the other ranks to end after one has failed."""
OF_A_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# -- processes ---------------------------------------------------------------------------------------------------------


def run_all(command: Sequence[str], environments: Sequence[Mapping[str, str]], limit: float) -> tuple[str, str]:
    """Run a command in each environment at the same time; return the first one's output, and the error.

    All end after ``limit`` seconds at the latest, and ``GRACE`` seconds after one has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(number) for number in range(len(environments))]
        running = []
        for env, output in zip(environments, outputs, strict=True):
            with output.open("w") as file:
                options: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
                running.append(subprocess.Popen(command, env=env, cwd=ROOT, start_new_session=True, **options))
        end = time.monotonic() + limit
        has_failed = False
        try:
            while None in (codes := [process.poll() for process in running]) and time.monotonic() < end:
                if any(codes) and not has_failed:
                    has_failed, end = True, min(end, time.monotonic() + GRACE)
                time.sleep(0.2)
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        texts = [output.read_text(errors="replace") for output in outputs]
    failed = [number for number, process in enumerate(running) if process.returncode]
    problems = [f"process {n} ended with {running[n].returncode}:\n{tail(texts[n])}" for n in failed[:2]]
    return texts[0], "\n".join(problems)


def tail(text: str, lines: int = 30) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])


def without_a_job(**more: str) -> dict[str, str]:
    """Return an environment for a process that is no rank."""
    kept = {k: v for k, v in os.environ.items() if k not in OF_A_JOB and not k.startswith("TORCHELASTIC_")}
    return {**kept, "PYTHONPATH": search_path(), **more}


def search_path() -> str:
    """Return a path for imports, so that flatshard need not be installed."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def environments(count: int, **more: str) -> list[dict[str, str]]:
    """Return environments of the ranks to start: under torchrun this process's own, otherwise ``count``."""
    if are_started():
        return [{**os.environ, "PYTHONPATH": search_path(), **more}]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        of_all = {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    return [without_a_job(**of_all, RANK=str(i), LOCAL_RANK=str(i), **more) for i in range(count)]


# -- the report --------------------------------------------------------------------------------------------------------


@dataclass
class Section:
    """A section of the report."""

    title: str
    text: str
    problems: list[str] = field(default_factory=list)
    """Findings for the top of the report, one line each."""


def error_of(case: Mapping[str, Any]) -> str:
    """Return a case's error with the ranks that failed, or "" if none did."""
    if "ended" in case:
        return f"{case['ended']}; here: {case['ranks'][0].get('error', 'no error')}"
    failed = [rank for rank, mine in enumerate(case["ranks"]) if "error" in mine]
    if not failed:
        return ""
    first = case["ranks"][failed[0]]
    return f"failed on {len(failed)} of {len(case['ranks'])} ranks: {first['error']}\n{first.get('where', '')}".rstrip()


def of_parity(part: str, cases: Iterable[Mapping[str, Any]]) -> Section:
    """Report the correctness of each mode in a line."""
    lines, problems = [], []
    for case in cases:
        name = case["case"]
        if "left out" in case:
            lines.append(f"{name}: left out, {case['left out']}")
            continue
        if error := error_of(case):
            verdict = f"FAILED: {error}"
        else:
            off, allowed = max(mine["off"] for mine in case["ranks"]), case["ranks"][0]["allowed"]
            verdict = f"{'right' if off <= allowed else 'WRONG'}, off by {off:.1e} of the change (allowed: {allowed:g})"
        lines.append(f"{name}: {verdict}")
        if not verdict.startswith("right"):
            problems.append(lines[-1].partition("\n")[0])
    return Section(part, "\n".join(lines), problems)


def of_figures(part: str, cases: Iterable[Mapping[str, Any]]) -> Section:
    """Report figures as a table, each the largest of all ranks. Errors have their first line there, and the rest below."""
    rows: dict[str, dict[str, Figure]] = {}
    problems, errors = [], []
    for case in cases:
        if error := error_of(case):
            rows[case["case"]] = {"": Figure(None, note="failed, see below")}
            problems.append(f"{case['case']}: {error}".partition("\n")[0])
            errors.append(f"{case['case']}: {error}")
        else:
            ranks = case["ranks"]
            rows[case["case"]] = {column: Figure(max(mine[column] for mine in ranks)) for column in ranks[0]}
    table = Table(
        part, "the largest figure of all ranks", "none is known; plain sends nothing", rows, notes=errors, digits=1
    )
    return Section(part, table.as_text(), problems)


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
        problems = [f"- {section.title}: {line}" for section in self.sections for line in section.problems]
        parts = [self.head, f"{len(problems)} findings", *problems]
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


def head(count: int) -> str:
    """Describe the machine and the versions."""
    lines = [f"flatshard on {count} ranks, commit {commit()}", flatshard.env.report()]
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


@dataclass(frozen=True)
class Machine:
    """The devices of all parts: ``count`` ranks, each with a ``device``."""

    device: str
    count: int

    def on_all_ranks(self, part: str, limit: float, **env: str) -> Section:
        """Run a part of ``gpu_ranks.py`` on all ranks."""
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results"
            results.touch()
            command = [*self.script("gpu_ranks"), "--part", part, "--results", str(results), "--device", self.device]
            _, problem = run_all(command, environments(self.count, **env), limit)
            names, cases = read(results)
        section = (of_figures if part in ("steps", "capture") else of_parity)(part, cases)
        found = {case["case"] for case in cases}
        missed = [name for name in names if name not in found]
        return with_problem(section, f"not reached: {', '.join(missed)}\n{problem}" if missed else problem)

    def script(self, name: str) -> list[str]:
        return [sys.executable, str(HERE / f"{name}.py")]

    def one_gpu(self) -> Section:
        return self.tables("one GPU", "one_gpu")

    def switch(self) -> Section:
        return self.tables("to the host and back", "switch")

    def tables(self, title: str, script: str) -> Section:
        """Run a benchmark in a process of its own."""
        options = ["--simulated"] if self.device == "simulated" else []
        printed, problem = run_all([*self.script(script), *options], [without_a_job()], 20 * MINUTE)
        return with_problem(Section(title, printed.rstrip()), problem)

    def memcheck(self) -> Section:
        title = "compute-sanitizer, memcheck"
        found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if not found:
            return Section(title, "compute-sanitizer is not installed here")
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results"
            results.touch()
            tool = [found, "--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "5"]
            command = [*tool, *self.script("gpu_ranks"), "--part", "races", "--results", str(results)]
            env = without_a_job(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
            printed, problem = run_all(command, [env], 15 * MINUTE)
            section = of_parity(title, read(results)[1])
        section.text += f"\n{tail(printed, 5)}"
        return with_problem(section, problem)

    def tests(self) -> Section:
        if importlib.util.find_spec("pytest") is None:
            return Section("tests", "pytest is not installed here: pip install -e '.[test]'")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--lanes", "1", "test"]
        printed, problem = run_all(command, [without_a_job(OMP_NUM_THREADS="1")], 20 * MINUTE)
        return with_problem(Section("tests", tail(printed, 5)), problem)


def with_problem(section: Section, problem: str) -> Section:
    if problem:
        section.text += f"\n{problem}"
        section.problems.append(problem.partition("\n")[0])
    return section


def parts_of(machine: Machine) -> dict[str, Callable[[], Section]]:
    """Return all parts by name, in order. Parts for all ranks come first; rank 0 alone runs the others, ``ALONE``."""
    races = {"TORCH_CUDA_SANITIZER": "1"} if machine.device == "cuda" else {}

    def on_all(part: str, limit: float, **env: str) -> Callable[[], Section]:
        return lambda: machine.on_all_ranks(part, limit, **env)

    found = {part: on_all(part, 6 * MINUTE) for part in gpu_ranks.PARITY}
    found |= {"steps": on_all("steps", 12 * MINUTE), "capture": on_all("capture", 4 * MINUTE)}
    found |= {"races": on_all("races", 6 * MINUTE, **races)}
    found |= {
        "one_gpu": machine.one_gpu,
        "switch": machine.switch,
        "memcheck": machine.memcheck,
        "tests": machine.tests,
    }
    return found


ALONE = ("one_gpu", "switch", "memcheck", "tests")
ON_GPUS_ONLY = ("memcheck", "tests")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-report.txt"), help="default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=list(parts_of(Machine("cuda", 1))), help="these parts")
    parser.add_argument("--simulated", action="store_true", help="two ranks on the simulated device: no results")
    args = parser.parse_args()
    if not args.simulated and not torch.cuda.is_available():
        raise SystemExit("gpu.py: no GPU is available here. --simulated shows, tiny and without one, that it runs")
    local = 2 if args.simulated else torch.cuda.device_count()
    machine = Machine("simulated" if args.simulated else "cuda", int(os.environ.get("WORLD_SIZE", local)))
    reports = os.environ.get("RANK", "0") == "0"
    report = Report(None if args.simulated or not reports else args.out, head(machine.count) if reports else "")
    for name, part in parts_of(machine).items():
        left_out = (name in ALONE and not reports) or (name in ON_GPUS_ONLY and args.simulated)
        if left_out or (args.only and name not in args.only):
            continue
        began = time.perf_counter()
        section = part()
        if reports:
            section.title += f" ({time.perf_counter() - began:.0f} s)" + ", simulated, no results" * args.simulated
            report.add(section)
    problems = [line for section in report.sections for line in section.problems]
    if reports:
        where = "" if report.path is None else f". Attach {report.path} to an issue, please"
        print(f"\n{len(problems)} findings{where}", flush=True)
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
