"""Start the processes of a job, kill one of them at random every few steps, and start another in its place."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Sequence

import torch.distributed as dist


def start_and_kill(count: int, script: str, arguments: Sequence[str], every: int) -> int:
    """Run ``script`` in ``count`` processes until all have ended. The rendezvous store is in this process, so it survives
    them.

    The first rank sets ``step`` in the store to the number of the step and of the ranks. No rank is killed before all have
    joined. ``killed`` is the time of a kill, by this machine's monotonic clock.

    Returns:
        The number of processes that failed without being killed.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    store.set("step", "0 0")
    command = [sys.executable, script, *arguments, "--ranks", str(count), "--store", str(store.port)]
    print(f"starting {count} processes: each imports torch ...", flush=True)
    alive = [subprocess.Popen(command) for _ in range(count)]
    failed, next_kill, draw = 0, every, random.Random(0)
    try:
        while alive:
            failed += sum(bool(process.poll()) for process in alive)
            alive = [process for process in alive if process.poll() is None]
            step, size = map(int, store.get("step").split())
            if step >= next_kill and size == len(alive) == count:
                victim = draw.choice(alive)
                print(f"killing process {victim.pid}, and starting another", flush=True)
                store.set("killed", str(time.monotonic()))
                victim.kill()
                victim.wait()
                alive.remove(victim)
                alive.append(subprocess.Popen(command))
                next_kill = step + every
            time.sleep(0.05)
    finally:
        for process in alive:
            process.kill()
            process.wait()
    return failed
