"""What the benchmarks count, with the targets as upper bounds, and their machinery: tables, results, no GPU.

Nothing is timed here. Where a target is not met yet, the present figure is the bound, and the comment has the target.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pairs
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[Any]:
    """``benchmarks.memory`` is ``benchmarks/memory.py``. Its name is free again afterwards."""
    sys.path.insert(0, str(BENCHMARKS))
    before = set(sys.modules)

    class Files:
        def __getattr__(self, name: str) -> ModuleType:
            return __import__(name)

    yield Files()
    sys.path.remove(str(BENCHMARKS))
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


# -- counts ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copied(benchmarks: Any) -> Callable[[str, str], tuple[float, list[tuple[str, int]]]]:
    """``copied(name, column)``: bytes over the plain model's and over P, and what is sent."""
    module = benchmarks.copied_bytes

    @functools.cache
    def counted(name: str, column: str) -> tuple[float, list[tuple[str, int]]]:
        with benchmarks.suite.fake_world(8):
            count, sent = module.counted(name, module.COLUMNS[column])
        return count if name == "plain" else count - counted("plain", column)[0], sent

    return counted


@pytest.mark.parametrize(
    ("column", "most"), [("fp32", 2.3), ("bf16", 1.9), ("fp32, 4 x no_sync", 4.0), ("fp32, 4 x reduced", 2.1)]
)
def test_bytes_copied_in_a_step(benchmarks, copied, column: str, most: float):
    ratio, _ = copied("flatshard", column)
    assert benchmarks.copied_bytes.floor()[column].value <= ratio <= most


def test_the_convention_gives_the_peers_what_their_code_copies(benchmarks, copied):
    """Per element of float32, over N ranks: FSDP1 2 + 2 + 2 / N, by its ``cat`` and two divisions; FSDP2 two passes of each
    all-gather, one of the gradients, and the copies of the shards.
    """
    assert copied("FSDP1", "fp32")[0] == pytest.approx(2 + 2 + 2 / 8, abs=0.01)
    gathered = benchmarks.copied_bytes.payload_floor()["fp32 payload / P"].value - 1
    assert copied("FSDP2", "fp32")[0] == pytest.approx(2 * gathered + 2 + 2 * gathered / 8, abs=0.01)


def test_collectives_and_payload(benchmarks, copied):
    figures, peer = (
        benchmarks.copied_bytes.payload(*(copied(name, column)[1] for column in ("fp32", "bf16")))
        for name in ("flatshard", "FSDP2")
    )
    counts = ("all-gathers", "reduce-scatters", "others")
    assert [figures[column].value for column in counts] == [25, 13, 0]
    assert figures["fp32 payload / P"].value <= 2.96
    assert figures["bf16 payload / P"].value <= 1.98
    assert [peer[column] for column in counts] == [figures[column] for column in counts]


MEMORY = [
    ("bf16", 1.01, 1.10),
    ("bf16, no prefetch", 0.96, None),
    ("fp32", 1.08, 1.13),
    ("fp32, 4 x reduced", 1.23, 1.28),  # target: 1.12
    ("fp32, no prefetch", 0.98, None),
]


@pytest.mark.parametrize(("column", "most", "on_an_accelerator"), pairs.some(MEMORY, 2))
def test_memory_of_a_step(benchmarks, column: str, most: float, on_an_accelerator: float | None):
    memory = benchmarks.memory
    case = memory.CASES[column]
    with benchmarks.suite.fake_world(8):
        for name, limit in (("flatshard", most), (memory.LATER, on_an_accelerator)):
            if limit is None:
                continue
            held = memory.held(name, case)
            assert held.peak <= limit * memory.floor(case.bf16)
            assert held.after == pytest.approx(memory.STATE, rel=0.005)  # padding
        if on_an_accelerator is not None and case.microbatches == 1:  # with prefetch
            assert held.forward < memory.held("FSDP2", case).forward


# -- counters ----------------------------------------------------------------------------------------------------------


def test_live_bytes_know_storages_once_resized_and_freed(benchmarks):
    with benchmarks.counting.LiveBytes() as live:
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


