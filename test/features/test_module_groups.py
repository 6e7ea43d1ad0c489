"""Units of several modules: ``fully_shard([norm, head])``, or a tuple of modules in a policy.

What they compute, and verbs on them: the fuzzer's policies ``groups`` and ``lists``, ``together/test_programs.py``.
"""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
from checkpointed import CALLS
from clean import check_clean
from event_lines import as_text, same_everywhere, train
from expecttest import assert_expected_inline
from models import Block
from on_ranks import ranks
from parity import check_parity, check_same_gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatshard
import flatshard.fsdp2
from flatshard import BackwardPrefetch, MixedPrecision, ShardingStrategy, fully_shard
from flatshard._composable.state import unit_of
from flatshard._trace import record_events

GRAD_OP = ShardingStrategy.SHARD_GRAD_OP
WIDTH = 12


class Model(nn.Module):
    """Its norm and head can be one unit, or its embedding and head."""

    def __init__(self, tied: bool = False, call: str = "none") -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.call = CALLS[call]
        self.runs_head, self.skips_head, self.fails = True, False, False
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = self.call(self.norm, x)
        if self.fails:
            raise ValueError("on purpose")
        if self.skips_head:
            return flatshard.skip(self.head, x) * 0.0
        return self.call(self.head, x) if self.runs_head else x


def make_input(step: int, n: int) -> Tensor:
    return torch.randn(n, WIDTH)


# How a model is sharded: by calls, or by a policy.


def by_list(model: Model, group: Any, **options: Any) -> Model:
    pair = [model.norm, model.head]
    assert fully_shard(pair, process_group=group, **options) is pair
    return fully_shard(model, policy={Block}, process_group=group, **options)


def by_policy(model: Model, group: Any, **options: Any) -> Model:
    return fully_shard(model, policy={Block, (model.norm, model.head)}, process_group=group, **options)


def around(model: Model, group: Any, **options: Any) -> Model:
    return fully_shard(model, policy=[Block, [model.embed, model.head]], process_group=group, **options)


def across(model: Model, group: Any, **options: Any) -> Model:
    """Modules of two other units, in one of their own."""
    policy = {Block, (model.blocks[0].linear, model.head)}
    return fully_shard(model, policy=policy, process_group=group, **options)


def outermost(model: Model, group: Any, **options: Any) -> Model:
    """Only units of several modules: each call of one is a pass of its own."""
    fully_shard([model.embed, model.blocks[0]], process_group=group, **options)
    fully_shard([model.blocks[1], model.norm, model.head], policy={nn.Linear}, process_group=group, **options)
    return model


# -- Numbers -----------------------------------------------------------------------------------------------------------


class Halves(nn.Module):
    """Called twice in a pass: first for the half that is frozen, then for the one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, half: str) -> Tensor:
        return torch.tanh(getattr(self, half)(x))


class TwoCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.halves, self.head = nn.Linear(WIDTH, WIDTH), Halves(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.halves(self.halves(self.front(x), "frozen"), "trained"))


@ranks(1, 2)
def test_values_are_there_after_all_gradients_have_come(ctx):
    """The gradients of a unit are complete before backward comes to a forward of it that used frozen parameters only."""

    def make(frozen: str, call: str = "none") -> Model:
        model = Model(call=call)
        model.get_submodule(frozen).requires_grad_(False)
        return model

    cases = [
        (by_policy, lambda: make("norm"), {}),
        (by_policy, lambda: make("norm", "reentrant"), {"strategy": GRAD_OP}),
        (by_list, lambda: make("norm"), {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}),
        (outermost, lambda: make("norm", "reentrant"), {}),
        (outermost, lambda: make("norm"), {"strategy": GRAD_OP}),
        (across, lambda: make("blocks.0"), {}),
        (across, lambda: make("blocks.0", "reentrant"), {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}),
        (lambda m, group: fully_shard(m, policy={Halves}, process_group=group), TwoCalls, {}),
    ]
    for number, (how, model, options) in enumerate(cases):
        ctx.note(f"{number} {options}")
        shard = functools.partial(how, **options)
        check_clean(check_parity(ctx, model, make_input, steps=2, shard=shard).sharded)


class Routed(nn.Module):
    """Two members, in each of which the data choose the half that trains or the frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.middle, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.one, self.other = Halves(), Halves()

    def forward(self, x: Tensor, route: tuple[str, str]) -> Tensor:
        x = self.one(self.front(x), route[0])
        return self.head(self.other(torch.tanh(self.middle(x)), route[1]))


