"""How long parameters stay unsharded: ``reshard_after_forward`` at run time, and ``keep_unsharded``."""

import contextlib
import copy
from typing import Any
from unittest import mock

import pytest
import torch
from clean import check_clean
from event_lines import sharded, train
from models import Block, Net
from on_ranks import ranks
from parity import adamw, by_pointer, check_same_gradients, check_same_params, step_all, twins
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
    summon_full_params,
)
from flatshard._base.trace import record_events
from flatshard._composable.features import full_parameters
from flatshard.tensors import ShardedParameter

STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)


def unsharded(model: nn.Module) -> list[str]:
    return [u.fqn for u in describe(model).units if u.state == "unsharded"]


def last_of_two(model: nn.Module) -> list[str]:
    train(model)
    return train(model)


@ranks(2)
def test_reshard_after_forward(ctx):
    """Values set at construction and at run time have the same effect, and None uses the strategy's."""
    full, grad_op = (last_of_two(sharded(ctx, Net(), strategy=s)) for s in STRATEGIES[:2])
    for strategy, plain in zip(STRATEGIES[:2], (full, grad_op), strict=True):
        model, steps = sharded(ctx, Net(), strategy=strategy), {}
        for value in (True, False):
            configure(model, reshard_after_forward=value)
            steps[value] = last_of_two(model)
            assert steps[value] == last_of_two(sharded(ctx, Net(), strategy=strategy, reshard_after_forward=value))
        assert steps[False] == grad_op  # False keeps all parameters; FULL_SHARD keeps the root's
        assert [e for e in steps[True] if "<root>" not in e] == [e for e in full if "<root>" not in e]
        assert [events.count("all-gather <root>") for events in (full, steps[True])] == [1, 2]
        configure(model, reshard_after_forward=None)
        assert last_of_two(model) == plain


def test_what_is_no_value(fake_group):
    """Without ``recurse``, or if a policy sets it, the value applies to one unit."""
    model, other = Net(), fully_shard(Net(), policy=Block)
    for value, message in (
        (8, r"=8 does not divide the 2 ranks .*: pass one of \[1, 2\], True or False"),
        ("yes", " must be True, False, None .as the strategy says. or a number of ranks"),
    ):
        for call in (fully_shard, configure):
            with pytest.raises(ValueError, match=f"reshard_after_forward{message}"):
                call(model if call is fully_shard else other, reshard_after_forward=value)
        assert type(model.head.weight) is nn.Parameter
    with pytest.raises(ValueError, match=r"this Linear is part of unit 'blocks\.0', and not a unit itself"):
        configure(other.blocks[0].linear, reshard_after_forward=True)
    no_shard = ShardingStrategy.NO_SHARD
    with pytest.raises(ValueError, match="reshard_after_forward=True has no meaning with NO_SHARD"):
        fully_shard(model, strategy=no_shard, reshard_after_forward=True)
    own = {model.blocks[0]: {"strategy": no_shard}, model.blocks[1]: {"reshard_after_forward": False}}
    fully_shard(model, policy=CustomPolicy(lambda m: isinstance(m, Block) and own.get(m, True)))
    with pytest.raises(ValueError, match=r"unit 'blocks\.0': reshard_after_forward=True has no meaning with NO_SHARD"):
        configure(model, reshard_after_forward=True)
    configure(model, reshard_after_forward=True, recurse=False)
    assert [u.reshard_after_forward for u in describe(model).units] == [True, None, False, None]


@ranks(2)
def test_ten_forwards_are_one_gather(ctx):
    units = ["<root>", "blocks.0", "blocks.1", "blocks.2"]
    for guard in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        model = sharded(ctx, Net())
        expected = model(torch.ones(2, 4))
        with record_events() as events:
            with guard(), keep_unsharded(model):
                assert not unsharded(model)  # gathers at first use, so that unused units are never gathered
                for _ in range(3):
                    assert torch.equal(model(torch.ones(2, 4)), expected)
                    assert all(isinstance(p, ShardedParameter) for p in model.parameters())
                events.append("-- exit")
            assert not unsharded(model)
        gathers, frees = ([f"{verb} {u}" for u in units] for verb in ("all-gather", "reshard"))
        assert events == ["reshard <root>", *gathers, "-- exit", *frees]


