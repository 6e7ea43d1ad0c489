"""What users register to run as gradients come: on their parameters, as in plain torch, and on units."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from clean import check_clean
from parity import adamw, full_params
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import (
    MixedPrecision,
    ShardingStrategy,
    describe,
    flat_parameters,
    full_shape,
    fully_shard,
    no_sync,
    summon_full_params,
)
from flatshard._composable.features.user_hooks import UserHooksOfUnit
from flatshard._composable.find import units_below
from flatshard._composable.state import unit_of
from flatshard.checkpoint import full_state_dict
from flatshard.optim import register_gradients_reduced_hook
from flatshard.tensors import ShardedParameter

STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
    ShardingStrategy.SHARD_OPTIM,
)
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 2)
        self.use_checkpoint: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.front(x))
        for block in self.blocks:
            x = block(x) if self.use_checkpoint is None else checkpoint(block, x, use_reentrant=self.use_checkpoint)
        return self.head(x)


def make(blocks: int = 3) -> Model:
    torch.manual_seed(0)
    return Model(blocks).double()


def shard(ctx: Any, model: nn.Module, strategy: ShardingStrategy = STRATEGIES[0], **options: Any) -> nn.Module:
    return fully_shard(model, policy=Block, process_group=getattr(ctx, "group", None), strategy=strategy, **options)


def inputs(step: int, n: int) -> Tensor:
    return torch.randn(n, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def backward(ctx: Any, model: nn.Module, plain: nn.Module, step: int) -> None:
    """Of the mean over the batch, sharded in parts and plain in whole."""
    x = inputs(step, 2 * ctx.world_size)
    model(x[2 * ctx.rank :][:2]).square().mean().backward()
    plain(x).square().mean().backward()


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    whole = full_params(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(whole[name], param.detach(), rtol=1e-9, atol=1e-12, msg=name)


def each_strategy(ctx: Any) -> Iterator[ShardingStrategy]:
    for strategy in STRATEGIES:
        ctx.note(strategy.name)
        yield strategy


# ---------------------------------------------------------------------------------------------------------------------
# p.register_post_accumulate_grad_hook
# ---------------------------------------------------------------------------------------------------------------------


def note_calls(model: nn.Module) -> list[tuple[str, Any]]:
    """(name, shape of the gradient) of each call."""
    calls: list[tuple[str, Any]] = []
    for name, param in model.named_parameters():
        if param.requires_grad:

            def note(p: Tensor, name: str = name, param: nn.Parameter = param) -> None:
                assert p is param
                assert p.grad is not None
                assert p.grad.shape == p.shape
                assert not torch.is_grad_enabled()
                calls.append((name, tuple(full_shape(p))))

            param.register_post_accumulate_grad_hook(note)
    return calls


def fire(ctx) -> None:
    for strategy in each_strategy(ctx):
        for before in (False, True):
            model, plain = make(), make()
            # Hooks that were registered before sharding count too.
            calls = note_calls(model) if before else []
            shard(ctx, model, strategy)
            calls = calls if before else note_calls(model)
            expected = note_calls(plain)
            for reentrant in (None, False, True):
                ctx.note(f"{strategy.name}, {before=}, {reentrant=}")
                model.use_checkpoint = plain.use_checkpoint = reentrant
                for step in range(3):  # the first makes .grad, the others add to it
                    backward(ctx, model, plain, step)
                    assert sorted(calls) == sorted(expected)  # not for those that are unused
                    calls.clear(), expected.clear()
            with summon_full_params(model, writeback=False, with_grads=True):
                for name, param in model.named_parameters():
                    wanted = plain.get_parameter(name).grad
                    assert (param.grad is None) == (wanted is None)
                    if wanted is not None:
                        torch.testing.assert_close(param.grad, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("world_size", [1, 3])
def test_fires_once_per_backward(pool, world_size):
    pool.run(fire, world_size=world_size)


def in_backward(params: Any, make_optimizer: Callable[..., torch.optim.Optimizer] = adamw) -> None:
    """The tutorial's: https://pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html"""
    optimizers = {p: make_optimizer([p]) for p in params if p.requires_grad}

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)


