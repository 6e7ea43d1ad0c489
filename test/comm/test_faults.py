"""A failing collective: every surviving rank raises an error with unit and phase, and no work is left over.

Ranks die or leave in the middle of a step over gloo. Collectives fail at their wait, and the next step works.
"""

import datetime
import functools
import os
import pickle
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pool as pool_module
import pytest
import torch
import torch.distributed as dist
from clean import check_clean
from jobs import patched
from models import Block
from on_ranks import ranks
from pool import RankFailure
from recording import FULL, GRAD_OP, NO_SHARD, Net, Recording, collectives_of, make_input
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import flatshard
from flatshard import CollectiveError, OutOfStepError, fully_shard, summon_full_params
from flatshard._base import environment
from flatshard._comm.backends import GlooCollectives
from flatshard._comm.collectives import Done
from flatshard._comm.progress import NOBODY, Works, drain
from flatshard._comm.shared_memory.mailboxes import Outbox
from flatshard._comm.shared_memory.segment import place_of_asks
from flatshard._composable.state import unit_of
from flatshard.comm import QuantizedCollectives


class Leaves(Exception):
    """Ends the step on a rank that survives."""


class Interrupted(KeyboardInterrupt):
    """Ends the step by Ctrl-C on a rank that survives."""


ENDS = {"leaves": Leaves, "interrupted": Interrupted}


def go(how: str) -> None:
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ENDS[how]


def lose_a_rank(ctx, how: str, where: str, options: dict[str, Any]) -> str:
    # The other ranks must not outlive the group's own timeout. It is no shorter, as a busy machine stalls for seconds.
    group = dist.new_group(list(range(ctx.world_size)), timeout=datetime.timedelta(seconds=4))
    model = Net(blocks=3)
    with pytest.MonkeyPatch.context() as patch:  # no other help than the timeout: see test_out_of_step.py
        patch.setattr(environment, "WATCH_SECONDS", 0)
        patch.setattr(environment, "ORDER_CHECK", "off")
        fully_shard(model, policy={Block}, process_group=group, **options)
    is_last = ctx.rank == ctx.world_size - 1
    if is_last and where == "forward":
        model.blocks[0].linear.register_forward_pre_hook(lambda *_: go(how))
    if is_last and where == "backward":
        model.blocks[1].linear.register_forward_hook(lambda m, a, out: out.register_hook(lambda g: go(how)) and None)

    def step() -> None:
        model(make_input(0, 2)).sum().backward()
        if is_last:
            go(how)
        model.head.weight.grad.norm()

    with pytest.raises(ENDS.get(how, Leaves) if is_last else CollectiveError) as e:
        step()
    if how == "interrupted" or not is_last:
        flatshard.recover(model)
        check_clean(model)
    if not is_last:
        assert (e.value.rank, e.value.world_size) == (ctx.rank, ctx.world_size)
        assert isinstance(e.value.__cause__, RuntimeError)
        assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
        raise e.value
    return "left"


@pytest.mark.parametrize(
    ("how", "where", "options", "message"),
    [
        ("leaves", "forward", {}, r"^the all-gather of unit 'blocks\.1' .*while receiving from rank 2 of the group"),
        ("interrupted", "backward", {"strategy": NO_SHARD}, r"^the all-reduce of unit 'blocks\.1' "),
        ("leaves", "backward", {"collectives": QuantizedCollectives()}, r"^the \S+ of unit 'blocks\.[01]' "),
        # Messages of the dead rank may or may not have arrived.
        ("dies", "backward", {}, r"^the (reduce-scatter|all-gather) of unit '(blocks\.[012]|<root>)' "),
        ("dies", "norm", {}, r"^the all-reduce for the norm of order 2.0 of the gradient of 'head.weight' failed"),
    ],
)
@pytest.mark.slow
def test_when_a_rank_is_lost_the_others_say_where(pool, monkeypatch, how, where, options, message):
    monkeypatch.setattr(pool_module, "GRACE", 30.0)  # every rank must end by itself
    with pytest.raises(RankFailure) as e:
        pool.run(lose_a_rank, how, where, options, world_size=3, timeout=40)
    failures = {f.rank: f for f in e.value.failures}
    assert (failures.pop(2).kind if 2 in failures else "left") == ("died" if how == "dies" else "left")
    assert [(f.rank, f.kind, f.type_name) for f in failures.values()] == [
        (r, "raised", "CollectiveError") for r in (0, 1)
    ]
    for failure in failures.values():
        assert re.search(message, failure.message, re.DOTALL), failure.message
        lead = f"failed on rank {failure.rank} of 3: if it waited in vain or lost a connection, look for the first error on"
        assert lead in failure.message  # before gloo's text


