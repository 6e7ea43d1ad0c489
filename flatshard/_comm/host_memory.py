"""Freed host memory stays with the process, from one unit to the next.

[Note: Freed memory stays with the process]
Units are freed and gathered all the time. The C library may return large memory to the system when it is freed. Then the
memory of the next unit is new: each page faults when it is first touched, and is zeroed. Whether this happens depends on
other allocations in the heap. Measured for a GPT of 25 M parameters on 2 gloo ranks: from 0 to 37,000 such faults a step,
which took up to 0.24 of 0.83 seconds of processor time. So if units live on CPU, the C library is told once to keep freed
memory, up to 2 GiB at the heap's end, as accelerators' allocators do. Then there are no such faults, and the process keeps
its largest size. ``FLATSHARD_KEEP_MEMORY=0`` leaves the C library alone. So do a user's own settings in the environment.
"""

from __future__ import annotations

import ctypes
import functools

from flatshard._base import environment

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_MOST = 2**31 - 1  # mallopt takes an int


@functools.cache
def keep_freed_memory() -> bool:
    """Have the C library keep freed memory, once per process. Returns whether it does now because of this call."""
    if not environment.KEEP_MEMORY:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no glibc
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MOST)) and bool(mallopt(_TRIM_THRESHOLD, _MOST))
