"""``flatshard.skip``: ranks that run different units, against one process in which every slice of the batch runs its own.

The fuzzer skips, too: single units, tied and frozen ones, under every option. Here is what it does not draw.

In every case the ranks must also issue the same collectives in the same order, as on a backend without tags they must.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import ranks
from pairs import some
from parity import check_same_gradients, check_same_params, in_texts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard import (
    BackwardPrefetch,
    ShardingStrategy,
    describe,
    fully_shard,
    no_sync,
    reshard,
    skip,
    unshard,
)
from flatshard._trace import record_events

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
HYBRID, OPTIM = ShardingStrategy.HYBRID_SHARD, ShardingStrategy.SHARD_OPTIM
WIDTH = 4

Choices = list[bool]
"""Which of a model's optional calls run, in the order of the calls."""


# -- Models. Each takes (x, choices); without `sharded`, a call that is not chosen is left out. ------------------------


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


MODELS: dict[str, Callable[[], Optional]] = {
    "experts": Experts,
    "experts first": experts_first,
    "repeated": Repeated,
    "nested": Nested,
    **{f"towers {own}": lambda own=own: Towers(own) for own in ("before", "after", "none")},
}


# -- Parity ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    model: str
    strategy: ShardingStrategy = FULL
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = True
    checkpointed: bool | None = None
    run_first: bool = False  # all ranks run everything in the first step
    accumulate: bool = False  # two backwards a step, the first of them in no_sync
    chance: float = 0.5
    steps: int = 3


def make(name: str) -> Optional:
    torch.manual_seed(0)
    return MODELS[name]().double()


