"""A collective fails: every rank that lives ends with an error that names the unit and the phase, and nothing is left over.

Ranks die and leave in the middle of a step, over gloo; collectives fail when they are waited for, and the next step works.
"""

from __future__ import annotations

import datetime
import itertools
import os
import pickle
import re
import signal
import weakref
from typing import Any, NamedTuple

import pool as pool_module
import pytest
import torch
import torch.distributed as dist
from clean import storage_nbytes
from models import Block
from on_ranks import ranks
from pool import RankFailure
from recording import FULL, GRAD_OP, NO_SHARD, Net, Recording, collectives_of, make_input
from torch import Tensor, nn

import flatshard
from flatshard import CollectiveError, OutOfStepError, _config, fully_shard, summon_full_params
from flatshard._comm.collectives import Done, Works, settle
from flatshard._composable.find import units_below
from flatshard._handle.lifetime import GradState
from flatshard.comm import QuantizedCollectives


class Leaves(Exception):
    """A rank leaves the step, and lives."""


def go(how: str) -> None:
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    raise Leaves


def check_let_go(model: nn.Module) -> None:
    """Nothing is left of a failed step: no unit whole, no gradient buffer, nothing under way."""
    for unit in units_below(model):
        assert unit.handle.is_sharded, unit
        assert unit.handle.lifetime.grads is GradState.NONE, unit
        assert unit.handle._all_gathers == []
        for flat in unit.handle.flats:
            assert flat.unsharded.is_alias or flat.unsharded.flat.untyped_storage().nbytes() == 0
            assert storage_nbytes(flat.gradients.input) == 0
            assert flat.gradients.reduction is None