def test_bytes_of_operations(benchmarks):
    a, b = torch.zeros(10), torch.zeros(10)
    for run, expected in (
        (lambda: a + b, 120),
        (lambda: a.copy_(b), 80),
        (lambda: a.add_(b), 120),
        (lambda: a.zero_(), 40),
        (lambda: torch.add(a, 1, out=b), 80),
        (lambda: a.view(2, 5), 0),
        (lambda: torch.empty(10), 0),
    ):
        with benchmarks.counting.CopiedBytes() as count:
            run()
        assert count.total == expected


def test_instructions_are_told_apart(benchmarks):
    """What is the plain model's, what only imitates other ranks, and what it takes to count."""
    module = benchmarks.instructions
    Count = module.Count
    found = {Count("nothing"): (5, 0), Count("plain"): (105, 0), Count("FSDP2"): (1105, 500), Count("floor"): (25, 0)}
    found |= {Count("flatshard"): (205, 10), Count("flatshard", fills=False): (175, 10)}
    rows = module.rows(found)
    assert {name: [figure.value for figure in row.values()] for name, row in rows.items()} == {
        "plain (in all), fp32": [100, 0, 100],
        "FSDP2, fp32": [1000, 500, 500, 1.0],
        "floor (in all), fp32": [20, 0, 20, 0.04],
        "flatshard, fp32": [100, 40, 60, 0.12],
    }
    annotated = """
    1,234 (10.0%)  ???:c10d::FakeProcessGroup::broadcast(int) [libtorch.so]
       56 ( 0.1%)  ???:c10d::FakeWork::wait() [libtorch.so]
        7 ( 0.1%)  ???:c10d::FakeProcessGroup::all_gather_single(int)
    """
    assert module.inside(annotated, module.IMITATION) == 1241


def test_without_valgrind_it_says_what_to_install(benchmarks, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SystemExit, match="valgrind, callgrind_control, callgrind_annotate is not there: install the pack"
    ):
        next(benchmarks.instructions.profiles(tmp_path, 1, 1))


@pytest.mark.skipif(not pairs.thorough, reason="two minutes of one core: with --thorough")
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind counts them")
@pytest.mark.slow
@pytest.mark.time_limit(400)
def test_instructions_of_a_unit(benchmarks):
    args = benchmarks.instructions.BENCHMARK.parser().parse_args(["--units", "10", "--steps", "1"])
    (table,) = benchmarks.instructions.measure(args)
    over = {name: row["net, over FSDP2's"].value for name, row in table.rows.items() if "net, over FSDP2's" in row}
    assert over["floor (in all), fp32"] < over["flatshard, fp32"] <= 0.123
    assert over["floor (in all), bf16"] < over["flatshard, bf16"] <= 0.112


# -- tables and results ------------------------------------------------------------------------------------------------


def a_table(benchmarks: Any) -> Any:
    Figure, Table = benchmarks.suite.Figure, benchmarks.suite.Table
    rows = {
        "flatshard": {"fp32": Figure(1.004), "bf16": Figure(2.5, 2.0, 3.0)},
        "FSDP2": {"fp32": Figure(4.0), "bf16": Figure(None, note="not <here>")},
    }
    return Table("name", "what & where", "the floor", rows, {"flatshard": {"fp32": 1.0, "bf16": 2.0}}, ["a note"])


def test_a_table_as_text(benchmarks):
    lines = a_table(benchmarks).as_text().splitlines()
    assert lines == [
        "name: what & where",
        "                    fp32              bf16",
        "flatshard           1.00  2.50 (2.00-3.00)",
        "FSDP2               4.00        not <here>",
        "target (flatshard)  <= 1       <= 2 MISSED",
        "Floor: the floor",
        "a note",
    ]


