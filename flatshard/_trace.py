"""Who did what, when: profiler labels, the logger, and an in-memory list of events for tests.

Costs one global read per event while nobody listens.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from flatshard import _config

logger = logging.getLogger("flatshard")

_sinks: list[Callable[[str], None]] = []
if _config.TRACE:
    _sinks.append(logger.info)


def event(what: str, unit: str) -> None:
    """Note ``what`` happened to the unit with FQN ``unit`` ('' is the root)."""
    if _sinks:
        text = f"{what} {unit or '<root>'}"
        for sink in _sinks:
            sink(text)


@contextlib.contextmanager
def record_events() -> Iterator[list[str]]:
    """Collect the events of this process inside the ``with`` block, as readable lines, in order."""
    events: list[str] = []
    sink = events.append
    _sinks.append(sink)
    try:
        yield events
    finally:
        _sinks.remove(sink)


def labelled(
    what: str, unit: str, where: AbstractContextManager[object] | None
) -> AbstractContextManager[object] | None:
    """``where``, within a profiler range ``flatshard::what (unit)`` while a profiler runs. None: nothing to enter."""
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return where
    stack = contextlib.ExitStack()
    stack.enter_context(torch.profiler.record_function(f"flatshard::{what} ({unit or '<root>'})"))
    if where is not None:
        stack.enter_context(where)
    return stack