def lose_a_rank(ctx, how: str, where: str, options: dict[str, Any]) -> str:
    # A timeout of its own: the others must not outlive it. No shorter, as a busy machine stalls for seconds.
    group = dist.new_group(list(range(ctx.world_size)), timeout=datetime.timedelta(seconds=4))
    model = Net(blocks=3)
    with pytest.MonkeyPatch.context() as patch:  # no other help than the timeout: see test_out_of_step.py
        patch.setattr(_config, "WATCH_SECONDS", 0)
        patch.setattr(_config, "ORDER_CHECK", "off")
        fully_shard(model, policy={Block}, process_group=group, **options)
    last = ctx.world_size - 1
    if ctx.rank == last and where == "forward":
        model.blocks[0].linear.register_forward_pre_hook(lambda *_: go(how))
    if ctx.rank == last and where == "backward":
        model.blocks[1].linear.register_forward_hook(lambda m, a, out: out.register_hook(lambda g: go(how)) and None)
    try:
        model(make_input(0, 2)).sum().backward()
        if ctx.rank == last:
            go(how)
        model.head.weight.grad.norm()
    except Leaves:
        return "left"
    except CollectiveError as e:
        error = e
    assert (error.rank, error.world_size) == (ctx.rank, ctx.world_size)
    assert isinstance(error.__cause__, RuntimeError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    flatshard.recover(model)
    check_let_go(model)
    raise error


@pytest.mark.parametrize(
    ("how", "where", "options", "message"),
    [
        ("leaves", "forward", {}, r"^the all-gather of unit 'blocks\.1' .*while receiving from rank 2 of the group"),
        (
            "leaves",
            "backward",
            {},
            # Which of the two is waited for first depends on what rank 2 had sent before it left.
            r"^the (reduce-scatter of unit 'blocks\.1'|all-gather of unit 'blocks\.0') .*from rank 2 of the group",
        ),
        ("leaves", "backward", {"strategy": NO_SHARD}, r"^the all-reduce of unit 'blocks\.1' "),
        ("leaves", "backward", {"collectives": QuantizedCollectives()}, r"^the reduce-scatter of unit 'blocks\.1' "),
        # What the dead rank had sent may or may not have arrived.
        ("dies", "forward", {}, r"^the all-gather of unit 'blocks\.[01]' "),
        ("dies", "backward", {}, r"^the (reduce-scatter|all-gather) of unit '(blocks\.[012]|<root>)' "),
        ("dies", "norm", {}, r"^the all-reduce for the norm of order 2.0 of the gradient of 'head.weight' failed"),
    ],
)
@pytest.mark.slow
def test_when_a_rank_is_lost_the_others_say_where(pool, monkeypatch, how, where, options, message):
    monkeypatch.setattr(pool_module, "GRACE", 30.0)  # every rank is to come to an end of its own
    with pytest.raises(RankFailure) as e:
        pool.run(lose_a_rank, how, where, options, world_size=3, timeout=40)
    lost = [f for f in e.value.failures if f.rank == 2]
    assert [f.kind for f in lost] == (["died"] if how == "dies" else [])
    others = [f for f in e.value.failures if f.rank != 2]
    assert [(f.rank, f.kind, f.type_name) for f in others] == [(r, "raised", "CollectiveError") for r in (0, 1)]
    for failure in others:
        assert re.search(message, failure.message, re.DOTALL), failure.message
        lead = f"failed on rank {failure.rank} of 3: if it waited in vain or lost a connection, look for the first error on"
        assert lead in failure.message  # before gloo's text


class FailsInWait(Recording):
    """One collective, the n-th of its kind, fails when it is waited for, after it has really ended."""

    def __init__(self, group: Any, device: Any) -> None:
        super().__init__(group, device)
        self.method, self.left = "", 0

    def _maybe(self, method: str, pending: Any) -> Any:
        def fail() -> None:
            raise ConnectionError("the cable was pulled")

        self.left -= method == self.method
        return Works([pending], fail) if (method, self.left) == (self.method, -1) else pending

    def all_gather(self, output: Tensor, shard: Tensor) -> Any:
        return self._maybe("all_gather", super().all_gather(output, shard))

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Any:
        return self._maybe("reduce_scatter", super().reduce_scatter(output, input))

    def all_reduce(self, tensor: Tensor) -> Any:
        return self._maybe("all_reduce", super().all_reduce(tensor))


NUMBERS = {"all_gather": 5, "reduce_scatter": 3, "all_reduce": 3}
CASES = [(strategy, method) for strategy in (FULL, GRAD_OP) for method in ("all_gather", "reduce_scatter")]
CASES += [(NO_SHARD, "all_reduce")]


@ranks(2, timeout=20)
def test_a_step_after_a_failed_wait(ctx) -> None:
    x = torch.linspace(-1, 1, 16, dtype=torch.double).view(2, 8)
    for (strategy, method), number, recovers in itertools.product(CASES, range(5), (False, True)):
        if number >= (3 if strategy is GRAD_OP else NUMBERS[method]):
            continue
        ctx.note(f"{strategy.name}, {method} {number}, recover: {recovers}")
        torch.manual_seed(0)
        model = Net()
        model.double().register_parameter("other", nn.Parameter(torch.ones(3)))  # a second flat parameter
        fully_shard(model, policy={Block}, process_group=ctx.group, strategy=strategy, collectives=FailsInWait)
        model(x).sum().backward()
        expected = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
        model.zero_grad()
        collectives = collectives_of(model)
        collectives.method, collectives.left = method, number
        with pytest.raises(CollectiveError, match="ConnectionError: the cable was pulled") as e:
            model(x).sum().backward()
        assert e.value.phase == method.replace("_", "-")
        assert e.value.unit in ("", "blocks.0", "blocks.1")
        collectives.method = ""
        if recovers:
            flatshard.recover(model)
            check_let_go(model)
        model.zero_grad()
        model(x).sum().backward()
        for p, grad in zip(model.parameters(), expected, strict=True):
            assert (p.grad is None) == (grad is None)
            assert grad is None or torch.equal(p.grad, grad)
        check_let_go(model)


@ranks(2)
def test_failures_outside_a_step(ctx) -> None:
    model = Net()
    fully_shard(model, policy={Block}, process_group=ctx.group, collectives=FailsInWait)
    model(make_input(0, 2)).sum().backward()
    collectives = collectives_of(model)
    for number, unit in enumerate(("<root>", "blocks.0", "blocks.1")):
        collectives.method, collectives.left = "all_gather", number
        with pytest.raises(CollectiveError, match=f"the all-gather of unit '{unit}' failed"), summon_full_params(model):
            pass
        collectives.method = ""
        check_let_go(model)
        with summon_full_params(model, with_grads=True):
            assert model.head.weight.grad is not None
    # A gather ahead of need that nobody comes to use: reported, but no error of the step.
    collectives.method, collectives.left = "all_gather", 0
    flatshard.unshard(model.blocks[0], async_op=True)
    collectives.method = ""
    flatshard.reshard(model.blocks[0])
    check_let_go(model)


class Fails(NamedTuple):
    error: Exception

    def wait(self) -> None:
        raise self.error


def test_what_may_never_end_is_told():
    """Of other failures the memory may be freed."""
    pending = [Done(), Fails(ValueError()), Done()]
    assert settle(pending)
    assert not pending
    assert not settle([Fails(OutOfStepError("all-gather", "unit", 0, 2, "")), Done()])


def test_failed_works_let_go_of_the_others():
    class Work:
        def __init__(self, fails: bool = False) -> None:
            self.fails = fails

        def wait(self) -> None:
            if self.fails:
                raise RuntimeError("timed out")

    first, second, third = Work(), Work(fails=True), Work()
    gone = weakref.ref(third)
    works = Works([first, second, third], describe=lambda index: f"work {index}")
    del third
    with pytest.raises(RuntimeError, match="timed out") as e:
        works.wait()
    assert e.value.__notes__ == ["work 1"]
    with pytest.raises(RuntimeError, match="timed out"):  # it stays failed
        works.wait()
    assert gone() is None, "somebody may still write to memory that the caller now frees"