@pytest.mark.parametrize(
    ("verb", "lost"), [("receiving from", 3), ("receiving from", 4), ("sending to", 1), ("sending to", 2)]
)
@ranks(1)
def test_a_failed_message_is_named(ctx, verb: str, lost: int) -> None:
    class Message:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self, *_: Any) -> bool:
            if self.name == f"{verb} {lost}":
                raise RuntimeError("Connection closed by peer")
            return True

    group = SimpleNamespace(
        send=lambda tensors, rank, tag: Message(f"sending to {rank}"),
        recv=lambda tensors, rank, tag: Message(f"receiving from {rank}"),
    )
    sent, received = ([(torch.zeros(3), rank) for rank in each] for each in ((1, 2), (3, 4)))
    collectives = GlooCollectives(ctx.group)
    with patched(GlooCollectives, "group", group), pytest.raises(RuntimeError) as e:
        collectives.messages(sent, received, 5).wait()
    assert e.value.__notes__ == [f"while {verb} rank {lost} of the group"]


def lose_a_rank_in_a_message(ctx, verb: str) -> None:
    group = dist.new_group(list(range(ctx.world_size)), timeout=datetime.timedelta(seconds=30))
    collectives = GlooCollectives(group)
    large = torch.zeros(1 << 26, dtype=torch.uint8)  # takes longer than the rank lives
    there = [(large, 1)] if ctx.rank == 0 else []
    here = [(large, 0)] if ctx.rank == 1 else []
    collectives.combine(torch.zeros(1), "sum").wait()
    if ctx.rank == 1:
        threading.Timer(0.005, go, ["dies"]).start()
    if verb == "gather":
        pending = collectives.all_gather(large, large.view(2, -1)[ctx.rank], NOBODY)
    else:
        pending = collectives.exchange(*((there, here) if verb == "send" else (here, there)), NOBODY)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"while (sending to|receiving from) rank 1 of the group|onnection"):
        pending.wait()
    assert time.monotonic() - began < 15
    for there, here, verb in (([], [(large, 1)], "receiving from"), ([(large, 1)], [], "sending to")):
        with pytest.raises(RuntimeError) as e:
            collectives.messages(there, here, 4)
        assert e.value.__notes__ == [f"while {verb} rank 1 of the group"]
    raise Leaves("in time")


@pytest.mark.parametrize("verb", ["gather", "send", "receive"])
def test_a_rank_dies_in_the_middle_of_a_message(pool, verb: str):
    """Gloo drops waits for that message until its timeout, so the others wait for one that it keeps."""
    with pytest.raises(RankFailure) as e:
        pool.run(lose_a_rank_in_a_message, verb, world_size=2, timeout=40)
    assert {f.rank: (f.kind, f.type_name) for f in e.value.failures}[0] == ("raised", "Leaves"), e.value


