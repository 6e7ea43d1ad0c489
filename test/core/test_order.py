"""The order of gathers, frees and reductions as text, so that a change shows as a readable diff.

Events come from ``flatshard._base.trace.record_events``. All ranks must issue the same collectives in the same order, or
unrelated ones would match. :func:`same_everywhere` checks that in every test.

Accept a wanted change with ``EXPECTTEST_ACCEPT=1 python -m pytest test/core/test_order.py``, and read the diff.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from event_lines import as_text, same_everywhere, sharded, train
from expecttest import assert_expected_inline
from models import Block, Net
from on_ranks import ranks
from parity import check_same_gradients, check_same_params, step_all, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard import BackwardPrefetch, ShardingStrategy, fully_shard, optim, reshard
from flatshard._base.trace import record_events
from flatshard._composable.find import units_below
from flatshard._composable.reduction_queue import add_back

# -- Strategies and prefetching ----------------------------------------------------------------------------------------

STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)


def two_steps(ctx, **options: Any) -> list[list[str]]:
    model = sharded(ctx, Net(), **options)
    return [train(model), train(model)]


def of_each_strategy(ctx) -> list[list[str]]:
    (first, full), *others = [two_steps(ctx, strategy=strategy) for strategy in STRATEGIES]
    assert two_steps(ctx, forward_prefetch=False) == [first, first]
    assert all(before == after for before, after in others)
    return [first, full, *(after for _, after in others)]


def test_strategies(pool):
    columns = same_everywhere(pool.run(of_each_strategy))
    # In its second step, FULL_SHARD knows the order and gathers one unit ahead.
    heads = ("FULL_SHARD, first step", "then", "SHARD_GRAD_OP", "NO_SHARD")
    assert_expected_inline(
        as_text([[head, *column] for head, column in zip(heads, columns, strict=True)]),
        """\
FULL_SHARD, first step   then                     SHARD_GRAD_OP            NO_SHARD
all-gather <root>        all-gather <root>        all-gather <root>        -- backward
all-gather blocks.0      all-gather blocks.0      all-gather blocks.0      all-reduce blocks.2
reshard blocks.0         all-gather blocks.1      all-gather blocks.1      all-reduce blocks.1
all-gather blocks.1      reshard blocks.0         all-gather blocks.2      all-reduce blocks.0
reshard blocks.1         all-gather blocks.2      -- backward              all-reduce <root>
all-gather blocks.2      reshard blocks.1         reshard blocks.2
reshard blocks.2         reshard blocks.2         reduce-scatter blocks.2
-- backward              -- backward              reshard blocks.1
all-gather blocks.2      all-gather blocks.2      reduce-scatter blocks.1
all-gather blocks.1      all-gather blocks.1      reshard blocks.0
reshard blocks.2         reshard blocks.2         reduce-scatter blocks.0
reduce-scatter blocks.2  reduce-scatter blocks.2  reshard <root>
all-gather blocks.0      all-gather blocks.0      reduce-scatter <root>
reshard blocks.1         reshard blocks.1
reduce-scatter blocks.1  reduce-scatter blocks.1
reshard blocks.0         reshard blocks.0
reduce-scatter blocks.0  reduce-scatter blocks.0
reshard <root>           reshard <root>
reduce-scatter <root>    reduce-scatter <root>""",
    )


def backward_of_each_prefetch(ctx) -> list[list[str]]:
    steps = [two_steps(ctx, backward_prefetch=prefetch)[1] for prefetch in (*BackwardPrefetch, None)]
    return [step[step.index("-- backward") :] for step in steps]


def test_backward_prefetch(pool):
    columns = same_everywhere(pool.run(backward_of_each_prefetch))
    # BACKWARD_PRE gathers the next unit before freeing this one, BACKWARD_POST after that, None on demand.
    assert_expected_inline(
        as_text([["BACKWARD_PRE", *columns[0]], ["POST", *columns[1]], ["None", *columns[2]]]),
        """\
