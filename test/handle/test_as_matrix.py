"""A parameter of which this rank has a 1-D part, used as the matrix that it is: outside of forward this raises."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatshard
from flatshard import ShardingStrategy, fully_shard, layouts


def _assign(w: Tensor) -> None:
    w[3] = 0


USES: dict[str, Callable[[Tensor], object]] = {
    "`@`": lambda w: w @ w,
    "`@` on the right": lambda w: torch.ones(4, 4) @ w,
    "matmul": lambda w: w.matmul(torch.ones(4)),
    "mm": lambda w: w.mm(torch.ones(4, 4)),
    "mv": lambda w: w.mv(torch.ones(4)),
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "H": lambda w: w.H,
    "mH": lambda w: w.mH,
    "transpose": lambda w: w.transpose(0, -1),
    "permute": lambda w: w.permute(-1, *range(w.dim() - 1)),
    "[...]": lambda w: w[0],
    "[...] = ...": _assign,
}


@torch.no_grad()
def run_uses(ctx) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4), process_group=ctx.group)
    before = model.weight.detach().clone()
    for name, use in USES.items():
        ctx.note(name)
        with pytest.raises(
            RuntimeError, match=r"'weight' is sharded: .*of shape \(4, 4\).*summon_full_params\(module\)"
        ):
            use(model.weight)
        with flatshard.summon_full_params(model):
            use(model.weight)
        if name == "[...] = ...":
            before = model.weight.detach().clone()
            assert ctx.rank != 1 or not before[4:].any()  # the third row, which is in the second rank's part
        assert torch.equal(model.weight, before)
    with pytest.raises(RuntimeError, match=r"'bias' is sharded: .*of shape \(4,\)"):
        model.bias[0] = 1  # another element on each rank
    assert model.bias.T.shape == model.bias.shape  # of a vector right
    for arguments in ({"layout": flatshard.layouts.Rows()}, {"strategy": ShardingStrategy.NO_SHARD}):
        model = fully_shard(nn.Linear(4, 4), process_group=ctx.group, **arguments)
        rows = model.weight.shape[0]
        assert model.weight[rows - 1].shape == (4,)
        assert (torch.ones(2, 4) @ model.weight.T).shape == (2, rows)


def test_uses(pool):
    pool.run(run_uses, world_size=2)


def run_vector(ctx, layout: Any) -> None:
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


@pytest.mark.parametrize("layout", [None, layouts.Rows(), layouts.Whole(math.inf)], ids=["elements", "rows", "whole"])
def test_parameters_from_a_vector(pool, layout: Any):
    pool.run(run_vector, layout, world_size=2)


def run_merge(ctx) -> None:
    """What peft's ``merge_adapter`` does."""
    a, b = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
    model = fully_shard(nn.Sequential(a, b), process_group=ctx.group)
    with pytest.raises(RuntimeError, match=r"'1.weight' is sharded: .*of shape \(6, 2\)"):
        b.weight @ a.weight
    with flatshard.summon_full_params(model, writeback=False):
        assert (b.weight @ a.weight).shape == (6, 6)


def test_merging_adapters(pool):
    pool.run(run_merge, world_size=2)


INITIALISERS: dict[str, Callable[[Tensor], object]] = {
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "eye_": nn.init.eye_,
    "sparse_": lambda p: nn.init.sparse_(p, 0.5),
}


def initialise(ctx) -> None:
    """Those that compute from the shape are refused, before they change anything; on whole parameters all work."""
    for layout in (None, flatshard.layouts.Rows()):
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


def test_initialisers_of_a_part(pool):
    pool.run(initialise, world_size=2)