@ranks(2)
def test_ranks_use_different_parameters_of_the_members(ctx):
    """Where all gradients come at the first member on one rank, and at the second on another, both gather as often."""
    torch.manual_seed(0)
    plain = Routed().double()
    model = copy.deepcopy(plain)
    fully_shard([model.one, model.other], process_group=ctx.group)
    fully_shard(model, process_group=ctx.group)
    ways = list(itertools.product(("trained", "frozen"), repeat=2))
    for routes in [*itertools.product(ways, repeat=2), (ways[1], ways[2])]:
        ctx.note(f"{routes}")
        xs = torch.randn(2, 3, WIDTH, dtype=torch.float64)
        sum(plain(x, route).square().mean() / 2 for x, route in zip(xs, routes, strict=True)).backward()
        model(xs[ctx.rank], routes[ctx.rank]).square().mean().backward()
        check_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
        check_clean(model)


def chunks_in_one_backward(model: Model, x: Tensor) -> None:
    sum(model.head(chunk).square().sum() for chunk in model(x).chunk(2)).backward()


def chunks_one_by_one(model: Model, x: Tensor) -> None:
    """Each chunk's logits are freed before the next ones are made; gradients accumulate over all these backwards."""
    hidden = model(x)
    cut = hidden.detach().requires_grad_()
    for chunk in cut.chunk(2):
        model.head(chunk).square().sum().backward()
    hidden.backward(cut.grad)


def chunks_unsharded(model: Model, x: Tensor) -> None:
    """One gather and one reduction for all of them: as migration.md has it."""
    with flatshard.keep_unsharded(model.head):
        hidden = model(x)
        cut = hidden.detach().requires_grad_()
        with flatshard.no_sync(model.head):
            for chunk in cut.chunk(2):
                model.head(chunk).square().sum().backward()
        hidden.backward(cut.grad)


def chunks_checkpointed(model: Model, x: Tensor) -> None:
    def loss(chunk: Tensor) -> Tensor:
        return model.head(chunk).square().sum()

    sum(checkpoint(loss, chunk, use_reentrant=False) for chunk in model(x).chunk(2)).backward()


@ranks(1, 2)
def test_chunked_loss(ctx):
    """The head is called per chunk, after the model's forward: what FSDP2 has this for."""
    for run, pair in (
        (chunks_in_one_backward, {"all-gather": 3, "reduce-scatter": 1}),  # each call outside of the model is a pass
        (chunks_checkpointed, {"all-gather": 3, "reduce-scatter": 1}),
        (chunks_one_by_one, {"all-gather": 4, "reduce-scatter": 3}),
        (chunks_unsharded, {"all-gather": 1, "reduce-scatter": 1}),
    ):
        ctx.note(run.__name__)
        torch.manual_seed(0)
        plain = Model().double()
        plain.runs_head = False
        model = by_list(copy.deepcopy(plain), ctx.group)
        for _ in range(2):
            slices = torch.randn(ctx.world_size, 4, WIDTH, dtype=torch.float64)
            for each in (plain, model):
                each.zero_grad()
            for x in slices:
                (sum(plain.head(chunk).square().sum() for chunk in plain(x).chunk(2)) / ctx.world_size).backward()
            with record_events() as events:
                run(model, slices[ctx.rank])
            counts = {verb: sum(e.startswith(f"{verb} norm, head") for e in events) for verb in pair}
            assert ctx.world_size == 1 or counts == pair, (run.__name__, counts)
            check_same_gradients(model, plain)
            check_clean(model)


@ranks(2)
def test_skipped_on_one_rank(ctx):
    """One rank leaves out the head, or everything; the others run it."""
    torch.manual_seed(0)
    plain = Model().double()
    for what in ("head", "all"):
        model = by_policy(copy.deepcopy(plain), ctx.group)
        for _ in range(2):
            plain.zero_grad()
            model.zero_grad()
            x = torch.randn(2, WIDTH, dtype=torch.float64)
            (plain(x).square().sum() / ctx.world_size).backward()
            if ctx.rank == 1 and what == "all":
                flatshard.skip(model, torch.zeros((), dtype=torch.float64)).backward()
            elif ctx.rank == 1:
                model.skips_head = True
                model(x).sum().backward()
            else:
                model(x).square().sum().backward()
            check_same_gradients(model, plain)


# -- Order, and FSDP2's ------------------------------------------------------------------------------------------------


def events(ctx, how: Any, no_grad: bool = False) -> list[list[str]]:
    model = how(Model(), ctx.group)
    x = torch.ones(2, WIDTH)
    train(model, x)
    if no_grad:
        with torch.no_grad(), flatshard._trace.record_events() as found:
            model(x)
        return [found]
    return [train(model, x)]


