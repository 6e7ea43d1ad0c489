"""Memory in use by gloo is not freed, and works are waited for: after an interrupt at any wait, and in dropped models.

The docstring of fence.py defines the fence's checks.
"""

import datetime
import gc
import itertools
import time
from typing import Any

import fence as fences
import pytest
import torch
import torch.distributed as dist
from on_ranks import ranks
from pairs import some
from parity import full_params
from pool import Pool
from torch import Tensor, nn

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard._base import environment
from flatshard._composable.state import unit_of
from flatshard._handle.lifetime import BY_USER

WIDTH = 5
DELAY = 0.002


class Block(nn.Module):
    """A block with one trainable and one frozen flat parameter, so that a unit has two gathers in flight at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.down.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Run:
    """A deterministic training run: equal numbers of steps give equal parameters."""

    def __init__(self, group: Any, rank: int, strategy: ShardingStrategy, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2)).double()
        fully_shard(self.model, policy=Block, process_group=group, strategy=strategy, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.x = torch.randn(3, WIDTH, dtype=torch.double).add_(rank)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()


STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)


def untouched(ctx: Any, strategy: ShardingStrategy, steps: int) -> dict[str, Tensor]:
    run = Run(ctx.group, ctx.rank, strategy)
    for _ in range(steps):
        run.step()
    return full_params(run.model)


def check_same(run: Run, expected: dict[str, Tensor]) -> None:
    for name, value in full_params(run.model).items():
        assert torch.equal(value, expected[name]), name


HOW = [(True, False), (False, True), (False, False), (True, True)]
"""Pairs: whether an interrupt comes after the wait has returned, and whether ``recover`` is called."""


@pytest.mark.parametrize("strategy", some(STRATEGIES, 1), ids=lambda strategy: strategy.name)
@ranks(2, timeout=30)
def test_interrupts_at_every_wait(ctx, strategy: ShardingStrategy) -> None:
    """Interrupt all ranks at the same wait, like Ctrl-C in a notebook that drives them. The exceptions stay alive."""
    expected = untouched(ctx, strategy, 2)
    kept: list[BaseException] = []
    with fences.install(DELAY) as fence:
        first = Run(ctx.group, ctx.rank, strategy)
        first.step()
        fence.interrupt_at(None)
        first.step()
        waits = fence.waits
        assert waits > 5
        for wait, (after, recovers) in zip(range(1, waits + 1), itertools.cycle(HOW)):
            ctx.note(f"{strategy.name}, {'after' if after else 'at'} wait {wait} of {waits}")
            run = Run(ctx.group, ctx.rank, strategy)
            run.step()
            fence.interrupt_at(wait, after)
            try:
                run.step()
            except KeyboardInterrupt as e:
                kept.append(e)
            fence.interrupt_at(None)
            if recovers:
                flatshard.recover(run.model)
            run.step()
            fence.check()
            check_same(run, expected)
        assert len(kept) == waits
        kept.clear()
        gc.collect()
        fence.check()


@ranks(2, 3, timeout=30)
def test_a_model_dropped_while_it_is_gathered(ctx) -> None:
    strategy = STRATEGIES[ctx.world_size - 2]
    expected = untouched(ctx, strategy, 2)
    for how in ("unshard", "prefetch", "interrupt"):
        ctx.note(f"{strategy.name}, {how}")
        with fences.install(DELAY) as fence:
            run = Run(ctx.group, ctx.rank, strategy)
            run.step()
            if how == "unshard":
                flatshard.unshard(run.model, recurse=True, async_op=True)
            elif how == "prefetch":
                unit_of(run.model[0]).handle.unshard(BY_USER)
            else:
                fence.interrupt_at(2)
                with pytest.raises(KeyboardInterrupt):
                    run.step()
            del run
            gc.collect()
            fence.check()
            dist.barrier(group=ctx.group)
            run = Run(ctx.group, ctx.rank, strategy)
            run.step()
            run.step()
            check_same(run, expected)
            del run
            gc.collect()
            fence.check()
            assert not fence.memory_in_use


def find_out(run: Run, where: str, outputs: list[Tensor], odd: bool) -> None:
    if where == "forward":
        run.model[odd](run.x)
    elif where == "backward":
        outputs[odd].sum().backward()
    else:
        flatshard.recover(run.model)


def fall_out_of_step(ctx, where: str, static_buffers: bool) -> None:
    """Sends that no rank receives stay with the group, and so does their memory."""
    group = dist.new_group(list(range(ctx.world_size)), timeout=datetime.timedelta(seconds=20))
    odd = ctx.rank == 1
    with pytest.MonkeyPatch.context() as patch, fences.install(DELAY) as fence:
        patch.setattr(environment, "ORDER_CHECK", "first")
        patch.setattr(environment, "SHARED_MEMORY", 0)
        run = Run(group, ctx.rank, ShardingStrategy.SHARD_GRAD_OP, static_buffers=static_buffers)
        outputs = [run.model[i](run.x) for i in (0, 1)] if where == "backward" else []
        if where == "interrupt":
            fence.interrupt_at(1)
            with pytest.raises(KeyboardInterrupt):
                run.model[odd](run.x)
        with pytest.raises(flatshard.OutOfStepError, match="ranks run different units") as caught:
            find_out(run, where, outputs, odd)
        works = len(fence.under_way)
        assert works >= 2  # works between a rank and another that runs different units
        flatshard.recover(run.model)
        fence.check()
        del run, caught
        outputs.clear()
        gc.collect()
        fence.check()
        assert len(fence.under_way) == works
        dist.barrier(group=group)  # no message is incomplete on any connection
        dist.destroy_process_group(group)
        del group
        until = time.monotonic() + 40  # the watch may hold the group's wait until its next look
        while fence.under_way and time.monotonic() < until:
            time.sleep(0.1)
            gc.collect()
            fence.let_go()
        assert not fence.under_way


@pytest.fixture(scope="module")
def fresh():
    """Start separate ranks, where other tests have left nothing."""
    ranks = Pool(3)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("where", "static_buffers"), [("forward", False), ("interrupt", True), ("backward", False), ("backward", True)]
)
def test_ranks_out_of_step(fresh, where, static_buffers):
    fresh.run(fall_out_of_step, where, static_buffers, world_size=3, timeout=90)
