"""Hybrid sharding: shard within a group, replicate across groups. Meshes (1,1), (1,n), (n,1), (a,b) against one process."""

from __future__ import annotations

import collections
import copy
import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity import check_parity, sgd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard._comm.groups import _timeout
from flatshard._composable.find import units_below
from flatshard._runtime import Runtime
from flatshard._trace import record_events

HYBRID = [strategy for strategy in ShardingStrategy if strategy.is_hybrid]


class Block(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 7)
        self.outer = nn.Linear(7, width, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x))) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(5, 3)
        self.unused = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_input(step: int, n: int) -> torch.Tensor:
    return torch.randn(n, 5)


@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parity(pool, world_size: int, strategy: ShardingStrategy):
    pool.run(parity, strategy, world_size=world_size)


def parity(ctx, strategy: ShardingStrategy) -> None:
    """Not ``check_parity``, which counts elements over all ranks: with replicas that count is a multiple it doesn't know."""
    world = ctx.world_size
    groups = {(1, world): (ctx.group, ctx.alone), (world, 1): (ctx.alone, ctx.group), (2, 2): None}
    for shape in groups if world == 4 else [(1, world), (world, 1)]:  # only all four ranks may make a DeviceMesh
        for given in ("groups", "mesh") if world == 4 else ("groups",):
            ctx.note(f"mesh {shape} as {given}")
            torch.manual_seed(0)
            reference, model = Net().double(), Net().double()
            model.load_state_dict(reference.state_dict())
            where: dict[str, Any] = {"process_group": groups[shape]}
            if given == "mesh":
                where = {"device_mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))}
            elif shape == (2, 2):
                mesh = init_device_mesh("cpu", shape)
                where = {"process_group": (mesh.get_group(1), mesh.get_group(0))}
            fully_shard(model, policy={Block}, strategy=strategy, **where)
            optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
            for step in range(4):
                torch.manual_seed(step)
                x = torch.randn(2 * world, 5).double()
                reference(x).square().mean().backward()
                model(x[2 * ctx.rank : 2 * ctx.rank + 2]).square().mean().backward()
                assert model.unused.weight.grad is None
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            if strategy.joins_axes:
                units = units_below(model)
                kept = sum(part.nbytes for unit in units for part in unit.handle.source.kept)
                assert kept == flatshard.describe(model).kept_nbytes
                every = units[0].handle.runtime
                each, inner, outer = (_timeout(r.group, r.device) for r in (every, every.inner, every.outer))
                assert each == (outer if shape[1] == 1 else inner)
            held = sum(p.numel() for p in model.parameters())
            everything = sum(p.numel() for p in reference.parameters())
            keeps_all = math.prod(shape) == 1 if strategy.joins_axes else shape[1] == 1
            assert held == everything if keeps_all else held < everything
            with flatshard.summon_full_params(model, writeback=False):
                for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def collectives(ctx) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Net(), policy={Block}, device_mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD)
    calls: dict[str, int] = {}
    for unit in units_below(model):
        assert unit.handle.placement.replicas is not None
        for runtime, kind in ((unit.handle.runtime, "shard"), (unit.handle.placement.replicas, "replicate")):
            for verb in ("all_gather", "reduce_scatter", "all_reduce"):
                count(runtime.collectives, verb, f"{verb} over {kind}", calls)
    x = torch.randn(2, 5)
    for _ in range(2):
        model(x).sum().backward()
    calls.clear()
    with record_events() as events:
        model(x).sum().backward()
    assert [e for e in events if e.startswith("reduce")][-1] == "reduce-scatter <root>"
    return calls


def count(collectives, verb: str, name: str, calls: dict[str, int]) -> None:
    original = getattr(collectives, verb)
    if getattr(original, "counted", False):
        return

    def counted(*args):
        calls[name] = calls.get(name, 0) + 1
        return original(*args)

    counted.counted = True  # type: ignore[attr-defined]
    setattr(collectives, verb, counted)


def test_collectives_per_step(pool):
    """Blocks gather twice, the root once; every unit reduces once over either group."""
    for calls in pool.run(collectives, world_size=4):
        assert calls == {"all_gather over shard": 7, "reduce_scatter over shard": 4, "all_reduce over replicate": 4}


