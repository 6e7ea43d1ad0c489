"""How long parameters stay unsharded, as the user says: ``reshard_after_forward`` at run time, and ``keep_unsharded``."""

from __future__ import annotations

import contextlib
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from event_lines import as_text, same_everywhere, sharded, train
from expecttest import assert_expected_inline
from models import Block, Net
from on_ranks import ranks
from parity import adamw, by_pointer, check_same_gradients, check_same_params, twins
from torch import Tensor, nn

import flatshard
from flatshard import (
    CustomPolicy,
    MixedPrecision,
    ShardingStrategy,
    configure,
    describe,
    fully_shard,
    keep_unsharded,
    register_forward_method,
    summon_full_params,
)
from flatshard._composable.features import whole_parameters
from flatshard._composable.find import units_below
from flatshard._composable.state import unit_of
from flatshard._handle.registrations import SHARDED
from flatshard._trace import record_events
from flatshard.tensors import ShardedParameter

STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)


def unsharded(model: nn.Module) -> list[str]:
    return [u.fqn for u in units_below(model) if not u.handle.is_sharded]


# -- reshard_after_forward ---------------------------------------------------------------------------------------------


def last_of_two(model: nn.Module) -> list[str]:
    train(model)
    return train(model)


def each_value(ctx) -> list[list[str]]:
    """Given at construction and set at run time: the same; and None is what the strategy says."""
    columns = []
    plain = {s: last_of_two(sharded(ctx, Net(), strategy=s)) for s in STRATEGIES[:2]}
    for strategy in STRATEGIES[:2]:
        model = sharded(ctx, Net(), strategy=strategy)
        for value in (True, False):
            configure(model, reshard_after_forward=value)
            events = last_of_two(model)
            assert events == last_of_two(sharded(ctx, Net(), strategy=strategy, reshard_after_forward=value))
            if strategy is ShardingStrategy.FULL_SHARD:
                columns.append(events)
            else:
                assert events == columns[not value]
        configure(model, reshard_after_forward=None)
        assert last_of_two(model) == plain[strategy]
    # All of SHARD_GRAD_OP keeps its parameters; FULL_SHARD keeps those of the outermost unit unless it is told not to.
    assert columns[1] == plain[ShardingStrategy.SHARD_GRAD_OP]
    assert columns[0] != plain[ShardingStrategy.FULL_SHARD]
    return columns


def test_reshard_after_forward(pool):
    columns = same_everywhere(pool.run(each_value))
    assert_expected_inline(
        as_text(columns, "all-gather"),
        """\
all-gather <root>    all-gather <root>
all-gather blocks.0  all-gather blocks.0
all-gather blocks.1  all-gather blocks.1
all-gather blocks.2  all-gather blocks.2
-- backward          -- backward
all-gather <root>
all-gather blocks.2
all-gather blocks.1
all-gather blocks.0""",
    )


def one_unit(ctx) -> list[str]:
    """Without ``recurse``; by the policy; and from the next forward on, not before."""
    model = sharded(ctx, Net())
    configure(model.blocks[1], reshard_after_forward=False)
    configure(model, reshard_after_forward=True, recurse=False)
    events = last_of_two(model)
    assert [u.reshard_after_forward for u in describe(model).units] == [True, None, False, None]
    assert "FULL_SHARD, reshard_after_forward=True" in str(describe(model))
    policy = CustomPolicy(lambda m: isinstance(m, Block) and {"reshard_after_forward": m is not by_policy.blocks[1]})
    by_policy = Net()
    sharded(ctx, by_policy, policy, reshard_after_forward=True)
    assert last_of_two(by_policy) == events
    loss = model(torch.ones(2, 4)).sum()
    assert unsharded(model) == ["blocks.1"]
    configure(model, reshard_after_forward=True)
    assert unsharded(model) == ["blocks.1"]
    loss.backward()
    assert "all-gather blocks.1" in train(model)[-10:]
    with torch.no_grad():
        configure(model, reshard_after_forward=False)
        model(torch.ones(2, 4))
        assert not unsharded(model)  # for no backward
    return [e for e in events if "gather" in e or "backward" in e]


def test_one_unit(pool):
    forward = ["<root>", "blocks.0", "blocks.1", "blocks.2"]
    expected = [f"all-gather {unit}" for unit in forward]
    expected += ["-- backward", *(f"all-gather {unit}" for unit in ("<root>", "blocks.2", "blocks.0"))]
    assert same_everywhere(pool.run(one_unit)) == expected


