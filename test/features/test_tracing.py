"""``torch.export``, ``torch.jit.trace``, ``torch.fx``, ``torch.compile(fullgraph=True)``: the error says what works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Block, Net
from on_ranks import ranks
from torch import nn

import flatshard
from flatshard import fully_shard

X = torch.ones(2, 4)


def export(model: nn.Module) -> Any:
    return torch.export.export(model, (X,)).module()


def trace(model: nn.Module) -> Any:
    return torch.jit.trace(model, (X,))


@ranks(2)
def test_tracers(ctx):
    """Refused while parameters are sharded, and each cure works."""
    torch.manual_seed(0)
    plain = Net()
    model = Net()
    model.load_state_dict(plain.state_dict())
    fully_shard(model, policy={Block}, process_group=ctx.group)
    for tracer, message in (
        (
            export,
            r"If torch\.export did it: export a new model that has the values of flatshard\.c",
        ),
        (trace, r"torch\.jit\.trace cannot trace a sharded module: unit .* Trace a new model that is not sharded"),
        (torch.fx.symbolic_trace, r"torch\.fx cannot trace a sharded module: parameter 'front\.weight' .* Trace a new"),
    ):
        with pytest.raises(RuntimeError, match=message):
            tracer(model)(X)
        assert torch.equal(model(X), plain(X))  # nothing is left of it
        model(X).sum().backward()
        new = Net()
        new.load_state_dict(flatshard.checkpoint.full_state_dict(model))
        assert torch.equal(tracer(new)(X), plain(X))
    with flatshard.summon_full_params(model), torch.no_grad():
        with pytest.raises(RuntimeError, match=r"torch\.export cannot trace a sharded module: unit '.*' is gathered"):
            export(model)
        assert torch.equal(torch.fx.symbolic_trace(model)(X), plain(X))
    assert torch.equal(model(X), plain(X))


@ranks(2)
def test_one_graph_over_units(ctx):
    torch.manual_seed(0)
    plain = Net()
    for omit in (False, True):
        model = Net()
        model.load_state_dict(plain.state_dict())
        fully_shard(model, policy={Block}, process_group=ctx.group)
        message = r"flatshard gathers a unit around its forward, .*block\.compile\(fullgraph=True"
        with pytest.raises(RuntimeError, match=message):
            torch.compile(model, fullgraph=True, backend="eager")(X)
        if omit:
            assert torch.equal(torch.compile(model, backend="eager")(X), plain(X))
        else:
            for block in model.blocks:
                block.compile(fullgraph=True, backend="eager")
            assert torch.equal(model(X), plain(X))
        model(X).sum().backward()