def test_one_gather_for_all_members(pool):
    (adjacent,) = same_everywhere(pool.run(events, by_policy))
    (apart,) = same_everywhere(pool.run(events, around))
    assert (adjacent,) == tuple(same_everywhere(pool.run(events, by_list)))
    assert_expected_inline(
        as_text([adjacent, apart]),
        """\
all-gather <root>           all-gather <root>
all-gather blocks.0         all-gather embed, head
all-gather blocks.1         all-gather blocks.0
reshard blocks.0            all-gather blocks.1
all-gather norm, head       reshard blocks.0
reshard blocks.1            reshard blocks.1
reshard norm, head          reshard embed, head
-- backward                 -- backward
all-gather norm, head       all-gather embed, head
all-gather blocks.1         all-gather blocks.1
reshard norm, head          reshard <root>
reduce-scatter norm, head   all-gather blocks.0
all-gather blocks.0         reshard blocks.1
reshard blocks.1            reduce-scatter blocks.1
reduce-scatter blocks.1     reshard blocks.0
reshard blocks.0            reduce-scatter blocks.0
reduce-scatter blocks.0     reshard embed, head
reshard <root>              reduce-scatter embed, head
reduce-scatter <root>       reduce-scatter <root>""",
    )
    (inference,) = same_everywhere(pool.run(events, around, True))
    assert_expected_inline(
        as_text([inference]),
        """\
all-gather <root>
all-gather embed, head
all-gather blocks.0
all-gather blocks.1
reshard blocks.0
reshard blocks.1
reshard embed, head
reshard <root>""",
    )


def unused(ctx) -> list[list[str]]:
    model = by_policy(Model(), ctx.group)
    model.runs_head = False
    return [train(model, torch.ones(2, WIDTH)) for _ in range(2)]


def test_freed_at_the_end_of_the_pass_if_some_do_not_run(pool):
    assert_expected_inline(
        as_text(same_everywhere(pool.run(unused))),
        """\
all-gather <root>          all-gather <root>
all-gather blocks.0        all-gather blocks.0
reshard blocks.0           all-gather blocks.1
all-gather blocks.1        reshard blocks.0
reshard blocks.1           all-gather norm, head
all-gather norm, head      reshard blocks.1
reshard norm, head         reshard norm, head
-- backward                -- backward
all-gather norm, head      all-gather norm, head
all-gather blocks.1        all-gather blocks.1
reduce-scatter norm, head  reduce-scatter norm, head
all-gather blocks.0        reshard norm, head
reshard blocks.1           all-gather blocks.0
reduce-scatter blocks.1    reshard blocks.1
reshard blocks.0           reduce-scatter blocks.1
reduce-scatter blocks.0    reshard blocks.0
reshard <root>             reduce-scatter blocks.0
reduce-scatter <root>      reshard <root>
reshard norm, head         reduce-scatter <root>""",
    )


def test_members_are_freed_when_all_have_run(world):
    world(2)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    fully_shard([model[0], model[1]])
    fully_shard(model, policy={nn.Linear})
    with torch.no_grad(), record_events() as events:
        model(torch.ones(2, 4))
    assert events.index("reshard 0, 1") < events.index("reshard 2")


# -- Names, verbs, copies ----------------------------------------------------------------------------------------------


def test_names(world):
    world(2)
    model = Model()
    pair = fully_shard([model.norm, model.head])
    assert pair[0] is model.norm
    unit = unit_of(model.norm)
    assert unit is unit_of(model.head)
    assert unit.fqn == ""
    assert [i.fqn for f in unit.handle.flats for i in f.layout.params] == ["0.weight", "0.bias", "1.weight"]
    fully_shard(model, policy={Block})
    other = Model()
    fully_shard(other, policy={Block, (other.norm, other.head)})
    for each in (model, other):
        units = flatshard.describe(each).units
        assert [u.fqn for u in units] == ["", "blocks.0", "blocks.1", "norm, head"]
        assert units[-1].module == "LayerNorm, Linear"
        assert [f for flat in units[-1].flats for f in flat.fqns] == ["norm.weight", "norm.bias", "head.weight"]
    assert list(model.state_dict()) == list(Model().state_dict())
    fully_shard(nn.Sequential(model, nn.Linear(2, 2)))
    assert unit.fqn == "0.norm, 0.head"
    assert flatshard.tensors.shard_info(model.head.weight).fqn == "0.head.weight"
    assert "'0.norm, 0.head', LayerNorm, Linear" in repr(unit)
    one = Model()
    fully_shard([one.norm])
    assert unit_of(one.norm).module is one.norm


