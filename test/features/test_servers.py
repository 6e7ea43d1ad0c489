"""Servers: requests come on many threads or coroutines, and one thread has the model, which stays unsharded."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import Block, Net
from torch import Tensor, nn

import flatshard
from flatshard import fully_shard
from flatshard._trace import record_events

REQUESTS = [torch.full((1, 4), float(i)) for i in range(6)]


def answer(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():  # of this thread
        return model(x)


def serve(ctx) -> None:
    torch.manual_seed(0)
    plain = Net()
    model = Net()
    model.load_state_dict(plain.state_dict())
    fully_shard(model, policy={Block}, process_group=ctx.group)
    expected = [answer(plain, x) for x in REQUESTS]
    with flatshard.keep_unsharded(model), ThreadPoolExecutor(max_workers=1) as one:
        one.submit(answer, model, REQUESTS[0]).result()
        with record_events() as events:
            with ThreadPoolExecutor(max_workers=3) as many:  # each waits for the one
                got = list(many.map(lambda x: one.submit(answer, model, x).result(), REQUESTS))

            async def requests() -> list[Tensor]:
                loop = asyncio.get_running_loop()
                return await asyncio.gather(*[loop.run_in_executor(one, answer, model, x) for x in REQUESTS])

            coroutines = asyncio.run(requests())
    assert not [e for e in events if e.startswith("all-gather")]  # so even the order may differ on ranks
    for found in (got, coroutines):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    model(REQUESTS[0]).sum().backward()  # the main thread trains on


def test_threads_and_coroutines(pool):
    pool.run(serve, world_size=2)


def together(ctx) -> None:
    """A second thread is told what to do."""
    model, entered, leave = Net(), threading.Event(), threading.Event()
    fully_shard(model, policy={Block}, process_group=ctx.group)

    def stay(*_: object) -> None:
        entered.set()
        leave.wait()

    with flatshard.keep_unsharded(model):
        answer(model, REQUESTS[0])
        handle = model.head.register_forward_pre_hook(stay)
        with ThreadPoolExecutor(max_workers=1) as one:
            first = one.submit(answer, model, REQUESTS[0])
            entered.wait()
            try:
                with pytest.raises(RuntimeError, match=r"on another thread.*ThreadPoolExecutor\(max_workers=1\)"):
                    answer(model, REQUESTS[1])
            finally:
                leave.set()
            first.result()
        handle.remove()
        answer(model, REQUESTS[1])


def test_two_threads_at_a_time(pool):
    pool.run(together, world_size=2)
