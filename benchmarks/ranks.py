"""The processes of a job: their start, their rendezvous, and reductions over them."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor


def set_environment() -> None:
    """Set defaults of one thread per rank, and of an interface for gloo, which then does not look up the machine's name."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if os.environ.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1", "::1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


@dataclass(frozen=True)
class Ranks:
    """The processes of this job, seen from one of them."""

    rank: int
    size: int
    device: torch.device

    def say(self, text: str) -> None:
        """Print on rank 0 only."""
        if self.rank == 0:
            print(text, flush=True)

    def own_rows(self, rows: Tensor) -> Tensor:
        """Return this rank's equal share of rows of a tensor that is the same on all ranks."""
        return rows.to(self.device).chunk(self.size)[self.rank]

    def reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a value over all ranks in float64."""
        reduced = value.detach().to(self.device, torch.float64, copy=True)
        dist.all_reduce(reduced, op)
        return reduced

    def mean(self, value: Tensor) -> float:
        return float(self.reduce(value)) / self.size

    def __str__(self) -> str:
        return f"{self.size} rank{'s' * (self.size > 1)} on {self.device.type} over {dist.get_backend()}"


def are_started() -> bool:
    """Return whether torchrun or ``start`` has started this process as a rank."""
    return "RANK" in os.environ


def leave(code: int) -> NoReturn:
    """End this process at once. Python's own exit would first destroy torch's state, which takes a second of one core."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start(count: int, script: str, arguments: Sequence[str]) -> None:
    """Run ``script`` in ``count`` processes, like torchrun, and return when all have ended.

    Raises:
        SystemExit: one of them failed, or the user has interrupted them.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    set_environment()
    logging.disable(logging.WARNING)  # in this process only: torchrun warns of each signal that it forwards
    try:
        torchrun(["--standalone", "--monitor-interval", "1", "--nproc-per-node", str(count), script, *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(f"rank {rank} ended with exit code {failure.exitcode}")
    except SignalException as signalled:
        leave(128 + signalled.sigval)


@contextlib.contextmanager
def process_group(use_gpu: bool = True) -> Iterator[Ranks]:
    """Join the process group that torchrun describes, or make one of a single rank, and leave it at the end."""
    set_environment()
    device, backend = torch.device("cpu"), "gloo"
    if use_gpu and torch.cuda.is_available():
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))), "nccl"
        torch.cuda.set_device(device)
    if are_started():
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), device)
    try:
        yield ranks
    except KeyboardInterrupt:
        ranks.say("\nstopped")
        leave(128 + signal.SIGINT)  # at once, as the other ranks leave too, perhaps in the middle of a collective
    finally:
        # A model holds its process group, and is in reference cycles. While the group is alive, gloo's threads outlive
        # destroy_process_group, and a thread that frees a tensor during Python's exit aborts the process.
        gc.collect()
        dist.destroy_process_group()
