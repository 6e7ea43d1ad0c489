"""Run parts of ``benchmarks/gpu.py`` on the simulated device with a planted fault each, and print their problems as JSON.

The report's processes are forks of this one, so they have its patches.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import gpu
import gpu_parity
import torch
import torch.distributed as dist

import flatshard
from flatshard._comm.runtime import Runtime
from flatshard._comm.streams import StreamEvent
from flatshard._handle import unsharded
from flatshard.comm import DefaultCollectives
from flatshard.optim import OffloadHandle

Fault = Callable[[], AbstractContextManager[Any]]


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _ignore(owner: Any, name: str) -> Fault:
    """Return a fault: a function that does nothing."""
    return lambda: mock.patch.object(owner, name, _nothing)


def _of_modes(fault: Fault, *names: str) -> Fault:
    """Return a fault in a part that trains in these modes only."""

    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        modes = {
            part: {name: mode for name, mode in of.items() if name in names} for part, of in gpu_parity.PARITY.items()
        }
        with mock.patch.dict(gpu_parity.PARITY, modes), fault():
            yield

    return planted


def _waiting() -> AbstractContextManager[Any]:
    """Plant a wait of the host before each release of a unit."""
    before_free = Runtime.before_free

    def wait(self: Runtime, *args: Any) -> None:
        before_free(self, *args)
        torch.get_device_module("simdev").synchronize()

    return mock.patch.object(Runtime, "before_free", wait)


def _keeping() -> AbstractContextManager[Any]:
    """Plant a leak: a copy of each unit that is freed."""
    free, kept = unsharded.FlatBuffer.free, []

    def keep(self: unsharded.FlatBuffer) -> None:
        if self.flat.untyped_storage().nbytes():
            kept.append(torch.empty_like(self.flat))
        free(self)

    return mock.patch.object(unsharded.FlatBuffer, "free", keep)


def _zeros_sent(name: str) -> Fault:
    """Return a fault: a collective whose input is zeros."""

    def planted() -> AbstractContextManager[Any]:
        send = getattr(DefaultCollectives, name)

        def zero(self: Any, *tensors: Any) -> Any:  # (output, input), or one for both; and perhaps a label
            [*_, sent] = (tensor for tensor in tensors if isinstance(tensor, torch.Tensor))
            sent.zero_()
            return send(self, *tensors)

        return mock.patch.object(DefaultCollectives, name, zero)

    return planted


def _zeros_back() -> AbstractContextManager[Any]:
    """Plant zeros in the place of values that come back from the host."""
    copied = OffloadHandle._copied
    return mock.patch.object(OffloadHandle, "_copied", lambda *args: copied(*args).zero_())


FAULTS: dict[str, Fault] = {
    "probe": _ignore(dist, "all_reduce"),
    "correctness": _of_modes(_ignore(Runtime, "before_free"), "poisoned, late compute"),
    "host": _waiting,
    "step": _waiting,
    "predictions": _keeping,
    "hybrid": _of_modes(_zeros_sent("all_reduce"), "HYBRID_SHARD"),
    "races": _of_modes(_ignore(StreamEvent, "wait"), "FULL_SHARD"),
    "steps": _zeros_sent("reduce_scatter"),
    "nccl": _waiting,
    "kernels": _ignore(flatshard, "load_checkpoint"),
    "switch": _zeros_back,
    "tables": _waiting,
}


def main(parts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            report = Path(folder) / part
            with FAULTS[part](), contextlib.suppress(SystemExit):
                gpu.main(["--simulated", "--only", part, "--out", str(report)])
            problems = [line for line in report.read_text().splitlines() if line.startswith(f"- {part}")]
            print(json.dumps({part: problems}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
