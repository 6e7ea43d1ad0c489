"""What the benchmarks count, with the targets as upper bounds, and what they read of a GPU.

Nothing is timed here. Where a target is not met yet, the present figure is the bound, and the comment has the target.
"""

import functools
import gc
import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import copied_bytes
import devices
import gpu
import gpu_parity
import memory
import one_gpu
import pairs
import pytest
import torch
from counting import CopiedBytes, LiveBytes
from suite import fake_world

BENCHMARKS = Path(copied_bytes.__file__).parent


def test_results_hold_no_paths():
    for file in (each for each in (BENCHMARKS / "results").rglob("*") if each.is_file()):
        assert not re.search(r"(?<![\w.])/(home|root|work|tmp|usr|opt)/", file.read_text()), file


# -- counts ------------------------------------------------------------------------------------------------------------


@functools.cache
def copied(name: str, column: str) -> tuple[float, list[tuple[str, int]]]:
    """Bytes over the plain model's and over P, and what is sent."""
    with fake_world(8):
        count, sent = copied_bytes.counted(name, copied_bytes.COLUMNS[column])
    return count if name == "plain" else count - copied("plain", column)[0], sent


@pytest.mark.parametrize(
    ("column", "most"),
    pairs.some([("fp32", 2.3), ("bf16", 1.9), ("fp32, 4 x no_sync", 4.0), ("fp32, 4 x reduced", 2.1)], 1),
)
def test_bytes_copied_in_a_step(column: str, most: float):
    ratio, _ = copied("flatshard", column)
    assert copied_bytes.floor()[column].value <= ratio <= most


def test_collectives_and_payload():
    figures, peer = (
        copied_bytes.payload(*(copied(name, column)[1] for column in ("fp32", "bf16")))
        for name in ("flatshard", "FSDP2")
    )
    counts = ("all-gathers", "reduce-scatters", "others")
    assert [figures[column].value for column in counts] == [25, 13, 0]
    assert figures["fp32 payload / P"].value <= 2.96
    assert figures["bf16 payload / P"].value <= 1.98
    assert [peer[column] for column in counts] == [figures[column] for column in counts]


MEMORY = [
    ("bf16", 0.98, 1.10),
    ("bf16, no prefetch", 0.96, None),
    ("fp32", 1.03, 1.13),
    ("fp32, 4 x reduced", 1.19, 1.28),  # target: 1.12
    ("fp32, no prefetch", 0.98, None),
]


@pytest.mark.parametrize(("column", "most", "on_an_accelerator"), pairs.some(MEMORY, 1))
def test_memory_of_a_step(column: str, most: float, on_an_accelerator: float | None):
    case = memory.CASES[column]
    with fake_world(8):
        for name, limit in (("flatshard", most), (memory.LATER, on_an_accelerator)):
            if limit is None:
                continue
            held = memory.held(name, case)
            assert held.peak <= limit * memory.floor(case.bf16)
            assert held.after == pytest.approx(memory.STATE, rel=0.005)  # padding
        if on_an_accelerator is not None and case.microbatches == 1:  # with prefetch
            assert held.forward < memory.held("FSDP2", case).forward


# -- counters ----------------------------------------------------------------------------------------------------------


def test_live_bytes_know_storages_once_resized_and_freed():
    with LiveBytes() as live:
        a = torch.zeros(100)
        b = a[10:].view(-1)
        assert live.now() == 400
        a.untyped_storage().resize_(800)
        assert live.now() == 800
        del a
        assert live.now() == 800
        del b
        assert live.now() == 0
        with live.watch():
            torch.ones(50).add(1)
        assert (live.peak, live.now()) == (400, 0)
    assert gc.isenabled()


def test_bytes_of_operations():
    a, b = torch.zeros(10), torch.zeros(10)
    for do, expected in (
        (lambda: a + b, 120),
        (lambda: a.copy_(b), 80),
        (lambda: a.add_(b), 120),
        (lambda: a.zero_(), 40),
        (lambda: torch.add(a, 1, out=b), 80),
        (lambda: a.view(2, 5), 0),
        (lambda: torch.empty(10), 0),
    ):
        with CopiedBytes() as count:
            do()
        assert count.total == expected


def test_every_benchmark_can_be_run_by_name():
    run: Any = runpy.run_path(str(BENCHMARKS / "run.py"))
    for name in (*run["QUICK"], *run["MORE"]):
        module = importlib.import_module(name)
        options = module.BENCHMARK.parser().parse_args([])
        assert not options.full
        assert f"python benchmarks/{name}.py" in module.__doc__
        assert "floor" in module.__doc__.lower()


HELP_OF_ALL = """
import os, runpy, sys
from pathlib import Path
import torch  # once, for all
import torch.distributed

sys.path = [folder for folder in sys.path if not (Path(folder) / "flatshard").is_dir()]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
for script in sys.argv[1:]:
    print(Path(script).name, flush=True)
    if not (child := os.fork()):
        sys.path[0], sys.argv = str(Path(script).parent), [script, "--help"]
        runpy.run_path(script, run_name="__main__")
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(code)
"""
"""Runs each script with ``--help`` in a process of its own, as if flatshard were not installed."""


