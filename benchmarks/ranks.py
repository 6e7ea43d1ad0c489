"""The processes of a job: how they start, find each other, and add up what each of them knows."""

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
    """One thread a rank, and gloo need not look up the machine's own name; where the user has set nothing."""
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
        """Prints, on rank 0 only."""
        if self.rank == 0:
            print(text, flush=True)

    def own_rows(self, rows: Tensor) -> Tensor:
        """This rank's equal part of a tensor that is the same on all ranks, cut along its first dimension."""
        return rows.to(self.device).chunk(self.size)[self.rank]

    def reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """In float64, over all ranks."""
        reduced = value.detach().to(self.device, torch.float64, copy=True)
        dist.all_reduce(reduced, op)
        return reduced

    def mean(self, value: Tensor) -> float:
        return float(self.reduce(value)) / self.size

    def __str__(self) -> str:
        return f"{self.size} rank{'s' * (self.size > 1)} on {self.device.type} over {dist.get_backend()}"


def are_started() -> bool:
    """Whether this process is one of the ranks that torchrun, or ``start``, has started."""
    return "RANK" in os.environ


def leave(code: int) -> NoReturn:
    """Ends this process at once. Python's own way out takes torch apart first, which costs a second of one core."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start(count: int, script: str, arguments: Sequence[str]) -> None:
    """Runs ``script`` in ``count`` processes, as torchrun does, and returns when all have ended.

    Raises:
        SystemExit: one of them failed, or the user has interrupted them.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    set_environment()
    logging.disable(logging.WARNING)  # in this process only, where torchrun warns of each signal that it passes on
    try:
        torchrun(["--standalone", "--nproc-per-node", str(count), script, *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(f"rank {rank} ended with exit code {failure.exitcode}")
    except SignalException as signalled:
        leave(128 + signalled.sigval)


@contextlib.contextmanager
def process_group(use_gpu: bool = True) -> Iterator[Ranks]:
    """Joins the process group that torchrun describes, or makes one of a single rank, and leaves it at the end."""
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
        leave(128 + signal.SIGINT)  # at once: the other ranks leave too, perhaps in the middle of a collective
    finally:
        # A model holds its process group, and a model lies in reference cycles. While anything holds the group, gloo's
        # threads outlive destroy_process_group, and one that frees a tensor during Python's own exit aborts the process.
        gc.collect()
        dist.destroy_process_group()