def lose_a_rank_at_a_header(ctx, how: str) -> None:
    """Rank 1 ends, or stops, between its payload and its header, after its header, or before it wakes its reader."""
    has_header = how in ("after", "rings")
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=3))
    collectives, shard, output = GlooCollectives(group), torch.full((7,), float(ctx.rank)), torch.empty(14)
    collectives.all_gather(output, shard, NOBODY).wait()  # runs the handshake
    pids = torch.empty(2, dtype=torch.int64)
    dist.all_gather_into_tensor(pids, torch.tensor([os.getpid()]), group=group)
    store = group.get_group_store()  # a connection that outlives rank 1
    if ctx.rank == 0:
        store.set("has gathered", "")
    store.wait(["has gathered"])
    put = Outbox.put

    def end(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP if how == "stops" else signal.SIGKILL)
        put(*args)

    def put_and_end(outbox: Outbox, *args: Any) -> None:
        if how == "rings":
            while not outbox._segment.mapping.words[place_of_asks(0)]:
                time.sleep(0.01)
            patch.setattr(Outbox, "_ring", end)  # rank 0 sleeps
        put(outbox, *args)
        end()

    if ctx.rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Outbox, "put", put_and_end if has_header else end)
            collectives.all_gather(output, shard, NOBODY).wait()
        return  # it stopped, and the other's header had come
    pending = collectives.all_gather(output.zero_(), shard, NOBODY)
    if has_header:
        pending.wait()
        assert output.view(2, -1)[:, 0].tolist() == [0, 1]
        pending = collectives.all_gather(output, shard, NOBODY)
    began = time.monotonic()
    with pytest.raises(RuntimeError) as e:
        pending.wait()
    if how == "stops":  # else its number may be nobody's
        os.kill(int(pids[1]), signal.SIGCONT)
    assert time.monotonic() - began < 10
    raise Leaves(f"{e.value}, {e.value.__notes__}")


@pytest.mark.parametrize("how", ["dies", "after", "rings", "stops"])
def test_a_rank_that_shares_memory_dies_or_stops(pool, monkeypatch, how: str):
    """Its header, if it has one, is complete; else waits end as those for gloo's messages, and name it."""
    monkeypatch.setattr(pool_module, "GRACE", 30.0)
    with pytest.raises(RankFailure) as e:
        pool.run(lose_a_rank_at_a_header, how, world_size=2, timeout=40)
    failures = {f.rank: f for f in e.value.failures}
    assert (failures[0].kind, failures[0].type_name) == ("raised", "Leaves"), e.value
    assert re.search("while receiving from rank 1 of the group", failures[0].message)
    assert re.search("Timed out" if how == "stops" else "onnection", failures[0].message)
    assert [rank for rank, f in failures.items() if f.kind == "died"] == ([] if how == "stops" else [1])


class Failing(Recording):
    """Fails the n-th collective of a kind: before it sends, or when it is waited for and has ended."""

    method, left, at_once = "", 0, False

    def _maybe(self, method: str, call: Callable[[], Any]) -> Any:
        def fail() -> None:
            raise ConnectionError("the cable was pulled")

        self.left -= method == self.method
        fails = (method, self.left) == (self.method, -1)
        if fails and self.at_once:
            fail()
        return Works([call()], fail) if fails else call()

    def all_gather(self, output: Tensor, shard: Tensor) -> Any:
        return self._maybe("all_gather", functools.partial(super().all_gather, output, shard))

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Any:
        return self._maybe("reduce_scatter", functools.partial(super().reduce_scatter, output, input))

    def all_reduce(self, tensor: Tensor) -> Any:
        return self._maybe("all_reduce", functools.partial(super().all_reduce, tensor))


CASES = [(FULL, "all_gather", 5), (FULL, "reduce_scatter", 3), (GRAD_OP, "all_gather", 3), (NO_SHARD, "all_reduce", 3)]
"""Strategy, collective, and its number of calls in a step."""