def test_what_is_no_value(fake_group):
    model = Net()
    for value, message in (
        (8, r"=8 does not divide the 2 ranks .*: pass one of \[1, 2\], True or False"),
        (0, "=0 does not divide"),
        ("yes", " must be True, False, None .as the strategy says. or a number of ranks"),
    ):
        with pytest.raises(ValueError, match=f"reshard_after_forward{message}"):
            fully_shard(model, reshard_after_forward=value)
        assert not units_below(model)
        other = fully_shard(Net(), policy=Block)
        with pytest.raises(ValueError, match=f"reshard_after_forward{message}"):
            configure(other, reshard_after_forward=value)
    with pytest.raises(ValueError, match=r"this Linear is part of unit 'blocks\.0', and not a unit itself"):
        configure(other.blocks[0].linear, reshard_after_forward=True)
    no_shard = ShardingStrategy.NO_SHARD
    with pytest.raises(ValueError, match="reshard_after_forward=True has no meaning with NO_SHARD"):
        fully_shard(model, strategy=no_shard, reshard_after_forward=True)
    policy = CustomPolicy(lambda m: isinstance(m, Block) and {"strategy": no_shard})
    fully_shard(model, policy=policy, strategy=ShardingStrategy.SHARD_GRAD_OP)
    with pytest.raises(ValueError, match=r"unit 'blocks\.0': reshard_after_forward=True has no meaning with NO_SHARD"):
        configure(model, reshard_after_forward=True)
    assert unit_of(model).config.reshard_after_forward is None
    configure(model, reshard_after_forward=False)
    configure(model, reshard_after_forward=True, recurse=False)


# -- keep_unsharded ----------------------------------------------------------------------------------------------------


def forwards(ctx) -> list[list[str]]:
    columns = []
    for guard in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        model = sharded(ctx, Net())
        expected = model(torch.ones(2, 4))
        with record_events() as events:
            with guard(), keep_unsharded(model):
                assert not unsharded(model)  # at first use, so that what is not used is not gathered
                for _ in range(10):
                    assert torch.equal(model(torch.ones(2, 4)), expected)
                    assert all(isinstance(p, ShardedParameter) for p in model.parameters())
                assert len(unsharded(model)) == 4
                events.append("-- exit")
            assert not unsharded(model)
        columns.append(events)
    return columns


def test_ten_forwards_are_one_gather(pool):
    columns = same_everywhere(pool.run(forwards))
    assert columns[0] == columns[1] == columns[2]
    units = ["<root>", "blocks.0", "blocks.1", "blocks.2"]
    expected = ["reshard <root>", *(f"all-gather {u}" for u in units), "-- exit", *(f"reshard {u}" for u in units)]
    assert columns[0] == expected


