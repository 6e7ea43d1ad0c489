"""Ranks meet before they gather whole values: a rank that calls alone gets an error, not a hang.

[Note: One rank alone]
``if rank == 0: full_state_dict(model)`` is the first mistake that people make with sharded models: the others never issue the
all-gather. So ranks first meet at the process group's store. The last rank to come lets the others go. A rank that waits for
long logs a warning, and in the end raises. A rank that gave up is not counted, so that all can meet again later.

The wait counts as one for a collective, so the watch sees within seconds when another rank waits for this one in a forward.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from flatshard import _trace
from flatshard._comm.messages import all_set
from flatshard._comm.progress import EXCHANGE, Issued, Label, digest, here
from flatshard._errors import name_list
from flatshard._runtime import Runtime

WARN_AFTER, GIVE_UP_AFTER = 10.0, 300.0  # seconds
SLICE = 1.0  # of a wait, in seconds, as other threads use the store in between


def roll_call(runtimes: Iterable[Runtime], call: str) -> None:
    """Wait until all ranks of each process group have come to ``call``: its name, the same on all ranks.

    Raises:
        RuntimeError: some have not come in time; the message names them.
    """
    for runtime in sorted({r.number: r for r in runtimes}.values(), key=lambda r: r.number):
        store = None if runtime.progress is None else runtime.store()
        if store is not None:
            _meet(store, runtime, dist.get_process_group_ranks(runtime.group), call)


def _meet(store: Any, runtime: Runtime, ranks: Sequence[int], call: str) -> None:
    """``ranks``: the members of the group, in the world."""
    assert runtime.progress is not None
    label = Label(call, int(digest(call)[:7], 16) << 2)
    issued = runtime.progress.issue("call", EXCHANGE, label, False)
    before_this, here.waiting = here.waiting, issued
    try:
        _wait_for_all(store, runtime, ranks, call, issued)
    except BaseException:
        runtime.progress.counts[issued.key] -= 1  # not counted by the others either
        raise
    finally:
        here.waiting = before_this


def _wait_for_all(store: Any, runtime: Runtime, ranks: Sequence[int], call: str, issued: Issued) -> None:
    rank = runtime.rank
    key = f"flatshard/roll_call/{call}"
    store.set(f"{key}/{rank}", "")  # to name those that have not come
    try:
        number, before = divmod(store.add(key, 1) - 1, len(ranks))  # of the meeting; ranks that came to it before
        if before == len(ranks) - 1:
            store.set(f"{key}/go {number}", "")
            store.delete_key(f"{key}/go {number - 1}")  # all who waited for it are here
        else:
            _wait(store, key, f"{key}/go {number}", call, runtime, ranks, issued)
    finally:
        store.delete_key(f"{key}/{rank}")


def _wait(store: Any, key: str, go: str, call: str, runtime: Runtime, ranks: Sequence[int], issued: Issued) -> None:
    started, warned = time.monotonic(), False
    while not all_set(store, [go], SLICE):
        if runtime.monitor is not None and (why := runtime.monitor.explain(issued)) is not None:
            raise why
        waited = time.monotonic() - started
        gives_up = waited > GIVE_UP_AFTER
        if gives_up or (waited > WARN_AFTER and not warned):
            late = name_list([f"rank {each}" for r, each in enumerate(ranks) if not store.check([f"{key}/{r}"])], 10)
            text = (
                f"{call}: rank {ranks[runtime.rank]} has waited for {late} for {waited:.0f} s. All ranks must call it"
            )
            if not gives_up:
                _trace.logger.warning(text)
                warned = True
            else:
                store.add(key, -1)
                if not store.check([go]):
                    raise RuntimeError(text)
                store.add(key, 1)  # the last one has come in this moment