@ranks(2, timeout=20)
def test_a_step_after_a_collective_failed(ctx) -> None:
    x = torch.linspace(-1, 1, 16, dtype=torch.double).view(2, 8)
    for strategy, method, number in [(s, m, number) for s, m, count in CASES for number in range(count)]:
        ctx.note(f"{strategy.name}, {method} {number}")
        model = Net()
        model.double().register_parameter("other", nn.Parameter(torch.ones(3)))  # a second flat parameter
        fully_shard(model, policy={Block}, process_group=ctx.group, strategy=strategy, collectives=Failing)
        model(x).sum().backward()
        expected = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
        model.zero_grad()
        collectives = collectives_of(model)
        for recovers in (False, True):
            collectives.at_once = bool(number % 2) is recovers
            collectives.method, collectives.left = method, number
            with pytest.raises(CollectiveError, match="ConnectionError: the cable was pulled") as e:
                model(x).sum().backward()
            assert e.value.phase == method.replace("_", "-")
            assert e.value.unit in ("", "blocks.0", "blocks.1")
            assert all(isinstance(p, flatshard.tensors.ShardedParameter) for p in model.parameters())
            collectives.method = ""
            if recovers:
                flatshard.recover(model)
                check_clean(model)
            model.zero_grad()
            model(x).sum().backward()
            for p, grad in zip(model.parameters(), expected, strict=True):
                assert (p.grad is None) == (grad is None)
                assert grad is None or torch.equal(p.grad, grad)
            check_clean(model)
            model.zero_grad()


@ranks(4, timeout=20)
def test_a_hybrid_reduction_names_the_collective_that_failed(ctx) -> None:
    """The reduce-scatter within a group, or the all-reduce over the replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(Net(), policy={Block}, device_mesh=mesh, strategy="HYBRID_SHARD", collectives=Failing)
    unit_ranks, x = unit_of(model).handle.ranks, torch.ones(2, 8)
    for at_once in (False, True):
        for runtime, method in ((unit_ranks.shards, "reduce_scatter"), (unit_ranks.replicas, "all_reduce")):
            failing = runtime.collectives
            failing.method, failing.left, failing.at_once = method, 1, at_once
            with pytest.raises(CollectiveError, match="ConnectionError: the cable was pulled") as e:
                model(x).sum().backward()
            assert (e.value.phase, e.value.unit) == (method.replace("_", "-"), "blocks.0")
            assert (e.value.rank, e.value.world_size) == (runtime.rank, 2)
            failing.method = ""
            flatshard.recover(model)
            check_clean(model)


@ranks(2)
def test_failures_outside_a_step(ctx) -> None:
    model = Net()
    fully_shard(model, policy={Block}, process_group=ctx.group, collectives=functools.partial(Failing))
    model(make_input(0, 2)).sum().backward()
    collectives = collectives_of(model)
    for number, unit in enumerate(("<root>", "blocks.0", "blocks.1")):
        collectives.method, collectives.left = "all_gather", number
        with pytest.raises(CollectiveError, match=f"the all-gather of unit '{unit}' failed"), summon_full_params(model):
            pass
        collectives.method = ""
        check_clean(model)
        with summon_full_params(model, with_grads=True):
            assert model.head.weight.grad is not None
    # An unused prefetch is reported, but does not fail the step.
    collectives.method, collectives.left = "all_gather", 0
    flatshard.unshard(model.blocks[0], async_op=True)
    collectives.method = ""
    flatshard.reshard(model.blocks[0])
    check_clean(model)


class Work:
    """Work whose wait raises ``error``, if given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def wait(self) -> None:
        if self.error:
            raise self.error


def test_what_may_never_end_is_told():
    """After other failures, the memory may be freed."""
    pending = [Done(), Work(ValueError()), Done()]
    assert drain(pending)
    assert not pending
    assert not drain([Work(OutOfStepError("all-gather", "unit", 0, 2, "")), Done()])


def test_failed_works_let_go_of_the_others():
    first, second, third = Work(), Work(RuntimeError("timed out")), Work()
    gone = weakref.ref(third)
    works = Works([first, second, third], describe=lambda index: f"work {index}")
    del third
    for _ in range(2):  # it keeps failing
        with pytest.raises(RuntimeError, match="timed out") as e:
            works.wait()
    assert e.value.__notes__ == ["work 1"]
    assert gone() is None, "somebody may still write to memory that the caller now frees"
