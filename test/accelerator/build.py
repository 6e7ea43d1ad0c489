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


def library() -> Path:
    """Where it is built: a directory of its own for each version of torch, Python and the source."""
    identity = hashlib.sha256(SOURCE.read_bytes())
    identity.update(f"{torch.__version__} {sys.version} {os.getuid()}".encode())
    return Path(tempfile.gettempdir()) / f"flatshard-simulator-{identity.hexdigest()[:16]}" / f"{NAME}.so"


# Another process builds it: torch loads what it builds, and that registers a device, once and for all.
COMMAND = [sys.executable, "-P", __file__]
_started: list[subprocess.Popen[bytes]] = []


def start() -> None:
    """Begin to build beside what else runs, unless that was done. :func:`build` then waits for it, and says what is wrong."""
    if not missing() and not library().exists():
        _started.append(subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))


def build() -> Path:
    """The shared library, built unless that was done. Processes that call it at once wait for the first."""
    if not library().exists():
        made = subprocess.run(COMMAND, capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"the simulated accelerator does not build:\n{made.stdout}\n{made.stderr}")
    return library()


def load() -> ModuleType:
    """The module. In one process, load it once: it registers a device."""
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile() -> None:
    from torch.utils import cpp_extension

    # ninja is next to this Python, which may run without its virtual environment being activated
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = library()
    done.parent.mkdir(exist_ok=True)
    with open(done.with_name("lock"), "w") as lock, tempfile.TemporaryDirectory(dir=done.parent) as where:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            cpp_extension.load(NAME, [str(SOURCE)], build_directory=where, extra_cflags=["-O1", "-w"])
            os.replace(Path(where) / done.name, done)  # whole or not at all


if __name__ == "__main__":
    _compile()
