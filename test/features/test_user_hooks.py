"""What users register to run as gradients come: on their parameters, as in plain torch, and on units."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from clean import check_clean
from on_ranks import ranks
from pairs import some
from parity import adamw, check_same_gradients, check_same_params, full_params, parts, step_all
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
)
from flatshard.checkpoint import full_state_dict
from flatshard.optim import register_gradients_reduced_hook
from flatshard.tensors import ShardedParameter

STRATEGIES = tuple(strategy for strategy in ShardingStrategy if not strategy.is_hybrid)
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
    for m, part in zip((plain, model), parts(ctx, inputs(step, 2 * ctx.world_size)), strict=True):
        m(part).square().mean().backward()


def each_strategy(ctx: Any, count: int = 4) -> Iterator[ShardingStrategy]:
    for strategy in some(STRATEGIES, count, turn=ctx.world_size):
        ctx.note(strategy.name)
        yield strategy


# -- p.register_post_accumulate_grad_hook ------------------------------------------------------------------------------


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


@ranks(1, 3)
def test_fires_once_per_backward(ctx):
    for number, strategy in enumerate(each_strategy(ctx)):
        before = bool(number % 2)
        model, plain = make(), make()
        # Hooks that were registered before sharding count too.
        calls = note_calls(model) if before else []
        shard(ctx, model, strategy)
        calls = calls if before else note_calls(model)
        expected = note_calls(plain)
        for reentrant in (None, False, True):
            ctx.note(f"{strategy.name}, {before=}, {reentrant=}")
            model.use_checkpoint = plain.use_checkpoint = reentrant
            for step in range(2):  # the first makes .grad, the other adds to it
                backward(ctx, model, plain, step)
                assert sorted(calls) == sorted(expected)  # not for those that are unused
                calls.clear(), expected.clear()
        check_same_gradients(model, plain)
    if ctx.world_size > 1:
        with no_sync(model):
            backward(ctx, model, plain, 0)
        assert not calls


def in_backward(params: Any, make_optimizer: Callable[..., torch.optim.Optimizer] = adamw) -> None:
    """The tutorial's: https://pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html"""
    optimizers = {p: make_optimizer([p]) for p in params if p.requires_grad}

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)


@ranks(1, 3)
def test_optimizer_in_backward(ctx):
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
        check_same_params(model, plain)
        check_clean(model)


@ranks(2)
def test_removing_freezing_copying(ctx):
    model, calls = shard(ctx, make()), []
    param = model.front.weight
    handle = param.register_post_accumulate_grad_hook(calls.append)
    param.register_post_accumulate_grad_hook(lambda p: handle.remove())
    for _ in range(2):
        model(inputs(0, 2)).sum().backward()
    assert len(calls) == 1
    param.requires_grad_(False)
    model(inputs(0, 2)).sum().backward()
    copied = copy.deepcopy(model)  # as in plain torch, without the hooks
    copied(inputs(0, 2)).sum().backward()
    assert len(calls) == 1


@ranks(1, 2)
def test_flat_parameters(ctx):
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
        check_same_params(model, plain)
        model.front.weight.register_post_accumulate_grad_hook(lambda p: None)
        message = r"'front\.weight' have hooks that would never run: since flat_parameters"
        with pytest.raises(RuntimeError, match=message):
            backward(ctx, model, plain, 0)


# -- Exceptions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["post_accumulate_grad_hook", "hook", "unit"])
@ranks(2)
def test_exceptions(ctx, where: str):
    def fail(argument: Any) -> None:
        raise error("on purpose")

    for error, strategy in zip((ValueError, KeyboardInterrupt), some(STRATEGIES, 2, len(where)), strict=True):
        model, plain = shard(ctx, make(4), strategy), make(4)
        optimizers = [adamw(m.parameters()) for m in (model, plain)]
        # The first unit to be reduced, one in the middle, and those whose reduction ends when backward does.
        for i, name in enumerate(("", "blocks.3", "blocks.2", "blocks.0", "")):
            if i:
                module = model.get_submodule(name)
                param = module.linear.weight if name else module.front.weight
                register = functools.partial(register_gradients_reduced_hook, module)
                register = register if where == "unit" else getattr(param, f"register_{where}")
                with register(fail):
                    with pytest.raises(error, match="on purpose"):
                        model(inputs(0, 2)).sum().backward()
                    assert all(isinstance(p, ShardedParameter) for p in model.parameters())
                model.zero_grad()
                if i % 2:
                    flatshard.recover(model)
                    check_clean(model)
            backward(ctx, model, plain, i)
            step_all(optimizers)
            check_clean(model)
        check_same_params(model, plain)