@pytest.mark.slow
@pytest.mark.time_limit(240)  # each script imports flatshard
def test_every_benchmark_begins_in_a_checkout_that_is_not_installed(tmp_path):
    scripts = [path for path in sorted(BENCHMARKS.glob("*.py")) if 'if __name__ == "__main__":' in path.read_text()]
    done = subprocess.run(
        [sys.executable, "-c", HELP_OF_ALL, *map(str, scripts)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=230,
    )
    assert done.returncode == 0, done.stdout[-300:] + done.stderr
    assert done.stdout.count("usage: ") >= len(scripts) - 2  # two have no options, and print at once


# -- what a GPU's trace tells -----------------------------------------------------------------------------------------


def test_launches_waits_and_hidden_communication_are_read_from_a_trace():
    spans = [
        *(("kernel", "gemm", 10), ("kernel", "add", 20), ("gpu_memcpy", "Memcpy", 0)),
        *(("user_annotation", "measured", 100), ("gpu_user_annotation", "measured", 110)),
        ("cuda_runtime", "cudaDeviceSynchronize", 90),  # before the step
        *(("cuda_runtime", "cudaLaunchKernel", 105), ("cuda_runtime", "cudaMemcpyAsync", 130)),
        *(("cuda_runtime", name, 120) for name in ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaMemcpy")),
        ("cuda_runtime", "cudaDeviceSynchronize", 160),  # after it
    ]
    events = [{"ph": "X", "cat": cat, "name": name, "ts": start, "dur": 50} for cat, name, start in spans]
    found = devices.Counts.read([*events, {"ph": "M", "name": "process_name"}])
    assert found == devices.Counts(kernels=2, copies=1, waits=3)

    kernels = [("ncclDevKernel", 0, 10), ("gemm", 5, 3), ("add", 6, 10), ("ncclDevKernel", 20, 4), ("gemm", 30, 5)]
    events = [{"cat": "kernel", "name": name, "ts": begin, "dur": long} for name, begin, long in kernels]
    overlap = devices.Overlap.read([*events, {"cat": "cpu_op", "name": "nccl", "ts": 0, "dur": 99}])
    assert (overlap.collectives, overlap.hidden) == (pytest.approx(14e-6), pytest.approx(5e-6))


# -- on all GPUs -------------------------------------------------------------------------------------------------------


def run_modes(ctx: Any, wrong: bool) -> dict[str, float]:
    """Check on CPU how far off the modes of the report are."""
    modes = {name: mode for each in gpu_parity.PARITY.values() for name, mode in each.items()}
    off = {}
    for name in ("FULL_SHARD", "bf16, reduced in fp32", "microbatches under no_sync", "a frozen block")[
        : 2 if wrong else 4
    ]:
        ctx.note(name)
        mode = modes[name]
        tokens = torch.full((mode.microbatches, ctx.world_size, 2, 13), ctx.rank)
        batches = iter([tokens]) if wrong else gpu_parity.batches(mode, ctx.world_size)
        with mock.patch.object(gpu_parity, "batches", return_value=list(batches)):
            found = gpu_parity.parity(mode, devices.Device(), ctx.rank, ctx.world_size, ctx.group)
        off[name] = found["off"] / found["allowed"]
    return off


def test_the_check_on_gpus_finds_modes_right_and_ranks_that_differ_wrong(pool):
    for off in pool.run(run_modes, False):
        assert max(off.values()) <= 1, off
    for off in pool.run(run_modes, True):
        assert min(off.values()) > 1, off


# -- on the simulated device -------------------------------------------------------------------------------------------


def run_simulated(script: str, *options: str) -> str:
    """Run a benchmark for GPUs on the simulated device, and return its output."""
    search = os.pathsep.join([str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{script}.py"), "--simulated", *options],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_report_of_a_gpu_begins_nothing_when_its_minutes_are_over():
    printed = run_simulated("gpu", "--minutes", "0")
    assert printed.count("not begun") == sum(part.simulated and part.in_short for part in gpu.PARTS)


@pytest.mark.skipif(not pairs.thorough, reason="a minute of one core: with --thorough")
@pytest.mark.slow
@pytest.mark.time_limit(330)
@pytest.mark.usefixtures("_simulator")
def test_the_benchmark_for_one_gpu_runs_from_end_to_end_on_the_simulated_device():
    """All rows are there, so whoever has a GPU runs it once. Half a minute of one core."""
    printed = [text.splitlines() for text in run_simulated("one_gpu", "--graphs").strip().split("\n\n")]
    for place, (title, head, *rows, _) in zip(one_gpu.PLACES, printed, strict=True):
        assert title.startswith("simulated_")
        assert "host waits" in head
        assert [re.split(r"\s{2,}", line.strip())[0] for line in rows] == one_gpu.rows_of(place)


@pytest.mark.parametrize(
    ("case", "verdict"),
    [
        ({"case": "strategies: NO_SHARD", "ranks": [{"off": 1e-12, "allowed": 1e-9}]}, "right, off by 1.0e-12"),
        ({"case": "strategies: NO_SHARD", "ranks": [{"off": 1e-6, "allowed": 1e-9}]}, "WRONG"),
        (
            {"case": "disturbances: a planted fault: x", "ranks": [{"off": 1e-12, "allowed": 1e-9}]},
            "WRONG: the fault is not",
        ),
        (
            {"case": "disturbances: a planted fault: x", "ranks": [{"off": 2.0, "allowed": 1e-9}]},
            "right, the fault is seen",
        ),
        (
            {"case": "models: compiled", "ranks": [{"off": 0, "allowed": 0}, {"error": "E"}]},
            "FAILED: failed on 1 of 2 ranks",
        ),
    ],
)
def test_verdicts_on_a_gpu(case, verdict):
    assert gpu.verdict_of(case).startswith(verdict)