BACKWARD_PRE             POST                     None
-- backward              -- backward              -- backward
all-gather blocks.2      all-gather blocks.2      all-gather blocks.2
all-gather blocks.1      reshard blocks.2         reshard blocks.2
reshard blocks.2         reduce-scatter blocks.2  reduce-scatter blocks.2
reduce-scatter blocks.2  all-gather blocks.1      all-gather blocks.1
all-gather blocks.0      reshard blocks.1         reshard blocks.1
reshard blocks.1         reduce-scatter blocks.1  reduce-scatter blocks.1
reduce-scatter blocks.1  all-gather blocks.0      all-gather blocks.0
reshard blocks.0         reshard blocks.0         reshard blocks.0
reduce-scatter blocks.0  reduce-scatter blocks.0  reduce-scatter blocks.0
reshard <root>           reshard <root>           reshard <root>
reduce-scatter <root>    reduce-scatter <root>    reduce-scatter <root>""",
    )


# -- Passes that differ from the last ----------------------------------------------------------------------------------


def change_order(ctx) -> list[list[str]]:
    model = sharded(ctx, Net())
    train(model)
    steps = []
    for order in ([0, 2], [0, 2], [0, 1, 2], [1, 0, 2], [1, 0, 2]):
        model.order = order
        steps.append(train(model))
    return [step[: step.index("-- backward")] for step in steps]


def test_skipped_and_swapped_units(pool):
    steps = same_everywhere(pool.run(change_order))
    # The first forward frees the prefetched blocks.1 unused at its end. The next step does not gather it.
    assert_expected_inline(
        as_text(steps),
        """\
all-gather <root>    all-gather <root>    all-gather <root>    all-gather <root>    all-gather <root>
all-gather blocks.0  all-gather blocks.0  all-gather blocks.0  all-gather blocks.0  all-gather blocks.1
all-gather blocks.1  all-gather blocks.2  all-gather blocks.2  all-gather blocks.1  all-gather blocks.0
reshard blocks.0     reshard blocks.0     reshard blocks.0     all-gather blocks.2  reshard blocks.1
all-gather blocks.2  reshard blocks.2     all-gather blocks.1  reshard blocks.1     all-gather blocks.2
reshard blocks.2                          reshard blocks.1     all-gather blocks.1  reshard blocks.0
reshard blocks.1                          reshard blocks.2     reshard blocks.0     reshard blocks.2
                                                               reshard blocks.2
                                                               reshard blocks.1""",
    )


@ranks(2)
def test_a_partly_frozen_unit_called_twice_stays_until_backward_has_left_its_first_forward(ctx):
    model = Net()
    model.blocks[0].linear.bias.requires_grad_(False)
    model.order = [0, 1, 0]
    sharded(ctx, model)
    for _ in range(2):
        step = train(model)
        assert step[step.index("-- backward") :].count("all-gather blocks.0") == 1


@ranks(2)
def test_a_reduction_ends_when_a_sixth_of_the_next_units_gradients_have_come(ctx):
    units = [nn.Sequential(*(nn.Linear(2, 2) for _ in range(12))) for _ in range(2)]
    model = sharded(ctx, nn.Sequential(*units), nn.Sequential)
    seen: list[str] = []
    optim.register_gradients_reduced_hook(model[1], lambda _: seen.append("reduced"))
    for param in model[0].parameters():
        param.register_hook(lambda grad: seen.append("gradient"))
    model(torch.ones(1, 2)).sum().backward()
    assert (seen.count("gradient"), seen.index("reduced")) == (24, 24 // 6)


# -- One order of reductions on all ranks ------------------------------------------------------------------------------


class Around(nn.Module):
    """Own parameters before and after inner units. They complete last, or earlier if ``before`` is left out.

    ``skip`` names the child that this rank leaves out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before, self.first, self.second, self.after = nn.Linear(4, 4), Block(), Block(), nn.Linear(4, 4)
        self.skip: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        for name, child in self.named_children():
            x = child(x) if name != self.skip else x * 1.5
        return x