def optimizer_in_backward(ctx) -> None:
    for strategy in each_strategy(ctx):
        model, plain = shard(ctx, make(), strategy), make()
        in_backward(model.parameters())
        optimizer = adamw(plain.parameters())
        for step in range(6):
            model.use_checkpoint = plain.use_checkpoint = (None, False, True)[step % 3]
            backward(ctx, model, plain, step)
            optimizer.step()
            optimizer.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        assert_same(model, plain)
        check_clean(model)


@pytest.mark.parametrize("world_size", [1, 3])
def test_optimizer_in_backward(pool, world_size):
    pool.run(optimizer_in_backward, world_size=world_size)


def removed(ctx) -> None:
    for strategy in each_strategy(ctx):
        model = shard(ctx, make(), strategy)
        calls = []
        param = model.front.weight
        handle = param.register_post_accumulate_grad_hook(calls.append)
        param.register_post_accumulate_grad_hook(lambda p, handle=handle: handle.remove())
        for _ in range(2):
            model(inputs(0, 2)).sum().backward()
        assert len(calls) == 1
        param.requires_grad_(False)
        model(inputs(0, 2)).sum().backward()
        copied = copy.deepcopy(model)  # as in plain torch, without the hooks
        assert not copied.front.weight._post_accumulate_grad_hooks
        copied(inputs(0, 2)).sum().backward()
        assert len(calls) == 1


def test_removing_freezing_copying(pool):
    pool.run(removed)


def accumulate(ctx) -> None:
    model, plain = shard(ctx, make()), make()
    calls = note_calls(model)
    with no_sync(model):
        backward(ctx, model, plain, 0)
    assert not calls
    backward(ctx, model, plain, 1)
    assert len(calls) == 4 + 2 * 3


def test_not_under_no_sync(pool):
    pool.run(accumulate)


def flat_in_backward(ctx) -> None:
    """The fewest operations: one step a unit."""
    for strategy in each_strategy(ctx):
        model, plain = make(), make()
        for m in (model, plain):
            for block in m.blocks:
                del block.unused  # with flat parameters an unused one gets a zero gradient
        shard(ctx, model, strategy)
        params = flat_parameters(model)
        in_backward(params)
        optimizer = adamw(plain.parameters())
        for step in range(4):
            backward(ctx, model, plain, step)
            optimizer.step()
            optimizer.zero_grad()
            assert all(p.grad is None for p in (*params, *model.parameters()))
        assert_same(model, plain)
        model.front.weight.register_post_accumulate_grad_hook(lambda p: None)
        with pytest.raises(
            RuntimeError, match=r"'front\.weight' have hooks that would never run: since flat_parameters"
        ):
            backward(ctx, model, plain, 0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_flat_parameters(pool, world_size):
    pool.run(flat_in_backward, world_size=world_size)


# ---------------------------------------------------------------------------------------------------------------------
# Exceptions
# ---------------------------------------------------------------------------------------------------------------------


def failing(ctx, where: str, error: type[BaseException]) -> None:
    for strategy in each_strategy(ctx):
        model, plain = shard(ctx, make(4), strategy), make(4)
        optimizers = [adamw(m.parameters()) for m in (model, plain)]

        def step(i: int, model: nn.Module = model, plain: nn.Module = plain, optimizers: Any = optimizers) -> None:
            backward(ctx, model, plain, i)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        def fail(argument: Any) -> None:
            raise error("on purpose")

        def register(name: str, model: nn.Module = model) -> Any:
            if where == "unit":
                return register_gradients_reduced_hook(model.get_submodule(name), fail)
            module = model.get_submodule(name)
            param = module.linear.weight if name else module.front.weight
            return getattr(param, f"register_{where}")(fail)

        step(0)
        # The first unit to be reduced, one in the middle, and those whose reduction ends when backward does.
        for i, name in enumerate(("blocks.3", "blocks.2", "blocks.0", "")):
            handle = register(name)
            with pytest.raises(error, match="on purpose"):
                model(inputs(0, 2)).sum().backward()
            assert all(isinstance(p, ShardedParameter) for p in model.parameters())
            handle.remove()
            model.zero_grad()
            if i % 2:
                flatshard.recover(model)
                check_clean(model)
            step(i)
            check_clean(model)
        assert_same(model, plain)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["post_accumulate_grad_hook", "hook", "unit"])
