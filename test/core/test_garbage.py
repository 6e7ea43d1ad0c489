"""A dropped sharded model is freed: its reference cycles consist of Python objects, which the collector sees."""

import copy
import functools
import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from models import Block, Net
from on_ranks import ranks
from recording import Recording
from torch import nn

import flatshard
from flatshard._composable.state import unit_of


def make_and_train(group: Any, copied: bool, last: str) -> list[weakref.ref]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8))
    flatshard.fully_shard(model, policy={nn.Linear}, process_group=group)
    model(torch.randn(2, 8)).sum().backward()
    model = copy.deepcopy(model) if copied else model
    out = model(torch.randn(2, 8))  # creates records for a backward
    if last == "backward":
        out.sum().backward()
    unit = unit_of(model[0])
    return [weakref.ref(x) for x in (model, model[0], unit, unit.handle, unit.handle.flats[0])]


@ranks(2)
def test_dropped_models_are_freed(ctx):
    for copied, last in ((False, "backward"), (True, "backward"), (False, "forward")):
        references = make_and_train(ctx.group, copied, last)
        gc.collect()
        assert [r() for r in references] == [None] * len(references)


def test_a_skipped_unit_keeps_no_tensors(fake_group):
    """A skipped unit keeps no frame of its forward either. The graph frees its input; the collector might run late."""
    model = flatshard.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), policy={nn.Linear})
    gc.collect()
    gc.disable()
    try:
        for is_training in (True, False):
            x = torch.ones(2, 8)
            reference = weakref.ref(x)
            with torch.set_grad_enabled(is_training):
                result = flatshard.skip(model, x)
            if is_training:
                result.sum().backward()
            del x, result
            assert reference() is None
    finally:
        gc.enable()


class Meeting(Recording):
    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        dist.barrier(group)


def train_with_static_buffers(group: Any) -> nn.Module:
    """Train with a changing order of blocks, so that a prefetched unit may find its buffer in use."""
    model = Net(6, width=4, inputs=4, outputs=4)
    flatshard.fully_shard(model, policy={Block}, process_group=group, static_buffers=True)
    for order in (range(6), reversed(range(6)), reversed(range(6))):
        model.order = [*order]
        model(torch.ones(2, 4)).sum().backward()
    return model


def norm_over_two_groups(group: Any, other: Any) -> nn.Module:
    """Clip over two groups: the groups' numbers decide which is reduced over first."""
    first, second = (flatshard.fully_shard(nn.Linear(3, 3), process_group=each) for each in (other, group))
    both = nn.Sequential(first, second)
    both(torch.ones(2, 3)).sum().backward()
    flatshard.optim.clip_grad_norm_(both, 1.0)
    return second


def retain_a_graph_and_build_one(group: Any) -> nn.Module:
    """Run a backward that builds a graph and one that retains such a graph: units stay unsharded after both."""
    for builds in (False, True):
        model = flatshard.fully_shard(nn.Linear(3, 3), process_group=group)
        x = torch.ones(2, 3, requires_grad=True)
        loss = model(x).square().sum()
        if builds:
            torch.autograd.grad(loss, x, create_graph=True)
        else:
            loss.backward(retain_graph=True)
            loss.backward()
    return model


def accumulate(group: Any) -> nn.Module:
    """Return a model that is dropped before its last microbatch."""
    model = flatshard.fully_shard(nn.Linear(3, 3), process_group=group)
    model(torch.ones(2, 3)).sum().backward()
    with flatshard.no_sync(model):
        model(torch.ones(2, 3)).sum().backward()
    return model


def with_collectives_that_meet(group: Any) -> nn.Module:
    """Shard with a factory of collectives that is called once for all models of the group."""
    return flatshard.fully_shard(nn.Linear(3, 3), process_group=group, collectives=Meeting)


@ranks(4)
def test_ranks_collect_garbage_at_different_times(ctx):
    """Models that live longer on some ranks, here on all but rank 0, do not change the order of collectives."""
    other, kept = dist.new_group(), []  # all of the pool's ranks must call this
    makers = [
        train_with_static_buffers,
        functools.partial(norm_over_two_groups, other=other),
        retain_a_graph_and_build_one,
        accumulate,
        with_collectives_that_meet,
    ]
    for make in (maker for maker in makers for _ in range(3)):
        ctx.note(str(make))
        model = make(ctx.group)
        kept += [model] if ctx.rank else []
        del model
        gc.collect()


@ranks(4)
def test_groups_that_were_connected_stay_so(ctx):
    """Groups share an order even if the units that connected them are freed on some ranks, here on two."""
    mesh = ctx.device_mesh((2, 2), ("replicate", "shard"))
    groups = mesh.get_group(1), mesh.get_group(0)
    between = flatshard.fully_shard(nn.Linear(3, 3), device_mesh=mesh, strategy=flatshard.ShardingStrategy.HYBRID_SHARD)
    kept = between if ctx.rank in (1, 2) else None
    del between
    gc.collect()
    first, second = (flatshard.fully_shard(nn.Linear(3, 3), process_group=group) for group in groups)
    assert unit_of(first).context is unit_of(second).context
    del kept
