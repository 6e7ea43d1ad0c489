"""``reshard_after_forward=k``: backward's all-gathers among k ranks, from what they keep of their forward."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg as fake_pg
from event_lines import as_text, same_everywhere, sharded, train
from expecttest import assert_expected_inline
from models import Block, Net
from no_communication import NoCommunication
from on_ranks import ranks
from pairs import some
from parity import adamw, by_pointer, check_parity, full_params
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import CustomPolicy, MixedPrecision, ShardingStrategy, configure, describe, fully_shard
from flatshard._comm.groups import _timeout, subgroup
from flatshard._composable.find import units_below
from flatshard._trace import record_events
from flatshard.comm import QuantizedCollectives

OVER_2 = "all-gather over 2 "


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
        as_text(same_everywhere(pool.run(order, world_size=4))),
        """\
all-gather <root>           all-gather <root>
all-gather blocks.0         all-gather blocks.0
all-gather blocks.1         all-gather blocks.1
reshard blocks.0            reshard blocks.0
all-gather blocks.2         all-gather blocks.2
reshard blocks.1            reshard blocks.1
reshard blocks.2            reshard blocks.2
reshard <root>              -- backward
-- backward                 all-gather over 2 blocks.2
all-gather over 2 <root>    all-gather blocks.1
all-gather over 2 blocks.2  reshard blocks.2
all-gather over 2 blocks.1  reduce-scatter blocks.2
reshard blocks.2            all-gather over 2 blocks.0
reduce-scatter blocks.2     reshard blocks.1
all-gather over 2 blocks.0  reduce-scatter blocks.1
reshard blocks.1            reshard blocks.0
reduce-scatter blocks.1     reduce-scatter blocks.0
reshard blocks.0            reshard <root>
reduce-scatter blocks.0     reduce-scatter <root>
reshard <root>
reduce-scatter <root>""",
    )


class Tied(nn.Module):
    """Blocks used twice and under a checkpoint, a head tied to a unit further in, a frozen weight."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.inner[1].weight.requires_grad_(False)
        self.head = nn.Linear(5, 5, bias=False)
        self.head.weight = self.inner[0].weight
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner[0](x))
        x = self.inner[1](x) + checkpoint(self.inner[2], x, use_reentrant=self.reentrant)
        return self.head(self.inner[3](torch.tanh(self.inner[3](x))))


def parity(ctx, how: str, reentrants: list[bool]) -> None:
    arguments: dict[str, Any] = {"process_group": ctx.group}
    if how == "hybrid":
        arguments = {"process_group": (ctx.group, ctx.alone), "strategy": ShardingStrategy.HYBRID_SHARD}
    elif how == "grad_op":  # an int frees what the strategy would keep
        arguments["strategy"] = ShardingStrategy.SHARD_GRAD_OP
    elif how == "no_prefetch":
        arguments |= {"backward_prefetch": None, "forward_prefetch": False}
    elif how == "kept_cast":
        arguments["mixed_precision"] = MixedPrecision(param_dtype=torch.float64, keep_cast_shard=True)

    def steps(model: nn.Module, inputs: torch.Tensor, scale: float) -> torch.Tensor:
        """Two forwards before two backwards, an evaluation between, and one graph run twice."""
        first = model(inputs).square().mean()
        second = model(inputs.flip(1)).square().mean()
        (first * scale).backward(retain_graph=True)
        with torch.no_grad():
            model(inputs)
        (second * scale).backward()
        (first * scale).backward()
        return first.detach()

    for reentrant in reentrants:
        check_parity(
            ctx,
            lambda reentrant=reentrant: Tied(reentrant),
            lambda step, n: torch.randn(n, 5),
            steps=2,
            shard=lambda m, g: fully_shard(m, policy={nn.Linear}, reshard_after_forward=2, **arguments),
            loss_fn=lambda out, _: out.square().mean(),
            train=steps,
            oracle="slices",
            dtype=torch.float32 if how == "kept_cast" else torch.float64,
            rtol=1e-5 if how == "kept_cast" else None,
        )


HOW = ["plain", "hybrid", "grad_op", "no_prefetch", "kept_cast"]


@pytest.mark.parametrize("how", HOW)
def test_parity(pool, how):
    pool.run(parity, how, some((False, True), 1, turn=HOW.index(how)), world_size=4)


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


class Oops(Exception):
    pass


def raise_oops(*args: Any) -> None:
    raise Oops


def sharded_like(ctx) -> nn.Module:
    other = sharded(ctx, Net(), reshard_after_forward=2)
    train(other)
    return other