class Fork(nn.Module):
    """A unit with two branches. ``skip`` leaves out one or both, but the unit itself runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.skip: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.skip == "both":
            return x * 0.5
        if self.skip != "a":
            x = torch.tanh(self.a(x))
        return x + self.b(x) if self.skip != "b" else x


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.one, self.fork, self.two = Around(), Fork(), Around()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.fork(self.one(self.front(x)))))

    def take_path(self, path: dict[str, str]) -> None:
        for name in ("one", "fork", "two"):
            getattr(self, name).skip = path.get(name)


PATHS: dict[str, list[dict[str, str]]] = {
    "before and after": [{"one": "after"}, {"one": "before"}, {"two": "after"}],
    "a branch on each": [{"fork": "a"}, {"fork": "b"}, {}],
    "a whole unit's parameters": [{"fork": "both"}, {}, {"fork": "both", "one": "before"}],
    "one that nobody uses": [{"fork": "b"}, {"fork": "b"}, {"fork": "b", "two": "before"}],
}


POST, NO_SHARD = {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, {"strategy": ShardingStrategy.NO_SHARD}
ON_DEMAND: dict[str, Any] = {"backward_prefetch": None}
IN_TURN = ["two.second", "two.first", "two", "fork", "one.second", "one.first", "one", "<root>"]


@pytest.mark.parametrize(
    "options", [{}, POST, ON_DEMAND, NO_SHARD], ids=["FULL_SHARD", "BACKWARD_POST", "on demand", "NO_SHARD"]
)
@ranks(3, timeout=20)
def test_ranks_that_take_different_paths_reduce_in_one_order(ctx, options: dict[str, Any]):
    """Paths change over several steps, so that leftovers of one step would show in the next."""
    plain, model = twins(ctx, Uneven, {Block, Around, Fork}, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (plain, model)]
    for name, paths in [*PATHS.items(), *PATHS.items()]:
        ctx.note(name)
        inputs = [torch.randn(2, 4, dtype=torch.double) for _ in paths]
        for path, x in zip(paths, inputs, strict=True):
            plain.take_path(path)
            (plain(x).square().sum() / len(paths)).backward()
        model.take_path(paths[ctx.rank])
        with record_events() as events:
            model(inputs[ctx.rank]).square().sum().backward()
        check_same_gradients(model, plain)
        assert [e.split()[1] for e in events if e.startswith(("reduce-scatter", "all-reduce"))] == IN_TURN
        assert all(u.handle.is_sharded for u in units_below(model))
        step_all(optimizers)
    check_same_params(model, plain)


class Late(nn.Module):
    """A unit whose own parameters receive their gradients before backward reaches the inner unit."""

    def __init__(self) -> None:
        super().__init__()
        self.fork, self.after = Fork(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.fork(x))


class Recomputed(nn.Module):
    """A unit whose parameters receive their gradients in a backward inside the backward."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


class Passing(nn.Module):
    """May return its input, so that backward reaches it after the previous unit, at the same node. May have parameters."""

    passes = False

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x if self.passes else self.inner(x) if self.inner else x * 1.0


class Within(Passing):
    """Parameters before, after and inside a reentrant checkpoint, which also has a unit. The first may be left out."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4))
        self.recomputed, self.after = nn.Sequential(Block(), nn.Linear(4, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(checkpoint(self.recomputed, super().forward(x), use_reentrant=True))


class Tied(nn.Module):
    """A unit with a weight that a unit inside, which may be left out, uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.after = Passing(nn.Linear(4, 4)), nn.Linear(4, 4)
        self.after.weight = self.inner.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(x))


UNUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a complete unit waits for the units inside": (Late, "reduce-scatter 1.fork 1 <root>"),
    "a unit that returns its input completes nothing before it": (
        lambda: nn.Sequential(Recomputed(), Passing()),
        "reduce-scatter 1.0 <root>",
    ),
    "and is gathered before the unit that made it": (
        lambda: nn.Sequential(Recomputed(), Passing(nn.Linear(4, 4))),
        "all-gather 1.1 1.0",
    ),
    "and is reduced before a unit that is recomputed": (
        lambda: nn.Sequential(Recomputed(Block()), Passing(nn.Linear(4, 4))),
        "reduce-scatter 1.1 1.0.inner <root>",
    ),
    "a unit waits for one in a checkpoint that may have gradients for both": (
        Within,
        "reduce-scatter 1.recomputed.0 1 <root>",
    ),
    "a unit stays until backward has come to those that use its parameters": (Tied, "all-gather 1 1.inner"),
}


