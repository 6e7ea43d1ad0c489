"""Collectives that replace the built-in ones: exact, quantised, or none at all.

The oracle for exact collectives is a run without them. For quantised ones, the format gives an error bound.
"""

import copy
import dataclasses
import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Block
from no_communication import NoCommunication
from on_ranks import ranks
from parity import check_parity, full_params
from pool import Pool
from recording import FULL, GRAD_OP, NO_SHARD, Net, Recording, collectives_of, make_input
from torch import Tensor, nn

import flatshard
from flatshard import CustomPolicy, ShardingStrategy, fully_shard, summon_full_params
from flatshard._base import torch_versions
from flatshard._comm.backends import GlooCollectives
from flatshard._comm.progress import Works
from flatshard._composable.find import units_below
from flatshard.comm import DefaultCollectives, QuantizedCollectives


@ranks(2, 3)
def test_other_collectives_do_all_the_work_of_a_step(ctx):
    found = []
    for strategy in (FULL, NO_SHARD):

        def shard(model: nn.Module, group: Any, strategy: ShardingStrategy = strategy) -> None:
            fully_shard(model, policy={Block}, process_group=group, strategy=strategy, collectives=Recording)
            collectives_of(model).calls.clear()

        run = check_parity(ctx, Net, make_input, steps=2, shard=shard)
        found.append([*collectives_of(run.sharded).calls])
    sharded, whole = found
    assert {*whole} == {"all_reduce"}
    assert {*sharded} == {"all_gather", "reduce_scatter"}
    assert sharded.count("reduce_scatter") == 2 * 3


@ranks(2)
def test_units_with_different_collectives_share_everything_else(ctx) -> None:
    """A factory is called once for all models of its group; units with another factory get their own collectives."""
    made = []

    def factory(group: dist.ProcessGroup, device: torch.device) -> Recording:
        made.append((group, device))
        return Recording(group, device)

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        return isinstance(module, Block) and ({"collectives": Coarse} if module is model.blocks[1] else True)

    model, again, third, plain = Net(), Net(), Net(), Net()
    fully_shard(model, policy=CustomPolicy(choose), process_group=ctx.group, collectives=factory)
    assert len({unit.context for unit in units_below(model)}) == 1
    model(make_input(0, 2)).sum().backward()
    assert type(collectives_of(model.blocks[1])) is Coarse
    assert collectives_of(model.blocks[1]).calls == ["all_gather", "all_gather", "reduce_scatter"]
    fully_shard(again, process_group=ctx.group, collectives=factory)
    fully_shard(third, process_group=ctx.group, collectives=functools.partial(Recording))
    fully_shard(plain, process_group=ctx.group)
    assert made == [(ctx.group, torch.device("cpu"))]
    assert collectives_of(again) is collectives_of(model) is not collectives_of(third)
    assert type(collectives_of(plain)) is GlooCollectives
    assert type(collectives_of(copy.deepcopy(again))) is Recording


def fails(group: dist.ProcessGroup, device: torch.device) -> Recording:
    raise ZeroDivisionError("no such network")


def test_what_cannot_be_used_raises_before_anything_is_changed(world):
    world(4)
    lacks = type("Lacks", (Recording,), {"all_reduce": None})
    for factory, error, message in (
        (3, TypeError, "'int' object is not callable"),
        (dataclasses.make_dataclass("Unhashable", [], namespace={"__call__": fails})(), TypeError, "unhashable type"),
        (lambda group, device: None, TypeError, "made a NoneType, which lacks one of all_gather, reduce_scatter"),
        (lacks, TypeError, "Lacks'> made a Lacks, which lacks one of"),
        (fails, ZeroDivisionError, "no such network"),
    ):
        override = CustomPolicy(lambda m, f=factory: isinstance(m, Block) and {"collectives": f})
        for options in ({"policy": {Block}, "collectives": factory}, {"policy": override}):
            model = Net()
            before = {n: (type(p), p.shape) for n, p in model.named_parameters()}
            with pytest.raises(error, match=message):
                fully_shard(model, **options)
            assert {n: (type(p), p.shape) for n, p in model.named_parameters()} == before
            fully_shard(model, policy={Block})  # nothing left over prevents sharding


