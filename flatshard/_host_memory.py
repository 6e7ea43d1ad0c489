"""Memory of the host, between one unit and the next.

[Note: Freed memory stays with the process]
Units are freed and gathered all the time. The C library may give large memory back to the system when it is freed, and then
the next unit's is new: every page of it is found missing when it is first touched, and zeroed. Whether it does depends on
what else lies in the heap. Measured for a GPT of 25 M parameters on 2 gloo ranks: from 0 to 37,000 such faults a step, which
took up to 0.24 of 0.83 seconds of processor time. So where units live on CPU, the C library is told once to keep what is
freed, up to 2 GiB at the heap's end, as accelerators' allocators do; then there are none. The process keeps the size that it
had at most. ``FLATSHARD_KEEP_MEMORY=0`` leaves the C library alone; so do a user's own settings of it in the environment.
"""

from __future__ import annotations

import ctypes
import functools

from flatshard import _config

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_MOST = 2**31 - 1  # mallopt takes an int


@functools.cache
def keep_freed_memory() -> bool:
    """Have the C library keep what is freed. Once for the process; returns whether it does now because of us."""
    if not _config.KEEP_MEMORY:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no glibc
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MOST)) and bool(mallopt(_TRIM_THRESHOLD, _MOST))
