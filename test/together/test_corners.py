"""What modules and users do rarely: each once went wrong, or was refused without need."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import ShardingStrategy, fully_shard, no_sync, summon_full_params
from flatshard import _runtime as runtime_module
from flatshard._composable.features.escapes import EscapeWatch
from flatshard._composable.find import units_below

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))


def pair(ctx: Any, make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = make().double()
    model = fully_shard(copy.deepcopy(plain), policy={nn.Linear, Shows}, process_group=ctx.group, **options)
    return plain, model


def batch(ctx: Any, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The whole batch, and this rank's part of it."""
    torch.manual_seed(seed)
    x = torch.randn(ctx.world_size, 3, 4, dtype=torch.double)
    return x.flatten(0, 1), x[ctx.rank]


def check_gradients(model: nn.Module, plain: nn.Module) -> None:
    with summon_full_params(model, with_grads=True, writeback=False):
        for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None:
                torch.testing.assert_close(b.grad, a.grad, msg=lambda m, n=name: f"{n}: {m}")


class Shows(nn.Module):
    """Hands out its own parameter, which others then use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.weight


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shows, self.last = Shows(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, weight = self.shows(x)
        return self.last((y @ weight).tanh() @ weight.T)


def several_graphs(ctx: Any) -> None:
    for strategy in (FULL, GRAD_OP, NO_SHARD):
        plain, model = pair(ctx, Uses, strategy=strategy)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
        for step in range(3):
            for m, x in zip((plain, model), batch(ctx, step), strict=True):
                first, second = m(x).square().mean(), m(2 * x).mean()
                first.backward(retain_graph=step == 1)
                second.backward()
                if step == 1:
                    first.backward()
            check_gradients(model, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert not any(unit.leaks for unit in units_below(model))


def test_a_parameter_that_is_handed_out_lives_as_long_as_its_graphs(pool):
    for world_size in (1, 2, 3):
        pool.run(several_graphs, world_size=world_size)


class OwnTarget(nn.Module):
    """BYOL's target network, and the network that it follows, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
            target.data = 0.9 * target.data + 0.1 * online.data
        return self.online(x) - self.target(x)


