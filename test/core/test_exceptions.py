"""An exception from user code, anywhere in a step, costs that step and nothing else.

The user catches it, calls ``zero_grad`` and goes on: the next steps must equal those of a model to which nothing
happened, and no memory of the broken step may be left once the next one is over (or at once, after ``recover``).

All ranks raise at the same place. A failure on one rank alone leaves its peers in a collective: no library can help.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from clean import check_clean, units
from on_ranks import ranks
from pairs import some
from parity import full_params
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard._composable.state import unit_of
from flatshard._handle.registrations import SHARDED

STRATEGIES = tuple(strategy for strategy in ShardingStrategy if not strategy.is_hybrid)
ERRORS: tuple[type[BaseException], ...] = (ValueError, torch.OutOfMemoryError, KeyboardInterrupt)
WIDTH = 4


class Raises(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


class Block(nn.Module):
    """Two layers; ``between`` runs on the activation between them."""

    def __init__(self, use_checkpoint: bool | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.between: Callable[[Tensor], Tensor] = lambda x: x
        self.reentrant = use_checkpoint

    def compute(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.between(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return x + self.compute(x)
        return x + checkpoint(self.compute, x, use_reentrant=self.reentrant)


class Net(nn.Module):
    """Three units and a root; ``after[i]`` runs on the output of unit i, outside of any inner unit."""

    def __init__(self, use_checkpoint: bool | None = None) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(use_checkpoint) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.after: dict[int, Callable[[Tensor], Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for i, block in enumerate(self.blocks):
            x = self.after.get(i, torch.nn.Identity())(block(x))
        return self.head(x)


class Bomb:
    """Raises once."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.exploded = False

    def __call__(self, *args: Any) -> None:
        if not self.exploded:
            self.exploded = True
            raise self.error("on purpose")


# -- Places: each arms a bomb in unit i of a model, while it is entered -------------------------------------------------


def between(block: Block, function: Callable[[Tensor], Tensor]) -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(block, "between", function)


def after(model: Net, i: int, function: Callable[[Tensor], Tensor]) -> contextlib.AbstractContextManager[Any]:
    return mock.patch.dict(model.after, {i: function})


def in_forward(bomb: Bomb) -> Callable[[Tensor], Tensor]:
    return lambda x: bomb() or x


def in_backward(bomb: Bomb) -> Callable[[Tensor], Tensor]:
    return lambda x: Raises.apply(x, bomb)


def in_tensor_hook(bomb: Bomb) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(bomb)
        return x

    return run


Place = Callable[[Net, int, Bomb], contextlib.AbstractContextManager[Any]]
PLACES: dict[str, Place] = {
    "forward of a unit": lambda model, i, bomb: between(model.blocks[i], in_forward(bomb)),
    "forward between units": lambda model, i, bomb: after(model, i, in_forward(bomb)),
    "forward of a layer": lambda model, i, bomb: model.blocks[i].down.register_forward_pre_hook(bomb),
    "pre hook before ours": lambda model, i, bomb: model.blocks[i].register_forward_pre_hook(bomb, prepend=True),
    "pre hook after ours": lambda model, i, bomb: model.blocks[i].register_forward_pre_hook(bomb),
    "hook after ours": lambda model, i, bomb: model.blocks[i].register_forward_hook(bomb),
    "hook before ours": lambda model, i, bomb: model.blocks[i].register_forward_hook(bomb, prepend=True),
    "full backward hook": lambda model, i, bomb: model.blocks[i].register_full_backward_hook(bomb),
    "backward of a function in a unit": lambda model, i, bomb: between(model.blocks[i], in_backward(bomb)),
    "backward of a function between units": lambda model, i, bomb: after(model, i, in_backward(bomb)),
    "tensor hook in a unit": lambda model, i, bomb: between(model.blocks[i], in_tensor_hook(bomb)),
    "tensor hook on an output": lambda model, i, bomb: after(model, i, in_tensor_hook(bomb)),
}


# -- Training with accidents -------------------------------------------------------------------------------------------