def test_results_are_written_and_hold_no_paths(benchmarks, tmp_path: Path):
    table = a_table(benchmarks)
    about = benchmarks.run.describe("python benchmarks/run.py")
    assert {"command", "date", "commit", "python", "torch", "cpu", "gpu"} <= set(about)
    notes = benchmarks.run.summary([table])
    assert notes == ["1 of 2 targets are met", "missed: name, flatshard, bf16: 2.50, target 2"]
    folder = tmp_path / "new"
    benchmarks.run.write(folder / "quick", about, [table], notes)
    assert {p.name for p in folder.iterdir()} == {"quick.txt", "quick.json"}
    data = json.loads((folder / "quick.json").read_text())
    assert data["torch"] == torch.__version__
    again = benchmarks.suite.Table.from_json(data["tables"][0])
    assert dataclasses.asdict(again) == dataclasses.asdict(table)
    assert again.as_text() == table.as_text()
    for path in folder.iterdir():
        assert str(BENCHMARKS.parent) not in path.read_text()


def test_every_benchmark_can_be_run_by_name(benchmarks):
    for name in (*benchmarks.run.QUICK, *benchmarks.run.MORE):
        module = __import__(name)
        options = module.BENCHMARK.parser().parse_args([])
        assert not options.full
        assert f"python benchmarks/{name}.py" in module.__doc__
        assert "floor" in module.__doc__.lower()


# -- without a GPU -----------------------------------------------------------------------------------------------------

GPU_TABLES = ["gpu_fake_8", "gpu_fake_8_bf16", "gpu_fake_64", "gpu_nccl_1", "gpu_nccl_1_bf16"]


def gpu_arguments(benchmarks: Any, *more: str) -> argparse.Namespace:
    small = {"layers": 1, "width": 16, "context": 4, "vocabulary": 8, "batch": 1, "rounds": 1}
    sizes = [text for k, v in small.items() for text in (f"--{k}", str(v))]
    return benchmarks.one_gpu.BENCHMARK.parser().parse_args([*sizes, *more])


def bench(benchmarks: Any, monkeypatch: pytest.MonkeyPatch, place: int, *rows: str) -> Any:
    """Of the benchmark for GPUs, on CPU, with these rows alone."""
    gpu = benchmarks.one_gpu
    monkeypatch.setattr(gpu, "ROWS", {name: gpu.ROWS[name] for name in rows})
    return gpu.Bench(gpu_arguments(benchmarks), benchmarks.devices.Device(), gpu.PLACES[place])