@pytest.mark.parametrize("name", UNUSED)
@ranks(2, timeout=20)
def test_what_one_rank_does_not_use(ctx, name: str):
    make, expected = UNUSED[name]
    model = sharded(ctx, nn.Sequential(nn.Linear(4, 4), make()), {Late, Block, Fork, Recomputed, Passing, Tied})
    for module in model.modules() if ctx.rank == 0 else ():
        if isinstance(module, Fork):
            module.skip = "both"
        elif isinstance(module, Passing):
            module.passes = True
    loss = model(torch.ones(2, 4)).sum()
    with record_events() as events:
        loss.backward()
    kind, *units = expected.split()
    assert [line.split()[1] for line in events if line.startswith(kind)] == units


@ranks(2, timeout=20)
def test_a_unit_waits_for_one_that_ran_between_its_two_modules(ctx):
    """Rank 0 uses only the last module and returns the model's input from the first, which backward does not reach."""
    model = nn.Sequential(Passing(), Fork(), nn.Linear(4, 4))
    fully_shard([model[0], model[2]], process_group=ctx.group)
    fully_shard(model, policy={Fork}, process_group=ctx.group)
    model[0].passes, model[1].skip = ctx.rank == 0, "both" if ctx.rank == 0 else None
    loss = model(torch.ones(2, 4, requires_grad=True)).sum()
    with record_events() as events:
        loss.backward()
    assert [e for e in events if e.startswith("reduce-scatter")] == ["reduce-scatter 1", "reduce-scatter 0, 2"]


@pytest.mark.parametrize(("frozen", "passes"), [("a", (0, 1)), ("b", (0, 1)), ("b", (0,))])
@ranks(2, timeout=20)
def test_added_losses_of_partly_frozen_units(ctx, frozen: str, passes: tuple[int, ...]):
    """A rank whose graph lacks a unit's parameters gathers and reduces it as often, and as late, as the others."""

    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 4), Fork(), Fork(), nn.Linear(4, 2))
        for fork in net[1:3]:
            fork.get_submodule(frozen).requires_grad_(False)
        return net

    plain, model = twins(ctx, make, {Fork})
    inputs = torch.randn(2, 2, 3, 4, dtype=torch.double)
    left_out = "a" if frozen == "b" else "b"
    for net, of in ((plain, range(2)), (model, [ctx.rank])):
        for rank in of:
            losses = []
            for of_pass, x in enumerate(inputs[rank]):
                for number, fork in enumerate(net[1:3]):
                    fork.skip = left_out if number == rank and of_pass in passes else None
                losses.append(net(x).square().mean())
            (sum(losses) / len(of)).backward()
    check_same_gradients(model, plain)


@pytest.mark.parametrize(
    ("strategy", "freezes"), [("FULL_SHARD", False), ("SHARD_GRAD_OP", False), ("FULL_SHARD", True)]
)
@ranks(2, timeout=20)
def test_added_losses_of_units_that_ranks_leave_out(ctx, strategy: str, freezes: bool):
    """All ranks gather units equally often, whichever each left out before. ``freezes`` a weight in one pass."""

    def run(net: nn.Module, passes: list[int], left_out: set[tuple[int, int]]) -> None:
        of, losses = range(2) if net is plain else [ctx.rank], []
        for number, rank in itertools.product(passes, of):
            net[1].skip = "both" if (rank, number) in left_out else None
            net[1].a.weight.requires_grad_(not freezes or number != 1)
            losses.append(net(inputs[number][rank]).square().mean())
        (sum(losses) / len(of)).backward()

    inputs = torch.randn(3, 2, 3, 4, dtype=torch.double)
    for before in (set(), {(0, 2)}):
        for left_out in ({(0, 0)}, {(0, 1)}, {(0, 0), (0, 1)}, {(0, 0), (1, 1)}):
            ctx.note(f"{left_out}, {before} before")
            layers = [nn.Linear(4, 4), Fork(), nn.Linear(4, 2)]
            plain, model = twins(ctx, lambda layers=layers: nn.Sequential(*layers), {Fork}, strategy=strategy)
            for net in (plain, model):
                run(net, [2], before)
                net.zero_grad()
                run(net, [0, 1], left_out)
            check_same_gradients(model, plain)


