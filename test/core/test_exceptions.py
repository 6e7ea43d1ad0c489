"""An exception from user code, anywhere in a step, costs that step and nothing else.

The user catches it, calls ``zero_grad`` and goes on: the next steps must equal those of a model to which nothing
happened, and no memory of the broken step may be left once the next one is over (or at once, after ``recover``).

All ranks raise at the same place. A failure on one rank alone leaves its peers in a collective: no library can help.
Exceptions among other verbs are the fuzzer's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from clean import check_clean, units
from models import Block, Net
from on_ranks import ranks
from pairs import some
from parity import full_params
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard._composable.state import unit_of
from flatshard._handle.registrations import SHARDED

STRATEGIES = tuple(strategy for strategy in ShardingStrategy if not strategy.is_hybrid)
ERRORS: tuple[type[BaseException], ...] = (ValueError, torch.OutOfMemoryError, KeyboardInterrupt)


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


class Bomb:
    """Raises at the ``number``-th call, once."""

    def __init__(self, error: type[BaseException], number: int = 1) -> None:
        self.error, self.left = error, number

    def __call__(self, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error("on purpose")


# -- Places: each arms a bomb in unit i of a model, while it is entered -------------------------------------------------


def in_unit(model: Net, i: int, function: Callable[[Tensor], Tensor]) -> RemovableHandle:
    return model.blocks[i].linear.register_forward_hook(lambda module, args, out: function(out))


def between_units(model: Net, i: int, function: Callable[[Tensor], Tensor]) -> RemovableHandle:
    return (model.head if i else model.blocks[0]).register_forward_pre_hook(lambda module, args: (function(args[0]),))


def in_forward(bomb: Bomb) -> Callable[[Tensor], Tensor]:
    return lambda x: bomb() or x


def in_backward(bomb: Bomb) -> Callable[[Tensor], Tensor]:
    return lambda x: Raises.apply(x, bomb)


def in_tensor_hook(bomb: Bomb) -> Callable[[Tensor], Tensor]:
    return lambda x: (x.register_hook(bomb) if x.requires_grad else None, x)[1]


Place = Callable[[Net, int, Bomb], RemovableHandle]
PLACES: dict[str, Place] = {
    "forward of a unit": lambda model, i, bomb: in_unit(model, i, in_forward(bomb)),
    "forward between units": lambda model, i, bomb: between_units(model, i, in_forward(bomb)),
    "pre hook before ours": lambda model, i, bomb: model.blocks[i].register_forward_pre_hook(bomb, prepend=True),
    "pre hook after ours": lambda model, i, bomb: model.blocks[i].register_forward_pre_hook(bomb),
    "hook after ours": lambda model, i, bomb: model.blocks[i].register_forward_hook(bomb),
    "hook before ours": lambda model, i, bomb: model.blocks[i].register_forward_hook(bomb, prepend=True),
    "full backward hook": lambda model, i, bomb: model.blocks[i].register_full_backward_hook(bomb),
    "backward in a unit": lambda model, i, bomb: in_unit(model, i, in_backward(bomb)),
    "backward between units": lambda model, i, bomb: between_units(model, i, in_backward(bomb)),
    "tensor hook in a unit": lambda model, i, bomb: in_unit(model, i, in_tensor_hook(bomb)),
    "tensor hook between units": lambda model, i, bomb: between_units(model, i, in_tensor_hook(bomb)),
}


class Recomputing(Block):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


# -- Training with accidents -------------------------------------------------------------------------------------------


class Run:
    """A model in training, deterministic: equal numbers of steps give equal parameters."""

    def __init__(self, ctx: Any, strategy: ShardingStrategy, reentrant: bool | None = None) -> None:
        self.ctx, self.how = ctx, (strategy, reentrant)
        torch.manual_seed(0)
        self.model = Net()
        if reentrant is not None:
            self.model.blocks = nn.ModuleList(Recomputing(reentrant) for _ in range(3))
        fully_shard(self.model.double(), policy=Block, process_group=ctx.group, strategy=strategy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        self.x = torch.randn(3, 4, dtype=torch.double).add_(ctx.rank)
        self.steps = 0

    def half_step(self) -> None:
        self.model(self.x * (1 + self.steps)).square().mean().backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.half_step()
        self.optimizer.step()
        self.steps += 1

    def explode(self, where: Place, i: int, error: type[BaseException], number: int = 1) -> None:
        bomb = Bomb(error, number)
        with where(self.model, i, bomb), pytest.raises(error, match="on purpose"):
            self.half_step()
        assert bomb.left == 0
        self.check_users_own(error)

    def check_users_own(self, error: type[BaseException] = Exception) -> None:
        """Right after the exception, in the except block: ``zero_grad`` and the like see the user's own parameters.

        Not so after an interrupt in forward, where torch runs no hooks: see ``test_after_an_interrupt``.
        """
        own = [isinstance(p, flatshard.tensors.ShardedParameter) for p in self.model.parameters()]
        assert all(own) or not issubclass(error, Exception)

    def check_same(self) -> None:
        """As a model to which nothing has happened."""
        check_clean(self.model)
        other = Run(self.ctx, *self.how)
        for _ in range(self.steps):
            other.step()
        expected = full_params(other.model)
        for name, value in full_params(self.model).items():
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("name", PLACES)
@ranks(2, timeout=20)
def test_training_goes_on(ctx, name: str):
    where = PLACES[name]
    run = Run(ctx, some(STRATEGIES, 1, turn=list(PLACES).index(name))[0])
    for i, error in enumerate(ERRORS):
        ctx.note(f"unit {i}, {error.__name__}")
        for guard in (torch.no_grad, torch.inference_mode) if "backward" not in name and "tensor" not in name else ():
            with where(run.model, i, Bomb(error)), pytest.raises(error, match="on purpose"), guard():
                run.model(run.x)
            run.check_users_own(error)
        run.explode(where, i, error)
        run.step()
        check_clean(run.model)
    for i in (1, 2, 0):  # without a step between them
        run.explode(where, i, ValueError)
    flatshard.recover(run.model)
    check_clean(run.model)
    run.step()
    run.check_same()


@pytest.mark.parametrize("reentrant", [False, True])
@ranks(2, timeout=20)
def test_recomputation_raises(ctx, reentrant: bool):
    """The exception comes when the forward runs for the second time, in backward."""
    for strategy in STRATEGIES:
        run = Run(ctx, strategy, reentrant)
        for i, error in enumerate((*ERRORS, ValueError)):
            ctx.note(f"{strategy.name}, {error.__name__}")
            run.explode(PLACES["forward of a unit"], i % 3, error, number=2)
            if i % 2:
                flatshard.recover(run.model)
                check_clean(run.model)
            run.step()
            check_clean(run.model)
        run.check_same()


# -- What is where right after the exception ---------------------------------------------------------------------------


@ranks(2)
def test_memory_right_after(ctx):
    run = Run(ctx, ShardingStrategy.FULL_SHARD)
    run.step()
    # In forward: every unit's own hooks run as an exception passes, so nothing but a prefetched unit can be left.
    run.explode(PLACES["forward of a unit"], 1, ValueError)
    for unit in units(run.model):
        assert not unit.claims
        assert unit.handle.registrations.shows is SHARDED
    assert not unit_of(run.model).context.forwards
    assert [unit for unit in units(run.model) if not unit.handle.is_sharded] == []
    # In backward: what is under way is left until the next forward, or until recover.
    run.explode(PLACES["backward in a unit"], 1, ValueError)
    assert len([unit for unit in units(run.model) if not unit.handle.is_sharded]) <= 3
    with torch.no_grad():
        run.model(run.x)
    check_clean(run.model)


@ranks(2)
def test_after_an_interrupt(ctx):
    """Torch calls no hook for what is no ``Exception``: the next forward, or ``recover``, finds what is left."""
    run = Run(ctx, ShardingStrategy.FULL_SHARD)
    run.step()
    run.explode(PLACES["forward of a unit"], 1, KeyboardInterrupt)
    run.optimizer.zero_grad()  # which holds the user's parameters, whatever is registered
    assert all(p.grad is None for group in run.optimizer.param_groups for p in group["params"])
    flatshard.recover(run.model)
    check_clean(run.model)
    run.check_users_own()
    run.explode(PLACES["forward of a unit"], 2, KeyboardInterrupt)
    run.step()
    run.check_users_own()
    run.check_same()


@ranks(2)
def test_recover_inside_a_step(ctx):
    """``recover`` would free what is in use: it refuses, and the step goes on unharmed."""
    refused = []

    def attempt() -> None:
        with pytest.raises(RuntimeError, match="inside a forward or a backward"):
            flatshard.recover(run.model)
        refused.append(None)

    for strategy in STRATEGIES:
        run = Run(ctx, strategy)
        run.step()
        for place in (in_forward, in_backward):
            with in_unit(run.model, 1, place(attempt)):
                run.step()
        run.check_same()
    assert len(refused) == 2 * len(STRATEGIES)


@ranks(2)
def test_gradients_before_and_after(ctx):
    """Gradients of earlier, whole backwards survive a broken one; of the broken one nothing arrives later."""
    for strategy in STRATEGIES:
        run = Run(ctx, strategy)
        run.half_step()
        before = [p.grad.clone() for p in run.model.parameters()]
        run.explode(PLACES["forward of a unit"], 1, ValueError)
        run.explode(PLACES["backward in a unit"], 2, ValueError)
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
        with in_unit(run.model, 1, in_backward(Bomb(ValueError))):
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
        whole = strategy is ShardingStrategy.NO_SHARD
        for method in ("all_reduce",) if whole else ("all_gather", "reduce_scatter"):
            for number in range(6 if method == "all_gather" and strategy is ShardingStrategy.FULL_SHARD else 4):
                ctx.note(f"{strategy.name}, {method}, number {number}")
                run = Run(ctx, strategy)
                run.step()
                runtime = unit_of(run.model).context.runtime
                real = runtime.collectives
                runtime.collectives = FailOnce(real, method, number)
                try:
                    with pytest.raises(flatshard.CollectiveError, match="ConnectionError: the network is down"):
                        run.half_step()
                finally:
                    runtime.collectives = real
                run.check_users_own()
                if number % 2:
                    flatshard.recover(run.model)
                    check_clean(run.model)
                run.step()
                run.check_same()
