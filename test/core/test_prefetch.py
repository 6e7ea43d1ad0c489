"""Prefetching as the user says: chosen modules in place of the recorded order, and a limit in bytes.

The orders are text, as in ``test_order.py``: accept a wanted change with ``EXPECTTEST_ACCEPT=1``, and read the diff.
"""

from __future__ import annotations

import copy
import gc
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from event_lines import as_text, same_everywhere, sharded, train
from expecttest import assert_expected_inline
from models import Block, Net
from on_ranks import ranks
from torch import nn

from flatshard import BackwardPrefetch, CustomPolicy, configure, fully_shard, keep_unsharded
from flatshard._composable.find import units_below
from flatshard._composable.state import unit_of
from flatshard._trace import record_events

BLOCK_BYTES = 48  # a block's 20 floats over 2 ranks: so small a shard is a multiple of 16 bytes
assert BLOCK_BYTES * 2 >= 20 * 4


def steps(model: nn.Module, count: int = 2) -> list[list[str]]:
    return [train(model) for _ in range(count)]


def last_step(model: nn.Module) -> list[str]:
    return steps(model)[-1]


# -- Units that change inside a pass -----------------------------------------------------------------------------------


class Follower(nn.Module):
    """A teacher that follows its student, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Block(), Block().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.student(x)
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.lerp_(theirs, 0.5)
            target = self.teacher(x)
        return y - target


@ranks(2)
def test_what_changes_in_a_forward_is_not_gathered_before(ctx):
    """Once a step has shown that it changes."""
    first, *later = steps(sharded(ctx, Follower()), 3)
    gathers = [[e for e in c[: c.index("-- backward")] if "gather" in e] for c in (first, *later)]
    once = ["all-gather student", "all-gather teacher"]
    assert gathers == [once, [*once, "all-gather teacher"], once]
    assert later[1].index("reshard student") < later[1].index("all-gather teacher")


# -- Chosen modules ----------------------------------------------------------------------------------------------------


def chosen_forward(ctx) -> list[list[str]]:
    model = sharded(ctx, Net())
    plain = last_step(model)
    configure(model, forward_prefetch=[model.blocks[0], model.blocks[1]])
    configure(model.blocks[0], forward_prefetch=[model.blocks[2]])
    configure(model.blocks[1], forward_prefetch=[])
    far = last_step(model)
    for module in (model, *model.blocks):
        configure(module, forward_prefetch=True)
    assert last_step(model) == plain
    model = sharded(ctx, Net(), forward_prefetch=False)
    configure(model.blocks[0], forward_prefetch=[model.blocks[1]])
    one = train(model)  # nothing is recorded yet
    return [c[: c.index("-- backward")] for c in (far, one)]


def test_forward(pool):
    far, one = same_everywhere(pool.run(chosen_forward))
    assert_expected_inline(
        as_text([["root: 0, 1; 0: 2; 1: none", *far], ["only 0: 1", *one]]),
        """\
root: 0, 1; 0: 2; 1: none  only 0: 1
all-gather <root>          all-gather <root>
all-gather blocks.0        all-gather blocks.0
all-gather blocks.1        all-gather blocks.1
all-gather blocks.2        reshard blocks.0
reshard blocks.0           reshard blocks.1
reshard blocks.1           all-gather blocks.2
reshard blocks.2           reshard blocks.2""",
    )


def chosen_backward(ctx) -> list[list[str]]:
    columns = []
    for prefetch in (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None):
        model = sharded(ctx, Net(), backward_prefetch=prefetch)
        configure(model.blocks[2], backward_prefetch=[model.blocks[1], model.blocks[0]])
        configure(model.blocks[1], backward_prefetch=[])
        column = last_step(model)
        columns.append(column[column.index("-- backward") :])
    return columns


def test_backward(pool):
    pre, post, none = same_everywhere(pool.run(chosen_backward))
    assert_expected_inline(
        as_text([["BACKWARD_PRE", *pre], ["POST", *post], ["None", *none]]),
        """\
