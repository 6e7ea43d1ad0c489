"""A parameter of which this rank has a 1-D part, used as the matrix that it is: outside of forward this raises."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import ranks
from torch import Tensor, nn

import flatshard
from flatshard import fully_shard, layouts
from flatshard.layouts import Rows


@pytest.mark.parametrize("layout", [None, layouts.Rows(), layouts.Whole(math.inf)], ids=["elements", "rows", "whole"])
@ranks(2)
def test_parameters_from_a_vector(ctx, layout: Any) -> None:
    """A vector of whole parameters has other elements at the places of this rank's."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4), process_group=ctx.group, layout=layout)
    with flatshard.summon_full_params(model):
        whole = nn.utils.parameters_to_vector(model.parameters()).detach() + 1
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"'weight' is sharded: .*'cat' needs the whole"):
        nn.utils.parameters_to_vector(model.parameters())
    for vector in (whole, torch.ones(sum(p.numel() for p in model.parameters()))):
        with pytest.raises(RuntimeError, match=r"'weight' is sharded: .*'vector_to_parameters' needs the whole"):
            nn.utils.vector_to_parameters(vector, model.parameters())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    with flatshard.summon_full_params(model):
        nn.utils.vector_to_parameters(whole, model.parameters())
    with flatshard.summon_full_params(model):
        assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), whole)


INITIALISERS: dict[str, Callable[[Tensor], object]] = {
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "eye_": nn.init.eye_,
    "sparse_": lambda p: nn.init.sparse_(p, 0.5),
}


@ranks(2)
def test_initialisers_of_a_part(ctx) -> None:
    """Those that compute from the shape are refused, before they change anything; on whole parameters all work."""
    for layout in (None, Rows()):
        for name, initialiser in INITIALISERS.items():
            torch.manual_seed(0)
            plain, model = nn.Linear(6, 4), nn.Linear(6, 4)
            fully_shard(model, process_group=ctx.group, **({} if layout is None else {"layout": layout}))
            before = model.weight.detach().clone()
            with pytest.raises(
                RuntimeError, match=r"'weight' is sharded: .* of shape \(4, 6\).*summon_full_params"
            ) as e:
                initialiser(model.weight)
            assert "needs the whole" in str(e.value), name
            assert model.weight.equal(before), name
            torch.manual_seed(1)
            initialiser(plain.weight)
            with flatshard.summon_full_params(model):
                torch.manual_seed(1)
                initialiser(model.weight)
            assert flatshard.checkpoint.full_state_dict(model)["weight"].equal(plain.weight), name
            nn.init.constant_(model.weight, 2.0)
            nn.init.normal_(model.weight)
            assert model.weight.ndim == 2
            assert model.weight.dim() == len(model.weight.shape)
