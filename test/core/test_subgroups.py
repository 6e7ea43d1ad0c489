"""``reshard_after_forward=k``: backward's all-gathers among k ranks, from what they keep of their forward."""

from __future__ import annotations

import copy
import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg as fake_pg
from event_lines import as_text, same_everywhere, sharded, train
from expecttest import assert_expected_inline
from models import Block, Net
from no_communication import NoCommunication
from on_ranks import ranks
from parity import by_pointer, check_same_gradients, twins
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import flatshard
from flatshard import CustomPolicy, MixedPrecision, ShardingStrategy, configure, describe, fully_shard
from flatshard._composable.construct.groups import _timeout, subgroup
from flatshard._composable.find import units_below
from flatshard._trace import record_events
from flatshard.comm import QuantizedCollectives

OVER_2 = "all-gather over 2 "
CPU = torch.device("cpu")


def gathers_over_2(events: list[str]) -> list[str]:
    return [e.removeprefix(OVER_2) for e in events if e.startswith(OVER_2)]


def kept(model: nn.Module) -> int:
    return sum(s.nbytes for u in units_below(model) if u.handle.source is not None for s in u.handle.source.kept)


def order(ctx) -> list[list[str]]:
    model = sharded(ctx, Net(), reshard_after_forward=2)
    train(model)
    events = train(model)
    other = sharded(ctx, Net())
    configure(other, reshard_after_forward=2)
    train(other)
    assert train(other) == events
    assert "FULL_SHARD, reshard_after_forward=2" in str(describe(other))
    configure(other.blocks[1], reshard_after_forward=True)
    configure(other, reshard_after_forward=None, recurse=False)
    by_policy = Net()
    policy = CustomPolicy(lambda m: isinstance(m, Block) and {"reshard_after_forward": m is by_policy.blocks[1] or 2})
    sharded(ctx, by_policy, policy)
    train(other), train(by_policy)
    mixed = train(other)
    assert train(by_policy) == mixed
    for same, value in ((1, False), (4, True)):
        configure(model, reshard_after_forward=same)
        assert {u.reshard_after_forward for u in describe(model).units} == {value}
        train(model)
        whole = sharded(ctx, Net(), reshard_after_forward=value)
        train(whole)
        assert train(model) == train(whole)
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
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):  # the last travels as bytes
        model = Net() if dtype is not torch.complex64 else Net().to(dtype)
        mixed = MixedPrecision(param_dtype=dtype) if dtype is torch.bfloat16 else None
        sharded(ctx, model, reshard_after_forward=2, mixed_precision=mixed)
        x = torch.ones(2, 4, dtype=torch.float32 if mixed else dtype)
        units = units_below(model)
        whole = sum(u.handle.unsharded_nbytes for u in units)
        assert whole

        def resident(units=units) -> int:
            return sum(b.unsharded.nbytes for u in units for b in u.handle.flats)

        def run(model=model, x=x) -> torch.Tensor:
            return model(x).abs().sum()

        loss = run()
        assert kept(model) == whole // 2
        assert resident() == 0
        other = run()  # of the same parameters: kept once
        assert kept(model) == whole // 2
        loss.backward(retain_graph=True)
        assert (kept(model), resident()) == (0, 0)
        with record_events() as events:
            loss.backward()
            other.backward()
        assert not gathers_over_2(events)  # used once
        with torch.no_grad():
            run()
        assert kept(model) == 0
        del other
        loss = run()
        assert kept(model) == whole // 2
        del loss
        gc.collect()
        assert kept(model) == 0  # no backward will come
        loss = run()
        with flatshard.summon_full_params(model):
            assert kept(model) == 0 or mixed  # which copies, and gathers nothing over the training's copy
        with record_events() as events:
            loss.backward()
        assert bool(gathers_over_2(events)) == bool(mixed)
        model.zero_grad()
        loss = run()
        copied = copy.deepcopy(model)
        assert kept(copied) == 0
        flatshard.unshard(model)
        flatshard.reshard(model)
        assert kept(model) == (whole - units[0].handle.unsharded_nbytes) // 2
        loss.backward()
        assert kept(model) == 0


def raise_oops(*args: Any) -> None:
    raise ZeroDivisionError


@ranks(4)
def test_exceptions(ctx):
    """Nothing is kept of a step that failed, and the next ones are as ever."""
    model = sharded(ctx, Net(), reshard_after_forward=2)
    usual = [train(model), train(model)]
    for where in ("forward", "backward", "step"):
        if where == "forward":
            handle = model.blocks[2].register_forward_pre_hook(raise_oops)
            with pytest.raises(ZeroDivisionError):
                model(torch.ones(2, 4))
            handle.remove()
        elif where == "backward":
            loss = model.blocks[1](model.blocks[0](torch.ones(2, 4)))
            loss.register_hook(raise_oops)
            with pytest.raises(ZeroDivisionError):
                loss.sum().backward()
            del loss
        else:
            loss = model(torch.ones(2, 4)).sum()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1)
            with pytest.raises(RuntimeError, match="were changed in place between its forward and its backward"):
                loss.backward()
            del loss
            flatshard.recover(model)  # as the next forward does
        gc.collect()
        assert kept(model) == 0
        model.zero_grad()
        train(model)
        assert train(model) == usual[1]


@ranks(4)
def test_values(ctx):
    """Of changes that cannot be noticed backward knows nothing: it has the values of the last forward."""
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
    """What approximates hands its values on exactly; what leaves communication out leaves it out here too."""
    torch.manual_seed(0)
    model = Net()
    fully_shard(model, policy={Block}, reshard_after_forward=2, collectives=QuantizedCollectives())
    seen: list[torch.Tensor] = []
    block = model.blocks[1]

    def note(*args: Any) -> None:
        seen.append(block.linear.weight.detach().clone())

    block.linear.register_forward_hook(note)
    out = model(torch.ones(2, 4))
    block.linear.register_full_backward_pre_hook(note)
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
    """Made once, also where each rank knows its own group only, for each backend."""
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


def test_a_process_group_written_in_python_may_know_no_timeout():
    assert _timeout(dist.ProcessGroup(0, 1), CPU) is None


def test_refusals(world):
    for size, k, possible in ((3, 2, r"\[1, 3\]"), (4, 3, r"\[1, 2, 4\]"), (4, -2, r"\[1, 2, 4\]")):
        world(size)
        message = f"={k} does not divide the {size} ranks that the parameters are sharded over: pass one of {possible}"
        model = Net()
        with pytest.raises(ValueError, match=message):
            fully_shard(model, reshard_after_forward=k)
        with pytest.raises(ValueError, match=message):
            fully_shard(
                model, policy=CustomPolicy(lambda m, k=k: isinstance(m, Block) and {"reshard_after_forward": k})
            )
        assert not units_below(model)
        fully_shard(model, policy={Block})
        with pytest.raises(ValueError, match=f"unit '<root>': reshard_after_forward{message}"):
            configure(model, reshard_after_forward=k)
        with pytest.raises(ValueError, match=f"reshard_after_forward={k} has no meaning with NO_SHARD"):
            fully_shard(Net(), strategy=ShardingStrategy.NO_SHARD, reshard_after_forward=k)
        train(model)


def test_a_rank_in_the_midst_of_many():
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=5, world_size=8)
    try:
        model = fully_shard(Net(), policy={Block}, reshard_after_forward=4)
        with record_events() as events:
            model(torch.ones(2, 4)).sum().backward()
        assert sum(e.startswith("all-gather over 4 ") for e in events) == 4
        assert units_below(model)[0].handle.source.runtime.rank == 1
    finally:
        dist.destroy_process_group()