def test_an_option_that_would_do_nothing_raises(world):
    for options, message in (
        ({"all_gather": False, "reduce": False}, "quantises nothing"),
        ({"block": 0}, "block must be a positive number of elements, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            QuantizedCollectives(**options)
    with pytest.raises(ValueError, match="leaves out nothing"):
        NoCommunication(all_gather=False, reduce=False)
    world(4)
    for factory in (QuantizedCollectives(reduce=False), NoCommunication(reduce=False)):
        with pytest.raises(ValueError, match="would do nothing for a unit under NO_SHARD"):
            fully_shard(Net(), strategy=NO_SHARD, collectives=factory)


class Coarse(Recording):
    """Collectives whose all-gather rounds to 1/8."""

    exact = False

    def all_gather(self, output: Tensor, shard: Tensor) -> Any:
        pending = super().all_gather(output, shard)
        return Works([pending], lambda: output.mul_(8).round_().div_(8))


@ranks(2)
def test_approximate_gathers_never_reach_the_shards(ctx) -> None:
    for strategy in (FULL, GRAD_OP):
        model = Net()
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
        rounded = {n: (v * 8).round() / 8 for n, v in values.items()}
        fully_shard(model, policy={Block}, process_group=ctx.group, strategy=strategy, collectives=Coarse)
        seen = []
        with model.blocks[0].linear.register_forward_pre_hook(lambda m, a, s=seen: s.append(m.weight.detach().clone())):
            model(make_input(0, 2)).sum().backward()
        assert torch.equal(seen[0], rounded["blocks.0.linear.weight"])  # the values that forward uses
        for _ in range(2):  # reading parameters does not round them, although they are written back
            with summon_full_params(model, with_grads=True):
                for name, p in model.named_parameters():
                    assert torch.equal(p, values[name])
                    assert p.grad is not None
        with summon_full_params(model, offload_to_cpu=True):
            assert torch.equal(model.head.weight, values["head.weight"])
        flatshard.unshard(model)
        assert torch.equal(model.front.weight, rounded["front.weight"])  # the values that a forward would use
        flatshard.reshard(model)
        with summon_full_params(model), torch.no_grad():
            model.front.weight.mul_(2)
        assert torch.equal(full_params(model)["front.weight"], values["front.weight"] * 2)


@ranks(2, 3)
def test_changes_in_forward_under_approximate_gathers(ctx) -> None:
    """Values that a forward sets are kept, even if they equal the rounded ones. Other values are not rounded."""
    for strategy in (FULL, GRAD_OP):
        model = nn.Sequential(nn.Linear(37, 1, bias=False))
        expected = model[0].weight.detach().clone()
        rounded = (expected[0, 11] * 8).round() / 8
        fully_shard(model, policy={nn.Linear}, process_group=ctx.group, strategy=strategy, collectives=Coarse)
        for value in (torch.tensor(0.7), rounded):  # under GRAD_OP, unsharded from the first call to the second

            def change(linear: nn.Linear, args: Any, value: Tensor = value) -> None:
                with torch.no_grad():
                    linear.weight[0, 11] = value

            with model[0].register_forward_pre_hook(change):
                model[0](torch.ones(37))
        expected[0, 11] = rounded
        assert torch.equal(full_params(model)["0.weight"], expected)


@ranks(4)
def test_reductions_may_have_a_group_of_their_own(ctx) -> None:
    second, others = dist.new_group(), dist.new_group([0, 1])
    used = {"_all_gather": ctx.group, "_reduce_scatter": second}
    made = []

    def factory(group: dist.ProcessGroup, device: torch.device) -> DefaultCollectives:
        made.append(DefaultCollectives(group, second))
        for name in used:
            setattr(made[-1], name, mock.Mock(wraps=getattr(made[-1], name)))
        return made[-1]

    def shard(model: nn.Module, group: Any) -> None:
        fully_shard(model, policy={Block}, process_group=group, collectives=factory)

    check_parity(ctx, Net, make_input, steps=2, shard=shard)
    for name, group in used.items():
        assert {call.kwargs["group"] for each in made for call in getattr(each, name).call_args_list} == {group}
    for wrong, message in ((ctx.group, "the same group"), *([(others, r"one of the ranks \[0, 1\]")] * (ctx.rank < 2))):
        with pytest.raises(ValueError, match=rf"must be a second group of the ranks .*, got {message}"):
            DefaultCollectives(ctx.group, wrong)


def lose_a_rank(ctx, folder: str) -> str:
    """Reduce a group of three ranks to two, and return the error of a forward."""

    def reconfigure(number: int, size: int) -> None:
        store.set(f"{number}/{ctx.rank}", dist._get_reconfigure_handle())
        handles = [store.get(f"{number}/{rank}").decode() for rank in range(size)]
        dist._reconfigure(uuid=number, handles=handles).wait()

    store = dist.FileStore(f"{folder}/store", 3)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=3, enable_reconfigure=True)
    reconfigure(0, 3)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)), policy={nn.Linear})
    model(torch.zeros(1, 4)).sum().backward()
    if ctx.rank == 2:
        return ""
    reconfigure(1, 2)
    with pytest.raises(flatshard.CollectiveError) as e:
        model(torch.zeros(1, 4))
    return str(e.value)


@pytest.mark.skipif(torch_versions.VERSION < (2, 15), reason="this torch gives a group no other ranks")
def test_a_group_that_was_given_other_ranks_is_refused(tmp_path):
    """Gloo would end the process, because the collectives are made for the old number of ranks."""
    bare = Pool(3, backend=None)
    try:
        told = bare.run(lose_a_rank, str(tmp_path), world_size=3)
    finally:
        bare.close()
    for rank, text in enumerate(told[:2]):
        assert "the all-gather of unit '0' was not issued: its process group was reconfigured" in text
        assert f"When the unit was sharded, this was rank {rank} of 3; now it is rank {rank} of 2" in text
        assert "load" in text
