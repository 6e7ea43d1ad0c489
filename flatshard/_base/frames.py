"""Frames of running code. Only this file reads them.

A forward is running as long as the frame that called it is. Units check it after exceptions that skipped hooks, such as an
interrupt, and when several threads run forwards. ``callers.py`` answers who calls. The watch says what a rank waits for.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from types import CodeType, FrameType
from typing import Any

from torch import nn

_MODULE_FILE = nn.Module.__call__.__code__.co_filename


def of_caller(depth: int = 0) -> FrameType:
    """Return the frame of the caller, or of ``depth`` callers further out."""
    return sys._getframe(1 + depth)


def of_module_call(depth: int, outer: FrameType | None) -> tuple[FrameType, bool]:
    """Return the frame of the running ``nn.Module.__call__``, and whether ``outer`` called it, directly or indirectly.

    The search begins ``depth`` callers further out.
    """
    frame = sys._getframe(1 + depth)
    while frame.f_code.co_filename != _MODULE_FILE and frame.f_back is not None:  # the hook may be wrapped
        frame = frame.f_back
    return frame, outer is not None and is_inside(frame, outer)


def caller_of(frame: FrameType) -> FrameType | None:
    """Return the frame that called ``frame``, or None if none did."""
    return frame.f_back


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Iterate over ``frame`` and its callers, from the innermost."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def callers_in(folder: str) -> int:
    """Return how many callers, from the caller of this function on, run code of files below ``folder``."""
    count, frame = 0, sys._getframe(1)
    while frame.f_code.co_filename.startswith(folder) and frame.f_back is not None:
        count, frame = count + 1, frame.f_back
    return count


def is_inside(frame: FrameType, outer: FrameType) -> bool:
    """Return whether ``outer`` called ``frame``, directly or indirectly."""
    at: FrameType | None = frame
    while at is not None:
        if at is outer:
            return True
        at = at.f_back
    return False


def runs(frame: FrameType, elsewhere: bool = False) -> bool:
    """Return whether ``frame`` is running on any thread, or with ``elsewhere`` on any but the caller's."""
    here = threading.get_ident() if elsewhere else None
    return any(thread != here and is_inside(running, frame) for thread, running in sys._current_frames().items())


def threads() -> set[int]:
    """Return the ids of the threads that run Python code now."""
    return set(sys._current_frames())


# -- what runs in a frame ----------------------------------------------------------------------------------------------


def is_of(frame: FrameType | None, function: Callable[..., Any]) -> bool:
    """Return whether ``function``, written in Python, runs in ``frame``."""
    return frame is not None and frame.f_code is function.__code__


def code_of(function: Callable[..., Any]) -> CodeType:
    """Return the code of ``function``, written in Python. Dynamo skips functions by their code."""
    return function.__code__


def is_in_module_file(frame: FrameType) -> bool:
    """Return whether a method of ``nn.Module`` itself runs in ``frame``, such as the call that runs hooks."""
    return frame.f_code.co_filename == _MODULE_FILE


def is_inner_of(frame: FrameType, function: Callable[..., Any]) -> bool:
    """Return whether a function that ``function`` defines inside itself runs in ``frame``."""
    return frame.f_code in function.__code__.co_consts


def function_name(frame: FrameType) -> str:
    return frame.f_code.co_name


def file_of(frame: FrameType) -> str:
    return frame.f_code.co_filename


def module_name(frame: FrameType | None) -> str:
    """Return the name of the Python module whose code runs in ``frame``, or "" for None."""
    name: str = "" if frame is None else frame.f_globals.get("__name__", "")
    return name


def variables(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of the function that runs in ``frame``."""
    return frame.f_locals


def self_of(frame: FrameType) -> Any:
    """Return the first argument of the function that runs in ``frame``, or None if it has none."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def method_name(kind: type, frame: FrameType) -> str | None:
    """Return the name of the method of ``kind`` that runs in ``frame``, also inside decorators, or None if none does."""
    code = frame.f_code
    for cls in kind.__mro__:
        for name, found in cls.__dict__.items():
            while found is not None:
                if getattr(found, "__code__", None) is code:
                    return name
                found = getattr(found, "__wrapped__", None)
    # A decorator without functools.wraps: the decorated function has the method's name.
    return code.co_name if callable(inspect.getattr_static(kind, code.co_name, None)) else None


def main_thread_in(names: Collection[str], file: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name and variables of the innermost call of one of ``names`` in ``file``, on the main thread, or None."""
    for frame in outward(sys._current_frames().get(threading.main_thread().ident or 0)):
        if frame.f_code.co_name in names and frame.f_code.co_filename == file:
            return frame.f_code.co_name, frame.f_locals
    return None
