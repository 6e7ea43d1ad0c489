"""Hybrid sharding, shards within a group and replicas across groups, on meshes (1,1), (1,n), (n,1), (a,b)."""

import copy
import math
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Block, Net
from on_ranks import ranks
from parity import by_pointer, check_same_gradients, check_same_params, full_params, parts, step_all, twins
from recording import same_everywhere
from torch import nn

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard._base import torch_versions
from flatshard._base.trace import record_events
from flatshard._comm.process_groups import timeout_of
from flatshard._composable.find import units_below

HYBRID = [strategy for strategy in ShardingStrategy if strategy.is_hybrid]


def make() -> nn.Module:
    return Net(width=5, inputs=5, outputs=3)


def backward(ctx, plain: nn.Module | None, model: nn.Module | None, order: tuple[int, ...] = (0, 1, 2)) -> None:
    """Run ``plain`` on a full batch, and ``model`` on this rank's share of it."""
    x = torch.randn(2 * ctx.world_size, 5, generator=torch.Generator().manual_seed(0)).double()
    for m, part in zip((plain, model), parts(ctx, x), strict=True):
        if m is not None:
            m.order = order
            m(part).square().mean().backward()


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.is_left_out = nn.Linear(5, 5), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.is_left_out else x + self.inner(x)


@ranks(2)
def test_a_later_unit_over_the_replicas_is_of_one_order_with_them(ctx):
    hybrid = fully_shard(nn.Linear(5, 5), strategy="HYBRID_SHARD", process_group=(ctx.alone, ctx.group))
    later = fully_shard(nn.Linear(5, 5), process_group=ctx.group)
    assert len({unit.context for each in (hybrid, later) for unit in units_below(each)}) == 1


@pytest.mark.parametrize("shared_later", [False, True])
@ranks(2)
def test_units_that_share_a_process_group_are_reduced_in_one_order(ctx, shared_later: bool):
    """All-reduces of a group match by order, even of units from several calls.

    Here, one unit's replicas are all ranks of another's. A rank that leaves a unit out completes it late.
    ``shared_later``: another call connects the groups.
    """

    alone = dist.new_group([ctx.rank], use_local_synchronization=True)  # a group that no unit has connected yet

    def shard(model: nn.Module) -> nn.Module:
        if shared_later:
            model[2] = fully_shard(model[2], strategy="FULL_SHARD", process_group=alone)
        fully_shard(model[1], strategy="NO_SHARD", process_group=ctx.group)
        groups = (alone, ctx.group)
        return fully_shard(model, policy={nn.Linear}, strategy="HYBRID_SHARD", process_group=groups)

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 5), Optional(), nn.Linear(5, 5), nn.Linear(5, 5)).double()
    model = shard(copy.deepcopy(plain))
    assert len({unit.context for unit in units_below(model)}) == 1
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    x = torch.randn(4, 5, dtype=torch.double)
    for of in (0, 1):
        for rank, part in enumerate(x.chunk(2)):
            plain[1].is_left_out = rank == of
            (plain(part).square().mean() / 2).backward()
        model[1].is_left_out = ctx.rank == of
        model(x.chunk(2)[ctx.rank]).square().mean().backward()
        if not shared_later:
            check_same_gradients(model, plain)
            step_all(optimizers)