def test_a_unit_without_gradients_is_reduced_in_its_turn(world):
    """The unit must not wait for the end of backward: other ranks may have its gradients and wait for this rank."""
    world(8)
    model = fully_shard(Uneven(), policy={Block, Around, Fork})
    model.take_path({"fork": "both"})
    model(torch.ones(2, 4)).sum().backward()
    with record_events() as events:
        model(torch.ones(2, 4)).sum().backward()
    at = events.index("reduce-scatter fork")
    assert events.index("reduce-scatter two") < at < events.index("all-gather one.second", at - 3)
    assert events.count("reduce-scatter fork") == 1


def test_what_comes_back_keeps_its_turn(world):
    """Another graph's backward may reach units in a different order."""
    world(2)
    model = fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), policy={nn.Linear})
    model(torch.ones(2, 4)).sum().backward()
    root, *units = units_below(model)
    for unit in (units[1], units[0], units[2]):
        add_back(root.context.reductions, unit)
    assert [*root.context.reductions.units()] == units[::-1]


def test_what_was_frozen_since_its_forward_does_not_count(world):
    """Autograd calls the frozen parameter's hook without a gradient. The unit completes with its last real gradient."""
    world(2)
    model = fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
    loss = model(torch.ones(2, 4)).sum()
    for param in [*model.parameters()][::2]:
        param.requires_grad_(False)
    with torch.no_grad():
        model(torch.ones(2, 4))
    with record_events() as events:
        loss.backward()
    assert events.count("reduce-scatter <root>") == 1


class Bypassed(nn.Linear):
    def forward(self, x: Tensor, bypass: Tensor | None = None) -> Tensor:
        self.shown = [self.weight, self.bias]
        return super().forward(x) if bypass is None else x * bypass