def test_exceptions(pool, where, error):
    pool.run(failing, where, error)


# ---------------------------------------------------------------------------------------------------------------------
# p.register_hook
# ---------------------------------------------------------------------------------------------------------------------


def rows(mask: Tensor) -> Callable[[Tensor], Tensor]:
    """Only these rows are trained."""
    return lambda grad: grad * mask


def mask_gradients(ctx) -> None:
    mask = torch.tensor([1.0, 0, 0, 1, 1, 0, 1, 0], dtype=torch.float64).unsqueeze(1)
    for strategy in each_strategy(ctx):
        for before in (False, True):
            model, plain = make(), make()
            handles = []
            for m in (model, plain):
                if m is plain or before:
                    m.front.weight.register_hook(rows(mask))
                    handles.append(m.blocks[1].linear.weight.register_hook(lambda grad: -3 * grad))
                if m is model:
                    shard(ctx, model, strategy)
                if m is model and not before:
                    m.front.weight.register_hook(rows(mask))
                    handles.append(m.blocks[1].linear.weight.register_hook(lambda grad: -3 * grad))
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
            start = full_params(model)["front.weight"]
            for step in range(4):
                if step == 2:
                    for handle in handles:
                        handle.remove()
                for _ in range(2):
                    backward(ctx, model, plain, step)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            assert_same(model, plain)
            whole = full_params(model)["front.weight"]
            assert torch.equal((whole == start).all(1), mask.squeeze() == 0)


@pytest.mark.parametrize("world_size", [1, 3])
def test_tensor_hooks_get_the_whole_local_gradient(pool, world_size):
    pool.run(mask_gradients, world_size=world_size)


