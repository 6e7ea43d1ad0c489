"""An exception from user code anywhere in a step costs that step and nothing else.

The user catches it, calls ``zero_grad`` and continues. The next steps must equal those of a model without the
exception. The broken step's memory is freed by the end of the next step, or at once by ``recover``.

All ranks raise at the same place. A failure on one rank alone leaves its peers in a collective, and no library can
help. The fuzzer covers exceptions between other calls.
"""

import contextlib
import functools
import weakref
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard._base import environment
from flatshard._composable.state import unit_of

STRATEGIES = tuple(strategy for strategy in ShardingStrategy if not strategy.is_hybrid)
ERRORS: tuple[type[BaseException], ...] = (ValueError, torch.OutOfMemoryError, KeyboardInterrupt)


class Bomb:
    """Callable that raises once, at call ``number``."""

    def __init__(self, error: type[BaseException], number: int = 1) -> None:
        self.error, self.left = error, number

    def __call__(self, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error("on purpose")


def in_unit(model: Net, i: int, function: Callable[[Tensor], Tensor]) -> RemovableHandle:
    return model.blocks[i].linear.register_forward_hook(lambda module, args, out: function(out))


def between_units(model: Net, i: int, function: Callable[[Tensor], Tensor]) -> RemovableHandle:
    return (model.head if i else model.blocks[0]).register_forward_pre_hook(lambda module, args: (function(args[0]),))


def in_forward(bomb: Bomb) -> Callable[[Tensor], Tensor]:
    return lambda x: bomb() or x


def in_backward(bomb: Bomb) -> Callable[[Tensor], Tensor]:
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
    "tensor hook between units": lambda model, i, bomb: between_units(model, i, in_backward(bomb)),
}


