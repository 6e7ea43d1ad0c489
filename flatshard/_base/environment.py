"""The environment variables that flatshard reads, once, when it is imported. No other file reads them."""

from __future__ import annotations

import math
import os

_MALLOC_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
KEEP_MEMORY = os.environ.get("FLATSHARD_KEEP_MEMORY", "1") not in ("0", "") and not any(
    name in os.environ for name in _MALLOC_SETTINGS
)
"""``FLATSHARD_KEEP_MEMORY=0``: do not tell the C library to keep freed memory: see ``_comm/host_memory.py``."""


SHARED_MEMORY = int(os.environ.get("FLATSHARD_SHARED_MEMORY", "1"))
"""``FLATSHARD_SHARED_MEMORY``: ranks of one host whose collectives go over gloo read payloads of at least so many bytes in
shared memory (by default all); 0: they never do. The first gather checks that it is the same on all ranks. See
``_comm/shared_memory``."""


TRACE = os.environ.get("FLATSHARD_TRACE", "0") not in ("0", "")
"""``FLATSHARD_TRACE=1``: log every unshard, reshard and collective with the unit's FQN (logger
``flatshard``, INFO), or print it to stderr where logging is not set up."""


WATCH_SECONDS = float(os.environ.get("FLATSHARD_WATCH_SECONDS", "10"))
"""``FLATSHARD_WATCH_SECONDS``: how long a rank may wait, over gloo, before it asks whether ranks wait for each other; 0: it
never asks. Being slow is no error, however long."""

ORDER_CHECK = os.environ.get("FLATSHARD_ORDER_CHECK", "first")
"""``FLATSHARD_ORDER_CHECK``: when ranks compare which units they run: in the ``first`` passes, ``always`` or never
(``off``). The same on all ranks."""

CHECKED = 4
"""The number of gathers of each unit, and reductions, that ``first`` checks. FULL_SHARD prefetches from step 2 on."""


def checked_collectives() -> float:
    """Return how many gathers of each unit, and reductions, are checked. See ``ORDER_CHECK``.

    Raises:
        ValueError: ``ORDER_CHECK`` is none of the three.
    """
    if ORDER_CHECK not in ("first", "always", "off"):
        raise ValueError(f"FLATSHARD_ORDER_CHECK={ORDER_CHECK!r}: must be first, always or off")
    return {"first": CHECKED, "always": math.inf, "off": 0}[ORDER_CHECK]


def local_world_size() -> int | None:
    """Return the number of ranks on this node, as torchrun sets it, or None."""
    value = os.environ.get("LOCAL_WORLD_SIZE")
    return int(value) if value is not None else None