def tensor_hooks(ctx) -> None:
    model = make().float()
    shard(ctx, model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    seen = []
    model.front.weight.register_hook(lambda grad: seen.append((tuple(grad.shape), grad.dtype)))
    model(inputs(0, 2).float()).sum().backward()
    assert seen == [((WIDTH, WIDTH), torch.bfloat16)]
    model.double()
    seen.clear()
    copied = copy.deepcopy(model)
    copied(inputs(0, 2)).sum().backward()
    assert not seen
    model(inputs(0, 2)).sum().backward()
    assert seen == [((WIDTH, WIDTH), torch.bfloat16)]
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        model.frozen.weight.register_hook(lambda grad: grad)


def test_tensor_hooks_and_dtypes(pool):
    pool.run(tensor_hooks)


# ---------------------------------------------------------------------------------------------------------------------
# register_gradients_reduced_hook
# ---------------------------------------------------------------------------------------------------------------------


def per_unit(ctx) -> None:
    for strategy in each_strategy(ctx):
        model = shard(ctx, make(), strategy)
        x = inputs(0, 2)
        calls: list[str] = []
        own = {u.fqn: [n for f in u.flats if f.trainable for n in f.fqns] for u in describe(model).units}
        params = dict(model.named_parameters())

        def note(module: nn.Module, name: str, params: Any = params, own: Any = own, calls: Any = calls) -> None:
            calls.append(name)
            assert not torch.is_grad_enabled()
            assert [n for n in own[name] if params[n].grad is None] == [n for n in own[name] if "unused" in n]
            # The module shows the user's own parameters, whatever backward has registered.
            assert all(p is params[f"{name}.{n}".strip(".")] for n, p in module.named_parameters() if "blocks" not in n)

        handles = {}
        for unit in units_below(model):
            handles[unit.fqn] = register_gradients_reduced_hook(unit.module, functools.partial(note, name=unit.fqn))
        for _ in range(2):
            model(x).sum().backward()
            assert calls == ["blocks.2", "blocks.1", "blocks.0", ""]
            calls.clear()
        with no_sync(model):
            model(x).sum().backward()
        assert not calls
        model(x).sum().backward()
        assert calls == ["blocks.2", "blocks.1", "blocks.0", ""]
        calls.clear()
        copied = copy.deepcopy(model)
        copied(x).sum().backward()
        assert not calls
        handles["blocks.1"].remove()
        model.front.requires_grad_(False)
        for p in model.blocks[0].parameters():
            p.requires_grad_(False)
        model(x).sum().backward()
        assert calls == ["blocks.2", ""]
        check_clean(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_per_unit(pool, world_size):
    pool.run(per_unit, world_size=world_size)


class Gradients:
    """The most bytes of gradients that were held at a time: ``sample`` looks."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.peak = 0

    def sample(self, *ignored: Any) -> None:
        held = {
            p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes()
            for p in self.params
            if p.grad is not None
        }
        self.peak = max(self.peak, sum(held.values()))


def memory(ctx) -> tuple[int, int, int]:
    blocks = 8
    peaks = []
    for inside in (False, True):
        model, plain = shard(ctx, make(blocks)), make(blocks)
        gradients = Gradients(model)
        for unit in units_below(model):
            register_gradients_reduced_hook(unit.module, gradients.sample)
        optimizers = [adamw(plain.parameters())]
        if inside:
            params = dict(model.named_parameters())
            for unit in describe(model).units:
                optimizer = adamw([params[n] for f in unit.flats for n in f.fqns])

                def step(module: nn.Module, optimizer: torch.optim.Optimizer = optimizer) -> None:
                    optimizer.step()
                    optimizer.zero_grad()

                register_gradients_reduced_hook(model.get_submodule(unit.fqn), step)
        else:
            optimizers.append(adamw(model.parameters()))
        for step in range(4):
            backward(ctx, model, plain, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same(model, plain)
        peaks.append(gradients.peak)
        one = max(sum(b.layout.shard_numel * 8 for b in u.handle.flats) for u in units_below(model))
        everything = sum(
            b.layout.shard_numel * 8 for u in units_below(model) for b in u.handle.flats if b.params[0].requires_grad
        )
    return *peaks, one, everything


@pytest.mark.parametrize("world_size", [2, 3])
def test_optimizer_in_backward_needs_the_gradients_of_one_unit(pool, world_size):
    for after, inside, one, everything in pool.run(memory, world_size=world_size):
        assert after == everything
        assert inside <= one < everything / 4


def steps_in_backward(ctx) -> None:
    """As the docs of register_gradients_reduced_hook show it, where names leave out what checkpoint_wrapper adds."""
    model, plain = make(), make()
    model.blocks[1].linear = checkpoint_wrapper(model.blocks[1].linear)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    shard(ctx, model)
    params = {info.fqn: p for p in model.parameters() if (info := flatshard.tensors.shard_info(p))}
    for unit in describe(model).units:
        optimizer = adamw([params[fqn] for flat in unit.flats for fqn in flat.fqns])

        def step(module: nn.Module, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        register_gradients_reduced_hook(model.get_submodule(unit.fqn), step)
    of_plain = adamw(plain.parameters())
    for number in range(3):
        backward(ctx, model, plain, number)
        of_plain.step()
        of_plain.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    whole = full_state_dict(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(whole[name], param.detach(), rtol=1e-9, atol=1e-12, msg=name)


def test_optimizer_in_backward_under_checkpoint_wrapper(pool):
    pool.run(steps_in_backward)


def test_misuse(fake_group):
    model = shard(None, make())
    with pytest.raises(ValueError, match=r"this Linear is part of unit 'blocks\.0', and not a unit itself"):
        register_gradients_reduced_hook(model.blocks[0].linear, print)
    with pytest.raises(TypeError, match="register_gradients_reduced_hook takes a callable, got None"):
        register_gradients_reduced_hook(model, None)
    assert not unit_of(model).feature(UserHooksOfUnit).callbacks
    kept = model.front.weight
    del model
    assert kept.register_hook(print) is not None  # of a model that is gone
