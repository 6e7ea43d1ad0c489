"""What carries the bytes: other collectives in the place of the built-in ones, quantised ones, none at all, failing ones.

The oracle for collectives that claim to be exact is the run without them; for quantised ones, a bound on the error that
follows from the format; for failures, the error itself: it must name the unit and the phase on every rank that lives.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import functools
import gc
import os
import pickle
import re
import signal
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import check_parity, full_params
from pool import RankFailure
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import flatshard
from flatshard import (
    CollectiveError,
    CustomPolicy,
    DefaultCollectives,
    NoCommunication,
    QuantizedCollectives,
    ShardingStrategy,
    builtin_collectives,
    fully_shard,
    summon_full_params,
)
from flatshard._backends import GlooCollectives
from flatshard._collectives import Works
from flatshard._composable.state import unit_of, units_below
from flatshard._handle.lifetime import GradState

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
WIDTH = 24


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self, blocks: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.front = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_input(step: int, n: int) -> Tensor:
    return torch.randn(n, 8)


class Recording:
    """The built-in collectives, which note what they are asked for."""

    exact = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.inner = builtin_collectives(group, device)
        self.calls: list[str] = []

    def all_gather(self, output: Tensor, shard: Tensor) -> Any:
        assert output.dim() == shard.dim() == 1
        assert output.numel() == self.inner.size * shard.numel()
        assert output.view(self.inner.size, -1)[self.inner.rank].data_ptr() == shard.data_ptr()
        self.calls.append("all_gather")
        return self.inner.all_gather(output, shard)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Any:
        assert output.dim() == input.dim() == 1
        assert input.numel() == self.inner.size * output.numel()
        self.calls.append("reduce_scatter")
        return self.inner.reduce_scatter(output, input)

    def all_reduce(self, tensor: Tensor) -> Any:
        assert tensor.dim() == 1
        self.calls.append("all_reduce")
        return self.inner.all_reduce(tensor)


class OtherRecording(Recording):
    pass


def collectives_of(module: nn.Module) -> Any:
    return unit_of(module).handle.runtime.collectives


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def sent_bytes() -> Iterator[list[int]]:
    """Bytes of the messages that this rank gives to gloo."""
    sent: list[int] = []
    send = vars(dist.ProcessGroup)["send"]  # what binds, for later

    def counted(group: Any, tensors: list[Tensor], to: int, tag: int) -> Any:
        sent.append(sum(t.nbytes for t in tensors))
        return send.__get__(group)(tensors, to, tag)

    dist.ProcessGroup.send = counted
    try:
        yield sent
    finally:
        dist.ProcessGroup.send = send


def same_everywhere(group: Any, tensor: Tensor) -> bool:
    size = dist.get_world_size(group)
    everywhere = tensor.new_empty(size * tensor.numel(), dtype=torch.float64)
    dist.all_gather_into_tensor(everywhere, tensor.double(), group=group)
    return all(torch.equal(tensor.double(), other) for other in everywhere.view(size, -1))


# ---------------------------------------------------------------------------------------------------------------------
# Replacing them
# ---------------------------------------------------------------------------------------------------------------------


def parity_with_others(ctx, strategy: ShardingStrategy) -> list[str]:
    def shard(model: nn.Module, group: Any) -> None:
        fully_shard(model, policy={Block}, process_group=group, strategy=strategy, collectives=Recording)
        collectives_of(model).calls.clear()

    run = check_parity(ctx, Net, make_input, steps=2, shard=shard)
    return collectives_of(run.sharded).calls


@pytest.mark.parametrize("world_size", [2, 3])
def test_other_collectives_do_all_the_work_of_a_step(pool, world_size):
    calls = pool.run(parity_with_others, FULL, world_size=world_size)[0]
    per_step = 1 + 2 * 2  # the root once, every block in forward and in backward
    summoned = len(calls) - 2 * per_step - 2 * 3  # check_parity looks at whole parameters and gradients
    assert calls.count("reduce_scatter") == 2 * 3
    assert calls.count("all_gather") == 2 * per_step + summoned
    assert "all_reduce" not in calls
    assert set(pool.run(parity_with_others, NO_SHARD, world_size=world_size)[0]) == {"all_reduce"}


def shared_runtime(ctx) -> None:
    made = []

    def factory(group: dist.ProcessGroup, device: torch.device) -> Recording:
        made.append((group, device))
        return Recording(group, device)

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        return isinstance(module, Block) and ({"collectives": OtherRecording} if module is model.blocks[1] else True)

    model = Net()
    fully_shard(model, policy=CustomPolicy(choose), process_group=ctx.group, collectives=factory)
    assert made == [(ctx.group, torch.device("cpu"))]
    root, first, second = units_below(model)
    assert type(root.handle.runtime.collectives) is Recording
    assert root.handle.runtime.collectives is first.handle.runtime.collectives
    assert type(second.handle.runtime.collectives) is OtherRecording
    assert root.context is first.context is second.context
    assert root.handle.runtime._streams is second.handle.runtime._streams
    model(make_input(0, 2)).sum().backward()
    assert second.handle.runtime.collectives.calls == ["all_gather", "all_gather", "reduce_scatter"]

    # The same factory makes no second one, another does; without one the built-in collectives are used.
    again, third, plain = Net(), Net(), Net()
    fully_shard(again, process_group=ctx.group, collectives=factory)
    assert len(made) == 1
    assert collectives_of(again) is collectives_of(model)
    fully_shard(third, process_group=ctx.group, collectives=functools.partial(Recording))
    assert collectives_of(third) is not collectives_of(model)
    fully_shard(plain, process_group=ctx.group)
    assert type(collectives_of(plain)) is GlooCollectives
    assert unit_of(plain).context is root.context
    assert type(collectives_of(copy.deepcopy(again))) is Recording


def test_units_with_different_collectives_share_everything_else(pool):
    pool.run(shared_runtime)


class NoExact(Recording):
    exact = None


class NoReduce(Recording):
    all_reduce = None


class OddArguments(Recording):
    def all_gather(self, output: Tensor) -> Any: ...


@dataclasses.dataclass
class Unhashable:
    group: Any = None

    def __call__(self, group: dist.ProcessGroup, device: torch.device) -> Recording:
        raise AssertionError("must not be called")


def fails(group: dist.ProcessGroup, device: torch.device) -> Recording:
    raise ZeroDivisionError("no such network")


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        (3, TypeError, r"collectives=3 is not a callable \(group, device\) -> Collectives"),
        (Unhashable(), TypeError, "must be hashable.*frozen dataclass"),
        (lambda group, device: Recording, TypeError, "made the class Recording in place of an instance"),
        (lambda group, device: None, TypeError, r"made a NoneType, which has no all_gather\(output, shard\)"),
        (NoReduce, TypeError, r"NoReduce made a NoReduce, which has no all_reduce\(tensor\)"),
        (OddArguments, TypeError, r"whose all_gather cannot be called with \(output, shard\)"),
        (NoExact, TypeError, "with exact=None: it must be True or False"),
        (fails, ZeroDivisionError, "no such network"),
        (lambda group: None, TypeError, "positional argument"),
    ],
)
@pytest.mark.parametrize("by", ["argument", "policy"])
def test_what_cannot_be_used_raises_before_anything_is_changed(factory, error, message, by):
    with fake_world(4):
        model = Net()
        before = {n: (type(p), p.shape) for n, p in model.named_parameters()}
        if by == "argument":
            options = {"policy": {Block}, "collectives": factory}
        else:
            options = {"policy": CustomPolicy(lambda m: isinstance(m, Block) and {"collectives": factory})}
        with pytest.raises(error, match=message):
            fully_shard(model, **options)
        assert {n: (type(p), p.shape) for n, p in model.named_parameters()} == before
        fully_shard(model, policy={Block})  # nothing is left that could be in the way
        with pytest.raises(TypeError, match="are collectives, made for one process group: pass what makes them"):
            fully_shard(Net(), collectives=Recording(dist.group.WORLD, torch.device("cpu")))


def test_an_option_that_would_do_nothing_raises():
    with pytest.raises(ValueError, match="quantises nothing"):
        QuantizedCollectives(all_gather=False, reduce=False)
    with pytest.raises(ValueError, match="block must be a positive number of elements, got 0"):
        QuantizedCollectives(block=0)
    with pytest.raises(ValueError, match="leaves out nothing"):
        NoCommunication(all_gather=False, reduce=False)
    with fake_world(4):
        for factory in (QuantizedCollectives(reduce=False), NoCommunication(reduce=False)):
            with pytest.raises(ValueError, match="would do nothing for a unit under NO_SHARD"):
                fully_shard(Net(), strategy=NO_SHARD, collectives=factory)


# ---------------------------------------------------------------------------------------------------------------------
# Collectives that approximate
# ---------------------------------------------------------------------------------------------------------------------


class Coarse(Recording):
    """An all-gather that rounds to 1/8."""

    exact = False

    def all_gather(self, output: Tensor, shard: Tensor) -> Any:
        pending = super().all_gather(output, shard)
        return Works([pending], lambda: output.mul_(8).round_().div_(8))


def approximate_gathers(ctx) -> None:
    for strategy in (FULL, GRAD_OP):
        torch.manual_seed(0)
        model = Net()
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
        rounded = {n: (v * 8).round() / 8 for n, v in values.items()}
        fully_shard(model, policy={Block}, process_group=ctx.group, strategy=strategy, collectives=Coarse)
        seen = {}

        def look(module: nn.Module, *_: Any, seen: dict[str, Tensor] = seen) -> None:
            seen["weight"] = module.weight.detach().clone()

        hook = model.blocks[0].linear.register_forward_pre_hook(look)
        model(make_input(0, 2)).sum().backward()
        assert torch.equal(seen["weight"], rounded["blocks.0.linear.weight"])  # what forward computes with
        hook.remove()
        for _ in range(2):  # to look at parameters does not round them, though they are written back
            with summon_full_params(model, with_grads=True):
                for name, p in model.named_parameters():
                    assert torch.equal(p, values[name])
                    assert p.grad is not None
        with summon_full_params(model, offload_to_cpu=True):
            assert torch.equal(model.head.weight, values["head.weight"])
        flatshard.unshard(model)
        assert torch.equal(model.front.weight, rounded["front.weight"])  # ahead of a forward: what forward would see
        flatshard.reshard(model)
        with summon_full_params(model), torch.no_grad():
            model.front.weight.mul_(2)
        assert torch.equal(full_params(model)["front.weight"], values["front.weight"] * 2)


class Clamped(nn.Module):
    """Changes one element of its own weight in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 37))
        self.inside: Any = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight[7] = 0.3
            if self.inside is not None:
                self.inside(self)
        return x * self.weight.sum()


