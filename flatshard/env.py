"""Facts for a bug report: versions, devices and settings. Run ``python -m flatshard.env``, also under torchrun."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator

import torch
import torch.distributed as dist

from flatshard._base.version import __version__

__all__ = ["report"]

_CLIENTS = (
    "accelerate",
    "transformers",
    "peft",
    "trl",
    "lightning",
    "timm",
    "diffusers",
    "torchao",
    "torchtitan",
    "torchft",
)
_PREFIXES = ("FLATSHARD_", "GLOO_", "NCCL_", "TORCH_", "CUDA_", "PYTORCH_", "OMP_")
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def report() -> str:
    """Return one line for each fact, ``name: value``. It has no file names, and only the environment variables that matter.

    Example::

        print(flatshard.env.report())
    """
    return "\n".join(f"{name}: {value}" for name, value in _facts())


def _facts() -> Iterator[tuple[str, object]]:
    yield "flatshard", __version__ + ("" if _version("flatshard") else ", not installed, but on sys.path")
    cuda = torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else None)
    yield "torch", f"{torch.__version__} ({f'CUDA {cuda}' if torch.version.cuda else cuda or 'CPU'} build)"
    yield "python", f"{platform.python_version()}, {platform.platform()}"
    yield "cores", len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        kind = "accelerator" if device is None else device.type
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if kind == "cuda" else []
        yield "devices", f"{torch.accelerator.device_count()} x {kind} ({', '.join(dict.fromkeys(names)) or '?'})"
    else:
        yield "devices", "no accelerator"
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(name)]
    if "nccl" in backends and torch.cuda.is_available():
        backends[backends.index("nccl")] = f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}"  # type: ignore[no-untyped-call]
    yield "backends", ", ".join(backends)
    if found := [f"{name} {version}" for name in _CLIENTS if (version := _version(name))]:
        yield "clients", ", ".join(found)
    for name in sorted(os.environ):
        if name.startswith(_PREFIXES) or name in _OF_TORCHRUN:
            yield name, os.environ[name]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(report())
