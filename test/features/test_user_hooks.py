"""User hooks that run when gradients arrive: on parameters, as in plain torch, and on units."""

import copy
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from checkpointed import CALLS
from clean import check_clean
from on_ranks import ranks
from pairs import some
from parity import adamw, check_same_params, parts, step_all
from torch import Tensor, nn

from flatshard import MixedPrecision, ShardingStrategy, describe, flat_parameters, fully_shard, no_sync, recover
from flatshard.optim import register_gradients_reduced_hook

STRATEGIES = tuple(strategy for strategy in ShardingStrategy if not strategy.is_hybrid)
WIDTH = 8


class Model(models.Net):
    """A net with an unused parameter per block and a frozen bias. ``kind`` selects how blocks are called."""

    kind = "none"

    def __init__(self) -> None:
        super().__init__(width=WIDTH, inputs=WIDTH)
        for block in self.blocks:
            block.unused = nn.Parameter(torch.rand(3))
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = CALLS[self.kind](block, x)
        return self.head(x)


def make() -> Model:
    torch.manual_seed(0)
    return Model().double()


def shard(ctx: Any, model: nn.Module, strategy: ShardingStrategy = STRATEGIES[0], **options: Any) -> nn.Module:
    return fully_shard(
        model, policy=models.Block, process_group=getattr(ctx, "group", None), strategy=strategy, **options
    )


def inputs(step: int, n: int) -> Tensor:
    return torch.randn(n, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def backward(ctx: Any, model: nn.Module, plain: nn.Module, step: int) -> None:
    """Run a backward of the batch's mean: on this rank's share if sharded, on the full batch if plain."""
    for m, part in zip((plain, model), parts(ctx, inputs(step, 2 * ctx.world_size)), strict=True):
        m(part).square().mean().backward()


def each_strategy(ctx: Any, count: int = 3) -> Iterator[ShardingStrategy]:
    for strategy in some(STRATEGIES, count, turn=ctx.world_size):
        ctx.note(strategy.name)
        yield strategy


def in_backward(params: Any) -> None:
    """Step in backward, like https://pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html"""
    optimizers = {p: adamw([p]) for p in params if p.requires_grad}

    def step(param: Tensor) -> None:
        assert param.grad.shape == param.shape  # None if hooks ran twice
        assert not torch.is_grad_enabled()
        step_all([optimizers[param]])

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)


def change_gradients(model: Model) -> None:
    """Register tensor hooks that scale gradients and leave some rows untrained."""
    mask = torch.arange(WIDTH, dtype=torch.float64).fmod(3).unsqueeze(1)
    model.front.weight.register_hook(lambda grad: grad * mask)
    model.blocks[1].linear.weight.register_hook(lambda grad: -3 * grad)


@pytest.mark.parametrize("flat", [False, True])
@ranks(1, 3)
def test_optimizer_in_backward(ctx, flat: bool):
    """Hooks run once per backward, on complete gradients. Hooks on tensors run before, on full local gradients.

    Flat parameters need the fewest operations: one step per unit.
    """
    for number, strategy in enumerate(each_strategy(ctx)):
        model, plain = make(), make()
        for block in (*model.blocks, *plain.blocks) if flat else ():
            del block.unused  # a flat parameter gives an unused one a zero gradient
        if before := not flat and number % 2:
            change_gradients(model)
            in_backward(model.parameters())
        shard(ctx, model, strategy)
        params = flat_parameters(model) if flat else [*model.parameters()]
        if not before:
            in_backward(params)
        for m in (plain, model)[: 1 if before else 2] if not flat else ():
            change_gradients(m)
        optimizer = adamw(plain.parameters())
        for step in range(4):
            model.kind = plain.kind = ("none", "non-reentrant", "reentrant")[step % 3]
            backward(ctx, model, plain, step)
            step_all([optimizer])
            assert all(p.grad is None for p in (*params, *model.parameters()))
        check_same_params(model, plain)
        check_clean(model)
        if ctx.world_size > 1:
            with no_sync(model):
                backward(ctx, model, plain, 0)
            check_same_params(model, plain)  # nothing was reduced, so no hook has run
            recover(model)
        if flat:
            model.front.weight.register_post_accumulate_grad_hook(lambda p: None)
            message = r"'front\.weight' have hooks that would never run: since flat_param"
            with pytest.raises(RuntimeError, match=message):
                backward(ctx, model, plain, 0)


@ranks(2)
def test_removed_frozen_copied_converted(ctx):
    """Copies are without the hooks, as in plain torch."""
    model = make().float()
    shard(ctx, model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    param, calls, seen = model.front.weight, [], []
    param.register_hook(lambda grad: seen.append((tuple(grad.shape), grad.dtype)))
    handle = param.register_post_accumulate_grad_hook(calls.append)
    param.register_post_accumulate_grad_hook(lambda p: handle.remove())
    for each in (model, model, copy.deepcopy(model)):
        each(inputs(0, 2).float()).sum().backward()
    model.double()(inputs(0, 2)).sum().backward()
    param.requires_grad_(False)
    model(inputs(0, 2)).sum().backward()
    assert calls == [param]
    assert seen == [((WIDTH, WIDTH), torch.bfloat16)] * 3


def note_unit(model: nn.Module, unit: Any, calls: list[str]) -> Any:
    """Register a hook on the unit that records its name and checks the parameters that the user sees."""
    params, name = dict(model.named_parameters()), unit.fqn
    own = [n for f in unit.flats if f.trainable for n in f.fqns]

    def note(module: nn.Module) -> None:
        calls.append(name)
        assert not torch.is_grad_enabled()
        assert [n for n in own if params[n].grad is None] == [n for n in own if "unused" in n]
        # The module shows the user's own parameters, whatever backward has registered.
        assert all(p is params[n] for n, p in module.named_parameters(name) if name or "blocks" not in n)

    return register_gradients_reduced_hook(model.get_submodule(name), note)


@ranks(1, 2)
def test_per_unit(ctx):
    for strategy in each_strategy(ctx):
        model, x, calls = shard(ctx, make(), strategy), inputs(0, 2), list[str]()
        handles = {unit.fqn: note_unit(model, unit, calls) for unit in describe(model).units}
        for _ in range(2):
            model(x).sum().backward()
            assert calls == ["blocks.2", "blocks.1", "blocks.0", ""]
            calls.clear()
        with no_sync(model):
            model(x).sum().backward()
        assert not calls
        model(x).sum().backward()
        calls.clear()
        copied = copy.deepcopy(model)
        copied(x).sum().backward()
        assert not calls
        handles["blocks.1"].remove()
        model.front.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        model(x).sum().backward()
        assert calls == ["blocks.2", ""]
        check_clean(model)


def test_misuse(fake_group):
    model = shard(None, make())
    with pytest.raises(ValueError, match=r"this Linear is part of unit 'blocks\.0', and not a unit itself"):
        register_gradients_reduced_hook(model.blocks[0].linear, print)
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        model.head.bias.register_hook(lambda grad: grad)
    kept = model.front.weight
    del model
    assert kept.register_hook(print) is not None  # its model is freed
