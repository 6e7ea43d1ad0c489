"""``reshard_after_forward=k``: backward gathers among k ranks, from shards that they keep of the forward."""

import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from event_lines import as_text, same_everywhere, sharded, train
from expecttest import assert_expected_inline
from models import Block, Net
from no_communication import NoCommunication
from on_ranks import ranks
from parity import by_pointer, check_same_gradients, twins
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flatshard import CustomPolicy, MixedPrecision, configure, describe, fully_shard
from flatshard._base.trace import record_events
from flatshard._composable.construct.groups import subgroup
from flatshard._composable.find import units_below
from flatshard.comm import QuantizedCollectives

OVER_2 = "all-gather over 2 "
CPU = torch.device("cpu")


def gathers_over_2(events: list[str]) -> list[str]:
    return [e.removeprefix(OVER_2) for e in events if e.startswith(OVER_2)]


def kept(model: nn.Module) -> int:
    return sum(s.nbytes for u in units_below(model) if u.handle.source is not None for s in u.handle.source.kept)


def order(ctx) -> list[list[str]]:
    def second_step(model: nn.Module) -> list[str]:
        return [train(model), train(model)][1]

    model, other = sharded(ctx, Net(), reshard_after_forward=2), sharded(ctx, Net())
    events = second_step(model)
    configure(other, reshard_after_forward=2)
    assert second_step(other) == events
    assert "FULL_SHARD, reshard_after_forward=2" in str(describe(other))
    configure(other.blocks[1], reshard_after_forward=True)
    configure(other, reshard_after_forward=None, recurse=False)
    by_policy = Net()
    policy = CustomPolicy(lambda m: isinstance(m, Block) and {"reshard_after_forward": m is by_policy.blocks[1] or 2})
    mixed = second_step(other)
    assert second_step(sharded(ctx, by_policy, policy)) == mixed
    for same, value in ((1, False), (4, True)):
        configure(model, reshard_after_forward=same)
        assert {u.reshard_after_forward for u in describe(model).units} == {value}
        assert second_step(model) == second_step(sharded(ctx, Net(), reshard_after_forward=value))
    return [events, mixed]


def test_order(pool):
    assert_expected_inline(
        as_text(same_everywhere(pool.run(order, world_size=4)), "all-gather"),
        """\
all-gather <root>           all-gather <root>
all-gather blocks.0         all-gather blocks.0
all-gather blocks.1         all-gather blocks.1
all-gather blocks.2         all-gather blocks.2
-- backward                 -- backward
all-gather over 2 <root>    all-gather over 2 blocks.2
all-gather over 2 blocks.2  all-gather blocks.1
all-gather over 2 blocks.1  all-gather over 2 blocks.0
all-gather over 2 blocks.0""",
    )


@ranks(4)
def test_memory(ctx):
    for dtype in (torch.bfloat16, torch.complex64):  # complex64 travels as bytes
        mixed = MixedPrecision(param_dtype=dtype) if dtype is torch.bfloat16 else None
        model = sharded(ctx, Net() if mixed else Net().to(dtype), reshard_after_forward=2, mixed_precision=mixed)
        x = torch.ones(2, 4, dtype=torch.float32 if mixed else dtype)
        units = units_below(model)
        half = sum(u.handle.memory.nbytes for u in units) // 2
        losses = [model(x).abs().sum() for _ in range(2)]  # same parameters: kept once
        assert kept(model) == half
        assert sum(b.unsharded.nbytes for u in units for b in u.handle.flats) == 0
        losses[0].backward(retain_graph=True)
        assert kept(model) == 0
        with record_events() as events:
            for each in losses:
                each.backward()
        assert not gathers_over_2(events)  # the kept shards serve one backward
        with torch.no_grad():
            model(x)
        assert kept(model) == 0
        del losses, each
        loss = model(x).abs().sum()
        assert kept(model) == half
        del loss
        gc.collect()
        assert kept(model) == 0  # no backward will follow


@ranks(4)
def test_values(ctx):
    """Backward misses changes that leave no trace: it uses the last forward's values."""
    plain, model = twins(ctx, Net, {Block}, torch.float32, reshard_after_forward=2)
    x = torch.ones(2, 4)
    first = model(x).square().sum()
    for m in (plain, model):
        for p in m.parameters():
            by_pointer(p).mul_(1.5)
        m(x).square().sum().backward()
    check_same_gradients(model, plain, rtol=1e-5)
    del first


@ranks(4)
def test_collectives(ctx):
    """Quantized collectives pass their values on exactly, and collectives that skip communication skip it here too."""
    model = fully_shard(Net(), policy={Block}, reshard_after_forward=2, collectives=QuantizedCollectives())
    seen: list[torch.Tensor] = []
    linear = model.blocks[1].linear

    def note(*args: Any) -> None:
        seen.append(linear.weight.detach().clone())

    linear.register_forward_hook(note)
    out = model(torch.ones(2, 4))
    linear.register_full_backward_pre_hook(note)
    with record_events() as events:
        out.sum().backward()
    assert "blocks.1" in gathers_over_2(events)
    assert torch.equal(seen[0], seen[-1])
    assert units_below(model)[1].handle.source.runtime.collectives.exact
    with pytest.warns(RuntimeWarning, match="are left out"):
        model = fully_shard(Net(), policy={Block}, reshard_after_forward=2, collectives=NoCommunication())
    assert type(units_below(model)[0].handle.source.runtime.collectives).__name__ == "_NoCommunication"
    train(model)


@ranks(4)
def test_groups(ctx):
    """Groups are created once per backend, even if each rank knows only its own group."""
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        one = sharded(ctx, Net(), reshard_after_forward=2)
        before = made.call_count
        two = sharded(ctx, Net(), reshard_after_forward=2)
        configure(sharded(ctx, Net()), reshard_after_forward=2)
        assert made.call_count == before
        assert units_below(one)[0].handle.source.runtime.group is units_below(two)[0].handle.source.runtime.group
        assert units_below(one)[0].handle.source.runtime.rank == ctx.rank % 2
        mesh = init_device_mesh("cpu", (2, 2))
        for _ in range(2):
            before = made.call_count
            for dim in (0, 1):
                alone = subgroup(mesh.get_group(dim), 1, CPU)
                assert dist.get_process_group_ranks(alone) == [ctx.rank]
        assert made.call_count == before
    other = dist.new_group(list(range(4)), backend="cpu:gloo")
    first, second = subgroup(ctx.group, 2, CPU), subgroup(other, 2, CPU)
    assert first is not second
    assert dist.get_process_group_ranks(first) == dist.get_process_group_ranks(second)
    assert (subgroup(ctx.group, 2, CPU), subgroup(other, 2, CPU)) == (first, second)
