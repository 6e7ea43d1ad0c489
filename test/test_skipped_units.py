"""``flatshard.skip``: ranks that run different units, against one process in which every slice of the batch runs its own.

In every case the ranks must also issue the same collectives in the same order, as on a backend without tags they must.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import _assert_close
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard import BackwardPrefetch, ShardingStrategy, fully_shard, skip, summon_full_params
from flatshard._composable.state import units_below
from flatshard._trace import record_events

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
WIDTH = 4

Choices = list[bool]
"""Which of a model's optional calls run, in the order of the calls."""


# ---------------------------------------------------------------------------------------------------------------------
# Models. Each takes (x, choices); without `sharded`, a call that is not chosen is left out.
# ---------------------------------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """A leaf: one unit without units inside."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class Optional(nn.Module):
    sharded = False
    checkpointed: bool | None = None  # None: not; else use_reentrant

    def __init__(self) -> None:
        super().__init__()
        self.todo: Choices = []

    def maybe(self, module: nn.Module, x: Tensor) -> Tensor:
        chosen = self.todo.pop(0)
        if not chosen and not self.sharded:
            return x
        call: Callable[[Tensor], Tensor] = (lambda y: y + module(y)) if chosen else (lambda y: skip(module, y))
        if self.checkpointed is None:
            return call(x)
        return checkpoint(call, x, use_reentrant=self.checkpointed)

    def forward(self, x: Tensor, choices: Choices) -> Tensor:
        self.todo = list(choices)
        x = self.run(x)
        assert not self.todo
        return x

    def run(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Experts(Optional):
    """Leaf experts between layers of the root."""

    calls = 8

    def __init__(self, front: bool = True) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH) if front else None
        self.experts = nn.ModuleList(Linear() for _ in range(self.calls))
        self.head = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        x = x if self.front is None else self.front(x)
        for expert in self.experts:
            x = self.maybe(expert, x)
        return self.head(x)


def experts_first() -> Optional:
    """What the experts get does not require grad."""
    return Experts(front=False)


class Repeated(Optional):
    """Every expert is called three times, each time run or skipped."""

    calls = 9

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Linear() for _ in range(3))
        self.always = nn.ModuleList(Linear() for _ in range(2))
        self.front = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for expert in self.experts:
            x = self.maybe(expert, x)
        for index in (1, 0, 2):
            x = self.maybe(self.experts[index], x)
            x = self.always[index % 2](x)
        for expert in self.experts:
            x = self.maybe(expert, x)
        return x


class Tower(nn.Module):
    """A unit with units inside. ``own``: its own parameters come before them, after them, or both."""

    def __init__(self, own: str, blocks: int = 3) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH) if "before" in own else nn.Identity()
        self.blocks = nn.ModuleList(Linear() for _ in range(blocks))
        self.after = nn.Linear(WIDTH, WIDTH) if "after" in own else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.after(x)


