"""What carries the bytes: other collectives in the place of the built-in ones, quantised ones, none at all.

The oracle for collectives that claim to be exact is the run without them; for quantised ones, a bound on the error that
follows from the format.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block
from no_communication import NoCommunication
from on_ranks import ranks
from parity import check_parity, full_params
from recording import FULL, GRAD_OP, NO_SHARD, Net, Recording, collectives_of, make_input
from suite import fake_world
from torch import Tensor, nn

import flatshard
from flatshard import CustomPolicy, ShardingStrategy, _torch, fully_shard, summon_full_params
from flatshard._comm.backends import GlooCollectives
from flatshard._comm.collectives import Works
from flatshard._composable.find import units_below
from flatshard._composable.state import unit_of
from flatshard.comm import DefaultCollectives, QuantizedCollectives


class OtherRecording(Recording):
    pass


# -- Replacing them ---------------------------------------------------------------------------------------------------


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


@ranks(2)
def test_units_with_different_collectives_share_everything_else(ctx) -> None:
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
    assert root.handle.runtime.streams is second.handle.runtime.streams
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


class NoReduce(Recording):
    all_reduce = None


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
        (3, TypeError, "'int' object is not callable"),
        (Unhashable(), TypeError, "unhashable type: 'Unhashable'"),
        (lambda group, device: None, TypeError, "made a NoneType, which lacks one of all_gather, reduce_scatter"),
        (NoReduce, TypeError, "NoReduce'> made a NoReduce, which lacks one of"),
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


# -- Collectives that approximate -------------------------------------------------------------------------------------


class Coarse(Recording):
    """An all-gather that rounds to 1/8."""

    exact = False

    def all_gather(self, output: Tensor, shard: Tensor) -> Any:
        pending = super().all_gather(output, shard)
        return Works([pending], lambda: output.mul_(8).round_().div_(8))


@ranks(2)
def test_approximate_gathers_never_reach_the_shards(ctx) -> None:
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


@ranks(3)
def test_changes_in_forward_under_approximate_gathers(ctx) -> None:
    expected = torch.linspace(-1, 1, 37)
    expected[7] = 0.3
    model = Clamped()
    fully_shard(model, process_group=ctx.group, collectives=Coarse)
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


@ranks(2)
def test_a_change_back_to_what_the_gather_had_rounded_it_to(ctx) -> None:
    """What a forward sets to the very value that the gather had rounded it to is a change, too."""
    expected = torch.linspace(-1, 1, 37)
    rounded = ((expected[11] * 8).round() / 8).item()
    expected[7], expected[11] = 0.3, rounded
    model = Toggled()
    fully_shard(model, policy={Clamped}, process_group=ctx.group, strategy=GRAD_OP, collectives=Coarse)
    model(torch.ones(2), 0.7, rounded)  # with gradients: whole from the first call to the second
    assert torch.equal(full_params(model)["inner.weight"], expected)


# -- A second communicator for reductions -----------------------------------------------------------------------------


@ranks(4)
def test_reductions_may_have_a_group_of_their_own(ctx) -> None:
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
    dist.barrier(ctx.group)  # other ranks may still be connecting
    dist.destroy_process_group(third)
    del third
    gc.collect()
    with pytest.raises(RuntimeError, match=r"the process group .* has been destroyed"):
        collectives.all_reduce(torch.ones(1))


@pytest.mark.slow
@pytest.mark.skipif(_torch.VERSION < (2, 15), reason="this torch gives a group no other ranks")
def test_a_group_that_was_given_other_ranks_is_refused_and_the_error_says_how_to_go_on(tmp_path):
    """Gloo would end the process: the collectives are made for as many ranks as there were. The job does what is said."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "test")])
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    job = [sys.executable, str(Path(__file__).with_name("reconfigured_job.py"))]
    ranks = [
        subprocess.Popen([*job, str(rank), str(tmp_path)], env=env, stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        printed = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    for rank, text in enumerate(printed[:2]):
        assert "the all-gather of unit '0' was not issued: its process group was reconfigured" in text
        assert f"When the unit was sharded, this was rank {rank} of 3; now it is rank {rank} of 2" in text
        assert text.endswith("goes on\n")
