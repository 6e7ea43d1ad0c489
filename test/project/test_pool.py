"""The pool of ranks itself: every distributed test leans on how it reports failures and recovers from them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait
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
    return ctx.rank, ctx.world_size, dist.get_world_size(ctx.group), factor * t.item()


def one_thread_and_random(ctx):
    return torch.get_num_threads(), torch.rand(3), os.environ["GLOO_SOCKET_IFNAME"]


def how_it_shares_cores(ctx):
    """How this rank is scheduled, and whether gloo's threads are nicer than it is."""
    names = {int(task.name): (task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    nice, of_gloo = os.nice(0), [os.getpriority(os.PRIO_PROCESS, i) for i, n in names.items() if n == "gloo_tcp_loop"]
    return os.sched_getscheduler(0), [of_one == min(nice + 10, 19) for of_one in of_gloo]


def mesh_of_a_result(ctx, groups_before):
    """The mesh of an operation's result, which DTensor takes from a cache, is the mesh of its input."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    for _ in range(groups_before):
        dist.new_group(list(range(ctx.world_size)))
    mesh = ctx.device_mesh((2, 2), ("dp", "tp"))["tp"]
    result = distribute_tensor(torch.ones(4), mesh, [Replicate()]).detach()
    return result.device_mesh.get_group("tp").group_name == mesh.get_group("tp").group_name


def make_group(ctx):
    dist.new_group(list(range(ctx.world_size)))


def fail_everywhere(ctx):
    raise KeyError(f"key of rank {ctx.rank}")


def fail_on(ctx, rank):
    """One rank fails, the others wait for it in a collective."""
    ctx.note(f"step 7 on rank {ctx.rank}")
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


def skip(ctx):
    pytest.skip("not on this rank")


def return_unpicklable(ctx):
    return lambda: None


def change_defaults(ctx):
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def defaults(ctx):
    return torch.get_default_dtype(), torch.is_grad_enabled()


def assert_usable(pool: Pool) -> None:
    assert pool.run(rank_sum, world_size=4) == [(r, 4, 4, 10.0) for r in range(4)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_runs_on_the_first_ranks(pool, world_size):
    total = 2.0 * sum(range(1, world_size + 1))
    expected = [(rank, world_size, world_size, total) for rank in range(world_size)]
    assert pool.run(rank_sum, factor=2, world_size=world_size) == expected


@ranks(1, 3)
def fails_on(ctx, rank):
    fail_on(ctx, rank)


def test_a_body_that_is_a_test_runs_on_the_ranks(pool):
    with pytest.raises(RankFailure) as caught:
        fails_on(pool=pool, world_size=3, rank=1)
    assert caught.value.of("raised") == [1]
    fails_on(pool=pool, world_size=1, rank=1)


def test_bodies_start_from_the_same_state(pool):
    first, second = pool.run(one_thread_and_random), pool.run(one_thread_and_random)
    for threads, numbers, interface in first + second:
        assert threads == 1
        assert torch.equal(numbers, first[0][1])
        assert interface == pool_module._loopback()
    pool.run(change_defaults)
    assert pool.run(defaults) == [(torch.float32, True)] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_gloos_one_thread_keeps_no_rank_from_its_core(pool):
    assert pool.run(how_it_shares_cores) == [(os.SCHED_BATCH, [True])] * 2


def test_an_error_on_all_ranks_names_them_and_keeps_the_processes(pool):
    pool.run(rank_sum)
    pids = pool.pids
    with pytest.raises(RankFailure, match="fail_everywhere failed on ranks 0, 1, 2 of 3") as e:
        pool.run(fail_everywhere, world_size=3)
    assert [(f.rank, f.type_name, f.message) for f in e.value.failures] == [
        (rank, "KeyError", f"'key of rank {rank}'") for rank in range(3)
    ]
    assert 'raise KeyError(f"key of rank {ctx.rank}")' in str(e.value)  # the remote traceback, with its source line
    assert_usable(pool)
    assert pool.pids == pids
    assert len(set(pids)) == 4


def test_an_error_on_one_rank_does_not_wait_for_the_blocked_ones(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "GRACE", 0.2)
    pool.run(rank_sum)
    start = time.monotonic()
    with pytest.raises(RankFailure, match="fail_on failed on rank 1 of 3") as e:
        pool.run(fail_on, 1, world_size=3, timeout=100)
    assert time.monotonic() - start < 30
    assert e.value.failures[0].message == "the reason"
    assert e.value.failures[0].note == "step 7 on rank 1"
    assert e.value.of("blocked") == [0, 2]
    assert "barrier" in e.value.failures[1].text  # where it was blocked
    assert_usable(pool)


def test_groups_that_are_out_of_step_are_not_used_again(pool):
    with pytest.raises(RankFailure, match="out of step"):
        pool.run(fail_out_of_step, world_size=3)
    assert pool.run(rank_sum, world_size=3) == [(r, 3, 3, 6.0) for r in range(3)]
    assert_usable(pool)


def test_groups_made_on_some_ranks_do_not_name_later_ones(pool):
    pool.run(make_group, world_size=2)
    pool.run(make_group, world_size=4)
    assert_usable(pool)


def test_new_groups_come_with_new_meshes(pool):
    world_size = 4  # all of the pool's, as `new_group` wants
    assert pool.run(mesh_of_a_result, 2, world_size=world_size) == [True] * world_size
    with pytest.raises(RankFailure, match="out of step"):
        pool.run(fail_out_of_step, world_size=3)
    assert pool.run(mesh_of_a_result, 0, world_size=world_size) == [True] * world_size


def test_a_hang_names_the_ranks_and_shows_their_stacks(pool):
    pool.run(rank_sum)
    with pytest.raises(RankFailure, match=r"hang_on: no answer from ranks 0, 2 within 0.3 s, rank 1 answered") as e:
        pool.run(hang_on, (0, 2), world_size=3, timeout=0.3)
    assert e.value.of("hung") == [0, 2]
    assert all("in hang_on" in f.text and f.note == "about to wait for ever" for f in e.value.failures)
    assert_usable(pool)


def test_a_dead_rank_is_reported_as_such(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "GRACE", 0.2)
    with pytest.raises(RankFailure, match="die_on failed on ") as e:
        pool.run(die_on, 1, timeout=100)
    assert e.value.of("died") == [1]  # rank 0 may have raised: its connection was closed
    assert "exit code -9" in e.value.failures[0].text
    assert_usable(pool)


def test_an_interrupt_in_the_parent_leaves_no_answers_behind(pool):
    pool.run(rank_sum)

    class Interrupt(BaseException):
        pass

    def on_alarm(signum, frame):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(Interrupt):
            pool.run(hang_on, (0,))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert_usable(pool)


def test_a_skip_on_a_rank_skips_the_test(pool):
    with pytest.raises(pytest.skip.Exception, match="not on this rank"):
        pool.run(skip)
    assert_usable(pool)


def test_what_does_not_pickle_is_said(pool):
    with pytest.raises(TypeError, match="module-level"):
        pool.run(lambda ctx: None)
    with pytest.raises(RankFailure, match="return_unpicklable failed on ranks 0, 1 of 2"):
        pool.run(return_unpicklable)
    with pytest.raises(ValueError, match="world_size"):
        pool.run(rank_sum, world_size=5)
    assert_usable(pool)


PARENT = """
import os, sys
sys.path[:0] = {paths!r}
from pool import Pool
import test_pool

if __name__ == "__main__":
    p = Pool()
    p.run(test_pool.rank_sum)
    print(*p.pids, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open to wait for processes that are no children")
def test_ranks_do_not_outlive_their_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(paths=[str(TESTS), str(Path(__file__).parent)]))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        fds = []
        try:
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert len(pids) == 4
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # gone already
                    fds.append(os.pidfd_open(pid))
            parent.wait(60)
            for fd in fds:
                assert wait([fd], 30), "a rank outlives its parent"
        finally:
            parent.kill()
            for fd in fds:
                os.close(fd)


INNER_TEST = """
import signal
import pytest

@pytest.mark.time_limit(1)
def test_waits():
    signal.pause()

@pytest.mark.gpu
def test_gpu():
    pass

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
    assert "1 failed, 1 passed, 1 skipped" in result.stdout
