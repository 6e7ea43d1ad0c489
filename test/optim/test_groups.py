"""Groups made by the dimensions of parameters: after sharding, parts of matrices are 1-D."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Block, Net
from on_ranks import ranks
from torch import nn

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard.layouts import Rows


def by_ndim(model: nn.Module) -> Any:
    """As ``timm.optim.param_groups_weight_decay``: ``ndim`` is that of the whole."""
    return _groups(model, lambda p: p.ndim > 1)


def by_shape(model: nn.Module) -> Any:
    return _groups(model, lambda p: len(p.shape) > 1)


def _groups(model: nn.Module, decays: Callable[[torch.Tensor], bool]) -> Any:
    no_decay = [p for p in model.parameters() if not decays(p)]
    decay = [p for p in model.parameters() if decays(p)]
    return [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": 0.1}]


def by_dim(model: nn.Module) -> Any:
    """As nanoGPT, which has the other order."""
    return _groups(model, lambda p: p.dim() > 1)[::-1]


def without_empty_groups(model: nn.Module) -> Any:
    return [each for each in by_shape(model) if each["params"]]


def by_full_shape(model: nn.Module) -> Any:
    matrices = [p for p in model.parameters() if len(flatshard.full_shape(p)) > 1]
    vectors = [p for p in model.parameters() if len(flatshard.full_shape(p)) < 2]
    return [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]


def one_group(model: nn.Module) -> Any:
    return model.parameters()


@ranks(2)
def test_rules_by_dimension(ctx) -> None:
    for rule, layout, strategy, before, told in (
        (by_ndim, None, "FULL_SHARD", False, None),
        (by_shape, None, "FULL_SHARD", False, RuntimeError),
        (by_dim, None, "SHARD_GRAD_OP", False, RuntimeError),
        (without_empty_groups, None, "FULL_SHARD", False, UserWarning),
        (by_full_shape, None, "FULL_SHARD", False, None),
        (one_group, None, "FULL_SHARD", False, None),
        (by_shape, Rows(max_padding=1.0), "FULL_SHARD", False, None),
        (by_shape, None, "NO_SHARD", False, None),
        (by_shape, None, "FULL_SHARD", True, None),
    ):
        ctx.note(f"{rule.__name__} {layout} {strategy} {before}")
        model = Net()
        groups = rule(model) if before else None
        fully_shard(
            model, policy={Block}, process_group=ctx.group, layout=layout, strategy=getattr(ShardingStrategy, strategy)
        )
        optimizer = torch.optim.AdamW(groups or rule(model))
        model(torch.ones(2, 4)).sum().backward()
        if told is RuntimeError:
            before = [p.detach().clone() for p in model.parameters()]
            for _ in range(2):
                with pytest.raises(
                    RuntimeError, match=r"in one group, with weight_decay=0.0: .*full_shape.*leave the empty"
                ):
                    optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            optimizer = torch.optim.AdamW(by_full_shape(model))  # as the message says
        if rule is by_ndim:
            vectors, matrices = (group["params"] for group in optimizer.param_groups)
            assert {len(flatshard.full_shape(p)) for p in vectors} == {1}
            assert {len(flatshard.full_shape(p)) for p in matrices} == {2}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
            optimizer.step()
        found = [str(w.message) for w in caught if "full_shape" in str(w.message)]
        assert len(found) == (told is UserWarning), found
        if found:
            assert "in one group, with weight_decay=0.0: matrices such as 'front.weight', " in found[0]
            assert caught[0].filename == __file__
