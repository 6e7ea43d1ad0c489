"""Units of several modules: ``fully_shard([norm, head])``, or a tuple of modules in a policy."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import CALLS
from clean import check_clean
from event_lines import as_text, same_everywhere, train
from expecttest import assert_expected_inline
from models import Block
from on_ranks import ranks
from pairs import some
from parity import check_parity, check_same_gradients, check_same_params
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

import flatshard
import flatshard.fsdp2
from flatshard import BackwardPrefetch, MixedPrecision, ShardingStrategy, _torch, fully_shard
from flatshard._composable.state import unit_of
from flatshard._trace import record_events

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
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


HOW = [by_list, by_policy, around, across, outermost]


# -- Numbers -----------------------------------------------------------------------------------------------------------


CASES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [(how, {}, {}) for how in HOW]
CASES += [(how, {"tied": True}, {}) for how in (by_list, around, across)]
CASES += [(how, {}, {"strategy": s}) for how, s in ((by_policy, GRAD_OP), (around, NO_SHARD), (by_list, GRAD_OP))]
CASES += [(by_policy, {"call": call}, {}) for call in ("reentrant", "non-reentrant")]
CASES += [(around, {"call": "non-reentrant", "tied": True}, {"reshard_after_forward": False})]
CASES += [(how, {}, {"static_buffers": True}) for how in (by_policy, around)]
CASES += [
    (by_policy, {}, {"backward_prefetch": None}),
    (around, {}, {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}),
]


def train_some(ctx, numbers: list[int]) -> None:
    for how, model, options in [CASES[number] for number in numbers]:
        ctx.note(f"{how.__name__} {model} {options}")
        run = check_parity(
            ctx,
            lambda model=model: Model(**model),
            make_input,
            steps=3,
            shard=lambda m, group, how=how, options=options: how(m, group, **options),
            replicated=options.get("strategy") is NO_SHARD,
        )
        if not options.get("static_buffers"):
            check_clean(run.sharded)


@pytest.mark.parametrize("world_size", [2, 3])
def test_trains_as_one_process(pool, world_size):
    pool.run(train_some, some(range(len(CASES)), 6, turn=world_size), world_size=world_size)


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


@ranks(2)
def test_a_member_that_is_frozen_or_does_not_run(ctx):
    def freeze_head(model: Model, step: int) -> None:
        model.head.requires_grad_(step % 2 == 0)

    def leave_out_head(model: Model, step: int) -> None:
        model.runs_head = step % 2 == 0

    for how in (by_policy, around, across):
        for change in (freeze_head, leave_out_head):
            ctx.note(f"{how.__name__} {change.__name__}")
            run = check_parity(ctx, Model, make_input, steps=4, shard=how, before_step=change)
            check_clean(run.sharded)


@ranks(2)
def test_an_exception_between_the_members(ctx):
    def fail_first(model: Model, step: int) -> None:
        if step == 1:
            model.fails = True
            with pytest.raises(ValueError, match="on purpose"):
                model(torch.ones(2, WIDTH, dtype=torch.float64))
            model.fails = False
            for unit in {unit_of(m) for m in model.modules()} - {None}:
                assert unit.handle.is_sharded

    for how in (by_policy, around, across):
        check_parity(ctx, Model, make_input, steps=3, shard=how, before_step=fail_first)


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


@ranks(1, 2, 3)
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


@contextlib.contextmanager
def torch_collectives() -> Iterator[list[tuple[str, int]]]:
    """The collectives that FSDP2 issues, with the number of elements of the whole."""
    found: list[tuple[str, int]] = []
    names = (_torch.ALL_GATHER, _torch.REDUCE_SCATTER)
    originals = [getattr(dist, name) for name in names]

    def noted(name: str, original: Any, output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append((name.split("_")[0], max(output.numel(), input.numel())))
        return original(output, input, *args, **kwargs)

    for name, original in zip(names, originals, strict=True):
        setattr(dist, name, lambda *a, _n=name, _o=original, **k: noted(_n, _o, *a, **k))
    try:
        yield found
    finally:
        for name, original in zip(names, originals, strict=True):
            setattr(dist, name, original)


def as_fsdp2(ctx, pair: str) -> None:
    mesh = ctx.device_mesh((ctx.world_size,), ("dp",))
    theirs = Model()
    members = [theirs.norm if pair == "norm" else theirs.embed, theirs.head]
    for block in theirs.blocks:
        torch_fully_shard(block, mesh=mesh)
    torch_fully_shard(members, mesh=mesh)
    torch_fully_shard(theirs, mesh=mesh)
    ours = Model()
    for block in ours.blocks:
        flatshard.fsdp2.fully_shard(block, mesh=mesh)
    flatshard.fsdp2.fully_shard([ours.norm if pair == "norm" else ours.embed, ours.head], mesh=mesh)
    flatshard.fsdp2.fully_shard(ours, mesh=mesh)
    x = torch.ones(2, WIDTH)
    with torch_collectives() as expected:
        theirs(x).sum().backward()
        del expected[:]
        theirs(x).sum().backward()
    train(ours, x)
    sizes = {
        unit.fqn or "<root>": sum(flat.layout.numel for flat in unit.handle.flats)
        for unit in {unit_of(m): None for m in ours.modules() if unit_of(m) is not None}
    }
    lines = [line.split(maxsplit=1) for line in train(ours, x)]
    for kind, verb in (("all", "all-gather"), ("reduce", "reduce-scatter")):
        mine = [sizes[unit] for first, unit in lines if first == verb]
        other = [numel for each, numel in expected if each == kind]
        if kind == "reduce":  # units whose inputs have no gradient: FSDP2 reduces them last, in module order
            mine, other = sorted(mine), sorted(other)
        assert mine == other, (kind, lines, expected)
    ours.head.set_requires_gradient_sync(False)
    assert not unit_of(ours.head).handle.gradients.reduces


def test_the_same_collectives_as_fsdp2(pool):
    for pair in ("norm", "embed"):
        pool.run(as_fsdp2, pair, world_size=4)


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
    assert [u.fqn for u in flatshard.describe(model).units] == ["", "blocks.0", "blocks.1", "norm, head"]
    assert flatshard.describe(model).units[-1].module == "LayerNorm, Linear"
    assert [i.fqn for f in unit.handle.flats for i in f.layout.params] == ["norm.weight", "norm.bias", "head.weight"]
    assert list(model.state_dict()) == list(Model().state_dict())
    outer = nn.Sequential(model, nn.Linear(2, 2))
    fully_shard(outer)
    assert unit.fqn == "0.norm, 0.head"
    assert flatshard.tensors.shard_info(model.head.weight).fqn == "0.head.weight"
    assert "'0.norm, 0.head', LayerNorm, Linear" in repr(unit)
    other = Model()
    fully_shard(other, policy={Block, (other.norm, other.head)})
    assert [u.fqn for u in flatshard.describe(other).units] == ["", "blocks.0", "blocks.1", "norm, head"]
    assert [f for flat in flatshard.describe(other).units[3].flats for f in flat.fqns] == [
        "norm.weight",
        "norm.bias",
        "head.weight",
    ]
    one = Model()
    fully_shard([one.norm])
    assert unit_of(one.norm).module is one.norm


@ranks(2)
def test_verbs(ctx):
    torch.manual_seed(0)
    plain = Model()
    model = by_policy(copy.deepcopy(plain), ctx.group)
    with flatshard.summon_full_params(model.norm):
        torch.testing.assert_close(model.head.weight, plain.head.weight)
    flatshard.unshard(model.head)
    assert model.norm.weight.shape == (WIDTH,)
    flatshard.reshard(model.norm)
    copied = copy.deepcopy(model)
    assert unit_of(copied.norm) is unit_of(copied.head) is not unit_of(model.norm)
    alone = copy.deepcopy(model.norm)
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(alone(x), plain.norm(x))
    called: list[nn.Module] = []
    for each in (model, copied):
        seen = flatshard.optim.register_gradients_reduced_hook(each.head, called.append)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(x).sum().backward()
        optimizer.step()
        assert called == [each.head]
        called.clear()
        seen.remove()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(x).sum().backward()
    optimizer.step()
    for each in (model, copied):
        check_same_params(each, plain, rtol=1e-5)
    with torch.no_grad(), flatshard.keep_unsharded(model):
        torch.testing.assert_close(model(x), plain(x))
    check_clean(model)
    whole = flatshard.checkpoint.full_state_dict(model)
    fresh = around(Model(), ctx.group)
    fresh.load_state_dict(whole)
    torch.testing.assert_close(fresh(x), plain(x))


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