@ranks(4)
def test_exceptions(ctx):
    model = sharded(ctx, Net(), reshard_after_forward=2)
    optimizer = adamw(model.parameters())
    events = train(model)
    model.zero_grad()
    for where in ("forward", "backward", "step"):
        if where == "forward":
            handle = model.blocks[2].register_forward_pre_hook(raise_oops)
            with pytest.raises(Oops):
                model(torch.ones(2, 4))
            handle.remove()
        elif where == "backward":
            loss = model.blocks[1](model.blocks[0](torch.ones(2, 4)))
            loss.register_hook(raise_oops)
            with pytest.raises(Oops):
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
        assert train(model) == train(sharded_like(ctx))
        optimizer.step()
    assert events


@ranks(4)
def test_values(ctx):
    """Changes that cannot be noticed: backward has the values of the last forward."""
    torch.manual_seed(0)
    model = sharded(ctx, Net(), reshard_after_forward=2)
    plain = Net()
    for loop in range(2):
        whole = full_params(model)
        for name, p in plain.named_parameters():
            p.data.copy_(whole[name])
        first = model(torch.ones(2, 4)).square().sum()
        for p in model.parameters():
            by_pointer(p).mul_(1.5)
        if loop:
            with torch.no_grad():
                model(torch.ones(2, 4))
        else:
            model(torch.ones(2, 4)).square().sum().backward()
            for p in plain.parameters():
                p.data.mul_(1.5)
            plain(torch.ones(2, 4)).square().sum().backward()
            with flatshard.summon_full_params(model, with_grads=True):
                for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(p.grad, q.grad)
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
    """Made once, also where each rank knows its own group only."""
    made = []
    original = dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        made.append(args[0])
        return original(*args, **kwargs)

    dist.new_group = new_group
    try:
        one = sharded(ctx, Net(), reshard_after_forward=2)
        before = len(made)
        two = sharded(ctx, Net(), reshard_after_forward=2)
        configure(sharded(ctx, Net()), reshard_after_forward=2)
        assert len(made) == before
        assert units_below(one)[0].handle.source.runtime.group is units_below(two)[0].handle.source.runtime.group
        assert units_below(one)[0].handle.source.runtime.rank == ctx.rank % 2
        mesh = init_device_mesh("cpu", (2, 2))
        for _ in range(2):  # each rank knows the ranks of its own group only
            before = len(made)
            for dim in (0, 1):
                alone = subgroup(mesh.get_group(dim), 1, torch.device("cpu"))
                assert dist.get_process_group_ranks(alone) == [ctx.rank]
        assert len(made) == before
    finally:
        dist.new_group = original


@ranks(4)
def test_groups_of_several_backends(ctx):
    """Those of a group with another backend are others: a model on CPU and one on a device don't share them."""
    cpu = torch.device("cpu")
    other = dist.new_group(list(range(4)), backend="cpu:gloo")
    one, two = subgroup(ctx.group, 2, cpu), subgroup(other, 2, cpu)
    assert one is not two
    assert dist.get_process_group_ranks(one) == dist.get_process_group_ranks(two)
    assert subgroup(ctx.group, 2, cpu) is one
    assert subgroup(other, 2, cpu) is two


def test_a_process_group_written_in_python_may_know_no_timeout():
    assert _timeout(dist.ProcessGroup(0, 1), torch.device("cpu")) is None


@ranks(3, 4)
def test_refusals(ctx):
    k = 2 if ctx.world_size == 3 else 3
    message = (
        f"reshard_after_forward={k} does not divide the {ctx.world_size} ranks that the parameters are sharded over: pass "
        f"one of {[n for n in (1, 2, 3, 4) if ctx.world_size % n == 0]}, True or False".replace("[", r"\[")
    )
    model = Net()
    with pytest.raises(ValueError, match=message):
        sharded(ctx, model, reshard_after_forward=k)
    assert not units_below(model)
    policy = CustomPolicy(lambda m: isinstance(m, Block) and {"reshard_after_forward": k})
    with pytest.raises(ValueError, match=message):
        sharded(ctx, model, policy)
    sharded(ctx, model)
    with pytest.raises(ValueError, match="unit '<root>': " + message):
        configure(model, reshard_after_forward=k)
    for value in (0, -2):
        with pytest.raises(ValueError, match=f"reshard_after_forward={value} does not divide"):
            configure(model, reshard_after_forward=value)
    with pytest.raises(ValueError, match="reshard_after_forward=3 has no meaning with NO_SHARD"):
        sharded(ctx, Net(), strategy=ShardingStrategy.NO_SHARD, reshard_after_forward=3)
    train(model)


def test_fake_group():
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=5, world_size=8)
    try:
        model = fully_shard(Net(), policy={Block}, reshard_after_forward=4)
        with record_events() as events:
            model(torch.ones(2, 4)).sum().backward()
        assert sum(e.startswith("all-gather over 4 ") for e in events) == 4
        assert units_below(model)[0].handle.source.runtime.rank == 1
    finally:
        dist.destroy_process_group()
