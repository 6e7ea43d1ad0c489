"""Build ``shim.cpp``, the C++ code of the simulated accelerator: half a minute of one core, once per machine."""

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
    """Return what this machine lacks to build the simulator, or an empty string."""
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
    """Return the path of the shared library, in a directory for each version of torch, Python and the source."""
    identity = hashlib.sha256(SOURCE.read_bytes())
    identity.update(f"{torch.__version__} {sys.version} {os.getuid()}".encode())
    return Path(tempfile.gettempdir()) / f"flatshard-simulator-{identity.hexdigest()[:16]}" / f"{NAME}.so"


# Build in another process, because torch loads what it builds, and loading registers a device permanently.
COMMAND = [sys.executable, "-P", __file__]
_started: list[subprocess.Popen[bytes]] = []


def start() -> None:
    """Start building in the background unless the library exists. :func:`build` waits for it and reports errors."""
    if not missing() and not library().exists():
        _started.append(subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))


def build() -> Path:
    """Return the shared library, built if necessary. Concurrent processes wait for the first."""
    if not library().exists():
        made = subprocess.run(COMMAND, capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"the simulated accelerator does not build:\n{made.stdout}\n{made.stderr}")
    return library()


def load() -> ModuleType:
    """Load the module, at most once per process, because it registers a device."""
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile() -> None:
    from torch.utils import cpp_extension

    # ninja is next to this Python, whose virtual environment may not be activated
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = library()
    done.parent.mkdir(exist_ok=True)
    with open(done.with_name("lock"), "w") as lock, tempfile.TemporaryDirectory(dir=done.parent) as where:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            cpp_extension.load(NAME, [str(SOURCE)], build_directory=where, extra_cflags=["-O1", "-w"])
            os.replace(Path(where) / done.name, done)  # atomic


if __name__ == "__main__":
    _compile()
