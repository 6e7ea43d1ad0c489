"""Ranks die, stop, fail and join at any point: the remaining ones train as one process that lost nothing."""

import itertools
import os
import pickle
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from drill import Death, Outcome, Plan, Processes, drawn, history, in_one_process, processes
from pairs import some

from flatshard.elastic._copies import shifts

DRAWS = int(os.environ.get("ELASTIC_DRAWS", "4"))
FIRST = int(os.environ.get("ELASTIC_SEED", "0"))
pytestmark = pytest.mark.time_limit(110)


def check(job: Processes) -> list[Outcome]:
    """Assert that remaining ranks trained as one process does, and repeated at most one completed step."""
    plan, outcomes = job.plan, job.outcomes
    left = [each for each in outcomes if each.end is not None]
    assert left, [each.raised for each in outcomes]
    for each in outcomes:
        assert each.raised is None or (each.number in plan.stopped and each.raised[0] == "ExcludedError"), each.raised
    assert len({tuple(history(each)[-3:]) for each in left}) == 1
    assert max(len(history(each)) for each in left) == plan.steps
    for each in left:
        for (step, _), (again, _) in itertools.pairwise(each.steps):
            assert step - plan.options.get("every", 1) <= again <= step + 1, each.steps
    first, *others = (pickle.loads(each.end[0]) for each in left)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
    torch.testing.assert_close(first, in_one_process(plan), rtol=1e-9, atol=1e-9)
    return left


@pytest.mark.parametrize("seed", range(FIRST, FIRST + DRAWS))
def test_drawn_deaths(tmp_path, seed: int):
    plan = drawn(seed, str(tmp_path))
    with processes(plan) as job:
        job.finish()
    left = check(job)
    assert len(left) >= plan.ranks - len(plan.deaths)
    if len(left) < plan.ranks:
        assert any("lost process" in text for each in left for text in each.said)


@pytest.mark.parametrize(("rank", "number"), some([(1, 2), (0, 2), (1, 6), (2, 2)], 2))
def test_a_death_in_the_middle_of_a_message(rank: int, number: int):
    """Die in copies during a step and after the last. No rank waits for a timeout, although gloo drops waits."""
    plan = Plan(3, {rank: Death("messages", number)}, width=384, timeout=timedelta(seconds=50))
    with processes(plan) as job:
        job.read(lambda: any(each.exitcode for each in job.started))
        job.read(seconds=35)
    assert len(check(job)) == 2


def killed(plan: Plan, *dead: int, when: Callable[[], bool] = lambda: True) -> Processes:
    """Run a job that loses processes together, in the step in which it waits, once ``when`` returns True."""
    with processes(plan) as job:
        (step,) = plan.waits
        job.read_step(step)
        job.read(when)
        job.kill(*dead)
        job.go_on(step)
        job.read()
    return job


NEIGHBOURS = Plan(4, options={"copies": 2}, waits=(1,))


def test_deaths_at_once():
    """With two copies of each shard, neighbours may die."""
    assert len(check(killed(NEIGHBOURS, 2, 3))) == 2


def test_too_many_deaths():
    """All remaining ranks raise an error that names the lost shards."""
    job = killed(Plan(4, waits=(1,)), 2, 3)
    raised = [o.raised for o in job.outcomes if o.raised is not None]
    assert [name for name, _ in raised] == ["LostShardsError"] * 2, raised
    assert "nobody has shards [1] of 4" in raised[0][1]
    assert "weight'" in raised[0][1]


def test_too_many_deaths_with_a_checkpoint(tmp_path):
    """The remaining ranks continue from the checkpoint, bit for bit like a run that lost the others there."""
    options = {
        "checkpoint_dir": str(tmp_path),
        "save_every": 2,
        "copy_every": 6,
    }  # makes the checkpoint newer than the copies
    plan = Plan(4, waits=(3,), timeout=timedelta(seconds=8), options=options)
    job = killed(plan, 2, 3, when=(tmp_path / "step-2").exists)
    left = check(job)
    assert len(left) == 2
    said = [text for each in left for text in each.said]
    assert any("loaded" in text and "step-2" in text for text in said), said
    assert any("nobody has shards [1] of 4" in text for text in said), said


