"""Public verbs between a forward, its backward and the step: what they find there, and what they leave behind."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard._composable.find import units_below
from flatshard._handle.lifetime import GradState

STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
    ShardingStrategy.SHARD_OPTIM,
)


def make(ctx: Any, strategy: ShardingStrategy) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)]).double()
    model = copy.deepcopy(plain)
    return plain, fully_shard(model, policy={nn.Sequential}, strategy=strategy, process_group=ctx.group)


def batch(ctx: Any, step: int) -> tuple[Tensor, Tensor]:
    """Of all ranks, and of this one."""
    whole = torch.randn(ctx.world_size, 3, generator=torch.Generator().manual_seed(step)).double()
    return whole, whole[ctx.rank : ctx.rank + 1]


def assert_whole(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def unshard_again(ctx: Any) -> None:
    for strategy in STRATEGIES:
        ctx.note(strategy.name)
        plain, model = make(ctx, strategy)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, model)]
        for step in range(3):
            for m, x in zip((plain, model), batch(ctx, step), strict=True):
                m(x).square().mean().backward()
            flatshard.unshard(model, recurse=True)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            flatshard.unshard(model, recurse=True)
            assert_whole(model, plain)
            with torch.no_grad():
                assert_whole(model, plain)
                handle = flatshard.unshard(model, recurse=True, async_op=True)
                assert handle is not None
                handle.wait()
                assert_whole(model, plain)


@pytest.mark.parametrize("world_size", [1, 2])
def test_unshard_shows_what_the_step_made(pool, world_size):
    pool.run(unshard_again, world_size=world_size)


def states_while_unsharded(ctx: Any) -> None:
    for strategy in STRATEGIES:
        ctx.note(strategy.name)
        plain, model = make(ctx, strategy)
        optimizer = torch.optim.AdamW(model.parameters())
        model(batch(ctx, 0)[1]).square().mean().backward()
        optimizer.step()
        flatshard.reshard(model)
        shapes = {name: value.shape for name, value in model.state_dict().items()}
        before, optim_before = (
            flatshard.checkpoint.full_state_dict(model),
            flatshard.checkpoint.optim_state_dict(model, optimizer, full=True),
        )
        flatshard.unshard(model, recurse=True)
        sharded = model.state_dict()
        assert {name: value.shape for name, value in sharded.items()} == shapes
        kept = copy.deepcopy(sharded)
        flatshard.reshard(model)
        flatshard.unshard(model, recurse=True)
        model.load_state_dict({name: value + 1 for name, value in before.items()})
        got = flatshard.checkpoint.full_state_dict(model)
        for name, value in before.items():
            torch.testing.assert_close(got[name], value + 1)
        model.load_state_dict(kept)
        got = flatshard.checkpoint.full_state_dict(model)
        for name, value in before.items():
            torch.testing.assert_close(got[name], value)
        x = batch(ctx, 1)[1]
        expected = copy.deepcopy(plain)
        expected.load_state_dict(before)
        torch.testing.assert_close(model(x), expected(x))
        flatshard.unshard(model, recurse=True)
        for verb in (
            lambda model=model, optimizer=optimizer: flatshard.checkpoint.optim_state_dict(model, optimizer),
            lambda model=model, optimizer=optimizer, state=optim_before: flatshard.checkpoint.load_optim_state_dict(
                model, optimizer, state
            ),
        ):
            with pytest.raises(RuntimeError, match=r"shown whole since unshard\(\): call flatshard.reshard"):
                verb()


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_dicts_after_unshard(pool, world_size):
    pool.run(states_while_unsharded, world_size=world_size)


def frozen_and_copied(ctx: Any) -> None:
    """The copy has the unit follow what was frozen, before the backward comes to it."""
    for strategy in STRATEGIES:
        for frozen in ("1", "1.0", ""):
            ctx.note(f"{strategy.name} {frozen}")
            plain, model = make(ctx, strategy)
            losses = [m(x).square().mean() for m, x in zip((plain, model), batch(ctx, 0), strict=True)]
            for m in (plain, model):
                m.get_submodule(frozen).requires_grad_(False)
            copy.deepcopy(model)
            for loss in losses:
                loss.backward()
            assert [unit.handle.lifetime.grads for unit in units_below(model)] == [GradState.NONE] * 4
            found = [n for n, p in model.named_parameters() if p.grad is not None]
            assert found == [n for n, p in plain.named_parameters() if p.grad is not None]
            copied = copy.deepcopy(model)
            assert [n for n, p in copied.named_parameters() if p.requires_grad] == found


@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_and_copied_between_forward_and_backward(pool, world_size):
    pool.run(frozen_and_copied, world_size=world_size)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, torch.tanh(self.first(x)), use_reentrant=self.reentrant)


def thawed(ctx: Any) -> None:
    """What requires grad when its gradient comes has one, whatever was so in a forward since."""
    for strategy in STRATEGIES:
        for name in ("0.0", ""):
            ctx.note(f"{strategy.name} {name}")
            plain, model = make(ctx, strategy)
            losses = [m(x).square().mean() for m, x in zip((plain, model), batch(ctx, 0), strict=True)]
            for m, x in zip((plain, model), batch(ctx, 1), strict=True):
                m.get_submodule(name).requires_grad_(False)
                m(x)  # has the unit follow
                m.get_submodule(name).requires_grad_(True)
            for loss in losses:
                loss.backward()
            assert_whole_gradients(model, plain)
        torch.manual_seed(0)
        plain = Checkpointed(reentrant=True).double()
        model = fully_shard(copy.deepcopy(plain), strategy=strategy, process_group=ctx.group)
        for m in (plain, model):
            m.second.weight.requires_grad_(False)
        losses = [m(x).square().mean() for m, x in zip((plain, model), batch(ctx, 0), strict=True)]
        for m, loss in zip((plain, model), losses, strict=True):
            m.second.weight.requires_grad_(True)
            loss.backward()
        assert_whole_gradients(model, plain)


def assert_whole_gradients(model: nn.Module, plain: nn.Module) -> None:
    with flatshard.summon_full_params(model, with_grads=True, writeback=False):
        for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert p.grad is not None, name
            torch.testing.assert_close(p.grad, q[1].grad, rtol=1e-9, atol=1e-12)


def frozen_under_a_checkpoint(ctx: Any) -> None:
    """A recomputation runs as its forward did, so what was frozen since has a gradient, which is dropped."""
    for strategy in STRATEGIES:
        model = fully_shard(Checkpointed(reentrant=False), strategy=strategy, process_group=ctx.group)
        loss = model(torch.ones(1, 3)).sum()
        model.second.requires_grad_(False)
        loss.backward()
        assert [p.grad is not None for p in model.parameters()] == [True, True, False, False]


def test_frozen_under_a_checkpoint_between_forward_and_backward(pool):
    pool.run(frozen_under_a_checkpoint)


@pytest.mark.parametrize("world_size", [1, 2])
def test_thawed_between_forward_and_backward(pool, world_size):
    pool.run(thawed, world_size=world_size)


def backward_inside_summon(ctx: Any) -> None:
    """A checkpoint recomputes with the parameters that have gradients, whatever the user is shown."""
    for reentrant, offload, param_dtype in itertools.product((False, True), (False, True), (None, torch.float32)):
        for policy in (None, {nn.Linear}):
            for strategy in STRATEGIES:
                ctx.note(f"{reentrant=} {offload=} {param_dtype} {policy} {strategy.name}")
                torch.manual_seed(0)
                plain = Checkpointed(reentrant).double()
                model = fully_shard(
                    copy.deepcopy(plain),
                    policy=policy,
                    strategy=strategy,
                    mixed_precision=flatshard.MixedPrecision(param_dtype=param_dtype),
                    process_group=ctx.group,
                )
                whole, mine = batch(ctx, 0)
                plain(whole).square().mean().backward()
                loss = model(mine).square().mean()
                with flatshard.summon_full_params(model, offload_to_cpu=offload):
                    shown = dict(model.named_parameters())
                    loss.backward()
                    assert all(shown[name] is p for name, p in model.named_parameters())
                tolerance = 1e-9 if param_dtype is None else 1e-5
                with flatshard.summon_full_params(model, with_grads=True, writeback=False):
                    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                        torch.testing.assert_close(p.grad, q.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("world_size", [1, 2])
def test_backward_inside_summon(pool, world_size):
    pool.run(backward_inside_summon, world_size=world_size)


def frozen_and_followed(ctx: Any) -> None:
    """The gradient of what was frozen since its forward is not counted: the unit is complete with the last of the others."""
    for strategy in STRATEGIES:
        ctx.note(strategy.name)
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
        model = fully_shard(copy.deepcopy(plain), strategy=strategy, process_group=ctx.group)
        loss = model(batch(ctx, 0)[1]).square().mean()
        for m in (plain, model):
            m[4].weight.requires_grad_(False)
        with torch.no_grad():
            model(batch(ctx, 1)[1])  # has the unit follow

        def fail(module: nn.Module) -> None:
            raise ValueError("in a hook")

        hook = flatshard.optim.register_gradients_reduced_hook(model, fail)
        with pytest.raises(ValueError, match="in a hook"):
            loss.backward()
        hook.remove()
        assert all(
            c.grad is None for unit in units_below(model) for flat in unit.handle.flats for c in flat.unsharded.params
        )
        model.zero_grad()
        for m, x in zip((plain, model), batch(ctx, 2), strict=True):
            m(x).square().mean().backward()
        with flatshard.summon_full_params(model, with_grads=True, writeback=False):
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), name
                if q.grad is not None:
                    torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("world_size", [1, 3])
def test_frozen_and_followed_between_forward_and_backward(pool, world_size):
    pool.run(frozen_and_followed, world_size=world_size)


def converted_after_a_failed_backward(ctx: Any) -> None:
    """Gradients of the failed backward are not added to those of the next one."""
    for strategy in STRATEGIES:
        ctx.note(strategy.name)
        plain, model = make(ctx, strategy)
        plain.append(nn.Linear(3, 3, dtype=torch.float64))
        model = copy.deepcopy(plain)
        fully_shard(model, policy={nn.Sequential}, strategy=strategy, process_group=ctx.group)

        def fail(grad: Tensor) -> None:
            raise ValueError("in backward")

        hook = model[1].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
        loss = model(batch(ctx, 0)[1]).square().mean()
        hook.remove()
        with pytest.raises(ValueError, match="in backward"):
            loss.backward()
        for m in (plain, model):
            m.to(torch.float32)
        flatshard.reduce_gradients(model)  # the first verb that looks at the parameters
        for m, x in zip((plain, model), batch(ctx, 1), strict=True):
            m.zero_grad()
            m(x.float()).square().mean().backward()
        with flatshard.summon_full_params(model, with_grads=True, writeback=False):
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_converted_after_a_failed_backward(pool, world_size):
    pool.run(converted_after_a_failed_backward, world_size=world_size)
