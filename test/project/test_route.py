"""The route of a step through the package stays short: calls, files, and how often a reader changes file.

``benchmarks/route.py`` prints it, and the same of FSDP2. It runs in processes of its own: hooks that other tests leave in a
process lengthen the route.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

LIMITS: dict[str, tuple[int, int, int]] = {
    "construct": (1363, 51, 391),
    "forward": (307, 16, 151),
    "forward, a unit": (82, 15, 38),
    "forward, a unit, without _comm": (56, 12, 32),
    "backward": (496, 17, 234),
    "backward, a unit": (156, 16, 73),
    "backward, a unit, without _comm": (98, 13, 57),
    "optimizer": (26, 4, 4),
    "state_dict": (98, 7, 72),
}
"""Most calls, files and changes of file of a phase, over the supported versions of torch. These numbers only go down."""


def test_the_route_of_a_step():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "benchmarks/route.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith('    "')]
    found: dict[str, tuple[int, int, int]] = ast.literal_eval("{" + "".join(lines) + "}")
    too_long = {name: figures for name, figures in found.items() if any(map(int.__gt__, figures, LIMITS[name]))}
    assert found.keys() == LIMITS.keys()
    assert not too_long, f"{too_long}; limits: {LIMITS}"