def changes_in_forward(ctx) -> None:
    def summon(offload: bool, module: nn.Module) -> None:
        with summon_full_params(module, offload_to_cpu=offload):
            module.weight[11] = 0.7

    expected = torch.linspace(-1, 1, 37)
    expected[7] = 0.3
    for inside in (None, functools.partial(summon, False), functools.partial(summon, True)):
        model = Clamped()
        fully_shard(model, process_group=ctx.group, collectives=Coarse)
        if inside is not None:
            expected[11] = 0.7
        model.inside = inside
        for _ in range(2):
            with torch.no_grad():
                model(torch.ones(2))
            # Changed elements as they were changed; the others have not been rounded.
            assert torch.equal(full_params(model)["weight"], expected)


class Toggled(nn.Module):
    """A unit whose forward sets one element of its weight, called twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Clamped()
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, *values: float) -> Tensor:
        for value in values:
            self.inner.inside = functools.partial(self._set, value)
            x = self.inner(x)
        return x + self.bias.sum()

    @staticmethod
    def _set(value: float, module: Clamped) -> None:
        module.weight[11] = value


def changed_and_changed_back(ctx) -> None:
    """What a forward sets to the very value that the gather had rounded it to is a change, too."""
    expected = torch.linspace(-1, 1, 37)
    rounded = ((expected[11] * 8).round() / 8).item()
    expected[7], expected[11] = 0.3, rounded
    model = Toggled()
    fully_shard(model, policy={Clamped}, process_group=ctx.group, strategy=GRAD_OP, collectives=Coarse)
    model(torch.ones(2), 0.7, rounded)  # with gradients: whole from the first call to the second
    assert torch.equal(full_params(model)["inner.weight"], expected)


def test_approximate_gathers_never_reach_the_shards(pool):
    pool.run(approximate_gathers, world_size=2)
    pool.run(changes_in_forward, world_size=3)
    pool.run(changed_and_changed_back)


# ---------------------------------------------------------------------------------------------------------------------
# None at all
# ---------------------------------------------------------------------------------------------------------------------


def without_communication(ctx, choice: dict[str, bool], strategy: ShardingStrategy) -> tuple[int, int]:
    class Fresh(NoCommunication):  # equal to none that another test used: it warns once for each group
        pass

    torch.manual_seed(ctx.rank)  # different values: `sync_module_states` must communicate still
    model = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard(
            model,
            policy={Block},
            process_group=ctx.group,
            strategy=strategy,
            sync_module_states=True,
            collectives=Fresh(**choice),
        )
        fully_shard(Net(), process_group=ctx.group, strategy=strategy, collectives=Fresh(**choice))
    assert [w.category for w in caught] == [RuntimeWarning]  # once
    assert "GARBAGE: use it for timing only" in str(caught[0].message)
    whole = full_params(model)
    assert same_everywhere(ctx.group, whole["head.weight"].view(-1))
    with sent_bytes() as forward:
        loss = model(make_input(0, 2)).sum()
    with sent_bytes() as backward:
        loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    after = full_params(model)
    assert all(torch.equal(after[name], value) for name, value in whole.items())
    return len(forward), len(backward)


def test_no_communication(pool):
    run = functools.partial(pool.run, without_communication, world_size=3)
    peers = 2
    assert run({}, FULL) == [(0, 0)] * 3
    assert run({"reduce": False}, FULL) == [(0, 3 * peers)] * 3
    assert run({"all_gather": False}, FULL) == [(3 * peers, 2 * peers)] * 3
    assert run({}, NO_SHARD) == [(0, 0)] * 3


# ---------------------------------------------------------------------------------------------------------------------
# A second communicator for reductions
# ---------------------------------------------------------------------------------------------------------------------


def second_group(ctx) -> None:
    second = dist.new_group()
    used: dict[str, set[Any]] = {"_all_gather": set(), "_reduce_scatter": set()}

    def record(collectives: Any, name: str) -> None:
        real = getattr(collectives, name)

        def call(*args: Any, group: Any, **kwargs: Any) -> Any:
            used[name].add(group)
            return real(*args, group=group, **kwargs)

        setattr(collectives, name, call)

    def factory(group: dist.ProcessGroup, device: torch.device) -> DefaultCollectives:
        collectives = DefaultCollectives(group, second)
        for name in used:
            record(collectives, name)
        return collectives

    def shard(model: nn.Module, group: Any) -> None:
        fully_shard(model, policy={Block}, process_group=group, collectives=factory)

    check_parity(ctx, Net, make_input, steps=2, shard=shard)
    assert used == {"_all_gather": {ctx.group}, "_reduce_scatter": {second}}

    with pytest.raises(ValueError, match=r"must be a second group of the ranks .*, got the same group"):
        DefaultCollectives(ctx.group, ctx.group)
    others = dist.new_group([0, 1])
    if ctx.rank < 2:
        with pytest.raises(ValueError, match=r"must be a second group .* got one of the ranks \[0, 1\]"):
            DefaultCollectives(ctx.group, others)
    # Held weakly: it ends when it is destroyed, and what uses it then says so.
    third = dist.new_group()
    collectives = DefaultCollectives(ctx.group, third)
    dist.destroy_process_group(third)
    del third
    gc.collect()
    with pytest.raises(RuntimeError, match=r"the process group .* has been destroyed"):
        collectives.all_reduce(torch.ones(1))


def test_reductions_may_have_a_group_of_their_own(pool):
    pool.run(second_group, world_size=4)  # all ranks of the world make it


# ---------------------------------------------------------------------------------------------------------------------
# Failures
# ---------------------------------------------------------------------------------------------------------------------


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
        assert unit.handle._gathers == []
        for buffers, grads in zip(unit.handle.buffers, unit.handle.grads, strict=True):
            assert buffers.is_alias or buffers.unsharded.flat.untyped_storage().nbytes() == 0
            assert grads._input.untyped_storage().nbytes() == 0
            assert grads.reduction._pending is None


def lose_a_rank(ctx, how: str, where: str, options: dict[str, Any]) -> str:
    # A timeout of its own: the others must not outlive it.
    group = dist.new_group(list(range(ctx.world_size)), timeout=datetime.timedelta(seconds=3))
    model = Net(blocks=3)
    fully_shard(model, policy={Block}, process_group=group, **options)
    model(make_input(0, 2)).sum().backward()
    last = ctx.world_size - 1
    if ctx.rank == last and where == "forward":
        model.blocks[0].linear.register_forward_pre_hook(lambda *_: go(how))
    if ctx.rank == last and where == "backward":
        model.blocks[1].linear.register_forward_hook(lambda m, a, out: out.register_hook(lambda g: go(how)) and None)
    try:
        model(make_input(0, 2)).sum().backward()
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
        ("leaves", "forward", {}, r"^the all-gather of unit 'blocks\.2' .*while receiving from rank 2 of the group"),
        (
            "leaves",
            "backward",
            {},
            r"^the reduce-scatter of unit 'blocks\.1' .*while receiving from rank 2 of the group",
        ),
        # The order is still checked, and so the last all-reduce before is not issued until somebody waits for it.
        ("leaves", "backward", {"strategy": NO_SHARD}, r"^the all-reduce of unit 'blocks\.[12]' "),
        ("leaves", "backward", {"collectives": QuantizedCollectives()}, r"^the reduce-scatter of unit 'blocks\.1' "),
        # What the dead rank had sent may or may not have arrived.
        ("dies", "forward", {}, r"^the all-gather of unit 'blocks\.[12]' "),
        ("dies", "backward", {}, r"^the (reduce-scatter|all-gather) of unit '(blocks\.[012]|<root>)' "),
    ],
)
def test_when_a_rank_is_lost_the_others_say_where(pool, how, where, options, message):
    with pytest.raises(RankFailure) as e:
        pool.run(lose_a_rank, how, where, options, world_size=3, timeout=20)
    lost = [f for f in e.value.failures if f.rank == 2]
    assert [f.kind for f in lost] == (["died"] if how == "dies" else [])
    others = [f for f in e.value.failures if f.rank != 2]
    assert [(f.rank, f.kind, f.type_name) for f in others] == [(r, "raised", "CollectiveError") for r in (0, 1)]
    for failure in others:
        assert re.search(message, failure.message, re.DOTALL), failure.message
        assert f"failed on rank {failure.rank} of 3: " in failure.message


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


def survive_a_failed_wait(ctx) -> None:
    for strategy in (FULL, GRAD_OP, NO_SHARD):
        phases = ("all_reduce",) if strategy is NO_SHARD else ("all_gather", "reduce_scatter")
        for method in phases:
            for number in range(3 if method != "all_gather" or strategy is GRAD_OP else 5):
                for recovers in (False, True):
                    ctx.note(f"{strategy.name}, {method} {number}, recover: {recovers}")
                    torch.manual_seed(0)
                    model = Net()
                    model.double().register_parameter("other", nn.Parameter(torch.ones(3)))  # a second flat parameter
                    fully_shard(
                        model, policy={Block}, process_group=ctx.group, strategy=strategy, collectives=FailsInWait
                    )
                    x = torch.linspace(-1, 1, 16, dtype=torch.double).view(2, 8)
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
                    assert all(
                        p.shape == q.shape for p, q in zip(model.parameters(), expected, strict=True) if q is not None
                    )
                    if recovers:
                        flatshard.recover(model)
                        check_let_go(model)
                    model.zero_grad()
                    model(x).sum().backward()
                    for p, grad in zip(model.parameters(), expected, strict=True):
                        assert (p.grad is None) == (grad is None)
                        assert grad is None or torch.equal(p.grad, grad)
                    check_let_go(model)


def test_a_step_after_a_failed_wait(pool):
    pool.run(survive_a_failed_wait, timeout=20)


def fail_elsewhere(ctx) -> None:
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


def test_failures_outside_a_step(pool):
    pool.run(fail_elsewhere)


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