# -- p.register_hook ---------------------------------------------------------------------------------------------------


def rows(mask: Tensor) -> Callable[[Tensor], Tensor]:
    """Only these rows are trained."""
    return lambda grad: grad * mask


@ranks(1, 3)
def test_tensor_hooks_get_the_whole_local_gradient(ctx):
    mask = torch.tensor([1.0, 0, 0, 1, 1, 0, 1, 0], dtype=torch.float64).unsqueeze(1)
    for number, strategy in enumerate(each_strategy(ctx)):
        model, plain = make(), make()
        handles = []
        for m in (model, plain):
            if m is model and number % 2:
                shard(ctx, model, strategy)
            m.front.weight.register_hook(rows(mask))
            handles.append(m.blocks[1].linear.weight.register_hook(lambda grad: -3 * grad))
            if m is model and not number % 2:  # hooks that were there before
                shard(ctx, model, strategy)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        start = full_params(model)["front.weight"]
        for step in range(3):
            if step == 1:
                for handle in handles:
                    handle.remove()
            for _ in range(2):
                backward(ctx, model, plain, step)
            step_all(optimizers)
        check_same_params(model, plain)
        whole = full_params(model)["front.weight"]
        assert torch.equal((whole == start).all(1), mask.squeeze() == 0)


@ranks(2)
def test_tensor_hooks_and_dtypes(ctx):
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


# -- register_gradients_reduced_hook -----------------------------------------------------------------------------------


@ranks(1, 2)
def test_per_unit(ctx):
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
        for name in own:
            module = model.get_submodule(name)
            handles[name] = register_gradients_reduced_hook(module, functools.partial(note, name=name))
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


@ranks(2, 3)
def test_optimizer_in_backward_needs_the_gradients_of_one_unit(ctx):
    blocks, peaks = 8, []
    for inside in (False, True):
        model, plain = shard(ctx, make(blocks)), make(blocks)
        gradients = Gradients(model)
        optimizers = [adamw(plain.parameters())] + ([] if inside else [adamw(model.parameters())])
        params = dict(model.named_parameters())
        for unit in describe(model).units:
            module = model.get_submodule(unit.fqn)
            register_gradients_reduced_hook(module, gradients.sample)
            if inside:
                optimizer = adamw([params[n] for f in unit.flats for n in f.fqns])
                register_gradients_reduced_hook(module, functools.partial(step_and_zero, optimizer))
        for step in range(3):
            backward(ctx, model, plain, step)
            for optimizer in optimizers:
                step_and_zero(optimizer)
        check_same_params(model, plain)
        peaks.append(gradients.peak)
    shards = [[(f, f.shard_numel * 8) for f in u.flats] for u in describe(model).units]
    everything = sum(nbytes for flats in shards for f, nbytes in flats if f.trainable)
    after, inside = peaks
    one = max(sum(nbytes for _, nbytes in flats) for flats in shards)
    assert after == everything
    assert inside <= one < everything / 4


def step_and_zero(optimizer: torch.optim.Optimizer, *ignored: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


@ranks(2)
def test_optimizer_in_backward_under_checkpoint_wrapper(ctx):
    """As the docs of register_gradients_reduced_hook show it, where names leave out what checkpoint_wrapper adds."""
    model, plain = make(), make()
    model.blocks[1].linear = checkpoint_wrapper(model.blocks[1].linear)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    shard(ctx, model)
    params = {info.fqn: p for p in model.parameters() if (info := flatshard.tensors.shard_info(p))}
    for unit in describe(model).units:
        optimizer = adamw([params[fqn] for flat in unit.flats for fqn in flat.fqns])
        register_gradients_reduced_hook(model.get_submodule(unit.fqn), functools.partial(step_and_zero, optimizer))
    of_plain = adamw(plain.parameters())
    for number in range(2):
        backward(ctx, model, plain, number)
        step_and_zero(of_plain)
    assert all(p.grad is None for p in model.parameters())
    whole = full_state_dict(model)
    assert all(torch.allclose(whole[name], param, rtol=1e-9) for name, param in plain.named_parameters())


def test_misuse(fake_group):
    model = shard(None, make())
    with pytest.raises(ValueError, match=r"this Linear is part of unit 'blocks\.0', and not a unit itself"):
        register_gradients_reduced_hook(model.blocks[0].linear, print)
    kept = model.front.weight
    del model
    assert kept.register_hook(print) is not None  # of a model that is gone
