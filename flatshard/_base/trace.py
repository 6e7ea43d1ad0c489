"""Events of units: labels for profilers, the logger, and a list in memory for tests.

An event costs one global read while nobody listens.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch.autograd import profiler

from flatshard._base import environment

logger = logging.getLogger("flatshard")

sinks: list[Callable[[str], None]] = []


def _show(text: str) -> None:
    """Log ``text``, or print it to stderr where logging is not set up to show it."""
    if logger.hasHandlers() and logger.isEnabledFor(logging.INFO):
        logger.info(text)
    else:
        print(f"flatshard, rank {dist.get_rank() if dist.is_initialized() else 0}: {text}", file=sys.stderr)


if environment.TRACE:
    sinks.append(_show)


def event(what: str, unit: str) -> None:
    """Send an event of the unit with the FQN ``unit`` ("" for the root) to all sinks. Frequent callers test them first."""
    text = f"{what} {unit or '<root>'}"
    for sink in sinks:
        sink(text)


@contextlib.contextmanager
def record_events() -> Iterator[list[str]]:
    """Collect the events of this process inside the ``with`` block: readable lines, in order."""
    events: list[str] = []
    sink = events.append
    sinks.append(sink)
    try:
        yield events
    finally:
        sinks.remove(sink)


# Whether a profiler runs. Torch's Python flag is read, as its C++ code takes three times as long.
is_profiling: Callable[[], bool] = functools.partial(getattr, profiler, "_is_profiler_enabled")


def labelled(what: str, unit: str, where: AbstractContextManager[object]) -> AbstractContextManager[object]:
    """Return ``where``, inside of a profiler range ``flatshard::what (unit)`` while a profiler runs."""
    return _in_range(f"flatshard::{what} ({unit or '<root>'})", where) if is_profiling() else where


@contextlib.contextmanager
def _in_range(label: str, where: AbstractContextManager[object]) -> Iterator[None]:
    with torch.profiler.record_function(label), where:
        yield