class Towers(Optional):
    """Towers among blocks of the root's."""

    calls = 3

    def __init__(self, own: str) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Linear() for _ in range(4))
        self.towers = nn.ModuleList(Tower(own) for _ in range(self.calls))

    def run(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for block, tower in zip(self.blocks, self.towers, strict=False):
            x = block(x)
            x = self.maybe(tower, x)
        return self.blocks[-1](x)


class InnerExperts(nn.Module):
    """A unit that is itself optional, with optional units inside: all of them are joined where it is skipped."""

    def __init__(self, outer: Optional) -> None:
        super().__init__()
        self.outer = [outer]
        self.router = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Linear() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        outer = self.outer[0]
        x = self.router(x)
        for index, expert in enumerate(self.experts):
            use = outer.use[index]
            x = x + expert(x) if use else skip(expert, x) if outer.sharded else x
        return x


class Nested(Optional):
    calls = 2

    def __init__(self) -> None:
        super().__init__()
        self.use = [True, False]
        self.front = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(InnerExperts(self) for _ in range(self.calls))

    def run(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = self.maybe(layer, x)
        return x


class Tied(Optional):
    """The optional units use a weight that another unit owns."""

    calls = 3

    def __init__(self) -> None:
        super().__init__()
        self.owner = Linear()
        self.experts = nn.ModuleList(Linear() for _ in range(self.calls))
        for expert in list(self.experts)[:2]:
            expert.weight = self.owner.weight
        self.between = Linear()

    def run(self, x: Tensor) -> Tensor:
        x = self.owner(x)
        for expert in self.experts:
            x = self.between(self.maybe(expert, x))
        return x


def frozen_experts() -> Optional:
    """Some frozen, some half frozen: they are gathered for backward, and reduced in part or not at all."""
    model = Experts()
    for index, expert in enumerate(model.experts):
        expert.weight.requires_grad_(index % 3 != 0)
        expert.bias.requires_grad_(index % 2 != 0)
    return model


MODELS: dict[str, Callable[[], Optional]] = {
    "experts": Experts,
    "experts first": experts_first,
    "repeated": Repeated,
    "frozen": frozen_experts,
    "tied": Tied,
    "nested": Nested,
    **{f"towers {own}": lambda own=own: Towers(own) for own in ("before", "after", "before, after", "none")},
}


# ---------------------------------------------------------------------------------------------------------------------
# Parity
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    model: str
    strategy: ShardingStrategy = FULL
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = True
    checkpointed: bool | None = None
    run_first: bool = True  # all ranks run everything in the first step
    chance: float = 0.5
    steps: int = 4


def make(name: str) -> Optional:
    torch.manual_seed(0)
    return MODELS[name]().double()


def shard(model: Optional, group: Any, case: Case) -> None:
    fully_shard(
        model,
        policy={Linear, Tower, InnerExperts},
        process_group=group,
        strategy=case.strategy,
        backward_prefetch=case.backward_prefetch,
        forward_prefetch=case.forward_prefetch,
    )
    model.sharded = True
    model.checkpointed = case.checkpointed


def check_case(ctx, case: Case) -> None:
    """Train both models; each rank chooses for its own slice."""
    ctx.note(str(case))
    reference, model = make(case.model), make(case.model)
    shard(model, ctx.group, case)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (reference, model)]
    rng = random.Random(str(case))
    traces = []
    for step in range(case.steps):
        torch.manual_seed(step)
        batch = torch.randn(ctx.world_size, 2, WIDTH).double()
        everything = case.run_first and step == 0
        choices = [
            [everything or rng.random() < case.chance for _ in range(model.calls)] for _ in range(ctx.world_size)
        ]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for x, chosen in zip(batch, choices, strict=True):
            (reference(x, chosen).square().mean() / ctx.world_size).backward()
        with record_events() as events:
            model(batch[ctx.rank], choices[ctx.rank]).square().mean().backward()
        traces.append([e for e in events if e.startswith(("all-", "reduce-"))])
        left = [u.fqn for u in units_below(model) if not u.handle.is_sharded and not u.handle.is_alias]
        assert not left, f"unsharded after the step: {left}"
        check_gradients(reference, model, f"{case} step {step}")
        for optimizer in optimizers:
            optimizer.step()
    with summon_full_params(model, writeback=False):
        _assert_close(
            {n: p.detach().clone() for n, p in model.named_parameters()},
            {n: p.detach() for n, p in reference.named_parameters()},
            1e-9,
            "parameter",
        )
    same_order(ctx, traces)


def check_gradients(reference: nn.Module, model: nn.Module, when: str) -> None:
    expected = {name: p.grad for name, p in reference.named_parameters()}
    with summon_full_params(model, writeback=False, with_grads=True):
        got = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    wrong = [name for name in got if (got[name] is None) != (expected[name] is None)]
    assert not wrong, f"{when}: gradients that are None in one model only: {wrong}"
    _assert_close(
        {n: g for n, g in got.items() if g is not None},
        {n: g for n, g in expected.items() if g is not None},
        1e-9,
        f"{when}: gradient",
    )


def same_order(ctx, traces: list[list[str]]) -> None:
    """All ranks issued the same gathers, and the same reductions, in the same order."""
    everyone: list[Any] = [None] * ctx.world_size
    torch.distributed.all_gather_object(everyone, traces, group=ctx.group)
    for step, mine in enumerate(traces):
        for rank, theirs in enumerate(everyone):
            for kind in ("all-gather", "reduce-scatter", "all-reduce"):
                a, b = ([e for e in events if e.startswith(kind)] for events in (mine, theirs[step]))
                if a != b:
                    lines = "\n".join(f"{a:40}{b}" for a, b in itertools.zip_longest(a, b, fillvalue=""))
                    raise AssertionError(f"step {step}, rank {ctx.rank} and {rank}:\n{lines}")


def run_cases(ctx, cases: list[Case]) -> None:
    for case in cases:
        check_case(ctx, case)


PREFETCHES = [
    {},
    {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    {"backward_prefetch": None, "forward_prefetch": False},
]


@pytest.mark.parametrize("name", MODELS)
def test_parity(pool, name: str):
    cases = [Case(name, run_first=first, **prefetch) for prefetch in PREFETCHES for first in (True, False)]
    cases += [Case(name, strategy=strategy, steps=3) for strategy in (GRAD_OP, NO_SHARD)]
    pool.run(run_cases, cases, world_size=2)


@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks(pool, world_size: int):
    """Some units that few ranks run, or one, or none."""
    cases = [
        Case(name, strategy=strategy, run_first=False, chance=0.25, steps=3)
        for name in ("experts", "nested", "towers after")
        for strategy in (FULL, GRAD_OP, NO_SHARD)
    ]
    pool.run(run_cases, cases, world_size=world_size)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_activation_checkpointing_outside(pool, name: str, reentrant: bool):
    if name == "experts first" and reentrant:
        pytest.skip("reentrant checkpoints need an input that requires grad")
    pool.run(run_cases, [Case(name, checkpointed=reentrant, run_first=first, steps=3) for first in (True, False)])


@pytest.mark.parametrize("name", ["towers before", "towers after", "nested"])
def test_checkpointing_and_prefetching(pool, name: str):
    cases = [Case(name, checkpointed=False, run_first=False, steps=3, **prefetch) for prefetch in PREFETCHES]
    pool.run(run_cases, cases)
