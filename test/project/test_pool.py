"""The pool of ranks itself: every distributed test leans on how it reports failures and recovers from them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pool as pool_module
import pytest
import torch
import torch.distributed as dist
from on_ranks import ranks
from pool import Pool, RankFailure

TESTS = Path(pool_module.__file__).parent


def rank_sum(ctx, factor=1):
    t = torch.tensor(float(ctx.rank + 1))
    dist.all_reduce(t, group=ctx.group)
    return ctx.rank, dist.get_world_size(ctx.group), factor * t.item()


def assert_usable(pool: Pool) -> None:
    for world_size in (3, 4):
        total = 2.0 * sum(range(1, world_size + 1))
        assert pool.run(rank_sum, factor=2, world_size=world_size) == [
            (r, world_size, total) for r in range(world_size)
        ]


def state_of_a_rank(ctx):
    found = torch.get_num_threads(), torch.rand(3).tolist(), torch.get_default_dtype(), torch.is_grad_enabled()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return found


def skip(ctx):
    pytest.skip("not on this rank")


def test_bodies_start_from_the_same_state(pool):
    first, second = pool.run(state_of_a_rank), pool.run(state_of_a_rank)
    assert first == second == [(1, first[0][1], torch.float32, True)] * 2


def fail_on(ctx, rank):
    """A rank fails while the others wait for it in a collective."""
    if ctx.rank == rank:
        raise ValueError("the reason")
    dist.barrier(group=ctx.group)


def fail_out_of_step(ctx):
    """Rank 0 leaves a collective behind that the others never joined."""
    if ctx.rank == 0:
        dist.all_reduce(torch.ones(3), group=ctx.group, async_op=True)
    raise ValueError("out of step")


def hang_on(ctx, ranks):
    """In C++."""
    if ctx.rank in ranks:
        ctx.note("about to wait for ever")
        dist.barrier(group=ctx.group)


def die_on(ctx, rank):
    if ctx.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group=ctx.group)


def return_unpicklable(ctx):
    return lambda: None


FAILURES = {  # the body, its arguments, which ranks fail how, and what the first of them shows
    "one rank": (fail_on, (1,), {"raised": [1], "blocked": [0, 2]}, 'raise ValueError("the reason")'),
    "out of step": (fail_out_of_step, (), {"raised": [0, 1, 2]}, "out of step"),
    "hang": (hang_on, ((0, 2),), {"hung": [0, 2]}, "in hang_on"),
    "death": (die_on, (1,), {"died": [1]}, "exit code -9"),  # others may raise: their connections were closed
    "no result": (return_unpicklable, (), {"raised": [0, 1, 2]}, "pickle"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_told_and_the_pool_goes_on(pool, monkeypatch, name):
    monkeypatch.setattr(pool_module, "GRACE", 0.2)
    body, args, kinds, shown = FAILURES[name]
    pool.run(rank_sum)
    with pytest.raises(RankFailure, match=body.__name__) as e:
        pool.run(body, *args, world_size=3, timeout=0.5 if body is hang_on else 100)
    assert {kind: e.value.of(kind) for kind in kinds} == kinds
    assert shown in e.value.failures[0].text
    assert body is not hang_on or e.value.failures[0].note == "about to wait for ever"
    assert_usable(pool)


@ranks(1, 3)
def fails_on(ctx, rank):
    fail_on(ctx, rank)


def test_a_body_that_is_a_test_runs_on_the_ranks_and_may_skip(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "GRACE", 0.2)
    with pytest.raises(RankFailure) as caught:
        fails_on(pool=pool, world_size=3, rank=1)
    assert caught.value.of("raised") == [1]
    fails_on(pool=pool, world_size=1, rank=1)
    with pytest.raises(pytest.skip.Exception, match="not on this rank"):
        pool.run(skip)


INNER_TEST = """
import signal
import pytest

@pytest.mark.time_limit(1)
def test_waits():
    signal.pause()

def test_fine(pool):
    pass
"""


def test_a_test_that_takes_too_long_fails_with_its_name(tmp_path):
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_inner.py").write_text(INNER_TEST)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(TESTS), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "test_inner.py::test_waits: the test took longer than 1 s" in result.stdout
    assert "1 failed, 1 passed" in result.stdout
