"""``benchmarks/gpu.py`` on the simulated device: every part runs, finds nothing wrong, and sees a planted fault."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu
import pytest
from accelerator.faults import FAULTS

BENCHMARKS = Path(gpu.__file__).parent
SIMULATED = [part.name for part in gpu.PARTS if part.simulated]


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
    printed = run(BENCHMARKS.parent / "test" / "accelerator" / "faults.py")
    found = [json.loads(line) for line in printed.splitlines() if line.startswith('{"')]
    assert list(FAULTS) == SIMULATED
    assert [name for each in found for name, problems in each.items() if problems] == SIMULATED
