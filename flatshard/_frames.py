"""Frames of running code. Only this file reads them.

A forward is running as long as the frame that called it is. Units check it after exceptions that skipped hooks, such as an
interrupt, and when several threads run forwards. ``_callers.py`` answers who calls, and the watch says what a rank waits for.
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


def caller_of(frame: FrameType) -> FrameType | None:
    """The frame that ``frame`` was called from."""
    return frame.f_back


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


# -- what runs in a frame ----------------------------------------------------------------------------------------------


def is_of(frame: FrameType | None, function: Callable[..., Any]) -> bool:
    """Whether ``function``, written in Python, runs in ``frame``."""
    return frame is not None and frame.f_code is function.__code__


def code_of(function: Callable[..., Any]) -> CodeType:
    """The code of ``function``, written in Python: what torch knows a function by that dynamo is not to look below."""
    return function.__code__


def is_in_module_file(frame: FrameType) -> bool:
    """Whether a method of ``nn.Module`` itself runs in it, such as the call that runs hooks."""
    return frame.f_code.co_filename == _MODULE_FILE


def is_inner_of(frame: FrameType, function: Callable[..., Any]) -> bool:
    """Whether a function that ``function`` defines inside itself runs in it."""
    return frame.f_code in function.__code__.co_consts


def function_name(frame: FrameType) -> str:
    return frame.f_code.co_name


def file_of(frame: FrameType) -> str:
    return frame.f_code.co_filename


def module_name(frame: FrameType | None) -> str:
    """The name of the Python module whose code runs in it. Empty for None."""
    name: str = "" if frame is None else frame.f_globals.get("__name__", "")
    return name


def variables(frame: FrameType) -> dict[str, Any]:
    """The local variables of the function that runs in it."""
    return frame.f_locals


def self_of(frame: FrameType) -> Any:
    """The first argument of the function that runs in it, or None."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def method_name(kind: type, frame: FrameType) -> str | None:
    """The name of the method of ``kind`` that runs in it, directly or inside decorators. None if there is none."""
    code = frame.f_code
    for cls in kind.__mro__:
        for name, found in cls.__dict__.items():
            while found is not None:
                if getattr(found, "__code__", None) is code:
                    return name
                found = getattr(found, "__wrapped__", None)
    # In a decorator without functools.wraps: the decorated function has the method's name.
    return code.co_name if callable(inspect.getattr_static(kind, code.co_name, None)) else None


def main_thread_in(names: Collection[str], file: str) -> tuple[str, dict[str, Any]] | None:
    """The innermost call, on the main thread, of one of the functions ``names`` of ``file``: its name, and its variables."""
    for frame in outward(sys._current_frames().get(threading.main_thread().ident or 0)):
        if frame.f_code.co_name in names and frame.f_code.co_filename == file:
            return frame.f_code.co_name, frame.f_locals
    return None