def start_from_rank_0(ctx) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for meta in (False, True):
        torch.manual_seed(ctx.rank)
        with torch.device("meta" if meta else "cpu"):
            model = Net()
        if meta:
            model.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))  # Block's own parameter has no initialiser
            model.head, model.unused = nn.Linear(5, 5, device="meta"), nn.Linear(5, 3, device="meta")
            model.blocks.to("meta")
        fully_shard(
            model,
            policy=None if meta else {Block},
            device_mesh=mesh,
            strategy=HYBRID[0],
            sync_module_states=not meta,
            device_id="cpu",
        )
        with flatshard.summon_full_params(model, writeback=False):
            mine = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
        everyone = [torch.empty_like(mine) for _ in range(ctx.world_size)]
        dist.all_gather(everyone, mine)
        assert all(torch.equal(e, everyone[0]) for e in everyone)


@pytest.mark.filterwarnings("ignore:.*matched no submodule")
def test_every_replica_starts_from_rank_0(pool):
    pool.run(start_from_rank_0, world_size=4)


def partial_accumulation(ctx) -> None:
    """Reduce-scatter every microbatch, all-reduce the last: same gradients, fewer all-reduces."""
    mesh = init_device_mesh("cpu", (2, 2))
    for strategy, policy in [(HYBRID[0], {Block}), (HYBRID[1], None)]:
        torch.manual_seed(0)
        reference, model = Net().double(), Net().double()
        model.load_state_dict(reference.state_dict())
        fully_shard(model, policy=policy, device_mesh=mesh, strategy=strategy)
        for step in range(2):
            reference.zero_grad()
            model.zero_grad()
            for microbatch in range(3):
                x = torch.randn(8, 5).double()
                reference(x).square().mean().backward()
                flatshard.configure(model, all_reduce=microbatch == 2)
                model(x[2 * ctx.rank : 2 * ctx.rank + 2]).square().mean().backward()
                if step == 0 and microbatch < 2:
                    assert all(p.grad is None for p in model.parameters())
            with flatshard.summon_full_params(model, writeback=False, with_grads=True):
                for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                    assert (p.grad is None) == (q.grad is None), name
                    if q.grad is not None:
                        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


def test_all_reduce_at_the_last_microbatch(pool):
    pool.run(partial_accumulation, world_size=4)


def node_mesh(ctx) -> None:
    import os

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        model = fully_shard(Net(), policy={Block}, strategy=HYBRID[0])
        other = fully_shard(Net(), policy={Block}, strategy=HYBRID[1])
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
    (unit, *_), (same, *_) = units_below(model), units_below(other)
    assert unit.handle.runtime.world_size == 2
    assert unit.handle.placement.replicas is not None
    assert unit.handle.placement.replicas.world_size == 2
    assert unit.context is same.context  # one mesh for all calls
    assert unit.handle.placement.is_rank0 == (ctx.rank == 0)


def test_groups_are_built_from_the_local_world_size(pool):
    pool.run(node_mesh, world_size=4)


