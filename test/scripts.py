"""Runs the scripts of ``flatshard/examples``: their ``main`` on ranks of a pool, or the script in processes of its own."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import flatshard

PACKAGE = Path(flatshard.__file__).parent
EXAMPLES = {path.stem: path for path in sorted((PACKAGE / "examples").glob("*.py"))}


def run_main(ctx: Any, name: str, *args: Any, **kwargs: Any) -> list[str]:
    """Call the script's ``main`` on this rank, and return the lines that it prints."""
    main = runpy.run_path(str(EXAMPLES[name]))["main"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main(*args, **kwargs)
    return said.getvalue().splitlines()


def run_script(name: str, *arguments: str) -> list[str]:
    """Run the script as a user does, and return the lines that it prints. It must print no errors and no warnings."""
    return run_python(str(EXAMPLES[name]), *arguments)


def run_python(*arguments: str) -> list[str]:
    """Run Python with these arguments, and return the lines that it prints. It must print no errors and no warnings."""
    environment = {
        n: value for n, value in os.environ.items() if n not in ("RANK", "PYTHONWARNINGS", "OMP_NUM_THREADS")
    }
    environment |= {"PYTHONPATH": str(PACKAGE.parent), "GLOO_SOCKET_IFNAME": "lo", "FLATSHARD_WATCH_SECONDS": "0"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.splitlines()
