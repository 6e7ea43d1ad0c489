"""The simulator sees what it is there for: every wait and every lifetime of the runtime, taken out, shows.

Each mutant takes one thing out of flatshard for as long as one case runs, which is right without (the other test modules of
this directory). It must then show a race, other numbers or an error of the capture, under at least one policy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerator import capture, training
from accelerator.harness import POLICIES, Case, Cases, Env, mean_square, numbers, run_case
from pool import Context, Pool
from torch import Tensor

import flatshard
from flatshard import CPUOffload
from flatshard._composable.backward import Backward
from flatshard._composable.hooks import UnitHooks
from flatshard._composable.state import Context as UnitContext
from flatshard._composable.state import Unit
from flatshard._handle.gradients import FlatGradients
from flatshard._handle.handle import FlatParamHandle
from flatshard._handle.reduction import Reduction
from flatshard._handle.unit_gradients import UnitGradients
from flatshard._runtime import Runtime, StreamEvent, Streams, Users
from flatshard.comm import DefaultCollectives

cases = Cases()
Mutation = contextlib.AbstractContextManager[Any]


# -- how things are taken out ----------------------------------------------------------------------------------------


def nothing(*args: Any, **kwargs: Any) -> None:
    pass


def without(owner: Any, name: str) -> Mutation:
    """The method does nothing."""
    return mock.patch.object(owner, name, nothing)


def instead(owner: Any, name: str, new: Callable[..., Any]) -> Mutation:
    """``new(original, *args)`` in the method's place."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return new(original, *args, **kwargs)

    return mock.patch.object(owner, name, changed)


def within(owner: Any, name: str, mutation: Callable[[], Mutation]) -> Mutation:
    """Something is taken out while the method runs, and at no other time."""

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with mutation():
            return original(*args, **kwargs)

    return instead(owner, name, call)


def enter_without_waiting(side: str) -> Mutation:
    @contextlib.contextmanager
    def running_on(original: Any, self: Streams, stream: Any) -> Iterator[None]:
        with self._module.stream(stream) if stream == getattr(self, side) else original(self, stream):
            yield

    return instead(Streams, "running_on", running_on)


def do_not_wait_for_the_backend() -> Mutation:
    from accelerator.sim_ccl import Work

    return within(Runtime, "issued", lambda: without(Work, "wait"))


def complete_on_the_reduce_stream(original: Any, self: FlatGradients, *args: Any) -> None:
    with self.runtime.reducing():
        original(self, *args)


def stay_on_the_current_stream() -> Mutation:
    return mock.patch.object(Streams, "on", return_value=contextlib.nullcontext())


def free_the_input_at_once(original: Any, self: Reduction) -> None:
    original(self)
    self._of.free_reduced()


# -- cases that only matter here -------------------------------------------------------------------------------------


class Asynchronous(DefaultCollectives):
    """Collectives on the backend's own stream."""

    def all_gather(self, output: Tensor, shard: Tensor) -> Any:
        return dist.all_gather_into_tensor(output, shard, group=self.group, async_op=True)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Any:
        return dist.reduce_scatter_tensor(output, input, op=dist.ReduceOp.AVG, group=self.group, async_op=True)


def _asynchronous(group: Any, device: torch.device) -> Any:
    return Asynchronous(group) if device.type != "cpu" else flatshard.comm.builtin_collectives(group, device)


@cases.add(fake=False)
def asynchronous(env: Env) -> Any:
    return env.train(env.shard(env.make(), collectives=_asynchronous))


@cases.add(watch_host=True)
def unshards_offloaded(env: Env) -> Any:
    """Whole parameters under offload are read from shards that change at once."""
    model = env.shard(env.make(), cpu_offload=CPUOffload(True))
    seen = []
    for step in range(2):
        flatshard.unshard(model, recurse=True)
        with torch.no_grad():
            seen += [p.clone() for p in model.parameters()]
        flatshard.reshard(model)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(step + 1)
    return seen


@cases.add(watch_host=True)
def holds_offloaded(env: Env) -> Any:
    """A backward that brings no gradients to the host, and a change of the shards right after it."""
    model = env.shard(env.make(), cpu_offload=CPUOffload(True), reshard_after_forward=True)
    for step in range(2):
        with flatshard.no_sync(model):
            mean_square(model(env.batch(step))).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
    mean_square(model(env.batch(2))).backward()
    return numbers(model)