BACKWARD_PRE             POST                     None
-- backward              -- backward              -- backward
all-gather blocks.2      all-gather blocks.2      all-gather blocks.2
all-gather blocks.1      reshard blocks.2         all-gather blocks.1
all-gather blocks.0      reduce-scatter blocks.2  all-gather blocks.0
reshard blocks.2         all-gather blocks.1      reshard blocks.2
reduce-scatter blocks.2  all-gather blocks.0      reduce-scatter blocks.2
reshard blocks.1         reshard blocks.1         reshard blocks.1
reduce-scatter blocks.1  reduce-scatter blocks.1  reduce-scatter blocks.1
reshard blocks.0         reshard blocks.0         reshard blocks.0
reduce-scatter blocks.0  reduce-scatter blocks.0  reduce-scatter blocks.0
reshard <root>           reshard <root>           reshard <root>
reduce-scatter <root>    reduce-scatter <root>    reduce-scatter <root>""",
    )


# -- A limit in bytes --------------------------------------------------------------------------------------------------


def limited(ctx) -> list[list[str]]:
    columns = []
    size = None
    for blocks in (None, 2, 1, 0):
        model = sharded(ctx, Net(), prefetch_limit_bytes=None if blocks is None else blocks * (size or 0) + 1)
        size = unit_of(model.blocks[0]).handle.unsharded_nbytes
        assert size == sum(b.layout.padded_numel * 4 for b in unit_of(model.blocks[0]).handle.flats)
        for module in (model, *model.blocks):
            configure(module, forward_prefetch=[b for b in model.blocks if b is not module])
            configure(module, backward_prefetch=[b for b in reversed(model.blocks) if b is not module])
        columns.append([f"-- limit: {blocks} blocks", *last_step(model)])
    return columns


def test_limit(pool):
    columns = same_everywhere(pool.run(limited))
    assert_expected_inline(
        as_text(columns, "all-gather"),
        """\
