"""Ranks meet before they gather whole values: a rank that calls alone gets an error, not a hang.

[Note: One rank alone]
``if rank == 0: full_state_dict(model)`` is the first mistake that people make with sharded models: the others never issue the
all-gather. So ranks first meet at the process group's store (:class:`Rendezvous`): a rank that waits for long logs a warning,
and raises in the end.

The wait counts as one for a collective, so the watch sees within seconds when another rank waits for this one in a forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from flatshard._comm.progress import EXCHANGE, Label, digest, here
from flatshard._runtime import Runtime
from flatshard.checkpoint._meeting import Rendezvous

GIVE_UP_AFTER = 300.0  # seconds


def roll_call(runtimes: Iterable[Runtime], call: str) -> None:
    """Wait until all ranks of each process group have come to ``call``: its name, the same on all ranks.

    Raises:
        RuntimeError: some have not come in time, or came for something else; the message names them.
    """
    for runtime in sorted({r.number: r for r in runtimes}.values(), key=lambda r: r.number):
        store = None if runtime.progress is None else runtime.store()
        if store is not None:
            _meet(store, runtime, call)


def _meet(store: Any, runtime: Runtime, call: str) -> None:
    assert runtime.progress is not None
    label = Label(call, int(digest(call)[:7], 16) << 2)
    issued = runtime.progress.issue("call", EXCHANGE, label, False)
    before_this, here.waiting = here.waiting, issued

    def look() -> None:
        if runtime.monitor is not None and (why := runtime.monitor.explain(issued)) is not None:
            raise why

    names = dist.get_process_group_ranks(runtime.group)
    try:
        Rendezvous(store, runtime.rank, names, call, GIVE_UP_AFTER, look=look).meet()
    except BaseException:
        runtime.progress.counts[issued.key] -= 1  # not counted by the others either
        raise
    finally:
        here.waiting = before_this