def shard(model: Optional, ctx: Any, case: Case) -> None:
    mesh = ctx.device_mesh((2, 2), ("replicate", "shard")) if case.strategy is HYBRID else None
    fully_shard(
        model,
        policy={Linear, Tower, InnerExperts},
        process_group=ctx.group if mesh is None else None,
        device_mesh=mesh,
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
    shard(model, ctx, case)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (reference, model)]
    rng = random.Random(str(case))
    traces = []
    for step in range(case.steps):
        torch.manual_seed(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for last in (False, True) if case.accumulate else (True,):
            batch = torch.randn(ctx.world_size, 2, WIDTH).double()
            everything = case.run_first and step == 0
            choices = [[everything or rng.random() < case.chance for _ in range(model.calls)] for _ in batch]
            for x, chosen in zip(batch, choices, strict=True):
                (reference(x, chosen).square().mean() / ctx.world_size).backward()
            with record_events() as events, contextlib.nullcontext() if last else no_sync(model):
                model(batch[ctx.rank], choices[ctx.rank]).square().mean().backward()
            traces.append([e for e in events if e.startswith(("all-", "reduce-"))])
        left = [u.fqn for u in describe(model).units if u.state != "sharded"]
        assert not left or case.strategy is OPTIM, f"unsharded after the step: {left}"
        check_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
    check_same_params(model, reference)
    same_order(ctx, traces)


def same_order(ctx, traces: list[list[str]]) -> None:
    """All ranks issued the same gathers, and the same reductions, in the same order."""
    everyone = [json.loads(text) for text in in_texts(ctx, json.dumps(traces))]
    for step, mine in enumerate(traces):
        for rank, theirs in enumerate(everyone):
            for kind in ("all-gather", "reduce-scatter", "all-reduce"):
                a, b = ([e for e in events if e.startswith(kind)] for events in (mine, theirs[step]))
                if a != b:
                    lines = "\n".join(f"{a:40}{b}" for a, b in itertools.zip_longest(a, b, fillvalue=""))
                    raise AssertionError(f"backward {step}, rank {ctx.rank} and {rank}:\n{lines}")


def run_cases(ctx, cases: list[Case]) -> None:
    for case in cases:
        check_case(ctx, case)


@pytest.mark.parametrize("name", MODELS)
def test_parity(pool, name: str):
    others = [
        Case(name),
        Case(name, backward_prefetch=BackwardPrefetch.BACKWARD_POST),
        Case(name, backward_prefetch=None, forward_prefetch=False),
        Case(name, strategy=GRAD_OP),
        Case(name, strategy=NO_SHARD),
        Case(name, strategy=OPTIM),
    ]
    cases = [Case(name, run_first=True), *some(others, 1, turn=list(MODELS).index(name))]
    pool.run(run_cases, cases, world_size=2)


@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks(pool, world_size: int):
    """Some units that few ranks run, or one, or none."""
    choices = ("experts", "nested", "towers after"), (FULL, GRAD_OP, NO_SHARD, OPTIM)
    cases = [Case(name, strategy=strategy, chance=0.25, steps=2) for name, strategy in itertools.product(*choices)]
    cases = some(cases, 4, turn=world_size)
    cases += [Case(name, HYBRID, chance=0.25, steps=2) for name in ("experts", "nested") if world_size == 4]
    pool.run(run_cases, cases, world_size=world_size)


def test_accumulation(pool):
    """What one rank has used in ``no_sync``, and another one only after it, or nobody."""
    choices = ("experts", "towers before"), (FULL, NO_SHARD, OPTIM)
    every = [
        Case(name, strategy, accumulate=True, chance=0.3, steps=2) for name, strategy in itertools.product(*choices)
    ]
    pool.run(run_cases, some(every, 4))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_outside(pool, reentrant: bool):
    names = [n for n in MODELS if not (n == "experts first" and reentrant)]  # which need an input that requires grad
    cases = [Case(n, checkpointed=reentrant, steps=2) for n in some(names, 3, turn=reentrant)]
    prefetching = {"backward_prefetch": BackwardPrefetch.BACKWARD_POST} if reentrant else {"backward_prefetch": None}
    pool.run(run_cases, [*cases, Case("towers after", checkpointed=False, steps=2, **prefetching)])


# -- The call ----------------------------------------------------------------------------------------------------------


@ranks(2)
def test_the_call(ctx):
    model = make("experts")
    shard(model, ctx, Case("experts"))
    expert, x = model.experts[0], torch.ones(2, WIDTH).double()
    both = skip(expert, x, torch.tensor([3]))
    assert isinstance(both, tuple)
    assert torch.equal(both[0], x)
    assert both[0].requires_grad
    assert both[1].tolist() == [3]
    both[0].sum().backward()
    assert all(p.grad is None for p in expert.parameters())  # nobody ran it
    with torch.no_grad():
        assert not skip(expert, x).requires_grad
        assert skip(expert) == ()
    with pytest.raises(ValueError, match=r"backward must reach unit 'experts\.0', so pass a floating-point tensor"):
        skip(expert, torch.tensor([3]))
    with pytest.raises(ValueError, match="nothing in this Linear is sharded; call fully_shard first"):
        skip(nn.Linear(1, 1), x)
    assert {u.state for u in describe(model).units} == {"sharded"}


@ranks(2)
def test_a_rank_without_data(ctx):
    """Rank 1 has fewer batches: it skips the whole model in the last step, and in evaluation."""
    reference, model = make("towers after"), make("towers after")
    shard(model, ctx, Case("towers after"))
    everything = [True] * model.calls
    for batches in (2, 1):
        reference.zero_grad()
        model.zero_grad()
        batch = torch.randn(batches, 2, WIDTH, generator=torch.Generator().manual_seed(batches)).double()
        for x in batch:
            (reference(x, everything).square().mean() / 2).backward()
        if ctx.rank < batches:
            model(batch[ctx.rank], everything).square().mean().backward()
        else:
            skip(model, torch.zeros(())).backward()
        check_same_gradients(model, reference)
    with torch.no_grad():
        if ctx.rank == 0:
            assert torch.equal(model(x, everything), reference(x, everything))
        else:
            skip(model)
    assert {u.state for u in describe(model).units} == {"sharded"}


def nested(ctx) -> tuple[nn.Module, nn.Module, Tensor]:
    """A model, a layer of it that runs all its units, and its input."""
    torch.manual_seed(0)
    model = Nested()
    model.use = [True, True]
    fully_shard(model, policy={Linear, InnerExperts}, process_group=ctx.group)
    return model, model.layers[0], torch.ones(1, WIDTH)


@ranks(2)
def test_after_a_forward_that_raised(ctx):
    """A forward that raised before its inner units ran tells nothing about which of them run."""
    _, layer, x = nested(ctx)

    def fail(*_: Any) -> None:
        raise ValueError

    for _ in range(2):
        with layer.router.register_forward_pre_hook(fail, prepend=True), pytest.raises(ValueError, match=r"^$"):
            layer(x)
        (skip(layer, x) if ctx.rank == 1 else layer(x)).sum().backward()


@ranks(2)
def test_unshard_after_a_backward_that_raised(ctx):
    """Ranks came to it in other orders, so other units are still unsharded; the verb finds none of that."""
    model, layer, x = nested(ctx)
    layer(x)
    loss = (skip(layer, x) if ctx.rank == 1 else layer(x)).sum()
    with torch.no_grad():
        layer.experts[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="were changed in place between"):
        loss.backward()
    unshard(model, recurse=True)
    assert layer.experts[0].weight.shape == (WIDTH, WIDTH)
    reshard(model)
    layer(x).sum().backward()


class Around(nn.Module):
    """A unit with a unit on other process groups in it, which has one on the first group in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = Linear(), nn.Sequential(Linear(), Linear()), Linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


class Outermost(nn.Module):
    sharded = skips = False

    def __init__(self) -> None:
        super().__init__()
        self.front, self.around, self.head = Linear(), Around(), Linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.front(x)
        if not self.skips:
            y = self.around(y)
        elif self.sharded:
            y = skip(self.around, y)
        return self.head(y)


@pytest.mark.parametrize("before", [0, 2])
@ranks(4)
def test_units_on_other_process_groups_inside(ctx, before: int):
    """They are skipped with the unit around them. ``before``: in so many steps the rank has run it."""
    torch.manual_seed(0)
    plain = Outermost().double()
    model = copy.deepcopy(plain)
    model.sharded = True
    elsewhere = torch.distributed.new_group()
    assert elsewhere is not ctx.group
    for module, group in (
        *((model.around.inner[1], ctx.group), (model.around.inner, elsewhere), (model.around.first, ctx.group)),
        *((model.around, ctx.group), (model, ctx.group)),
    ):
        fully_shard(module, process_group=group)
    x = torch.randn(4, 3, WIDTH, dtype=torch.double)
    for step in range(before + 2):
        skips = step >= before
        for rank in range(4):
            plain.skips = skips and rank == 1
            (plain(x[rank]).square().mean() / 4).backward()
        model.skips = skips and ctx.rank == 1
        model(x[ctx.rank]).square().mean().backward()
    check_same_gradients(model, plain)
