"""Prefetching set by the user: chosen modules in place of the recorded order, and a limit in bytes.

The orders are text, as in ``test_order.py``: accept a wanted change with ``EXPECTTEST_ACCEPT=1``, and read the diff.
"""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from event_lines import as_text, same_everywhere, sharded, train
from expecttest import assert_expected_inline
from models import Block, Net
from on_ranks import ranks
from torch import nn

from flatshard import BackwardPrefetch, configure, fully_shard
from flatshard._composable.state import unit_of


def last_step(model: nn.Module) -> list[str]:
    return [train(model), train(model)][1]


class Follower(nn.Module):
    """A teacher that follows its student, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Block(), Block().requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.student(x)
        self.follow()
        return y - self.teacher(x).detach()


@ranks(2)
def test_what_changes_in_a_forward_is_not_gathered_before(ctx):
    """A unit is no longer prefetched once a step has shown that forward changes it."""
    model = sharded(ctx, Follower())
    columns = [train(model) for _ in range(3)]
    gathers = [[e for e in c[: c.index("-- backward")] if "gather" in e] for c in columns]
    once = ["all-gather student", "all-gather teacher"]
    assert gathers == [once, [*once, "all-gather teacher"], once]
    assert columns[2].index("reshard student") < columns[2].index("all-gather teacher")


def chosen(ctx) -> list[list[str]]:
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
    model = sharded(ctx, Net(), backward_prefetch=BackwardPrefetch.BACKWARD_POST)
    configure(model.blocks[2], backward_prefetch=[model.blocks[1], model.blocks[0]])
    configure(model.blocks[1], backward_prefetch=[])
    post = last_step(model)
    return [*(c[: c.index("-- backward")] for c in (far, one)), post[post.index("-- backward") :]]


def test_chosen_modules(pool):
    """``BACKWARD_POST`` also sets the time at which chosen modules are gathered."""
    heads = "root: 0, 1; 0: 2; 1: none", "only 0: 1", "POST, 2: 1, 0; 1: none"
    columns = same_everywhere(pool.run(chosen))
    assert_expected_inline(
        as_text([[head, *column] for head, column in zip(heads, columns, strict=True)]),
        """\
root: 0, 1; 0: 2; 1: none  only 0: 1                  POST, 2: 1, 0; 1: none
all-gather <root>          all-gather <root>          -- backward
all-gather blocks.0        all-gather blocks.0        all-gather blocks.2
all-gather blocks.1        all-gather blocks.1        reshard blocks.2
all-gather blocks.2        reshard blocks.0           reduce-scatter blocks.2
reshard blocks.0           reshard blocks.1           all-gather blocks.1
reshard blocks.1           all-gather blocks.2        all-gather blocks.0
reshard blocks.2           reshard blocks.2           reshard blocks.1
                                                      reduce-scatter blocks.1
                                                      reshard blocks.0
                                                      reduce-scatter blocks.0
                                                      reshard <root>
                                                      reduce-scatter <root>""",
    )


def limited(ctx) -> list[list[str]]:
    columns, size = [], 0
    for blocks in (None, 2, 1, 0):
        model = sharded(ctx, Net(), prefetch_limit_bytes=None if blocks is None else blocks * size)
        size = unit_of(model.blocks[0]).handle.memory.nbytes
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


@pytest.mark.parametrize("name", ["forward_prefetch", "backward_prefetch"])
def test_misuse(fake_group, name):
    model = fully_shard(Net(), policy=Block)
    elsewhere = fully_shard(Net(), process_group=dist.new_group([0]))
    configure(model, **{name: [model.blocks[0]]})
    for chosen, message in (
        (model.blocks[0].linear, r"this Linear is part of unit 'blocks\.0', and not a unit itself"),
        (model.blocks, r"this ModuleList is not a unit, but contains units: 'blocks\.0', 'blocks\.1'"),
        (model, "unit '<root>' cannot be prefetched for itself"),
        (elsewhere, "'<root>' is on another process group or device than '<root>'"),
        ("blocks.1", "takes an nn.Module, got a str"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            configure(model, **{name: [chosen]})
    unit = unit_of(model)
    assert [u for c in (unit.forward_targets, unit.backward_targets) if c for u in c] == [unit_of(model.blocks[0])]


def test_chosen_units_of_a_copy_and_of_a_model_that_is_gone(fake_group):
    """A copy gathers in the recorded order. A list keeps no other model alive."""
    model, outside = fully_shard(Net(3), policy=Block), fully_shard(Net())
    configure(model, forward_prefetch=[model.blocks[1], outside, model.blocks[0]])
    copied = copy.deepcopy(model)
    assert unit_of(copied).forward_targets is None
    gone = weakref.ref(outside)
    del outside
    gc.collect()
    assert gone() is None
    assert [u.module for u in unit_of(model).forward_targets] == [model.blocks[1], model.blocks[0]]
    train(copied)
