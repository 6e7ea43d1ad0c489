"""A sharded model that is dropped is freed: its cycles run through Python alone, where the collector sees them."""

import copy
import gc
import weakref
from typing import Any

import torch
from on_ranks import ranks
from torch import nn

import flatshard
from flatshard._composable.state import unit_of


def make_and_train(group: Any, copied: bool, last: str) -> list[weakref.ref]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8))
    flatshard.fully_shard(model, policy={nn.Linear}, process_group=group)
    model(torch.randn(2, 8)).sum().backward()
    model = copy.deepcopy(model) if copied else model
    out = model(torch.randn(2, 8))  # which leaves records of what a backward would need
    if last == "backward":
        out.sum().backward()
    unit = unit_of(model[0])
    return [weakref.ref(x) for x in (model, model[0], unit, unit.handle, unit.handle.flats[0])]


@ranks(2)
def test_dropped_models_are_freed(ctx):
    for copied, last in ((False, "backward"), (True, "backward"), (False, "forward")):
        references = make_and_train(ctx.group, copied, last)
        gc.collect()
        assert [r() for r in references] == [None] * len(references)


def test_a_skipped_unit_keeps_no_tensors(fake_group):
    """Nor a forward's frame: what passed through is freed with the graph, not by the collector, which may come late."""
    model = flatshard.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), policy={nn.Linear})
    gc.collect()
    gc.disable()
    try:
        for is_training in (True, False):
            x = torch.ones(2, 8)
            reference = weakref.ref(x)
            with torch.set_grad_enabled(is_training):
                result = flatshard.skip(model, x)
            if is_training:
                result.sum().backward()
            del x, result
            assert reference() is None
    finally:
        gc.enable()