@pytest.mark.parametrize("chooses", [False, True])
def test_what_no_value_is_needed_for_is_not_gathered_again(world, chooses: bool):
    """Backward reaches an earlier forward of the unit whose graph holds no parameter.
    Another rank's graph may hold some, and it reduces the unit then.
    ``chooses``: the backward is for selected leaves, so it is unknown beforehand whether backward gets there.
    """
    world(2)
    model = fully_shard(Bypassed(4, 4))
    x, bypass = torch.ones(2, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    loss = model(model(x, bypass)).sum()
    reshard(model)
    with record_events() as events:
        loss.backward(inputs=[x, *vars(model).pop("shown")] if chooses else None)
    assert sorted(e.split()[0] for e in events) == ["all-gather", "reduce-scatter", "reshard"]


class OnlyParameters(nn.Module):
    """Graphs of two forwards share all nodes after that of the embedding, and after that of the first unit's input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.first = nn.Parameter(torch.ones(4)), Passing(nn.Linear(4, 4))
        self.words, self.last = nn.Embedding(2, 4), nn.Linear(4, 4)
        self.first.inner.register_forward_hook(lambda module, args, output: None)  # flatshard looks at what it sees

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x * self.scale) + self.words(torch.arange(2)))


class Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        for name in ("zeroth", "first", "last"):
            self.add_module(name, Passing(nn.Linear(4, 4)))


@pytest.mark.parametrize("kind", [Layers, OnlyParameters])
def test_a_graph_that_waits_for_a_backward_of_its_own_delays_nothing(world, kind: type[nn.Module]):
    world(2)
    model = kind()
    for module in (*model.children(), model):
        fully_shard(module)
    steps = []
    for passes in ([False], [False], [False, False], [False, True]):
        losses = []
        for model.get_submodule("first").passes in passes:
            losses.append(model(torch.ones(2, 4)).sum())
        with record_events() as events:
            losses[0].backward()
        steps.append(events)
    assert steps[1] == steps[2] == steps[3]


def test_backward_reaches_a_unit_and_the_one_inside_that_made_its_output(world):
    world(2)
    model = fully_shard(nn.Sequential(Block(), nn.Sequential(nn.Linear(4, 4), Block())), policy={nn.Sequential, Block})
    events = train(model)
    assert [e for e in events if e.startswith("reduce")] == [f"reduce-scatter {unit}" for unit in ("1.1", "1", "0")]


class Skipping(nn.Sequential):
    """Leaves out its last module if ``short``. Its backward raises before reaching the first module if ``fails``."""

    short = fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        if self.fails:
            x.register_hook(lambda grad: 1 / 0)
        for module in [*self][1 : -1 if self.short else None]:
            x = module(x)
        return x


def collectives_of_a_step(model: Skipping) -> list[str]:
    with record_events() as events:
        loss = model(torch.ones(2, 4)).sum()
        with pytest.raises(ZeroDivisionError) if model.fails else contextlib.nullcontext():
            loss.backward()
    return [e for e in events if not e.startswith(("reshard", "lend"))]


def test_what_a_rank_left_out_before_does_not_change_its_order(world):
    """Other ranks may have run all modules: even a failing backward must start the same reductions."""
    world(8)
    model = Skipping(*(nn.Linear(4, 4) for _ in range(4)))
    fully_shard([model[1], model[3]])
    fully_shard(model, policy={nn.Linear})
    steps = []
    for model.short, model.fails in [(False, False), (False, True), (True, False), (False, False), (False, True)]:
        steps.append(collectives_of_a_step(model))
    assert steps[1] == steps[4] != steps[2]
    assert "reduce-scatter 1, 3" in steps[1]


class Scaled(nn.Module):
    """A unit that uses its own parameter last, so its gradient comes before backward reaches the inner unit."""

    short = False

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.short else self.inner(x) * self.scale


def test_what_a_unit_around_others_left_out_before_does_not_change_when_it_is_reduced(world):
    """The outer unit waits for inner ones only in a backward without gradients for some of its parameters."""
    world(8)
    model = Skipping(nn.Linear(4, 4), Scaled())
    fully_shard(model, policy={nn.Linear, Scaled})
    steps = []
    for model.fails, model[1].short in [(True, False), (False, True), (True, False)]:
        steps.append(collectives_of_a_step(model))
    assert steps[0] == steps[2]
    assert [e for e in steps[0] if e.startswith("reduce-scatter")] == ["reduce-scatter 1.inner", "reduce-scatter 1"]


class Shifted(Scaled):
    """A ``Scaled`` that runs its inner unit also if ``short``, and then leaves out a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) * self.scale
        return x if self.short else x + self.shift


def test_a_unit_waits_for_one_inside_that_an_earlier_backward_has_reduced(world):
    """A rank that leaves out a parameter has all gradients of the outer unit later than others."""
    world(8)
    for short in (False, True):
        model = fully_shard(Shifted(), policy={nn.Linear})
        model.short = short
        loss = model(torch.ones(2, 4)).sum()
        model.inner(torch.ones(2, 4)).sum().backward()
        with record_events() as events:
            loss.backward()
        reduced = [e for e in events if e.startswith("reduce-scatter")]
        assert reduced == ["reduce-scatter inner", "reduce-scatter <root>"], short


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_added_losses_whose_backward_fails(world, strategy: str):
    """All ranks start the same reductions, including a rank that left a unit out in the first pass."""
    world(8)
    model = Skipping(*(nn.Linear(4, 4) for _ in range(3)), Passing(nn.LayerNorm(4)))
    fully_shard(model, policy={nn.Linear, Passing}, strategy=strategy)
    steps = []
    for passes in (False, True):
        losses = []
        for model[3].passes, model.fails in ((passes, False), (False, True)):
            losses.append(model(torch.ones(2, 4)).sum())
        with record_events() as events, pytest.raises(ZeroDivisionError):
            sum(losses).backward()
        steps.append([e for e in events if not e.startswith(("reshard", "lend"))])
    assert steps[0] == steps[1]
    model.fails = False
    model(torch.ones(2, 4)).sum().backward()  # training continues, and the failed gradients are dropped