class Recomputing(Block):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Run:
    """A deterministic training run: equal numbers of steps give equal parameters."""

    def __init__(self, ctx: Any, strategy: ShardingStrategy, reentrant: bool | None = None, **options: Any) -> None:
        self.make = functools.partial(Run, ctx, strategy, reentrant, **options)
        torch.manual_seed(0)
        self.model = Net()
        if reentrant is not None:
            self.model.blocks = nn.ModuleList(Recomputing(reentrant) for _ in range(3))
        fully_shard(self.model.double(), policy=Block, process_group=ctx.group, strategy=strategy, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        self.x = torch.randn(3, 4, dtype=torch.double).add_(ctx.rank)
        self.steps = 0

    def half_step(self, guard: Any = contextlib.nullcontext) -> None:
        with guard():
            loss = self.model(self.x * (1 + self.steps)).square().mean()
        loss.backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.half_step()
        self.optimizer.step()
        self.steps += 1

    def explode(self, where: Place, i: int, error: type[BaseException], number: int = 1, **guard: Any) -> None:
        bomb = Bomb(error, number)
        with where(self.model, i, bomb), pytest.raises(error, match="on purpose"):
            self.half_step(**guard)
        assert bomb.left == 0
        # ``zero_grad`` sees the user's own parameters, except after an interrupt: torch then runs no hooks.
        own = [isinstance(p, flatshard.tensors.ShardedParameter) for p in self.model.parameters()]
        assert all(own) or not issubclass(error, Exception)

    def recover(self) -> None:
        flatshard.recover(self.model)
        check_clean(self.model)

    def check_same(self) -> None:
        """Assert that the model equals one whose steps raised no exception."""
        check_clean(self.model)
        other = self.make()
        for _ in range(self.steps):
            other.step()
        expected = full_params(other.model)
        for name, value in full_params(self.model).items():
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("name", PLACES)
@ranks(2, timeout=20)
def test_training_goes_on(ctx, name: str):
    where, in_forward = PLACES[name], "backward" not in name and "tensor" not in name
    run = Run(ctx, some(STRATEGIES, 1, turn=list(PLACES).index(name))[0])
    for i, error in enumerate(ERRORS):
        ctx.note(f"unit {i}, {error.__name__}")
        for guard in (torch.no_grad, torch.inference_mode) if in_forward else ():
            run.explode(where, i, error, guard=guard)
        run.explode(where, i, error)
        if in_forward and issubclass(error, Exception):  # all units' hooks run while an exception propagates
            assert not unit_of(run.model).context.forwards
            assert not any(unit.claims for unit in units(run.model) if unit.config.strategy is STRATEGIES[0])
        run.step()
        check_clean(run.model)
    for i in (1, 2, 0):  # no step between them
        run.explode(where, i, ValueError)
    run.recover()
    run.step()
    run.check_same()


@ranks(4, timeout=20)
def test_recomputation_raises(ctx):
    """Raise when the forward runs for the second time, in backward.

    Shards that the broken step kept for gathers among two of the four ranks are not used in the next step.
    """
    for strategy, reentrant, options in (
        (STRATEGIES[0], True, {"reshard_after_forward": 2}),
        (STRATEGIES[1], False, {}),
    ):
        run = Run(ctx, strategy, reentrant, **options)
        for i, error in enumerate((*ERRORS, ValueError)):
            ctx.note(f"{strategy.name}, {error.__name__}")
            run.explode(PLACES["forward of a unit"], i % 3, error, number=2)
            if i % 2:
                run.recover()
                assert not any(unit.handle.source and unit.handle.source.kept for unit in units(run.model))
            run.step()
            check_clean(run.model)
        run.check_same()


ALLOCATING = ("empty", "empty_strided", "empty_like", "new_empty", "zeros", "zeros_like")


class Lacks(TorchDispatchMode):
    """Fails the ``left``-th call of the given operators; a copy of several tensors fails after the first one."""

    def __init__(self, operators: tuple[str, ...], left: int) -> None:
        super().__init__()
        self.operators, self.left = operators, left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.left -= name in self.operators
        if (name in self.operators, self.left) == (True, -1):
            if name == "_foreach_copy_":
                args[0][0].copy_(args[1][0])
            raise torch.OutOfMemoryError("on purpose")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("operators", [ALLOCATING, ("copy_", "_foreach_copy_")], ids=["memory", "copies"])
@ranks(2, timeout=20)
def test_out_of_memory_anywhere_in_a_backward(ctx, operators: tuple[str, ...]):
    """Fail at each allocation and each copy of a backward, reductions included: the next iteration is right."""
    # A rank allocates while others still read shared memory: when, depends on them, and all ranks must fail at one place.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "SHARED_MEMORY", 0)
        _fail_anywhere(ctx, operators)


def _fail_anywhere(ctx: Any, operators: tuple[str, ...]) -> None:
    for strategy in STRATEGIES:
        run, number = Run(ctx, strategy), 0
        run.step()
        while True:
            ctx.note(f"{strategy.name}, {number}")
            run.optimizer.zero_grad()
            loss = run.model(run.x * (1 + run.steps)).square().mean()
            try:
                with Lacks(operators, number) as lacks:
                    loss.backward()
            except torch.OutOfMemoryError as e:
                number, reference = number + 1, weakref.ref(e)
            else:
                break
            # A cycle through a traceback would keep the graph, which is in a variable of the caller.
            assert reference() is None, f"{strategy.name}, {number}: a frame of the traceback refers to the error"
        assert lacks.left >= 0
        assert number > 3
        run.optimizer.step()
        run.steps += 1
        run.step()
        run.check_same()


@ranks(2)
def test_recover_inside_a_step(ctx):
    """``recover`` refuses: it would free memory in use."""
    run, refused = Run(ctx, ShardingStrategy.FULL_SHARD), []

    def attempt(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="inside a forward or a backward"):
            flatshard.recover(run.model)
        refused.append(None)

    for place in (in_forward, in_backward):
        with in_unit(run.model, 1, place(attempt)):
            run.step()
    assert len(refused) == 2
    run.check_same()


@ranks(2)
def test_gradients_before_and_after(ctx):
    """Gradients of earlier, complete backwards survive a broken one, and the broken one's never arrive later."""
    for strategy in STRATEGIES:
        run = Run(ctx, strategy)
        run.half_step()
        before = [p.grad.clone() for p in run.model.parameters()]
        run.explode(PLACES["forward of a unit"], 1, ValueError)
        run.explode(PLACES["backward in a unit"], 2, ValueError)
        for p, grad in zip(run.model.parameters(), before, strict=True):
            if not p._flatshard_info.fqn.startswith("head"):  # the root may have received its gradients
                assert torch.equal(p.grad, grad)
        run.optimizer.zero_grad()
        flatshard.recover(run.model)
        assert all(p.grad is None for p in run.model.parameters())
        with in_unit(run.model, 1, in_backward(Bomb(ValueError))):
            fails = run.model(run.x).square().mean()
        works = run.model(run.x).square().mean()
        with pytest.raises(ValueError, match="on purpose"):
            fails.backward()
        run.optimizer.zero_grad()
        works.backward()  # no forward since: the backward gives all of its own gradients
        assert all(torch.equal(p.grad, g) for p, g in zip(run.model.parameters(), before, strict=True))