@ranks(1, 2, 3)
def test_a_step_inside_is_noticed(ctx):
    """Numbers equal those of training outside, and each unit is gathered once per step."""
    for strategy in STRATEGIES:
        plain, model = twins(ctx, Net, Block, strategy=strategy)
        optimizers = [adamw(m.parameters()) for m in (model, plain)]

        def step(model: nn.Module = model, plain: nn.Module = plain, optimizers: Any = optimizers) -> int:
            with record_events() as events:
                for m in (model, plain):
                    for _ in range(2):
                        m(torch.ones(2, 4).double()).square().sum().backward()
                step_all(optimizers)
            return events.count("all-gather blocks.1")

        step()
        with keep_unsharded(model):
            gathers = [step(), step()]
            with keep_unsharded(model.blocks[1]):
                gathers.append(step())
        assert gathers == [0 if strategy is ShardingStrategy.NO_SHARD or ctx.world_size == 1 else 1] * 3
        step()
        check_same_params(model, plain)


@pytest.mark.parametrize("strategy", [ShardingStrategy.SHARD_OPTIM, ShardingStrategy.FULL_SHARD])
@ranks(2)
def test_a_step_after_unshard_is_noticed_by_calls_past_a_unit(ctx, strategy):
    plain, model = twins(ctx, Net, None, strategy=strategy)
    x, optimizers = torch.ones(2, 4).double(), [adamw(m.parameters()) for m in (model, plain)]

    def step() -> None:
        for m in (model, plain):
            m(x).square().sum().backward()
        flatshard.unshard(model)
        step_all(optimizers)

    def check() -> None:
        torch.testing.assert_close(*[m.blocks[1](m.blocks[0](x)) for m in (model, plain)])

    step()
    with keep_unsharded(model):
        with torch.no_grad():
            check()
        step()
        with torch.no_grad():
            check()


@ranks(2)
def test_on_entry_and_exit(ctx):
    """On entry, only parameters that ``unshard`` gathered are kept, not an earlier forward's; on exit all are freed.
    ``unshard`` gathers an earlier forward's parameters anew, too.
    """
    x = torch.ones(2, 4)

    def scale(factor: float) -> None:
        for p in model.parameters():
            by_pointer(p).mul_(factor)

    for strategy in STRATEGIES[:2]:
        model = sharded(ctx, Net(), strategy=strategy)
        model(x)  # the root stays unsharded for a backward
        scale(2)
        with torch.no_grad():
            expected = model(x)
        out = model(x)
        scale(0.5)
        with torch.no_grad(), keep_unsharded(model):
            assert not torch.equal(model(x), expected)
        scale(2)
        out.sum().backward()  # gathers again
        assert not unsharded(model)
        scale(0.5)
        model(x)
        scale(2)
        flatshard.unshard(model, recurse=True)
        with torch.no_grad(), record_events() as events, keep_unsharded(model):
            assert torch.equal(model(x), expected)
        assert not [e for e in events if "gather" in e]
        assert not unsharded(model)
        parts = [*model.parameters()]
        flatshard.unshard(model, recurse=True)
        with torch.no_grad():
            for p in parts:
                p.mul_(0.5)
            with keep_unsharded(model):
                assert not torch.equal(model(x), expected)


def test_a_handle_that_is_waited_for_after_a_forward_shows_nothing(fake_group):
    """The forward has used the gathered parameters; under SHARD_GRAD_OP they stay for the backward, but hidden."""
    model = fully_shard(Net(), policy=Block, strategy=STRATEGIES[1])
    handle = flatshard.unshard(model, recurse=True, async_op=True)
    loss = model(torch.ones(2, 4)).sum()
    handle.wait()
    assert all(isinstance(p, ShardedParameter) for p in model.parameters())
    loss.backward()


@ranks(2)
def test_parts_of_a_model(ctx):
    x, model, blocks = torch.ones(2, 4), sharded(ctx, Net()), ["blocks.0", "blocks.1", "blocks.2"]
    with torch.no_grad():
        with keep_unsharded(model, recurse=False):
            model(x)
            assert unsharded(model) == [""]
        with keep_unsharded(model.blocks):  # not a unit itself
            with keep_unsharded(model.blocks[0]):
                model(x)
            assert unsharded(model) == blocks
            flatshard.reshard(model)  # frees now; the next forward gathers again
            assert not unsharded(model)
            model(x)
            assert unsharded(model) == blocks
        assert not unsharded(model)