class Run:
    """A model in training, deterministic: equal numbers of steps give equal parameters."""

    def __init__(self, ctx: Any, strategy: ShardingStrategy, use_checkpoint: bool | None = None) -> None:
        torch.manual_seed(0)
        self.model = Net(use_checkpoint).double()
        fully_shard(self.model, policy=Block, process_group=ctx.group, strategy=strategy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        self.x = torch.randn(3, WIDTH, dtype=torch.double).add_(ctx.rank)
        self.steps = 0

    def half_step(self) -> None:
        self.model(self.x * (1 + self.steps)).square().mean().backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.half_step()
        self.optimizer.step()
        self.steps += 1


def check_users_own(model: nn.Module, error: type[BaseException] = Exception) -> None:
    """Right after the exception, in the except block: ``zero_grad`` and the like see the user's own parameters.

    Not so after an interrupt in forward, where torch runs no hooks: see ``test_after_an_interrupt``.
    """
    assert not issubclass(error, Exception) or all(
        isinstance(p, flatshard.tensors.ShardedParameter) for p in model.parameters()
    )


def check_same(run: Run, untouched: dict[str, Tensor]) -> None:
    for name, value in full_params(run.model).items():
        assert torch.equal(value, untouched[name]), name


def explode(run: Run, where: Place, i: int, error: type[BaseException]) -> None:
    bomb = Bomb(error)
    with where(run.model, i, bomb), pytest.raises(error, match="on purpose"):
        run.half_step()
    assert bomb.exploded


def untouched_params(ctx: Any, strategy: ShardingStrategy, steps: int, use_checkpoint: bool | None = None) -> Any:
    run = Run(ctx, strategy, use_checkpoint)
    for _ in range(steps):
        run.step()
    return full_params(run.model)


def survive(ctx, name: str, strategies: list[ShardingStrategy], use_checkpoint: bool | None = None) -> None:
    where = PLACES[name]
    for strategy in strategies:
        expected = untouched_params(ctx, strategy, 4, use_checkpoint)
        run = Run(ctx, strategy, use_checkpoint)
        for i, error in enumerate(ERRORS):
            ctx.note(f"{strategy.name}, unit {i}, {error.__name__}")
            explode(run, where, i, error)
            check_users_own(run.model, error)
            run.step()
            check_clean(run.model)
        explode(run, where, 1, ValueError)
        flatshard.recover(run.model)
        check_clean(run.model)
        run.step()
        check_clean(run.model)
        check_same(run, expected)


@pytest.mark.parametrize("name", PLACES)
def test_training_goes_on(pool, name):
    pool.run(survive, name, some(STRATEGIES, 1, turn=list(PLACES).index(name)), timeout=20)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["forward of a unit", "backward of a function in a unit", "tensor hook in a unit"])
def test_training_goes_on_with_checkpointing(pool, name, reentrant):
    pool.run(survive, name, some(STRATEGIES, 1, turn=list(PLACES).index(name) + reentrant), reentrant, timeout=20)


@pytest.mark.parametrize("reentrant", [False, True])
@ranks(2, timeout=20)
def test_recomputation_raises(ctx, reentrant: bool):
    """The exception comes when the forward runs for the second time, in backward."""
    for strategy in STRATEGIES:
        expected = untouched_params(ctx, strategy, 4, reentrant)
        run = Run(ctx, strategy, reentrant)
        for i, error in enumerate((*ERRORS, ValueError)):
            ctx.note(f"{strategy.name}, {error.__name__}")
            bomb = Bomb(error)
            calls = []

            def second(x: Tensor, calls: list[None] = calls, bomb: Bomb = bomb) -> Tensor:
                calls.append(None)
                if len(calls) == 2:
                    bomb()
                return x

            with between(run.model.blocks[i % 3], second), pytest.raises(error, match="on purpose"):
                run.half_step()
            check_users_own(run.model, error)
            if i % 2:
                flatshard.recover(run.model)
                check_clean(run.model)
            run.step()
            check_clean(run.model)
        check_same(run, expected)


def explode_forward(run: Run, where: Place, i: int, error: type[BaseException]) -> None:
    with where(run.model, i, Bomb(error)), pytest.raises(error, match="on purpose"):
        run.model(run.x)
    check_users_own(run.model, error)


@ranks(2)
def test_evaluation_raises(ctx):
    for strategy in STRATEGIES:
        expected = untouched_params(ctx, strategy, 3)
        run = Run(ctx, strategy)
        for i, error in enumerate(ERRORS):
            for guard in (torch.no_grad, torch.inference_mode):
                for name in ("forward of a unit", "forward between units", "pre hook after ours", "hook after ours"):
                    ctx.note(f"{strategy.name}, {name}, {error.__name__}")
                    with guard():
                        explode_forward(run, PLACES[name], i, error)
            # What a forward gathered, its hooks free as the exception passes; at the latest the next pass does.
            with torch.no_grad():
                run.model(run.x)
            check_clean(run.model)
            run.step()
            check_clean(run.model)
        check_same(run, expected)


# -- What is where right after the exception ---------------------------------------------------------------------------


def check_no_more_than(model: nn.Module, count: int) -> None:
    left = [unit for unit in units(model) if not unit.handle.is_sharded]
    assert len(left) <= count, left


@ranks(2)
def test_memory_right_after(ctx):
    run = Run(ctx, ShardingStrategy.FULL_SHARD)
    run.step()
    # In forward: every unit's own hooks run as an exception passes, so nothing but a prefetched unit can be left.
    explode(run, PLACES["forward of a unit"], 1, ValueError)
    for unit in units(run.model):
        assert not unit.claims
        assert unit.handle.registrations.shows is SHARDED
    assert not unit_of(run.model).context.forwards
    check_no_more_than(run.model, 0)
    # In backward: what is under way is left until the next forward, or until recover.
    explode(run, PLACES["backward of a function in a unit"], 1, ValueError)
    check_no_more_than(run.model, 3)
    with torch.no_grad():
        run.model(run.x)
    check_clean(run.model)