def test_without_a_gpu_there_are_no_tables(benchmarks, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmarks.one_gpu.measure(gpu_arguments(benchmarks)) == []
    assert capsys.readouterr().err.strip() == "no GPU is available here: one_gpu.py has no tables"


@pytest.mark.parametrize("place", [0, 1])
def test_what_runs_on_a_gpu_runs_on_a_cpu_but_for_the_gpu_itself(benchmarks, monkeypatch, place: int):
    measured = bench(benchmarks, monkeypatch, place, "plain", "flatshard")
    rows = measured.rows()
    assert list(rows) == ["plain", "flatshard"]
    assert rows["plain"]["copied / P"].value == 0
    assert rows["flatshard"]["copied / P"].value > 1
    assert rows["flatshard"]["ms"].value > 0
    assert rows["flatshard"]["kernels"].value == 0
    assert measured.graph("flatshard").note == "NotImplementedError: cpu has no graphs"


def test_a_contender_that_fails_on_a_gpu_stands_in_the_table_with_its_error(benchmarks, monkeypatch):
    def fails(*_: object) -> None:
        raise ValueError("no such\nluck")

    monkeypatch.setitem(benchmarks.contenders.CONTENDERS, "FSDP2", fails)
    rows = bench(benchmarks, monkeypatch, 0, "plain", "FSDP2").rows()
    assert rows["FSDP2"] == {"ms": benchmarks.suite.Figure(None, note="ValueError: no such")}
    assert rows["plain"]["ms"].value > 0


def test_launches_and_waits_are_read_from_a_trace(benchmarks):
    def event(name: str, start: int, category: str) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": 50}

    events = [
        event("gemm", 10, "kernel"),
        event("add", 20, "kernel"),
        event("Memcpy", 0, "gpu_memcpy"),
        {"ph": "M", "name": "process_name"},
        event("measured", 100, "user_annotation"),
        event("measured", 110, "gpu_user_annotation"),
        event("cudaDeviceSynchronize", 90, "cuda_runtime"),  # before the step
        event("cudaLaunchKernel", 105, "cuda_runtime"),
        event("cudaEventSynchronize", 110, "cuda_runtime"),
        event("cudaStreamSynchronize", 120, "cuda_runtime"),
        event("cudaMemcpyAsync", 130, "cuda_runtime"),
        event("cudaMemcpy", 140, "cuda_runtime"),
        event("cudaDeviceSynchronize", 160, "cuda_runtime"),  # after it
    ]
    assert benchmarks.devices.Counts.read(events) == benchmarks.devices.Counts(kernels=2, copies=1, waits=3)


# -- on all GPUs -------------------------------------------------------------------------------------------------------


def run_modes(ctx: Any, wrong: bool) -> dict[str, float]:
    """How far off the modes of the report are, by its own check, on CPU."""
    sys.path.insert(0, str(BENCHMARKS))
    import devices
    import gpu_ranks

    modes = {name: mode for each in gpu_ranks.PARITY.values() for name, mode in each.items()}
    off = {}
    for name in ("FULL_SHARD", "microbatches under no_sync", "bf16, reduced in fp32", "a frozen block"):
        ctx.note(name)
        mode = modes[name]
        tokens = torch.full((mode.microbatches, ctx.world_size, 2, 13), ctx.rank)
        batches = iter([tokens]) if wrong else gpu_ranks.batches(mode, ctx.world_size)
        with mock.patch.object(gpu_ranks, "batches", return_value=list(batches)):
            found = gpu_ranks.parity(mode, devices.Device(), ctx.rank, ctx.world_size, ctx.group)
        off[name] = found["off"] / found["allowed"]
    return off


def test_the_check_on_gpus_finds_modes_right_and_ranks_that_differ_wrong(pool):
    for off in pool.run(run_modes, False, world_size=3):
        assert max(off.values()) <= 1, off
    for off in pool.run(run_modes, True, world_size=2):
        assert min(off.values()) > 1, off


@pytest.mark.slow
@pytest.mark.time_limit(300)  # two processes import torch
def test_a_part_that_fails_on_all_ranks_is_a_finding_and_a_report(benchmarks, tmp_path: Path, monkeypatch):
    """A CPU has no graphs: one line at the top for each case, and the error below the table."""
    gpu = benchmarks.gpu
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    section = gpu.Machine("cpu", 2).on_all_ranks("capture", 280)
    why = "failed on 2 of 2 ranks: NotImplementedError: cpu has no graphs"
    assert section.problems == [f"static buffers: {why}", f"as it is: {why}"]
    gpu.Report(tmp_path / "report.txt", "on two ranks").add(section)
    text = (tmp_path / "report.txt").read_text()
    assert text.startswith(f"on two ranks\n2 findings\n- capture: static buffers: {why}\n")
    assert "failed, see below" in text
    assert str(BENCHMARKS.parent) not in text


def test_ranks_that_fail_or_hang_are_ended_and_told(benchmarks, monkeypatch):
    gpu = benchmarks.gpu
    monkeypatch.setattr(gpu, "GRACE", 0.1)
    body = "import os, sys, time; print('here', flush=True); time.sleep(60 * int(os.environ['WAITS'])); sys.exit(3)"
    env = {"PATH": os.environ["PATH"]}
    printed, problem = gpu.run_all([sys.executable, "-S", "-c", body], [{**env, "WAITS": w} for w in "10"], 50)
    assert printed == "here\n"
    assert problem == "process 0 ended with -9:\nhere\nprocess 1 ended with 3:\nhere"


def test_what_the_report_says_of_modes(benchmarks, tmp_path: Path):
    right, wrong = ({"off": off, "allowed": 1e-9} for off in (1e-12, float("inf")))
    lines = [
        {"cases": ["a", "b", "c", "d", "e"]},
        {"case": "a", "ranks": [right, right]},
        {"case": "b", "ranks": [right, wrong]},
        {"case": "c", "left out": "too few ranks"},
        {"case": "d", "ranks": [right, {"error": "ValueError: no", "where": "in c"}]},
    ]
    (tmp_path / "results").write_text("\n".join(map(json.dumps, lines)))
    names, cases = benchmarks.gpu.read(tmp_path / "results")
    assert names == ["a", "b", "c", "d", "e"]
    section = benchmarks.gpu.of_parity("modes", cases)
    assert section.text.splitlines() == [
        "a: right, off by 1.0e-12 of the change (allowed: 1e-09)",
        "b: WRONG, off by inf of the change (allowed: 1e-09)",
        "c: left out, too few ranks",
        "d: FAILED: failed on 1 of 2 ranks: ValueError: no",
        "in c",
    ]
    assert [line.partition(":")[0] for line in section.problems] == ["b", "d"]


def test_communication_that_is_hidden_is_read_from_a_trace(benchmarks):
    spans = [("ncclDevKernel", 0, 10), ("gemm", 5, 3), ("add", 6, 10), ("ncclDevKernel", 20, 4), ("gemm", 30, 5)]
    events = [{"cat": "kernel", "name": name, "ts": begin, "dur": long} for name, begin, long in spans]
    found = benchmarks.devices.Overlap.read([*events, {"cat": "cpu_op", "name": "nccl", "ts": 0, "dur": 99}])
    assert (found.collectives, found.hidden) == (pytest.approx(14e-6), pytest.approx(5e-6))


# -- on the simulated device -------------------------------------------------------------------------------------------


def test_simulated_figures_are_not_written_anywhere(benchmarks, tmp_path: Path):
    args = gpu_arguments(benchmarks, "--simulated", "--json", str(tmp_path / "tables.json"))
    with pytest.raises(SystemExit, match="--simulated writes no files: its figures are no results"):
        benchmarks.one_gpu.measure(args)
    assert list(tmp_path.iterdir()) == []


def test_a_simulated_figure_is_no_number(benchmarks):
    table = benchmarks.one_gpu.marked(a_table(benchmarks))
    cells = [f for row in table.rows.values() for f in row.values()]
    expected = ["1.00 simulated", "2.50 (2.00-3.00) simulated", "4.00 simulated", "not <here> simulated"]
    assert [f.text(2) for f in cells] == expected
    assert all(f.value is None for f in cells)
    assert table.as_text().startswith("simulated_name: simulated, no results: what & where")


def cells_of(text: str) -> dict[str, dict[str, str]]:
    """A printed table: rows of cells by column."""
    _, head, *lines, floor = (re.split(r"\s{2,}", line.strip()) for line in text.splitlines())
    assert floor[0].startswith("Floor: ")
    return {name: dict(zip(head, cells, strict=True)) for name, *cells in lines}


@pytest.mark.skipif(not pairs.thorough, reason="a minute of one core: with --thorough")
@pytest.mark.slow
@pytest.mark.time_limit(330)
@pytest.mark.usefixtures("_simulator")
def test_the_benchmark_for_gpus_runs_from_end_to_end_on_the_simulated_device(benchmarks):
    """All rows are there, so whoever has a GPU runs it once. Half a minute of one core."""
    results = {p: p.stat().st_mtime_ns for p in (BENCHMARKS / "results").iterdir()}
    search = os.pathsep.join([str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "one_gpu.py"), "--simulated"],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert {p: p.stat().st_mtime_ns for p in (BENCHMARKS / "results").iterdir()} == results

    printed = done.stdout.strip().split("\n\n")
    assert [text.partition(":")[0] for text in printed] == [f"simulated_{name}" for name in GPU_TABLES]
    assert all(": simulated, no results: " in text.splitlines()[0] for text in printed)
    places = [*map(cells_of, printed)]
    gpu = benchmarks.one_gpu
    assert [list(rows) for rows in places] == [gpu.rows_of(place) for place in gpu.PLACES]
    cells = [cell for rows in places for row in rows.values() for column, cell in row.items() if column != "graph"]
    assert all(cell.endswith(" simulated") for cell in cells)  # so no figure is missing

    for place, rows in zip(gpu.PLACES, places, strict=True):
        for name, row in rows.items():
            if name.startswith("flatshard"):
                assert row["host waits"] == ("2 simulated" if name == gpu.OFFLOAD else "0 simulated"), (place, name)
            if name in ("plain", "flatshard", "flatshard, static buffers", gpu.WIDENS):
                assert row["graph"].startswith("yes, "), (place, name)
