"""Who did what, when: profiler labels, the logger, and an in-memory list of events for tests.

Costs one global read per event while nobody listens.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch.autograd import profiler

from flatshard import _config

logger = logging.getLogger("flatshard")

sinks: list[Callable[[str], None]] = []


def _show(text: str) -> None:
    """Log ``text``, or print it to stderr where logging is not set up to show it."""
    if logger.hasHandlers() and logger.isEnabledFor(logging.INFO):
        logger.info(text)
    else:
        print(f"flatshard, rank {dist.get_rank() if dist.is_initialized() else 0}: {text}", file=sys.stderr)


if _config.TRACE:
    sinks.append(_show)


def event(what: str, unit: str) -> None:
    """Note ``what`` happened to the unit with FQN ``unit`` ('' is the root). Where it costs, ask for ``sinks`` first."""
    text = f"{what} {unit or '<root>'}"
    for sink in sinks:
        sink(text)


@contextlib.contextmanager
def record_events() -> Iterator[list[str]]:
    """Collect the events of this process inside the ``with`` block, as readable lines, in order."""
    events: list[str] = []
    sink = events.append
    sinks.append(sink)
    try:
        yield events
    finally:
        sinks.remove(sink)


def is_profiling() -> bool:
    """Whether a profiler runs. Read from where torch notes it: to ask its C++ code takes three times as long."""
    return profiler._is_profiler_enabled


def labelled(what: str, unit: str, where: AbstractContextManager[object]) -> AbstractContextManager[object]:
    """``where``, within a profiler range ``flatshard::what (unit)`` while a profiler runs."""
    return _in_range(f"flatshard::{what} ({unit or '<root>'})", where) if is_profiling() else where


@contextlib.contextmanager
def _in_range(label: str, where: AbstractContextManager[object]) -> Iterator[None]:
    with torch.profiler.record_function(label), where:
        yield
