"""``benchmarks/gpu.py`` on the simulated device: every part runs, finds nothing wrong, and sees a planted fault."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu
import pairs
import pytest
from accelerator.faults import FAULTS

BENCHMARKS = Path(gpu.__file__).parent
SIMULATED = [part.name for part in gpu.PARTS if part.simulated]

QUICK = ["probe", "steps", "kernels"]
"""The parts in which a fault is planted without ``--thorough``: they take seconds."""


def run(script: Path, *options: str) -> str:
    paths = (BENCHMARKS.parent, BENCHMARKS, BENCHMARKS.parent / "test", os.environ.get("PYTHONPATH", ""))
    done = subprocess.run(
        [sys.executable, str(script), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.time_limit(300)
@pytest.mark.usefixtures("_simulator")
def test_all_parts_are_right(tmp_path):
    run(BENCHMARKS / "gpu.py", "--simulated", "--out", str(tmp_path / "report"))
    lines = (tmp_path / "report").read_text().splitlines()
    verdicts = dict(line[8:].partition(", simulated")[0::2] for line in lines if line.startswith("right   "))
    assert list(verdicts) == SIMULATED
    assert "0 findings" in lines


@pytest.mark.slow
@pytest.mark.time_limit(300)
@pytest.mark.usefixtures("_simulator")
def test_each_part_sees_a_fault():
    assert list(FAULTS) == SIMULATED
    parts = SIMULATED if pairs.thorough else QUICK
    printed = run(BENCHMARKS.parent / "test" / "accelerator" / "faults.py", *parts)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith('{"')]
    assert [name for each in found for name, problems in each.items() if problems] == parts
