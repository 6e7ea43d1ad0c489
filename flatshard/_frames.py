"""Frames of running code: only this file looks at them.

A forward is running as long as the frame that called it is. This is asked after exceptions that skipped hooks (an interrupt
does), and when several threads run forwards. Errors of the watch say in which collective of the user's a rank is.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

from torch import nn

_MODULE_FILE = nn.Module.__call__.__code__.co_filename


def of_caller(depth: int = 0) -> FrameType:
    """The frame of the caller, or ``depth`` callers further out."""
    return sys._getframe(1 + depth)


def of_module_call(depth: int, outer: FrameType | None) -> tuple[FrameType, bool]:
    """The frame of the ``nn.Module.__call__`` that is running, as seen from ``depth`` callers further out; and whether it was
    called, directly or indirectly, from ``outer``.
    """
    frame = sys._getframe(1 + depth)
    while frame.f_code.co_filename != _MODULE_FILE and frame.f_back is not None:  # the hook may be wrapped
        frame = frame.f_back
    return frame, outer is not None and is_inside(frame, outer)


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """``frame``, and those that it was called from."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_inside(frame: FrameType, outer: FrameType) -> bool:
    """Whether ``frame`` was called, directly or indirectly, from ``outer``."""
    at: FrameType | None = frame
    while at is not None:
        if at is outer:
            return True
        at = at.f_back
    return False


def runs(frame: FrameType, elsewhere: bool = False) -> bool:
    """Whether ``frame`` is running on any thread, or (``elsewhere``) on one that is not the caller's."""
    here = threading.get_ident() if elsewhere else None
    return any(thread != here and is_inside(running, frame) for thread, running in sys._current_frames().items())


def threads() -> set[int]:
    """The threads that run Python code now."""
    return set(sys._current_frames())


def main_thread_in(names: Collection[str], file: str) -> tuple[str, dict[str, Any]] | None:
    """The innermost call, on the main thread, of one of the functions ``names`` of ``file``: its name, and its variables."""
    for frame in outward(sys._current_frames().get(threading.main_thread().ident or 0)):
        if frame.f_code.co_name in names and frame.f_code.co_filename == file:
            return frame.f_code.co_name, frame.f_locals
    return None


def called_by(modules: tuple[str, ...]) -> bool:
    """Whether code of a module whose name starts with one of ``modules`` is among the nearest callers."""
    # nn.Module's __setattr__, and what noticed it, are in between.
    nearest = itertools.islice(outward(sys._getframe(1)), 8)
    return any(frame.f_globals.get("__name__", "").startswith(modules) for frame in nearest)