def test_a_replacement_that_waits_when_a_rank_dies():
    """The shards stay and ranks change places: the next death shows that kept copies have new labels."""
    with processes(Plan(3, waits=(1, 4))) as job:
        job.read_step(1)
        job.start_late()
        job.kill(1)
        job.go_on(1)
        job.read_step(4)
        job.kill(2)
        job.go_on(4)
        job.read()
    assert len(check(job)) == 2
    assert (2, 3, 4) in history(next(each for each in job.outcomes if each.number == 3))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"raises": 1}, "ValueError: my own mistake"),
        ({"leaves": 1}, "left the loop after 3 steps"),
        ({"waits": (1,)}, "the store does not answer"),
    ],
)
def test_what_is_no_death(how: dict[str, Any], text: str):
    """A user error, leaving the loop, or a lost store raises on all ranks, and no rank continues alone."""
    with processes(Plan(3, **how)) as job:
        if "waits" in how:
            job.read_step(1)
            job.store = None
            job.go_on(1)
        job.read()
    if "raises" in how:
        assert job.outcomes[1].raised == ("ValueError", "my own mistake")
    for each in (job.outcomes[0], job.outcomes[2]):
        error, told = each.raised or ("", "")
        assert (error, text in told) == ("RuntimeError", True), told


def test_a_rank_joins():
    """A rank joins between two steps and receives the others' values."""
    with processes(Plan(2, waits=(1,))) as job:
        job.read_step(1)
        job.start_late()
        job.go_on(1)
        job.read()
    left = check(job)
    assert len(left) == 3
    assert {len(members) for members in history(job.outcomes[0])} == {2, 3}
    assert not [text for each in left for text in each.said if "met again" in text]


def test_a_rank_that_is_stopped_behind_the_last_step():
    """The stopped rank is removed after ``timeout`` and raises. The others end without it."""
    with processes(Plan(3, {1: Death("end", 1, signal.SIGSTOP)}, timeout=timedelta(seconds=2))) as job:
        job.finish()
    assert len(check(job)) == 2
    assert [o.number for o in job.outcomes if o.raised is not None] == [2]


@pytest.mark.parametrize(("strategy", "ranks"), [("FULL_SHARD", 2), ("HYBRID_SHARD", 4)])
def test_bytes_of_copies(strategy: str, ranks: int):
    """Each rank sends its shards after each step and before the first; two replicas send nothing."""
    plan = Plan(ranks, strategy=strategy)
    with processes(plan) as job:
        job.read()
    for each in check(job):
        assert each.end is not None
        _, kept, state, sent = each.end
        whole = state // 3 + plan.steps * state
        assert sent == (whole if strategy == "FULL_SHARD" else 0)
        assert 0 < kept <= (3.4 if strategy == "FULL_SHARD" else 1.2) * state  # shards begin at multiples of 16 bytes


def test_the_recipe():
    """The recipe of ``docs/elastic.md`` runs on four processes, the first of which is killed."""
    page = (Path(__file__).parents[2] / "flatshard" / "docs" / "elastic.md").read_text()
    code = page.partition("<!-- recipe: A rank dies -->\n```python\n")[2].partition("```")[0]
    with processes(Plan(4, recipe=code.replace("range(1000)", "range(5)"))) as job:
        job.read()
    ends = [each.end[0] for each in job.outcomes if each.end is not None]
    assert len(ends) == 3, [each.raised for each in job.outcomes]
    assert all(sorted(set(made)) == [0, 1, 2, 3, 4] for made in ends)


def test_a_rank_that_is_stopped():
    """A short stop only slows the job. After ``timeout``, the rank is removed and raises when it wakes.

    This holds in groups that the world did not make, such as the replicas' here.
    """
    with processes(Plan(4, strategy="HYBRID_SHARD", waits=(1, 3), timeout=timedelta(seconds=2))) as job:
        job.read_step(1)
        slow = next(o for o in job.outcomes if o.number == 1)
        others = [o for o in job.outcomes if o is not slow]
        job.kill(1, by=signal.SIGSTOP)
        job.go_on(1)
        time.sleep(0.5)
        job.kill(1, by=signal.SIGCONT)
        job.read_step(3)
        job.kill(1, by=signal.SIGSTOP)
        job.go_on(3)
        job.read(lambda: all(o.end for o in others))
        job.kill(1, by=signal.SIGCONT)
        job.read()
    assert slow.raised is not None
    assert slow.raised[0] == "ExcludedError"
    assert "was rank 0 and did not come to them for 2 s" in slow.raised[1]
    assert [step for step, _ in slow.steps] == [0, 1, 2, 3]
    slow.raised = None
    assert len(check(job)) == 3
    assert sum("lost process" in text for o in others for text in o.said) == 1  # once, and not while it was slow


def test_copies_go_to_another_host():
    each = [0, 1, 2, 3]
    assert shifts(["a"] * 4, each, 2) == [1, 2]
    assert shifts(["a", "a", "b", "b"], each, 1) == [2]
    assert shifts(["a", "b", "a", "b"], each, 1) == [1]
    assert shifts(["a", "a", "b"], each[:3], 1) == [1]  # two of three to another host
    assert shifts(["a"] * 4, [0, 1, 0, 1], 1) == []  # two replicas of two shards
    assert shifts(["a", "a", "b", "b"], [0, 1, 0, 1], 2) == [1]  # not to the other replica of the same shard