@ranks(2)
def test_after_an_interrupt(ctx):
    """Torch calls no hook for what is no ``Exception``: the next forward, or ``recover``, finds what is left."""
    run = Run(ctx, ShardingStrategy.FULL_SHARD)
    run.step()
    explode(run, PLACES["forward of a unit"], 1, KeyboardInterrupt)
    run.optimizer.zero_grad()  # which holds the user's parameters, whatever is registered
    assert all(p.grad is None for group in run.optimizer.param_groups for p in group["params"])
    flatshard.recover(run.model)
    check_clean(run.model)
    check_users_own(run.model)
    explode(run, PLACES["forward of a unit"], 2, KeyboardInterrupt)
    run.step()
    check_clean(run.model)
    check_users_own(run.model)
    check_same(run, untouched_params(ctx, ShardingStrategy.FULL_SHARD, 2))


@ranks(2)
def test_recover_inside_a_step(ctx):
    """``recover`` would free what is in use: it refuses, and the step goes on unharmed."""
    refused = []

    def attempt(x: Any) -> Any:
        with pytest.raises(RuntimeError, match="inside a forward or a backward"):
            flatshard.recover(run.model)
        refused.append(None)
        return x

    for strategy in STRATEGIES:
        run = Run(ctx, strategy)
        run.step()
        with between(run.model.blocks[1], attempt):
            run.step()
        with between(run.model.blocks[1], lambda x: Raises.apply(x, lambda: attempt(None) and None)):
            run.step()
        check_clean(run.model)
        check_same(run, untouched_params(ctx, strategy, 3))
    assert len(refused) == 2 * len(STRATEGIES)


@ranks(2)
def test_one_after_the_other(ctx):
    """Several exceptions without a whole step between them."""
    for strategy in STRATEGIES:
        run = Run(ctx, strategy)
        run.step()
        for name, where in PLACES.items():
            ctx.note(f"{strategy.name}, {name}")
            for i in range(3):
                explode(run, where, i, ValueError)
        run.step()
        check_clean(run.model)
        check_same(run, untouched_params(ctx, strategy, 2))


@ranks(2)
def test_gradients_before_and_after(ctx):
    """Gradients of earlier, whole backwards survive a broken one; of the broken one nothing arrives later."""
    for strategy in STRATEGIES:
        run = Run(ctx, strategy)
        run.half_step()
        before = [p.grad.clone() for p in run.model.parameters()]
        explode(run, PLACES["forward of a unit"], 1, ValueError)
        explode(run, PLACES["backward of a function between units"], 2, ValueError)
        for p, grad in zip(run.model.parameters(), before, strict=True):
            if not p._flatshard_info.fqn.startswith("head"):  # the root may have had its gradients
                assert torch.equal(p.grad, grad)
        run.optimizer.zero_grad()
        flatshard.recover(run.model)
        assert all(p.grad is None for p in run.model.parameters())


@ranks(2)
def test_a_backward_after_one_that_failed(ctx):
    """Without a forward in between, it gives its own gradients, all of them."""
    for strategy in STRATEGIES:
        run = Run(ctx, strategy)
        run.half_step()
        expected = [p.grad.clone() for p in run.model.parameters()]
        run.optimizer.zero_grad()
        with between(run.model.blocks[1], in_backward(Bomb(ValueError))):
            fails = run.model(run.x).square().mean()
        works = run.model(run.x).square().mean()
        with pytest.raises(ValueError, match="on purpose"):
            fails.backward()
        run.optimizer.zero_grad()
        works.backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(run.model.parameters(), expected, strict=True))


# -- A collective fails ------------------------------------------------------------------------------------------------


class FailOnce:
    """The collectives of a runtime, one of which raises the n-th time it is called: before it sends anything."""

    def __init__(self, real: Any, method: str, after: int) -> None:
        self._real, self._method, self._left = real, method, after

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if name != self._method:
            return real

        def call(*args: Any) -> Any:
            self._left -= 1
            if self._left == -1:
                raise ConnectionError("the network is down")
            return real(*args)

        return call


@ranks(2)
def test_a_collective_fails(ctx):
    for strategy in STRATEGIES:
        method = "all_reduce" if strategy is ShardingStrategy.NO_SHARD else "all_gather"
        methods = {method, "all_reduce" if method == "all_reduce" else "reduce_scatter"}
        expected = untouched_params(ctx, strategy, 2)
        for method in sorted(methods):
            for after in range(6 if method == "all_gather" and strategy is ShardingStrategy.FULL_SHARD else 4):
                ctx.note(f"{strategy.name}, {method}, number {after}")
                run = Run(ctx, strategy)
                run.step()
                runtime = unit_of(run.model).context.runtime
                real = runtime.collectives
                runtime.collectives = FailOnce(real, method, after)
                try:
                    with pytest.raises(flatshard.CollectiveError, match="ConnectionError: the network is down"):
                        run.half_step()
                finally:
                    runtime.collectives = real
                check_users_own(run.model)
                if after % 2:
                    flatshard.recover(run.model)
                    check_clean(run.model)
                run.step()
                check_clean(run.model)
                check_same(run, expected)
