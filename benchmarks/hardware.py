"""Where and with what results were made: versions, processors, the commit. No host names and no paths."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch


def describe(command: str) -> dict[str, str]:
    """What stands above the tables, and in the results' file."""
    gpus = "none"
    if torch.cuda.is_available():
        gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} on {platform.machine()}",
        "cpu": f"{processor()}, {os.cpu_count()} cores, 1 thread a rank",
        "gpu": gpus,
    }


def commit() -> str:
    """Of this repository, and whether the working tree differs from it but for results."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "..", ":!results")
        return git("rev-parse", "--short=12", "HEAD") + (", changed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


def processor() -> str:
    """The model, as the system names it."""
    info = Path("/proc/cpuinfo")  # on Linux
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"
