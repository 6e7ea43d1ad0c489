"""Groups made by the dimensions of parameters: after sharding, parts of matrices are 1-D."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from models import Block, Net
from torch import nn

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard.layouts import Rows


def by_timm(model: nn.Module) -> Any:
    """As ``timm.optim.param_groups_weight_decay``."""
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    decay = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": 0.1}]


def by_nanogpt(model: nn.Module) -> Any:
    return by_timm(model)[::-1]


def without_empty_groups(model: nn.Module) -> Any:
    return [each for each in by_timm(model) if each["params"]]


def by_full_shape(model: nn.Module) -> Any:
    matrices = [p for p in model.parameters() if len(flatshard.full_shape(p)) > 1]
    vectors = [p for p in model.parameters() if len(flatshard.full_shape(p)) < 2]
    return [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]


def one_group(model: nn.Module) -> Any:
    return model.parameters()


def run_groups(ctx) -> None:
    for rule, layout, strategy, before, warns in (
        (by_timm, None, "FULL_SHARD", False, True),
        (by_nanogpt, None, "SHARD_GRAD_OP", False, True),
        (without_empty_groups, None, "FULL_SHARD", False, True),
        (by_full_shape, None, "FULL_SHARD", False, False),
        (one_group, None, "FULL_SHARD", False, False),
        (by_timm, Rows(max_padding=1.0), "FULL_SHARD", False, False),
        (by_timm, None, "NO_SHARD", False, False),
        (by_timm, None, "FULL_SHARD", True, False),
    ):
        ctx.note(f"{rule.__name__} {layout} {strategy} {before}")
        model = Net()
        groups = rule(model) if before else None
        fully_shard(
            model, policy={Block}, process_group=ctx.group, layout=layout, strategy=getattr(ShardingStrategy, strategy)
        )
        optimizer = torch.optim.AdamW(groups or rule(model))
        model(torch.ones(2, 4)).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
            optimizer.step()
        told = [str(w.message) for w in caught if "full_shape" in str(w.message)]
        assert len(told) == warns, told
        if warns:
            assert "in one group, with weight_decay=0.0: matrices such as 'front.weight', " in told[0]
            assert caught[0].filename == __file__


def test_rules_by_dimension(pool):
    pool.run(run_groups, world_size=2)
