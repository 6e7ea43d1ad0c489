"""Where and with what results were made: versions, processors, the commit. No host names and no paths."""

from __future__ import annotations

import datetime
import importlib.util
import os
import platform
import subprocess
from pathlib import Path

import torch


def describe(command: str) -> dict[str, str]:
    """What stands above the tables, and in the results' file."""
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} on {platform.machine()}",
        "cpu": f"{processor()}, {os.cpu_count()} cores, 1 thread a rank",
        "gpu": gpu(),
    }


def commit() -> str:
    """Of this repository, and whether the working tree differs from it but for results."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "..", ":!results")
        return git("rev-parse", "--short=12", "HEAD") + (", changed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


def processor() -> str:
    """The model, as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or "unknown"


def gpu() -> str:
    """The first one's name."""
    if not torch.cuda.is_available():
        return "none"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def others() -> list[str]:
    """A line for each library that might compete, and does not: why."""
    lines = []
    for name, module, why in (
        ("DeepSpeed", "deepspeed", "its engine owns the step and needs an accelerator to be like the others' step"),
        ("Megatron-FSDP", "megatron_fsdp", "it needs CUDA"),
    ):
        found = importlib.util.find_spec(module) is not None
        lines.append(f"{name}: {'installed, not compared: ' + why if found else 'not installed'}")
    return lines
