"""Builds ``shim.cpp``, the part of the simulated accelerator that is C++. Half a minute of one core, once per machine."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

SOURCE = Path(__file__).with_name("shim.cpp")
NAME = "flatshard_simulator"


def missing() -> str:
    """What this machine lacks to build the simulator. Empty: nothing."""
    compiler = os.environ.get("CXX", "c++")
    if sys.platform != "linux":
        return "the simulated accelerator is built on Linux only"
    if shutil.which(compiler) is None:
        return f"the simulated accelerator needs a C++ compiler: {compiler} is not here"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the simulated accelerator needs Python's headers"
    for package in ("ninja", "setuptools"):
        if importlib.util.find_spec(package) is None:
            return f"the simulated accelerator needs {package}: pip install 'flatshard[test]'"
    return ""


def directory() -> Path:
    """Where it is built: ``SIM_BUILD``, or a directory of its own for each version of torch, Python and the source."""
    if given := os.environ.get("SIM_BUILD"):
        return Path(given)
    identity = hashlib.sha256(SOURCE.read_bytes())
    identity.update(f"{torch.__version__} {sys.version} {os.getuid()}".encode())
    return Path(tempfile.gettempdir()) / f"flatshard-simulator-{identity.hexdigest()[:16]}"


def start() -> None:
    """Begin to build beside what else runs, unless that was done. :func:`build` then waits for it, and says what is wrong."""
    if not missing() and not _is_done():
        command = [sys.executable, "-P", __file__]
        _started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))


_started: list[subprocess.Popen[bytes]] = []


def _is_done() -> bool:
    done = directory() / f"{NAME}.so"
    return done.exists() and done.stat().st_mtime >= SOURCE.stat().st_mtime


def build() -> Path:
    """The shared library, built unless that was done. Processes that call it at once wait for the first.

    By a process of its own: torch loads what it builds, and that registers a device, once and for all.
    """
    where = directory()
    done = where / f"{NAME}.so"
    where.mkdir(parents=True, exist_ok=True)
    with open(where / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_done():
            with tempfile.TemporaryDirectory(dir=where) as temporary:
                # ninja is next to this Python, which may run without its virtual environment being activated
                path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
                command = [sys.executable, "-P", __file__, temporary]
                made = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
                if made.returncode:
                    raise RuntimeError(f"the simulated accelerator does not build:\n{made.stdout}\n{made.stderr}")
                os.replace(Path(temporary) / done.name, done)  # whole or not at all
    return done


def load() -> ModuleType:
    """The module. In one process, load it once: it registers a device."""
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(where: str) -> None:
    from torch.utils import cpp_extension

    cpp_extension.load(NAME, [str(SOURCE)], build_directory=where, extra_cflags=["-O1", "-w"])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _compile(sys.argv[1])
    else:
        build()
