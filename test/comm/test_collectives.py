"""Collectives that replace the built-in ones: exact, quantised, or none at all.

The oracle for exact collectives is a run without them. For quantised ones, the format gives an error bound.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator
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
from flatshard import CustomPolicy, MixedPrecision, ShardingStrategy, fully_shard, summon_full_params
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


@contextlib.contextmanager
def groups_of(*methods: str) -> Iterator[dict[str, set[dist.ProcessGroup]]]:
    """Record the process groups whose methods are called."""
    found: dict[str, set[dist.ProcessGroup]] = {name: set() for name in methods}

    def recorded(name: str) -> Any:
        called = getattr(dist.ProcessGroup, name)

        def call(group: dist.ProcessGroup, *args: Any) -> Any:
            found[name].add(group)
            return called(group, *args)

        return call

    with contextlib.ExitStack() as stack:
        for name in methods:
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, recorded(name)))
        yield found


def backends_own(group: dist.ProcessGroup, device: torch.device) -> DefaultCollectives:
    return DefaultCollectives(group)


@ranks(4)
def test_reductions_may_have_a_group_of_their_own(ctx) -> None:
    second, others = dist.new_group(), dist.new_group([0, 1])

    def factory(group: dist.ProcessGroup, device: torch.device) -> DefaultCollectives:
        return DefaultCollectives(group, second)

    def shard(model: nn.Module, group: Any) -> None:
        fully_shard(model, policy={Block}, process_group=group, collectives=factory)

    with groups_of(torch_versions.ALL_GATHER, torch_versions.REDUCE_SCATTER) as groups:
        check_parity(ctx, Net, make_input, steps=2, shard=shard)
    assert [*groups.values()] == [{ctx.group}, {second}]
    for wrong, message in ((ctx.group, "the same group"), *([(others, r"one of the ranks \[0, 1\]")] * (ctx.rank < 2))):
        with pytest.raises(ValueError, match=rf"must be a second group of the ranks .*, got {message}"):
            DefaultCollectives(ctx.group, wrong)


def by_functions_of_torch(name: str, group: dist.ProcessGroup, *tensors: Tensor) -> None:
    """Run a collective by ``torch.distributed``, and average as ``DefaultCollectives`` says."""
    real = [torch.view_as_real(t).view(-1) if t.is_complex() else t for t in tensors]
    averages = group.size() == 2
    op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
    if name == "all_gather":
        dist.all_gather_into_tensor(*real, group=group)
    elif name == "all_to_all":
        dist.all_to_all_single(*real, group=group)
    elif name == "broadcast":
        dist.broadcast(*real, group_src=0, group=group)
    else:
        {"reduce_scatter": dist.reduce_scatter_tensor, "all_reduce": dist.all_reduce}[name](*real, op, group)
        real[0].div_(1 if averages else group.size())


@ranks(2, 3)
def test_methods_of_the_group_do_what_functions_of_torch_do(ctx) -> None:
    """Bit for bit, also complex numbers and float8. Errors are the backend's."""
    ours, n = DefaultCollectives(ctx.group), ctx.world_size
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        part, every = torch.randn(5).to(dtype) + ctx.rank, torch.randn(5 * n).to(dtype) + ctx.rank
        for name, tensors in {
            "all_gather": (every, part),
            "reduce_scatter": (part, every),
            "all_reduce": (every,),
            "all_to_all": (torch.empty_like(every), every),
            "broadcast": (every,),
        }.items():
            expected, found = ([t.clone() for t in tensors] for _ in range(2))
            by_functions_of_torch(name, ctx.group, *expected)
            getattr(ours, name)(*found).wait()
            assert all(map(torch.equal, expected, found)), (name, dtype)

    # Without a function of torch's for all backends:
    small = torch.full((4,), float(ctx.rank)).to(torch.float8_e4m3fn)
    ours.broadcast(small).wait()
    assert not small.float().any()
    for op, expected in (("sum", n * (n - 1) / 2), ("max", n - 1)):
        ours.combine(number := torch.full((1,), float(ctx.rank)), op).wait()
        assert number.item() == expected
    with pytest.raises(RuntimeError, match="invalid tensor size"):
        ours.all_gather(torch.empty(5 * n + 1), torch.empty(5)).wait()


FUNCTIONS_OF_TORCH = {"all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"}
FUNCTIONS_OF_TORCH |= {"all_reduce", "all_to_all_single", "broadcast", "isend", "irecv", "send", "recv"}
"""Of some versions."""


@ranks(4)
def test_a_step_calls_no_function_of_torch_distributed(ctx) -> None:
    """With gloo, with a backend's own collectives, on a mesh and on replicas: all call the group's methods alone."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for options in (
        {},
        {"collectives": backends_own},
        {"collectives": backends_own, "mixed_precision": MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)},
        {"collectives": backends_own, "strategy": NO_SHARD},
        {"collectives": backends_own, "device_mesh": mesh, "strategy": ShardingStrategy.HYBRID_SHARD},
    ):
        model = fully_shard(Net(), policy={Block}, **options)
        with contextlib.ExitStack() as stack:
            for name in FUNCTIONS_OF_TORCH & {*dir(dist)}:
                for module in (dist, dist.distributed_c10d):
                    stack.enter_context(mock.patch.object(module, name, side_effect=AssertionError(name)))
            for _ in range(2):
                model(make_input(0, 2)).sum().backward()
                flatshard.clip_grad_norm_(model, 1.0)


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