def own_target(ctx: Any) -> None:
    for strategy in (FULL, GRAD_OP, NO_SHARD):
        torch.manual_seed(0)
        plain = OwnTarget().double()
        model = fully_shard(copy.deepcopy(plain), process_group=ctx.group, strategy=strategy)
        optimizers = [torch.optim.SGD(m.online.parameters(), lr=0.5) for m in (plain, model)]
        for step in range(4):
            for m, x in zip((plain, model), batch(ctx, step), strict=True):
                m(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, value in flatshard.checkpoint.full_state_dict(model).items():
            torch.testing.assert_close(value, plain.state_dict()[name], msg=lambda m, n=name: f"{n}: {m}")


def test_a_unit_that_updates_one_part_of_itself_from_another(pool):
    for world_size in (1, 2, 3):
        pool.run(own_target, world_size=world_size)


def frozen_in_between(ctx: Any) -> None:
    for strategy in (FULL, NO_SHARD):
        plain, model = pair(ctx, net, strategy=strategy)
        for m, x in zip((plain, model), batch(ctx), strict=True):
            with no_sync(model):
                m(x).mean().backward()  # counts
                loss = m(2 * x).mean()
                m[0].weight.requires_grad_(False)
                loss.backward()  # does not, for that weight
                m[0].weight.requires_grad_(True)
            m(3 * x).mean().backward()
        check_gradients(model, plain)


def test_frozen_between_forward_and_backward_under_no_sync(pool):
    pool.run(frozen_in_between)


def fails_in_a_reduction(ctx: Any) -> None:
    plain, model = pair(ctx, net)
    x, mine = batch(ctx)
    with no_sync(model):
        model(mine).mean().backward()
    true, calls = runtime_module.Runtime.reduce_scatter, []

    def out_of_memory(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return true(self, *args)

    runtime_module.Runtime.reduce_scatter = out_of_memory  # type: ignore[method-assign]
    try:
        with pytest.raises(torch.OutOfMemoryError):
            flatshard.reduce_gradients(model)
    finally:
        runtime_module.Runtime.reduce_scatter = true  # type: ignore[method-assign]
    flatshard.recover(model)
    model.zero_grad()
    for m, each in ((plain, x), (model, mine)):
        m(each).mean().backward()
    check_gradients(model, plain)


def test_out_of_memory_in_a_reduction(pool):
    pool.run(fails_in_a_reduction)


class Aux(nn.Module):
    """Its loss leaves past its output, in what was a number before."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.aux = nn.Linear(4, 6), nn.Linear(6, 4), 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.down(self.up(x).tanh()).square().mean()
        return x.detach()


def number_first(ctx: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Aux(), Aux()).double()
    model = fully_shard(copy.deepcopy(plain), policy={Aux}, process_group=ctx.group)
    for step in range(3):
        for m, x in zip((plain, model), batch(ctx, step), strict=True):
            m(x.requires_grad_())
            sum(block.aux for block in m).backward()
            for block in m:
                block.aux = 0.0
        check_gradients(model, plain)


def test_an_attribute_that_is_a_number_first_and_a_loss_later(pool):
    pool.run(number_first)


def toggled_for_inference(ctx: Any) -> None:
    plain, model = pair(ctx, net)
    x, mine = batch(ctx)
    for m, each in ((plain, x), (model, mine)):
        m(each).mean().backward()
        m[0].weight.requires_grad_(False)
        with torch.inference_mode():
            m(each)
        m[0].weight.requires_grad_(True)
        with torch.inference_mode():
            m(each)
        m(each).mean().backward()
    check_gradients(model, plain)


def test_inference_mode_after_requires_grad_was_changed(pool):
    pool.run(toggled_for_inference)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


def caught_in(model: nn.Module) -> list[torch.Tensor]:
    """What the units' watches hold of inner modules' outputs."""
    watches = [watch for unit in units_below(model) if (watch := unit.feature(EscapeWatch)) is not None]
    assert watches
    return [tensor for watch in watches for tensor in watch._caught]


def hooked(ctx: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Checkpointed(), Checkpointed()).double()
    model = fully_shard(copy.deepcopy(plain), policy={Checkpointed}, process_group=ctx.group)
    seen: list[Any] = []
    for m in (plain, model):
        for block in m:
            block.inner[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    for step in range(2):
        for m, x in zip((plain, model), batch(ctx, step), strict=True):
            m(x).square().mean().backward()
        assert not caught_in(model)
        check_gradients(model, plain)
    other = copy.deepcopy(model)
    for m, x in zip((plain, other), batch(ctx, 3), strict=True):
        m.zero_grad()
        m(x).square().mean().backward()
    check_gradients(other, plain)
    assert not caught_in(other)


def test_a_hook_inside_a_checkpoint_keeps_nothing_alive(pool):
    pool.run(hooked)


def graph_from_before(ctx: Any) -> None:
    plain, model = pair(ctx, net)
    x, mine = batch(ctx)
    plain(x).mean().backward()
    loss = model(mine).mean()
    with flatshard.keep_unsharded(model):
        loss.backward()
        check_gradients(model, plain)
        torch.testing.assert_close(model(mine), plain(mine))


def test_a_backward_inside_keep_unsharded_of_a_graph_from_before(pool):
    pool.run(graph_from_before)


def copied_after_an_error(ctx: Any) -> None:
    plain, model = pair(ctx, net)
    errors = [ValueError()]

    def raise_once(module: nn.Module, args: Any, output: Any) -> None:
        if errors:
            raise errors.pop()

    model[0].register_forward_hook(raise_once)
    x, mine = batch(ctx)
    with pytest.raises(ValueError):
        model(mine)
    other = copy.deepcopy(model)
    plain(x).mean().backward()
    other(mine).mean().backward()
    check_gradients(other, plain)
    model(mine).mean().backward()
    check_gradients(model, plain)


def test_a_copy_after_a_hook_has_raised(pool):
    pool.run(copied_after_an_error)