-- limit: None blocks  -- limit: 2 blocks     -- limit: 1 blocks     -- limit: 0 blocks
all-gather <root>      all-gather <root>      all-gather <root>      all-gather <root>
all-gather blocks.0    all-gather blocks.0    all-gather blocks.0    all-gather blocks.0
all-gather blocks.1    all-gather blocks.1    all-gather blocks.1    all-gather blocks.1
all-gather blocks.2    all-gather blocks.2    all-gather blocks.0    all-gather blocks.2
all-gather blocks.0    all-gather blocks.0    all-gather blocks.2    -- backward
all-gather blocks.1    all-gather blocks.1    -- backward            all-gather blocks.2
-- backward            -- backward            all-gather blocks.2    all-gather blocks.1
all-gather blocks.2    all-gather blocks.2    all-gather blocks.1    all-gather blocks.0
all-gather blocks.1    all-gather blocks.1    all-gather blocks.0
all-gather blocks.0    all-gather blocks.0""",
    )


@ranks(2)
def test_limit_of_one_unit(ctx):
    """The limit is what may be ahead, not what must stay below it; and the policy may give each unit one of its own."""
    size = 2 * BLOCK_BYTES
    policy = CustomPolicy(lambda m: isinstance(m, Block) and {"prefetch_limit_bytes": size})
    model = sharded(ctx, Net(), policy)
    assert unit_of(model).config.prefetch_limit_bytes is None
    assert unit_of(model.blocks[0]).handle.unsharded_nbytes == size
    assert last_step(model) == last_step(sharded(ctx, Net()))
    policy = CustomPolicy(lambda m: isinstance(m, Block) and {"prefetch_limit_bytes": size - 1})
    model = sharded(ctx, Net(), policy, forward_prefetch=True)
    none = sharded(ctx, Net(), forward_prefetch=False, backward_prefetch=None)
    configure(none, backward_prefetch=[none.blocks[2]])  # only the root, which has no limit, still gathers ahead
    steps(model)
    got, expected = last_step(model), last_step(none)
    assert [e for e in got if "all-gather" in e] == [e for e in expected if "all-gather" in e]


# -- Misuse, copies, lifetime ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["forward_prefetch", "backward_prefetch"])
def test_misuse(fake_group, name):
    model, plain = fully_shard(Net(), policy=Block), Net()
    elsewhere = fully_shard(Net(), process_group=dist.new_group([0]))
    configure(model, **{name: [model.blocks[0]]})
    linear, blocks = model.blocks[0].linear, model.blocks
    for module, chosen, kind, message in (
        (model, [linear], ValueError, r"this Linear is part of unit 'blocks\.0', and not a unit itself"),
        (model.front, [blocks[0]], ValueError, "this Linear is part of unit the root module, and not a unit itself"),
        (model, [plain], ValueError, "nothing in this Net is sharded; call fully_shard first"),
        (model, [blocks], ValueError, r"this ModuleList is not a unit, but contains units: 'blocks\.0', 'blocks\.1'"),
        (model, [blocks[1], model], ValueError, "unit '<root>' cannot be prefetched for itself"),
        (model, [elsewhere], ValueError, "'<root>' is on another process group or device than '<root>'"),
        (model, ["blocks.1"], TypeError, "takes an nn.Module, got a str"),
    ):
        with pytest.raises(kind, match=f"configure.*{message}" if chosen != [elsewhere] else message):
            configure(module, **{name: chosen})
    unit = unit_of(model)
    assert [u for c in (unit.forward_targets, unit.backward_targets) if c for u in c] == [unit_of(blocks[0])]


def test_deepcopy(fake_group):
    """Also of a long chain: a copy that followed it would exceed Python's recursion limit."""
    model, outside = fully_shard(Net(120), policy=Block), fully_shard(Net())
    for block, following in itertools.pairwise(model.blocks):
        configure(block, forward_prefetch=[following])
        configure(following, backward_prefetch=[block])
    configure(model, forward_prefetch=[model.blocks[1], outside, model.blocks[0]])
    copied = copy.deepcopy(copy.deepcopy(model))
    for each in (model, copied):
        assert [u.module for u in unit_of(each).forward_targets] == [each.blocks[1], outside, each.blocks[0]]
        for block, following in itertools.pairwise(each.blocks):
            assert [u.module for u in unit_of(block).forward_targets] == [following]
            assert [u.module for u in unit_of(following).backward_targets] == [block]
    gone = weakref.ref(outside)
    del outside
    gc.collect()
    assert gone() is None
    assert [u.module for u in unit_of(copied).forward_targets] == [copied.blocks[1], copied.blocks[0]]
    train(copied)


@ranks(2)
def test_what_is_kept_unsharded_is_gathered_ahead_once(ctx):
    model = sharded(ctx, Net())
    configure(model, forward_prefetch=list(model.blocks))
    train(model)
    events = []
    with keep_unsharded(model):
        for _ in range(2):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2)
            events += train(model)
    gathers = [e for e in events if e.startswith("all-gather")]
    assert sorted(gathers) == sorted(2 * ["all-gather <root>", *[f"all-gather blocks.{i}" for i in range(3)]])


def test_configured_for_all_units(fake_group):
    """Off, nothing is gathered ahead in either direction; on again, it is; a wrong value changes nothing."""
    model = fully_shard(Net(), policy=Block)
    train(model)
    ahead = []
    for forward, backward in ((False, None), (True, BackwardPrefetch.BACKWARD_PRE)):
        configure(model, forward_prefetch=forward, backward_prefetch=backward)
        with record_events() as events:
            train(model)
        first, second = events.index("all-gather blocks.1"), events.index("reshard blocks.0")
        again = [i for i, e in enumerate(events) if e == "all-gather blocks.0"][1]
        ahead.append((first < second, again < events.index("reduce-scatter blocks.1")))
    assert ahead == [(False, False), (True, True)]
    wrong = {"divide_factor": 0, "backward_prefetch": "later"}
    for name, value in wrong.items():
        with pytest.raises((TypeError, ValueError), match=name):
            configure(model, reshard_after_forward=False, **{name: value})
    assert all(unit.config.reshard_after_forward is None for unit in units_below(model))