@ranks(2)
def test_full_precision_in_eval(ctx):
    """Evaluation in full precision keeps its own unsharded copies."""
    x = torch.ones(2, 4)
    policy = MixedPrecision(param_dtype=torch.bfloat16, full_precision_in_eval=True)
    model = sharded(ctx, Net(), mixed_precision=policy).eval()
    gather = full_parameters.gather_full_precision
    counting = mock.patch.object(full_parameters, "gather_full_precision", side_effect=gather)
    with torch.no_grad(), counting as counted:
        expected = model(x)
        counted.reset_mock()
        with keep_unsharded(model):
            for _ in range(5):
                assert torch.equal(model(x), expected)
            assert counted.call_count == 4
            for p in model.parameters():
                p.mul_(0)
            assert not model(x).any()
            assert counted.call_count == 8
            model.double()
            for p in model.parameters():
                p.data.add_(1)
            assert model(x.double()).any()
            assert counted.call_count == 12
        check_clean(model)
    model.float().train()
    model(x).sum().backward()


X = torch.linspace(-1, 1, 8, dtype=torch.double).view(2, 4)


@ranks(2)
def test_summon_inside_a_step(ctx):
    """Summoning raises in forward and in backward, and changes nothing. The cure reads another layer in a forward."""
    plain, model = twins(ctx, Net, {nn.Linear})
    seen: list[Tensor] = []

    def refused(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="of unit 'head' inside a forward, a backward"):
            summon_full_params(model.head).__enter__()

    def cured(*_: Any) -> None:
        flatshard.unshard(model.head)
        seen.append(model.head.weight.detach().clone())
        flatshard.reshard(model.head)

    for hook in (refused, cured):
        model.blocks[0].register_forward_pre_hook(hook)
    model.front.register_full_backward_hook(refused)
    for m in (plain, model):
        m(X).square().sum().backward()
    assert torch.equal(seen[0], plain.head.weight)
    check_same_gradients(model, plain)
    check_clean(model)


class Translator(nn.Module):
    """The encoder is no unit. The root owns its parameters: a shared embedding, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.encoder = nn.Sequential(self.words, nn.Sequential(Block(), Block()), nn.LayerNorm(4), nn.Dropout(0.0))
        self.decoder = Net()

    def forward(self, ids: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = self.encoder(ids) if memory is None else memory
        return self.decoder(memory + self.words(ids))

    def generate(self, ids: Tensor) -> list[Tensor]:
        memory = self.encoder(ids)
        found = [self(ids, memory), self.encoder[2](memory), self.words(ids)]
        return [*found, *(self.decoder.head(found[1]) for _ in range(2)), self.decoder.blocks[0].linear(found[1])]


@ranks(2)
def test_calls_past_the_outermost_unit(ctx):
    """A call past the root is a forward of its unit, on any number of ranks. No hook remains after the block."""
    ids = torch.arange(4) % (3 + ctx.rank)
    plain, model = twins(ctx, Translator, Block)
    hooks = [(m, len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    with pytest.raises(RuntimeError, match=r"'words\.weight' is sharded.*Embedding\.forward was called outside"):
        model.generate(ids)
    for guard in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        with guard(), keep_unsharded(model), record_events() as events:
            for _ in range(2 + ctx.rank):
                for found, expected in zip(model.generate(ids), plain.generate(ids), strict=True):
                    assert torch.equal(found, expected)
                assert all(isinstance(p, ShardedParameter) for p in model.parameters())
            with keep_unsharded(model.encoder), pytest.raises(IndexError):
                model.encoder(ids + 5)
        assert sum(event.startswith("all-gather") for event in events) == len(describe(model).units)
        assert hooks == [(m, len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    with keep_unsharded(model):
        copied = copy.deepcopy(model)
        for m, given in ((plain, torch.arange(8) % 5), (model, (torch.arange(8) % 5).view(2, 4)[ctx.rank])):
            sum(out.square().mean() for out in m.generate(given)).backward()
    check_same_gradients(model, plain)
    check_clean(model)
    with pytest.raises(RuntimeError, match=r"'words\.weight' is sharded"):
        copied.encoder(ids)
    low = sharded(ctx, Net(), mixed_precision=MixedPrecision(torch.bfloat16))
    with torch.no_grad(), keep_unsharded(low):  # casts its input
        assert low.front(torch.ones(2, 4)).dtype is torch.bfloat16
