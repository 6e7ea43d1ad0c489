"""What the benchmarks count, with the targets as upper bounds, and their machinery: tables, results, drawings, no GPU.

Nothing is timed here. Where a target is not met yet, the present figure is the bound, and the comment has the target.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pairs
import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize(
    ("column", "most"),
    [
        ("fp32", 2.3),
        ("bf16", 1.9),
        ("fp32, 4 x no_sync", 4.0),  # target: 8.3
        ("fp32, 4 x reduced", 2.1),
    ],
)
def test_bytes_copied_in_a_step(benchmarks, column: str, most: float):
    with benchmarks.suite.fake_world(8):
        ratio = benchmarks.copied_bytes.ratio("flatshard", column)
    assert benchmarks.copied_bytes.floor()[column].value <= ratio <= most


def test_bare_units_train(benchmarks):
    """What flatshard's host time is compared with does the work: two steps have a plain model's gradients."""
    torch.manual_seed(0)
    plain, x = benchmarks.units.Units(3), torch.randn(2, benchmarks.units.WIDTH)
    sharded = copy.deepcopy(plain)
    with benchmarks.suite.fake_world(1):
        benchmarks.bare.shard(sharded.units)
        for step in range(2):
            for model in (plain, sharded):
                model.zero_grad()
                model(x + step).square().sum().backward()
            for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
                torch.testing.assert_close(q.grad, p.grad.flatten(), rtol=0, atol=0)


def test_the_convention_gives_the_peers_what_their_code_copies(benchmarks):
    """Per element of float32, over N ranks: FSDP1 2 + 2 + 2 / N, by its ``cat`` and two divisions; FSDP2 two passes of each
    all-gather, one of the gradients, and the copies of the shards.
    """
    module = benchmarks.copied_bytes
    with benchmarks.suite.fake_world(8):
        assert module.ratio("FSDP1", "fp32") == pytest.approx(2 + 2 + 2 / 8, abs=0.01)
        gathered = module.payload_floor()["fp32 payload / P"].value - 1
        assert module.ratio("FSDP2", "fp32") == pytest.approx(2 * gathered + 2 + 2 * gathered / 8, abs=0.01)


def test_collectives_and_payload(benchmarks):
    with benchmarks.suite.fake_world(8):
        figures, peer = (
            {column: figure.value for column, figure in benchmarks.copied_bytes.payload(name).items()}
            for name in ("flatshard", "FSDP2")
        )
    assert (figures["all-gathers"], figures["reduce-scatters"], figures["others"]) == (25, 13, 0)
    assert figures["fp32 payload / P"] <= 2.96
    assert figures["bf16 payload / P"] <= 1.98
    assert {k: v for k, v in peer.items() if "/" not in k} == {k: v for k, v in figures.items() if "/" not in k}


MEMORY = [
    ("bf16", 1.01, 1.10),
    ("bf16, no prefetch", 0.96, None),
    ("fp32", 1.08, 1.13),
    ("fp32, 4 x reduced", 1.23, 1.28),  # target: 1.12
    ("fp32, no prefetch", 0.98, None),
]


@pytest.mark.parametrize(("column", "most", "on_an_accelerator"), pairs.some(MEMORY, 3))
def test_memory_of_a_step(benchmarks, column: str, most: float, on_an_accelerator: float | None):
    memory = benchmarks.memory
    case = memory.CASES[column]
    with benchmarks.suite.fake_world(8):
        for name, limit in (("flatshard", most), (memory.LATER, on_an_accelerator)):
            if limit is None:
                continue
            peak, after = memory.held(name, case)
            assert peak <= limit * memory.floor(case.bf16)
            assert after == pytest.approx(memory.state_bytes(), rel=0.005)  # padding


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


def test_contenders_say_what_they_have_no_setting_for(benchmarks):
    contenders = benchmarks.contenders
    with pytest.raises(contenders.Unavailable, match="no public setting"):
        contenders.build("DDP", nn.Linear(2, 2), contenders.Setting(nn.Linear, bf16=True))


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


def test_tables_survive_json(benchmarks):
    table = a_table(benchmarks)
    again = benchmarks.suite.Table.from_json(json.loads(json.dumps(dataclasses.asdict(table))))
    assert again.as_text() == table.as_text()
    assert dataclasses.asdict(again) == dataclasses.asdict(table)


def test_results_are_written_and_hold_no_paths(benchmarks, tmp_path: Path):
    table = a_table(benchmarks)
    about = benchmarks.run.describe("python benchmarks/run.py")
    assert {"command", "date", "commit", "python", "torch", "cpu", "gpu"} <= set(about)
    notes = benchmarks.run.summary([table])
    assert notes == ["1 of 2 targets are met", "missed: name, flatshard, bf16: 2.50, target 2"]
    args = argparse.Namespace(only=None, full=False, plot=False, results=tmp_path / "new")
    benchmarks.run.write(args, about, [table], notes)
    assert {p.name for p in args.results.iterdir()} == {"quick.txt", "quick.json"}
    data = json.loads((args.results / "quick.json").read_text())
    assert data["torch"] == torch.__version__
    assert benchmarks.suite.Table.from_json(data["tables"][0]).as_text() == table.as_text()
    for path in args.results.iterdir():
        assert str(BENCHMARKS.parent) not in path.read_text()


def test_tables_are_drawn_where_matplotlib_is_there(benchmarks, tmp_path: Path, monkeypatch):
    if benchmarks.plots.missing():
        monkeypatch.setattr(sys, "argv", ["run.py", "--plot"])
        with pytest.raises(SystemExit, match="--plot needs matplotlib: pip install matplotlib"):
            benchmarks.run.main()
        return
    benchmarks.plots.draw(a_table(benchmarks), tmp_path / "name.svg")
    text = (tmp_path / "name.svg").read_text()
    assert all(
        f"<!-- {label} -->" in text for label in ("fp32", "bf16", "2.50 (2.00-3.00)", "4.00", "not &lt;here&gt;")
    )


def test_every_benchmark_can_be_run_by_name(benchmarks):
    for name in (*benchmarks.run.QUICK, *benchmarks.run.MORE):
        module = __import__(name)
        options = module.BENCHMARK.parser().parse_args([])
        assert not options.full
        assert f"python benchmarks/{name}.py" in module.__doc__
        assert "floor" in module.__doc__.lower() or name == "communication"


def test_padding(benchmarks):
    (table,) = benchmarks.padding.measure(argparse.Namespace(full=True))
    assert table.rows["GPT-2 (768), FSDP2, dim 0"]["8 ranks"].value == 0
    assert table.rows["GPT-2 (768), Elements()"]["1,024 ranks"].value < 1


# -- without a GPU -----------------------------------------------------------------------------------------------------

GPU_TABLES = ["gpu_fake_8", "gpu_fake_8_bf16", "gpu_fake_64", "gpu_nccl_1", "gpu_nccl_1_bf16", "gpu_overlap"]


def gpu_arguments(benchmarks: Any, *more: str) -> argparse.Namespace:
    small = {"layers": 1, "width": 16, "context": 4, "vocabulary": 8, "batch": 1, "rounds": 1}
    sizes = [text for k, v in small.items() for text in (f"--{k}", str(v))]
    return benchmarks.gpu.BENCHMARK.parser().parse_args([*sizes, *more])


def test_without_a_gpu_the_rows_stay_empty(benchmarks, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tables = benchmarks.gpu.measure(gpu_arguments(benchmarks))
    assert [t.name for t in tables] == GPU_TABLES
    figures = [f for t in tables for row in t.rows.values() for f in row.values()]
    assert figures
    assert all(f.value is None and f.note == "no GPU" for f in figures)
    assert benchmarks.gpu.incomplete(tables) == []
    assert capsys.readouterr().err.strip() == "no GPU is available here: the rows of gpu.py stay empty"


@pytest.mark.parametrize("place", ["fake group of 8", "fake group of 8, bf16"])
def test_what_runs_on_a_gpu_runs_on_a_cpu_but_for_the_gpu_itself(benchmarks, monkeypatch, tmp_path: Path, place: str):
    monkeypatch.setattr(benchmarks.gpu, "ROWS", {n: benchmarks.gpu.ROWS[n] for n in ("plain", "flatshard")})
    device = benchmarks.devices.Device(torch.device("cpu"))
    rows = benchmarks.gpu.figures(gpu_arguments(benchmarks), device, place, tmp_path)
    assert list(rows) == ["plain", "flatshard"]
    assert rows["plain"]["copied / P"].value == 0
    assert rows["flatshard"]["copied / P"].value > 1
    assert rows["flatshard"]["ms"].value > 0
    assert rows["flatshard"]["kernels"].note == "no GPU"


def test_a_contender_that_fails_on_a_gpu_stands_in_the_table_with_its_error(benchmarks, monkeypatch, tmp_path: Path):
    def fails(*_: object) -> None:
        raise ValueError("no such\nluck")

    monkeypatch.setattr(benchmarks.gpu, "ROWS", {n: benchmarks.gpu.ROWS[n] for n in ("plain", "FSDP2")})
    monkeypatch.setitem(benchmarks.contenders.CONTENDERS, "FSDP2", fails)
    args, device = gpu_arguments(benchmarks), benchmarks.devices.Device(torch.device("cpu"))
    rows = benchmarks.gpu.figures(args, device, "fake group of 8", tmp_path)
    assert rows["FSDP2"]["ms"].note == "ValueError: no such"
    assert rows["plain"]["ms"].value > 0


def test_overlap_launches_and_waits_are_read_from_a_trace(benchmarks):
    def event(name: str, start: int, length: int, category: str = "kernel") -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}

    events = [
        event("void spin_kernel(long)", 0, 100),
        event("gemm", 10, 30),
        event("add", 20, 30),  # half of it under the other
        event("gemm", 90, 50),
        event("Memcpy", 0, 5, "gpu_memcpy"),
        {"ph": "M", "name": "process_name"},
        event("measured", 100, 50, "user_annotation"),
        event("measured", 110, 50, "gpu_user_annotation"),
        event("cudaDeviceSynchronize", 90, 5, "cuda_runtime"),  # before the step
        event("cudaLaunchKernel", 105, 5, "cuda_runtime"),
        event("cudaEventSynchronize", 110, 5, "cuda_runtime"),
        event("cudaStreamSynchronize", 120, 5, "cuda_runtime"),
        event("cudaMemcpyAsync", 130, 5, "cuda_runtime"),
        event("cudaMemcpy", 140, 5, "cuda_runtime"),
        event("cudaDeviceSynchronize", 160, 5, "cuda_runtime"),  # after it
    ]
    devices = benchmarks.devices
    assert devices.hidden(events) == pytest.approx(0.5)
    assert devices.hidden(events[1:]) is None
    assert devices.launched(events) == {"kernels": 4, "copies": 1}
    assert devices.waits(events) == 3


def test_the_part_of_a_trace_that_counts_is_found(benchmarks, tmp_path: Path):
    events = benchmarks.devices.traced(lambda: torch.ones(2).add(1), tmp_path / "deep" / "trace.json")
    assert "aten::add" in [e.get("name") for e in events]
    assert benchmarks.devices.waits(events) == 0


def test_kernels_may_run_beside_each_other_if_neither_stream_has_waited(benchmarks):
    Launch = benchmarks.devices.Launch
    gather = Launch("gather", 1, 2, {0: 4, 1: 2})
    before, after = Launch("before", 0, 4, {0: 4}), Launch("after", 0, 9, {0: 9, 1: 2})
    beside = Launch("beside", 0, 5, {0: 5, 1: 1})
    assert [k.may_run_beside(gather) for k in (before, beside, after)] == [False, True, False]
    assert [gather.may_run_beside(k) for k in (before, beside, after)] == [False, True, False]


# -- on the simulated device -------------------------------------------------------------------------------------------


def test_simulated_figures_are_not_written_anywhere(benchmarks, tmp_path: Path):
    for option, name in (("json", "tables.json"), ("traces", "traces")):
        args = gpu_arguments(benchmarks, "--simulated")
        setattr(args, option, tmp_path / name)
        with pytest.raises(SystemExit, match="--simulated writes no files: its figures are no results"):
            benchmarks.gpu.measure(args)
    assert list(tmp_path.iterdir()) == []


def test_a_simulated_figure_is_no_number_and_a_missing_one_is_found(benchmarks):
    table = benchmarks.gpu.marked(a_table(benchmarks))
    cells = [f for row in table.rows.values() for f in row.values()]
    assert [f.text(2) for f in cells] == ["1.00 simulated", "2.50 simulated", "4.00 simulated", "not <here> simulated"]
    assert all(f.value is None for f in cells)
    assert table.as_text().startswith("simulated_name: simulated, no results: what & where")
    assert benchmarks.gpu.incomplete([table]) == []
    lacking = benchmarks.suite.Table("t", "", "", {"FSDP2": {"ms": benchmarks.suite.Figure(None)}})
    assert benchmarks.gpu.incomplete([benchmarks.gpu.marked(lacking)]) == ["simulated_t: no figure of FSDP2: ms"]


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
        [sys.executable, str(BENCHMARKS / "gpu.py"), "--simulated"],
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
    *places, overlap = map(cells_of, printed)
    gpu = benchmarks.gpu
    assert [list(rows) for rows in places] == [gpu.rows_of(place) for place in gpu.PLACES]
    assert {tuple(row) for rows in places for row in rows.values()} == {gpu.COLUMNS}
    assert list(overlap) == list(gpu.OVERLAPPED)
    assert all(
        cell.endswith(" simulated") for rows in (*places, overlap) for row in rows.values() for cell in row.values()
    )

    for place, rows in zip(gpu.PLACES, places, strict=True):
        for name, row in rows.items():
            if name.startswith("flatshard"):
                assert row["host waits"] == ("2 simulated" if name == gpu.OFFLOAD else "0 simulated"), (place, name)
            if name in ("plain", "flatshard", "flatshard, static buffers", gpu.WIDENS):
                assert row[gpu.PASSES] == row[gpu.STEP] == "yes simulated", (place, name)
    shares = {column: float(cell.removesuffix(" simulated")) for column, cell in overlap["flatshard"].items()}
    assert shares["prefetch"] > shares["no prefetch"]