@ranks(2, 3)
def test_ranks_that_call_it_unequally_often(ctx):
    """As ranks do whose sequences end at different lengths. Afterwards they train together."""
    for guard in (torch.no_grad, torch.inference_mode):
        model = sharded(ctx, Net())
        with record_events() as events, guard(), keep_unsharded(model):
            for _ in range(1 + 3 * ctx.rank):
                model(torch.ones(2, 4))
        assert events.count("all-gather blocks.1") == 1
        assert not unsharded(model)
        model(torch.ones(2, 4)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@ranks(1, 2, 3)
def test_a_step_inside_is_noticed(ctx):
    """Numbers are those of training outside; a gather a step is left."""
    for strategy in STRATEGIES:
        plain, model = twins(ctx, Net, Block, strategy=strategy)
        optimizers = [adamw(m.parameters()) for m in (model, plain)]

        def step(model: nn.Module = model, plain: nn.Module = plain, optimizers: Any = optimizers) -> int:
            with record_events() as events:
                for m, optimizer in zip((model, plain), optimizers, strict=True):
                    for _ in range(2):
                        m(torch.ones(2, 4).double()).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return events.count("all-gather blocks.1")

        step()
        with keep_unsharded(model):
            gathers = [step(), step()]
            with keep_unsharded(model.blocks[1]):
                gathers.append(step())
        assert gathers == [0 if strategy is ShardingStrategy.NO_SHARD or ctx.world_size == 1 else 1] * 3
        step()
        check_same_params(model, plain)
        assert strategy is ShardingStrategy.NO_SHARD or not unsharded(model)


@ranks(2)
def test_on_entry_and_exit(ctx):
    """On entry nothing that an earlier forward left is trusted, but for what ``unshard`` gathered; on exit all is freed.
    ``unshard`` does not trust it either.
    """
    x = torch.ones(2, 4)
    for strategy in STRATEGIES[:2]:
        model = sharded(ctx, Net(), strategy=strategy)
        model(x)  # the outermost unit stays unsharded for a backward
        for p in model.parameters():
            by_pointer(p).mul_(2)
        with torch.no_grad():
            expected = model(x)
            model.train()
        out = model(x)
        for p in model.parameters():
            by_pointer(p).mul_(0.5)
        with torch.no_grad(), keep_unsharded(model):
            assert not torch.equal(model(x), expected)
        for p in model.parameters():
            by_pointer(p).mul_(2)
        assert not unsharded(model)
        out.sum().backward()  # gathers again
        assert not unsharded(model)
        for p in model.parameters():
            by_pointer(p).mul_(0.5)
        model(x)
        for p in model.parameters():
            by_pointer(p).mul_(2)
        flatshard.unshard(model, recurse=True)
        with torch.no_grad(), record_events() as events, keep_unsharded(model):
            assert torch.equal(model(x), expected)
        assert not [e for e in events if "gather" in e]
        assert not unsharded(model)
        flatshard.unshard(model, recurse=True)
        with torch.no_grad():
            for p in [p for u in units_below(model) for b in u.handle.flats for p in b.params]:
                p.mul_(0.5)
            with keep_unsharded(model):
                assert not torch.equal(model(x), expected)


@ranks(2)
def test_parts_of_a_model(ctx):
    x = torch.ones(2, 4)
    model = sharded(ctx, Net())
    with torch.no_grad():
        with keep_unsharded(model, recurse=False):
            model(x)
            assert unsharded(model) == [""]
        with keep_unsharded(model.blocks):  # no unit itself
            model(x)
            with keep_unsharded(model.blocks[0]):
                model(x)
                assert unsharded(model) == ["blocks.0", "blocks.1", "blocks.2"]
            assert unsharded(model) == ["blocks.0", "blocks.1", "blocks.2"]
            flatshard.reshard(model)  # at once; the next forward gathers again
            assert not unsharded(model)
            model(x)
            assert unsharded(model) == ["blocks.0", "blocks.1", "blocks.2"]
        with pytest.raises(ZeroDivisionError), keep_unsharded(model):
            model(x).new_zeros(()).fill_(1 / 0)
        assert not unsharded(model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(4, 4)
        self.inner = Block()
        self.inner.linear.weight = self.front.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.front(x))

    def generate(self, x: Tensor) -> Tensor:
        with keep_unsharded(self):
            for _ in range(5):
                x = self(x)
        return x


@ranks(2)
def test_inside_a_forward_of_the_unit(ctx):
    model = sharded(ctx, Tied())
    register_forward_method(model, "generate")
    with torch.no_grad(), keep_unsharded(model.inner):  # with the owner of its tied parameter
        model(torch.ones(2, 4))
        assert unsharded(model) == ["", "inner"]
    with record_events() as events:
        model.generate(torch.ones(2, 4))
    assert unsharded(model) == [""]  # for backward
    assert events == ["all-gather <root>", "all-gather inner", "reshard inner"]


@ranks(2)
def test_replaced_parameters(ctx):
    x = torch.ones(2, 4)
    for change in (
        lambda m: setattr(m.blocks[0].linear.weight, "data", 2 * m.blocks[0].linear.weight.data),
        lambda m: m.blocks[0].linear.weight.data.mul_(2),
        lambda m: m.double().blocks[0].linear.weight.data.mul_(2),
        lambda m: m.blocks[0].linear.register_parameter("weight", nn.Parameter(2 * m.blocks[0].linear.weight.data)),
    ):
        model = sharded(ctx, Net())
        with keep_unsharded(model):
            before = model(x)
            change(model)
            x = x.to(next(model.parameters()).dtype)
            inside = model(x)
            assert not torch.equal(inside, before.to(inside.dtype))
        outside = model(x)
        assert torch.equal(inside, outside)
        outside.sum().backward()
        x = x.float()


@ranks(2)
def test_full_precision_in_eval(ctx):
    """Evaluation in the parameters' own dtype has copies of its own to keep."""
    x = torch.ones(2, 4)
    policy = MixedPrecision(param_dtype=torch.bfloat16, full_precision_in_eval=True)
    model = sharded(ctx, Net(), mixed_precision=policy)
    count = []
    before = whole_parameters.gather_full_precision
    counting = mock.patch.object(
        whole_parameters, "gather_full_precision", lambda *args: count.append(1) or before(*args)
    )
    model.eval()
    with counting, torch.no_grad():
        expected = model(x)
        count.clear()
        with keep_unsharded(model):
            for _ in range(5):
                assert torch.equal(model(x), expected)
            assert len(count) == 4
            for p in model.parameters():
                p.mul_(0)
            assert not model(x).any()
            assert len(count) == 8
            model.double()
            for p in model.parameters():
                p.data.add_(1)
            assert model(x.double()).any()
            assert len(count) == 12
        assert not any(u.claims for u in units_below(model))
    model.float().train()
    model(x).sum().backward()


def test_misuse(fake_group):
    model = fully_shard(Net(), policy=Block)
    with pytest.raises(ValueError, match="keep_unsharded: nothing in this Linear is sharded"):
        keep_unsharded(nn.Linear(2, 2)).__enter__()
    with pytest.raises(ValueError, match="keep_unsharded: this ModuleList is not a unit, but contains units"):
        keep_unsharded(model.blocks, recurse=False).__enter__()


# -- Who needs a unit's parameters, in orders that exceptions and nesting bring about ----------------------------------

X = torch.linspace(-1, 1, 8, dtype=torch.double).view(2, 4)


def check(model: nn.Module, plain: nn.Module) -> None:
    """That the model is as between two steps, and trains like the plain one."""
    for m in (model, plain):
        m.zero_grad()
        m(X).square().sum().backward()
    check_same_gradients(model, plain)
    for unit in units_below(model):
        assert not unit.claims
        assert unit.handle.registrations.shows is SHARDED


class Evaluating(nn.Module):
    """The inner unit uses the outer one's weight, and runs with gradients inside an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.inner = nn.Linear(4, 4, bias=False)
        self.inner.weight = self.weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = self.inner(x.requires_grad_())
            (grad,) = torch.autograd.grad(y.sum(), x)
        return (x @ self.weight) + grad.to(x)


@ranks(2)
def test_a_forward_with_gradients_inside_one_in_full_precision(ctx):
    policy = MixedPrecision(param_dtype=torch.bfloat16, full_precision_in_eval=True, cast_forward_inputs=True)
    model = fully_shard(Evaluating(), policy={nn.Linear}, process_group=ctx.group, mixed_precision=policy).eval()
    with torch.no_grad():
        assert torch.equal(model(X.float()), X.float() + 1)
        assert torch.equal(model(X.float()), X.float() + 1)
    for unit in units_below(model):
        assert not unit.claims
        assert unit.handle.registrations.shows is SHARDED


@ranks(2)
def test_two_threads(ctx):
    plain, model = twins(ctx, Net, {nn.Linear})
    _, other = twins(ctx, Net, {nn.Linear})
    started, go_on, found = threading.Event(), threading.Event(), []

    def stop(module: nn.Module, args: Any) -> None:
        started.set()
        assert go_on.wait(30)

    hook = model.head.register_forward_pre_hook(stop)
    thread = threading.Thread(target=lambda: found.append(model(X)))
    thread.start()
    try:
        assert started.wait(30)
        for each in (model, other):
            with pytest.raises(RuntimeError, match=r"unit 'head' is in a forward on another thread"):
                each(X)
    finally:
        go_on.set()
        thread.join(30)
    hook.remove()
    torch.testing.assert_close(found[0], plain(X))
    check(model, plain)
    check(other, plain)


@ranks(2)
def test_summon_inside_a_step(ctx):
    """It is refused in forward and in backward, and nothing has happened. The cure reads another layer in a forward."""
    plain, model = twins(ctx, Net, {nn.Linear})
    seen: list[Tensor] = []

    def refused(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="of unit 'head' inside a forward, a backward"):
            summon_full_params(model.head).__enter__()

    def cured(*_: Any) -> None:
        flatshard.unshard(model.head)
        seen.append(model.head.weight.detach().clone())
        flatshard.reshard(model.head)

    hooks = [model.blocks[0].register_forward_pre_hook(hook) for hook in (refused, cured)]
    hooks.append(model.front.register_full_backward_hook(refused))
    model(X).sum().backward()
    assert torch.equal(seen[0], plain.head.weight)
    for hook in hooks:
        hook.remove()
    check(model, plain)