@ranks(2)
def test_hooks_and_copies(ctx):
    plain = Model()
    model = by_policy(copy.deepcopy(plain), ctx.group)
    copied, alone = copy.deepcopy(model), copy.deepcopy(model.norm)
    assert unit_of(copied.norm) is unit_of(copied.head) is not unit_of(model.norm)
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(alone(x), plain.norm(x))
    called: list[nn.Module] = []
    for each in (model, copied):
        seen = flatshard.optim.register_gradients_reduced_hook(each.head, called.append)
        each(x).sum().backward()
        assert called == [each.head]
        called.clear()
        seen.remove()


def test_a_copy_that_was_refused_leaves_no_units(world):
    """The group is copied, and some of its modules are not."""
    world(2)
    model = outermost(Model(), None)
    inner = model.blocks[1].linear
    with flatshard.summon_full_params(inner), pytest.raises(RuntimeError, match="cannot copy unit") as refused:
        copy.deepcopy(model)
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()  # looks at all units
    assert refused.tb is not None  # it keeps what was copied alive


@ranks(2)
def test_eval_mode_of_each_member(ctx):
    precision = MixedPrecision(param_dtype=torch.bfloat16, full_precision_in_eval=True)
    model = by_policy(Model(), ctx.group, mixed_precision=precision)
    x = torch.ones(2, WIDTH)
    assert model.head(model.norm(x)).dtype is torch.bfloat16
    model.norm.eval()  # each of the modules has a mode of its own
    with torch.no_grad():
        assert model.norm(x).dtype is torch.float32
        assert model.head(x).dtype is torch.bfloat16


class Encoder(nn.Linear):
    def encode(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


@ranks(2)
def test_forward_methods(ctx):
    first, second = Encoder(4, 4), Encoder(4, 4)
    fully_shard([first, second], process_group=ctx.group)
    flatshard.register_forward_method(second, "encode")
    x = torch.ones(2, 4)
    with flatshard.summon_full_params(second):
        expected = nn.functional.linear(x, second.weight)
    torch.testing.assert_close(second.encode(x), expected)
    copied = copy.deepcopy(second)
    torch.testing.assert_close(copied.encode(x), expected)


def test_plan():
    with torch.device("meta"):
        model = Model()
    plan = flatshard.plan(model, policy={Block, (model.norm, model.head)}, world_size=4, device="cpu")
    assert [unit.fqn for unit in plan.units] == ["", "blocks.0", "blocks.1", "norm, head"]
    names = [c.unit for c in plan.collectives if "gather" in c.kind]
    assert names.count("norm, head") == 2
    again = flatshard.plan(
        model,
        policy=[Block, [model.norm, model.head]],
        world_size=4,
        example_inputs=torch.empty(2, WIDTH),
        device="cpu",
    )
    assert [(c.kind, c.unit) for c in again.collectives] == [(c.kind, c.unit) for c in plan.collectives]


# -- Mistakes ----------------------------------------------------------------------------------------------------------


def test_mistakes(world):
    world(2)
    model = Model()
    norm, head, block, inner = model.norm, model.head, model.blocks[0], model.blocks[0].linear

    def refused(message: str, modules: Any = None, policy: Any = None, **options: Any) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            fully_shard(model if modules is None else modules, policy=policy, **options)

    refused("it is empty", [])
    for modules, message in (
        ([norm, norm], "a LayerNorm is in it twice"),
        ([block, inner], "a Linear in it is inside a Block in it"),
        ([norm, model.blocks], "ModuleList has no forward"),
    ):
        refused(message, modules)
        refused(message, policy={Block, tuple(modules)})
    refused(r"takes an nn\.Module as an item of the list, got a str", [norm, "head"])
    refused("'head' is not a module", policy={Block, (norm, "head")})
    refused("has a Linear, which is not a submodule of the Model", policy={(norm, nn.Linear(2, 2))})
    refused("'head', which is in ignored_states, too", policy={(norm, head)}, ignored_states=[head])
    refused("'head', which is in another tuple", policy=[(norm, head), (head, model.embed)])
    assert not any(unit_of(m) for m in model.modules())
    fully_shard([norm, head])
    refused("this Linear is sharded already", head)
    refused("this Linear is sharded already", [model.embed, head])
    refused("this LayerNorm is sharded already", policy={Block, (norm, model.embed)})
    fully_shard(block)
    refused(r"'blocks\.0\.linear', which is sharded already", policy={Block, (inner, model.embed)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fully_shard(model, policy={Block})