@pytest.mark.parametrize("grouped", [False, True])
@ranks(2)
def test_a_unit_alone_on_its_process_group_that_one_rank_leaves_out(ctx, grouped: bool):
    """Backward brings gradients to units of the other group. ``grouped``: two units are on the first group."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 5), Optional(), Optional(), nn.Linear(5, 5)).double()
    model = copy.deepcopy(plain)
    for each in model[1:3] if grouped else model[1:2]:
        fully_shard(each, strategy="NO_SHARD", process_group=ctx.group)
    fully_shard(model, policy={nn.Linear}, process_group=ctx.alone)
    x = torch.randn(4, 5, dtype=torch.double).chunk(2)
    for net, of in ((plain, (0, 1)), (model, (ctx.rank,))):
        for rank in of:
            net[1].is_left_out = net[2].is_left_out = rank == 0
            (net(x[rank]).square().mean() / len(of)).backward()
    check_same_gradients(model[1], plain[1])


@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
@ranks(1, 3, 4)
def test_parity(ctx, strategy: ShardingStrategy):
    """``check_parity`` counts elements over all ranks, and replicas would multiply its count."""
    world = ctx.world_size
    for shape, as_mesh in (
        [((2, 2), False), ((2, 2), True)] if world == 4 else [((1, world), False), ((world, 1), False)]
    ):
        where: dict[str, Any] = {"process_group": (ctx.group, ctx.alone) if shape[0] == 1 else (ctx.alone, ctx.group)}
        if shape == (2, 2):
            mesh = ctx.device_mesh(shape, ("replicate", "shard"))
            where = {"device_mesh": mesh} if as_mesh else {"process_group": (mesh.get_group(1), mesh.get_group(0))}
        ctx.note(f"mesh {shape} as {list(where)}")
        plain, model = twins(ctx, make, {Block}, strategy=strategy, **where)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
        for _ in range(2):
            backward(ctx, plain, model)
            step_all(optimizers)
        if strategy.joins_axes:
            units = units_below(model)
            kept = sum(part.nbytes for unit in units for part in unit.handle.source.kept)
            assert kept == flatshard.describe(model).kept_nbytes
            every = units[0].handle.runtime
            each, inner, outer = (timeout_of(r.group, r.device) for r in (every, every.inner, every.outer))
            assert each == (outer if shape[1] == 1 else inner)
        held, everything = (sum(p.numel() for p in m.parameters()) for m in (model, plain))
        keeps_all = math.prod(shape) == 1 if strategy.joins_axes else shape[1] == 1
        assert held == everything if keeps_all else held < everything
        check_same_params(model, plain)


@ranks(4)
def test_every_replica_starts_from_rank_0(ctx):
    """Replicas agree, whatever their random generators, if ``fully_shard`` or a later call initialises parameters."""
    mesh = ctx.device_mesh((2, 2), ("replicate", "shard"))
    for device, options in (("cpu", {"sync_module_states": True}), ("meta", {"device_id": "cpu"}), ("meta", {})):
        torch.manual_seed(ctx.rank)
        with torch.device(device):
            model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
        fully_shard(model, policy={nn.Linear}, device_mesh=mesh, strategy=HYBRID[0], **options)
        if not options:
            for layer in model.to_empty(device="cpu"):
                layer.reset_parameters()
        model(torch.ones(1, 5))  # ends initialisation
        assert same_everywhere(ctx.group, torch.cat([p.flatten() for p in full_params(model).values()]))


@ranks(4)
def test_all_reduce_at_the_last_microbatch(ctx):
    """Reduce-scatter each microbatch and all-reduce the last only: same gradients, fewer all-reduces."""
    mesh = ctx.device_mesh((2, 2), ("replicate", "shard"))
    for strategy, policy in [(HYBRID[0], {Block}), (HYBRID[1], None)]:
        plain, model = twins(ctx, make, policy, device_mesh=mesh, strategy=strategy)
        for step in range(2):
            for m in (plain, model):
                m.zero_grad()
            for microbatch in range(3):
                flatshard.configure(model, all_reduce=microbatch == 2)
                backward(ctx, plain, model)
                if step == 0 and microbatch < 2:
                    assert all(p.grad is None for p in model.parameters())
                    with record_events() as events:
                        flatshard.reduce_gradients(model)
                    assert not events
            check_same_gradients(model, plain)


@ranks(4)
def test_refusals(ctx):
    """Test errors for groups and meshes that do not fit hybrid sharding."""
    mesh = ctx.device_mesh((2, 2), ("replicate", "shard"))
    shards, replicas = mesh.get_group(1), mesh.get_group(0)
    hybrid = {"strategy": HYBRID[0]}
    for arguments, message in (
        (hybrid | {"device_mesh": mesh["shard"]}, "needs 2 dimensions, \\(replicate, shard\\), and has 1"),
        (hybrid | {"process_group": shards}, "pass process_group=\\(group to shard over, group of replicas\\)"),
        (hybrid | {"process_group": (shards, ctx.group)}, "must have only this rank in common"),
        ({"process_group": (shards, replicas)}, "process_group is a tuple, which is for hybrid strategies"),
        ({"device_mesh": mesh}, r"or strategy=ShardingStrategy\.HYBRID_SHARD, which replicates"),
    ):
        with pytest.raises(ValueError, match=message):
            fully_shard(Net(), **arguments)
    with pytest.raises(ValueError, match="unit '<root>' has strategy FULL_SHARD and no replicas"):
        flatshard.configure(fully_shard(Net(), process_group=ctx.group), all_reduce=False)
    with (
        mock.patch.object(torch_versions, "UNSORTED", {}),
        pytest.raises(NotImplementedError, match=r"needs torch 2\.12 or later.* Use HYBRID_SHARD"),
    ):
        fully_shard(Net(), device_mesh=mesh, strategy="HYBRID_FULL_SHARD")
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        first, other = (units_below(fully_shard(Net(), strategy=strategy))[0] for strategy in HYBRID[:2])
    assert first.handle.runtime.world_size == first.handle.ranks.replicas.world_size == 2
    assert first.context is other.context  # one mesh for all calls
    assert first.handle.ranks.is_rank0 == (ctx.rank == 0)


@ranks(2, 4)
def test_what_no_later_backward_adds_to(ctx):
    """Gradients averaged within the shard group only are averaged over the replicas by the next full backward."""
    where: dict[str, Any] = {"process_group": (ctx.alone, ctx.group)}
    if ctx.world_size == 4:
        where = {"device_mesh": ctx.device_mesh((2, 2), ("replicate", "shard"))}
    plain, model = twins(ctx, make, {Block}, strategy=HYBRID[0], **where)

    def partially() -> None:
        flatshard.configure(model, all_reduce=False)
        backward(ctx, None, model)
        flatshard.configure(model, all_reduce=True)

    def check() -> None:
        check_same_gradients(model, plain)
        for m in (model, plain):
            m.zero_grad()

    partially()  # then leave a block out
    backward(ctx, plain, model, order=(0, 2))
    backward(ctx, plain, None)
    check()

    partially()
    flatshard.recover(model)
    backward(ctx, plain, model)
    check()

    partially()  # then freeze a block for one backward
    model.blocks[1].requires_grad_(False)
    backward(ctx, None, model)
    model.zero_grad()
    model.blocks[1].requires_grad_(True)
    backward(ctx, plain, model)
    check()


@ranks(4)
def test_reshard_forgets_what_was_kept(ctx):
    """Write without a new version, so that only ``reshard`` can discard the kept parameters."""
    model, mesh, x = nn.Linear(4, 4), ctx.device_mesh((2, 2), ("outer", "inner")), torch.ones(1, 4)
    fully_shard(model, strategy=ShardingStrategy.HYBRID_FULL_SHARD, device_mesh=mesh, sync_module_states=True)
    with torch.no_grad():
        before = model(x)
        for p in model.parameters():
            by_pointer(p).mul_(2)
        flatshard.reshard(model)
        torch.testing.assert_close(model(x), 2 * before)


@ranks(4)
def test_collectives_of_a_mesh_go_over_both_axes(ctx):
    """An average is over all ranks, and values are exact where the collectives of both axes are."""
    mesh = ctx.device_mesh((2, 2), ("outer", "inner"))
    quantized, plain = flatshard.comm.QuantizedCollectives(), flatshard.comm.builtin_collectives
    weight = torch.linspace(-1, 1, 4096).view(64, 64)
    for approximate in ("outer", "inner"):
        ctx.note(approximate)
        group = mesh.get_group(approximate)
        model = nn.Linear(64, 64, bias=False)
        model.weight.data.copy_(weight)
        fully_shard(
            model,
            strategy=ShardingStrategy.HYBRID_FULL_SHARD,
            device_mesh=mesh,
            collectives=lambda g, device, group=group: (quantized if g == group else plain)(g, device),
        )
        with torch.no_grad():
            torch.testing.assert_close(model(torch.eye(64)), weight.t(), rtol=0, atol=0.01)
        with flatshard.summon_full_params(model):
            torch.testing.assert_close(model.weight.data, weight, rtol=0, atol=0)
        handle = units_below(model)[0].handle
        number = torch.full((8,), float(ctx.rank))
        handle.runtime.exact.all_reduce(number, handle.ranks.label).wait()
        torch.testing.assert_close(number, torch.full((8,), 1.5))
        used = torch.full((8,), -0.0)
        handle.runtime.exact.all_reduce(used, handle.ranks.label).wait()
        assert used.signbit().all(), "a parameter that no rank used"
