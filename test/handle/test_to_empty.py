"""``module.to_empty()`` after ``fully_shard``: it would throw the values away."""

from __future__ import annotations

import copy

import pytest
import torch
from models import Block, Net
from on_ranks import ranks
from torch import nn

from flatshard import fully_shard


@ranks(2)
def test_to_empty(ctx) -> None:
    torch.manual_seed(0)
    model = fully_shard(Net(), policy={Block}, process_group=ctx.group)
    around = nn.Sequential(nn.Linear(4, 4), model)
    before = copy.deepcopy({n: p.detach() for n, p in around.named_parameters()})
    addresses = [p.data_ptr() for p in around.parameters()]
    for module in (model, model.blocks[0].linear, around):
        with pytest.raises(
            RuntimeError, match=r"'.*weight' is sharded and has its values, which to_empty.*module.to\(device\)"
        ):
            module.to_empty(device="cpu")
    assert [p.data_ptr() for p in around.parameters()][2:] == addresses[2:]
    assert all(torch.equal(before[n], p) for n, p in list(around.named_parameters())[2:])
    model(torch.ones(2, 4)).sum().backward()
    model.double().to("cpu")  # others that move all parameters
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # by assignments of new parameters
    try:
        with pytest.raises(RuntimeError, match="which to_empty"):
            model.to_empty(device="cpu")
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


@ranks(2)
def test_to_meta(ctx) -> None:
    model = fully_shard(Net(), policy={Block}, process_group=ctx.group)
    model.to("meta")
    with pytest.raises(RuntimeError, match=r"parameter '.*weight' was moved to the meta device after fully_shard"):
        model(torch.ones(2, 4))