@cases.add(watch_host=True)
def summons_offloaded(env: Env) -> Any:
    model = env.shard(env.make(), cpu_offload=CPUOffload(True))
    seen = []
    for step in range(2):
        with flatshard.summon_full_params(model, writeback=False), torch.no_grad():
            seen += [p.clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(step + 1)
    return seen


# -- the table -------------------------------------------------------------------------------------------------------


class Mutant(NamedTuple):
    mutate: Callable[[], Mutation]
    case: Case
    ranks: int = 1  # 1: on the fake group


case = training.cases.__getitem__
MUTANTS = {  # what each takes out
    # waits
    "computing waits for the all-gather": Mutant(
        lambda: within(FlatParamHandle, "wait", lambda: without(StreamEvent, "wait")), case("sharded-full")
    ),
    "whoever reads .grad waits for the reduction": Mutant(
        lambda: within(UnitGradients, "_wait", lambda: without(StreamEvent, "wait")), case("sharded-full")
    ),
    "an all-gather waits for what changed the shards": Mutant(
        lambda: enter_without_waiting("gather"), case("sharded-full")
    ),
    "a reduction waits for its input": Mutant(lambda: enter_without_waiting("reduce"), case("sharded-full")),
    "the next all-gather into a unit's memory waits for those who computed with it, also on another stream": Mutant(
        lambda: without(Runtime, "before_free"), case("independent_streams")
    ),
    "the side stream waits for the streams of the backend": Mutant(
        do_not_wait_for_the_backend, cases["asynchronous"], ranks=2
    ),
    "a static buffer is taken on the stream that it was used on": Mutant(
        lambda: mock.patch.object(Runtime, "current_stream", None), case("independent_trainings-static_buffers")
    ),
    # waits of the host
    "the host waits for the gradients that are copied to it": Mutant(
        lambda: mock.patch("flatshard._handle.reduction.wait_on_host", nothing), case("offload-pinned")
    ),
    "the host waits until a forward has read the shards": Mutant(
        lambda: within(UnitContext, "end_pass", lambda: without(Runtime, "wait_for_host_reads")),
        case("offload_evaluates-load"),
    ),
    "the host waits until a backward has read the shards": Mutant(
        lambda: within(Backward, "_finish", lambda: without(Runtime, "wait_for_host_reads")), cases["holds_offloaded"]
    ),
    "the host waits until unshard has read the shards": Mutant(
        lambda: without(Runtime, "wait_for_host_reads"), cases["unshards_offloaded"]
    ),
    "the host waits until summon_full_params has read the shards": Mutant(
        lambda: without(Runtime, "wait_for_host_reads"), cases["summons_offloaded"]
    ),
    "a copy from the host is noted": Mutant(lambda: without(Runtime, "reads_host"), case("offload_evaluates-step")),
    "waiting on the host waits": Mutant(lambda: without(StreamEvent, "wait_on_host"), case("offload_evaluates-write")),
    "a unit whose shards change inside a pass is not gathered ahead": Mutant(
        lambda: mock.patch.object(
            Unit, "changes_in_passes", property(lambda unit: False, lambda unit, value: None), create=True
        ),
        case("momentum_encoder-lerp"),
    ),
    # lifetimes
    "gradients live until they have been copied into the reduction's input": Mutant(
        lambda: instead(FlatGradients, "complete", complete_on_the_reduce_stream), case("sharded-full")
    ),
    "a reduction's input lives until the reduction has been waited for": Mutant(
        lambda: instead(Reduction, "start", free_the_input_at_once), case("sharded-full")
    ),
    "what is kept for backward belongs to the stream that reads it": Mutant(
        stay_on_the_current_stream, case("inner_shards-two")
    ),
    # several streams of the user's own
    "every stream that computes with a unit waits for its all-gather": Mutant(
        lambda: without(Users, "add_current"), case("towers-none_resharded")
    ),
    "a unit's memory is reused after all streams that computed with it": Mutant(
        lambda: without(Users, "end"), case("microbatches_on_streams-grad_op")
    ),
    "the stream of a second output waits for the all-gather, too": Mutant(
        lambda: within(UnitHooks, "pre_backward", lambda: without(Users, "add_current")), case("halves-resharded")
    ),
    "a unit's gradients are worked on by the stream that they come on": Mutant(
        stay_on_the_current_stream, case("towers-in_turn")
    ),
    "gradients are read and freed in order with the streams that autograd accumulated them on": Mutant(
        lambda: mock.patch.multiple(UnitGradients, _wait_for_others=nothing, _let_others_wait=nothing),
        case("gradients_of_one_unit-default"),
    ),
    "a gradient that is taken on another stream is waited for": Mutant(
        lambda: within(UnitGradients, "receive", lambda: without(Streams, "let_wait")),
        case("gradients_of_one_unit-not_sharded"),
    ),
    # captures
    "side streams join the current one after a forward": Mutant(
        lambda: within(UnitContext, "end_pass", lambda: without(Runtime, "join")),
        capture.cases["evaluation-all_resharded"],
    ),
    "side streams join the current one after a backward": Mutant(
        lambda: within(Backward, "_finish", lambda: without(Runtime, "join")), capture.cases["step-full"]
    ),
    "autograd accumulates gradients on the stream of the forward": Mutant(
        lambda: without(UnitGradients, "follow_stream"), capture.cases["step-full"]
    ),
}


def run_mutant(ctx: Context, name: str) -> list[str]:
    """What is seen of it, by policy."""
    mutant = MUTANTS[name]
    with mutant.mutate():  # raises if what it takes out does not exist
        pass
    seen = []
    for policy in (*POLICIES, "random:2", "random:3"):
        try:
            ((_, problems, _),) = run_case(ctx, mutant.case.module, mutant.case.name, (policy,), around=mutant.mutate)
        except Exception as e:  # the capture's, say
            problems = [f"{type(e).__name__}: {e}"]
        seen += [f"{policy}: {p}" for p in problems]
        if seen and ctx.world_size == 1:
            break
    return seen


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant(request: pytest.FixtureRequest, name: str) -> None:
    mutant = MUTANTS[name]
    pool: Pool = request.getfixturevalue("simulated_process" if mutant.ranks == 1 else "simulated_pool")
    seen = pool.run(run_mutant, name, world_size=mutant.ranks, timeout=60)
    assert any(seen), f"nothing shows that this is gone: {name}"