def refusals(ctx) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cases = [
        ({"device_mesh": mesh["shard"]}, "needs 2 dimensions, \\(replicate, shard\\), and has 1"),
        ({"process_group": mesh.get_group(1)}, "pass process_group=\\(group to shard over, group of replicas\\)"),
        ({"process_group": (mesh.get_group(1), mesh.get_group(1))}, "must have only this rank in common"),
        ({"process_group": (mesh.get_group(1), ctx.group)}, "must have only this rank in common"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            fully_shard(Net(), strategy=HYBRID[0], **arguments)
    with pytest.raises(ValueError, match="process_group is a tuple, which is for hybrid strategies"):
        fully_shard(Net(), process_group=(mesh.get_group(1), mesh.get_group(0)))
    with pytest.raises(ValueError, match=r"or strategy=ShardingStrategy\.HYBRID_SHARD, which replicates"):
        fully_shard(Net(), device_mesh=mesh)
    model = fully_shard(Net(), process_group=ctx.group)
    with pytest.raises(ValueError, match="unit '<root>' has strategy FULL_SHARD and no replicas"):
        flatshard.configure(model, all_reduce=False)


def test_refusals(pool):
    pool.run(refusals, world_size=4)


def sgd_parity(ctx) -> None:
    check_parity(
        ctx,
        Net,
        make_input,
        optimizer=sgd,
        shard=lambda m, g: fully_shard(m, policy={Block}, process_group=(ctx.group, ctx.alone), strategy=HYBRID[0]),
    )


def test_one_replica_is_full_shard(pool):
    pool.run(sgd_parity, world_size=3)


def partial_left_over(ctx) -> None:
    """What was averaged within the shard group only is averaged over the replicas by the next backward that may."""
    where: dict[str, Any] = {"process_group": (ctx.alone, ctx.group)}
    if ctx.world_size == 4:
        where = {"device_mesh": init_device_mesh("cpu", (2, 2))}
    torch.manual_seed(0)
    reference = Net().double()
    model = fully_shard(copy.deepcopy(reference), policy={Block}, strategy=HYBRID[0], **where)
    x = torch.randn(2 * ctx.world_size, 5).double()

    def backward(m: nn.Module, skip: int | None = None) -> None:
        own = x if m is reference else x[2 * ctx.rank : 2 * ctx.rank + 2]
        for i, block in enumerate(m.blocks):
            own = own if i == skip else block(own)
        own.square().mean().backward()

    def partially() -> None:
        flatshard.configure(model, all_reduce=False)
        backward(model)
        flatshard.configure(model, all_reduce=True)

    def check() -> None:
        with flatshard.summon_full_params(model, writeback=False, with_grads=True):
            for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), name
                if q.grad is not None:
                    torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
        for m in (model, reference):
            m.zero_grad()

    partially()  # then a block is left out
    backward(model, skip=1)
    backward(reference)
    backward(reference, skip=1)
    check()

    partially()
    flatshard.recover(model)
    backward(model)
    backward(reference)
    check()

    partially()
    handle = model.blocks[1].register_forward_hook(lambda m, args, out: out.register_hook(oops) and None)
    with pytest.raises(ZeroDivisionError):
        backward(model)
    handle.remove()
    model.zero_grad()
    backward(model)
    backward(reference)
    check()

    partially()  # then a block is frozen for a backward
    model.blocks[1].requires_grad_(False)
    backward(model)
    model.zero_grad()
    model.blocks[1].requires_grad_(True)
    backward(model)
    backward(reference)
    check()


def oops(grad: torch.Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_no_later_backward_adds_to(pool, world_size):
    pool.run(partial_left_over, world_size=world_size)


def hook_over_nobody(ctx) -> None:
    model = fully_shard(Net(), policy={Block}, process_group=(ctx.alone, ctx.group), strategy=HYBRID[0])
    with pytest.raises(
        ValueError, match=r"no gradients to reduce \(they are sharded over a single rank\).*do not register it here"
    ):
        flatshard.comm.register_comm_hook(model, None, flatshard.comm.bf16_compress_hook)


def test_a_hook_that_would_never_run(pool):
    pool.run(hook_over_nobody)


# -- dimensions of size 1 --------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


def count_collectives(ctx, shape: tuple[int, int, int]) -> list[tuple[tuple[str, int], int]]:
    """What a step issues on a mesh (replicate, shard, tp). Its gradients are those of one process."""
    mesh = ctx.device_mesh(shape, ("replicate", "shard", "tp"))
    torch.manual_seed(0)
    plain = nn.Sequential(Pair(), Pair())
    batch = torch.randn(8, 8)
    plain(batch).square().mean().backward()
    model = copy.deepcopy(plain)
    model.zero_grad()
    for block in model:
        parallelize_module(block, mesh["tp"], {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
    flatshard.fully_shard(
        model, policy={Pair}, device_mesh=mesh["replicate", "shard"], strategy=ShardingStrategy.HYBRID_SHARD
    )
    issued: collections.Counter[tuple[str, int]] = collections.Counter()
    issue = Runtime._issue

    def counted(self: Runtime, verb: str, *args: Any, **kwargs: Any) -> Any:
        issued[verb, self.world_size] += 1
        return issue(self, verb, *args, **kwargs)

    with mock.patch.object(Runtime, "_issue", counted):
        model(batch.chunk(shape[0] * shape[1])[ctx.rank // shape[2]]).square().mean().backward()
    with flatshard.summon_full_params(model, with_grads=True):
        for p, one in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad, one.grad)
    return sorted(issued.items())


@pytest.mark.parametrize("shape", [s for s in itertools.product((1, 2, 4), repeat=3) if math.prod(s) == 4])
def test_nothing_is_sent_where_there_is_nobody(pool, shape: tuple[int, int, int]):
    replicate, shard, _ = shape
    expected = []
    if shard > 1:
        expected += [(("all-gather", shard), 4), (("reduce-scatter", shard), 2)]
    if replicate > 1:
        expected += [(("all-reduce", replicate), 2)]
    for issued in pool.run(count_collectives, shape, world_size=4):
        assert issued == sorted(expected)
