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


def groups(model: nn.Module, decays: Callable[[torch.Tensor], bool]) -> list[dict[str, Any]]:
    no_decay = [p for p in model.parameters() if not decays(p)]
    decay = [p for p in model.parameters() if decays(p)]
    return [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": 0.1}]


RULES: dict[str, Callable[[nn.Module], Any]] = {
    "ndim": lambda model: groups(model, lambda p: p.ndim > 1),  # that of the whole; timm's param_groups_weight_decay
    "shape": lambda model: groups(model, lambda p: len(p.shape) > 1),
    "dim": lambda model: groups(model, lambda p: p.dim() > 1)[::-1],  # nanoGPT, which has the other order
    "no empty groups": lambda model: [each for each in RULES["shape"](model) if each["params"]],
    "full_shape": lambda model: groups(model, lambda p: len(flatshard.full_shape(p)) > 1),
    "one group": lambda model: model.parameters(),
}


@ranks(2)
def test_rules_by_dimension(ctx) -> None:
    for rule, layout, strategy, made_before, told in (
        ("ndim", None, "FULL_SHARD", False, None),
        ("shape", None, "FULL_SHARD", False, RuntimeError),
        ("dim", None, "SHARD_GRAD_OP", False, RuntimeError),
        ("no empty groups", None, "FULL_SHARD", False, UserWarning),
        ("full_shape", None, "FULL_SHARD", False, None),
        ("one group", None, "FULL_SHARD", False, None),
        ("shape", Rows(max_padding=1.0), "FULL_SHARD", False, None),
        ("shape", None, "NO_SHARD", False, None),
        ("shape", None, "FULL_SHARD", True, None),
    ):
        ctx.note(f"{rule} {layout} {strategy} {made_before}")
        model = Net()
        made = RULES[rule](model) if made_before else None
        where = {"process_group": ctx.group, "layout": layout, "strategy": ShardingStrategy[strategy]}
        fully_shard(model, policy={Block}, **where)
        optimizer = torch.optim.AdamW(made or RULES[rule](model))
        model(torch.ones(2, 4)).sum().backward()
        if told is RuntimeError:
            before = [p.detach().clone() for p in model.parameters()]
            match = r"in one group, with weight_decay=0.0: .*full_shape.*leave the empty"
            for _ in range(2):
                with pytest.raises(RuntimeError, match=match):
                    optimizer.step()
            assert all(map(torch.equal, before, model.parameters()))
            optimizer = torch.optim.AdamW(RULES["full_shape"](model))  # as the message says
        if rule == "ndim":
            dims = [{len(flatshard.full_shape(p)) for p in group["params"]} for group in optimizer.param_groups]
            assert dims == [{1}, {2}]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                optimizer.step()
        found = [str(w.message) for w in caught if "full_shape" in str(w.message)]
        assert len(found) == (told is UserWarning), found
        if found:
            assert "in one group, with weight_decay=0.0: matrices such as 'front.weight', " in found[0]
            assert caught[0].filename == __file__
